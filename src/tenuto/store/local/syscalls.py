"""The file system of the local store: the interface `FileSystem`, and `OperatingSystem`, which implements it.

Every file-system call of the local store goes through this interface, so that tests can record, fail or simulate it; no
other module in `store.local` touches a file through `os`. Paths are absolute strings. Methods raise OSError as the
operating system does. Linux is supported in full; macOS without direct I/O, reservation and cache probes. Descriptors
are close-on-exec, and a symbolic link as last component is never followed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Sequence
from functools import cache
from typing import Final, Literal, Protocol, runtime_checkable

from tenuto.record import record

Kind = Literal["file", "directory", "other"]


@record
class Status:
    kind: Kind
    size: int
    modified_ns: int
    links: int = 1
    """The number of names of the file, where the file system counts them."""


class FileSystem(Protocol):
    def create(self, path: str, *, direct: bool = False) -> int:
        """Creates a file for writing (O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, mode 0o666 less umask). Returns a
        descriptor."""
        ...

    def open(self, path: str, *, direct: bool = False) -> int:
        """Opens an existing file for reading; never follows a final symbolic link."""
        ...

    def close(self, descriptor: int) -> None: ...

    def set_direct(self, descriptor: int, direct: bool) -> None:
        """Turns O_DIRECT on or off. Raises OSError where the file system has none."""
        ...

    def reserve(self, descriptor: int, length: int) -> None:
        """Reserves space from 0 (posix_fallocate). Raises ENOSPC or EDQUOT if it does not fit, EOPNOTSUPP where
        unsupported."""
        ...

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, *, nowait: bool = False) -> int:
        """Reads with preadv; with `nowait` only from the page cache (BlockingIOError if nothing is there)."""
        ...

    def map(self, descriptor: int, length: int) -> memoryview:
        """Maps the first `length` bytes read-only. Raises OSError where files cannot be mapped."""
        ...

    def truncate(self, descriptor: int, length: int) -> None: ...

    def fsync(self, descriptor: int) -> None: ...

    def fstatus(self, descriptor: int) -> Status: ...

    def link(self, source: str, target: str) -> None:
        """Makes a second name. Raises FileExistsError if `target` exists."""
        ...

    def rename_noreplace(self, source: str, target: str) -> None:
        """Renames without replacing (renameat2 with RENAME_NOREPLACE). Raises EINVAL or ENOSYS where unsupported."""
        ...

    def unlink(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def listdir(self, path: str) -> list[tuple[str, Kind]]: ...

    def status(self, path: str) -> Status:
        """Returns the status of `path` itself (lstat)."""
        ...

    def fsync_directory(self, path: str) -> None: ...

    def free_bytes(self, path: str) -> int: ...


@runtime_checkable
class Forgetful(Protocol):
    """A file system that can drop pages from its cache."""

    def forget(self, descriptor: int, offset: int, length: int) -> None:
        """Drops cached pages of this range that are already on the disk. Only a hint."""
        ...


_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_NOWAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)
_FULL_FSYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
# Opening a FIFO must not hang the reader; on a regular file O_NONBLOCK has no effect.
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_AT_CWD_LINUX: Final = -100
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCL_MACOS: Final = 4


def _fault(number: int, path: str | None = None) -> OSError:
    """Returns an OSError; its constructor picks the subclass (FileExistsError, ...) by number."""
    return OSError(number, os.strerror(number), path)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class OperatingSystem:
    """The real file system. Stateless."""

    def create(self, path: str, *, direct: bool = False) -> int:
        descriptor = os.open(path, _CREATE, 0o666)
        if direct:
            try:
                self.set_direct(descriptor, True)
            except OSError:
                # open(O_CREAT | O_DIRECT) leaves an empty file behind where the file system has no direct I/O.
                os.close(descriptor)
                os.unlink(path)
                raise
        return descriptor

    def open(self, path: str, *, direct: bool = False) -> int:
        if direct and not _DIRECT:
            raise _fault(errno.EINVAL, path)
        return os.open(path, _READ | (_DIRECT if direct else 0))

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def set_direct(self, descriptor: int, direct: bool) -> None:
        if not _DIRECT:
            raise _fault(errno.EINVAL)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)

    def reserve(self, descriptor: int, length: int) -> None:
        # os.posix_fallocate would write a byte into every block where the file system cannot reserve.
        if sys.platform != "linux":
            raise _fault(errno.EOPNOTSUPP)
        while _libc().fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(length)) != 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise _fault(errno.EOPNOTSUPP if number == errno.ENOSYS else number)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, buffers, offset)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, *, nowait: bool = False) -> int:
        if not nowait:
            return os.preadv(descriptor, buffers, offset)
        if not _NOWAIT:
            raise _fault(errno.EOPNOTSUPP)
        return os.preadv(descriptor, buffers, offset, _NOWAIT)

    def truncate(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)

    def fsync(self, descriptor: int) -> None:
        if _FULL_FSYNC is None:
            os.fsync(descriptor)
            return
        try:
            fcntl.fcntl(descriptor, _FULL_FSYNC)  # macOS: fsync alone stops at the cache of the drive
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
            os.fsync(descriptor)

    def forget(self, descriptor: int, offset: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def fstatus(self, descriptor: int) -> Status:
        return _status(os.fstat(descriptor))

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename_noreplace(self, source: str, target: str) -> None:
        old, new = os.fsencode(source), os.fsencode(target)
        try:
            if sys.platform == "darwin":
                failed = _libc().renamex_np(old, new, ctypes.c_uint(_RENAME_EXCL_MACOS))
            else:
                failed = _libc().renameat2(_AT_CWD_LINUX, old, _AT_CWD_LINUX, new, ctypes.c_uint(_RENAME_NOREPLACE))
        except AttributeError:  # a C library without the call
            raise _fault(errno.ENOSYS, target) from None
        if failed:
            raise _fault(ctypes.get_errno(), target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, path: str) -> list[tuple[str, Kind]]:
        with os.scandir(path) as entries:
            return [(entry.name, _entry_kind(entry)) for entry in entries]

    def status(self, path: str) -> Status:
        return _status(os.lstat(path))

    def fsync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def map(self, descriptor: int, length: int) -> memoryview:
        return memoryview(mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ))

    def free_bytes(self, path: str) -> int:
        place = os.statvfs(path)
        return place.f_bavail * place.f_frsize


def _status(found: os.stat_result) -> Status:
    kind: Kind = "other"
    if stat.S_ISREG(found.st_mode):
        kind = "file"
    elif stat.S_ISDIR(found.st_mode):
        kind = "directory"
    return Status(kind, found.st_size, found.st_mtime_ns, found.st_nlink)


def _entry_kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_dir(follow_symlinks=False):  # first: thousands of them lie side by side, and few files
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"
