"""A repository in memory, and what a history of retention does to it: attempts, tiny saves, copies, strangers."""

from __future__ import annotations

import itertools
import random
from datetime import UTC, datetime
from typing import Final

from tenuto.codec.digest import digest
from tenuto.concurrency.process import this_process
from tenuto.errors import CheckpointNotFound
from tenuto.model.ids import CheckpointId
from tenuto.model.records import AttemptRecord, IndexEntry, Manifest
from tenuto.repo.commit import begin
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.format.small_records import encode_attempt
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.ownership.lease import Lease
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import is_tombstoned
from tenuto.store import memory
from tenuto.store.contract import Bytes

PACK: Final = "rank-00000.safetensors"
INDEX: Final = object_names.index_file(0)

_numbers = itertools.count()


class World:
    """Attempts are put as `claim` puts them, without waiting for anybody and without a thread that beats. Packs and
    indexes hold a few bytes that retention never looks into; manifests, begin.json, notes and refs are real."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.owner = this_process()
        self.store = memory.MemoryStore(f"retention-{next(_numbers)}")
        self.repo = Repo.create_or_open(self.store)

    def end(self) -> None:
        memory._places.pop(self.store.name, None)

    @property
    def objects(self) -> dict[str, bytes]:
        """Everything that lies there, by name."""
        return {name: data for name, (data, _) in self.store.place.objects.items()}

    def token(self) -> str:
        return self.source.randbytes(16).hex()

    def claim(self, run: str, parent: CheckpointId | None, *, by: str = "") -> tuple[int, Attempt | None]:
        """The number of the attempt, and the attempt itself unless its parent is being removed: then it stays as one
        that goes on from there and never commits, as after a claim that withdrew."""
        number = max(self.repo.attempts(run), default=0) + 1
        record = AttemptRecord(run, number, self.token(), parent, self.owner, by=by)
        name, data = object_names.attempt_name(run, number), encode_attempt(record, self.repo.id)
        objects.put(self.store, name, data, token=record.id)
        if parent is not None and (not self.repo.exists(parent) or is_tombstoned(self.repo, parent)):
            return number, None
        return number, Attempt(self.repo, record, Lease(self.repo, record))

    def save(
        self,
        attempt: Attempt,
        step: int,
        *,
        metrics: dict[str, float] | None = None,
        created_s: float | None = None,
        until: str = "manifest",
    ) -> CheckpointId:
        """One save, as far as `until`: begin, pack, index or manifest."""
        id = CheckpointId(attempt.run, attempt.number, step)
        save_id = self.token()
        begin(attempt, step, save_id, [PACK, INDEX])
        for stage, file in (("pack", PACK), ("index", INDEX)):
            if until == "begin":
                return id
            self.store.put_if_absent(f"{id.directory}/{file}", Bytes(f"{file} of {save_id}".encode()), token=save_id)
            if until == stage:
                return id
        data = f"{INDEX} of {save_id}".encode()
        manifest = Manifest(
            id=id,
            save_id=save_id,
            tree=None,
            indexes=(IndexEntry(INDEX, len(data), digest(data)),),
            content="0" * 64,
            bytes=1000 + step,
            leaves=0,
            chunk_bytes=self.repo.chunk_bytes,
            parent=attempt.parent,
            metrics=metrics or {},
            created="" if created_s is None else written(created_s),
        )
        data = encode_manifest(manifest, self.repo.id)
        objects.put(self.store, id.manifest, data, token=save_id)
        if self.repo.observer is not None:
            self.repo.observer.committed(manifest, data)
        return id

    def require(self, id: CheckpointId) -> None:
        if not self.repo.exists(id):
            raise CheckpointNotFound(f"{id} is gone", subject=str(id))

    def put(self, name: str, data: bytes) -> None:
        """Behind Tenuto's back, as a person would."""
        self.store.place.objects[name] = data, self.store.place.tick()

    def copy(self, source: str, target: str) -> list[str]:
        """Copies a directory as a person would; the names that came to be."""
        made = []
        for name, data in self.objects.items():
            if name.startswith(f"{source}/"):
                made.append(target + name[len(source) :])
                self.put(made[-1], data)
        return made

    def damage(self, name: str) -> None:
        data = bytearray(self.objects[name])
        data[len(data) // 2] ^= 1
        self.put(name, bytes(data))


def written(created_s: float) -> str:
    """A time as manifests have it."""
    return datetime.fromtimestamp(created_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
