"""A sealed image read as what it is: a complete checkpoint in one mapping.

`open_image` checks a seal against the bytes that exist, then returns the image as a store of three kinds of
objects (packs, index, manifest, under the names that a repository has), so that the one restore path reads and verifies
it: every chunk goes straight from the mapping into its destination, and is digested there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Final

import numpy as np

from tenuto.codec.chunk_map import ChunkMap
from tenuto.codec.digest import digest
from tenuto.engine.memory_tier.seal import Seal, SealedObject, newest
from tenuto.engine.read.chunk_reader import ChunkReader, chunk_runs
from tenuto.engine.read.local_state import Part
from tenuto.engine.staging.arena import keep_from_children
from tenuto.engine.staging.slots import ROOM, read_seals
from tenuto.errors import CorruptionError, KeyMissing, ObjectNotFound, StoreDenied, Tampered
from tenuto.model.records import Index, Manifest, Receipt
from tenuto.repo.format.index import decode_packs
from tenuto.repo.format.object_names import index_file
from tenuto.repo.format.safetensors import ALIGNMENT
from tenuto.repo.repository import Repo
from tenuto.state.contract import Buffer
from tenuto.store.contract import Capabilities, Content, Entry, Listing, Stat

if TYPE_CHECKING:
    from tenuto.seal.keys import RepositoryKeys

_LOCAL: Final = "shared memory"


class Image:
    """One sealed image, mapped. `repo` holds one checkpoint, `footer.id`. Close it before its slot is written to."""

    def __init__(self, repo: Repo, footer: Seal, number: int, mapping: mmap.mmap | None) -> None:
        self.repo = repo
        self.footer = footer
        self.number = number
        """Of the block that has `footer`."""
        self._mapping = mapping

    def manifest(self) -> Manifest:
        return self.repo.manifest(self.footer.id)

    def close(self) -> None:
        """Unmaps what was mapped for it, once there are no views any more."""
        self.repo.store.close()
        if self._mapping is None:
            return
        with contextlib.suppress(BufferError):  # a view exists: the mapping goes with the last one
            self._mapping.close()


def open_image(
    descriptor: int,
    name: str,
    *,
    chunk_bytes: int,
    keys: RepositoryKeys | None,
    mapped: memoryview | None = None,
) -> Image | None:
    """Returns the image in the file of the slot called `name`; None where it is not sealed.

    keys: of its repository: whoever has none cannot have made the image, or changed it.
    mapped: the file's bytes, where they are mapped already.

    CorruptionError where its bytes are not those that its seal describes; Tampered where the code of the keys says so.
    """
    found = newest(read_seals(descriptor), name)
    if found is None:
        return None
    number, footer = found
    status = os.fstat(descriptor)
    if footer.image % ALIGNMENT or footer.length + ROOM > status.st_size or status.st_blocks * 512 < status.st_size:
        raise CorruptionError(f"{name}: its seal describes more than the file has", subject=name)
    if mapped is not None and len(mapped) == status.st_size:
        _authenticate(mapped, footer, name, keys)
        return Image(_read(_parts(mapped, footer, name), footer, name, chunk_bytes), footer, number, None)
    mapping = _mapped(descriptor, status.st_size)
    try:
        _authenticate(memoryview(mapping).toreadonly(), footer, name, keys)
        parts = _parts(memoryview(mapping).toreadonly(), footer, name)
    except BaseException:
        # The error that is being raised may refer to views: then the mapping goes with the last of them.
        with contextlib.suppress(BufferError):
            mapping.close()
        raise
    return Image(_read(parts, footer, name, chunk_bytes), footer, number, mapping)


def _authenticate(data: memoryview, footer: Seal, name: str, keys: RepositoryKeys | None) -> None:
    if keys is None:
        return
    from tenuto.seal.content_code import check_content

    ends = [footer.image, footer.image + footer.index.length, footer.length]
    try:
        footer.check(keys, name)  # first: it takes no look at the image
        parts = [data[begin:end] for begin, end in pairwise([0, *ends])]
        check_content(keys, footer.identity, parts, footer.code, name)
    except KeyMissing as error:  # an image that cannot be judged is passed over, and keeps nobody from starting
        raise Tampered(error.message, subject=name, object=name) from None


def _read(parts: Mapping[str, memoryview], footer: Seal, name: str, chunk_bytes: int) -> Repo:
    return Repo(ImageStore(parts, name), footer.repository, chunk_bytes)


def check_image(image: Image, index: Index) -> None:
    """Digests every header and every chunk where it lies. Raises CorruptionError, which names the leaf."""
    store, id = image.repo.store, image.footer.id
    views = []
    for pack in index.packs:
        with store.open(f"{id.directory}/{pack.name}") as reader:
            view = reader.view()
            assert view is not None
            views.append(view)
            if digest(view[: pack.header_length]) != pack.header_digest:
                raise CorruptionError(f"the header of {pack.name} is damaged", subject=pack.name)
    chunks = ChunkMap.of(index)
    verifier = ChunkReader(image.repo, id, chunks, index.packs)
    for run in chunk_runs(chunks):
        data = np.frombuffer(views[run.pack][run.start : run.stop], np.uint8)
        verifier.check_run(index.packs[run.pack].name, run, data, lambda row: index.specs[row].path)


def _mapped(descriptor: int, length: int) -> mmap.mmap:
    """Maps a file with every page in place: one page fault after the other would cost as much as the copy."""
    populate = getattr(mmap, "MAP_POPULATE", 0)
    mapping = mmap.mmap(descriptor, length, mmap.MAP_SHARED | populate, mmap.PROT_READ)
    keep_from_children(mapping)
    return mapping


def _parts(data: memoryview, footer: Seal, name: str) -> dict[str, memoryview]:
    """Returns the objects of the checkpoint by name; index and manifest are checked by the digests in the seal."""
    at = footer.image
    index = _part(data, at, footer.index, f"the index of {name}")
    manifest = _part(data, at + footer.index.length, footer.manifest, f"the manifest of {name}")
    directory = footer.id.directory
    save_id, packs = decode_packs(bytes(index), id=footer.id, rank=footer.rank, repository=footer.repository)
    if save_id != footer.save_id:
        raise CorruptionError(f"{name}: its index belongs to another save", subject=name)
    found = {f"{directory}/{index_file(footer.rank)}": index, footer.id.manifest: manifest}
    begin = 0
    for pack in packs:
        if pack.length > footer.image - begin:
            raise CorruptionError(f"{name}: {pack.name} reaches beyond the image", subject=name)
        found[f"{directory}/{pack.name}"] = data[begin : begin + pack.length]
        begin += -(-pack.length // ALIGNMENT) * ALIGNMENT
    return found


def _part(data: memoryview, begin: int, part: SealedObject, what: str) -> memoryview:
    found = data[begin : begin + part.length]
    if digest(found) != part.digest:
        raise CorruptionError(f"{what} is damaged: its digest is not the one in the seal", subject=what)
    return found


class ImageStore:
    """Objects that lie in one mapping. Nothing can be put or removed."""

    def __init__(self, parts: Mapping[str, memoryview], name: str) -> None:
        self._parts = dict(parts)
        self._name = name

    @property
    def url(self) -> str:
        return f"{_LOCAL} ({self._name})"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(commits=False, persistent=False)

    def probe(self) -> Capabilities:
        return self.capabilities

    def get(self, name: str, *, limit: int) -> bytes:
        data = self._find(name)
        if len(data) > limit:
            raise CorruptionError(f"{name} has {len(data)} bytes where at most {limit} belong", subject=name)
        return bytes(data)

    def open(self, name: str) -> ImageReader:
        return ImageReader(self._find(name), name)

    def stat(self, name: str) -> Stat:
        return Stat(len(self._find(name)), 0)

    def children(self, prefix: str, *, after: str = "") -> Listing:
        start = f"{prefix}/" if prefix else ""
        below = [name[len(start) :] for name in self._parts if name.startswith(start)]
        directories = {rest.partition("/")[0] for rest in below if "/" in rest}
        found = Listing(tuple(sorted(directories)), tuple(sorted(rest for rest in below if "/" not in rest)))
        return found.behind(after)

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        start = f"{prefix}/" if prefix else ""
        return (Entry(name, len(self._parts[name])) for name in sorted(self._parts) if name.startswith(start))

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        raise self._read_only(name)

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        raise self._read_only(self._name)

    def settle(self, name: str) -> None:
        raise self._read_only(name)

    def free_bytes(self) -> int | None:
        return 0

    def close(self) -> None:
        self._parts.clear()

    def _find(self, name: str) -> memoryview:
        found = self._parts.get(name)
        if found is None:
            raise ObjectNotFound(f"there is no object {name} ({self.url})", subject=name)
        return found

    def _read_only(self, name: str) -> StoreDenied:
        return StoreDenied(f"{self.url} is only read", subject=name, hint="tenuto flush WHERE writes it to its store")


class ImageReader:
    """One object of an image."""

    def __init__(self, data: memoryview, name: str) -> None:
        self._data = data
        self._name = name

    @property
    def length(self) -> int:
        return len(self._data)

    @property
    def alignment(self) -> int:
        return 1

    def read_into(self, offset: int, buffer: memoryview) -> None:
        found = self._data[offset : offset + len(buffer)]
        if len(found) != len(buffer):
            raise CorruptionError(f"{self._name} ends before offset {offset + len(buffer)}", subject=self._name)
        buffer[:] = found

    def view(self) -> memoryview | None:
        return self._data

    def close(self) -> None:
        """The mapping stays until the image is closed."""

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parts_of(image: Image) -> dict[Part, Buffer]:
    """Returns the boxes of leaves that an image has, with their bytes in place, unverified. They must not be used once
    the image is closed. Raises CorruptionError."""
    manifest = image.manifest()
    index, views = image.repo.index(manifest, image.footer.rank), []
    for pack in index.packs:
        with image.repo.store.open(f"{manifest.id.directory}/{pack.name}") as reader:
            view = reader.view()
            assert view is not None, "it lies in memory"
            views.append(np.frombuffer(view, np.uint8))
    places = zip(index.pack.tolist(), index.offset.tolist(), index.length.tolist(), index.specs, strict=True)
    return {
        Part.of(spec, private=spec.private): views[pack][offset : offset + length]
        for pack, offset, length, spec in places
    }
