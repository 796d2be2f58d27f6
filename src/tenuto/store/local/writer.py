"""Writes the bytes of one object into a new file, past the page cache where file system and memory allow it.

Direct I/O requires offset, address and length to be multiples of 4096. The last block is written in full from a padded
copy, and the file is truncated afterwards. Other bytes go buffered with a flush every 64 MiB: dirty pages of a large
checkpoint would otherwise fill the memory allowance of the job.
"""

from __future__ import annotations

import errno
import mmap
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tenuto.errors import StoreError
from tenuto.store.local import os_errors
from tenuto.store.local.syscalls import FileSystem, Forgetful

BLOCK: Final = 4096
WORTH_DIRECT: Final = 1 << 20
"""Smaller objects gain nothing from direct I/O, and are soon read again."""
_STRIDE: Final = 16 << 20
_FLUSH_EVERY: Final = 64 << 20


def address(buffer: memoryview) -> int:
    """Returns the memory address of a non-empty buffer."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def is_aligned(buffer: memoryview, offset: int) -> bool:
    return offset % BLOCK == 0 and buffer.nbytes > 0 and address(buffer) % BLOCK == 0


@dataclass
class FileWriter:
    """A writer of one file: `write` the pieces in order, then `finish`, which makes `length` bytes durable."""

    filesystem: FileSystem
    descriptor: int
    path: str
    name: str
    length: int
    direct: bool = False
    """Whether the next write may bypass the page cache; the first that cannot turns it off for good."""
    _position: int = 0
    _padded: bool = False
    _flushed: int = field(default=0)

    def start(self) -> None:
        """Reserves the space, and turns on direct I/O where it exists and pays."""
        if self.length < WORTH_DIRECT:
            return
        try:
            self.filesystem.reserve(self.descriptor, self.length)
        except OSError as error:
            if error.errno not in os_errors.UNSUPPORTED:
                raise os_errors.meaning(error, "reserving", self.path, self.name) from error
            self._check_free()
        try:
            self.filesystem.set_direct(self.descriptor, True)
            self.direct = True
        except OSError as error:
            if error.errno not in os_errors.UNSUPPORTED:
                raise os_errors.meaning(error, "opening", self.path, self.name) from error

    def _check_free(self) -> None:
        with os_errors.translated("measuring", self.path, self.name):
            free = self.filesystem.free_bytes(self.path)
        if free < self.length:
            error = OSError(errno.ENOSPC, f"{self.length} bytes are needed, {free} are free")
            raise os_errors.meaning(error, "reserving", self.path, self.name)

    def write(self, piece: memoryview) -> None:
        piece = piece.cast("B") if piece.itemsize != 1 or piece.ndim != 1 else piece
        if self._position + len(piece) > self.length:
            raise StoreError(
                f"{self.name} was announced with {self.length} bytes and has more: it is not stored", subject=self.name
            )
        if self.direct and piece:
            piece = piece[self._write_directly(piece) :]
        self._write_buffered(piece)

    def _write_directly(self, piece: memoryview) -> int:
        """Writes what can go directly and returns its length. The rest must go buffered."""
        last = self._position + len(piece) == self.length
        if not is_aligned(piece, self._position) or (len(piece) % BLOCK and not last):
            self._give_up_direct()
            return 0
        full = len(piece) // BLOCK * BLOCK
        done = self._blocks(piece[:full])
        if done < full or full == len(piece):
            return done
        tail = len(piece) - full
        # Never closed: after a failed write the traceback still holds views of it, and closing would raise a
        # BufferError that hides the error of the disk.
        block = memoryview(mmap.mmap(-1, BLOCK))
        block[:tail] = piece[full:]
        if self._blocks(block) < BLOCK:
            self._position = self.length - tail
            self._padded = True
            return full
        self._position = self.length
        self._padded = True
        return len(piece)

    def _blocks(self, piece: memoryview) -> int:
        done = 0
        while done < len(piece):
            try:
                count = self.filesystem.pwrite(self.descriptor, [piece[done : done + _STRIDE]], self._position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise os_errors.meaning(error, "writing", self.path, self.name) from error
                self._give_up_direct()  # O_DIRECT was accepted but does not work
                return done
            done += self._advance(count)
            if count % BLOCK:
                self._give_up_direct()
                return done
        return done

    def _write_buffered(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            with os_errors.translated("writing", self.path, self.name):
                count = self.filesystem.pwrite(self.descriptor, [piece[done : done + _STRIDE]], self._position)
            done += self._advance(count)
            if self._position - self._flushed >= _FLUSH_EVERY:
                self._flush()

    def _advance(self, count: int) -> int:
        if count <= 0:
            raise StoreError(f"writing {self.path} makes no progress at byte {self._position}", subject=self.name)
        self._position += count
        return count

    def _give_up_direct(self) -> None:
        self.direct = False
        self._flushed = self._position
        with os_errors.translated("writing", self.path, self.name):
            self.filesystem.set_direct(self.descriptor, False)

    def _flush(self) -> None:
        self._fsync()
        if isinstance(self.filesystem, Forgetful):
            with os_errors.translated("writing", self.path, self.name):
                self.filesystem.forget(self.descriptor, self._flushed, self._position - self._flushed)
        self._flushed = self._position

    def finish(self) -> None:
        if self._position != self.length:
            raise StoreError(
                f"{self.name} was announced with {self.length} bytes and has {self._position}: it is not stored",
                subject=self.name,
            )
        if self._padded:
            with os_errors.translated("writing", self.path, self.name):
                self.filesystem.truncate(self.descriptor, self.length)
        self._fsync()

    def _fsync(self) -> None:
        try:
            self.filesystem.fsync(self.descriptor)
        except OSError as error:
            if error.errno in os_errors.FULL:
                # Network file systems report a full disk only here. The file has no final name yet and is discarded, so
                # no later flush of it is trusted.
                raise os_errors.meaning(error, "flushing", self.path, self.name) from error
            raise os_errors.unflushed(error, self.path, self.name) from error
