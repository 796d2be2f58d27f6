"""The one seam through which every file-system call of the local store goes.

Tests put a recording, failing or simulated file system here; nothing in `store.backends.local` may import `os` to touch
a file. Paths are absolute strings. Methods raise OSError as the operating system does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Kind = Literal["file", "directory", "other"]


@dataclass(frozen=True, slots=True)
class Status:
    kind: Kind
    size: int
    modified_ns: int
    links: int = 1
    """Names that the file has, where the file system counts them."""


class FileSystem(Protocol):
    def create(self, path: str, *, direct: bool = False) -> int:
        """A new file for writing (O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, mode 0o666 less umask); a descriptor."""
        ...

    def open(self, path: str, *, direct: bool = False) -> int:
        """An existing file for reading; never follows a final symbolic link."""
        ...

    def close(self, descriptor: int) -> None: ...

    def set_direct(self, descriptor: int, direct: bool) -> None:
        """Turns O_DIRECT on or off; OSError where the file system has none."""
        ...

    def reserve(self, descriptor: int, length: int) -> None:
        """posix_fallocate from 0; ENOSPC or EDQUOT if it does not fit, EOPNOTSUPP where unknown."""
        ...

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, *, nowait: bool = False) -> int:
        """preadv; with `nowait`, only what the page cache holds (BlockingIOError if nothing)."""
        ...

    def map(self, descriptor: int, length: int) -> memoryview:
        """The first `length` bytes, mapped read-only; OSError where files cannot be mapped."""
        ...

    def truncate(self, descriptor: int, length: int) -> None: ...

    def fsync(self, descriptor: int) -> None: ...

    def fstatus(self, descriptor: int) -> Status: ...

    def link(self, source: str, target: str) -> None:
        """A second name, FileExistsError if `target` exists."""
        ...

    def rename_noreplace(self, source: str, target: str) -> None:
        """renameat2(RENAME_NOREPLACE); OSError(EINVAL or ENOSYS) where there is none."""
        ...

    def unlink(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def listdir(self, path: str) -> list[tuple[str, Kind]]: ...

    def status(self, path: str) -> Status:
        """lstat."""
        ...

    def fsync_directory(self, path: str) -> None: ...

    def free_bytes(self, path: str) -> int: ...


@runtime_checkable
class Forgetful(Protocol):
    """A file system that can be told to drop pages from its cache."""

    def forget(self, descriptor: int, offset: int, length: int) -> None:
        """Drops what is cached of this range and is on the disk already. Advice only."""
        ...
