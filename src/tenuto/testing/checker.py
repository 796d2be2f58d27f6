"""Judges the disk that a crash left: what must be there is there and whole, nothing torn passes, and work can go on.

Rules, each named as in the design's list of invariants:
- I1: a checkpoint that exists names packs and indexes that exist, whole.
- I3: what was reported as committed, and that nobody began to remove, exists.
- I4: `latest` is what the walk gives, and is no older than the last checkpoint that was reported.
- I5: every byte read is the byte that was saved.
- I2: what was reported as removed does not come back.
The expected bytes come from the scenario, not from digests that Tenuto computed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import Any, Final
from unittest import mock

import numpy as np
import xxhash

from tenuto.codec.chunk_map import chunk_count
from tenuto.errors import CorruptionError, NotARepository, StoreError, TenutoError
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, Manifest
from tenuto.repo.format.manifest import decode_manifest
from tenuto.repo.format.object_names import trash_directory
from tenuto.repo.lineage import latest
from tenuto.repo.replicated import members
from tenuto.repo.replicated.access import report_to
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import FileSystem
from tenuto.testing.expectations import Expected, Presence, Saved
from tenuto.testing.simulated_disk import SimulatedDisk

PLACE: Final = "/data/team/checkpoints"
"""Where scenarios keep their repository: two directories above it have to be made and flushed as well."""


class Checker:
    """Judges many disks of one recording. What was found out about a checkpoint whose objects are the same, byte for
    byte, is not found out again."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[str]] = {}

    def __call__(self, disk: SimulatedDisk, expected: Expected) -> list[str]:
        return check(disk, expected, partial(self.whole, disk))

    def whole(self, disk: SimulatedDisk, repo: Repo, id: CheckpointId, saved: Saved) -> list[str]:
        """As `check_checkpoint`."""
        places = [repo.store.home, *repo.store.others] if isinstance(repo.store, ReplicatedStore) else [repo.store]
        key = (id, *((place.url, *_files(disk, f"{place.url}/{id.directory}")) for place in places))
        if key not in self._known:
            self._known[key] = list(check_checkpoint(repo, id, saved))
        return self._known[key]


def _files(disk: SimulatedDisk, directory: str) -> Iterator[tuple[str, object]]:
    try:
        yield from sorted(disk.files(directory).items())
    except OSError:
        return


def found_from(disk: FileSystem, place: str = PLACE, *, without: Container[str] = ()) -> Repo:
    """The repository as an operator has it who reaches every place but those. Raises what `Repo.open` does."""

    def reached(where: str) -> Store:
        if where in without:
            raise StoreError(f"{where} is lost", subject=where)
        return LocalStore(where, filesystem=disk, create=False)

    with mock.patch.object(members, "open_store", reached):
        repo = Repo.open(LocalStore(place, filesystem=disk, create=False))
    report_to(repo.store, lambda message: None)
    return repo


Whole = Callable[[Repo, CheckpointId, Saved], Iterable[str]]


def check(disk: FileSystem, expected: Expected, whole: Whole | None = None) -> list[str]:
    """What is wrong with this disk; empty if nothing is. Reads only."""
    try:
        repo = found_from(disk)
    except NotARepository as error:
        return [f"I3: the repository is gone: {error.message}"] if expected.opened else []
    except TenutoError as error:
        return [f"I3: the repository does not open: {error!r}"]
    return [problem for run in expected.runs for problem in check_run(repo, run, expected, whole or check_checkpoint)]


def check_run(repo: Repo, run: str, expected: Expected, whole: Whole) -> Iterator[str]:
    """Judges one run of an opened repository."""
    try:
        attempts = repo.attempts(run)
        steps = {number: repo.committed(run, number) for number in attempts}
        newest = latest(repo, run)
        claimed = [number for number in attempts if repo.find_attempt(run, number) is not None]
    except TenutoError as error:
        yield f"I4: run {run} cannot be listed: {error!r}"
        return
    if max(claimed, default=0) < expected.attempts.get(run, 0):
        yield f"I4: attempt {expected.attempts[run]} of {run} was claimed and is gone; there are {claimed}"
    there = {CheckpointId(run, number, step) for number, held in steps.items() for step in held}
    there |= set(_named(repo.store, run))
    for id, presence in expected.presence.items():
        if id.run == run:
            yield from _check_presence(repo, id, presence, id in there)
    for id in sorted(there):
        if id not in expected.saved:
            yield f"I1: {id} exists and was never saved"
        else:
            yield from whole(repo, id, expected.saved[id])
    walked = _walk(repo, run, claimed, steps)
    if newest != walked:
        yield f"I4: latest is {newest}, the walk gives {walked}"
    reported = expected.newest(run)
    if reported is not None and newest not in expected.may_be_latest(run, reported):
        yield f"I4: latest is {newest}, although {reported} was reported as committed"


def _check_presence(repo: Repo, id: CheckpointId, presence: Presence, there: bool) -> Iterator[str]:
    if there and presence in (Presence.GONE, Presence.TRASHED):
        yield f"I2: {id} was closed or removed, and is back"
    if not there and presence is Presence.MUST:
        yield f"I3: {id} was reported as committed and is lost"
    if not there and presence in (Presence.TRASHED, Presence.MOVING) and not _in_trash(repo, id):
        yield f"I3: {id} was removed by hand, and cannot be brought back"


def _in_trash(repo: Repo, id: CheckpointId) -> bool:
    for entry in repo.store.walk(trash_directory(id)):
        try:
            if isinstance(decode_manifest(repo.store.get(entry.name, limit=1 << 20), id), Manifest):
                return True
        except CorruptionError:
            continue
    return False


def _named(store: Store, run: str) -> Iterator[CheckpointId]:
    """Checkpoints found by looking for manifests, without `Repo`; those that hold an aborted mark are none."""
    for entry in store.walk(f"runs/{run}"):
        parts = entry.name.split("/")
        if len(parts) != 5 or parts[4] != "manifest.json":
            continue
        if not store.get(entry.name, limit=1 << 20).startswith(b'{"by":'):
            yield CheckpointId(run, int(parts[2][1:]), int(parts[3][5:]))


def _walk(repo: Repo, run: str, attempts: list[int], steps: dict[int, list[int]]) -> CheckpointId | None:
    """The walk of I4, written a second time from the design's words. Runs without forks only."""
    bound: int | None = None
    number = max(attempts, default=0)
    while number > 0:
        held = [step for step in steps.get(number, []) if bound is None or step <= bound]
        if held:
            return CheckpointId(run, number, max(held))
        parent = repo.attempt(run, number).parent if number in attempts else None
        if parent is not None:
            number, bound = parent.attempt, parent.step
        else:
            number, bound = max((lower for lower in attempts if lower < number), default=0), None
    return None


def check_checkpoint(repo: Repo, id: CheckpointId, saved: Saved) -> Iterator[str]:
    """Whether an existing checkpoint is whole, bit for bit."""
    try:
        manifest = repo.manifest(id)
        if manifest.tree != saved.tree:
            yield f"I5: {id}: the tree is not the one saved"
        indexes = [repo.index(manifest, rank) for rank in range(len(manifest.indexes))]
        if manifest.boxes is None:
            found = {spec.path: data for index in indexes for spec, data in _leaves(repo, manifest, index)}
        else:
            boxes = repo.boxes(manifest)
            listed = len(boxes) if boxes is not None else 0
            found = _joined(repo, manifest, indexes, listed)
    except TenutoError as error:
        yield f"I1: {id} exists and is not whole: {type(error).__name__}: {error}"
        return
    except _Differs as error:
        yield f"I5: {id}: {error}"
        return
    if found.keys() != saved.leaves.keys():
        yield f"I5: {id} has the leaves {sorted(found)}, not {sorted(saved.leaves)}"
    for path, data in found.items():
        if data != saved.leaves.get(path, data):
            yield f"I5: {id}: {path} has other bytes than were saved"


class _Differs(Exception):
    """Bytes that contradict their digest."""


def _joined(repo: Repo, manifest: Manifest, indexes: list[Index], listed: int) -> dict[str, bytes]:
    """The leaves of several ranks as wholes by path, put together from their rows alone; what belongs to one rank is
    called `<path>@<rank>`. `listed`: how many rows the table of parts has."""
    found: dict[str, bytes] = {}
    wholes: dict[str, np.ndarray[Any, Any]] = {}
    times: dict[str, np.ndarray[Any, Any]] = {}
    rows = 0
    for index in indexes:
        for spec, data in _leaves(repo, manifest, index):
            if spec.private:
                found[f"{spec.path}@{index.rank}"] = data
                continue
            rows += 1
            whole = wholes.setdefault(spec.path, np.zeros((*spec.leaf_shape, spec.itemsize), np.uint8))
            seen = times.setdefault(spec.path, np.zeros(spec.leaf_shape, np.int64))
            begins = spec.offsets or (0,) * len(spec.shape)
            place = tuple(slice(at, at + count) for at, count in zip(begins, spec.shape, strict=True))
            whole[place] = np.frombuffer(data, np.uint8).reshape(*spec.shape, spec.itemsize)
            seen[place] += 1
    for path, seen in times.items():
        if (seen != 1).any():
            raise _Differs(f"{path}: an item is in no part, or in several")
    if rows != listed:
        raise _Differs(f"the table of parts lists {listed} parts, the indexes {rows}")
    return found | {path: whole.tobytes() for path, whole in wholes.items()}


def _leaves(repo: Repo, manifest: Manifest, index: Index) -> Iterator[tuple[LeafSpec, bytes]]:
    packs = []
    for entry in index.packs:
        with repo.store.open(f"{manifest.id.directory}/{entry.name}") as reader:
            data = bytearray(reader.length)
            reader.read_into(0, memoryview(data))
        if len(data) != entry.length:
            raise _Differs(f"{entry.name} has {len(data)} bytes, not {entry.length}")
        if xxhash.xxh3_128_digest(data[: entry.header_length]) != entry.header_digest:
            raise _Differs(f"the header of {entry.name} is damaged")
        packs.append(bytes(data))
    for row, spec in enumerate(index.specs):
        start, length = int(index.offset[row]), int(index.length[row])
        data_of = packs[int(index.pack[row])][start : start + length]
        first = int(index.chunk_start[row])
        for chunk in range(chunk_count(length, index.chunk_bytes)):
            piece = data_of[chunk * index.chunk_bytes : (chunk + 1) * index.chunk_bytes]
            if xxhash.xxh3_128_digest(piece) != index.digests[first + chunk].tobytes():
                raise _Differs(f"{spec.path}: chunk {chunk} does not have its digest")
        yield spec, data_of
