"""Going on from what the processes before left in memory, where they were several ranks: all of them, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.api.adopting import Adopting
from holdfast.api.company import RESTORE_TIMES, Company
from holdfast.crashpoints import crashpoint
from holdfast.engine.candidates import Candidate
from holdfast.engine.images import Image
from holdfast.engine.joint.lending import lend
from holdfast.engine.joint.memory import JointTier
from holdfast.engine.joint.recalling import Recalled, recall
from holdfast.engine.listing import kept_by_others, passed_over
from holdfast.engine.restore import Prepare, RestoreResult
from holdfast.errors import (
    CorruptionError,
    NothingRestorable,
    RankFailed,
    ShardMismatch,
    StateError,
    StoreError,
    in_words,
)
from holdfast.events import Adopted, CandidateSkipped, Emitter, RestoredEvent
from holdfast.model import canonical
from holdfast.model.checkpoint import Json
from holdfast.model.names import CheckpointId
from holdfast.ranks.contract import Verdict
from holdfast.ranks.topic import Topic
from holdfast.repo.adoption import Adoptable, foreign, went_on
from holdfast.repo.footer import Footer, Holder
from holdfast.repo.objects import checkpoint_json
from holdfast.repo.repository import Repo

HOLD_S: Final = 10.0
"""How long a rank waits for its slots: the process before may be dying."""
_POLL_S: Final = 0.05
UNFIT: Final = "unfit: "
LACKING: Final = "lacking: "


@dataclass(frozen=True, slots=True)
class Common:
    """A state of which every rank has an image, sealed under `save_id`."""

    id: CheckpointId
    save_id: str
    adoptable: Adoptable


class AdoptingTogether(Adopting):
    """As Adopting, on every rank of a job: each calls the same methods in the same order."""

    def __init__(self, repo: Repo, tier: JointTier, run: str, company: Company, emitter: Emitter) -> None:
        super().__init__(tier, run, emitter)
        self._repo = repo
        self._joint = tier
        self._company = company
        self._deadline_s = RESTORE_TIMES * company.timeout_s

    def exists(self) -> bool:
        return bool(self._common(_to_nobody))

    def appeared(self) -> bool:
        """What an owner leaves that dies later than `HOLD_S` is not looked for: its ranks would not do so as one."""
        return False

    def restore(self, prepare: Prepare) -> RestoreResult | None:
        """None, on all ranks, where there is no state that all have in memory and can go on from."""
        self.adopted = None
        self._tier.adopt(None)
        for common in self._common(self._say):
            crashpoint("memory image found, not adopted")
            result = self._tried(common, prepare)
            if result is not None:
                return result
        return None

    # -- what there is -------------------------------------------------------------------------------------------------

    def _common(self, report: Callable[[str], None]) -> list[Common]:
        """The states of which every rank has an image, newest first, as the coordinator finds them."""
        self._hold()
        company = self._company
        with company.agreement.topic("memory") as topic:
            topic.post(canonical.dumps(self._told()))
            crashpoint("what is in memory told, choice not yet heard")
            if company.coordinates:
                told = [canonical.loads(one) for one in topic.collect(self._deadline_s, "what is in memory")]
                found, words = choose(self._repo, self._run, told)
                topic.announce(canonical.dumps({"found": [_common_json(one) for one in found], "words": words}))
            heard = canonical.loads(topic.hear(self._deadline_s, "what is in memory"))
        for message in heard["words"]:
            report(message)
        return [_read_common(one) for one in heard["found"]]

    def _hold(self) -> None:
        until = time.monotonic() + HOLD_S
        while not self._tier.hold() and self._joint.held and not self._tier.off and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _told(self) -> Json:
        """What this rank has, and what it has to say."""
        images, words = [], []
        for _, footer in self._joint.mine():
            why = foreign(self._repo, self._run, footer)
            if why:
                words.append(f"step {footer.id.step} in memory of rank {self._company.rank} is passed over: {why}")
            else:
                images.append(_image_json(footer))
        if self._joint.held:
            words.append(f"rank {self._company.rank} cannot look into its memory: {self._joint.held}")
        ranks = self._company.world_size
        words += passed_over(kept_by_others(self._repo.id, self._run, ranks), ranks)
        return {"images": images, "words": words}

    # -- one of them ---------------------------------------------------------------------------------------------------

    def _tried(self, common: Common, prepare: Prepare) -> RestoreResult | None:
        """None, on all ranks, where some rank's image is not whole, or not of what it holds."""
        began, id, base = time.perf_counter(), common.id, common.adoptable.base
        candidate: Candidate | None = None
        image: Image | None = None
        recalled: Recalled | None = None
        moved = 0
        try:

            def match() -> str:
                nonlocal candidate, image, recalled
                candidate = self._candidate(common)
                image = self._tier.open(candidate)
                recalled = recall(image, prepare, verify=base is None)
                return "".join(f"{LACKING}{path}" for (path, _, _), _ in recalled.lacking[:1])

            def fill() -> None:
                nonlocal moved
                assert image is not None and recalled is not None
                moved = recalled.read(image, self._emitter)

            verdict = self._vote(match, id)
            if not verdict and all(said.startswith(LACKING) for said in verdict.reasons.values()):
                assert image is not None and recalled is not None
                take = lend(image, recalled, self._topic, deadline_s=self._deadline_s, emitter=self._emitter)
                verdict = self._vote(take, id)
            if not self._heeded(verdict, id):
                return None
            if not self._heeded(self._vote(fill, id), id):
                if base is None:  # what is half filled is made whole by no checkpoint
                    raise NothingRestorable(
                        f"{id} in memory was whole when it was looked at, and could not be read then",
                        subject=str(id),
                        hint="holdfast memory clear, and start anew; look at the memory of this machine",
                    )
                return None
        finally:
            if image is not None:
                image.close()
        assert candidate is not None and recalled is not None
        return self._applied(candidate, recalled, moved, began)

    def _candidate(self, common: Common) -> Candidate:
        for half, footer in self._joint.mine():
            if footer.save_id == common.save_id:
                return Candidate(half, footer, common.adoptable)
        raise CorruptionError(f"the image of {common.id} is no longer there", subject=str(common.id))

    def _applied(self, candidate: Candidate, recalled: Recalled, moved: int, began: float) -> RestoreResult:
        crashpoint("restore voted for, run not yet claimed")
        footer, manifest = candidate.footer, recalled.manifest
        state = recalled.prepared.apply()
        seconds = time.perf_counter() - began
        self._emitter.emit(RestoredEvent(footer.id, moved, seconds, manifest.content))
        self.adopted = candidate
        self._tier.adopt(candidate)
        self._emitter.emit(Adopted(footer.id, footer.age_s, candidate.adoptable.base))
        crashpoint("memory image adopted, not yet claimed")
        return RestoreResult(footer.id, manifest, state, recalled.prepared.report, moved, seconds)

    def _vote(self, work: Callable[[], str | None], id: CheckpointId) -> Verdict:
        """Does it on every rank; who could. `work` returns why its rank cannot go on by itself, if so. A state of
        another structure is raised: RankFailed on the others."""
        own: Exception | None = None
        reason = ""
        try:
            reason = work() or ""
        except Exception as error:  # noqa: BLE001 - told to all
            own = error
            reason = (UNFIT if _is_unfit(own) else "") + in_words(own)
        crashpoint("memory image looked into, not yet voted for")
        with self._topic() as topic:
            could = own is None and not reason
            verdict = topic.vote(could, reason, self._deadline_s, f"going on from {id} in memory")
        if own is not None and _is_unfit(own):
            raise own
        for rank, said in sorted(verdict.reasons.items()):
            if said.startswith(UNFIT):
                phase = "going on from memory"
                raise RankFailed(
                    f"rank {rank} cannot go on from {id} in memory: {said.removeprefix(UNFIT)}",
                    subject=f"rank {rank}",
                    ranks=(rank,),
                    phase=phase,
                    hint=f"look at the log of rank {rank}",
                )
        return verdict

    def _heeded(self, verdict: Verdict, id: CheckpointId) -> bool:
        """Whether all could. What hinders one is told, and there is the store."""
        hinders = {rank: said for rank, said in verdict.reasons.items() if not said.startswith(LACKING)}
        for rank, said in sorted(hinders.items())[:1]:
            self._emitter.emit(CandidateSkipped(id, f"its image in the memory of rank {rank}: {said}"))
        return verdict.ok

    def _topic(self) -> Topic:
        return self._company.agreement.topic("memory")


def choose(repo: Repo, run: str, told: Sequence[Mapping[str, Any]]) -> tuple[list[Common], list[str]]:
    """The states that all ranks have and the run may go on from, newest first, and why others are passed over.
    `told[rank]`: what each has said."""
    words = [word for one in told for word in one["words"]]
    by_save: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, one in enumerate(told):
        for image in one["images"]:
            by_save.setdefault(image["save_id"], {})[rank] = image
    order = sorted(by_save.items(), key=lambda one: _newness(one[1].values()), reverse=True)
    found: list[Common] = []
    for save_id, images in order:
        id = _read_id(next(iter(images.values()))["id"])
        missing = [rank for rank in range(len(told)) if rank not in images]
        verdict = _lacking(missing) if missing else _judged(repo, run, id, save_id, images.values())
        if isinstance(verdict, str):
            words.append(f"step {id.step} in memory is passed over: {verdict}")
        else:
            found.append(Common(id, save_id, verdict))
    return found, list(dict.fromkeys(words))


def _lacking(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 1} more have" if len(ranks) > 1 else " has"
    return f"rank {ranks[0]}{more} no image of it"


def _judged(
    repo: Repo, run: str, id: CheckpointId, save_id: str, images: Iterable[Mapping[str, Any]]
) -> Adoptable | str:
    """One verdict about a state that all have. Its images may be held by two attempts, where a process was killed
    after the claim: that of some ranks has been sealed anew then."""
    found: set[Adoptable] = set()
    for attempt, claim in sorted({(image["attempt"], image["claim"]) for image in images}):
        try:
            verdict = went_on(repo, run, id, save_id, Holder(attempt, claim))
        except StoreError as error:
            return f"the repository does not answer: {error.message}"
        if isinstance(verdict, str):
            return verdict
        found.add(verdict)
    return found.pop() if len(found) == 1 else "its images belong to different lines of training"


def _newness(images: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    return max((image["attempt"], image["id"]["step"]) for image in images)


def _is_unfit(error: Exception) -> bool:
    """Whether it is the state that does not fit, and would not fit a checkpoint either."""
    return isinstance(error, StateError) and not isinstance(error, ShardMismatch)


def _image_json(footer: Footer) -> Json:
    return {
        "attempt": footer.holder.attempt,
        "claim": footer.holder.claim,
        "id": checkpoint_json(footer.id),
        "save_id": footer.save_id,
    }


def _common_json(common: Common) -> Json:
    base = checkpoint_json(common.adoptable.base)
    durable = common.adoptable.durable
    return {"base": base, "durable": durable, "id": checkpoint_json(common.id), "save_id": common.save_id}


def _read_common(said: Mapping[str, Any]) -> Common:
    base = None if said["base"] is None else _read_id(said["base"])
    return Common(_read_id(said["id"]), str(said["save_id"]), Adoptable(base, bool(said["durable"])))


def _read_id(said: Mapping[str, Any]) -> CheckpointId:
    return CheckpointId(str(said["run"]), int(said["attempt"]), int(said["step"]))


def _to_nobody(message: str) -> None:
    """It is told when it is restored."""
