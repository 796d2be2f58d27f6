"""Who may write a leaf, and when: what a fenced capture rests on.

A leaf that an optimizer owns is written by that optimizer's step, so it may be copied later than the save as long as
the step waits for the copy. Whether only the step writes it cannot be known from outside. So in a structure of state
each leaf begins with a probation, in which it is copied at once and compared with training's memory just before the
update; a small rotating sample goes on with that for ever. What ever differs is captured eagerly from then on.

Frameworks say which leaves their optimizers own, and let every update pass `let_updates_pass` first.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol

from tenuto.state.contract import Bound

PROBATION: Final = 3
"""Saves of one structure in which a leaf is copied at once, and compared with training's memory before the update."""
LEAST_BYTES: Final = 32 << 10
"""A shorter leaf costs less to copy at once than to hold and to watch."""
SAMPLE: Final = 1 / 400
"""Share of the fenced bytes that, after the probation, is copied at once and compared later: what it takes of training
is to stay a small part of the twentieth of a copy that a fenced save may take."""
_EDGE: Final = 4096
"""Where parts of leaves begin: a multiple of every item's size."""


class Barrier(Protocol):
    """Something that an update has to wait for."""

    def before_update(self) -> None:
        """Returns when training's memory may change; never raises what concerns the save alone."""
        ...


class UpdateGate(Protocol):
    """What a framework knows of the optimizers in one state. Holds none of them."""

    def begin_save(self) -> None:
        """A save is taken now, fenced or not: what was seen before the one before it proves nothing any more."""
        ...

    def fenceable(self, sources: Sequence[Any]) -> Sequence[int]:
        """Positions of the sources that an optimizer owns whose step was seen to wait since the save before. The same
        object as before where sources and owners are the very same, and none has changed its form."""
        ...

    def close(self) -> None: ...


LateLeaf = tuple[Any, int, int, int]
"""A part of a leaf: held source, leaf as in `bind`, and bytes `start..stop-1`, multiples of the item size."""


class LateCopies(Protocol):
    """Copies of parts of leaves, in the order in which they were given."""

    def copy(self, number: int) -> None:
        """Part `number` is in the image when this returns."""
        ...

    def unchanged(self) -> Sequence[bool]:
        """Which of the watched parts are what they were, when everything has been copied."""
        ...

    def order(self) -> bool:
        """Makes what the framework is given from now on run after these copies, without this thread waiting; False
        where only waiting helps."""
        ...


class LateBound(Bound, Protocol):
    """Destinations of leaves that can be copied after the save has returned."""

    late_step: int
    """Bytes that are copied at a time."""
    on_device: bool
    """Whether copies and comparisons run beside this machine's threads, in the order in which they were asked for."""

    def can_wait(self, source: Any) -> bool:
        """Whether parts of this source can be copied later, and its changes are counted."""
        ...

    def hold(self, source: Any) -> Any:
        """The same memory, which stays what it is when the state puts other memory in its place."""
        ...

    def version(self, held: Any) -> int:
        """A count that grows with every change in place that the framework notices."""
        ...

    def late(self, parts: Sequence[LateLeaf], watched: Sequence[LateLeaf] = ()) -> LateCopies:
        """Copies `parts`, then compares `watched`, which the image holds already, with what training has by then."""
        ...

    def compare(self, parts: Sequence[LateLeaf]) -> Callable[[], Sequence[bool]]:
        """Compares parts with the image as of now; what it returns says for each, once it is known, whether they are
        equal bit for bit."""
        ...


# -- updates -----------------------------------------------------------------------------------------------------------

_standing: list[Barrier] = []


def raise_barrier(barrier: Barrier) -> None:
    """From now on every update of this process waits for `barrier`."""
    _standing.append(barrier)


def lower_barrier(barrier: Barrier) -> None:
    """Nothing waits for `barrier` any more."""
    if barrier in _standing:
        _standing.remove(barrier)


def let_updates_pass() -> None:
    """Called before training's memory is changed: returns when no capture needs it as it is any more.

    Every barrier is waited for, whoever updates what: to wait for one too many is harmless.
    """
    for barrier in tuple(_standing):
        barrier.before_update()


os.register_at_fork(after_in_child=_standing.clear)


# -- what is known of leaves -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start..stop-1` of a leaf."""

    leaf: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class CaptureChoice:
    """How the leaves of one save are captured; one that is in none of these is copied at once.

    late: copied after the save has returned. watched: copied at once, and compared with training's memory when the late
    ones are copied and once more before the next update. probation: paths of the leaves that are watched as a whole,
    since too few saves of them have been compared yet.
    """

    late: Sequence[Span] = ()
    watched: Sequence[Span] = ()
    probation: Sequence[str] = ()


class LeafHistory:
    """What one Checkpointer has learned about its leaves."""

    def __init__(self) -> None:
        self._fingerprint = ""
        self._passed: dict[str, int] = {}
        """Path -> how many saves of this structure its probation has had so far."""
        self._cursor = 0
        self._leaves: Sequence[tuple[int, str, int]] | None = None
        self._new: list[Span] = []
        """The leaves on probation, and their paths."""
        self._new_paths: list[str] = []
        self._fit: list[Span] = []
        """Those behind it."""
        self._begins: list[int] = [0]
        self.demoted: dict[str, str] = {}
        """Path -> why it is captured eagerly, for good."""

    def choose(self, fingerprint: str, leaves: Sequence[tuple[int, str, int]]) -> CaptureChoice:
        """`leaves`: number, path and bytes of those that may be fenced now, in image order; the same object where they
        are the same as at the save before."""
        if fingerprint != self._fingerprint:
            self._fingerprint, self._cursor, self._leaves = fingerprint, 0, None
            self._passed.clear()
        if leaves is not self._leaves:
            self._leaves = leaves
            self._look_at(leaves)
        sampled = self._sampled()
        if not self._new:
            return sampled
        return CaptureChoice(sampled.late, [*self._new, *sampled.watched], self._new_paths)

    def _look_at(self, leaves: Sequence[tuple[int, str, int]]) -> None:
        # New lists: a choice that is still being copied by holds the ones before.
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
        """What was watched has been compared, just before an update."""
        for path in choice.probation:
            self._passed[path] = self._passed.get(path, 0) + 1
            if self._passed[path] == PROBATION:
                self._leaves = None  # looked at anew

    def demote(self, path: str, why: str) -> bool:
        """From now on the leaf is captured eagerly; False if it is already."""
        if path in self.demoted:
            return False
        self.demoted[path] = why
        self._leaves = None
        return True

    def _sampled(self) -> CaptureChoice:
        total = self._begins[-1]
        if not total:
            return CaptureChoice()
        width = max(int(total * SAMPLE) // _EDGE, 1) * _EDGE
        first = self._cursor if self._cursor < total else 0
        self._cursor = first + width  # beyond the end: the next one begins at the first leaf again
        # Most leaves lie before or behind the sample, and are late as a whole.
        low = bisect_right(self._begins, first) - 1
        high = min(bisect_left(self._begins, first + width), len(self._fit))
        late: list[Span] = []
        watched: list[Span] = []
        for span, at in zip(self._fit[low:high], self._begins[low:high], strict=True):
            begin, end = _inside(first - at, span.stop), _inside(first + width - at, span.stop)
            if begin < end:
                watched.append(Span(span.leaf, begin, end))
            late.extend(Span(span.leaf, *part) for part in ((0, begin), (end, span.stop)) if part[0] < part[1])
        return CaptureChoice([*self._fit[:low], *late, *self._fit[high:]], watched)


def _inside(edge: int, size: int) -> int:
    """Where an edge cuts a leaf of `size` bytes: at its begin, at its end, or in between."""
    return size if edge >= size else max(edge // _EDGE * _EDGE, 0)
