"""A rank's window: the file in shared memory that holds what it wants to read and what it has read for other ranks.

`[one page: its state][its request][one mark for each block][the blocks]`. Only its own rank writes to a window, so no
lock is needed; the other ranks of the node map it read-only. It is removed with its rank; what killed ranks leave is
removed at the next start.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from tenuto.concurrency.process import judge
from tenuto.engine.staging import arena as arenas
from tenuto.engine.staging import slots
from tenuto.engine.staging.slots import Slot
from tenuto.model.records import Owner
from tenuto.record import record
from tenuto.state.contract import Buffer

PAGE: Final = 4096
LIVENESS_S: Final = 0.25
"""How often a waiting rank checks whether the other's process is alive."""
POLL_S: Final = 0.002
_WORDS: Final = ("stage", "withdrawn", "group", "loaded", "request")
REQUESTED, OPEN = 1, 2
"""Stages: the request is there; marks and blocks are too."""


@record
class WindowAddress:
    """The place of a rank's window, and the process that it belongs to."""

    slot: Slot
    owner: Owner


class _Page:
    """The first page, as words."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._words = np.frombuffer(memory, np.uint64, len(_WORDS))

    def __getitem__(self, name: str) -> int:
        return int(self._words[_WORDS.index(name)])

    def __setitem__(self, name: str, value: int) -> None:
        self._words[_WORDS.index(name)] = value


class Window:
    """This rank's own window. Raises OSError where there is no shared memory, or no room in it."""

    def __init__(self, address: WindowAddress) -> None:
        self._slot = address.slot
        self._pid = os.getpid()
        self._taken = False
        self._descriptor = -1
        self._page: _Page | None = None
        self._marks: Buffer | None = None
        self._blocks: Buffer | None = None
        self._lock = threading.Lock()

    def request(self, data: bytes) -> None:
        """Publishes what this rank wants to read, once."""
        table = arenas.table()
        table.take(self._slot)
        self._taken = True
        self._descriptor = table.create(self._slot)
        arenas.reserve(self._descriptor, PAGE + whole_pages(len(data)))
        view, offset = memoryview(data), PAGE
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written
        memory = arenas.map_memory(self._descriptor, PAGE)
        self._page = page = _Page(memory)
        page["request"] = len(data)
        page["stage"] = REQUESTED

    def open(self, blocks: int, nbytes: int) -> None:
        """Makes room for `blocks` marks and `nbytes` of blocks."""
        page = self._page
        assert page is not None
        marks, begin, length = _layout(page["request"], blocks, nbytes)
        arenas.reserve(self._descriptor, length)
        memory = arenas.map_memory(self._descriptor, length)
        everything = np.frombuffer(memory, np.uint8)
        self._marks, self._blocks = everything[marks : marks + blocks], everything[begin : begin + nbytes]
        page["stage"] = OPEN

    def block(self, at: int, nbytes: int) -> Buffer:
        assert self._blocks is not None
        return self._blocks[at : at + nbytes]

    def mark_read(self, block: int) -> None:
        with self._lock:  # also makes the block's bytes visible before its mark
            assert self._marks is not None and self._page is not None
            self._page["loaded"] = self._page["loaded"] + 1
        self._marks[block] = 1

    def advance(self, group: int) -> None:
        """Publishes that this rank needs no block of groups before `group` - 1."""
        if self._page is not None:
            self._page["group"] = group

    def withdraw(self) -> None:
        """Publishes that this rank neither reads for others nor needs what they read."""
        if self._page is not None:
            self._page["withdrawn"] = 1

    @property
    def withdrawn(self) -> bool:
        return self._page is None or self._page["withdrawn"] != 0

    def close(self) -> None:
        """Removes the file; ranks that have mapped it keep what they saw."""
        self.withdraw()
        self._page = self._marks = self._blocks = None
        if not self._taken or os.getpid() != self._pid:
            return
        self._taken = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
        table = arenas.table()
        try:
            table.remove(self._slot)
        finally:
            table.give_back(self._slot)


class PeerWindow:
    """The window of any rank of the node, as the others see it."""

    def __init__(self, address: WindowAddress, patience_s: float) -> None:
        """patience_s: a rank that has made no progress for so long is not waited for any more."""
        self._address = address
        self._patience_s = patience_s
        self._page: _Page | None = None
        self._descriptor = -1
        self._marks: Buffer | None = None
        self._blocks: Buffer | None = None
        self._expected = 0, 0
        self._lock = threading.Lock()
        self._ignored = False
        self.timed_out = False
        """Whether a wait for a block has ended without it since the caller last reset this."""

    @property
    def rank(self) -> str:
        return f"rank {self._address.slot.name.partition('-')[0]}"

    def request(self, began: float) -> bytes | None:
        """Returns what the rank wants to read, once it has published it; None where it does not in time. `began`: when
        the wait for the requests of all ranks began."""
        if not self._wait(self._has_request, lambda: 0, began):
            return None
        assert self._page is not None
        length = min(self._page["request"], os.fstat(self._descriptor).st_size)
        return os.pread(self._descriptor, length, PAGE)

    def expect(self, blocks: int, nbytes: int) -> None:
        """Sets the number of blocks and the bytes that the rank's window will have once it is open."""
        self._expected = blocks, nbytes

    def await_group(self, group: int) -> bool:
        """Returns True once the rank has come to this group, has withdrawn or is dead; False where it stays behind."""
        page = self._page
        if page is None:
            return True
        if self._wait(lambda: page["withdrawn"] != 0 or page["group"] >= group, lambda: page["group"]):
            return True
        return self._ignored or judge(self._address.owner) == "dead"

    def block(self, number: int, at: int, nbytes: int) -> Buffer | None:
        """Returns a block once it is there; None where the caller has to read it."""
        page = self._page
        if self._ignored or page is None:
            return None

        def done() -> bool:
            return page["withdrawn"] != 0 or (self._mapped() and self._marks is not None and self._marks[number] != 0)

        if not done() and not self._wait(done, lambda: page["loaded"]) and not self._ignored:
            self._ignored = self.timed_out = True
        if self._blocks is None or self._marks is None or not self._marks[number]:
            return None
        return self._blocks[at : at + nbytes]

    def ignore(self) -> None:
        """Ends all waiting for this rank, now and later."""
        self._ignored = True

    def close(self) -> None:
        self._ignored = True
        self._page = self._marks = self._blocks = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _has_request(self) -> bool:
        if self._page is None:
            slot = self._address.slot
            try:
                with slots.directory(slot.root, slot.parent) as parent:
                    descriptor = os.open(slot.name, slots.READ, dir_fd=parent)
            except OSError:
                return False  # not there yet
            if os.fstat(descriptor).st_size < PAGE:
                os.close(descriptor)
                return False
            self._descriptor = descriptor
            self._page = _Page(mmap.mmap(descriptor, PAGE, mmap.MAP_SHARED, mmap.PROT_READ))
        return self._page["stage"] >= REQUESTED

    def _mapped(self) -> bool:
        """Returns whether marks and blocks can be read."""
        if self._marks is not None:
            return True
        with self._lock:
            page = self._page
            if self._marks is not None or page is None or page["stage"] < OPEN:
                return self._marks is not None
            blocks, nbytes = self._expected
            marks, begin, length = _layout(page["request"], blocks, nbytes)
            if os.fstat(self._descriptor).st_size < length:
                self._ignored = True  # it has another plan: nothing in its window is what we expect
                return False
            everything = np.frombuffer(mmap.mmap(self._descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
            self._blocks, self._marks = everything[begin : begin + nbytes], everything[marks : marks + blocks]
            return True

    def _wait(self, done: Callable[[], bool], progress: Callable[[], int], began: float | None = None) -> bool:
        """Waits until `done`. Returns False where the rank has died, is ignored, or has made no progress for
        `patience_s`, since `began` if that is given."""
        seen, pause = progress(), 0.0002
        checked = time.monotonic()
        changed = checked if began is None else began
        while not done():
            now = time.monotonic()
            if (value := progress()) != seen:
                seen, changed = value, now
            if self._ignored or now - changed > self._patience_s:
                return False
            if now - checked > LIVENESS_S:
                if judge(self._address.owner) == "dead":
                    return done()
                checked = now
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_S)
        return True


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _layout(request: int, blocks: int, nbytes: int) -> tuple[int, int, int]:
    """Returns where marks and blocks begin, and the length of the file."""
    marks = PAGE + whole_pages(request)
    begin = marks + whole_pages(blocks)
    return marks, begin, begin + whole_pages(nbytes)
