"""Protocol bugs, put in by name one at a time. Each must be found by the crash states, or they find nothing.

`python -m campaigns.crash_states` seeds each and explores the scenarios that it names until a rule breaks. A
bug is a layer over the file system, a wrapper of the store, or a replaced function; what it breaks stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from campaigns import broken_layers as layers
from campaigns import broken_stores as stores
from campaigns.scenarios import Seeded
from campaigns.simulated_processes import replacing
from tenuto.engine.read.chunk_reader import ChunkReader
from tenuto.errors import AlreadyExists, ObjectNotFound
from tenuto.maintenance import gc
from tenuto.maintenance.census import Census
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Receipt
from tenuto.policy.keep import KeepPolicy, KeepVerdict
from tenuto.repo import bases, lineage, unfinished
from tenuto.repo.catalog import Snapshot
from tenuto.repo.format import objects
from tenuto.repo.ownership import claim
from tenuto.repo.ownership.owner_watch import Finished
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Store
from tenuto.store.local import directories
from tenuto.store.local.store import LocalStore
from tenuto.testing.checker import PLACE

SAVES = ("first save",)
_ORIGINAL = (gc.needs_in,)


def _only_of_committed(repo: Repo, census: Census, finished: Finished) -> dict[CheckpointId, set[CheckpointId]]:
    found = _ORIGINAL[0](repo, census, finished)
    return {base: {id for id in others if repo.exists(id)} for base, others in found.items()}


@dataclass(frozen=True)
class Bug:
    """`scenarios`: where it is looked for, in this order. `patch`: around recording and judging alike."""

    name: str
    breaks: str
    """What goes wrong, in one sentence."""
    seeded: Seeded = field(default_factory=Seeded)
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    scenarios: tuple[str, ...] = SAVES
    kills: tuple[int, ...] = ()
    """Also with its process killed after so many calls, and a successor that goes on."""


def _layer(name: str, breaks: str, above: Callable[..., Any], *scenarios: str) -> Bug:
    return Bug(name, breaks, Seeded(above=above), scenarios=scenarios or SAVES)


def _wrapper(name: str, breaks: str, around: Callable[[Store], Store], *scenarios: str) -> Bug:
    return Bug(name, breaks, Seeded(around=around), scenarios=scenarios or SAVES)


def _skip(chosen: Callable[[str, tuple[str, str]], bool]) -> Callable[..., Any]:
    return lambda inner: layers.SkipDirectoryFlush(inner, chosen)


@contextmanager
def _by_time() -> Iterator[None]:
    """`latest` is the manifest that was written last."""

    def newest(repo: Repo, run: str, **_: Any) -> CheckpointId | None:
        found = [
            CheckpointId(run, number, step) for number in repo.attempts(run) for step in repo.committed(run, number)
        ]
        return max(found, key=lambda id: repo.store.stat(id.manifest).modified_ns, default=None)

    with replacing(lineage.latest, newest):
        yield


@contextmanager
def _by_step() -> Iterator[None]:
    """`latest` is the highest step of any attempt."""

    def highest(repo: Repo, run: str, **_: Any) -> CheckpointId | None:
        found = [
            CheckpointId(run, number, step) for number in repo.attempts(run) for step in repo.committed(run, number)
        ]
        return max(found, key=lambda id: id.step, default=None)

    with replacing(lineage.latest, highest):
        yield


@contextmanager
def no_mark() -> Iterator[None]:
    """A dead save is freed without the mark that keeps it from committing late."""

    def free_at_once(repo: Repo, id: CheckpointId, **_: Any) -> bool:
        names = [entry.name for entry in repo.store.walk(id.directory)]
        repo.store.delete(names)
        return True

    with replacing(unfinished.abort, lambda *_, **__: True), replacing(unfinished.free, free_at_once):
        yield


@contextmanager
def _taken_for_own() -> Iterator[None]:
    """A name that is taken counts as our own lost reply, whatever lies there."""

    def put(store: Store, name: str, data: bytes, *, token: str) -> Receipt:
        try:
            return store.put_if_absent(name, Bytes(data), token=token)
        except AlreadyExists:
            return Receipt(name, len(data), store.url)

    with mock.patch.object(objects, "put", put):
        yield


@contextmanager
def _known_directories() -> Iterator[None]:
    """A directory that exists counts as durable: only the one who made it would have flushed its parent."""
    original = directories.Directories._make

    def make(self: directories.Directories, directory: str) -> Any:
        try:
            there = self.filesystem.status(self.path(directory)).kind == "directory"
        except OSError:
            there = False
        return [] if there else original(self, directory)

    with mock.patch.object(directories.Directories, "_make", make):
        yield


@contextmanager
def _same_attempt() -> Iterator[None]:
    """A restarted job goes on in the attempt of the dead one instead of claiming its own."""
    original = claim._try_put

    def put(repo: Repo, run: str, number: int, parent: CheckpointId | None, **more: Any) -> Any:
        if number > 1:
            try:
                return repo.attempt(run, number - 1)
            except ObjectNotFound:
                pass
        return original(repo, run, number, parent, **more)

    with mock.patch.object(claim, "_try_put", put):
        yield


@contextmanager
def _drop_all() -> Iterator[None]:
    """Retention lets go of everything that its policy knows, and protects nothing."""

    def drop(self: Any, facts: Any) -> list[KeepVerdict]:
        return [KeepVerdict(found.id, False, "unwanted") for found in facts]

    with mock.patch.object(KeepPolicy, "decide", drop):
        yield


def _put_late(late: str, after: str) -> Callable[[Store], Store]:
    return lambda inner: stores.PutLate(inner, late, after)


BUGS: tuple[Bug, ...] = (
    _layer("no file flush", "objects get their names before their bytes are durable", layers.SkipFileFlush),
    _layer(
        "no pack flush",
        "the manifest is durable, the tensors are not",
        lambda inner: layers.SkipFileFlush(inner, ".safetensors"),
    ),
    _layer("no manifest flush", "a torn manifest", lambda inner: layers.SkipFileFlush(inner, "manifest.json")),
    _layer("no directory flush", "reported checkpoints lose their names", _skip(lambda path, last: True)),
    _layer(
        "ancestor not flushed",
        "a new directory is lost with all that is in it",
        _skip(lambda path, last: last[0] == "mkdir"),
    ),
    _layer(
        "directories above the root not flushed",
        "the whole repository is lost",
        _skip(lambda path, last: not path.startswith(PLACE)),
    ),
    _layer(
        "manifest's directory not flushed",
        "a reported checkpoint is lost",
        _skip(lambda path, last: last == ("link", "manifest.json")),
    ),
    _layer(
        "packs' names not flushed",
        "a manifest is there, and what it names is not",
        _skip(lambda path, last: last[0] == "link" and last[1].startswith("rank-")),
    ),
    _layer(
        "claim not flushed",
        "an attempt that was claimed is gone, and its number is used again",
        _skip(lambda path, last: path.rpartition("/")[2].startswith("a0")),
    ),
    _layer(
        "tenuto.json not flushed",
        "checkpoints without the repository that they belong to",
        _skip(lambda path, last: path == PLACE),
    ),
    _layer("directory flushed before the link", "the name is not durable", layers.FlushBeforeLink),
    _layer("link before flush", "a manifest is visible before its bytes are durable", layers.LinkBeforeFlush),
    _layer(
        "rename for link",
        "a late commit replaces the mark that closed it",
        layers.RenameForLink,
        "take-over during a save",
    ),
    _layer(
        "one temporary name",
        "a temporary that could not be removed is written over, and with it the object it became",
        layers.SharedTemporary,
        "temporaries stay",
    ),
    _layer("written in place", "half-written objects bear final names", layers.WriteInPlace),
    _layer("cut after the flush", "a pack is longer than its index says", layers.CutAfterFlush, "direct writes"),
    _layer("tail never cut", "a pack is longer than its index says", layers.NeverCut, "direct writes"),
    _layer("flush tried again", "a flush after a failed one proves nothing", layers.RetryFlush, "failed flush"),
    _layer("flush error ignored", "what the disk refused counts as durable", layers.IgnoreFlushError, "failed flush"),
    _layer("short write ignored", "the end of an object is missing", layers.TakeShortWritesForWhole, "short writes"),
    _wrapper(
        "manifest before packs",
        "a manifest names packs that are not there",
        _put_late(".safetensors", "/manifest.json"),
        "saved by the engine",
    ),
    _wrapper(
        "manifest before index",
        "a manifest names an index that is not there",
        _put_late(".index", "/manifest.json"),
        "saved by the engine",
    ),
    _wrapper(
        "reported before the manifest",
        "a save counts as committed while its manifest is still to be put",
        _put_late("/manifest.json", "/begin.json"),
        "several saves",
    ),
    Bug(
        "lost reply not settled",
        "visible is taken for durable",
        patch=lambda: mock.patch.object(LocalStore, "settle", lambda *_: None),
        scenarios=("lost replies",),
    ),
    Bug(
        "unfinished saves stay",
        "a save that its dead process left could still commit, and takes its space for ever",
        patch=lambda: replacing(unfinished.close_unfinished, lambda *_, **__: None),
        scenarios=("successor of unfinished saves",),
    ),
    _wrapper(
        "packs go before the manifest",
        "a checkpoint that retention removes is torn for a while",
        lambda inner: stores.DeleteLate(inner, "/manifest.json"),
        "retention",
    ),
    _layer(
        "manifest's removal not flushed",
        "a removed manifest comes back without its packs",
        _skip(lambda path, last: last == ("unlink", "manifest.json")),
        "retention",
    ),
    _wrapper(
        "trash after removal",
        "a checkpoint removed by hand cannot be brought back",
        lambda inner: stores.TrashLate(inner, "", ""),
        "removed by hand",
    ),
    Bug("retention takes the newest", "the run has nothing to go on from", patch=_drop_all, scenarios=("retention",)),
    Bug(
        "gc looks at no base",
        "packs of a removed checkpoint are freed while others name them",
        patch=lambda: replacing(gc.needs_in, lambda *_: {}),
        scenarios=("resting on others",),
    ),
    Bug(
        "retention looks at no base",
        "packs of a dropped checkpoint are freed while others name them",
        patch=lambda: mock.patch.object(Snapshot, "needs", lambda *_: {}),
        scenarios=("resting on others",),
    ),
    Bug(
        "a base is not looked for",
        "a save names packs that are being freed",
        patch=lambda: replacing(bases.usable_bases, lambda repo, id, named, **_: tuple(named)),
        scenarios=("resting while gc runs",),
    ),
    Bug(
        "what is in the trash needs nothing",
        "a checkpoint in the trash cannot be brought back: packs that it names are freed",
        patch=lambda: replacing(gc.needs_in, _only_of_committed),
        scenarios=("removed with its base",),
    ),
    Bug(
        "digests not checked on read",
        "rotten bytes are restored",
        patch=lambda: mock.patch.object(ChunkReader, "_check", lambda *_: None),
        scenarios=("several saves",),
    ),
    Bug(
        "taken name is ours",
        "a commit counts that never was",
        patch=_taken_for_own,
        scenarios=("take-over during a save",),
    ),
    Bug("no aborted mark", "a late commit names freed packs", patch=no_mark, scenarios=("take-over during a save",)),
    Bug(
        "directory known is durable",
        "a directory that a dead process made and did not flush is lost",
        patch=_known_directories,
        kills=tuple(range(1, 60)),
        scenarios=("first save",),
    ),
    Bug("latest by time", "another checkpoint than the walk's", patch=_by_time, scenarios=("take-over during a save",)),
    Bug(
        "latest by step", "an old attempt's checkpoint hides the newer one", patch=_by_step, scenarios=("rolled back",)
    ),
    Bug(
        "attempt used again",
        "two processes write under one fencing token",
        patch=_same_attempt,
        scenarios=("successor of unfinished saves",),
    ),
)
