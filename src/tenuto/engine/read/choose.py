"""Restores: chooses a checkpoint, matches it with the target, reads and verifies every byte, then sets plain values.

Reading needs read permission only: it writes nothing and claims nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from tenuto.codec.chunk_map import Span
from tenuto.concurrency.worker_threads import gc_paused
from tenuto.engine.read.leaf_reader import read_leaves
from tenuto.errors import CheckpointNotFound, CorruptionError, NothingRestorable, StoreError, in_words, typed
from tenuto.events import CandidateSkipped, Emitter, PassedOver, RestoredEvent, Warned
from tenuto.model.exactness import Exactness, exactness
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json, Manifest
from tenuto.model.timing import RankTimings
from tenuto.record import record
from tenuto.repo.format.objects import Origin
from tenuto.repo.identity import refuse_two
from tenuto.repo.lineage import latest, walk
from tenuto.repo.notes import noted_metrics
from tenuto.repo.replicated.places import unreachable
from tenuto.repo.repository import Repo
from tenuto.state.contract import LoadReport, Prepared
from tenuto.store.contract import is_unreadable
from tenuto.units import count, seconds, size

if TYPE_CHECKING:
    from tenuto.engine.read.local_state import LocalState
    from tenuto.engine.read.node_share import NodeSharedReads


CHOICES = 3
"""How often the choice starts again because a candidate was removed meanwhile."""


class CheckpointLeaves(Protocol):
    """The leaves of a checkpoint, each in full, and the private tree of the rank that reads it, if there is one."""

    @property
    def specs(self) -> Sequence[LeafSpec]: ...

    @property
    def private(self) -> Json: ...


@record
class FullLeaves:
    """`CheckpointLeaves` where an index has only parts of them."""

    specs: Sequence[LeafSpec]
    private: Json


Prepare = Callable[[Manifest, CheckpointLeaves], Prepared]
Result = TypeVar("Result")
Skipped = tuple[CheckpointId, str]
"""A checkpoint that was passed over, and why."""


@record
class RestoreResult:
    """What was restored, from where, and what was skipped on the way. `ranks`: the timings of several ranks. `metrics`:
    those of the manifest and those noted later; None where nobody looked for notes. `newest`: what `latest` meant when
    this one was chosen; None where it was named."""

    id: CheckpointId
    manifest: Manifest
    state: Any
    report: LoadReport
    bytes: int
    seconds: float
    skipped: tuple[Skipped, ...] = ()
    ranks: RankTimings | None = None
    metrics: Mapping[str, float] | None = None
    newest: CheckpointId | None = None


class _Vanished(Exception):
    """A candidate's manifest is gone: removed meanwhile, not damaged."""


def restore_checkpoint(
    repo: Repo, id: CheckpointId, prepare: Prepare, *, emitter: Emitter | None = None
) -> RestoreResult:
    """Restores exactly this checkpoint. Raises CheckpointNotFound, and CorruptionError if it is damaged."""
    return exactly(repo, id, lambda id: _attempt(repo, id, prepare, emitter or Emitter()))


def restore_latest(
    repo: Repo,
    run: str,
    prepare: Prepare,
    *,
    emitter: Emitter | None = None,
    withdrawn: Container[int] = frozenset(),
) -> RestoreResult | None:
    """Restores the first undamaged checkpoint on the walk of I4, and reports each one that it skipped.

    Returns None if the run has no checkpoint. Raises NothingRestorable if it has some and all are damaged: training
    must not silently start from scratch. `withdrawn`: see `walk`.
    """
    emit = emitter or Emitter()
    result, skipped, newest = choose(
        repo, run, lambda id, _: _attempt(repo, id, prepare, emit), emit, withdrawn=withdrawn
    )
    return None if result is None else replace(result, skipped=tuple(skipped), newest=newest)


def report_skipped(emitter: Emitter, url: str, skipped: Sequence[Skipped], taken: CheckpointId | None) -> None:
    """Reports, in one event, the newer checkpoints that were passed over for `taken` (None: for nothing): training goes
    back by some steps."""
    if skipped:
        emitter.emit(PassedOver(url, tuple(skipped), taken))


def report_unhealthy(emitter: Emitter, repo: Repo, manifest: Manifest) -> None:
    """Reports that what is restored is unhealthy: it is what was asked for, and training from it goes nowhere."""
    health = manifest.health
    if health is not None and not health.healthy:
        from tenuto.repo.health import newest_healthy, way_back  # rare

        run = manifest.id.run
        emitter.report(f"{manifest.id} has {health}; {way_back(repo.url, newest_healthy(repo, run))}", run)


def exactly(repo: Repo, id: CheckpointId, attempt: Callable[[CheckpointId], Result]) -> Result:
    """Returns `attempt(id)`. Raises CheckpointNotFound if the checkpoint is not there, or is removed meanwhile."""
    try:
        return _unless_vanished(repo, id, partial(attempt, id))
    except _Vanished as vanished:
        raise CheckpointNotFound(
            f"{id} was removed while it was being read", subject=str(id), hint=typed("tenuto", "ls", repo.url)
        ) from vanished


def choose(
    repo: Repo,
    run: str,
    attempt: Callable[[CheckpointId, Sequence[Skipped]], Result],
    emit: Emitter,
    *,
    withdrawn: Container[int] = frozenset(),
) -> tuple[Result | None, list[Skipped], CheckpointId | None]:
    """Returns `attempt(id, skipped)` of the first checkpoint on the walk of I4 for which it raises no CorruptionError,
    the skipped ones with the reasons, and the first on the walk. Raises and returns like `restore_latest`."""
    skipped: list[Skipped] = []
    stranded: CheckpointId | None = None
    # Copies, and what is of another repository: verify names those when it looks at everything.
    misplaced: list[tuple[CheckpointId, str]] = []

    def pass_over(id: CheckpointId, origin: Origin) -> None:
        why = f"what lies there {origin.words(repo.id)}"
        misplaced.append((id, why))
        if len(misplaced) == 1:  # a copied attempt may have thousands
            emit.report(f"{id} is passed over: {why}", run)
        if origin.repository != repo.id:  # a copy beside its original is no loss
            skipped.append((id, why))
            emit.emit(CandidateSkipped(id, why))

    def report(message: str) -> None:
        emit.emit(Warned(message, run))

    for _ in range(CHOICES):
        skipped, misplaced = [], []
        first: CheckpointId | None = None
        try:
            for id in walk(repo, run, report=report, withdrawn=withdrawn, misplaced=pass_over):
                first = first or id
                try:
                    return _unless_vanished(repo, id, partial(attempt, id, skipped)), skipped, first
                except CorruptionError as error:
                    skipped.append((id, error.message))
                    emit.emit(CandidateSkipped(id, error.message))
        except _Vanished:
            continue
        if skipped:
            break
        stranded = _elsewhere(repo, run)  # before `latest`: what has just been committed is either
        if latest(repo, run, withdrawn=withdrawn) is None:
            break  # else something was committed since the walk looked for it
    else:
        skipped, stranded = [], _elsewhere(repo, run)
        newest = latest(repo, run, withdrawn=withdrawn)
        if newest is not None:  # None would mean a start from scratch
            raise NothingRestorable(
                f"run {run!r} changed each of the {CHOICES} times that a checkpoint of it was chosen: others commit "
                f"and remove there; the newest is now {newest}",
                subject=run,
                hint="try again when less is removed, or keep more (keep=)",
            )
    if stranded is None:
        skipped = skipped or misplaced  # training shall not start from scratch where something else was put in place
    if skipped:
        if misplaced:
            refuse_two(repo.store, repo.id)
        reasons = "".join(f"\n  {id}: {reason}" for id, reason in skipped[:5])
        reasons += f"\n  and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        raise NothingRestorable(
            f"run {run!r} has checkpoints, and none of them is whole:{reasons}",
            subject=run,
            hint=f"on the nodes that have them: {typed('tenuto', 'replicate', repo.url)}"
            if unreachable(repo.store)
            else typed("tenuto", "verify", repo.url, *([] if misplaced else ["--run", run])),
        )
    if stranded is not None:
        raise NothingRestorable(
            f"the last attempt of run {run!r} resumed from a checkpoint that is gone, so `latest` means nothing; "
            f"there are others, such as {stranded}",
            subject=run,
            hint=f"name one: step={stranded.step}, or resume_from={stranded.step}; "
            f"`{typed('tenuto', 'ls', repo.url)}` shows all",
        )
    return None, [], None


def _elsewhere(repo: Repo, run: str) -> CheckpointId | None:
    """Returns the newest checkpoint of the run that the walk of I4 does not reach: a start from scratch would ignore
    it."""
    for attempt in reversed(repo.attempts(run)):
        for step in repo.committed(run, attempt):
            return CheckpointId(run_key(run), attempt, step)
    return None


def _unless_vanished(repo: Repo, id: CheckpointId, attempt: Callable[[], Result]) -> Result:
    try:
        return attempt()
    except CheckpointNotFound as error:
        raise _Vanished from error
    except CorruptionError:
        if not repo.exists(id):
            raise _Vanished from None
        raise
    except StoreError as error:
        damage = as_damage(error)
        if damage is error:
            raise
        raise damage from error


def as_damage(error: Exception) -> Exception:
    """Returns the error as a restore sees it: as damage, where the disk does not give some of the checkpoint's
    bytes."""
    if not is_unreadable(error):
        return error
    return CorruptionError(
        in_words(error),
        subject=getattr(error, "subject", None),
        hint="look at the kernel log (`dmesg`) and at the disk",
    )


@gc_paused
def _attempt(repo: Repo, id: CheckpointId, prepare: Prepare, emitter: Emitter) -> RestoreResult:
    began = time.perf_counter()
    manifest = repo.manifest(id)
    prepared, moved = fetch(repo, manifest, prepare, emitter=emitter)
    state = prepared.apply()
    seconds = time.perf_counter() - began
    emitter.emit(RestoredEvent(id, moved, seconds, manifest.content))
    metrics = {**manifest.metrics, **noted_metrics(repo, id)}
    return RestoreResult(id, manifest, state, prepared.report, moved, seconds, metrics=metrics)


@record
class Matched:
    """A checkpoint that has been matched with a target, of which nothing has changed yet.

    read: fills the target, all but plain values, which `prepared.apply` sets; returns the bytes. Takes the shared reads
        of the node's ranks, each of which does the same, and what this rank has in memory.
    needs: returns what `read` reads: by the name of a pack ranges of it, in whole chunks.
    """

    prepared: Prepared
    read: Callable[[NodeSharedReads | None, LocalState | None], int]
    needs: Callable[[], Mapping[str, Span]]


def match(repo: Repo, manifest: Manifest, prepare: Prepare, *, rank: int = 0, of: int = 1, emitter: Emitter) -> Matched:
    """Matches a checkpoint with a target, as rank `rank` of `of`. Private values of a rank are restored only where as
    many ranks saved them."""
    own = rank if of == len(manifest.indexes) else None
    if manifest.boxes is None and own is not None:
        index = repo.index(manifest)
        prepared = prepare(manifest, index)
        if prepared.boxes is None:
            return _matched(
                prepared,
                lambda *_: read_leaves(repo, manifest, index, prepared.wants, emitter=emitter),
                dict,  # one process has nobody who could hand it anything
            )
        from tenuto.engine.read.sharded_reader import ShardedReader  # only where leaves lie in parts

        reader = ShardedReader(repo, manifest, own, emitter)
        return _matched(prepared, lambda *_: reader.read(prepared), lambda: reader.needs(prepared))
    from tenuto.engine.read.sharded_reader import ShardedReader

    reader = ShardedReader(repo, manifest, own, emitter)
    prepared = prepare(manifest, reader.full)
    return _matched(prepared, lambda node, local: reader.read(prepared, node, local), lambda: reader.needs(prepared))


def _matched(
    prepared: Prepared,
    read: Callable[[NodeSharedReads | None, LocalState | None], int],
    needs: Callable[[], Mapping[str, Span]],
) -> Matched:
    """Another rank's private values are read last."""
    other = prepared.other_rank
    if other is None:
        return Matched(prepared, read, needs)

    def read_all(node: NodeSharedReads | None, local: LocalState | None) -> int:
        nbytes = read(node, local)
        other.read()
        return nbytes

    def all_needs() -> dict[str, Span]:
        found = dict(needs())
        for name, (low, high) in other.needs().items():
            before = found.get(name, (low[:0], high[:0]))
            found[name] = np.concatenate([before[0], low]), np.concatenate([before[1], high])
        return found

    return Matched(prepared, read_all, all_needs)


def fetch(
    repo: Repo,
    manifest: Manifest,
    prepare: Prepare,
    *,
    rank: int = 0,
    of: int = 1,
    emitter: Emitter,
    node: NodeSharedReads | None = None,
) -> tuple[Prepared, int]:
    """Matches and reads; returns the prepared restore, and the bytes that were read."""
    found = match(repo, manifest, prepare, rank=rank, of=of, emitter=emitter)
    return found.prepared, found.read(node, None)


@record
class Checkpoint:
    """A committed checkpoint: where it lies and what it holds. `content` is the SHA-256 of all it holds."""

    where: str
    id: CheckpointId
    bytes: int
    leaves: int
    content: str
    metrics: Mapping[str, float]

    def __repr__(self) -> str:
        return f"<{self.id} at {self.where}: {count(self.leaves, 'tensor')}, {size(self.bytes)}>"

    @property
    def run(self) -> str:
        """The run that it belongs to."""
        return self.id.run

    @property
    def attempt(self) -> int:
        """The attempt of the run that saved it."""
        return self.id.attempt

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self.id.step


@record
class Restored:
    """A restored state. `report` names what matched and what did not, by path; `certificate` says what could make a
    resume from it inexact; `skipped` are damaged checkpoints that were passed over, with the reason. `memory_s`: for
    how many seconds the state had lain in this node's memory, where it came from there; else None."""

    state: Any
    report: LoadReport
    certificate: Mapping[str, Json]
    checkpoint: Checkpoint
    progress: Mapping[str, Json]
    seconds: float
    skipped: tuple[Skipped, ...] = ()
    memory_s: float | None = None
    ranks: RankTimings | None = None

    def __repr__(self) -> str:
        """Returns one line, whatever the state holds."""
        checkpoint = self.checkpoint
        origin = checkpoint.where if self.memory_s is None else f"memory, sealed {seconds(self.memory_s)} ago"
        what = f"{count(checkpoint.leaves, 'tensor')}, {size(checkpoint.bytes)}"
        passed = f", {count(len(self.skipped), 'damaged checkpoint')} passed over" if self.skipped else ""
        verdict = f"; {self.verdict}" if self.verdict is not None else ""
        return f"<{checkpoint.id} restored from {origin}: {what} in {seconds(self.seconds)}{passed}{verdict}>"

    @property
    def source(self) -> str:
        """Where the state came from, in words."""
        if self.memory_s is None:
            return f"from {self.checkpoint.where}, step {self.step}"
        return f"from memory, step {self.step}, sealed {seconds(self.memory_s)} ago"

    @property
    def step(self) -> int:
        """The step of the checkpoint that was restored."""
        return self.checkpoint.step

    @property
    def verdict(self) -> Exactness | None:
        """Whether a resume from it is exact: "proven" by `tenuto certify`, "no known gap", "unknown" or "not exact".
        None where the checkpoint does not say, as after `tenuto.save`."""
        return exactness(self.certificate)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics logged with the step, and those noted for it later."""
        return self.checkpoint.metrics

    @property
    def left(self) -> tuple[str, ...]:
        """What `strict=False` has left as it was: paths that the checkpoint lacks, and those that differ, with how."""
        return (*self.report.missing, *self.report.mismatched)

    @classmethod
    def of(cls, result: RestoreResult, where: str, memory_s: float | None = None) -> Restored:
        manifest = result.manifest
        metrics = manifest.metrics if result.metrics is None else result.metrics
        checkpoint = Checkpoint(where, result.id, manifest.bytes, manifest.leaves, manifest.content, metrics)
        return cls(
            state=result.state,
            report=result.report,
            certificate=manifest.certificate,
            checkpoint=checkpoint,
            progress=manifest.progress,
            seconds=result.seconds,
            skipped=result.skipped,
            memory_s=memory_s,
            ranks=result.ranks,
        )
