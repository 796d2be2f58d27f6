"""Records every call through the local store's seam that changes what a disk holds.

`Recorder` wraps any file system, real or simulated, and keeps its own table of names, so that each call is recorded
with its inode: after a crash it matters which file a name stood for, not the name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tenuto.record import record
from tenuto.store.local.syscalls import FileSystem, Kind, Status
from tenuto.testing.simulated_disk import ROOT, DiskImage

CallKind = Literal[
    "create", "pwrite", "truncate", "reserve", "fsync", "link", "rename", "unlink", "mkdir", "rmdir", "fsync_directory"
]


@record
class Call:
    """One call that changed something, or a flush. `inode`: the file (fsync_directory: the directory) concerned."""

    kind: CallKind
    path: str
    inode: int
    directory: int = -1
    """The directory whose entry `name` changed."""
    name: str = ""
    source: tuple[int, str] | None = None
    """rename: the old entry."""
    offset: int = 0
    data: bytes = b""
    length: int = 0
    failed: bool = False
    """A flush that raised: its data may or may not be on disk, and no later flush shows which."""
    node: int = 0
    """The machine that made the call, if several share the disk."""


@record
class Mark:
    """What the program above the store knew at this point: `label` and its subject."""

    label: str
    subject: object = None
    detail: object = None


Step = Call | Mark


@dataclass
class Recorder:
    """A FileSystem that keeps `log`.

    root: paths below it are recorded as if it were `/`; it exists, and is empty or matches `base`.
    """

    inner: FileSystem
    root: str = ""
    base: DiskImage | None = None
    log: list[Step] = field(default_factory=list)
    node: int = 0
    """The machine that makes the calls from now on."""
    _names: dict[tuple[int, str], int] = field(default_factory=dict)
    _descriptors: dict[int, tuple[int, str]] = field(default_factory=dict)
    _next: int = 1
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.root = self.root.rstrip("/")
        if self.base is not None:
            for directory, entries in self.base.directories.items():
                self._names.update({(directory, name): inode for name, inode in entries.items()})
            self._next = max((*self.base.directories, *self.base.files)) + 1

    def mark(self, label: str, subject: object = None, detail: object = None) -> None:
        with self._lock:
            self.log.append(Mark(label, subject, detail))

    # Recorded calls.

    def create(self, path: str, *, direct: bool = False) -> int:
        with self._lock:
            descriptor = self.inner.create(path, direct=direct)
            directory, name = self._place(path)
            inode = self._add_inode(directory, name)
            self._descriptors[descriptor] = (inode, self._below(path))
            self._log_call(Call("create", self._below(path), inode, directory, name))
            return descriptor

    def open(self, path: str, *, direct: bool = False) -> int:
        with self._lock:
            descriptor = self.inner.open(path, direct=direct)
            self._descriptors[descriptor] = (self._lookup(path), self._below(path))
            return descriptor

    def reopen(self, path: str) -> int:
        """Truncates an existing file and opens it for writing; not part of the seam, only for seeded bugs."""
        with self._lock:
            descriptor: int = self.inner.reopen(path)  # type: ignore[attr-defined]
            inode = self._lookup(path)
            self._descriptors[descriptor] = (inode, self._below(path))
            self._log_call(Call("truncate", self._below(path), inode))
            return descriptor

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            done = self.inner.pwrite(descriptor, buffers, offset)
            inode, path = self._descriptors[descriptor]
            data = b"".join(bytes(buffer) for buffer in buffers)[:done]
            self._log_call(Call("pwrite", path, inode, offset=offset, data=data, length=done))
            return done

    def truncate(self, descriptor: int, length: int) -> None:
        with self._lock:
            self.inner.truncate(descriptor, length)
            inode, path = self._descriptors[descriptor]
            self._log_call(Call("truncate", path, inode, length=length))

    def reserve(self, descriptor: int, length: int) -> None:
        with self._lock:
            self.inner.reserve(descriptor, length)
            inode, path = self._descriptors[descriptor]
            self._log_call(Call("reserve", path, inode, length=length))

    def fsync(self, descriptor: int) -> None:
        with self._lock:
            inode, path = self._descriptors[descriptor]
            self._flush(Call("fsync", path, inode), lambda: self.inner.fsync(descriptor))

    def fsync_directory(self, path: str) -> None:
        with self._lock:
            if not self._covers(path):  # the directory above the root is durable before the recording starts
                self.inner.fsync_directory(path)
                return
            self.inner.status(path)  # the disk rejects a directory that does not exist
            call = Call("fsync_directory", self._below(path), self._lookup(path))
            self._flush(call, lambda: self.inner.fsync_directory(path))

    def _flush(self, call: Call, flush: Callable[[], None]) -> None:
        try:
            flush()
        except OSError:
            self._log_call(replace(call, failed=True))
            raise
        self._log_call(call)

    def _log_call(self, call: Call) -> None:
        self.log.append(replace(call, node=self.node) if self.node else call)

    def link(self, source: str, target: str) -> None:
        with self._lock:
            self.inner.link(source, target)
            directory, name = self._place(target)
            inode = self._names[directory, name] = self._lookup(source)
            self._log_call(Call("link", self._below(target), inode, directory, name))

    def rename_noreplace(self, source: str, target: str) -> None:
        with self._lock:
            self.inner.rename_noreplace(source, target)
            self._renamed(source, target)

    def rename(self, source: str, target: str) -> None:
        """Replaces `target`; not part of the seam, only for a simulated disk and seeded bugs."""
        with self._lock:
            self.inner.rename(source, target)  # type: ignore[attr-defined]
            self._renamed(source, target)

    def _renamed(self, source: str, target: str) -> None:
        old = self._place(source)
        directory, name = self._place(target)
        inode = self._names[directory, name] = self._names.pop(old)
        self._log_call(Call("rename", self._below(target), inode, directory, name, source=old))

    def unlink(self, path: str) -> None:
        with self._lock:
            self.inner.unlink(path)
            self._remove_entry("unlink", path)

    def mkdir(self, path: str) -> None:
        with self._lock:
            self.inner.mkdir(path)
            directory, name = self._place(path)
            self._log_call(Call("mkdir", self._below(path), self._add_inode(directory, name), directory, name))

    def rmdir(self, path: str) -> None:
        with self._lock:
            self.inner.rmdir(path)
            self._remove_entry("rmdir", path)

    def _remove_entry(self, kind: Literal["unlink", "rmdir"], path: str) -> None:
        directory, name = self._place(path)
        self._log_call(Call(kind, self._below(path), self._names.pop((directory, name)), directory, name))

    # Calls that change nothing.

    def close(self, descriptor: int) -> None:
        with self._lock:
            self.inner.close(descriptor)
            del self._descriptors[descriptor]

    def set_direct(self, descriptor: int, direct: bool) -> None:
        self.inner.set_direct(descriptor, direct)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, *, nowait: bool = False) -> int:
        return self.inner.pread(descriptor, buffers, offset, nowait=nowait)

    def fstatus(self, descriptor: int) -> Status:
        return self.inner.fstatus(descriptor)

    def listdir(self, path: str) -> list[tuple[str, Kind]]:
        return self.inner.listdir(path)

    def status(self, path: str) -> Status:
        return self.inner.status(path)

    def map(self, descriptor: int, length: int) -> memoryview:
        return self.inner.map(descriptor, length)

    def free_bytes(self, path: str) -> int:
        return self.inner.free_bytes(path)

    # Names.

    def _covers(self, path: str) -> bool:
        return path.rstrip("/") == self.root or path.startswith(self.root + "/")

    def _below(self, path: str) -> str:
        assert self._covers(path), f"{path} is outside what is recorded ({self.root or '/'})"
        return path[len(self.root) :] or "/"

    def _lookup(self, path: str) -> int:
        inode = ROOT
        for name in self._below(path).split("/"):
            if name:
                inode = self._names[inode, name]
        return inode

    def _place(self, path: str) -> tuple[int, str]:
        head, _, name = path.rstrip("/").rpartition("/")
        return self._lookup(head or self.root or "/"), name

    def _add_inode(self, directory: int, name: str) -> int:
        inode = self._names[directory, name] = self._next
        self._next += 1
        return inode
