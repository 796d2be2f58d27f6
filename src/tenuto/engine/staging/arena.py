"""Arenas: the reusable host memory that images live in.

Shared memory where there is room (a restarted process can then find the image), else anonymous memory, with a note that
says why. Pages are reserved before they are touched, because a full tmpfs is SIGBUS (measured), and touched before the
first save, because first touch costs several times a copy. A forked child has no copy of an arena and releases none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import sys
import weakref
from functools import cache
from typing import Any, Final

import numpy as np

from tenuto.concurrency.memory_headroom import memory_headroom
from tenuto.engine.staging import slots
from tenuto.engine.staging.slots import Slot, SlotTable
from tenuto.errors import UsageError
from tenuto.events import warn
from tenuto.model.ids import run_key
from tenuto.repo.format.safetensors import ALIGNMENT


def file_system_headroom(descriptor: int) -> int:
    """Returns the bytes that can still be written to the file system of this open file or directory."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize


# --------------------------------------------------------------------------------------------------
# A ring: the address space of a whole image over the memory of a small part of it.
#
# The same few pages, a *window*, are mapped one copy behind the other, so that an image of any size can be written from
# its beginning to its end while only a window of it exists at a time. What lies a window behind is overwritten: it must
# have been written out before. Layout, capture and writing need to know nothing else of it.
#
# The pages are touched once, however large the image is: fresh memory costs several times a copy (measured).

_MAP_SHARED: Final = 0x01
_MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
_MAP_POPULATE: Final = 0x8000
_MAX_MAPPINGS: Final = 16_384
"""A quarter of what Linux lets a process have (vm.max_map_count)."""


def map_ring(nbytes: int, window: int) -> mmap.mmap:
    """Maps `nbytes` of addresses over `window` bytes of memory; both multiples of 4096.

    Raises OSError where the system has no such mappings, or `window` is so small that there would be too many.
    """
    assert nbytes % ALIGNMENT == 0 and window % ALIGNMENT == 0
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this system maps no memory twice")
    if nbytes > window * _MAX_MAPPINGS:
        raise OSError(errno.E2BIG, f"a window of {window} bytes would be mapped {nbytes // window} times")
    # Reserves the addresses, and unmaps the whole range in the end: what is mapped over it goes with it.
    ring = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    descriptor = os.memfd_create("tenuto-ring", os.MFD_CLOEXEC)
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
    library.mremap.restype = ctypes.c_void_p
    library.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return library


_SPARE: Final = 64 << 20
"""What an arena leaves to others of a control group."""
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; Python has no name for it before 3.13."""
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", re.ASCII)

Buffer = np.ndarray[Any, np.dtype[np.uint8]]

_table = SlotTable()
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class NoRoom(OSError):
    """Memory cannot be had. `missing`: bytes that would have to be free besides."""

    def __init__(self, number: int, message: str, missing: int) -> None:
        super().__init__(number, message)
        self.missing = missing


class Arena:
    """Host memory for one image. `buffer`: uint8, page aligned, `nbytes` long, a multiple of 4096.

    kind: "shared memory", "anonymous" or "a window"; note: why it is not shared, or empty; contended: another arena has
    its slot, as that of the run's owner, who will be waited for, closed or left alone. window: bytes of memory behind
    `buffer` where that is less than the whole, and what lies a window behind is overwritten; else None.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        slot: Slot | None = None,
        *,
        note: str = "",
        contended: bool = False,
        window: int | None = None,
        nbytes: int | None = None,
        kind: str | None = None,
    ) -> None:
        """`slot`: whose file goes with the arena. `nbytes`: where the image takes less than all of `memory`."""
        self._memory = memory
        # At the latest when the interpreter ends: a file in shared memory is memory that stays taken.
        self._give_back = weakref.finalize(self, _give_back, slot, os.getpid())
        self.buffer: Buffer = np.frombuffer(memory, np.uint8)[:nbytes]
        self.nbytes = len(self.buffer)
        self.window = window
        self.kind = kind or ("a window" if window is not None else "anonymous" if slot is None else "shared memory")
        self.note = note
        self.contended = contended
        _mappings.add(memory)

    def frontier(self, end: int) -> int:
        """Returns up to where a window must be free for the image to be written up to `end`."""
        return end

    def back(self, end: int) -> None:
        """Moves memory to the addresses up to `end`, a frontier, from what lies a window before it."""

    def release(self) -> None:
        """Gives memory, file and slot back; a second call, or one in a forked child, does nothing.

        Views of `buffer` that still exist keep the memory mapped until they go, and the file is gone already.
        """
        if not self._give_back():
            return
        self.buffer = np.empty(0, np.uint8)
        try:
            self._memory.close()
        except BufferError:
            pass  # a view exists: the mapping goes with the last one


def _give_back(slot: Slot | None, owner: int) -> bool:
    """Removes the file and frees the slot; returns whether this process is the one to do so."""
    if os.getpid() != owner:
        return False
    if slot is not None:
        try:
            try:
                _table.remove(slot)
            finally:
                _table.give_back(slot)
        except OSError as error:
            warn(f"an image's file stays in shared memory until the next start frees it: {error}")
    return True


def acquire(
    nbytes: int, *, repository: str, run: str, rank: int = 0, slot: int = 0, prewarm: bool = True, shared: bool = True
) -> Arena:
    """Returns memory for an image of `nbytes`: shared if that is wanted, the slot is free and it fits, else anonymous.

    Files of dead owners are removed first. Raises UsageError for names that cannot be file names.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"{repository!r} is not a repository id", subject=repository)
    length = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
    place = Slot(slots.SHARED_MEMORY, f"{repository}/{run_key(run)}", f"{rank}-{slot}")
    memory, taken, note, contended = None, None, "", False
    if shared:
        try:
            memory, taken = _shared(length, place), place
        except OSError as error:
            note, contended = error.strerror or str(error), isinstance(error, BlockingIOError)
    if memory is None:
        memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        prefer_huge_pages(memory)
    _advise(memory, "MADV_DONTFORK")
    if prewarm:
        _touch(memory)
    return Arena(memory, taken, note=note, contended=contended)


def acquire_window(nbytes: int, window: int) -> Arena:
    """Returns addresses for an image of `nbytes` over `window` bytes of memory (both rounded up to 4096). OSError where
    the system cannot do that."""
    length, window = (-(-max(size, 1) // ALIGNMENT) * ALIGNMENT for size in (nbytes, window))
    memory = map_ring(length, window)
    _advise(memory, "MADV_DONTFORK")
    return Arena(memory, window=window)


def free_shared_memory(repository: str | None = None) -> None:
    """Removes the images that this user's dead processes left in shared memory, sealed ones excepted; a starting
    Checkpointer does the same. What cannot be removed is left to the next one. `repository`: looks at no other
    directory than this one's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            _table.free_stale(slots.SHARED_MEMORY, repository)


def table() -> SlotTable:
    """Returns the table of the slots of this process."""
    return _table


def over_file(mapping: mmap.mmap, nbytes: int) -> Arena:
    """Returns an arena for an image of `nbytes` over the mapping of a file, which goes with it; the file stays."""
    return Arena(mapping, nbytes=nbytes, kind="shared memory")


def map_memory(descriptor: int, length: int) -> mmap.mmap:
    """Maps the first `length` bytes of a file, with every page in place."""
    memory = mmap.mmap(descriptor, length, mmap.MAP_SHARED)
    keep_from_children(memory)
    _touch(memory)
    return memory


def _shared(length: int, slot: Slot) -> mmap.mmap:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "this system keeps no files in memory")
    _table.free_stale(slot.root)
    _table.take(slot)
    try:
        descriptor = _table.create(slot)
        try:
            reserve(descriptor, length)
            return mmap.mmap(descriptor, length, mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
    except BaseException:
        _table.remove(slot)
        _table.give_back(slot)
        raise


def reserve(descriptor: int, length: int) -> None:
    """Gives a file `length` bytes of which every page exists. NoRoom, with the figures, where they do not fit."""
    room = file_system_headroom(descriptor)
    if length > room:
        message = f"shared memory has {room >> 20} MiB free, the image needs {-(-length // 2**20)}"
        raise NoRoom(errno.ENOSPC, message, length - room)
    free = memory_headroom()
    if free is not None and length + _SPARE > free:
        message = f"{free >> 20} MiB of memory are free, the image needs {-(-length // 2**20)}"
        raise NoRoom(errno.ENOMEM, message, length + _SPARE - free)
    os.posix_fallocate(descriptor, 0, length)


def _touch(memory: mmap.mmap) -> None:
    """Gives every page a frame."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except (OSError, AttributeError):
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages |= 0  # a write that changes nothing: what lies there may be an image that is still needed


def _advise(memory: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError:
            pass  # a kernel built without it: slower, not wrong


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Asks for huge pages, which are touched, written from and given back several times as fast."""
    _advise(memory, "MADV_HUGEPAGE")


def keep_from_children(memory: mmap.mmap) -> None:
    """Keeps forked children from having this memory, and from unmapping what may lie at its addresses by then."""
    _advise(memory, "MADV_DONTFORK")
    _mappings.add(memory)


def _forget_after_fork() -> None:
    """Forgets slots and mappings in a forked child, which has neither those nor, by MADV_DONTFORK, the memory.

    Its mappings are never closed there: the addresses are free in the child, so something else may lie at them by then,
    and unmapping would tear that away.
    """
    global _table  # noqa: PLW0603 - the table is the process's own state
    _table = SlotTable()
    for memory in list(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


# --------------------------------------------------------------------------------------------------
# A window of memory that moves along the addresses of an image, for a save that goes through it once.
#
# The kernel moves the page tables, not the bytes: memory that has been written out is taken away from its addresses and
# put where the capture goes next. So the memory of a window is touched once however large the image is, it can consist
# of huge pages (which a ring of shared memory cannot where the system keeps these off), and nothing is mapped
# beforehand. On the measured machine a ring of 256 MiB takes 0.2 s to map and touch; this takes nothing before the
# first byte.

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
        super().__init__(memory, window=window, nbytes=nbytes)
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
    """Returns whether the system moves memory from address to address and leaves the addresses mapped; tried once."""
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
    found = _libc().mremap(source, length, length, flags, target)
    if found != target:
        number = ctypes.get_errno()
        raise OSError(number, f"moving memory: {os.strerror(number)}")
