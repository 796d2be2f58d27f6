"""Restoring: choose a checkpoint, match it with the target, read and verify every byte, then set what is plain.

Reading needs read permission only: it writes nothing and claims nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tenuto.concurrency.worker_threads import gc_paused
from tenuto.engine.read.leaf_reader import read_leaves
from tenuto.errors import CheckpointNotFound, CorruptionError, NothingRestorable, StoreError, in_words, typed
from tenuto.events import CandidateSkipped, Emitter, RestoredEvent, Warned
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json, Manifest
from tenuto.model.timing import RankTimings
from tenuto.repo.lineage import latest, resolve, walk
from tenuto.repo.replicated.access import unreachable
from tenuto.repo.repository import Repo
from tenuto.state.contract import LoadReport, Prepared
from tenuto.store.contract import is_unreadable

if TYPE_CHECKING:
    from tenuto.engine.read.node_share import NodeSharedReads

CHOICES = 3
"""How often the choice starts again because a candidate was removed meanwhile."""


class CheckpointLeaves(Protocol):
    """What a checkpoint says of its leaves, each as a whole, and the private tree of who reads it."""

    @property
    def specs(self) -> Sequence[LeafSpec]: ...

    @property
    def private(self) -> Json: ...


Prepare = Callable[[Manifest, CheckpointLeaves], Prepared]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What was restored, from where, and what was passed over on the way. `ranks`: of several, where the time went on
    each."""

    id: CheckpointId
    manifest: Manifest
    state: Any
    report: LoadReport
    bytes: int
    seconds: float
    skipped: tuple[tuple[CheckpointId, str], ...] = ()
    ranks: RankTimings | None = None


class _Vanished(Exception):
    """A candidate's manifest is gone: removed meanwhile, not damaged."""


def restore_checkpoint(
    repo: Repo, id: CheckpointId, prepare: Prepare, *, emitter: Emitter | None = None
) -> RestoreResult:
    """Restores exactly this checkpoint. CheckpointNotFound if it does not exist, CorruptionError if it is damaged."""
    return exactly(repo, id, lambda id: _attempt(repo, id, prepare, emitter or Emitter()))


def restore_latest(
    repo: Repo,
    run: str,
    prepare: Prepare,
    *,
    emitter: Emitter | None = None,
    withdrawn: Container[int] = frozenset(),
) -> RestoreResult | None:
    """Restores the first whole checkpoint on the walk of I4, and says loudly what it passed over.

    None if the run has no checkpoint; NothingRestorable if it has some and none is whole: nothing starts from scratch
    by itself. `withdrawn`: as `walk` has it.
    """
    emit = emitter or Emitter()
    result, skipped = choose(repo, run, lambda id: _attempt(repo, id, prepare, emit), emit, withdrawn=withdrawn)
    return None if result is None else _with_skipped(result, skipped)


def exactly(repo: Repo, id: CheckpointId, attempt: Callable[[CheckpointId], Result]) -> Result:
    """What `attempt` makes of this checkpoint; CheckpointNotFound if it is not there, or goes meanwhile."""
    try:
        return _unless_vanished(repo, id, attempt)
    except _Vanished as vanished:
        raise CheckpointNotFound(
            f"{id} was removed while it was being read", subject=str(id), hint=typed("tenuto", "ls", repo.url)
        ) from vanished


def choose(
    repo: Repo,
    run: str,
    attempt: Callable[[CheckpointId], Result],
    emit: Emitter,
    *,
    withdrawn: Container[int] = frozenset(),
) -> tuple[Result | None, list[tuple[CheckpointId, str]]]:
    """What `attempt` makes of the first checkpoint on the walk of I4 for which it raises no CorruptionError, and which
    it passed over for what reason. Raises and returns like `restore_latest`."""
    skipped: list[tuple[CheckpointId, str]] = []
    stranded: CheckpointId | None = None
    for _ in range(CHOICES):
        skipped = []
        try:
            for id in walk(repo, run, report=lambda message: emit.emit(Warned(message, run)), withdrawn=withdrawn):
                try:
                    return _unless_vanished(repo, id, attempt), skipped
                except CorruptionError as error:
                    skipped.append((id, error.message))
                    emit.emit(CandidateSkipped(id, error.message))
        except _Vanished:
            continue
        if skipped:
            break
        stranded = _elsewhere(repo, run)  # looked for before `latest` is asked: what has just been committed is either
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
    if skipped:
        reasons = "".join(f"\n  {id}: {reason}" for id, reason in skipped[:5])
        reasons += f"\n  and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        raise NothingRestorable(
            f"run {run!r} has checkpoints, and none of them is whole:{reasons}",
            subject=run,
            hint=f"on the nodes that have them: {typed('tenuto', 'replicate', repo.url)}"
            if unreachable(repo.store)
            else typed("tenuto", "verify", repo.url, "--run", run),
        )
    if stranded is not None:
        raise NothingRestorable(
            f"the last attempt of run {run!r} went on from a checkpoint that is gone, so `latest` means nothing; "
            f"there are others, such as {stranded}",
            subject=run,
            hint=f"name one: step={stranded.step}, or resume_from={stranded.step}; "
            f"`{typed('tenuto', 'ls', repo.url)}` shows all",
        )
    return None, []


def _elsewhere(repo: Repo, run: str) -> CheckpointId | None:
    """The newest checkpoint of the run that the walk of I4 does not reach: a start from scratch would pass it by."""
    for attempt in reversed(repo.attempts(run)):
        for step in repo.committed(run, attempt):
            return CheckpointId(run_key(run), attempt, step)
    return None


def chosen(repo: Repo, run: str, step: int | str | CheckpointId) -> CheckpointId:
    """The checkpoint that `step` ("latest" or a number) means now."""
    return resolve(repo, run, step)


def _unless_vanished(repo: Repo, id: CheckpointId, attempt: Callable[[CheckpointId], Result]) -> Result:
    try:
        return attempt(id)
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
    """What it means to a restore: damage, where the disk does not give some of the checkpoint's bytes."""
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
    return RestoreResult(id, manifest, state, prepared.report, moved, seconds)


@dataclass(frozen=True, slots=True)
class Matched:
    """A checkpoint that has been matched with a target, of which nothing has changed yet. `read` fills it, all but what
    is plain, which `prepared.apply` sets, and returns the bytes; it is given the ranks beside this one, each of which
    does the same. `needs`: the names of the packs that it reads from."""

    prepared: Prepared
    read: Callable[[NodeSharedReads | None], int]
    needs: Callable[[], Sequence[str]]


def match(repo: Repo, manifest: Manifest, prepare: Prepare, *, rank: int = 0, of: int = 1, emitter: Emitter) -> Matched:
    """Matches a checkpoint with a target, as one of so many ranks. What belongs to one rank comes back where as many
    ranks have saved it as there are."""
    own = rank if of == len(manifest.indexes) else None
    if manifest.boxes is None and own is not None:
        index = repo.index(manifest)
        prepared = prepare(manifest, index)
        if prepared.boxes is None:
            return _matched(
                repo,
                manifest,
                prepared,
                lambda _: read_leaves(repo, manifest, index, prepared.wants, emitter=emitter),
                lambda: [0],
            )
        from tenuto.engine.read.sharded_reader import ShardedReader  # only where leaves lie in parts

        alone = ShardedReader(repo, manifest, own, emitter)
        return _matched(repo, manifest, prepared, lambda _: alone.read(prepared), lambda: alone.savers(prepared))
    from tenuto.engine.read.sharded_reader import ShardedReader

    parts = ShardedReader(repo, manifest, own, emitter)
    prepared = prepare(manifest, parts.whole)
    return _matched(repo, manifest, prepared, lambda node: parts.read(prepared, node), lambda: parts.savers(prepared))


def _matched(
    repo: Repo,
    manifest: Manifest,
    prepared: Prepared,
    read: Callable[[NodeSharedReads | None], int],
    savers: Callable[[], Sequence[int]],
) -> Matched:
    """`savers`: the ranks from whose packs `read` reads. What one rank alone has saved is read after the rest."""
    beside = prepared.other_rank

    def read_all(node: NodeSharedReads | None) -> int:
        nbytes = read(node)
        if beside is not None:
            beside[1]()
        return nbytes

    def needs() -> list[str]:
        ranks = sorted({*savers(), *(() if beside is None else beside[:1])})
        return [f"{manifest.id.directory}/{pack.name}" for one in ranks for pack in repo.packs(manifest, one)]

    return Matched(prepared, read_all, needs)


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
    """`match`, and what it has found is read; and the bytes that were."""
    found = match(repo, manifest, prepare, rank=rank, of=of, emitter=emitter)
    return found.prepared, found.read(node)


def _with_skipped(result: RestoreResult, skipped: Sequence[tuple[CheckpointId, str]]) -> RestoreResult:
    return replace(result, skipped=tuple(skipped))
