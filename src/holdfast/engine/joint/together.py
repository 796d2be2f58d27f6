"""Reading together: what several ranks of a node want of a pack is read by one of them, and taken over by the others.

Nobody depends on anybody: what a neighbour does not lay ready, because it died, met an error, has no room or is
stopped, each rank reads for itself, and where a neighbour has read badly the digests say so. Every rank verifies all
that it takes, as if it came from the store: that costs a fraction of a copy, and nobody has to trust what lies in
shared memory.
"""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np

from holdfast.engine.joint.window import FAILED, READ, Beside, Place, Timing, Window
from holdfast.engine.packs import OpenPack
from holdfast.engine.threads import READ_THREADS, hand_out
from holdfast.errors import HoldfastError
from holdfast.events import Emitter, Warned
from holdfast.plan.joint_reads import LONGEST, PAGE, SECTIONS, Asked, Dealt, deal
from holdfast.plan.reads import TASK_BYTES
from holdfast.state.contract import Buffer

WINDOW_BYTES: Final = 128 << 20
"""Shared memory that the ranks of a node take together."""
LEAST_BLOCK_BYTES: Final = 64 << 10
PIECE_BYTES: Final = 8 << 20
"""The longest run of a leaf that is read at once beside others."""
ALL_GROUPS: Final = (1 << 62) - 1


class NodeReads:
    """This rank among those of its node, for one checkpoint. `join` once, then `pack` and `at`; `close` in any case."""

    def __init__(
        self,
        places: Sequence[Place],
        me: int,
        *,
        timing: Timing,
        window_bytes: int = WINDOW_BYTES,
        emitter: Emitter | None = None,
    ) -> None:
        """`places`: the windows of all ranks of the node; `me`: which of them is this rank's."""
        self._own = Window(places[me])
        self._me = me
        self._timing = timing
        self._beside = [Beside(place, timing) for place in places]
        self._section = window_bytes // len(places) // SECTIONS // PAGE * PAGE
        self._emitter = emitter or Emitter()
        self._packs: Mapping[int, OpenPack] = {}
        self._dealt: Dealt | None = None
        self._loader: threading.Thread | None = None
        self.resources = ExitStack()
        """What is closed when nobody reads any more."""
        self._joined = False
        self._group = 0
        self._closed = False
        self.waited_s = 0.0
        """Until all had said what they ask for."""

    def join(self, asked: Asked, packs: Mapping[int, OpenPack]) -> Dealt | None:
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
        self._loader = threading.Thread(target=self._load, name="holdfast-read-for-all", daemon=True)
        self._loader.start()
        return dealt

    def _agreed(self, data: bytes) -> Dealt | None:
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
        dealt = deal(told, block_bytes=block_bytes, section_bytes=self._section)
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
        return max(min(self._section // 2, PIECE_BYTES) // chunk_bytes, 1) * chunk_bytes

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
                hand_out(self._load_one, mine[groups == group].tolist(), READ_THREADS)
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
        except HoldfastError:
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

    def __init__(self, pack: OpenPack, node: NodeReads, first: int, lows: list[int], highs: list[int]) -> None:
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


def _encode(asked: Asked) -> bytes:
    return np.concatenate([asked.pack, asked.low, asked.high]).astype("<i8").tobytes()


def _decode(data: bytes) -> Asked | None:
    """None for what no rank of this version asks for."""
    if len(data) % 24:
        return None
    pack, low, high = np.frombuffer(data, "<i8").reshape(3, -1).astype(np.int64)
    found = Asked(pack, low, high)
    sound = not len(found) or (int(low.min()) >= 0 and int(high.max()) < LONGEST and bool((high > low).all()))
    again = Asked.of(pack, low, high, gap=-1) if sound else found
    ordered = len(again) == len(found) and np.array_equal(again.low, low) and np.array_equal(again.pack, pack)
    return found if sound and ordered else None


def _heard(data: bytes | None) -> bytes:
    """What was said; where nothing was, something that asks for nothing sensible."""
    return b"?" if data is None else data
