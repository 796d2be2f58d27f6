"""Drops files from the page cache and loads them, so that a read is known to be cold or warm."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Final

CACHESTAT: Final = 451
"""The number of cachestat(2), Linux 6.5, on every architecture; unlike a probing read it loads nothing."""
COLD: Final = 0.01
"""A file counts as dropped if at most this share of its pages is cached."""


def files_below(root: Path) -> list[Path]:
    return [root] if root.is_file() else [path for path in sorted(root.rglob("*")) if path.is_file()]


def drop(root: Path) -> None:
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


def warm(root: Path) -> None:
    """Reads every file below `root` once."""
    block = bytearray(8 << 20)
    for path in files_below(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def share(path: Path) -> float:
    """Returns the share of the file's pages in the page cache. Raises OSError if the kernel cannot report it."""
    pages = -(-path.stat().st_size // os.sysconf("SC_PAGE_SIZE"))
    extent, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        system = ctypes.CDLL(None, use_errno=True)
        if system.syscall(CACHESTAT, descriptor, extent, found, 0) != 0:
            raise OSError(ctypes.get_errno(), "cachestat is not there: whether a read is cold cannot be told")
    finally:
        os.close(descriptor)
    return float(found[0]) / max(pages, 1)


def still_cached(root: Path) -> dict[str, float]:
    """Returns the files below `root` that are still cached, with their shares."""
    return {str(path): round(part, 3) for path in files_below(root) if (part := share(path)) > COLD}
