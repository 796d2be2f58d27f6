"""Going on from what the processes before left in memory, where they were several ranks: all of them, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np

from tenuto.crashpoints import crashpoint
from tenuto.engine.group.group import JobGroup
from tenuto.engine.memory_tier.eligibility import Candidate, EligibleImage, foreign, went_on
from tenuto.engine.memory_tier.image_store import Image, check_image
from tenuto.engine.memory_tier.listing import kept_by_others, passed_over
from tenuto.engine.memory_tier.seal import Seal, SealHolder
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.read.choose import FullLeaves, Prepare, RestoreResult
from tenuto.engine.read.leaf_reader import Staged, read_leaves
from tenuto.engine.save.rank_group import RESTORE_TIMES
from tenuto.errors import (
    CorruptionError,
    NothingRestorable,
    RankFailed,
    ShardMismatch,
    StateError,
    StoreError,
    in_words,
)
from tenuto.events import CandidateSkipped, Emitter, RestoredEvent
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import Box, LeafSpec
from tenuto.model.records import Index, Json, Manifest
from tenuto.ranks.contract import VoteResult
from tenuto.ranks.round import Round
from tenuto.repo.format.leaf_table import LeafTable, leaf_forms
from tenuto.repo.format.objects import checkpoint_json
from tenuto.repo.repository import Repo
from tenuto.state.contract import Buffer, Form, Prepared, Sink
from tenuto.state.restore.match import refuse_unmatched

# --------------------------------------------------------------------------------------------------
# What one of several ranks has sealed, read back into a state that it holds in the same way.

LeafShape = tuple[str, str, tuple[int, ...]]
"""Path, dtype name and shape of a leaf, all of it."""
LENT_BYTES: Final = 64 << 20
"""So much a rank may lack and have from others, through the one place where all meet. More is no buffers: it is another
layout."""
_NOTHING: Final = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class MatchedImage:
    """An image matched with a state. `rows`: those of its index, by leaf and box."""

    manifest: Manifest
    index: Index
    prepared: Prepared
    specs: LeafTable
    rows: Mapping[tuple[int, Box], int]
    wants: list[tuple[int, Sink]] = field(default_factory=list)
    """Rows, and where their bytes go."""
    nothing: list[Sink] = field(default_factory=list)
    """Where nothing goes."""
    lacking: list[tuple[LeafShape, Sink]] = field(default_factory=list)
    """What this image has nothing of, so that it can only come from other ranks (`lending`), and where it goes."""
    lent: list[tuple[Sink, Buffer]] = field(default_factory=list)
    """What has come of that."""

    def read(self, image: Image, emitter: Emitter) -> int:
        """Fills the state, every chunk verified; the bytes. CorruptionError."""
        assert len(self.lent) == len(self.lacking), "taken before"
        for sink in self.nothing:
            sink.fill(_NOTHING)
        for sink, data in self.lent:
            sink.fill(data)
        nbytes = read_leaves(image.repo, self.manifest, self.index, self.wants, emitter=emitter)
        return nbytes + sum(len(data) for _, data in self.lent)

    def held(self, image: Image, wanted: Collection[LeafShape], emitter: Emitter) -> dict[LeafShape, bytes]:
        """What this image has of leaves that other ranks lack, every chunk verified. CorruptionError."""
        staged: list[tuple[LeafShape, int, Staged]] = []
        for leaf in range(self.specs.shared if wanted else 0):
            whole = _whole(self.specs, leaf)
            row = self.rows.get((leaf, Box.whole(whole[2]))) if whole in wanted else None
            if row is not None:
                staged.append((whole, row, Staged(self.specs[leaf].nbytes)))
        read_leaves(image.repo, self.manifest, self.index, [(row, sink) for _, row, sink in staged], emitter=emitter)
        return {whole: sink.data.tobytes() for whole, _, sink in staged}

    def take(self, found: Mapping[LeafShape, bytes]) -> None:
        """What the images of all ranks have of leaves that some lack. Fills nothing yet. ShardMismatch where this one
        lacks another."""
        for whole, sink in self.lacking:
            if whole not in found:
                raise ShardMismatch(f"{whole[0]}: no rank has all of it in memory", subject=whole[0])
            self.lent.append((sink, np.frombuffer(found[whole], np.uint8)))


def match_image(image: Image, prepare: Prepare, *, verify: bool) -> MatchedImage:
    """Matches an image with a state, and touches nothing yet. `verify`: every byte is read and digested as well.

    Raises CorruptionError, ShardMismatch where the state holds other boxes than the image, StateMismatch where it has
    no place for some of it, and what `prepare` raises.
    """
    manifest = image.manifest()
    index = image.repo.index(manifest, image.footer.rank)
    manifest = replace(manifest, indexes=manifest.indexes * image.footer.ranks)  # each has its own, in its own memory
    specs = leaf_shapes(manifest.tree, index)
    prepared = prepare(manifest, FullLeaves(specs, index.private))
    left = prepared.unmatched
    if left is not None:  # an image has what this very rank held: no other takes what it leaves over
        refuse_unmatched(left.named(left.over))
    found = MatchedImage(manifest, index, prepared, specs, _rows(index))
    _match(found)
    if verify:
        check_image(image, index)
    return found


def _match(found: MatchedImage) -> None:
    """Says where each wanted box comes from. ShardMismatch."""
    specs, kept, room = found.specs, frozenset(_leaves(found.index)), LENT_BYTES
    boxes = found.prepared.boxes or [None] * len(found.prepared.wants)
    for (leaf, sink), box in zip(found.prepared.wants, boxes, strict=True):
        spec = specs[leaf]
        wanted = Box.whole(spec.shape) if box is None else box
        row = found.rows.get((leaf, wanted))
        if row is not None:
            found.wants.append((row, sink))
        elif wanted.empty:
            found.nothing.append(sink)
        elif wanted.shape == spec.shape and leaf not in kept and not spec.private and spec.nbytes <= room:
            room -= spec.nbytes
            found.lacking.append((_whole(specs, leaf), sink))
        else:
            raise ShardMismatch(
                f"{spec.path}: this rank holds another part of it than the one that kept it in memory",
                subject=spec.path,
            )


def _whole(specs: LeafTable, leaf: int) -> LeafShape:
    spec = specs[leaf]
    return spec.path, spec.dtype, spec.shape


def leaf_shapes(tree: Json, index: Index) -> LeafTable:
    """The leaves that an image's trees name, each as a whole. CorruptionError where nothing tells of one."""
    forms: dict[int, Form] = leaf_forms(tree)
    forms.update((leaf, (spec.dtype, spec.leaf_shape)) for leaf, spec in zip(_leaves(index), index.specs, strict=True))
    if sorted(forms) != list(range(len(forms))):
        raise CorruptionError("the image does not describe all leaves that it names")
    return LeafTable(tree, index.private, [forms[leaf] for leaf in range(len(forms))])


def _leaves(index: Index) -> list[int]:
    """The number of each row's leaf."""
    return list(range(len(index.specs))) if index.leaf is None else index.leaf.tolist()


def _rows(index: Index) -> dict[tuple[int, Box], int]:
    """The row of each box of each leaf."""
    return {(leaf, spec.box): row for row, (leaf, spec) in enumerate(zip(_leaves(index), index.specs, strict=True))}


# --------------------------------------------------------------------------------------------------
# What counts on one rank alone and others want too, handed on at a restart: from its image, over the board.
#
# Buffers of a module in `DistributedDataParallel` are such values: the first rank's are saved, and every rank has them
# back from the store. An image has only what counts on its own rank.

_PHASE: Final = "handing on what only some ranks have in memory"


def share_buffers(
    image: Image, recalled: MatchedImage, round: Callable[[], Round], *, deadline_s: float, emitter: Emitter
) -> Callable[[], None]:
    """Called by all ranks where one of them lacks something. `topic` opens the next topic. Raises what `Topic.collect`
    and `Topic.hear` do.

    What is returned takes what this rank lacks, and fills nothing yet. It raises CorruptionError where this rank's
    image cannot be read, ShardMismatch where no rank has what this one lacks.
    """
    wanted = _asked([whole for whole, _ in recalled.lacking], round, deadline_s)
    damaged: CorruptionError | None = None
    own: Mapping[LeafShape, bytes] = {}
    try:
        own = recalled.held(image, frozenset(wanted), emitter)
    except CorruptionError as error:  # told to all once they have heard of what there is
        damaged = error
    with round() as lent:
        lent.send(_packed(own))
        if lent.coordinates:
            told = [_unpacked(one) for one in lent.gather(deadline_s, _PHASE)]
            lent.broadcast(_packed({whole: data for each in reversed(told) for whole, data in each.items()}))
        found = _unpacked(lent.receive(deadline_s, _PHASE))
    return partial(_take, recalled, found, damaged)


def _take(recalled: MatchedImage, found: Mapping[LeafShape, bytes], damaged: CorruptionError | None) -> None:
    if damaged is not None:
        raise damaged
    recalled.take(found)


def _asked(lacks: Sequence[LeafShape], round: Callable[[], Round], deadline_s: float) -> list[LeafShape]:
    """What some rank lacks: named once, however many do."""
    with round() as asked:
        asked.send(_named(lacks))
        if asked.coordinates:
            said = [_read(one) for one in asked.gather(deadline_s, _PHASE)]
            asked.broadcast(_named(sorted({whole for each in said for whole in each})))
        return _read(asked.receive(deadline_s, _PHASE))


def _named(wholes: Sequence[LeafShape]) -> bytes:
    return canonical_json.dumps([[path, dtype, list(shape)] for path, dtype, shape in wholes])


def _read(said: bytes) -> list[LeafShape]:
    return [(path, dtype, tuple(shape)) for path, dtype, shape in canonical_json.loads(said)]


def _packed(values: Mapping[LeafShape, bytes]) -> bytes:
    return _named(list(values)) + b"\n" + b"".join(values.values())


def _unpacked(said: bytes) -> dict[LeafShape, bytes]:
    head, _, data = said.partition(b"\n")
    wholes = _read(head)
    ends = list(accumulate(LeafSpec(*whole).nbytes for whole in wholes))
    return {whole: data[begin:end] for whole, begin, end in zip(wholes, [0, *ends], ends, strict=False)}


HOLD_S: Final = 10.0
"""How long a rank waits for its slots: the process before may be dying."""
_POLL_S: Final = 0.05
UNFIT: Final = "unfit: "
LACKING: Final = "lacking: "


_Restored = tuple[Candidate, RestoreResult]


@dataclass(frozen=True, slots=True)
class CommonImage:
    """A state of which every rank has an image, sealed under `save_id`."""

    id: CheckpointId
    save_id: str
    adoptable: EligibleImage


class CommonImages:
    """The images that all ranks of a job have of the same states, as one rank finds and restores its own."""

    def __init__(self, repo: Repo, tier: MemoryTier, run: str, group: JobGroup, emitter: Emitter) -> None:
        self._repo = repo
        self._tier = tier
        self._run = run
        self._group = group
        self._emitter = emitter
        self._deadline_s = RESTORE_TIMES * group.timeout_s

    def find(self, report: Callable[[str], None]) -> Sequence[Callable[[Prepare], _Restored | None]]:
        return [partial(self._tried, common) for common in self._common(report)]

    def appeared(self) -> bool:
        """Returns False: what an owner leaves that dies later than `HOLD_S` is not looked for, since its ranks would
        not do so as one."""
        return False

    # -- what there is -------------------------------------------------------------------------------------------------

    def _common(self, report: Callable[[str], None]) -> list[CommonImage]:
        """The states of which every rank has an image, newest first, as the coordinator finds them."""
        self._hold()
        group = self._group
        with group.agreement.round("memory") as round:
            round.send(canonical_json.dumps(self._told()))
            crashpoint("what is in memory told, choice not yet heard")
            if group.coordinates:
                told = [canonical_json.loads(one) for one in round.gather(self._deadline_s, "what is in memory")]
                found, words = choose(self._repo, self._run, told)
                round.broadcast(canonical_json.dumps({"found": [_common_json(one) for one in found], "words": words}))
            heard = canonical_json.loads(round.receive(self._deadline_s, "what is in memory"))
        for message in heard["words"]:
            report(message)
        return [_read_common(one) for one in heard["found"]]

    def _hold(self) -> None:
        until = time.monotonic() + HOLD_S
        while not self._tier.hold() and self._tier.blocked and not self._tier.off and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _told(self) -> Json:
        """What this rank has, and what it has to say."""
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

    def _tried(self, common: CommonImage, prepare: Prepare) -> _Restored | None:
        """None, on all ranks, where some rank's image is not whole, or not of what it holds."""
        began, id, base = time.perf_counter(), common.id, common.adoptable.base
        candidate: Candidate | None = None
        image: Image | None = None
        recalled: MatchedImage | None = None
        moved = 0
        try:

            def match() -> str:
                nonlocal candidate, image, recalled
                candidate = self._candidate(common)
                image = self._tier.open(candidate)
                recalled = match_image(image, prepare, verify=base is None)
                return "".join(f"{LACKING}{path}" for (path, _, _), _ in recalled.lacking[:1])

            def fill() -> None:
                nonlocal moved
                assert image is not None and recalled is not None
                moved = recalled.read(image, self._emitter)

            verdict = self._vote(match, id)
            if not verdict and all(said.startswith(LACKING) for said in verdict.reasons.values()):
                assert image is not None and recalled is not None
                take = share_buffers(
                    image, recalled, self._open_round, deadline_s=self._deadline_s, emitter=self._emitter
                )
                verdict = self._vote(take, id)
            if not self._heeded(verdict, id):
                return None
            if not self._heeded(self._vote(fill, id), id):
                if base is None:  # what is half filled is made whole by no checkpoint
                    raise NothingRestorable(
                        f"{id} in memory was whole when it was looked at, and could not be read then",
                        subject=str(id),
                        hint="tenuto memory clear, and start anew; look at the memory of this machine",
                    )
                return None
        finally:
            if image is not None:
                image.close()
        assert candidate is not None and recalled is not None
        return candidate, self._applied(candidate, recalled, moved, began)

    def _candidate(self, common: CommonImage) -> Candidate:
        for half, footer in self._tier.own_images():
            if footer.save_id == common.save_id:
                return Candidate(half, footer, common.adoptable)
        raise CorruptionError(f"the image of {common.id} is no longer there", subject=str(common.id))

    def _applied(self, candidate: Candidate, recalled: MatchedImage, moved: int, began: float) -> RestoreResult:
        crashpoint("restore voted for, run not yet claimed")
        footer, manifest = candidate.footer, recalled.manifest
        state = recalled.prepared.apply()
        seconds = time.perf_counter() - began
        self._emitter.emit(RestoredEvent(footer.id, moved, seconds, manifest.content))
        return RestoreResult(footer.id, manifest, state, recalled.prepared.report, moved, seconds)

    def _vote(self, work: Callable[[], str | None], id: CheckpointId) -> VoteResult:
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
        with self._open_round() as round:
            could = own is None and not reason
            verdict = round.vote(could, reason, self._deadline_s, f"going on from {id} in memory")
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

    def _heeded(self, verdict: VoteResult, id: CheckpointId) -> bool:
        """Whether all could. What hinders one is told, and there is the store."""
        hinders = {rank: said for rank, said in verdict.reasons.items() if not said.startswith(LACKING)}
        for rank, said in sorted(hinders.items())[:1]:
            self._emitter.emit(CandidateSkipped(id, f"its image in the memory of rank {rank}: {said}"))
        return verdict.ok

    def _open_round(self) -> Round:
        return self._group.agreement.round("memory")


def choose(repo: Repo, run: str, told: Sequence[Mapping[str, Any]]) -> tuple[list[CommonImage], list[str]]:
    """The states that all ranks have and the run may go on from, newest first, and why others are passed over.
    `told[rank]`: what each has said."""
    words = [word for one in told for word in one["words"]]
    by_save: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, one in enumerate(told):
        for image in one["images"]:
            by_save.setdefault(image["save_id"], {})[rank] = image
    order = sorted(by_save.items(), key=lambda one: _newness(one[1].values()), reverse=True)
    found: list[CommonImage] = []
    for save_id, images in order:
        id = _read_id(next(iter(images.values()))["id"])
        missing = [rank for rank in range(len(told)) if rank not in images]
        verdict = _lacking(missing) if missing else _judged(repo, run, id, save_id, images.values())
        if isinstance(verdict, str):
            words.append(f"step {id.step} in memory is passed over: {verdict}")
        else:
            found.append(CommonImage(id, save_id, verdict))
    return found, list(dict.fromkeys(words))


def _lacking(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 1} more have" if len(ranks) > 1 else " has"
    return f"rank {ranks[0]}{more} no image of it"


def _judged(
    repo: Repo, run: str, id: CheckpointId, save_id: str, images: Iterable[Mapping[str, Any]]
) -> EligibleImage | str:
    """One verdict about a state that all have. Its images may be held by two attempts, where a process was killed
    after the claim: that of some ranks has been sealed anew then."""
    found: set[EligibleImage] = set()
    for attempt, claim in sorted({(image["attempt"], image["claim"]) for image in images}):
        try:
            verdict = went_on(repo, run, id, save_id, SealHolder(attempt, claim))
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


def _image_json(footer: Seal) -> Json:
    return {
        "attempt": footer.holder.attempt,
        "claim": footer.holder.claim,
        "id": checkpoint_json(footer.id),
        "save_id": footer.save_id,
    }


def _common_json(common: CommonImage) -> Json:
    base = checkpoint_json(common.adoptable.base)
    durable = common.adoptable.durable
    return {"base": base, "durable": durable, "id": checkpoint_json(common.id), "save_id": common.save_id}


def _read_common(said: Mapping[str, Any]) -> CommonImage:
    base = None if said["base"] is None else _read_id(said["base"])
    return CommonImage(_read_id(said["id"]), str(said["save_id"]), EligibleImage(base, bool(said["durable"])))


def _read_id(said: Mapping[str, Any]) -> CheckpointId:
    return CheckpointId(str(said["run"]), int(said["attempt"]), int(said["step"]))
