"""Where the bytes of damaged objects still lie: other places of the repository, copies elsewhere, checkpoints with
equal chunks, and images in this machine's memory.

A source is believed chunk by chunk: what it gives counts once its digest is the one that the index of the damaged
checkpoint has. Nothing that a source says of itself is needed for that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import numpy as np

from tenuto.codec.chunk_map import Array, ChunkMap, Chunks, Column
from tenuto.engine.memory_tier import slot_file
from tenuto.engine.memory_tier.image_store import open_image
from tenuto.engine.memory_tier.listing import images
from tenuto.engine.memory_tier.seal import Seal
from tenuto.errors import CorruptionError, RepositoryError, StoreError, TenutoError, UsageError, typed
from tenuto.maintenance.copy_record import registered_copies
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, Manifest
from tenuto.record import record
from tenuto.repo.format.object_names import STAGED
from tenuto.repo.replicated.places import all_places, followers_of, home_of, places_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import Entry, Store, Where, leftovers_of
from tenuto.store.registry import open_store

CHUNKS_KEPT: Final = 1 << 20
"""So many chunks the tables may have that are kept for the next damaged pack."""


@record
class Image:
    """A sealed image that a dead process has left in memory. `repo` holds one checkpoint, as if it were a store."""

    repo: Repo
    footer: Seal


@record(eq=False)
class ChunkTable:
    """The chunks of one index by digest and length, sorted, so that those of a damaged object are found at once.

    name: what the plan calls the source.
    key: uint64 [n], the first half of each stored digest, ascending; chunks: in the same order.
    """

    name: str
    store: Store
    id: CheckpointId
    index: Index
    key: Array
    chunks: Chunks

    @classmethod
    def of(cls, name: str, store: Store, id: CheckpointId, index: Index) -> ChunkTable:
        chunks = ChunkMap.of(index)
        found = chunks.all_stored()
        key = chunk_keys(chunks.stored_digests, found)
        order = np.argsort(key, kind="stable")
        return cls(name, store, id, index, key[order], found.take(order))

    def find(self, wanted: Array, nbytes: Column) -> Column:
        """Returns for each wanted key, of a chunk of so many bytes, the place of an equal one in `chunks`; -1 where
        there is none. Half a digest finds it: whoever reads it compares all of the digest."""
        if not len(self.key):
            return np.full(len(wanted), -1, np.int64)
        at = np.minimum(np.searchsorted(self.key, wanted), len(self.key) - 1)
        return np.where((self.key[at] == wanted) & (self.chunks.stored[at] == nbytes), at, -1)


def chunk_keys(digests: Array, chunks: Chunks) -> Array:
    """Returns the first half of the stored digest of each chunk, uint64 [n]."""
    half: Array = np.ascontiguousarray(digests[chunks.digest, :8]).view(np.uint64).reshape(-1)
    return half


@dataclass
class Sources:
    """All places that a repair may read from, opened once. A context manager.

    copies: verified copies elsewhere, each with its URL. unreached: copies on the list that cannot be opened, and why.
    """

    repo: Repo
    copies: list[tuple[str, Store]] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    _images: list[Image] | None = None
    _ids: list[CheckpointId] | None = None
    _ranks: dict[CheckpointId, int] = field(default_factory=dict)
    """How many indexes each checkpoint has that was asked for chunks; 0 where its manifest cannot be read."""
    _tables: OrderedDict[tuple[CheckpointId, int], ChunkTable | None] = field(default_factory=OrderedDict)
    """Those used last, at the end; None for an index that cannot be read."""
    _chunks: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def of(cls, repo: Repo, others: Sequence[Where] = ()) -> Sources:
        """Opens the copies on the repository's list and `others`. Raises UsageError where one of `others` is not of
        this repository, and what opening it raises; RepositoryError where this is no home."""
        places = places_of(repo.store)
        if places is not None and places.of:
            raise RepositoryError(
                f"{repo.url} is a location, or a copy, of the repository whose primary is {places.of}",
                subject=repo.url,
                hint=f"{typed('tenuto', 'repair', places.of)} repairs locations; "
                f"{typed('tenuto', 'replicate', places.of, repo.url, '--read')} repairs a copy",
            )
        found = cls(repo)
        known = {store.url for store in found.places()}
        for where in others:
            store = open_store(where)
            other = Repo.open(store)
            if other.id != repo.id:
                raise UsageError(
                    f"{other.url} is another repository: it has nothing of {repo.url}",
                    subject=other.url,
                    hint="--from names a copy that `tenuto replicate` has made, or a backup of the same repository",
                )
            if other.url not in known:
                found.copies.append((other.url, home_of(other.store)))
                known.add(other.url)
        for copy in registered_copies(repo):
            if copy.url not in known:
                found._open_copy(copy.url)
        return found

    def _open_copy(self, url: str) -> None:
        try:
            other = Repo.open(open_store(url), report=lambda message: None)
        except TenutoError as error:
            self.unreached.append(f"the copy at {url}: {error.message}")
            return
        if other.id == self.repo.id:
            self.copies.append((url, home_of(other.store)))

    def images(self) -> list[Image]:
        """Returns the images that dead processes have left on this machine. Until the sources are closed nobody else
        can have them, also no training that would resume from one: so they are asked for last."""
        if self._images is None:
            self._images = []
            for found in images(repository=self.repo.id):
                if found.footer is None or found.alive:
                    continue
                with suppress(OSError, TenutoError):
                    slot = slot_file.take_slot(found.slot)
                    self._stack.callback(slot.leave)
                    with slot.descriptor() as descriptor:
                        size, keys = self.repo.chunk_bytes, self.repo.keys
                        image = open_image(descriptor, slot.name, chunk_bytes=size, keys=keys)
                    if image is not None:
                        self._stack.callback(image.close)
                        self._images.append(Image(image.repo, image.footer))
        return self._images

    def places(self) -> list[Store]:
        """Returns every place of the repository in reach, the home first."""
        return [*all_places(self.repo.store), *followers_of(self.repo.store)]

    def twins(self, target: Store, name: str) -> Iterator[tuple[str, Store, str]]:
        """Yields what may hold the very same object: name of the source, store, and the object's name there. First what
        a repair that broke off has left beside it."""
        for entry in self.staged(target, name):
            yield "a repair that broke off", target, entry.name
        for store in self.places():
            if store is not target:
                yield store.url, store, name
        for url, store in self.copies:
            yield f"the copy {url}", store, name

    def staged(self, target: Store, name: str) -> list[Entry]:
        """Returns what repairs have put beside an object."""
        beside = leftovers_of(target, name.rpartition("/")[0])
        return [entry for entry in beside if entry.name.startswith(name + STAGED)]

    def tables(self, id: CheckpointId, save_id: str) -> Iterator[ChunkTable]:
        """Yields the chunks of other objects, those that are likeliest to be equal first: of the checkpoint itself, of
        its neighbours in step, of other runs, of images in memory. What cannot be read is passed over."""
        for other in sorted(self._checkpoints(), key=lambda one: _distance(id, one)):
            yield from self._tables_of(other)
        for image in sorted(self.images(), key=lambda one: one.footer.save_id != save_id):
            with suppress(TenutoError):
                found = image.repo.manifest(image.footer.id)
                index = image.repo.index(found, image.footer.rank)
                name = f"the image of {image.footer.id} in memory"
                yield ChunkTable.of(name, image.repo.store, image.footer.id, index)

    def _tables_of(self, id: CheckpointId) -> Iterator[ChunkTable]:
        """Yields the tables of a checkpoint, as far as they can be read. Each is read once while it is kept."""
        manifest: Manifest | None = None
        if id not in self._ranks:
            try:
                manifest = self.repo.manifest(id)
            except StoreError:
                return
            except TenutoError:
                self._ranks[id] = 0
                return
            self._ranks[id] = len(manifest.indexes)
        for rank in range(self._ranks[id]):
            key = id, rank
            if key in self._tables:
                self._tables.move_to_end(key)
                table = self._tables[key]
            else:
                try:
                    manifest = manifest or self.repo.manifest(id)
                    table = ChunkTable.of(f"{id}", self.repo.store, id, self.repo.index(manifest, rank))
                except CorruptionError:
                    table = None
                except TenutoError:
                    continue
                self._keep(key, table)
            if table is not None:
                yield table

    def _keep(self, key: tuple[CheckpointId, int], table: ChunkTable | None) -> None:
        self._tables[key] = table
        self._chunks += 0 if table is None else len(table.key)
        while self._chunks > CHUNKS_KEPT:
            _, gone = self._tables.popitem(last=False)
            self._chunks -= 0 if gone is None else len(gone.key)

    def _checkpoints(self) -> list[CheckpointId]:
        if self._ids is None:
            runs = ((run, attempt) for run in self.repo.runs() for attempt in self.repo.attempts(run))
            self._ids = [
                CheckpointId(run, attempt, step) for run, attempt in runs for step in self.repo.committed(run, attempt)
            ]
        return self._ids

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _distance(id: CheckpointId, other: CheckpointId) -> tuple[bool, int, int]:
    return other.run != id.run, abs(other.step - id.step), abs(other.attempt - id.attempt)
