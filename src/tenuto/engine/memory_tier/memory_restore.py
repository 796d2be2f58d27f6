"""Resuming from what the processes before left in memory: one process by itself, or all ranks of a job, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.group import JobGroup
from tenuto.engine.memory_tier.eligibility import Candidate, EligibleImage, foreign, judge_line
from tenuto.engine.memory_tier.image_store import Image, check_image
from tenuto.engine.memory_tier.listing import kept_by_others, passed_over
from tenuto.engine.memory_tier.matched_image import MatchedImage, match_image, share_buffers
from tenuto.engine.memory_tier.seal import Seal, SealHolder
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.read.choose import Prepare, RestoreResult, Skipped, restore_checkpoint
from tenuto.engine.save.rank_group import RESTORE_TIMES, RankGroup
from tenuto.errors import (
    CorruptionError,
    NothingRestorable,
    RankFailed,
    ShardMismatch,
    StateError,
    StoreError,
    in_words,
    typed,
)
from tenuto.events import CandidateSkipped, Emitter, RestoredEvent, RestoredFromMemory, Warned
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import Json
from tenuto.ranks.contract import VoteResult
from tenuto.ranks.round import Round
from tenuto.record import record
from tenuto.repo.format.objects import checkpoint_json
from tenuto.repo.repository import Repo

UNFIT: Final = "unfit: "
LACKING: Final = "lacking: "

RestoreImage = Callable[[Prepare, bool], tuple[Candidate, RestoreResult] | None]
"""Restores one image; None, on all ranks, where it is damaged on one, which is reported. With True it peeks: every byte
is verified, and what says that it was restored is left unsaid."""
Skip = Callable[[CheckpointId, str], None]
"""Reports a damaged image that is passed over, and why."""


class EligibleImages(Protocol):
    """The images of one run from which a group may resume."""

    def find(self, report: Callable[[str], None]) -> Sequence[RestoreImage]:
        """Returns what restores each, newest first, the same on all ranks. `report`: called with why another is passed
        over."""
        ...

    def appeared(self) -> bool:
        """Returns whether there is one now where the slots could not be opened before."""
        ...


class MemoryRestore:
    """Finds the images of one run, and restores the newest undamaged one from which the group may resume. Every rank
    calls the same methods in the same order."""

    def __init__(self, repo: Repo, tier: MemoryTier, run: str, group: RankGroup, emitter: Emitter) -> None:
        self._tier = tier
        self._run = run
        self._emitter = emitter
        self._images: EligibleImages = (
            CommonImages(repo, tier, run, group, emitter, skip=self._skip)
            if isinstance(group, JobGroup)
            else OwnImages(tier, emitter, skip=self._skip)
        )
        self.restored: Candidate | None = None
        self.skipped: list[Skipped] = []
        """Damaged images that the last restore has passed over; the same on all ranks."""

    def exists(self) -> bool:
        """Returns whether there is an image to resume from."""
        return bool(self._images.find(_ignore))

    def appeared(self) -> bool:
        """Returns whether there is one now where the slots could not be opened before."""
        return self._images.appeared()

    def restore(self, prepare: Prepare) -> RestoreResult | None:
        """Restores from memory; None where nothing there can be resumed from. Damaged images are passed over, and
        reported."""
        self.restored = None
        self.skipped.clear()
        self._tier.take_over(None)
        for restore_image in self._images.find(self._warn):
            crashpoint("memory image found, not adopted")
            restored = restore_image(prepare, False)
            if restored is not None:
                candidate, result = restored
                self.restored = candidate
                self._tier.take_over(candidate)
                footer = candidate.footer
                self._emitter.emit(RestoredFromMemory(footer.id, footer.age_s, candidate.verdict.base))
                crashpoint("memory image adopted, not yet claimed")
                return result
        return None

    def peek(self, prepare: Prepare) -> tuple[Candidate, RestoreResult] | None:
        """Returns the image that `restore` will take, every byte verified. `prepare` fills nothing."""
        self.skipped.clear()
        return next(filter(None, (one(prepare, True) for one in self._images.find(_ignore))), None)

    def open(self, candidate: Candidate) -> Image:
        """Returns the image of a candidate, to be closed before the run is claimed."""
        return self._tier.open(candidate)

    def _warn(self, message: str) -> None:
        self._emitter.emit(Warned(message, self._run))

    def _skip(self, id: CheckpointId, reason: str) -> None:
        self.skipped.append((id, reason))
        self._emitter.emit(CandidateSkipped(id, reason))


class OwnImages:
    """The images of one process by itself."""

    def __init__(self, tier: MemoryTier, emitter: Emitter, *, skip: Skip) -> None:
        self._tier = tier
        self._emitter = emitter
        self._skip = skip

    def find(self, report: Callable[[str], None]) -> Sequence[RestoreImage]:
        self._tier.hold()
        return [partial(self._restore, candidate) for candidate in self._tier.candidates(report)]

    def appeared(self) -> bool:
        return self._tier.hold() and bool(self._tier.candidates(_ignore))

    def _restore(self, candidate: Candidate, prepare: Prepare, peek: bool) -> tuple[Candidate, RestoreResult] | None:
        try:
            return candidate, self._restored(candidate, prepare, peek)
        except (CorruptionError, OSError) as error:
            message = getattr(error, "message", None) or repr(error)
            self._skip(candidate.footer.id, f"its image in memory: {message}")
            return None

    def _restored(self, candidate: Candidate, prepare: Prepare, peek: bool) -> RestoreResult:
        image = self._tier.open(candidate)
        try:
            if peek or candidate.verdict.base is None:  # no checkpoint would replace a partly filled state
                check_image(image, image.repo.index(image.manifest(), image.footer.rank))
            return restore_checkpoint(image.repo, candidate.footer.id, prepare, emitter=None if peek else self._emitter)
        finally:
            image.close()


def _ignore(message: str) -> None:
    """Reports nothing: it is reported at the restore."""


# --------------------------------------------------------------------------------------------------
# Several ranks: all of them resume from memory, or none.


@record
class CommonImage:
    """A state of which every rank has an image, sealed under `save_id`."""

    id: CheckpointId
    save_id: str
    verdict: EligibleImage


class CommonImages:
    """The images that all ranks of a job have of the same states, as one rank finds and restores its own."""

    def __init__(
        self, repo: Repo, tier: MemoryTier, run: str, group: JobGroup, emitter: Emitter, *, skip: Skip
    ) -> None:
        self._repo = repo
        self._tier = tier
        self._run = run_key(run)
        self._group = group
        self._emitter = emitter
        self._skip = skip
        self._deadline_s = RESTORE_TIMES * group.timeout_s

    def find(self, report: Callable[[str], None]) -> Sequence[RestoreImage]:
        return [partial(self._restore, common) for common in self._common(report)]

    def appeared(self) -> bool:
        """Returns False: what an owner leaves that dies later than it is waited for is not searched for, since not all
        ranks would find it."""
        return False

    # -- what there is -------------------------------------------------------------------------------------------------

    def _common(self, report: Callable[[str], None]) -> list[CommonImage]:
        """Returns the states of which every rank has an image, newest first, as the coordinator finds them."""
        self._tier.await_slots()
        group = self._group
        with group.agreement.round("memory") as round:
            round.send(canonical_json.dumps(self._report()))
            crashpoint("what is in memory told, choice not yet heard")
            if group.coordinates:
                reports = [canonical_json.loads(one) for one in round.gather(self._deadline_s, "what is in memory")]
                found, words = choose(self._repo, self._run, reports)
                round.broadcast(canonical_json.dumps({"found": [_common_json(one) for one in found], "words": words}))
            choice = canonical_json.loads(round.receive(self._deadline_s, "what is in memory"))
        for message in choice["words"]:
            report(message)
        return [_read_common(one) for one in choice["found"]]

    def _report(self) -> Json:
        """Returns what this rank has, and why other images are passed over."""
        images, words = [], []
        for _, footer in self._tier.own_images():
            why = foreign(self._repo, self._run, footer)
            if why:
                words.append(f"step {footer.id.step} in memory of rank {self._group.rank} is passed over: {why}")
            else:
                images.append(_image_json(footer))
        if self._tier.blocked:
            words.append(f"rank {self._group.rank} cannot look into its memory: {self._tier.blocked}")
        ranks = self._group.world_size
        words += passed_over(kept_by_others(self._repo.id, self._run, ranks), ranks)
        return {"images": images, "words": words}

    # -- one of them ---------------------------------------------------------------------------------------------------

    def _restore(self, common: CommonImage, prepare: Prepare, peek: bool) -> tuple[Candidate, RestoreResult] | None:
        """Returns None, on all ranks, where some rank's image is damaged, or not of what it holds."""
        began, id, base = time.perf_counter(), common.id, common.verdict.base
        candidate: Candidate | None = None
        image: Image | None = None
        matched: MatchedImage | None = None
        moved = 0
        try:

            def match() -> str:
                nonlocal candidate, image, matched
                candidate = self._candidate(common)
                image = self._tier.open(candidate)
                matched = match_image(image, prepare, verify=peek or base is None)
                return "".join(f"{LACKING}{path}" for (path, _, _), _ in matched.lacking[:1])

            def fill() -> None:
                nonlocal moved
                assert image is not None and matched is not None
                moved = matched.read(image, self._emitter)

            verdict = self._vote(match, id)
            if not verdict and all(reason.startswith(LACKING) for reason in verdict.reasons.values()):
                assert image is not None and matched is not None
                take = share_buffers(
                    image, matched, self._open_round, deadline_s=self._deadline_s, emitter=self._emitter
                )
                verdict = self._vote(take, id)
            if not self._all_could(verdict, id):
                return None
            if not self._all_could(self._vote(fill, id), id):
                if base is None:  # no checkpoint replaces a partly filled state
                    raise NothingRestorable(
                        f"{id} in memory was whole when it was looked at, and could not be read then",
                        subject=str(id),
                        hint=f"{typed('tenuto', 'memory', 'clear', self._repo.url)}, and start again; "
                        "look at the memory of this machine",
                    )
                return None
        finally:
            if image is not None:
                image.close()
        assert candidate is not None and matched is not None
        return candidate, self._applied(candidate, matched, moved, began, peek)

    def _candidate(self, common: CommonImage) -> Candidate:
        for slot, footer in self._tier.own_images():
            if footer.save_id == common.save_id:
                return Candidate(slot, footer, common.verdict)
        raise CorruptionError(f"the image of {common.id} is no longer there", subject=str(common.id))

    def _applied(
        self, candidate: Candidate, matched: MatchedImage, moved: int, began: float, peek: bool
    ) -> RestoreResult:
        crashpoint("restore voted for, run not yet claimed")
        footer, manifest = candidate.footer, matched.manifest
        state = matched.prepared.apply()
        seconds = time.perf_counter() - began
        if not peek:
            self._emitter.emit(RestoredEvent(footer.id, moved, seconds, manifest.content))
        return RestoreResult(footer.id, manifest, state, matched.prepared.report, moved, seconds)

    def _vote(self, work: Callable[[], str | None], id: CheckpointId) -> VoteResult:
        """Runs `work` on every rank; returns which could. It returns why its rank cannot resume by itself, if so. A
        state of another structure is raised: RankFailed on the others."""
        own: Exception | None = None
        reason = ""
        try:
            reason = work() or ""
        except Exception as error:  # noqa: BLE001 - sent to all
            own = error
            reason = (UNFIT if _is_unfit(own) else "") + in_words(own)
        crashpoint("memory image looked into, not yet voted for")
        with self._open_round() as round:
            could = own is None and not reason
            verdict = round.vote(could, reason, self._deadline_s, f"resuming from {id} in memory")
        if own is not None and _is_unfit(own):
            raise own
        for rank, reason in sorted(verdict.reasons.items()):
            if reason.startswith(UNFIT):
                phase = "resuming from memory"
                raise RankFailed(
                    f"rank {rank} cannot resume from {id} in memory: {reason.removeprefix(UNFIT)}",
                    subject=f"rank {rank}",
                    ranks=(rank,),
                    phase=phase,
                    hint=f"look at the log of rank {rank}",
                )
        return verdict

    def _all_could(self, verdict: VoteResult, id: CheckpointId) -> bool:
        """Returns whether all could; reports why one could not."""
        refusals = {rank: reason for rank, reason in verdict.reasons.items() if not reason.startswith(LACKING)}
        for rank, reason in sorted(refusals.items())[:1]:
            self._skip(id, f"its image in the memory of rank {rank}: {reason}")
        return verdict.ok

    def _open_round(self) -> Round:
        return self._group.agreement.round("memory")


def choose(repo: Repo, run: str, reports: Sequence[Mapping[str, Any]]) -> tuple[list[CommonImage], list[str]]:
    """Returns the states that all ranks have and the run may resume from, newest first, and why others are passed over.
    `reports`: of each rank."""
    words = [word for one in reports for word in one["words"]]
    by_save: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, one in enumerate(reports):
        for image in one["images"]:
            by_save.setdefault(image["save_id"], {})[rank] = image
    order = sorted(by_save.items(), key=lambda one: _newness(one[1].values()), reverse=True)
    found: list[CommonImage] = []
    for save_id, images in order:
        id = read_id(next(iter(images.values()))["id"])
        missing = [rank for rank in range(len(reports)) if rank not in images]
        verdict = _lacking(missing) if missing else judged(repo, run, id, save_id, images.values())
        if isinstance(verdict, str):
            words.append(f"step {id.step} in memory is passed over: {verdict}")
        else:
            found.append(CommonImage(id, save_id, verdict))
    return found, list(dict.fromkeys(words))


def _lacking(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 1} more have" if len(ranks) > 1 else " has"
    return f"rank {ranks[0]}{more} no image of it"


def judged(
    repo: Repo, run: str, id: CheckpointId, save_id: str, images: Iterable[Mapping[str, Any]]
) -> EligibleImage | str:
    """Returns one verdict about a state that all have. Its images may belong to two attempts, where a process was
    killed after the claim: those of some ranks have been sealed again by then."""
    found: set[EligibleImage] = set()
    for attempt, claim in sorted({(image["attempt"], image["claim"]) for image in images}):
        try:
            verdict = judge_line(repo, run, id, save_id, SealHolder(attempt, claim))
        except StoreError as error:
            return f"the repository does not answer: {error.message}"
        if isinstance(verdict, str):
            return verdict
        found.add(verdict)
    return found.pop() if len(found) == 1 else "its images belong to different lines of training"


def _newness(images: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    return max((image["attempt"], image["id"]["step"]) for image in images)


def _is_unfit(error: Exception) -> bool:
    """Returns whether it is the state that does not fit, and would not fit a checkpoint either."""
    return isinstance(error, StateError) and not isinstance(error, ShardMismatch)


def _image_json(footer: Seal) -> Json:
    return {
        "attempt": footer.holder.attempt,
        "claim": footer.holder.claim,
        "id": checkpoint_json(footer.id),
        "save_id": footer.save_id,
    }


def _common_json(common: CommonImage) -> Json:
    base = checkpoint_json(common.verdict.base)
    durable = common.verdict.durable
    return {"base": base, "durable": durable, "id": checkpoint_json(common.id), "save_id": common.save_id}


def _read_common(data: Mapping[str, Any]) -> CommonImage:
    base = None if data["base"] is None else read_id(data["base"])
    return CommonImage(read_id(data["id"]), str(data["save_id"]), EligibleImage(base, bool(data["durable"])))


def read_id(data: Mapping[str, Any]) -> CheckpointId:
    """Returns the checkpoint that `checkpoint_json` has written for other ranks."""
    return CheckpointId(str(data["run"]), int(data["attempt"]), int(data["step"]))
