"""Capture: every leaf is copied once, from the training's own memory into its final place in the image.

Destinations are bound once for a structure and an arena. Without a `progress` callback whole leaves are copied by one
call per device: the shortest stall. With one, in steps of about 16 MiB in image order, so that digests and writes can
follow; a large leaf in host memory is cut then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from holdfast.errors import UsageError
from holdfast.image.arena import Arena
from holdfast.image.layout import Layout
from holdfast.state.contract import Bound, Flattened

BATCH_BYTES: Final = 16 << 20
PART_BYTES: Final = 256 << 10
"""From this length on a leaf is worth a copy of its own while another thread writes."""

Array = np.ndarray[Any, Any]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Group:
    """The leaves of one device: their numbers in image order, and the destinations bound in that order."""

    leaves: tuple[int, ...]
    itemsizes: tuple[int, ...]
    bound: Bound

    def sources(self, flattened: Flattened) -> list[Any]:
        every = flattened.sources
        return [every[number] for number in self.leaves]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows `first..stop-1` of every group, which complete the image up to byte `end`."""

    rows: tuple[tuple[int, int, int], ...]
    """(group, first, stop) of the groups that have rows in it."""
    end: int


class Capturer:
    """Copies states of one structure into one arena; made again when `fits` says no."""

    def __init__(self, flattened: Flattened, layout: Layout, arena: Arena) -> None:
        if arena.nbytes < layout.nbytes:
            raise UsageError(f"the arena has {arena.nbytes} bytes, the image needs {layout.nbytes}")
        self.layout = layout
        self.arena = arena
        self.fingerprint = flattened.fingerprint
        self._groups = _bind(flattened, layout, arena.buffer)
        self._batches: list[_Batch] | None = None

    def fits(self, flattened: Flattened) -> bool:
        """Whether `flattened` has the structure that this was made for."""
        return flattened.fingerprint == self.fingerprint

    def capture(self, flattened: Flattened, save_id: str, *, progress: Progress | None = None) -> None:
        """Fills the image from the state; complete, header and padding too, when this returns.

        `progress(end)` is called in this thread when bytes `[0, end)` of the image are complete: ends never fall,
        and the last is the image's length. Raises UsageError for a state of another structure; what `progress`
        raises ends the capture.
        """
        if not self.fits(flattened):
            raise UsageError("the structure of the state has changed since this capture was planned")
        self.layout.stamp(self.arena.buffer, save_id)
        sources = [group.sources(flattened) for group in self._groups]
        if progress is not None:
            self._capture_in_steps(sources, progress)
            return
        for group, own in zip(self._groups, sources, strict=True):
            group.bound.copy(own, 0, len(own))
        for group in self._groups:
            group.bound.wait()

    def _capture_in_steps(self, sources: list[list[Any]], progress: Progress) -> None:
        if self._batches is None:
            self._batches = _batches([group.leaves for group in self._groups], self.layout)
        for batch in self._batches:
            if len(batch.rows) == 1 and self._in_parts(batch.rows[0], sources, progress):
                continue
            for number, first, stop in batch.rows:
                self._copy_beside_writer(self._groups[number], sources[number], first, stop)
            for number, _, _ in batch.rows:
                self._groups[number].bound.wait()
            progress(batch.end)
        if not self._batches or self._batches[-1].end < self.layout.nbytes:
            progress(self.layout.nbytes)

    def _copy_beside_writer(self, group: _Group, sources: list[Any], first: int, stop: int) -> None:
        """Rows `first..stop-1`. A leaf worth it is copied as one part, which keeps to this thread: copies by all of a
        framework's threads crawl while the writer has one of the cores."""
        begun = first
        for row in range(first, stop):
            length = int(self.layout.length[group.leaves[row]])
            if length >= PART_BYTES and group.bound.splits(sources[row]):
                if begun < row:
                    group.bound.copy(sources, begun, row)
                group.bound.copy_part(sources[row], row, 0, length)
                begun = row + 1
        if begun < stop:
            group.bound.copy(sources, begun, stop)

    def _in_parts(self, row: tuple[int, int, int], sources: list[list[Any]], progress: Progress) -> bool:
        """Copies one large leaf part by part, where its device can; says whether it did."""
        number, first, stop = row
        group, source = self._groups[number], sources[number][first]
        leaf = group.leaves[first]
        begin, length = int(self.layout.start[leaf]), int(self.layout.length[leaf])
        if stop - first > 1 or length <= BATCH_BYTES or not group.bound.splits(source):
            return False
        cuts = _cuts(length, group.itemsizes[first])
        for start, end in pairwise(cuts):
            group.bound.copy_part(source, first, start, end)
            group.bound.wait()
            progress(begin + end)
        return True


def _bind(flattened: Flattened, layout: Layout, buffer: Array) -> list[_Group]:
    device = np.asarray(flattened.device, np.int64)
    groups: list[_Group] = []
    for number, owner in enumerate(flattened.devices):
        leaves = layout.order[device[layout.order] == number].tolist() if len(device) else []
        if leaves:
            begins, ends = layout.start.tolist(), (layout.start + layout.length).tolist()
            views = [buffer[begins[leaf] : ends[leaf]] for leaf in leaves]
            specs = [flattened.specs[leaf] for leaf in leaves]
            groups.append(_Group(tuple(leaves), tuple(spec.itemsize for spec in specs), owner.bind(specs, views)))
    return groups


def _batches(groups: Sequence[Sequence[int]], layout: Layout) -> list[_Batch]:
    """Steps of about 16 MiB in image order; a leaf larger than that is a step of its own."""
    owner = np.zeros(len(layout.order), np.int64)
    for number, leaves in enumerate(groups):
        owner[np.asarray(leaves, np.int64)] = number
    done = np.zeros(len(groups), np.int64)
    found: list[_Batch] = []
    for first, stop in _runs(layout.length[layout.order].tolist()):
        members = layout.order[first:stop]
        upto = done + np.bincount(owner[members], minlength=len(groups))
        rows = tuple((group, int(done[group]), int(upto[group])) for group in np.flatnonzero(upto > done).tolist())
        found.append(_Batch(rows, int(layout.start[members[-1]] + layout.length[members[-1]])))
        done = upto
    return found


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of positions whose lengths sum to at most 16 MiB, or of one longer position."""
    first = filled = 0
    for position, length in enumerate(lengths):
        if position > first and filled + length > BATCH_BYTES:
            yield first, position
            first, filled = position, 0
        filled += length
    if first < len(lengths):
        yield first, len(lengths)


def _cuts(length: int, itemsize: int) -> list[int]:
    """Bytes of a leaf at which its parts end: multiples of the item size (16 MiB is one, for every usual item)."""
    step = BATCH_BYTES - BATCH_BYTES % itemsize
    return [*range(0, length, step), length]
