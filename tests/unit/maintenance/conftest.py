"""A small world: repositories in memory whose attempts live and die on command, and saves of a few tiny leaves."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from support.row_digests import digest_rows
from tenuto.concurrency.process import this_process
from tenuto.engine.save.baseline import baseline_in
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.errors import ObjectNotFound
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import AttemptRecord, Index, Manifest, PackEntry
from tenuto.repo.commit import begin, commit, put_index
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import content_digest
from tenuto.repo.format.small_records import encode_attempt
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.ownership.lease import Lease
from tenuto.repo.ownership.owner_watch import release_ownership, take_ownership
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes
from tenuto.store.memory import MemoryStore

_names = itertools.count()

CHUNK = 64


class Abandoned(BaseException):
    """What an armed crash point raises: the process is gone, nothing may clean up after it."""


def abandon() -> None:
    raise Abandoned


class World:
    def __init__(self) -> None:
        self.store = MemoryStore(f"upkeep-{next(_names)}")
        self.repo = Repo.create_or_open(self.store, chunk_bytes=CHUNK)

    def clone(self) -> World:
        """Another store with the same objects, and the same owners."""
        other = World.__new__(World)
        other.store = MemoryStore(f"upkeep-{next(_names)}")
        other.store.place.objects.update(self.store.place.objects)
        other.store.place.clock_ns = self.store.place.clock_ns
        other.repo = Repo.open(other.store)
        return other

    def reopened(self) -> Repo:
        return Repo.open(MemoryStore(self.store.name))

    def claim(self, run: str = "main", parent: CheckpointId | None = None, *, alive: bool = True) -> Attempt:
        """An attempt as `claim` leaves it, without a thread that beats its lease."""
        number = max(self.repo.attempts(run), default=0) + 1
        owner = this_process()
        if not alive:
            owner = replace(owner, pid=2**22 + 7)
        record = AttemptRecord(run, number, secrets.token_hex(16), parent, owner)
        name = object_names.attempt_name(run, number)
        objects.put(self.store, name, encode_attempt(record, self.repo.id), token=record.id)
        if alive:
            take_ownership(self.repo, run, number, self)
        return Attempt(self.repo, record, Lease(self.repo, record))

    def die(self, attempt: Attempt) -> None:
        """This process no longer holds the attempt: observers find it dead."""
        release_ownership(self.repo, attempt.run, attempt.number)

    def save(
        self,
        attempt: Attempt,
        step: int,
        *,
        metrics: dict[str, float] | None = None,
        until: str = "commit",
        seed: int = 0,
    ) -> CheckpointId:
        """One save of three leaves, one of them of no bytes. `until`: begin, pack, index or commit."""
        id = CheckpointId(attempt.run, attempt.number, step)
        save_id = secrets.token_hex(16)
        values = {
            "a": np.arange(50, dtype=np.float32) + step + 1000 * attempt.number + seed,
            "b/c": np.arange(100, dtype=np.uint8),
            "e": np.zeros((0, 3), np.float32),
        }
        specs = [LeafSpec("a", "float32", (50,)), LeafSpec("b/c", "uint8", (100,)), LeafSpec("e", "float32", (0, 3))]
        tree = {"!": "dict", "i": []}
        leaf_nodes = [{"!": "leaf", "n": n, "as": "numpy"} for n in range(3)]
        tree["i"] = [["a", leaf_nodes[0]], ["b", {"!": "dict", "i": [["c", leaf_nodes[1]]]}], ["e", leaf_nodes[2]]]
        plan = plan_layout(specs)
        image = np.zeros(plan.nbytes, np.uint8)
        plan.stamp(image, save_id)
        for number, value in enumerate(values.values()):
            raw = np.frombuffer(value.tobytes(), np.uint8)
            image[plan.start[number] : plan.start[number] + len(raw)] = raw
        chunk_start, digests = digest_rows(image, plan.start, plan.length, CHUNK)
        packs = tuple(
            PackEntry(pack.name, pack.length, pack.header_length, plan.header_digest(number, save_id))
            for number, pack in enumerate(plan.packs)
        )
        begin(attempt, step, save_id, [*(pack.name for pack in packs), object_names.index_file(0)])
        if until == "begin":
            return id
        receipts = []
        for pack in plan.packs:
            data = image[pack.start : pack.start + pack.length].tobytes()
            receipts.append(self.store.put_if_absent(f"{id.directory}/{pack.name}", Bytes(data), token=save_id))
        if until == "pack":
            return id
        index = Index(
            0, save_id, CHUNK, packs, tuple(specs), plan.pack, plan.offset, plan.length, chunk_start, digests, None
        )
        receipt, entry = put_index(self.repo, id, index)
        if until == "index":
            return id
        manifest = Manifest(
            id=id,
            save_id=save_id,
            tree=tree,
            indexes=(entry,),
            content=content_digest(tree, specs, digests, chunk_bytes=CHUNK, private=[None]),
            bytes=sum(pack.length for pack in packs),
            leaves=3,
            chunk_bytes=CHUNK,
            parent=attempt.parent,
            metrics=metrics or {},
        )
        commit(self.repo, manifest, [*receipts, receipt])
        return id

    def save_on(self, attempt: Attempt, step: int, base: CheckpointId, *, until: str = "commit") -> CheckpointId:
        """One save of the same state as `base`, which names its packs and puts none. `until`: begin or commit."""
        manifest = self.repo.manifest(base)
        resting = RestingSave(self, attempt, step, base, (manifest, self.repo.index(manifest)))
        if until != "begin":
            resting.commit()
        return resting.id

    def flip(self, name: str, offset: int = -1, bit: int = 0) -> None:
        """Changes one bit behind the store's back."""
        data, when = self.store.place.objects[name]
        changed = bytearray(data)
        changed[offset] ^= 1 << bit
        self.store.place.objects[name] = bytes(changed), when

    def truncate(self, name: str, nbytes: int) -> None:
        data, when = self.store.place.objects[name]
        self.store.place.objects[name] = data[:nbytes], when

    def lose(self, name: str) -> None:
        if self.store.place.objects.pop(name, None) is None:
            raise ObjectNotFound(name)

    def put(self, name: str, data: bytes = b"somebody else's") -> None:
        self.store.place.objects[name] = data, self.store.place.tick()

    def copy(self, source: str, target: str) -> None:
        """Copies a directory as a person would."""
        for name in [name for name in self.store.place.objects if name.startswith(f"{source}/")]:
            self.put(target + name[len(source) :], self.store.place.objects[name][0])

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.store.place.objects if name.startswith(prefix))


class RestingSave:
    """A save of the same state as `base`, of which `read` has been read before; it is begun, and puts no pack."""

    def __init__(
        self, world: World, attempt: Attempt, step: int, base: CheckpointId, read: tuple[Manifest, Index]
    ) -> None:
        self._world, self._read, self._parent = world, read, attempt.parent
        self._found = baseline_in(read[1], base)
        self.bases = tuple(sorted({pack.at for pack in self._found.packs if pack.at is not None}))
        self._save_id = secrets.token_hex(16)
        self.id = begin(attempt, step, self._save_id, [object_names.index_file(0)], bases=self.bases)

    def commit(self) -> None:
        manifest, index = self._read
        nothing = np.zeros(len(index.specs), np.int64)
        encoded = replace(
            index,
            save_id=self._save_id,
            packs=self._found.packs,
            stored=self._found.stored,
            pack=nothing,
            offset=nothing,
        )
        receipt, entry = put_index(self._world.repo, self.id, encoded)
        manifest = replace(
            manifest,
            id=self.id,
            save_id=self._save_id,
            indexes=(entry,),
            parent=self._parent,
            bases=self.bases,
            stored=0,
        )
        commit(self._world.repo, manifest, [receipt])


@pytest.fixture
def world() -> Iterator[World]:
    yield World()


@pytest.fixture
def make_world() -> type[World]:
    return World


@pytest.fixture
def resting_save() -> type[RestingSave]:
    return RestingSave


@pytest.fixture
def crash() -> tuple[type[BaseException], object]:
    """The exception of an armed crash point, and the action that raises it."""
    return Abandoned, abandon
