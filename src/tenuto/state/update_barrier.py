"""Makes updates wait for fenced captures, and tracks which leaves only an optimizer's step writes.

Only an optimizer's step writes the leaves it owns, so such a leaf may be copied after the save as long as the step
waits for the copy. Nothing outside can prove that only the step writes it. So each leaf starts in probation: it is
copied at once and compared with the training's memory just before the update. Afterwards a small rotating sample
continues to be compared. A leaf that ever differs is captured eagerly from then on.

Frameworks report which leaves their optimizers own, and call `let_updates_pass` before every update.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final, Protocol

from tenuto.record import record
from tenuto.state.contract import Bound

PROBATION: Final = 3
"""The saves of one structure for which a leaf is copied at once and compared before the update."""
LEAST_BYTES: Final = 32 << 10
"""A shorter leaf is cheaper to copy at once than to hold and to watch."""
SAMPLE: Final = 1 / 800
"""The share of fenced bytes copied at once and compared after the probation: its cost to training stays a small part of
the twentieth of a copy that a fenced save may take."""
PROBE_BYTES: Final = 1024
"""What is read of every late leaf at the save and compared again, at another place in it at each save: code that writes
past all counts mostly writes whole leaves."""
_GOLDEN: Final = 0.6180339887498949
_EDGE: Final = 4096
"""The boundaries of parts of leaves: a multiple of every item size."""


class Barrier(Protocol):
    """Something that updates must wait for."""

    def before_update(self) -> None:
        """Blocks until training's memory may change. Never raises errors that concern only the save."""
        ...


class UpdateGate(Protocol):
    """The knowledge of a framework about the optimizers in one state. Keeps no reference to them."""

    def begin_save(self) -> None:
        """Marks the start of a save, fenced or not: observations from before the previous save expire."""
        ...

    def fenceable(self, sources: Sequence[Any]) -> Sequence[int]:
        """Returns the positions of sources whose optimizer step was seen to wait since the previous save.

        Returns the same object while sources and owners are identical and none has changed its form.
        """
        ...

    def close(self) -> None: ...


LateLeaf = tuple[Any, int, int, int]
"""A part of a leaf: source, leaf as in `bind`, and bytes `start..stop-1`, multiples of the item size."""
Probe = Callable[[int], bool]
"""Returns whether the short part of that number is still what it was when it was first read."""


class LateCopies(Protocol):
    """Copies of parts of leaves, in the order they were given."""

    def copy(self, number: int) -> None:
        """Blocks until part `number` is in the image."""
        ...

    def unchanged(self) -> Sequence[bool]:
        """Returns, after everything is copied, which of the watched parts are unchanged."""
        ...

    def order(self) -> bool:
        """Orders later work of the framework after these copies without blocking this thread. Returns False where only
        waiting helps."""
        ...


class LateBound(Bound, Protocol):
    """Destinations of leaves that can be copied after the save has returned."""

    late_step: int
    """Bytes per copy."""
    on_device: bool
    """Whether copies and comparisons run outside the CPU's threads, in the order they were requested."""

    def can_wait(self, source: Any) -> bool:
        """Returns whether parts of this source can be copied later, and its changes are counted."""
        ...

    def hold(self, source: Any) -> Any:
        """Returns the same memory, which survives when the state replaces its memory."""
        ...

    def version(self, source: Any) -> int:
        """Returns a count that grows with every in-place change the framework notices."""
        ...

    def late(
        self, parts: Sequence[LateLeaf], watched: Sequence[LateLeaf] = (), probe: Probe | None = None
    ) -> LateCopies:
        """Copies `parts`, then compares `watched`, already in the image, with training's memory at that time. A device
        then reads the parts of `probe` again."""
        ...

    def probe(self, parts: Sequence[LateLeaf]) -> Probe:
        """Reads short parts now. Called, the result reads them again; that of a device instead waits until they were
        read again behind the copies of `late`."""
        ...

    def compare(self, parts: Sequence[LateLeaf]) -> Callable[[], Sequence[bool]]:
        """Starts comparing parts with the image as of now. The result, called later, returns per part whether they are
        bitwise equal."""
        ...


# -- updates

_barriers: list[Barrier] = []


def raise_barrier(barrier: Barrier) -> None:
    """Makes every update of this process wait for `barrier`."""
    _barriers.append(barrier)


def lower_barrier(barrier: Barrier) -> None:
    """Removes `barrier`."""
    if barrier in _barriers:
        _barriers.remove(barrier)


def let_updates_pass() -> None:
    """Waits before training's memory changes until no capture needs it unchanged.

    Waits for every barrier, whichever tensors are updated: one too many is harmless.
    """
    for barrier in tuple(_barriers):
        barrier.before_update()


os.register_at_fork(after_in_child=_barriers.clear)


# -- leaves


@record
class Span:
    """Bytes `start..stop-1` of a leaf."""

    leaf: int
    start: int
    stop: int


@record
class CaptureChoice:
    """The capture of the leaves of one save; a leaf in none of these is copied at once.

    - `late`: copied after the save has returned.
    - `watched`: copied at once, and compared with training's memory when the late ones are copied and again before the
      next update.
    - Of each late leaf `PROBE_BYTES` are read at once, which are compared behind each copy of a part of that leaf, and
      when everything is copied.
    - `probation`: paths of leaves watched in full, because too few saves of them have been compared.
    """

    late: Sequence[Span] = ()
    watched: Sequence[Span] = ()
    probation: Sequence[str] = ()
    turn: float = 0.0
    """Where in each late leaf its probe lies, from 0 to 1."""


class LeafHistory:
    """The knowledge of one Checkpointer about its leaves."""

    def __init__(self) -> None:
        self._fingerprint = ""
        self._passed: dict[str, int] = {}
        """Path -> saves of this structure that its probation has passed."""
        self._cursor = 0
        self._turn = 0.0
        self._leaves: Sequence[tuple[int, str, int]] | None = None
        self._new: list[Span] = []
        """Leaves in probation; `_new_paths` are their paths."""
        self._new_paths: list[str] = []
        self._fit: list[Span] = []
        """Leaves past probation."""
        self._begins: list[int] = [0]
        self.demoted: dict[str, str] = {}
        """Path -> why it is captured eagerly for good."""

    def choose(self, fingerprint: str, leaves: Sequence[tuple[int, str, int]]) -> CaptureChoice:
        """Chooses the capture of the next save.

        `leaves`: number, path and bytes of those that may be fenced, in image order; the same object if they are
        unchanged since the previous save.
        """
        if fingerprint != self._fingerprint:
            self._fingerprint, self._cursor, self._leaves = fingerprint, 0, None
            self._passed.clear()
        if leaves is not self._leaves:
            self._leaves = leaves
            self._classify(leaves)
        late, watched = self._sampled()
        if late:
            self._turn = (self._turn + _GOLDEN) % 1.0  # after n saves its places lie about 1 / n apart
        if not self._new:
            return CaptureChoice(late, watched, turn=self._turn)
        return CaptureChoice(late, [*self._new, *watched], self._new_paths, self._turn)

    def _classify(self, leaves: Sequence[tuple[int, str, int]]) -> None:
        # New lists: a choice still being copied refers to the previous ones.
        self._new, self._new_paths, self._fit = [], [], []
        for leaf, path, size in leaves:
            if size < LEAST_BYTES or path in self.demoted:
                continue
            if self._passed.get(path, 0) < PROBATION:
                self._new.append(Span(leaf, 0, size))
                self._new_paths.append(path)
            else:
                self._fit.append(Span(leaf, 0, size))
        self._begins = [0, *accumulate(span.stop for span in self._fit)]

    def passed(self, choice: CaptureChoice) -> None:
        """Notes that everything watched was compared just before an update."""
        for path in choice.probation:
            self._passed[path] = self._passed.get(path, 0) + 1
            if self._passed[path] == PROBATION:
                self._leaves = None  # recomputed by the next `choose`

    def demote(self, path: str, why: str) -> bool:
        """Captures the leaf eagerly from now on. Returns False if it already is."""
        if path in self.demoted:
            return False
        self.demoted[path] = why
        self._leaves = None
        return True

    def _sampled(self) -> tuple[Sequence[Span], Sequence[Span]]:
        """Returns what is late, and what of it is copied at once instead."""
        total = self._begins[-1]
        if not total:
            return (), ()
        width = max(int(total * SAMPLE) // _EDGE, 1) * _EDGE
        first = self._cursor if self._cursor < total else 0
        self._cursor = first + width  # past the end: the next sample restarts at the first leaf
        # Most leaves are before or after the sample, and late in full.
        low = bisect_right(self._begins, first) - 1
        high = min(bisect_left(self._begins, first + width), len(self._fit))
        late: list[Span] = []
        watched: list[Span] = []
        for span, at in zip(self._fit[low:high], self._begins[low:high], strict=True):
            begin, end = _inside(first - at, span.stop), _inside(first + width - at, span.stop)
            if begin < end:
                watched.append(Span(span.leaf, begin, end))
            late.extend(Span(span.leaf, *part) for part in ((0, begin), (end, span.stop)) if part[0] < part[1])
        return [*self._fit[:low], *late, *self._fit[high:]], watched


def _inside(edge: int, size: int) -> int:
    """Returns the cut of an edge in a leaf of `size` bytes: its begin, its end, or a position in between."""
    return size if edge >= size else max(edge // _EDGE * _EDGE, 0)
