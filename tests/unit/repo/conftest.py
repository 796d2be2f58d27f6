"""A repository in memory or on disk, and a maker of attempts and checkpoints without engine or threads."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from support.row_digests import digest_rows
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import AttemptRecord, Index, Manifest, Owner, PackEntry, Receipt
from tenuto.repo.commit import commit, put_index
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import content_digest
from tenuto.repo.format.small_records import Begin, encode_attempt, encode_begin
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Store
from tenuto.store.local.store import LocalStore
from tenuto.store.memory import MemoryStore

NOBODY = Owner(host="elsewhere", boot="b", pid_namespace="n", pid=1, started="1", user="someone")
SPECS = (
    LeafSpec("a", "float32", (3, 5)),
    LeafSpec("b", "bfloat16", (2000,)),
    LeafSpec("c", "int64", ()),
    LeafSpec("d", "float32", (0, 4)),
    LeafSpec("e", "uint8", (1,)),
)
TREE = {"!": "dict", "i": [[spec.path, {"!": "leaf", "n": row, "as": "torch"}] for row, spec in enumerate(SPECS)]}


@dataclass
class Maker:
    """Puts attempts and checkpoints directly, as if other processes had."""

    repo: Repo
    written: dict[CheckpointId, Manifest] = field(default_factory=dict)

    def attempt(
        self,
        number: int,
        parent: CheckpointId | None = None,
        *,
        run: str = "gpt",
        owner: Owner = NOBODY,
        by: str = "",
    ) -> AttemptRecord:
        record = AttemptRecord(run, number, secrets.token_hex(16), parent, owner, by=by)
        name = object_names.attempt_name(run, number)
        self.repo.store.put_if_absent(name, Bytes(encode_attempt(record, self.repo.id)), token=record.id)
        return record

    def begin(
        self, attempt: int, step: int, *, run: str = "gpt", parent: CheckpointId | None = None
    ) -> tuple[CheckpointId, str]:
        id, save_id = CheckpointId(run, attempt, step), secrets.token_hex(16)
        plan = plan_layout(SPECS)
        names = (*(pack.name for pack in plan.packs), "rank-00000.index")
        data = encode_begin(Begin(id, save_id, names, parent), self.repo.id)
        self.repo.store.put_if_absent(object_names.begin_name(id), Bytes(data), token=save_id)
        return id, save_id

    def data(self, id: CheckpointId, save_id: str, *, seed: int = 0) -> tuple[Manifest, list[Receipt]]:
        """Pack and index of a save that has begun; what is left is to commit."""
        repo = self.repo
        plan = plan_layout(SPECS)
        buffer = np.random.default_rng(seed).integers(0, 256, plan.nbytes, dtype=np.uint8)
        plan.stamp(buffer, save_id)
        chunk_start, digests = digest_rows(buffer, plan.start, plan.length, repo.chunk_bytes)
        packs, receipts = [], []
        for number, pack in enumerate(plan.packs):
            content = bytes(buffer[pack.start : pack.start + pack.length])
            receipts.append(repo.store.put_if_absent(f"{id.directory}/{pack.name}", Bytes(content), token=save_id))
            packs.append(PackEntry(pack.name, pack.length, pack.header_length, plan.header_digest(number, save_id)))
        index = Index(
            0, save_id, repo.chunk_bytes, tuple(packs), SPECS, plan.pack, plan.offset, plan.length, chunk_start, digests
        )
        receipt, entry = put_index(repo, id, index)
        content_id = content_digest(TREE, SPECS, digests, chunk_bytes=repo.chunk_bytes)
        nbytes = int(plan.length.sum())
        manifest = Manifest(id, save_id, TREE, (entry,), content_id, nbytes, len(SPECS), repo.chunk_bytes)
        return manifest, [*receipts, receipt]

    def checkpoint(self, attempt: int, step: int, *, run: str = "gpt", **fields: Any) -> CheckpointId:
        id, save_id = self.begin(attempt, step, run=run)
        manifest, receipts = self.data(id, save_id, seed=step)
        manifest = replace(manifest, **fields)
        self.written[id] = manifest
        return commit(self.repo, manifest, receipts)

    def copy(self, source: str, target: str) -> None:
        """Copies a directory or a single object, as a person would."""
        store = self.repo.store
        for name in [entry.name for entry in store.walk(source)] or [source]:
            data = store.get(name, limit=1 << 30)
            store.put_if_absent(target + name.removeprefix(source), Bytes(data), token="copy")

    def damage(self, name: str, at: int = 40) -> None:
        """Flips one bit of an object, past the store's own rules."""
        store = self.repo.store
        data = bytearray(store.get(name, limit=1 << 30))
        data[at % len(data)] ^= 1
        store.delete([name])
        store.put_if_absent(name, Bytes(bytes(data)), token="damage")

    def names(self, prefix: str) -> list[str]:
        return [entry.name.removeprefix(prefix + "/") for entry in self.repo.store.walk(prefix)]


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore(secrets.token_hex(8))
        return
    # In memory too where there is such a place: what a flush costs is not what these tests are about.
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as directory:
        yield LocalStore(f"{directory}/store")


@pytest.fixture
def repo(store: Store) -> Repo:
    return Repo.create_or_open(store)


@pytest.fixture
def make(repo: Repo) -> Maker:
    return Maker(repo)


@pytest.fixture(scope="session")
def new_maker() -> Callable[[], Maker]:
    """A maker on a fresh repository in memory, for tests that need many."""
    return lambda: Maker(Repo.create_or_open(MemoryStore(secrets.token_hex(8))))


@pytest.fixture
def release() -> Iterator[list[Any]]:
    """Attempts appended here are released at the end, whatever happens."""
    attempts: list[Any] = []
    yield attempts
    for attempt in attempts:
        attempt.release()
