"""Reads what several ranks of a node want from the same packs once: one of them reads it, the others copy it.

No rank depends on another: what another rank does not deliver, because it died, met an error or has no room, each rank
reads for itself. Every rank verifies all that it copies as if it came from the store. That costs a fraction of a copy,
and shared memory need not be trusted.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple
from typing import Any, Final

import numpy as np

from tenuto.codec.chunk_map import whole_chunks
from tenuto.concurrency.process import this_process
from tenuto.concurrency.worker_threads import LoopThreads, parallel_for
from tenuto.engine.read.packs import OpenPack
from tenuto.engine.read.peer_window import PAGE, PeerWindow, Window, WindowAddress, whole_pages
from tenuto.engine.staging import slots
from tenuto.engine.staging.arena import free_shared_memory
from tenuto.errors import TenutoError
from tenuto.events import Emitter, Warned
from tenuto.model import canonical_json
from tenuto.model.records import Json, Owner
from tenuto.ranks.agreement import Agreement
from tenuto.record import record
from tenuto.sharding.coalesce import TASK_BYTES, cut
from tenuto.sharding.holdings import Column
from tenuto.state.contract import Buffer

# --------------------------------------------------------------------------------------------------
# The plan: what several ranks want is cut into blocks, each read by one of them for all that want it.
#
# Every rank computes the plan from the requests of all, and all get the same one. Blocks lie in the windows of the
# ranks that read them, and the room in a window is used again: group after group of blocks, in the order of the packs.
# A rank is at one group at a time and may still need the one before it, so room is free again once all ranks are two
# groups further.

SECTIONS: Final = 4
"""Groups that a window holds: two that ranks still need, and two that are being read."""
MOST_RANKS: Final = 62
"""Ranks of one node that can share reads: each is one bit of a number."""
WORTH_SHARING: Final = 64 << 10
"""Shorter ranges each rank reads for itself. An FSDP training has such, a step count for each parameter, that all ranks
want, and often nothing else: then nobody needs a window."""
LONGEST: Final = 1 << 44
"""Bytes of a pack, at most."""


@record(eq=False)
class PackRanges:
    """Bytes `low[i] .. high[i] - 1` of pack `pack[i]`, a number that is the same on all ranks."""

    pack: Column
    low: Column
    high: Column

    def __len__(self) -> int:
        return len(self.pack)

    def take(self, lines: Column) -> PackRanges:
        return PackRanges(self.pack[lines], self.low[lines], self.high[lines])

    def merged(self, gap: int = PAGE) -> PackRanges:
        """Returns the ranges in order; those that overlap or have at most `gap` bytes between them become one."""
        found = self.take(np.flatnonzero(self.high > self.low))
        found = found.take(np.lexsort((found.low, found.pack)))
        if not len(found):
            return found
        # The furthest end so far within each pack: an offset separates the packs.
        apart = np.searchsorted(np.unique(found.pack), found.pack) * LONGEST
        reach = np.maximum.accumulate(found.high + apart)
        first = np.concatenate([np.ones(1, bool), (found.low + apart)[1:] > reach[:-1] + gap])
        first[1:] |= found.pack[1:] != found.pack[:-1]
        starts = np.flatnonzero(first)
        return PackRanges(found.pack[starts], found.low[starts], np.maximum.reduceat(found.high, starts))

    def worth_sharing(self) -> PackRanges:
        """Returns the ranges that take longer to read than to ask another rank for."""
        return self.take(np.flatnonzero(self.high - self.low >= WORTH_SHARING))


@record(eq=False)
class SharedBlocks:
    """Block i: bytes `low[i] .. high[i] - 1` of pack `pack[i]`, which two ranks or more want. The one at place
    `owner[i]` of the node reads it, in whole pages, into its window at `at[i]`.

    Blocks are in the order of packs and offsets; `group` never decreases.
    """

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

    def window_bytes(self, owner: int) -> int:
        mine = self.owner == owner
        return int((self.at + _page_bytes(self.low, self.high))[mine].max(initial=0))

    def group_of(self, pack: Column, high: Column) -> Column:
        """Returns the group that has to be there before the bytes below `high` of `pack` are: of the last block before
        it."""
        if not len(self):
            return np.zeros(len(pack), np.int64)
        packs = np.unique(self.pack)
        place = np.searchsorted(packs, pack)
        there = packs[np.minimum(place, len(packs) - 1)] == pack
        begins = np.searchsorted(packs, self.pack) * LONGEST + self.low
        last = np.searchsorted(begins, place * LONGEST + np.where(there, high, 0)) - 1
        return self.group[np.maximum(last, 0)]


def share_blocks(requests: Sequence[PackRanges], *, block_bytes: int, section_bytes: int) -> SharedBlocks:
    """Plans which blocks the ranks of a node read for each other.

    requests: what each rank wants, merged.
    section_bytes: a section of a window, which holds at least two blocks.
    """
    assert section_bytes >= 2 * (block_bytes + 2 * PAGE) and len(requests) <= MOST_RANKS
    wanted, ranks = _wanted_twice(requests)
    line, within = cut(wanted.high - wanted.low, block_bytes)
    low = wanted.low[line] + within
    high = np.minimum(low + block_bytes, wanted.high[line])
    owner = _owners(ranks[line], high - low, block_bytes)
    group, at = _placed(owner, _page_bytes(low, high), len(requests), section_bytes)
    return SharedBlocks(wanted.pack[line], low, high, owner, group, at)


def _wanted_twice(requests: Sequence[PackRanges]) -> tuple[PackRanges, Column]:
    """Returns the ranges that two ranks or more want, and the set of these ranks, a bit for each."""
    pack = np.concatenate([one.pack for one in requests for _ in (0, 1)])
    place = np.concatenate([side for one in requests for side in (one.low, one.high)])
    sign = np.concatenate([np.full(len(one), by) for one in requests for by in (1, -1)])
    bit = np.concatenate([np.full(2 * len(one), 1 << number, np.int64) for number, one in enumerate(requests)])
    order = np.lexsort((place, pack))
    pack, place, sign, bit = pack[order], place[order], sign[order], bit[order]
    count, ranks = np.cumsum(sign)[:-1], np.cumsum(sign * bit)[:-1]
    # Between two places of one pack; no range is open at a pack's end.
    some = np.flatnonzero((count > 1) & (place[1:] > place[:-1]))
    return PackRanges(pack[some], place[some], place[some + 1]), ranks[some]


def _owners(ranks: Column, nbytes: Column, step: int) -> Column:
    """Returns which rank reads each block: of the set that wants it one after the other, each about `step` bytes."""
    owner = np.zeros(len(ranks), np.int64)
    sets, of = np.unique(ranks, return_inverse=True)
    for number, members in enumerate(sets.tolist()):
        lines = np.flatnonzero(of == number)
        readers = np.array([bit for bit in range(MOST_RANKS) if members >> bit & 1], np.int64)
        before = np.cumsum(nbytes[lines]) - nbytes[lines]
        owner[lines] = readers[(-(-before // step) + number) % len(readers)]
    return owner


def _placed(owner: Column, nbytes: Column, ranks: int, section: int) -> tuple[Column, Column]:
    """Returns the group of each block and its place in its owner's window. A group ends when one section is full."""
    groups, places = [], []
    used, group = [0] * ranks, 0
    for one, length in zip(owner.tolist(), nbytes.tolist(), strict=True):
        if used[one] + length > section:
            used, group = [0] * ranks, group + 1
        groups.append(group)
        places.append(group % SECTIONS * section + used[one])
        used[one] += length
    return np.array(groups, np.int64), np.array(places, np.int64)


def _page_bytes(low: Column, high: Column) -> Column:
    """Returns the bytes of the whole pages that hold each range."""
    return -(-high // PAGE) * PAGE - low // PAGE * PAGE


# --------------------------------------------------------------------------------------------------
# Reading by the plan.

WINDOW_BYTES: Final = 128 << 20
"""Shared memory that the windows of a node's ranks take in sum."""
PIECE_BYTES: Final = 8 << 20
"""The longest run of a leaf that is read at once beside others."""
ALL_GROUPS: Final = (1 << 62) - 1


class NodeSharedReads:
    """This rank among those of its node, for one checkpoint. Call `join` once, then `pack` and `advance`; call `close`
    in any case."""

    def __init__(
        self,
        windows: Sequence[WindowAddress],
        own: int,
        *,
        patience_s: float,
        window_bytes: int = WINDOW_BYTES,
        emitter: Emitter | None = None,
    ) -> None:
        """
        windows: those of all ranks of the node.
        own: which of them is this rank's.
        patience_s: a rank that has made no progress for so long is not waited for any more.
        """
        self.threads = LoopThreads.of(len(windows))
        """Of each rank, for its own loops and for those that read for all."""
        self._own = Window(windows[own])
        self._number = own
        self._patience_s = patience_s
        self._peers = [PeerWindow(window, patience_s) for window in windows]
        """Of all ranks, this one too: it copies its own blocks like the others'."""
        self._section = window_bytes // len(windows) // SECTIONS // PAGE * PAGE
        self._emitter = emitter or Emitter()
        self._packs: Mapping[int, OpenPack] = {}
        self._plan: SharedBlocks | None = None
        self._loader: threading.Thread | None = None
        self.resources = ExitStack()
        """Closed when no thread reads any more."""
        self._joined = False
        self._group = 0
        self._closed = False
        self.waited_s = 0.0
        """How long the requests of the other ranks took to arrive."""

    def join(self, request: PackRanges, packs: Mapping[int, OpenPack]) -> SharedBlocks | None:
        """Exchanges requests with the other ranks and begins to read this rank's blocks in the background.

        Returns the plan; None where this rank reads for itself: nothing is wanted twice, or, with a warning, the ranks
        cannot share.
        """
        self._joined, self._packs = True, packs
        try:
            plan = self._planned(request)
        except OSError as error:
            self._withdraw(f"there is no room in shared memory ({error.strerror or error})")
            return None
        if plan is None or not len(plan):
            self._own.withdraw()
            return None
        self._plan = plan
        self._loader = threading.Thread(target=self._load, name="tenuto-read-for-all", daemon=True)
        self._loader.start()
        return plan

    def _planned(self, request: PackRanges) -> SharedBlocks | None:
        """Returns the blocks of all ranks, with room made for this rank's own; None where a request is missing."""
        self._own.request(np.concatenate([request.pack, request.low, request.high]).astype("<i8").tobytes())
        began = time.monotonic()
        requests: list[PackRanges] = []
        for peer in self._peers:
            found = _decoded(peer.request(began))
            if found is None:
                self._withdraw(f"{peer.rank} did not publish what it reads")
                return None
            requests.append(found)
        self.waited_s = time.monotonic() - began
        block_bytes = min(TASK_BYTES, self._section // 2 - 2 * PAGE)
        plan = share_blocks(requests, block_bytes=block_bytes, section_bytes=self._section)
        if len(plan):
            free_shared_memory(_WINDOWS)  # of killed jobs: those may lie where this one's go
            self._own.open(len(plan), plan.window_bytes(self._number))
            for number, peer in enumerate(self._peers):
                peer.expect(len(plan), plan.window_bytes(number))
        return plan

    def leave(self) -> None:
        """Publishes that this rank has nothing to read, so that no other waits for it."""
        if not self._joined:
            self._joined = True
            try:
                self._own.request(b"")
            except OSError:
                return  # the others lose patience, and read for themselves
            self._own.withdraw()

    def piece_bytes(self, chunk_bytes: int) -> int:
        """Returns the longest piece to read at once: longer ones would need more groups than there are at a time."""
        return whole_chunks(min(self._section // 2, PIECE_BYTES), chunk_bytes)

    @property
    def shares(self) -> bool:
        """Whether some of what this rank reads comes from others."""
        return self._plan is not None

    def pack(self, number: int) -> OpenPack:
        """Returns an open pack whose bytes are copied from other ranks where they have read them."""
        found, plan = self._packs[number], self._plan
        if plan is None:
            return found
        low, high = np.searchsorted(plan.pack, (number, number + 1)).tolist()
        return _SharedPack(found, self, low, plan.low[low:high].tolist(), plan.high[low:high].tolist())

    def advance(self, group: int) -> None:
        """Begins to copy blocks of `group`; those of the group before it are still there."""
        self._group = group
        self._own.advance(group)

    def block(self, number: int) -> Buffer | None:
        """Returns the bytes of a block once they are there; None where this rank has to read them."""
        plan = self._plan
        assert plan is not None
        if self._own.withdrawn or not self._group - 1 <= int(plan.group[number]) <= self._group:
            return None
        low, high = int(plan.low[number]), int(plan.high[number])
        lead = low % PAGE
        peer = self._peers[int(plan.owner[number])]
        found = peer.block(number, int(plan.at[number]), lead + high - low)
        if peer.timed_out:
            peer.timed_out = False
            self._warn(f"{peer.rank} is dead, or has read nothing for {self._patience_s:g} s")
        return None if found is None else found[lead:]

    def finish(self) -> None:
        """Publishes that this rank needs nothing any more of what others read."""
        self._own.advance(ALL_GROUPS)

    def close(self) -> None:
        """Ends sharing, when all ranks have read or some have failed."""
        self.leave()
        self._closed = True
        self._own.withdraw()
        for peer in self._peers:
            peer.ignore()
        if self._loader is not None:
            self._loader.join()
        self.resources.close()
        for peer in self._peers:
            peer.close()
        self._own.close()

    # -- reading for all -----------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Reads this rank's blocks. Withdraws at the first error, which each rank that needs the bytes meets itself."""
        plan = self._plan
        assert plan is not None
        mine = np.flatnonzero(plan.owner == self._number)
        groups = plan.group[mine]
        try:
            for group in np.unique(groups).tolist():
                if self._own.withdrawn or not self._has_room(group):
                    break
                parallel_for(self._load_one, mine[groups == group].tolist(), self.threads.read)
        except TenutoError as error:
            self._withdraw(f"a block could not be read ({error.message})")
        except BaseException:
            self._own.withdraw()
            raise

    def _has_room(self, group: int) -> bool:
        """Returns True once all ranks have passed the blocks whose room this group takes."""
        if group < SECTIONS:
            return True
        for peer in self._peers:
            if not peer.await_group(group - SECTIONS + 2):
                if not self._closed:
                    self._withdraw(f"{peer.rank} has made no progress for {self._patience_s:g} s")
                return False
        return True

    def _load_one(self, number: int) -> None:
        plan = self._plan
        assert plan is not None
        if self._own.withdrawn:
            return
        pack = self._packs[int(plan.pack[number])]
        low, high = int(plan.low[number]) // PAGE * PAGE, whole_pages(int(plan.high[number]))
        if pack.reader.alignment == 1:
            high = min(high, pack.reader.length)
        pack.read_into(low, self._own.block(int(plan.at[number]), high - low))
        self._own.mark_read(number)

    def _withdraw(self, why: str) -> None:
        self._own.withdraw()
        self._warn(why)

    def _warn(self, why: str) -> None:
        self._emitter.emit(Warned(f"this rank reads by itself what other ranks of its node also read: {why}"))


class _SharedPack(OpenPack):
    """A pack of which some blocks are copied. `lows` and `highs`: of its blocks, which are numbered from `first` on."""

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
        copies: list[tuple[int, int, Buffer]] = []
        at = position
        for block in range(first, last):
            low, high = max(self._lows[block], position), min(self._highs[block], stop)
            found = self._node.block(self._first + block)
            if found is None:
                continue
            self._read_between(position, at, low, target)
            begin = low - self._lows[block]
            copies.append((low - position, high - position, found[begin : begin + high - low]))
            at = high
        self._read_between(position, at, stop, target)
        for begin, end, data in copies:  # last: reads in whole pages may reach into them
            np.positive(data, out=target[begin:end])

    def _read_between(self, position: int, low: int, high: int, target: Buffer) -> None:
        """Reads bytes `low..high-1` of the pack; in whole pages where the reader needs that and `target` has them."""
        if low >= high:
            return
        if self.reader.alignment > 1:
            low = max(low // PAGE * PAGE, position)
            high = min(whole_pages(high), position + len(target))
        super().read_into(low, target[low - position : high - position])


def _decoded(data: bytes | None) -> PackRanges | None:
    """Returns a request; None for what no rank of this version publishes."""
    if data is None or len(data) % 24:
        return None
    pack, low, high = np.frombuffer(data, "<i8").reshape(3, -1).astype(np.int64)
    sound = ((low >= 0) & (low < high) & (high < LONGEST)).all()
    return PackRanges(pack, low, high) if sound else None


# --------------------------------------------------------------------------------------------------
# Which ranks of the job share this node's memory.

_ROOT: Final = slots.SHARED_MEMORY
_WINDOWS: Final = "reads"
"""The directory of windows, beside those of the repositories, whose ids are longer."""


@record
class NodePeers:
    """The ranks of one node, this one too, in order of their numbers. `owners`: their processes."""

    session: str
    ranks: Sequence[int]
    owners: Sequence[Owner]
    own: int
    """This rank's place among them."""

    @classmethod
    def decode(cls, agreement: Agreement, peers: bytes) -> NodePeers | None:
        """Decodes this rank's part of `peers_of_each`. None where this rank is the only one on its node, or its node
        has no shared memory."""
        found = canonical_json.loads(peers)
        if not found:
            return None
        ranks = [rank for rank, _ in found]
        return cls(agreement.session.id, ranks, [Owner(*owner) for _, owner in found], ranks.index(agreement.rank))

    def reads(
        self, number: int, *, patience_s: float, emitter: Emitter, window_bytes: int = WINDOW_BYTES
    ) -> NodeSharedReads:
        """Returns the shared reads of one checkpoint. `number`: the same on all ranks, and another each time."""
        windows = [
            WindowAddress(slots.Slot(_ROOT, f"{_WINDOWS}/{self.session}", f"{rank}-{number}"), owner)
            for rank, owner in zip(self.ranks, self.owners, strict=True)
        ]
        return NodeSharedReads(windows, self.own, patience_s=patience_s, window_bytes=window_bytes, emitter=emitter)


def here() -> Json:
    """Returns where this rank runs, for `peers_of_each`."""
    return [_memory_id(), *astuple(this_process())]


def peers_of_each(facts: Sequence[Sequence[Any]]) -> list[bytes]:
    """Returns, for each rank, number and process of the ranks on its node, itself included; none where there is no
    other, or too many. Each rank gets only its own node's: all of them would be too much with thousands of ranks.

    facts: `here` of all ranks.
    """
    found: dict[tuple[Any, ...], list[Json]] = {}
    nodes = [(memory, *owner[:2]) for memory, *owner in facts]
    for rank, (node, (_, *owner)) in enumerate(zip(nodes, facts, strict=True)):
        found.setdefault(node, []).append([rank, owner])
    shared = {node: canonical_json.dumps(ranks if node[0] and 1 < len(ranks) <= MOST_RANKS else [])
              for node, ranks in found.items()}  # fmt: skip
    return [shared[node] for node in nodes]


def _memory_id() -> str:
    """Returns a text that is equal for processes that see the same files in shared memory; empty without any."""
    with suppress(OSError):
        status = os.stat(_ROOT)
        return f"{os.geteuid()} {status.st_dev} {status.st_ino}"
    return ""
