"""Capture: every leaf is copied once, from the training's own memory into its final place in the image.

Destinations are bound once for a structure and an arena. Without a `progress` callback whole leaves are copied by one
call per device: the shortest stall. With one, in steps of about 16 MiB in image order, so that digests and writes can
follow; a large leaf in host memory is cut then. Into an arena that is a window, a step is begun only once `admit` says
that what lies a window behind its end has been written out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tenuto.engine.staging.arena import Arena
from tenuto.engine.staging.buffer_layout import BufferLayout
from tenuto.errors import UsageError
from tenuto.model.leaf import dtype
from tenuto.record import record
from tenuto.state.contract import Bound, Flattened

BATCH_BYTES: Final = 16 << 20
STEPS_IN_WINDOW: Final = 4
"""Being filled, filled, being digested, being written."""
PART_BYTES: Final = 256 << 10
"""From this length on a leaf is worth a copy of its own while another thread writes."""

Array = np.ndarray[Any, Any]
Progress = Callable[[int], None]


@record
class _Group:
    """The leaves of one device: their numbers in image order, and the destinations bound in that order."""

    leaves: tuple[int, ...]
    itemsizes: tuple[int, ...]
    long: tuple[int, ...]
    """The rows of `PART_BYTES` and more, ascending."""
    bound: Bound

    def sources(self, flattened: Flattened) -> list[Any]:
        every = flattened.sources
        return [every[number] for number in self.leaves]


@record
class _Batch:
    """Rows `first..stop-1` of every group, which complete the image up to byte `end`."""

    rows: tuple[tuple[int, int, int], ...]
    """(group, first, stop) of the groups that have rows in it."""
    end: int


class Capturer:
    """Copies states of one structure into one arena; made again when `fits` returns False."""

    def __init__(self, flattened: Flattened, layout: BufferLayout, arena: Arena) -> None:
        if arena.nbytes < layout.nbytes:
            raise UsageError(f"the arena has {arena.nbytes} bytes, the image needs {layout.nbytes}")
        self.layout = layout
        self.arena = arena
        self.fingerprint = flattened.fingerprint
        # A window holds `STEPS_IN_WINDOW` of them, headers included.
        self._step = BATCH_BYTES if arena.window is None else min(BATCH_BYTES, arena.window // 8)
        self._groups = _bind(flattened, layout, arena)
        self._batches: list[_Batch] | None = None

    def fits(self, flattened: Flattened) -> bool:
        """Returns whether `flattened` has the structure that this was made for."""
        return flattened.fingerprint == self.fingerprint

    def capture(
        self,
        flattened: Flattened,
        save_id: str,
        *,
        progress: Progress | None = None,
        admit: Callable[[int], None] | None = None,
    ) -> None:
        """Fills the image from the state; complete, header and padding too, when this returns.

        `progress(end)` is called in this thread when bytes `[0, end)` of the image are complete: ends never fall,
        and the last is the image's length. `admit(end)` is called before anything below `end` is written that was not
        admitted before; an arena that is a window needs both. Raises UsageError for a state of another structure; what
        `progress` or `admit` raises ends the capture.
        """
        if not self.fits(flattened):
            raise UsageError("the structure of the state has changed since this capture was planned")
        sources = [group.sources(flattened) for group in self._groups]
        if progress is not None:
            self._capture_in_steps(sources, save_id, progress, self._admission(admit or _admit_all))
            return
        assert self.arena.window is None, "a window is filled in steps"
        self.layout.stamp(self.arena.buffer, save_id)
        for group, own in zip(self._groups, sources, strict=True):
            group.bound.copy(own, 0, len(own))
        for group in self._groups:
            group.bound.wait()

    def groups(self) -> list[tuple[tuple[int, ...], Bound]]:
        """Returns the leaves of each device in image order, and their destinations, bound in that order."""
        return [(group.leaves, group.bound) for group in self._groups]

    def largest_step(self, flattened: Flattened) -> int:
        """Returns the bytes of the longest step in which this state is captured: a window must hold several of them."""
        sources = [group.sources(flattened) for group in self._groups]
        largest = at = 0
        for batch in self._in_order():
            if (cut := self._cuttable(batch, sources)) is not None:
                leaf = self._groups[cut[0]].leaves[cut[1]]
                largest = max(largest, int(self.layout.start[leaf]) - at + self._cut(cut)[1])
            else:
                largest = max(largest, batch.end - at)
            at = batch.end
        return max(largest, self.layout.nbytes - at)

    def _capture_in_steps(
        self, sources: list[list[Any]], save_id: str, progress: Progress, admit: Callable[[int], None]
    ) -> None:
        stamps = _Stamps(self.layout, self.arena.buffer, save_id)
        reached = 0
        for batch in self._in_order():
            if (cut := self._cuttable(batch, sources)) is not None:
                self._in_parts(cut, sources, stamps, progress, admit)
            else:
                admit(batch.end)
                stamps.below(batch.end)
                for number, first, stop in batch.rows:
                    self._copy_while_writing(self._groups[number], sources[number], first, stop)
                for number, _, _ in batch.rows:
                    self._groups[number].bound.wait()
                progress(batch.end)
            reached = batch.end
        admit(self.layout.nbytes)
        stamps.below(self.layout.nbytes)
        stamps.finish()
        if reached < self.layout.nbytes:
            progress(self.layout.nbytes)

    def _admission(self, admit: Callable[[int], None]) -> Callable[[int], None]:
        """Returns what waits until the arena may be filled up to a position and then has memory there."""
        arena = self.arena

        def admitted(end: int) -> None:
            frontier = arena.frontier(end)
            admit(frontier)
            arena.back(frontier)

        return admitted

    def _in_order(self) -> list[_Batch]:
        if self._batches is None:
            self._batches = _batches([group.leaves for group in self._groups], self.layout, self._step)
        return self._batches

    def _copy_while_writing(self, group: _Group, sources: list[Any], first: int, stop: int) -> None:
        """Copies rows `first..stop-1`. A leaf of `PART_BYTES` is copied as one part, by this thread alone: copies by
        all of a framework's threads crawl while the writer has one of the cores."""
        begun = first
        for row in group.long[bisect_left(group.long, first) : bisect_left(group.long, stop)]:
            if group.bound.splits(sources[row]):
                if begun < row:
                    group.bound.copy(sources, begun, row)
                group.bound.copy_part(sources[row], row, 0, int(self.layout.length[group.leaves[row]]))
                begun = row + 1
        if begun < stop:
            group.bound.copy(sources, begun, stop)

    def _cuttable(self, batch: _Batch, sources: list[list[Any]]) -> tuple[int, int] | None:
        """Returns group and row of the batch's only leaf, if it is longer than a step and can be copied in parts."""
        if len(batch.rows) != 1 or batch.rows[0][2] - batch.rows[0][1] > 1:
            return None
        number, row, _ = batch.rows[0]
        group = self._groups[number]
        if int(self.layout.length[group.leaves[row]]) <= self._step or not group.bound.splits(sources[number][row]):
            return None
        return number, row

    def _cut(self, cut: tuple[int, int]) -> list[int]:
        group = self._groups[cut[0]]
        return _cuts(int(self.layout.length[group.leaves[cut[1]]]), group.itemsizes[cut[1]], self._step)

    def _in_parts(
        self,
        cut: tuple[int, int],
        sources: list[list[Any]],
        stamps: _Stamps,
        progress: Progress,
        admit: Callable[[int], None],
    ) -> None:
        """Copies one large leaf part by part."""
        number, row = cut
        group, source = self._groups[number], sources[number][row]
        begin = int(self.layout.start[group.leaves[row]])
        for start, end in pairwise(self._cut(cut)):
            admit(begin + end)
            stamps.below(begin + end)
            group.bound.copy_part(source, row, start, end)
            group.bound.wait()
            progress(begin + end)


class _Stamps:
    """Writes the headers of packs as the capture comes to them: in a window there is no earlier and no later."""

    def __init__(self, layout: BufferLayout, buffer: Array, save_id: str) -> None:
        self._layout = layout
        self._buffer = buffer
        self._save_id = save_id
        self._next = 0

    def below(self, end: int) -> None:
        """Writes every header that begins below position `end`, and zeroes what lies between the packs before it."""
        packs = self._layout.packs
        while self._next < len(packs) and packs[self._next].start < end:
            self.finish()
            self._layout.stamp_header(self._next, self._buffer, self._save_id)
            self._next += 1

    def finish(self) -> None:
        """Zeroes what follows the pack whose header was stamped last."""
        if self._next:
            self._layout.stamp_tail(self._next - 1, self._buffer)


def _admit_all(end: int) -> None:
    """Waits for nothing: the memory holds the whole image."""


def _bind(flattened: Flattened, layout: BufferLayout, arena: Arena) -> list[_Group]:
    device = np.asarray(flattened.device, np.int64)
    begins, ends = layout.start.tolist(), (layout.start + layout.length).tolist()
    sizes = {name: dtype(name).size for name in {spec.dtype for spec in flattened.specs}}
    groups: list[_Group] = []
    for number, owner in enumerate(flattened.devices):
        leaves = layout.order[device[layout.order] == number].tolist() if len(device) else []
        if leaves:
            views = [arena.buffer[begins[leaf] : ends[leaf]] for leaf in leaves]
            specs = [flattened.specs[leaf] for leaf in leaves]
            itemsizes = tuple(sizes[spec.dtype] for spec in specs)
            long = np.flatnonzero(layout.length[leaves] >= PART_BYTES).tolist()
            bound = owner.bind(specs, views, stays=arena.window is None)
            groups.append(_Group(tuple(leaves), itemsizes, tuple(long), bound))
    return groups


def _batches(groups: Sequence[Sequence[int]], layout: BufferLayout, step: int) -> list[_Batch]:
    """Returns steps of about `step` bytes in image order; a leaf larger than that is a step of its own."""
    owner = np.zeros(len(layout.order), np.int64)
    for number, leaves in enumerate(groups):
        owner[np.asarray(leaves, np.int64)] = number
    done = np.zeros(len(groups), np.int64)
    found: list[_Batch] = []
    for first, stop in _runs(layout.length[layout.order].tolist(), layout.pack[layout.order].tolist(), step):
        members = layout.order[first:stop]
        upto = done + np.bincount(owner[members], minlength=len(groups))
        rows = tuple((group, int(done[group]), int(upto[group])) for group in np.flatnonzero(upto > done).tolist())
        found.append(_Batch(rows, int(layout.start[members[-1]] + layout.length[members[-1]])))
        done = upto
    return found


def _runs(lengths: Sequence[int], packs: Sequence[int], step: int) -> Iterator[tuple[int, int]]:
    """Yields runs of positions in one pack whose lengths sum to at most `step`, or of one longer position."""
    first = filled = 0
    for position, length in enumerate(lengths):
        if position > first and (filled + length > step or packs[position] != packs[first]):
            yield first, position
            first, filled = position, 0
        filled += length
    if first < len(lengths):
        yield first, len(lengths)


def _cuts(length: int, itemsize: int, step: int) -> list[int]:
    """Returns where the parts of a leaf end: multiples of the item size (16 MiB is one, for every usual item)."""
    return [*range(0, length, max(step // itemsize, 1) * itemsize), length]
