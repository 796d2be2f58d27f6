"""Raw speed of the machine: plain loops that write and read the same bytes, direct or through the page cache.

Saves and restores are compared with these loops, so they must be fast: no digest, no commit, one file, and the place's
fastest piece size. So that a read is known to be cold or warm, files are dropped from the page cache or loaded.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from tenuto.codec.digest import CHUNK_BYTES, digest

MIB: Final = 1 << 20
PIECES: Final = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)

Memory = np.ndarray[Any, np.dtype[np.uint8]]


def timed(action: Callable[[], Any]) -> float:
    """Returns the seconds that `action` takes."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def aligned(nbytes: int) -> Memory:
    """Allocates touched, page-aligned host memory: uint8, `nbytes` rounded up to 4096."""
    memory = np.frombuffer(mmap.mmap(-1, -(-nbytes // 4096) * 4096), np.uint8)
    memory[::4096] = 1
    return memory


def write(path: Path, data: Memory, piece: int, *, length: int | None = None, direct: bool = True) -> float:
    """Returns the seconds to write `length` bytes to a fresh file and flush file and directory.

    length: by default all of `data`; more repeats it. Direct writes need multiples of 4096 for length, piece and
        len(data).

    Raises OSError if the place has no direct I/O.
    """
    path.unlink(missing_ok=True)
    wanted = len(data) if length is None else length
    begun = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (_DIRECT if direct else 0), 0o644)
    try:
        done = 0
        while done < wanted:
            start = done % len(data)
            part = data[start : min(start + piece, len(data), start + wanted - done)]
            done += _moved(os.pwritev(descriptor, [part.data], done), len(part), path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    flush_directory(path.parent)
    return time.perf_counter() - begun


def read(path: Path, into: Memory, piece: int, *, length: int | None = None, direct: bool = True) -> float:
    """Returns the seconds to read the first `length` bytes (default: the size of `into`) in pieces into `into`.

    A smaller `into` is refilled. Direct reads have the requirements of `write`.
    """
    wanted = len(into) if length is None else length
    begun = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY | (_DIRECT if direct else 0))
    try:
        done = 0
        while done < wanted:
            start = done % len(into)
            part = into[start : min(start + piece, len(into), start + wanted - done)]
            done += _moved(os.preadv(descriptor, [part.data], done), len(part), path)
    finally:
        os.close(descriptor)
    return time.perf_counter() - begun


def fastest_piece(action: Literal["write", "read"], path: Path, data: Memory, *, tries: int = 3) -> int:
    """Returns the piece size for which the direct loop over all of `data` is fastest here."""
    best = dict.fromkeys(PIECES, float("inf"))
    for _ in range(tries):
        for size in PIECES:
            found = write(path, data, size) if action == "write" else read(path, data, size)
            best[size] = min(best[size], found)
    return min(best, key=lambda size: best[size])


def digest_all(data: Memory) -> float:
    """Returns the seconds to digest `data` chunk by chunk on one thread, as a save does."""
    view = data.data
    begun = time.perf_counter()
    for start in range(0, len(data), CHUNK_BYTES):
        digest(view[start : start + CHUNK_BYTES])
    return time.perf_counter() - begun


def flush_small_file(path: Path) -> float:
    """Returns the seconds until a fresh file of 4 KiB and its name are durable: the cost of each small object of a
    commit."""
    begun = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(descriptor, b"\0" * 4096)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    flush_directory(path.parent)
    seconds = time.perf_counter() - begun
    path.unlink()
    return seconds


def flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _moved(count: int, wanted: int, path: Path) -> int:
    if count != wanted:  # continuing would not measure the device any more
        raise OSError(f"{path}: {count} of {wanted} bytes were moved by one call")
    return count


CACHESTAT: Final = 451
"""The number of cachestat(2), Linux 6.5, on every architecture; unlike a probing read it loads nothing."""
COLD: Final = 0.01
"""A file counts as dropped if at most this share of its pages is cached."""


def files_below(root: Path) -> list[Path]:
    return [root] if root.is_file() else [path for path in sorted(root.rglob("*")) if path.is_file()]


def drop_cache(root: Path) -> None:
    """Drops every file below `root` from the page cache; pages mapped or dirtied elsewhere may stay."""
    gc.collect()  # a mapping that survives in a reference cycle pins its pages
    for path in files_below(root):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm_cache(root: Path) -> None:
    """Reads every file below `root` once."""
    block = bytearray(8 << 20)
    for path in files_below(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def cached_share(path: Path) -> float:
    """Returns the share of the file's pages in the page cache. Raises OSError if the kernel cannot report it."""
    pages = -(-path.stat().st_size // os.sysconf("SC_PAGE_SIZE"))
    extent, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        system = ctypes.CDLL(None, use_errno=True)
        if system.syscall(CACHESTAT, descriptor, extent, found, 0) != 0:
            raise OSError(ctypes.get_errno(), "cachestat is not available: whether a read is cold is unknown")
    finally:
        os.close(descriptor)
    return float(found[0]) / max(pages, 1)


def still_cached(root: Path) -> dict[str, float]:
    """Returns the files below `root` that are still cached, with their shares."""
    return {str(path): round(part, 3) for path in files_below(root) if (part := cached_share(path)) > COLD}
