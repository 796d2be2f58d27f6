"""The page cache: dropping files from it and bringing them in, so that a read is known to be cold or hot."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Final

CACHESTAT: Final = 451
"""The number of cachestat(2), Linux 6.5, on every architecture; unlike a probing read it brings nothing in."""
COLD: Final = 0.01
"""The share of its pages up to which a file counts as gone from the cache."""


def files_below(root: Path) -> list[Path]:
    return [root] if root.is_file() else [path for path in sorted(root.rglob("*")) if path.is_file()]


def drop(root: Path) -> None:
    """Asks for every file below `root` to leave the page cache; what is mapped or dirty elsewhere may stay."""
    gc.collect()  # a mapping that lingers in a reference cycle pins its pages
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
    """The share of the file's pages that the page cache holds. OSError where the kernel cannot tell."""
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


def held(root: Path) -> dict[str, float]:
    """The files below `root` that the cache still holds, with their shares."""
    return {str(path): round(part, 3) for path in files_below(root) if (part := share(path)) > COLD}
