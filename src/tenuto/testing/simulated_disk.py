"""An in-memory file system behind the local store's seam: hard links, direct I/O, reservation, a space limit.

It is as strict as Linux where the protocol could go wrong (exclusive create, no replacing link, alignment of direct
I/O, ENOSPC), and is created from a `DiskImage` in microseconds: contents are shared until they are written.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from tenuto.record import record
from tenuto.store.local.syscalls import Kind, Status

_FIRST_DESCRIPTOR: Final = 1_000_000
"""Far above real descriptors, so that passing one to `os` by mistake is an error and closes nothing."""


def fault(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


@dataclass(slots=True)
class _File:
    blocks: list[bytes]
    size: int
    modified: int
    reserved: int = 0
    """Blocks promised by `reserve`; they count as used before they are written."""
    links: int = 0

    @property
    def allocated(self) -> int:
        return max(len(self.blocks), self.reserved)


@dataclass(slots=True)
class _Directory:
    entries: dict[str, int]


@dataclass(slots=True)
class _Open:
    path: str
    inode: int
    direct: bool
    writable: bool


@dataclass
class SimulatedDisk:
    """A simulated disk. `capacity`: bytes that files may take, None for no limit. `direct_io`: whether O_DIRECT is
    accepted."""

    capacity: int | None = None
    direct_io: bool = True
    _files: dict[int, _File] = field(default_factory=dict)
    _directories: dict[int, _Directory] = field(default_factory=lambda: {ROOT: _Directory({})})
    _open: dict[int, _Open] = field(default_factory=dict)
    _next: int = 1
    _next_descriptor: int = _FIRST_DESCRIPTOR
    _clock: int = 1
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @classmethod
    def holding(cls, image: DiskImage, *, direct_io: bool = False) -> SimulatedDisk:
        """Creates the disk that a machine would find after the crash that left `image`."""
        disk = cls(direct_io=direct_io)
        disk._directories = {inode: _Directory(dict(entries)) for inode, entries in image.directories.items()}
        disk._files = {inode: _File(list(entry.blocks), entry.size, 1) for inode, entry in image.files.items()}
        for entry in disk._directories.values():
            for inode in entry.entries.values():
                if inode in disk._files:
                    disk._files[inode].links += 1
        disk._next = max((*disk._directories, *disk._files)) + 1
        return disk

    def image(self) -> DiskImage:
        """Returns what a clean shutdown would leave now."""
        with self._lock:
            return DiskImage(
                {inode: dict(entry.entries) for inode, entry in self._directories.items()},
                {inode: Contents(tuple(entry.blocks), entry.size) for inode, entry in self._files.items()},
            )

    def files(self, directory: str) -> dict[str, tuple[int, tuple[bytes, ...]]]:
        """Returns size and blocks of each file directly in `directory`, by name."""
        with self._lock:
            entries = self._directories[self._lookup(directory)].entries
            entry = {name: self._files[inode] for name, inode in entries.items() if inode in self._files}
            return {name: (file.size, tuple(file.blocks)) for name, file in entry.items()}

    @property
    def open_descriptors(self) -> int:
        return len(self._open)

    # Descriptors.

    def create(self, path: str, *, direct: bool = False) -> int:
        with self._lock:
            directory, name = self._parent(path)
            if name in directory.entries:
                raise fault(errno.EEXIST, path)
            self._check_direct(direct, path)
            inode = self._new_inode()
            self._files[inode] = _File([], 0, self._tick(), links=1)
            directory.entries[name] = inode
            return self._descriptor(_Open(path, inode, direct, writable=True))

    def open(self, path: str, *, direct: bool = False) -> int:
        with self._lock:
            inode = self._lookup(path)
            if inode in self._directories:
                raise fault(errno.EISDIR, path)
            self._check_direct(direct, path)
            return self._descriptor(_Open(path, inode, direct, writable=False))

    def reopen(self, path: str) -> int:
        """Opens an existing file for writing and truncates it (O_TRUNC). Not part of the seam: seeded bugs use it."""
        with self._lock:
            file = self._files[self._lookup(path)]
            file.blocks, file.size = [], 0
            return self._descriptor(_Open(path, self._lookup(path), direct=False, writable=True))

    def close(self, descriptor: int) -> None:
        with self._lock:
            if self._open.pop(descriptor, None) is None:
                raise fault(errno.EBADF, str(descriptor))

    def set_direct(self, descriptor: int, direct: bool) -> None:
        entry = self._open_file(descriptor)
        self._check_direct(direct, entry.path)
        entry.direct = direct

    def reserve(self, descriptor: int, length: int) -> None:
        with self._lock:
            file = self._writable(descriptor)
            blocks = -(-length // BLOCK)
            self._admit(file, blocks, self._open[descriptor].path)
            file.reserved = max(file.reserved, blocks)
            file.size = max(file.size, length)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            file, entry = self._writable(descriptor), self._open[descriptor]
            if entry.direct:
                self._check_alignment(buffers, offset, entry.path)
            data = b"".join(bytes(buffer) for buffer in buffers)
            self._admit(file, -(-(offset + len(data)) // BLOCK), entry.path)
            overwrite(file.blocks, offset, data)
            file.size = max(file.size, offset + len(data))
            file.modified = self._tick()
            return len(data)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, *, nowait: bool = False) -> int:
        with self._lock:
            entry = self._open_file(descriptor)
            if entry.direct:
                self._check_alignment(buffers, offset, entry.path)
            file = self._files[entry.inode]
            wanted = sum(buffer.nbytes for buffer in buffers)
            data = read(file.blocks, offset, max(0, min(offset + wanted, file.size) - offset))
            done = 0
            for buffer in buffers:
                piece = data[done : done + buffer.nbytes]
                buffer.cast("B")[: len(piece)] = piece
                done += len(piece)
            return done

    def truncate(self, descriptor: int, length: int) -> None:
        with self._lock:
            file = self._writable(descriptor)
            cut(file.blocks, length)
            file.reserved = min(file.reserved, -(-length // BLOCK))
            file.size = length
            file.modified = self._tick()

    def fsync(self, descriptor: int) -> None:
        self._open_file(descriptor)

    def fstatus(self, descriptor: int) -> Status:
        with self._lock:
            return self._status_of(self._open_file(descriptor).inode)

    # Names.

    def link(self, source: str, target: str) -> None:
        with self._lock:
            inode = self._lookup(source)
            directory, name = self._parent(target)
            if name in directory.entries:
                raise fault(errno.EEXIST, target)
            if inode in self._directories:
                raise fault(errno.EPERM, source)
            directory.entries[name] = inode
            self._files[inode].links += 1

    def rename_noreplace(self, source: str, target: str) -> None:
        with self._lock:
            if self._parent(target)[1] in self._parent(target)[0].entries:
                raise fault(errno.EEXIST, target)
            self.rename(source, target)

    def rename(self, source: str, target: str) -> None:
        """Replaces `target` silently, like rename(2). Not part of the seam: seeded bugs use it."""
        with self._lock:
            inode = self._lookup(source)
            old, old_name = self._parent(source)
            new, new_name = self._parent(target)
            replaced = self._files.get(new.entries.get(new_name, -1))
            if replaced is not None:
                replaced.links -= 1
            new.entries[new_name] = inode
            del old.entries[old_name]

    def unlink(self, path: str) -> None:
        with self._lock:
            inode = self._lookup(path)
            if inode in self._directories:
                raise fault(errno.EISDIR, path)
            directory, name = self._parent(path)
            del directory.entries[name]
            self._files[inode].links -= 1

    def mkdir(self, path: str) -> None:
        with self._lock:
            directory, name = self._parent(path)
            if name in directory.entries:
                raise fault(errno.EEXIST, path)
            inode = self._new_inode()
            self._directories[inode] = _Directory({})
            directory.entries[name] = inode

    def rmdir(self, path: str) -> None:
        with self._lock:
            inode = self._lookup(path)
            if inode not in self._directories:
                raise fault(errno.ENOTDIR, path)
            if self._directories[inode].entries:
                raise fault(errno.ENOTEMPTY, path)
            directory, name = self._parent(path)
            del directory.entries[name]
            del self._directories[inode]

    def listdir(self, path: str) -> list[tuple[str, Kind]]:
        with self._lock:
            inode = self._lookup(path)
            if inode not in self._directories:
                raise fault(errno.ENOTDIR, path)
            return [(name, self._kind(child)) for name, child in self._directories[inode].entries.items()]

    def status(self, path: str) -> Status:
        with self._lock:
            return self._status_of(self._lookup(path))

    def fsync_directory(self, path: str) -> None:
        with self._lock:
            if self._lookup(path) not in self._directories:
                raise fault(errno.ENOTDIR, path)

    def map(self, descriptor: int, length: int) -> memoryview:
        raise fault(errno.ENODEV, "a simulated file cannot be mapped")

    def free_bytes(self, path: str) -> int:
        with self._lock:
            self._lookup(path)
            return 1 << 40 if self.capacity is None else max(0, self.capacity - self._used())

    def _lookup(self, path: str) -> int:
        inode = ROOT
        for name in path.split("/"):
            if not name:
                continue
            directory = self._directories.get(inode)
            if directory is None:
                raise fault(errno.ENOTDIR, path)
            try:
                inode = directory.entries[name]
            except KeyError:
                raise fault(errno.ENOENT, path) from None
        return inode

    def _parent(self, path: str) -> tuple[_Directory, str]:
        head, _, name = path.rstrip("/").rpartition("/")
        if not name:
            raise fault(errno.EEXIST, path)
        directory = self._directories.get(self._lookup(head))
        if directory is None:
            raise fault(errno.ENOTDIR, path)
        return directory, name

    def _kind(self, inode: int) -> Kind:
        return "directory" if inode in self._directories else "file"

    def _status_of(self, inode: int) -> Status:
        file = self._files.get(inode)
        if file is None:
            return Status("directory", 0, 1)
        return Status("file", file.size, file.modified, file.links)

    def _descriptor(self, entry: _Open) -> int:
        self._next_descriptor += 1
        self._open[self._next_descriptor] = entry
        return self._next_descriptor

    def _open_file(self, descriptor: int) -> _Open:
        try:
            return self._open[descriptor]
        except KeyError:
            raise fault(errno.EBADF, str(descriptor)) from None

    def _writable(self, descriptor: int) -> _File:
        entry = self._open_file(descriptor)
        if not entry.writable:
            raise fault(errno.EBADF, entry.path)
        return self._files[entry.inode]

    def _new_inode(self) -> int:
        self._next += 1
        return self._next - 1

    def _tick(self) -> int:
        self._clock += 1_000_000
        return self._clock

    def _used(self) -> int:
        opened = {entry.inode for entry in self._open.values()}
        return BLOCK * sum(file.allocated for inode, file in self._files.items() if file.links or inode in opened)

    def _admit(self, file: _File, blocks: int, path: str) -> None:
        if self.capacity is not None and self._used() + BLOCK * max(0, blocks - file.allocated) > self.capacity:
            raise fault(errno.ENOSPC, path)

    def _check_direct(self, direct: bool, path: str) -> None:
        if direct and not self.direct_io:
            raise fault(errno.EINVAL, path)

    def _check_alignment(self, buffers: Sequence[memoryview], offset: int, path: str) -> None:
        for buffer in buffers:
            if offset % 512 or buffer.nbytes % 512 or np.frombuffer(buffer, np.uint8).ctypes.data % 512:
                raise fault(errno.EINVAL, path)


def read(blocks: list[bytes], offset: int, length: int) -> bytes:
    """Returns `length` bytes from `offset`; unwritten bytes are zeroes."""
    if length <= 0:
        return b""
    first, skip = divmod(offset, BLOCK)
    data = b"".join(blocks[first : -(-(offset + length) // BLOCK)])[skip : skip + length]
    return data + bytes(length - len(data))


def overwrite(blocks: list[bytes], offset: int, data: bytes) -> range:
    """Writes into a file's blocks, growing it with zeroes; returns the numbers of the changed blocks."""
    if not data:
        return range(0)
    first, skip = divmod(offset, BLOCK)
    end = -(-(offset + len(data)) // BLOCK)
    blocks.extend([ZEROES] * (end - len(blocks)))
    edge = b"".join(blocks[first:end])
    whole = edge[:skip] + data + edge[skip + len(data) :]
    blocks[first:end] = [whole[at : at + BLOCK] for at in range(0, len(whole), BLOCK)]
    return range(first, end)


def cut(blocks: list[bytes], length: int) -> None:
    """Drops everything beyond `length`, so that growing again reads zeroes."""
    full, rest = divmod(length, BLOCK)
    tail = blocks[full][:rest] if rest and full < len(blocks) else b""
    del blocks[full:]
    if tail:
        blocks.append(tail + bytes(BLOCK - rest))


BLOCK: Final = 4096
ZEROES: Final = bytes(BLOCK)
ROOT: Final = 0
"""The inode of `/`, which always exists."""


@record
class Contents:
    """A file's bytes: `size` of them, in blocks of 4096; blocks beyond the tuple read as zeroes."""

    blocks: tuple[bytes, ...] = ()
    size: int = 0

    _digests: list[bytes] = field(default_factory=list, repr=False, compare=False)
    """The digest, once it was asked for: most files of the disks that one point leaves are the same objects."""

    def data(self) -> bytes:
        content = b"".join(self.blocks)
        return content[: self.size] + bytes(max(0, self.size - len(content)))

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal for equal bytes."""
        if not self._digests:
            self._digests.append(xxhash.xxh3_128_digest(self.data()))
        return self._digests[0]


@record
class DiskImage:
    """Directories (name -> inode) and files, by inode. Only what is reachable from ROOT counts."""

    directories: Mapping[int, Mapping[str, int]]
    files: Mapping[int, Contents]

    def tree(self) -> dict[str, Contents | None]:
        """Returns every reachable path with its contents, None for a directory; sorted by path."""
        return {path: self.files.get(inode) for path, inode in self.inodes().items()}

    def inodes(self) -> dict[str, int]:
        """Returns every reachable path with its inode, sorted by path."""
        found: dict[str, int] = {}
        pending = [("", ROOT)]
        while pending:
            prefix, directory = pending.pop()
            for name, inode in self.directories[directory].items():
                path = f"{prefix}/{name}"
                found[path] = inode
                if inode in self.directories:
                    pending.append((path, inode))
        return dict(sorted(found.items()))

    def fingerprint(self) -> bytes:
        """Returns 16 bytes that are equal for disks with the same names and bytes, whatever the inode numbers."""
        found: list[tuple[str, bytes]] = []
        pending = [("", ROOT)]
        while pending:
            prefix, directory = pending.pop()
            for name, inode in self.directories[directory].items():
                path = f"{prefix}/{name}"
                contents = self.files.get(inode)
                found.append((path, b"directory" if contents is None else contents.digest))
                if inode in self.directories:
                    pending.append((path, inode))
        found.sort()  # no path is there twice
        return xxhash.xxh3_128_digest(b"".join([b"%b\0%b" % (path.encode(), digest) for path, digest in found]))
