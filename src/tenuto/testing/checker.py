"""Checks a disk after a crash: required objects exist and are intact, torn ones are rejected, and work can continue.

Rules, named as in the design's list of invariants:

- I1: a checkpoint that exists names packs and indexes that exist and are intact.
- I2: what was reported as removed does not return.
- I3: what was reported as committed, and is not being removed, exists.
- I4: `latest` is the result of the walk, and no older than the last reported checkpoint.
- I5: every byte read is the byte that was saved.

The expected bytes come from the scenario, not from digests computed by Tenuto.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import Any, Final
from unittest import mock

import numpy as np
import xxhash

from tenuto.codec.chunk_map import chunk_count
from tenuto.codec.derived import ROUNDED, rounded
from tenuto.codec.registry import codec
from tenuto.errors import CorruptionError, NotARepository, StoreError, TenutoError
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, Manifest, StoredChunks
from tenuto.repo.format.manifest import decode_manifest
from tenuto.repo.format.object_names import trash_directory
from tenuto.repo.lineage import latest
from tenuto.repo.replicated import members
from tenuto.repo.replicated.places import all_places, followers_of, report_to
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import FileSystem
from tenuto.testing.expectations import Expected, Presence, Saved
from tenuto.testing.simulated_disk import SimulatedDisk

PLACE: Final = "/data/team/checkpoints"
"""Where scenarios keep their repository: two directories above it must be created and flushed as well."""


class Checker:
    """Checks many disks of one recording; reuses results for checkpoints with byte-identical objects."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[str]] = {}

    def __call__(self, disk: SimulatedDisk, expected: Expected) -> list[str]:
        return check(disk, expected, partial(self.check_checkpoint, disk))

    def check_checkpoint(self, disk: SimulatedDisk, repo: Repo, id: CheckpointId, saved: Saved) -> list[str]:
        """Checks a checkpoint like `check_checkpoint`."""
        own = (id, *_bases(repo, id))
        key = (id, *((p.url, *_files(disk, f"{p.url}/{one.directory}")) for p in all_places(repo.store) for one in own))
        if key not in self._known:
            self._known[key] = list(check_checkpoint(repo, id, saved))
        return self._known[key]


def _bases(repo: Repo, id: CheckpointId) -> tuple[CheckpointId, ...]:
    try:
        return repo.manifest(id).bases
    except TenutoError:
        return ()


def _files(disk: SimulatedDisk, directory: str) -> Iterator[tuple[str, object]]:
    try:
        yield from sorted(disk.files(directory).items())
    except OSError:
        return


def open_without(disk: FileSystem, place: str = PLACE, *, without: Container[str] = ()) -> Repo:
    """Opens the repository with access to every place except those in `without`. Raises what `Repo.open` does."""

    def reached(where: str) -> Store:
        if where in without:
            raise StoreError(f"{where} is lost", subject=where)
        return LocalStore(where, filesystem=disk, create=False)

    with mock.patch.object(members, "open_store", reached):
        repo = Repo.open(LocalStore(place, filesystem=disk, create=False))
    report_to(repo.store, lambda message: None)
    return repo


CheckCheckpoint = Callable[[Repo, CheckpointId, Saved], Iterable[str]]


def check(disk: FileSystem, expected: Expected, check_one: CheckCheckpoint | None = None) -> list[str]:
    """Returns the problems of this disk; reads only."""
    try:
        repo = open_without(disk)
    except NotARepository as error:
        return [f"I3: the repository is gone: {error.message}"] if expected.opened else []
    except TenutoError as error:
        return [f"I3: the repository does not open: {error!r}"]
    check_one = check_one or check_checkpoint
    problems = [problem for run in expected.runs for problem in check_run(repo, run, expected, check_one)]
    for place in followers_of(repo.store):
        there = Repo(place, repo.id, repo.chunk_bytes)
        problems += (f"{place.url}: {one}" for one in check_follower(there, expected, check_one))
    return problems


def check_follower(there: Repo, expected: Expected, check_one: CheckCheckpoint) -> Iterator[str]:
    """Checks a tier that is filled in the background: it may lack checkpoints, and each that it has is whole."""
    for run in expected.runs:
        for id in _named(there.store, run):
            if id not in expected.saved:
                yield f"I1: {id} exists and was never saved"
            else:
                yield from check_one(there, id, expected.saved[id])


def check_run(repo: Repo, run: str, expected: Expected, check_one: CheckCheckpoint) -> Iterator[str]:
    """Checks one run of an opened repository."""
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
    there = {CheckpointId(run, number, step) for number, committed_steps in steps.items() for step in committed_steps}
    there |= set(_named(repo.store, run))
    for id, presence in expected.presence.items():
        if id.run == run:
            yield from _check_presence(repo, id, presence, id in there)
    for id in sorted(there):
        if id not in expected.saved:
            yield f"I1: {id} exists and was never saved"
        else:
            yield from check_one(repo, id, expected.saved[id])
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
    if not there and presence in (Presence.TRASHED, Presence.MOVING):
        found = _in_trash(repo, id)
        if found is None:
            yield f"I3: {id} was removed by hand, and cannot be brought back"
        else:
            yield from _lost_bases(repo, found)


def _in_trash(repo: Repo, id: CheckpointId) -> Manifest | None:
    for entry in repo.store.walk(trash_directory(id)):
        try:
            found = decode_manifest(repo.store.get(entry.name, limit=1 << 20), id, repo.id)
            if isinstance(found, Manifest):
                return found
        except CorruptionError:
            continue
    return None


def _lost_bases(repo: Repo, manifest: Manifest) -> Iterator[str]:
    """Yields the packs of other checkpoints that one, in its place or in the trash, rests on and that are gone."""
    for rank in range(len(manifest.indexes) if manifest.bases else 0):
        for pack in repo.packs(manifest, rank):
            name = pack.object_name(manifest.id)
            if pack.at is not None and not any(entry.name == name for entry in repo.store.walk(pack.at.directory)):
                yield f"I6, I7: {manifest.id} rests on {pack.at}, whose {pack.name} is gone"


def _named(store: Store, run: str) -> Iterator[CheckpointId]:
    """Yields checkpoints found by their manifests, without `Repo`; aborted marks are no checkpoints."""
    for entry in store.walk(f"runs/{run}"):
        parts = entry.name.split("/")
        if len(parts) != 5 or parts[4] != "manifest.json":
            continue
        if not store.get(entry.name, limit=1 << 20).startswith(b'{"by":'):
            yield CheckpointId(run, int(parts[2][1:]), int(parts[3][5:]))


def _walk(repo: Repo, run: str, attempts: list[int], steps: dict[int, list[int]]) -> CheckpointId | None:
    """Performs the walk of I4, implemented a second time from the design. Of what it went on from in other runs, only
    the attempt itself is looked at."""
    bound: int | None = None
    number = max(attempts, default=0)
    while number > 0:
        committed_steps = [step for step in steps.get(number, []) if bound is None or step <= bound]
        if committed_steps:
            return CheckpointId(run, number, max(committed_steps))
        parent = repo.attempt(run, number).parent if number in attempts else None
        if parent is not None and parent.run != run:
            there = [id for id in _named(repo.store, parent.run) if id.attempt == parent.attempt and id <= parent]
            return max(there, default=None)
        if parent is not None:
            number, bound = parent.attempt, parent.step
        else:
            number, bound = max((lower for lower in attempts if lower < number), default=0), None
    return None


def check_checkpoint(repo: Repo, id: CheckpointId, saved: Saved) -> Iterator[str]:
    """Checks that an existing checkpoint is intact, bit for bit."""
    try:
        manifest = repo.manifest(id)
        if manifest.tree != saved.tree:
            yield f"I5: {id}: the tree is not the one saved"
        if lost := list(_lost_bases(repo, manifest)):
            yield from lost
            return
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
    """Returns the full leaves of several ranks by path, assembled from their rows alone.

    A private leaf is called `<path>@<rank>`. `listed`: the number of rows in the table of parts.
    """
    found: dict[str, bytes] = {}
    full: dict[str, np.ndarray[Any, Any]] = {}
    times: dict[str, np.ndarray[Any, Any]] = {}
    rows = 0
    for index in indexes:
        for spec, data in _leaves(repo, manifest, index):
            if spec.private:
                found[f"{spec.path}@{index.rank}"] = data
                continue
            rows += 1
            array = full.setdefault(spec.path, np.zeros((*spec.leaf_shape, spec.itemsize), np.uint8))
            seen = times.setdefault(spec.path, np.zeros(spec.leaf_shape, np.int64))
            begins = spec.offsets or (0,) * len(spec.shape)
            place = tuple(slice(at, at + count) for at, count in zip(begins, spec.shape, strict=True))
            array[place] = np.frombuffer(data, np.uint8).reshape(*spec.shape, spec.itemsize)
            seen[place] += 1
    for path, seen in times.items():
        if (seen != 1).any():
            raise _Differs(f"{path}: an item is in no part, or in several")
    if rows != listed:
        raise _Differs(f"the table of parts lists {listed} parts, the indexes {rows}")
    return found | {path: array.tobytes() for path, array in full.items()}


def _leaves(repo: Repo, manifest: Manifest, index: Index) -> Iterator[tuple[LeafSpec, bytes]]:
    packs = []
    for entry in index.packs:
        with repo.store.open(entry.object_name(manifest.id)) as reader:
            data = bytearray(reader.length)
            reader.read_into(0, memoryview(data))
        if len(data) != entry.length:
            raise _Differs(f"{entry.name} has {len(data)} bytes, not {entry.length}")
        if xxhash.xxh3_128_digest(data[: entry.header_length]) != entry.header_digest:
            raise _Differs(f"the header of {entry.name} is damaged")
        packs.append(bytes(data))
    if index.stored is not None:
        yield from _decoded(index, index.stored, packs)
        return
    for row, spec in enumerate(index.specs):
        start, length = int(index.offset[row]), int(index.length[row])
        data_of = packs[int(index.pack[row])][start : start + length]
        first = int(index.chunk_start[row])
        for chunk in range(chunk_count(length, index.chunk_bytes)):
            piece = data_of[chunk * index.chunk_bytes : (chunk + 1) * index.chunk_bytes]
            if xxhash.xxh3_128_digest(piece) != index.digests[first + chunk].tobytes():
                raise _Differs(f"{spec.path}: chunk {chunk} does not have its digest")
        yield spec, data_of


def _decoded(index: Index, stored: StoredChunks, packs: list[bytes]) -> Iterator[tuple[LeafSpec, bytes]]:
    """Yields the leaves of an encoded index, each chunk decoded by itself."""

    def content(number: int) -> bytes:
        start, nbytes = int(stored.offset[number]), int(stored.stored[number])
        piece = packs[int(stored.pack[number])][start : start + nbytes]
        if xxhash.xxh3_128_digest(piece) != stored.digests[number].tobytes():
            raise _Differs(f"stored chunk {number} does not have its digest")
        name, base = stored.codecs[int(stored.codec[number])], int(stored.base[number])
        if name == "raw":
            return piece
        out, other = bytearray(int(stored.raw[number])), b"" if base < 0 else content(base)
        if stored.rounded is not None and stored.rounded[number]:
            other += content(base + 1) if len(other) < 2 * len(out) else b""
            other = rounded(memoryview(other)[: 2 * len(out)], tuple(ROUNDED)[stored.rounded[number] - 1])
        codec(name).decode(memoryview(piece), memoryview(out), None if base < 0 else memoryview(other))
        return bytes(out)

    for row, spec in enumerate(index.specs):
        first = int(index.chunk_start[row])
        pieces = [content(first + chunk) for chunk in range(chunk_count(int(index.length[row]), index.chunk_bytes))]
        for chunk, piece in enumerate(pieces):
            if xxhash.xxh3_128_digest(piece) != index.digests[first + chunk].tobytes():
                raise _Differs(f"{spec.path}: chunk {chunk} does not have its digest")
        yield spec, b"".join(pieces)
