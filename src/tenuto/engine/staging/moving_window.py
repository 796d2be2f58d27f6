"""A window of memory that moves along the addresses of an image, for a save that goes through it once.

The kernel moves the page tables, not the bytes: memory that has been written out is taken away from its addresses and
put where the capture goes next. So the memory of a window is touched once however large the image is, it can consist of
huge pages (which a ring of shared memory cannot where the system keeps these off), and nothing is mapped beforehand. On
the measured machine a ring of 256 MiB takes 0.2 s to map and touch; this takes nothing before the first byte.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from functools import cache
from typing import Any, Final

from tenuto.engine.staging.arena import MAP_NORESERVE, Arena, keep_from_children, prefer_huge_pages
from tenuto.repo.format.safetensors import ALIGNMENT

HUGE_PAGE: Final = 2 << 20
UNITS_IN_WINDOW: Final = 8
_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MREMAP_DONTUNMAP: Final = 4
"""Linux 5.7: the addresses that the memory leaves stay mapped, and read as zeros."""


class MovingWindow(Arena):
    """An arena whose memory follows the capture from the image's beginning to its end. For one capture."""

    def __init__(self, memory: mmap.mmap, nbytes: int, window: int, unit: int) -> None:
        """`unit`: bytes that are moved at a time; `window` is a multiple of it."""
        super().__init__(memory, None, "", 0.0, window, nbytes=nbytes)
        self._begin = int(self.buffer.ctypes.data)
        self._unit = unit
        self._backed = window

    def frontier(self, end: int) -> int:
        return -(-end // self._unit) * self._unit

    def back(self, end: int) -> None:
        assert self.window is not None
        while self._backed < end:
            _move(self._begin + self._backed - self.window, self._begin + self._backed, self._unit)
            self._backed += self._unit


def acquire_moving_window(nbytes: int, window: int) -> MovingWindow:
    """Returns addresses for an image of `nbytes` over at most `window` bytes of memory that move along.

    Raises OSError where the system cannot move memory.
    """
    if not can_move():
        raise OSError(errno.ENOSYS, "this system moves no memory")
    window = max(window // ALIGNMENT, 1) * ALIGNMENT
    unit = max(window // UNITS_IN_WINDOW, ALIGNMENT)
    unit -= unit % (HUGE_PAGE if unit >= HUGE_PAGE else ALIGNMENT)
    window -= window % unit
    # A length of whole huge pages makes the kernel choose addresses that begin with one.
    grain = max(unit, HUGE_PAGE)
    length = -(-max(nbytes, 1) // grain) * grain
    memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    prefer_huge_pages(memory)
    keep_from_children(memory)
    return MovingWindow(memory, -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT, window, unit)


@cache
def can_move() -> bool:
    """Whether the system moves memory from address to address and leaves the addresses mapped. Tried once."""
    if sys.platform != "linux":
        return False
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[0] = 1
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            _move(begin, begin + page, page)
        except OSError:
            return False
        return memory[0] == 0 and memory[page] == 1


def _move(source: int, target: int, length: int) -> None:
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    found = _mremap()(source, length, length, flags, target)
    if found != target:
        number = ctypes.get_errno()
        raise OSError(number, f"moving memory: {os.strerror(number)}")


@cache
def _mremap() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mremap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return call
