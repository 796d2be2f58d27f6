"""Ranged reads of one object of a local store: past the page cache, unless the cache already holds the object."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from tenuto.errors import CorruptionError, StoreError
from tenuto.store.local import os_errors
from tenuto.store.local.syscalls import FileSystem
from tenuto.store.local.writer import BLOCK, WORTH_DIRECT, is_aligned

_PROBES: Final = 16
# Its own generator: the global one belongs to the training's random state.
_offsets: Final = random.Random()


@dataclass
class LocalReader:
    """An open object. Owns `descriptor`, which is buffered."""

    filesystem: FileSystem
    descriptor: int
    path: str
    name: str
    length: int
    modified_ns: int
    _direct: int | None = None
    _alignment: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _view: memoryview | None = None
    _closed: bool = False

    @property
    def alignment(self) -> int:
        if self._alignment is None:
            with self._lock:
                if self._alignment is None:
                    self._direct = None if self._closed or self._is_cached() else self._open_direct()
                    self._alignment = 1 if self._direct is None else BLOCK
        return self._alignment

    def _is_cached(self) -> bool:
        """Returns whether most of the object is in memory, by reading blocks at random offsets: a probe may load a few
        pages, which would mislead the next reader if offsets were fixed."""
        if self.length < WORTH_DIRECT:
            return True
        found = 0
        block = memoryview(bytearray(BLOCK))
        for _ in range(_PROBES):
            offset = _offsets.randrange(self.length // BLOCK) * BLOCK
            try:
                found += self.filesystem.pread(self.descriptor, [block], offset, nowait=True) > 0
            except OSError:
                continue  # not cached; or unknown, and then direct reads are the better guess
        return found > _PROBES // 2

    def _open_direct(self) -> int | None:
        try:
            descriptor = self.filesystem.open(self.path, direct=True)
        except OSError:
            return None  # no direct I/O, or the object is gone: the open descriptor still works
        found = self.filesystem.fstatus(descriptor)
        if (found.size, found.modified_ns) == (self.length, self.modified_ns):
            return descriptor
        self.filesystem.close(descriptor)
        return None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer = buffer.cast("B") if buffer.itemsize != 1 or buffer.ndim != 1 else buffer
        if offset < 0 or offset + len(buffer) >= self.length + self.alignment:
            if len(buffer):
                raise self._ends_early(offset + len(buffer))
            return
        direct = self._direct if is_aligned(buffer, offset) and len(buffer) % BLOCK == 0 else None
        needed = min(len(buffer), self.length - offset)
        done = 0
        while done < needed:
            descriptor = self.descriptor if direct is None else direct
            try:
                count = self.filesystem.pread(descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                if direct is not None and error.errno in os_errors.UNSUPPORTED:
                    direct = None  # O_DIRECT is not supported after all, or not where a short read ended
                    continue
                raise os_errors.meaning(error, f"reading from byte {offset + done} of", self.path, self.name) from error
            if count == 0:
                raise self._ends_early(offset + done)
            done += count

    def view(self) -> memoryview | None:
        if self.alignment > 1 or self.length < WORTH_DIRECT:
            return None
        with self._lock:
            if self._view is None and not self._closed:
                try:
                    self._view = self.filesystem.map(self.descriptor, self.length)
                except OSError:
                    return None  # a file system without mappings: read the bytes instead
            return self._view

    def _ends_early(self, offset: int) -> CorruptionError:
        return CorruptionError(
            f"{self.name} ends before byte {offset}: it has {self.length} bytes ({self.path})",
            subject=f"{self.name}@{offset}",
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._view = None  # the mapping ends with its last user
            open_ones = [self.descriptor] if self._direct is None else [self.descriptor, self._direct]
        for descriptor in open_ones:
            with os_errors.translated("closing", self.path, self.name):
                self.filesystem.close(descriptor)

    def __enter__(self) -> LocalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_whole(reader: LocalReader, limit: int) -> bytes:
    """Returns the whole object. Raises CorruptionError, before reading or allocating, if it is longer than `limit`
    bytes."""
    if reader.length > limit:
        raise CorruptionError(
            f"{reader.name} has {reader.length} bytes where at most {limit} belong ({reader.path})", subject=reader.name
        )
    data = bytearray(reader.length)
    done = 0
    while done < len(data):
        with os_errors.translated("reading", reader.path, reader.name):
            count = reader.filesystem.pread(reader.descriptor, [memoryview(data)[done:]], done)
        if count == 0:
            raise StoreError(f"{reader.path} became shorter while it was read", subject=reader.name)
        done += count
    return bytes(data)
