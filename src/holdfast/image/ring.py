"""A ring: the address space of a whole image over the memory of a small part of it.

The same few pages, a *window*, are mapped one copy behind the other, so that an image of any size can be written from
its beginning to its end while only a window of it exists at a time. What lies a window behind is overwritten: it must
have been written out before. Layout, capture and writing need to know nothing else of it.

The pages are touched once, however large the image is: fresh memory costs several times a copy (measured).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from functools import cache
from typing import Final

import numpy as np

from holdfast.image.header import ALIGNMENT

_MAP_SHARED: Final = 0x01
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_POPULATE: Final = 0x8000
_MAX_MAPPINGS: Final = 16_384
"""A quarter of what Linux lets a process have (vm.max_map_count)."""


def map_ring(nbytes: int, window: int) -> mmap.mmap:
    """`nbytes` of addresses over `window` bytes of memory; both multiples of 4096.

    Raises OSError where the system has no such mappings, or `window` is so small that there would be too many.
    """
    assert nbytes % ALIGNMENT == 0 and window % ALIGNMENT == 0
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this system maps no memory twice")
    if nbytes > window * _MAX_MAPPINGS:
        raise OSError(errno.E2BIG, f"a window of {window} bytes would be mapped {nbytes // window} times")
    # Reserves the addresses, and unmaps the whole range in the end: what is mapped over it goes with it.
    ring = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    descriptor = os.memfd_create("holdfast-ring", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, window)
        begin = int(np.frombuffer(ring, np.uint8).ctypes.data)
        for offset in range(0, nbytes, window):
            _map_over(begin + offset, min(window, nbytes - offset), descriptor)
    except BaseException:
        ring.close()
        raise
    finally:
        os.close(descriptor)
    return ring


def _map_over(address: int, length: int, descriptor: int) -> None:
    flags = _MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
    found = _libc().mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    return library
