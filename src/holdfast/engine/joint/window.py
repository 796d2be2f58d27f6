"""A rank's window: a file in shared memory in which it says what it asks for, and lays what it has read for others.

`[one page: how far it is][what it asks for][a mark for each block][the blocks]`. Only its rank writes to it; the others
look on. It goes with its rank: whoever starts next removes what dead ranks have left.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.image import arena as arenas
from holdfast.image import slots
from holdfast.image.slots import Slot
from holdfast.model.checkpoint import Owner
from holdfast.repo.liveness import judge
from holdfast.state.contract import Buffer

PAGE: Final = 4096
_MAGIC: Final = int.from_bytes(b"holdread", "little")
_MOST_ASKED: Final = 1 << 30
_WORDS: Final = ("magic", "stage", "out", "progress", "loaded", "asked", "marks", "blocks", "plan", "length")
ASKED, OPEN = 1, 2
"""Stages: what it asks for is there; marks and blocks are too."""
READ, FAILED = 1, 2
"""Marks of blocks."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's window is, and whose process it is."""

    slot: Slot
    owner: Owner


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. patience_s: who has done nothing for so long is waited for no longer. look_s: how often it is asked
    whether a process is alive."""

    patience_s: float = 30.0
    look_s: float = 0.25
    pause_s: float = 0.002


class _Page:
    """The first page, as words."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._words = np.frombuffer(memory, np.uint64, len(_WORDS))

    def __getitem__(self, name: str) -> int:
        return int(self._words[_WORDS.index(name)])

    def __setitem__(self, name: str, value: int) -> None:
        self._words[_WORDS.index(name)] = value


class Window:
    """This rank's own. Raises OSError where there is no shared memory, or no room in it."""

    def __init__(self, place: Place) -> None:
        self._slot = place.slot
        self._taken = False
        self._descriptor = -1
        self._page: _Page | None = None
        self._marks: Buffer | None = None
        self._blocks: Buffer | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def ask(self, data: bytes) -> None:
        """Says what this rank asks for, once."""
        table = arenas.table()
        table.take(self._slot)
        self._taken = True
        self._descriptor = table.create(self._slot)
        length = PAGE + _pages(len(data))
        arenas.reserve(self._descriptor, length)
        view, offset = memoryview(data), PAGE
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written
        memory, _ = arenas.map_memory(self._descriptor, PAGE)
        self._page = page = _Page(memory)
        page["magic"], page["asked"], page["length"] = _MAGIC, len(data), length
        page["stage"] = ASKED

    def open(self, blocks: int, nbytes: int, plan: int) -> None:
        """Makes room for `blocks` marks and `nbytes` of blocks of the plan that is known by the number `plan`."""
        page = self._page
        assert page is not None
        marks = page["length"]
        begin = marks + _pages(blocks)
        length = begin + _pages(nbytes)
        arenas.reserve(self._descriptor, length)
        memory, _ = arenas.map_memory(self._descriptor, length)
        whole = np.frombuffer(memory, np.uint8)
        self._marks, self._blocks = whole[marks : marks + blocks], whole[begin : begin + nbytes]
        page["marks"], page["blocks"], page["length"], page["plan"] = marks, begin, length, plan
        page["stage"] = OPEN

    def block(self, at: int, nbytes: int) -> Buffer:
        assert self._blocks is not None
        return self._blocks[at : at + nbytes]

    def mark(self, block: int, how: int) -> None:
        with self._lock:  # also what makes the block's bytes visible before its mark
            assert self._marks is not None and self._page is not None
            self._page["loaded"] = self._page["loaded"] + 1
        self._marks[block] = how

    def progress(self, group: int) -> None:
        """This rank needs nothing any more of groups before `group` - 1."""
        if self._page is not None:
            self._page["progress"] = group

    def leave(self) -> None:
        """This rank reads for nobody any more, and needs nothing."""
        if self._page is not None:
            self._page["out"] = 1

    @property
    def left(self) -> bool:
        return self._page is None or self._page["out"] != 0

    def close(self) -> None:
        """The file goes; who looks into it still has what it saw."""
        self.leave()
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


class Beside:
    """Another rank's window, or this one's as the others see it."""

    def __init__(self, place: Place, timing: Timing) -> None:
        self._place = place
        self._timing = timing
        self._page: _Page | None = None
        self._descriptor = -1
        self._marks: Buffer | None = None
        self._blocks: Buffer | None = None
        self._expected = (0, 0, 0)
        self._lock = threading.Lock()
        self._gone = False
        self.silent = False
        """Whether it was waited for in vain."""

    @property
    def rank(self) -> str:
        return f"rank {self._place.slot.name.partition('-')[0]}"

    def asked(self, until: float) -> bytes | None:
        """What the rank asks for, once it says so; None where it does not, until the time `until`."""
        seen = self._until(self._has_asked, until)
        if not seen:
            return None
        assert self._page is not None
        length = self._page["asked"]
        if length > _MOST_ASKED:
            return None
        data = os.pread(self._descriptor, length, PAGE)
        return data if len(data) == length else None

    def opened(self, blocks: int, nbytes: int, plan: int) -> None:
        """What the rank's window has to be: it is looked into when it is there."""
        self._expected = (blocks, nbytes, plan)

    def await_passed(self, wanted: int) -> bool:
        """Returns once the rank is at group `wanted` or has left; False where it stays where it is."""
        page = self._page
        if page is None:
            return True
        return self._wait(lambda: page["out"] != 0 or page["progress"] >= wanted, lambda: page["progress"], gone=True)

    def block(self, number: int, at: int, nbytes: int) -> Buffer | None:
        """The block, once it is there; None where this rank has to read it for itself."""
        if self._gone or self._page is None:
            return None
        page = self._page

        def over() -> bool:
            return page["out"] != 0 or (self._mapped() and self._marks is not None and self._marks[number] != 0)

        if not over() and not self._wait(over, lambda: page["loaded"], gone=False) and not self._gone:
            self._gone = self.silent = True
        if self._marks is None or self._marks[number] != READ:
            return None
        assert self._blocks is not None
        return self._blocks[at : at + nbytes]

    def give_up(self) -> None:
        """Whoever waits for this rank waits no longer."""
        self._gone = True

    def close(self) -> None:
        self._gone = True
        self._page = self._marks = self._blocks = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # -- looking -------------------------------------------------------------------------------------------------------

    def _has_asked(self) -> bool:
        if self._page is None:
            try:
                with slots.directory(self._place.slot.root, self._place.slot.parent) as parent:
                    descriptor = os.open(self._place.slot.name, slots.READ, dir_fd=parent)
            except OSError:
                return False  # not there yet
            if os.fstat(descriptor).st_size < PAGE:
                os.close(descriptor)
                return False
            self._descriptor = descriptor
            self._page = _Page(mmap.mmap(descriptor, PAGE, mmap.MAP_SHARED, mmap.PROT_READ))
        return self._page["stage"] >= ASKED and self._page["magic"] == _MAGIC

    def _mapped(self) -> bool:
        """Whether marks and blocks can be looked into."""
        if self._marks is not None:
            return True
        with self._lock:
            return self._marks is not None or self._map()

    def _map(self) -> bool:
        page = self._page
        if page is None or page["stage"] < OPEN:
            return False
        blocks, nbytes, plan = self._expected
        marks, begin = page["marks"], page["blocks"]
        length = begin + _pages(nbytes)
        if page["plan"] != plan or marks + blocks > begin or os.fstat(self._descriptor).st_size < length:
            self._gone = True  # another plan than ours: nothing there can be made sense of
            return False
        memory = mmap.mmap(self._descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ)
        whole = np.frombuffer(memory, np.uint8)
        self._blocks = whole[begin : begin + nbytes]
        self._marks = whole[marks : marks + blocks]
        return True

    def _until(self, over: Callable[[], bool], until: float) -> bool:
        """Whether it came to `over` by then, with its process alive."""
        pause, looked = 0.0002, time.monotonic()
        while not over():
            now = time.monotonic()
            if now >= until:
                return False
            if now - looked > self._timing.look_s:
                if self._dead():
                    return over()
                looked = now
            time.sleep(pause)
            pause = min(pause * 1.5, self._timing.pause_s)
        return True

    def _wait(self, over: Callable[[], bool], moves: Callable[[], int], *, gone: bool) -> bool:
        """Whether it came to `over` while something moved at least every `patience_s`. `gone`: what a dead process
        makes of it."""
        seen, pause = moves(), 0.0002
        looked = moved = time.monotonic()
        while not over():
            if self._gone:
                return gone
            now = time.monotonic()
            if moves() != seen:
                seen, moved = moves(), now
            if now - moved > self._timing.patience_s:
                return False
            if now - looked > self._timing.look_s:
                if self._dead():
                    return gone or over()
                looked = now
            time.sleep(pause)
            pause = min(pause * 1.5, self._timing.pause_s)
        return True

    def _dead(self) -> bool:
        return judge(self._place.owner) == "dead"


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
