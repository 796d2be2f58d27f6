"""Copies a checkpoint whole to another place, in the order of a save: its claim and `begin.json`, its tables, what it
rests on, its data files, and the manifest last.

Every copy under a checkpoint's own name goes this way: to a tier, to a further location, or elsewhere. Every byte is
verified on the way. An object appears whole or not at all, so a copy that was cut off goes on with what is not there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.crashpoints import crashpoint
from tenuto.engine.read.copy_packs import copy_pack
from tenuto.errors import AlreadyExists, CheckpointNotFound, CorruptionError, ObjectNotFound, StoreError
from tenuto.maintenance.shared_packs import (
    Base,
    bases_of,
    lacking,
    out_of_trash,
    own_packs,
    packs_of,
    put_base,
    remove_aborted_mark,
)
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest, PackEntry, Receipt
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import MAX_MANIFEST
from tenuto.repo.replicated.places import home_of, places_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Store


class PlaceCopy:
    """Copies checkpoints to one of the repository's own places. Copies elsewhere override what they do otherwise.

    threads: data files that are copied at once. every_pack: of what a checkpoint rests on all data files come along,
    not only those that it needs. marks: what it rests on is marked there to go with it. alone: nobody else copies or
    removes there what lies in the directory of a checkpoint that is being copied.
    """

    threads: ClassVar[int] = 1
    every_pack: ClassVar[bool] = False
    marks: ClassVar[bool] = True
    alone: ClassVar[bool] = True

    def __init__(
        self, repo: Repo, place: Store, report: Callable[[str, int], None] = lambda name, nbytes: None, token: str = ""
    ) -> None:
        """`report`: is called with name and bytes of each data file that was put. `token`: of each put; empty: each has
        one of its own."""
        self.repo, self.place, self.token = repo, place, token
        self._report = report
        self._brought: set[CheckpointId] = set()
        self._listed: dict[str, Collection[str]] = {}

    def begin(self, id: CheckpointId) -> None:
        """Puts what comes before the first part of a checkpoint."""
        places = places_of(self.repo.store)
        if places is not None and self.place is not places.home:
            places.replica(self.place).prepare(id.manifest)

    def put(self, name: str, data: bytes) -> bool:
        """Puts a small object; returns whether it was not there."""
        return put_small(self.place, name, data, self.token)

    def lacks(self, packs: Mapping[str, int]) -> Collection[str]:
        """Returns which of these data files, given with their lengths, are not there."""
        return lacking(self.place, packs, self._listed)

    def put_pack(self, manifest: Manifest, rank: int, file: str, **how: Any) -> Receipt | None:
        """Puts a data file; returns None where it is there. `how`: as of `copy_pack`."""
        return copy_pack(self.repo, manifest, rank, file, target=self.place, token=self.token, **how)

    def send(self, name: str) -> None:
        """Copies a small object, if it is here."""
        with suppress(ObjectNotFound):
            self.put(name, self.repo.store.get(name, limit=MAX_MANIFEST))

    def bring_notes(self, id: CheckpointId) -> None:
        directory = object_names.notes_directory(id)
        if ours := home_of(self.repo.store).children(directory).objects:
            for file in set(ours).difference(self.place.children(directory).objects):
                self.send(f"{directory}/{file}")

    def there(self, id: CheckpointId) -> Collection[str]:
        """Returns the files of a checkpoint's directory that are there."""
        there = set(self.place.children(id.directory).objects)
        if object_names.MANIFEST in there and remove_aborted_mark(self.repo, self.place, id):
            there.remove(object_names.MANIFEST)
        self._listed[id.directory] = there
        return there

    def bring(self, id: CheckpointId, packs: Collection[str] | None = None) -> bool:
        """Brings whatever is lacking of a checkpoint and of what it rests on, from the fastest places that have it.
        Returns whether the manifest was put by this call. `packs`: which of its own data files come along; None: all.

        Raises CheckpointNotFound where it is removed here meanwhile, CorruptionError where no place has something
        undamaged, and StoreError.
        """
        manifest, there = self.repo.manifest(id), self.there(id)
        self.begin(id)
        with self._unless_removed(id):
            for entry in manifest.tables:
                if entry.name not in there:
                    self.put(f"{id.directory}/{entry.name}", self.repo.index_bytes(id, entry))
            parts = [*(f"{id.directory}/{entry.name}" for entry in manifest.tables), *packs_of(self.repo, manifest)]
        self.bring_packs(manifest, packs)
        crashpoint("place has the data files of a checkpoint, not its manifest")
        made = object_names.MANIFEST not in there and self.put(id.manifest, self.repo.manifest_bytes(id))
        crashpoint("place has a checkpoint")
        if made and (manifest.bases or not self.alone):
            self._take_back_unless_whole(id, parts)
        if made and there:
            out_of_trash(self.place, id)
        self.bring_notes(id)
        return made

    def bring_packs(self, manifest: Manifest, only: Collection[str] | None = None) -> None:
        """Brings the data files that a checkpoint needs, also of what it rests on. `only`: of its own, these. Raises as
        `bring`; what was put of a checkpoint that is removed meanwhile is deleted again."""
        id = manifest.id
        with self._unless_removed(id):
            for base in bases_of(self.repo, manifest, every_pack=self.every_pack):
                self.bring_base(base)
            crashpoint("place has the tables of a checkpoint, not its data files")
            own = own_packs(self.repo, manifest)
            wanted = [(rank, pack) for rank, pack in own if only is None or pack.object_name(id) in only]
            put = self._put_packs(manifest, wanted)
        crashpoint("packs copied, checkpoint not looked for again")
        if not self.repo.exists(id):
            if self.alone:
                self.place.delete(put)
            raise removed(id)

    def bring_base(self, base: Base) -> None:
        """Brings a checkpoint on which another one rests: all but its manifest, which lies in the trash there until it
        is copied itself."""
        if base.id not in self._brought:
            if self.place is not home_of(self.repo.store):
                self.begin(base.id)
                put_base(self.repo, base, self.place, self.put, mark=self.marks)
            self._put_packs(base.manifest, base.packs)
            self._brought.add(base.id)

    @contextmanager
    def _unless_removed(self, id: CheckpointId) -> Iterator[None]:
        """Raises CheckpointNotFound for what is not there because the checkpoint is not."""
        try:
            yield
        except (CorruptionError, ObjectNotFound):
            if self.repo.exists(id):
                raise
            raise removed(id) from None

    def _put_packs(self, manifest: Manifest, packs: Iterable[tuple[int, PackEntry]]) -> list[str]:
        """Returns the names of what was put."""
        named = {f"{manifest.id.directory}/{pack.name}": (rank, pack) for rank, pack in packs}
        put: list[str] = []

        def copy(name: str) -> None:
            rank, pack = named[name]
            if (receipt := self.put_pack(manifest, rank, pack.name)) is not None:
                put.append(name)
                self._report(name, receipt.length)

        lacks = self.lacks({name: pack.length for name, (_, pack) in named.items()})
        parallel_for(copy, list(lacks), self.threads)
        return put

    def _take_back_unless_whole(self, id: CheckpointId, parts: Collection[str]) -> None:
        """Takes back the manifest that was put just now where a part is gone: whoever cleans up there has not seen it
        come, or has found the checkpoint removed here."""
        if lost := lacking(self.place, parts):
            self.place.delete([id.manifest])
            if self.alone:
                raise StoreError(f"{lost[0]} was removed from {self.place.url} while {id} was copied", subject=str(id))
            raise removed(id)


def put_small(place: Store, name: str, data: bytes, token: str = "") -> bool:
    """Puts a small object; returns whether it was not there."""
    try:
        place.put_if_absent(name, Bytes(data), token=token or secrets.token_hex(16))
    except AlreadyExists:
        return False
    return True


def removed(id: CheckpointId) -> CheckpointNotFound:
    return CheckpointNotFound(f"{id} was removed while it was copied", subject=str(id))
