"""Copies packs, or parts of them, from one place to another, every byte verified on the way: damage is not copied."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tenuto.codec.chunk_map import ChunkMap
from tenuto.codec.digest import digest
from tenuto.crashpoints import crashpoint
from tenuto.engine.read.chunk_reader import AlignedBuffers, ChunkReader, chunk_runs
from tenuto.engine.read.packs import OpenPack, missing
from tenuto.errors import AlreadyExists, CheckpointNotFound, CorruptionError, StoreError, StoreFull
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, Manifest, Receipt
from tenuto.repo.format.object_names import index_file
from tenuto.repo.replicated.partial_copy import PartialCopy, encode_ranges
from tenuto.repo.replicated.places import each_copy
from tenuto.repo.repository import Repo
from tenuto.store.contract import Content, Reader, Store


def copy_packs(
    repo: Repo,
    manifest: Manifest,
    wanted: Mapping[str, PartialCopy | None],
    target: Store,
    report: Callable[[str, int], None] = lambda name, nbytes: None,
) -> None:
    """Copies packs of a checkpoint that are `wanted`, its own or those that it rests on, by name, all of a pack (None)
    or a part, from any place that has them undamaged to `target`; reports name and bytes of each.

    Raises what `copy_pack` does, and CheckpointNotFound where the checkpoint was removed meanwhile: then the copies are
    deleted again.
    """
    put: list[str] = []
    done: set[str] = set()
    ranks = {name.rpartition("/")[2].partition(".")[0] for name in wanted}
    for rank in range(len(manifest.indexes)):
        if not manifest.bases and index_file(rank).partition(".")[0] not in ranks:
            continue  # there may be thousands of indexes
        for pack in repo.packs(manifest, rank):
            name = pack.object_name(manifest.id)
            if name in wanted and name not in done:
                done.add(name)
                part = wanted[name]
                receipt = copy_pack(repo, manifest, rank, pack.name, at=pack.at, target=target, part=part)
                if receipt is not None:
                    put.append(receipt.name)
                    report(name, receipt.length)
    crashpoint("packs copied, checkpoint not looked for again")
    if not repo.exists(manifest.id):
        target.delete(put)
        raise CheckpointNotFound(f"{manifest.id} was removed while it was copied", subject=str(manifest.id))


def copy_pack(
    repo: Repo,
    manifest: Manifest,
    rank: int,
    file: str,
    *,
    target: Store,
    at: CheckpointId | None = None,
    to: str = "",
    part: PartialCopy | None = None,
    replaces: bool = False,
    watched: Callable[[Content], Content] = lambda content: content,
    token: str = "",
) -> Receipt | None:
    """Copies one pack of a checkpoint's rank, or a part of it, from the first place that has it undamaged; returns the
    receipt of the put, None if `target` has it.

    at: the checkpoint in whose directory it lies, where that is another one.
    to: its name there; empty: its own, or that of the part.

    replaces: what `target` has is damaged, and goes once another copy has been verified in full; what is put instead is
        read back and compared.
    watched: wraps the content, to tell how far it is or to end it early.
    token: of the put; one of its own by default, since others may copy it at the same time.

    Raises CorruptionError if no place has what was saved, and StoreError; then nothing was put. A reader of `target`
    may rely on the pack only while the checkpoint is there, which the caller checks afterwards.
    """
    index = repo.index(manifest, rank)
    number = next(number for number, entry in enumerate(index.packs) if (entry.name, entry.at) == (file, at))
    name = index.packs[number].object_name(manifest.id)
    put = to or (name if part is None else part.name)
    failures: list[CorruptionError | StoreError] = []
    for source in each_copy(repo.store, name):
        if put == name and source is target:
            if replaces:
                continue
            return None
        try:
            with source.open(name) as reader:
                content = watched(VerifiedContent(repo, manifest, reader, index, number, part=part))
                if replaces:
                    for _ in content.pieces():
                        pass
                    target.delete([name])
                    crashpoint("damaged copy removed, not yet written anew")
                receipt = target.put_if_absent(put, content, token=token or secrets.token_hex(16))
            if replaces:
                with target.open(name) as reader:
                    for _ in VerifiedContent(repo, manifest, reader, index, number).pieces():
                        pass
            return receipt
        except AlreadyExists:
            return None
        except StoreFull:
            raise  # another source would not help
        except (CorruptionError, StoreError) as error:
            failures.append(error)
    raise failures[0] if failures else missing(repo, name)


class VerifiedContent:
    """A pack's bytes as they lie in a store, or the partial copy of a pack. Raises CorruptionError, in the middle of
    them, where they are not what the index says."""

    def __init__(
        self,
        repo: Repo,
        manifest: Manifest,
        reader: Reader,
        index: Index,
        number: int,
        *,
        part: PartialCopy | None = None,
    ) -> None:
        """`reader`: of pack `number` of the index, in any place."""
        self._entry = index.packs[number]
        self._pack = OpenPack(self._entry.object_name(manifest.id), reader, None)
        self._index = index
        self._chunks = ChunkMap.of(index)
        self._reader = ChunkReader(repo, manifest.id, self._chunks, index.packs)
        span = None if part is None else part.span
        self._runs = list(chunk_runs(self._chunks, pack=number, span=span))
        self._ranges = b"" if part is None else self._encoded_ranges()

    def _encoded_ranges(self) -> bytes:
        """Returns what stands before the bytes of a partial copy: the pack's header, and the chunks of the runs."""
        bounds = [(0, self._entry.header_length), *((run.start, run.stop) for run in self._runs)]
        low, high = np.array(bounds, np.int64).T
        return encode_ranges((low, high), self._entry.length)

    @property
    def length(self) -> int:
        data = self._entry.header_length + sum(run.stop - run.start for run in self._runs)
        return len(self._ranges) + data

    def pieces(self) -> Iterator[memoryview]:
        entry, pack, name = self._entry, self._pack, self._pack.name
        if pack.reader.length != entry.length:
            message = f"{name} is {pack.reader.length} bytes long; {entry.length} were saved"
            raise CorruptionError(message, subject=name, object=name)
        if self._ranges:
            yield memoryview(self._ranges)
        header = AlignedBuffers().fetch(pack, 0, entry.header_length)
        if digest(header) != entry.header_digest:
            raise CorruptionError(f"the header of {name} is damaged", subject=name, object=name)
        yield header.data
        for run in self._runs:
            yield self._reader.read_run(pack, run, lambda row: self._index.specs[row].path).data
