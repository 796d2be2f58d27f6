"""A disk on which one chosen call goes wrong: the `number`th that the store makes, in one of the ways a disk can fail.

Calls are numbered as they come, whatever thread makes them; the program that is disturbed does one thing at a time, so
a number means the same call each time until the fault strikes. A call's *site* is the line of the store that makes it.

A failed flush loses what it was to flush, as Linux does it: the pages are dropped and marked clean, so that the next
flush succeeds and proves nothing. The file's bytes are gone at once; names that a failed flush of a directory was to
make durable are gone (and names it was to remove are back) when the machine is started again: see `lost`.
"""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from tenuto.store.local.syscalls import FileSystem
from tenuto.testing.layers import Killed, Layer
from tenuto.testing.simulated_disk import BLOCK, Contents, DiskImage, fault

R = TypeVar("R")

FLUSHES: Final = frozenset({"fsync", "fsync_directory"})
CHANGING: Final = frozenset(
    {"create", "pwrite", "reserve", "truncate", "link", "rename_noreplace", "unlink", "mkdir", "rmdir"}
)
GROWING: Final = frozenset({"create", "pwrite", "reserve", "link", "mkdir", *FLUSHES})
"""Calls that can find a disk or a quota full."""
NAMING: Final = frozenset({"create", "link", "unlink", "mkdir", "rmdir"})
TRANSFERS: Final = frozenset({"pwrite", "pread"})
HELD_S: Final = 60.0
"""A hung call comes back after this long whatever happens, so that a campaign ends."""
_SLOW_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Way:
    """One way to fail. `calls`: those that can fail so. `number`: the error. `stays`: so do all later calls of these
    kinds, until the process has ended. `lasting`: nothing may be seen of it but time."""

    name: str
    calls: frozenset[str] | None = None
    number: int = 0
    stays: bool = False
    harmless: bool = False
    blocks: bool = False

    def concerns(self, call: str) -> bool:
        return self.calls is None or call in self.calls


WAYS: Final = (
    Way("EIO", None, errno.EIO),
    Way("ENOSPC", GROWING, errno.ENOSPC),
    Way("EDQUOT", GROWING, errno.EDQUOT),
    Way(
        "EINTR", frozenset({*CHANGING, *TRANSFERS, "open", "status", "listdir", "fstatus"}), errno.EINTR, harmless=True
    ),
    Way("lost reply", NAMING, errno.ESTALE, harmless=True),
    Way("short", TRANSFERS, harmless=True),
    Way("slow", None, harmless=True),
    Way("hung", None, blocks=True),
    Way("dead", None, blocks=True, stays=True),
    Way("EIO stays", CHANGING | FLUSHES, errno.EIO, stays=True),
    Way("full", GROWING, errno.ENOSPC, stays=True),
    Way("read-only", CHANGING, errno.EROFS, stays=True),
)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a call comes from: what was under way, the store's line, and the call."""

    phase: str
    line: str
    call: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.call} from {self.line} in {self.phase} ({self.path})"


class FailingDisk(Layer):
    """`way` strikes at call `number`, counted from 1; 0: never. `phase` tells what is under way, and is asked at each
    call. `sites`: every call that came, if `listing`."""

    def __init__(
        self, inner: FileSystem, way: Way | None, number: int, phase: Callable[[], str], *, listing: bool = False
    ) -> None:
        super().__init__(inner)
        self.way = way
        self.number = number
        self.phase = phase
        self.count = 0
        self.sites: list[Site] | None = [] if listing else None
        self.struck: Site | None = None
        self.blocked = 0
        self.released = threading.Event()
        self.ended = False
        """The process is gone: what still hangs never comes back."""
        self.healed = False
        self.losses: list[tuple[str, str, bytes | None]] = []
        """Directory, name, and None where the name is lost, else the bytes that are back under it."""
        self._pending: dict[str, dict[str, bytes | None]] = {}
        self._counting = threading.Lock()

    # -- the strike ----------------------------------------------------------------------------------------------------

    def around(self, call: str, path: str, act: Callable[[], R]) -> R:
        if self.ended:
            raise Killed  # whatever still runs of the process does nothing to the disk any more
        way = self._strikes(call, path)
        if way is None:
            return act()
        if way.blocks:
            self._block()
            return act()
        if way.name == "slow":
            time.sleep(_SLOW_S)
            return act()
        if way.name == "short":
            return act()
        if way.name == "lost reply":
            act()
        raise fault(way.number, path)

    def _strikes(self, call: str, path: str) -> Way | None:
        with self._counting:
            self.count += 1
            if self.sites is not None:
                self.sites.append(Site(self.phase(), _line(), call, path))
            way = self.way
            if way is None or self.healed or not way.concerns(call):
                return None
            if self.count == self.number or (way.stays and self.number and self.count > self.number):
                if self.struck is None:
                    self.struck = Site(self.phase(), _line(), call, path)
                return way
            return None

    def _block(self) -> None:
        with self._counting:
            self.blocked += 1
        self.released.wait(HELD_S)
        if self.ended:
            raise Killed

    # -- calls that fail in their own ways -----------------------------------------------------------------------------

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._is_next("short"):
            length = sum(buffer.nbytes for buffer in buffers)
            buffers = [buffers[0][: max(1, length // 2)]]
            if offset % BLOCK == 0 and buffers[0].nbytes > BLOCK:
                buffers = [buffers[0][: buffers[0].nbytes // BLOCK * BLOCK]]
        return super().pwrite(descriptor, buffers, offset)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, *, nowait: bool = False) -> int:
        if self._is_next("short"):
            buffers = [buffers[0][: max(1, buffers[0].nbytes // 2)]]
        return super().pread(descriptor, buffers, offset, nowait=nowait)

    def _is_next(self, way: str) -> bool:
        return self.way is not None and self.way.name == way and self.count + 1 == self.number

    def fsync(self, descriptor: int) -> None:
        try:
            super().fsync(descriptor)
        except OSError:
            self._drop(descriptor)
            raise

    def _drop(self, descriptor: int) -> None:
        """The file's pages are gone; a file that was only read (a `settle`) had nothing to lose."""
        inner = self.inner
        try:
            inner.set_direct(descriptor, False)
            inner.pwrite(descriptor, [memoryview(bytes(inner.fstatus(descriptor).size))], 0)
        except OSError:
            return

    def fsync_directory(self, path: str) -> None:
        try:
            super().fsync_directory(path)
        except OSError:
            self.losses += [(path, name, content) for name, content in self._pending.pop(path, {}).items()]
            raise
        self._pending.pop(path, None)

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self._changed(target, None)

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        self._changed(path, None)

    def unlink(self, path: str) -> None:
        content = self._content(path) if path.endswith("/manifest.json") else None
        super().unlink(path)
        if content is not None:
            self._changed(path, content)
        else:
            self._pending.get(_parent(path), {}).pop(_name(path), None)

    def _content(self, path: str) -> bytes | None:
        try:
            size = self.inner.status(path).size
            descriptor = self.inner.open(path)
        except OSError:
            return None
        found = bytearray(size)
        self.inner.pread(descriptor, [memoryview(found)], 0)
        self.inner.close(descriptor)
        return bytes(found)

    def _changed(self, path: str, content: bytes | None) -> None:
        self._pending.setdefault(_parent(path), {})[_name(path)] = content


def lost(image: DiskImage, losses: Sequence[tuple[str, str, bytes | None]]) -> DiskImage:
    """The disk as the next start of the machine finds it: without the names that a failed flush was to make durable,
    and with those again that it was to remove."""
    if not losses:
        return image
    directories = {inode: dict(entries) for inode, entries in image.directories.items()}
    files = dict(image.files)
    places = image.inodes()
    for directory, name, content in losses:
        inode = places.get(directory.rstrip("/"), 0 if directory == "/" else None)
        if inode is None or inode not in directories:
            continue
        if content is None:
            directories[inode].pop(name, None)
        elif name not in directories[inode]:
            number = max((*directories, *files)) + 1
            blocks = tuple(content[at : at + BLOCK].ljust(BLOCK, b"\0") for at in range(0, len(content), BLOCK))
            files[number] = Contents(blocks, len(content))
            directories[inode][name] = number
    return DiskImage(directories, files)


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _line() -> str:
    """The store's line that made the call: the nearest frame that is no file system."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/tenuto/store/" in file and "/wrappers/" not in file:
            return f"{file.rpartition('/')[2]}:{frame.f_code.co_name}:{frame.f_lineno}"
        back = frame.f_back
        if back is None:
            break
        frame = back
    return "?"
