"""Reading together: what several ranks of a node want of a pack is read by one of them, and taken over by the others.

Nobody depends on anybody: what a neighbour does not lay ready, because it died, met an error, has no room or is
stopped, each rank reads for itself, and where a neighbour has read badly the digests say so. Every rank verifies all
that it takes, as if it came from the store: that costs a fraction of a copy, and nobody has to trust what lies in
shared memory.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np

from tenuto.codec.chunk_map import whole_chunks
from tenuto.concurrency.worker_threads import READ_THREADS, parallel_for
from tenuto.engine.read.packs import OpenPack
from tenuto.engine.staging import arena as arenas
from tenuto.engine.staging import slots
from tenuto.engine.staging.slots import Slot
from tenuto.errors import TenutoError
from tenuto.events import Emitter, Warned
from tenuto.model.records import Owner
from tenuto.repo.process import judge
from tenuto.sharding.coalesce import TASK_BYTES, cut
from tenuto.sharding.holdings import Column
from tenuto.state.contract import Buffer

# --------------------------------------------------------------------------------------------------
# A rank's window: a file in shared memory in which it says what it asks for, and lays what it has read for others.
#
# `[one page: how far it is][what it asks for][a mark for each block][the blocks]`. Only its rank writes to it; the
# others look on. It goes with its rank: whoever starts next removes what dead ranks have left.

PAGE: Final = 4096
_MAGIC: Final = int.from_bytes(b"tenuread", "little")
_MOST_ASKED: Final = 1 << 30
_WORDS: Final = ("magic", "stage", "out", "progress", "loaded", "asked", "marks", "blocks", "plan", "length")
ASKED, OPEN = 1, 2
"""Stages: what it asks for is there; marks and blocks are too."""
READ, FAILED = 1, 2
"""Marks of blocks."""


@dataclass(frozen=True, slots=True)
class WindowAddress:
    """Where a rank's window is, and whose process it is."""

    slot: Slot
    owner: Owner


@dataclass(frozen=True, slots=True)
class WindowTimeouts:
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

    def __init__(self, place: WindowAddress) -> None:
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
        length = PAGE + _whole_pages(len(data))
        arenas.reserve(self._descriptor, length)
        view, offset = memoryview(data), PAGE
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written
        memory = arenas.map_memory(self._descriptor, PAGE)
        self._page = page = _Page(memory)
        page["magic"], page["asked"], page["length"] = _MAGIC, len(data), length
        page["stage"] = ASKED

    def open(self, blocks: int, nbytes: int, plan: int) -> None:
        """Makes room for `blocks` marks and `nbytes` of blocks of the plan that is known by the number `plan`."""
        page = self._page
        assert page is not None
        marks = page["length"]
        begin = marks + _whole_pages(blocks)
        length = begin + _whole_pages(nbytes)
        arenas.reserve(self._descriptor, length)
        memory = arenas.map_memory(self._descriptor, length)
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


class PeerWindow:
    """Another rank's window, or this one's as the others see it."""

    def __init__(self, place: WindowAddress, timing: WindowTimeouts) -> None:
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
        length = begin + _whole_pages(nbytes)
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


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


# --------------------------------------------------------------------------------------------------
# What several ranks of a node want of the same packs: cut into blocks, each read by one of them for all that want it.
#
# Every rank makes this plan for itself from what all of them ask for, and all make the same. Blocks lie in the
# windows of those that read them, and the windows are used again: group after group of blocks, in the order of the
# packs. A rank is at one group at a time and may still need the one before it; so a place is free again once all
# ranks are two groups on.

SECTIONS: Final = 4
"""Groups that a window holds: two that ranks still need, and two that are being read."""
MOST_RANKS: Final = 62
"""Ranks of one node that can read together: each is one bit of a number."""
LONGEST: Final = 1 << 44
"""Bytes of a pack, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestedReads:
    """Bytes of packs: `low[i] .. high[i] - 1` of pack `pack[i]`, any number that all ranks call it by. In order, and
    without overlaps."""

    pack: Column
    low: Column
    high: Column

    def __len__(self) -> int:
        return len(self.pack)

    @classmethod
    def of(cls, pack: Column, low: Column, high: Column, gap: int = PAGE) -> RequestedReads:
        """Ranges in any order, those joined that overlap or have at most `gap` bytes between them."""
        some = high > low
        pack, low, high = pack[some], low[some], high[some]
        order = np.lexsort((low, pack))
        pack, low, high = pack[order], low[order], high[order]
        if not len(pack):
            return cls(pack, low, high)
        # The furthest end so far within each pack: packs are put far apart first.
        apart = np.searchsorted(np.unique(pack), pack) * LONGEST
        reach = np.maximum.accumulate(high + apart)
        first = np.concatenate([np.ones(1, bool), (low + apart)[1:] > reach[:-1] + gap])
        first[1:] |= pack[1:] != pack[:-1]
        starts = np.flatnonzero(first)
        return cls(pack[starts], low[starts], np.maximum.reduceat(high, starts))


@dataclass(frozen=True, slots=True, eq=False)
class SharedBlocks:
    """Block i: bytes `low[i] .. high[i] - 1` of pack `pack[i]`, wanted by two ranks or more and read by the one at
    place `owner[i]` of the node, in whole pages, into its window at `at[i]`. In order of packs and places; `group`
    never falls."""

    pack: Column
    low: Column
    high: Column
    owner: Column
    group: Column
    at: Column

    def __len__(self) -> int:
        return len(self.pack)

    @property
    def groups(self) -> int:
        return int(self.group[-1]) + 1 if len(self) else 0

    def window(self, owner: int) -> int:
        """Bytes of the window that this rank needs."""
        mine = self.owner == owner
        return int((self.at + _pages(self.low, self.high))[mine].max(initial=0))

    def step(self, pack: Column, high: Column) -> Column:
        """The group that has to be there before the bytes below `high` of `pack` are: of the last block before it."""
        if not len(self):
            return np.zeros(len(pack), np.int64)
        packs = np.unique(self.pack)
        place = np.searchsorted(packs, pack)
        there = packs[np.minimum(place, len(packs) - 1)] == pack
        begins = np.searchsorted(packs, self.pack) * LONGEST + self.low
        last = np.searchsorted(begins, place * LONGEST + np.where(there, high, 0)) - 1
        return self.group[np.maximum(last, 0)]


def share_blocks(asked: Sequence[RequestedReads], *, block_bytes: int, section_bytes: int) -> SharedBlocks:
    """Which blocks the ranks of a node read for each other. A section holds at least two blocks."""
    assert section_bytes >= 2 * (block_bytes + 2 * PAGE) and len(asked) <= MOST_RANKS
    pack, low, high, who = _several(asked)
    at, within = cut(high - low, block_bytes)
    pack, who, begin = pack[at], who[at], low[at] + within
    end = np.minimum(begin + block_bytes, high[at])
    owner = _owners(who, end - begin, block_bytes)
    group, place = _placed(owner, _pages(begin, end), len(asked), section_bytes)
    return SharedBlocks(pack, begin, end, owner, group, place)


def _several(asked: Sequence[RequestedReads]) -> tuple[Column, Column, Column, Column]:
    """The ranges that two ranks or more ask for, and the set of these, a bit for each."""
    pack = np.concatenate([one.pack for one in asked for _ in (0, 1)])
    place = np.concatenate([side for one in asked for side in (one.low, one.high)])
    sign = np.concatenate([np.full(len(one), by) for one in asked for by in (1, -1)])
    bit = np.concatenate([np.full(2 * len(one), 1 << number, np.int64) for number, one in enumerate(asked)])
    order = np.lexsort((place, pack))
    pack, place, sign, bit = pack[order], place[order], sign[order], bit[order]
    count, who = np.cumsum(sign)[:-1], np.cumsum(sign * bit)[:-1]
    # Between two places of one pack; everything is closed at a pack's end.
    some = np.flatnonzero((count > 1) & (place[1:] > place[:-1]))
    return pack[some], place[some], place[some + 1], who[some]


def _owners(who: Column, nbytes: Column, turn: int) -> Column:
    """Who reads each block: those that want it by turns, after as many bytes each."""
    owner = np.zeros(len(who), np.int64)
    sets, of = np.unique(who, return_inverse=True)
    for number, members in enumerate(sets.tolist()):
        lines = np.flatnonzero(of == number)
        ranks = np.array([bit for bit in range(MOST_RANKS) if members >> bit & 1], np.int64)
        before = np.cumsum(nbytes[lines]) - nbytes[lines]
        owner[lines] = ranks[(-(-before // turn) + number) % len(ranks)]
    return owner


def _placed(owner: Column, nbytes: Column, ranks: int, section: int) -> tuple[Column, Column]:
    """The group of each block, and its place in its owner's window: a group is over when one section is full."""
    groups, places = [], []
    used, group = [0] * ranks, 0
    for one, length in zip(owner.tolist(), nbytes.tolist(), strict=True):
        if used[one] + length > section:
            used, group = [0] * ranks, group + 1
        groups.append(group)
        places.append(group % SECTIONS * section + used[one])
        used[one] += length
    return np.array(groups, np.int64), np.array(places, np.int64)


def _pages(low: Column, high: Column) -> Column:
    """Bytes of the whole pages that hold a range."""
    return -(-high // PAGE) * PAGE - low // PAGE * PAGE


WINDOW_BYTES: Final = 128 << 20
"""Shared memory that the ranks of a node take together."""
LEAST_BLOCK_BYTES: Final = 64 << 10
PIECE_BYTES: Final = 8 << 20
"""The longest run of a leaf that is read at once beside others."""
ALL_GROUPS: Final = (1 << 62) - 1


class NodeSharedReads:
    """This rank among those of its node, for one checkpoint. `join` once, then `pack` and `at`; `close` in any case."""

    def __init__(
        self,
        places: Sequence[WindowAddress],
        me: int,
        *,
        timing: WindowTimeouts,
        window_bytes: int = WINDOW_BYTES,
        emitter: Emitter | None = None,
    ) -> None:
        """`places`: the windows of all ranks of the node; `me`: which of them is this rank's."""
        self._own = Window(places[me])
        self._me = me
        self._timing = timing
        self._beside = [PeerWindow(place, timing) for place in places]
        self._section = window_bytes // len(places) // SECTIONS // PAGE * PAGE
        self._emitter = emitter or Emitter()
        self._packs: Mapping[int, OpenPack] = {}
        self._dealt: SharedBlocks | None = None
        self._loader: threading.Thread | None = None
        self.resources = ExitStack()
        """What is closed when nobody reads any more."""
        self._joined = False
        self._group = 0
        self._closed = False
        self.waited_s = 0.0
        """Until all had said what they ask for."""

    def join(self, asked: RequestedReads, packs: Mapping[int, OpenPack]) -> SharedBlocks | None:
        """Tells the others what this rank asks for, hears what they do, and begins to read its part of what several
        want. None where this rank reads for itself: nothing is wanted twice, or it cannot be done, which is said."""
        self._joined, self._packs = True, packs
        try:
            dealt = self._agreed(_encode(asked))
        except OSError as error:
            self._alone(f"there is no room in shared memory ({error.strerror or error})")
            return None
        if dealt is None or not len(dealt):
            self._own.leave()
            return None
        self._dealt = dealt
        self._loader = threading.Thread(target=self._load, name="tenuto-read-for-all", daemon=True)
        self._loader.start()
        return dealt

    def _agreed(self, data: bytes) -> SharedBlocks | None:
        """The blocks that all have come to, with room made for this rank's own. `data`: what it asks for."""
        self._own.ask(data)
        began = time.monotonic()
        until = began + self._timing.patience_s
        said = [data if place == self._me else _heard(one.asked(until)) for place, one in enumerate(self._beside)]
        self.waited_s = time.monotonic() - began
        told = [one for one in map(_decode, said) if one is not None]
        block_bytes = min(TASK_BYTES, self._section // 2 - 2 * PAGE)
        if len(told) < len(said) or block_bytes < LEAST_BLOCK_BYTES:
            few = "their windows would be too small"
            self._alone("a neighbour did not say what it reads" if len(told) < len(said) else few)
            return None
        dealt = share_blocks(told, block_bytes=block_bytes, section_bytes=self._section)
        if len(dealt):
            plan = int.from_bytes(hashlib.sha256(b" ".join(said)).digest()[:8], "little")
            self._own.open(len(dealt), dealt.window(self._me), plan)
            for place, one in enumerate(self._beside):
                one.opened(len(dealt), dealt.window(place), plan)
            self._beside[self._me].asked(until)
        return dealt

    def absent(self) -> None:
        """This rank has nothing to read: nobody waits for it."""
        if not self._joined:
            self._joined = True
            try:
                self._own.ask(b"")
            except OSError:
                return  # then the others wait until they are out of patience, and read for themselves
            self._own.leave()

    def piece(self, chunk_bytes: int) -> int:
        """The longest piece that is read at once: longer ones would need more groups than there are at a time."""
        return whole_chunks(min(self._section // 2, PIECE_BYTES), chunk_bytes)

    @property
    def shares(self) -> bool:
        """Whether some of what this rank reads comes from others."""
        return self._dealt is not None

    def pack(self, number: int) -> OpenPack:
        """An open pack whose bytes come from the neighbours where they have read them."""
        found, dealt = self._packs[number], self._dealt
        if dealt is None:
            return found
        low, high = np.searchsorted(dealt.pack, (number, number + 1)).tolist()
        return _Shared(found, self, low, dealt.low[low:high].tolist(), dealt.high[low:high].tolist())

    def at(self, group: int) -> None:
        """From now on this rank takes blocks of `group` and of the one before it."""
        self._group = group
        self._own.progress(group)

    def block(self, number: int) -> Buffer | None:
        """The bytes of a block, once they are there; None where this rank has to read them."""
        dealt = self._dealt
        assert dealt is not None
        if not self._group - 1 <= int(dealt.group[number]) <= self._group:
            return None
        low, high = int(dealt.low[number]), int(dealt.high[number])
        lead = low % PAGE
        beside = self._beside[int(dealt.owner[number])]
        found = beside.block(number, int(dealt.at[number]), lead + high - low)
        if beside.silent:
            beside.silent = False
            self._say(f"{beside.rank} is dead, or has read nothing for {self._timing.patience_s:g} s")
        return None if found is None else found[lead:]

    def done(self) -> None:
        """This rank needs nothing any more of what others read."""
        self._own.progress(ALL_GROUPS)

    def close(self) -> None:
        """To be called when all ranks have read, or some have failed."""
        self.absent()
        self._closed = True
        self._own.leave()
        for one in self._beside:
            one.give_up()
        if self._loader is not None:
            self._loader.join()
        self.resources.close()
        for one in self._beside:
            one.close()
        self._own.close()

    # -- reading for all -----------------------------------------------------------------------------------------------

    def _load(self) -> None:
        dealt = self._dealt
        assert dealt is not None
        try:
            mine = np.flatnonzero(dealt.owner == self._me)
            groups = dealt.group[mine]
            for group in np.unique(groups).tolist():
                if not self._room(group) or self._own.left:
                    break
                parallel_for(self._load_one, mine[groups == group].tolist(), READ_THREADS)
        except BaseException:
            self._own.leave()
            raise

    def _room(self, group: int) -> bool:
        """Returns once the others have passed what lies where this group goes."""
        before = group - SECTIONS
        if before < 0:
            return True
        for one in self._beside:
            if not one.await_passed(before + 2):
                if not self._closed:
                    self._alone(f"{one.rank} did not go on for {self._timing.patience_s:g} s")
                return False
        return True

    def _load_one(self, number: int) -> None:
        dealt = self._dealt
        assert dealt is not None
        if self._own.left:
            return
        pack = self._packs[int(dealt.pack[number])]
        low = int(dealt.low[number]) // PAGE * PAGE
        high = -(-int(dealt.high[number]) // PAGE) * PAGE
        if pack.reader.alignment == 1:
            high = min(high, pack.reader.length)
        try:
            pack.read_into(low, self._own.block(int(dealt.at[number]), high - low))
        except TenutoError:
            self._own.mark(number, FAILED)  # who needs it reads it, and is told what is wrong with it
        else:
            self._own.mark(number, READ)

    def _alone(self, why: str) -> None:
        self._own.leave()
        self._say(why)

    def _say(self, why: str) -> None:
        self._emitter.emit(Warned(f"this rank reads for itself what its neighbours on this node read too: {why}"))


class _Shared(OpenPack):
    """`lows` and `highs`: of the blocks of this pack, which are numbered from `first` on."""

    __slots__ = ("_first", "_highs", "_lows", "_node")

    def __init__(self, pack: OpenPack, node: NodeSharedReads, first: int, lows: list[int], highs: list[int]) -> None:
        super().__init__(pack.name, pack.reader, pack.view)
        self._node = node
        self._first = first
        self._lows = lows
        self._highs = highs

    def read_into(self, position: int, target: Buffer) -> None:
        stop = position + len(target)
        first, last = bisect_right(self._highs, position), bisect_left(self._lows, stop)
        if first >= last or self.view is not None:
            super().read_into(position, target)
            return
        taken: list[tuple[int, int, Buffer]] = []
        at = position
        for block in range(first, last):
            low, high = max(self._lows[block], position), min(self._highs[block], stop)
            found = self._node.block(self._first + block)
            if found is None:
                continue
            self._read_itself(position, at, low, target)
            begin = low - self._lows[block]
            taken.append((low - position, high - position, found[begin : begin + high - low]))
            at = high
        self._read_itself(position, at, stop, target)
        for begin, end, data in taken:  # last: what was read beside them may reach into them, to whole pages
            np.positive(data, out=target[begin:end])

    def _read_itself(self, position: int, low: int, high: int, target: Buffer) -> None:
        """Bytes `low..high-1` of the pack; in whole pages where the reader asks for that and they are in `target`."""
        if low >= high:
            return
        if self.reader.alignment > 1:
            low = max(low // PAGE * PAGE, position)
            high = min(-(-high // PAGE) * PAGE, position + len(target))
        super().read_into(low, target[low - position : high - position])


def _encode(asked: RequestedReads) -> bytes:
    return np.concatenate([asked.pack, asked.low, asked.high]).astype("<i8").tobytes()


def _decode(data: bytes) -> RequestedReads | None:
    """None for what no rank of this version asks for."""
    if len(data) % 24:
        return None
    pack, low, high = np.frombuffer(data, "<i8").reshape(3, -1).astype(np.int64)
    found = RequestedReads(pack, low, high)
    sound = not len(found) or (int(low.min()) >= 0 and int(high.max()) < LONGEST and bool((high > low).all()))
    again = RequestedReads.of(pack, low, high, gap=-1) if sound else found
    ordered = len(again) == len(found) and np.array_equal(again.low, low) and np.array_equal(again.pack, pack)
    return found if sound and ordered else None


def _heard(data: bytes | None) -> bytes:
    """What was said; where nothing was, something that asks for nothing sensible."""
    return b"?" if data is None else data
