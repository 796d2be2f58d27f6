"""Traces the protocol phase of a process, in memory shared with its parent.

The last entry of a killed process shows where it was, whatever the kill was aimed at. A child kills itself at a named
point, or sets a timer when it enters a phase: the kernel then kills it some microseconds later, wherever its threads
are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from tenuto.crashpoints import armed

Place = Literal["capture", "seal", "adopt", "write", "flush"]

BEGUN: Final = "memory image begun"
DESCRIBED: Final = "memory image described, not sealed"
RESEALED: Final = "memory image resealed"
FUNCTIONS: Final = (BEGUN, DESCRIBED, RESEALED)
"""No crash points, but ends of functions of the memory tier, traced alike."""

POINTS: Final[Mapping[Place, tuple[str, ...]]] = {
    "capture": (BEGUN, "memory image captured, not sealed"),
    "seal": ("memory image captured, not sealed", DESCRIBED, "memory image sealed"),
    "adopt": (
        "memory image found, not adopted",
        "memory image adopted, not yet claimed",
        "attempt claimed",
        "claimed, memory image not yet resealed",
        RESEALED,
    ),
    "write": (
        "save begun",
        "pack durable, index not yet",
        "packs and indexes durable, manifest not yet",
        "manifest durable, not yet reported",
    ),
    "flush": (
        "image to be flushed is whole, run not yet claimed",
        "attempt claimed",
        "save begun",
        "flushed pack durable, index not yet",
        "flushed image written, not committed",
        "flushed image committed, still in memory",
    ),
}
"""The points of each phase in order: a process is in the phase from the first to the last. Flushes are entered by name.
"""

ORDER: Final[tuple[Place, ...]] = ("flush", "adopt", "seal", "capture", "write")
"""A process killed in several phases at once, on different threads, counts for the first of these."""
ALL: Final = tuple(dict.fromkeys(point for place in ORDER for point in POINTS[place]))

_HEAD: Final = struct.Struct("qq")
_VISIT: Final = struct.Struct("qqd")


@dataclass(frozen=True, slots=True)
class Death:
    """How a process kills itself: at a named point of `place`, or `moment` (a share of the phase's time) after entering
    it, once `due` returns true."""

    place: Place
    point: str | None
    moment: float
    due: Callable[[], bool] = lambda: True


class Trace:
    """The trace of one process, created by its parent before the fork."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._entered: dict[Place, float] = {}

    # Read by the parent, after the process has ended.

    @property
    def place(self) -> Place | None:
        """The phase it ended in: the one it killed itself in, if it did so at a point."""
        number, place = _HEAD.unpack_from(self._page)
        if number:
            return ORDER[int(place)]
        return next((place for place in ORDER if self._visit(place)[0]), None)

    @property
    def point(self) -> str | None:
        """The point at which it killed itself; None if something else ended it."""
        number, _ = _HEAD.unpack_from(self._page)
        return ALL[number - 1] if number else None

    @property
    def passages(self) -> Mapping[Place, int]:
        """The number of complete passages through each phase."""
        return {place: self._visit(place)[1] for place in ORDER}

    def seconds(self, place: Place) -> float:
        """Returns the seconds of its last passage; 0.0 if there was none."""
        return float(self._visit(place)[2])

    # Written by the child.

    @contextmanager
    def traced(self, death: Death | None = None, *, usual_s: Mapping[Place, float] | None = None) -> Iterator[None]:
        """Traces every point within the block. `usual_s`: seconds of each phase, as far as earlier processes measured
        them."""
        usual = dict(usual_s or {})

        def passed(point: str) -> None:
            for place in ORDER:
                if place != "flush" and point == POINTS[place][0]:
                    self.enter(place)
                    if death is not None and death.place == place and death.point is None and death.due():
                        kill_in(death.moment * (self.seconds(place) or usual.get(place, 0.0)))
            if death is not None and death.point == point and death.due() and self._visit(death.place)[0]:
                _HEAD.pack_into(self._page, 0, ALL.index(point) + 1, ORDER.index(death.place))
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()
            for place in ORDER:
                if place != "flush" and point == POINTS[place][-1]:
                    self.leave(place)

        with ExitStack() as stack:
            for point in ALL:
                if point not in FUNCTIONS:
                    stack.enter_context(armed(point, partial(passed, point)))
            stack.enter_context(_functions_traced(passed, self._abandon))
            yield

    @contextmanager
    def inside(self, place: Place, death: Death | None = None, *, usual_s: float = 0.0) -> Iterator[None]:
        """Marks the process as in this phase within the block."""
        self.enter(place)
        if death is not None and death.point is None:
            kill_in(death.moment * usual_s)
        yield
        self.leave(place)

    def enter(self, place: Place) -> None:
        _, passages, seconds = self._visit(place)
        self._entered[place] = time.perf_counter()
        self._put(place, 1, passages, seconds)

    def leave(self, place: Place) -> None:
        inside, passages, _ = self._visit(place)
        if inside:
            self._put(place, 0, passages + 1, time.perf_counter() - self._entered[place])

    def _abandon(self) -> None:
        """Records that the image begun last will not be sealed."""
        for place in ("capture", "seal"):
            _, passages, seconds = self._visit(place)
            self._put(place, 0, passages, seconds)

    def _visit(self, place: Place) -> tuple[Any, ...]:
        return _VISIT.unpack_from(self._page, _HEAD.size + ORDER.index(place) * _VISIT.size)

    def _put(self, place: Place, inside: int, passages: int, seconds: float) -> None:
        _VISIT.pack_into(self._page, _HEAD.size + ORDER.index(place) * _VISIT.size, inside, passages, seconds)


@contextmanager
def _functions_traced(passed: Callable[[str], None], abandon: Callable[[], None]) -> Iterator[None]:
    """Traces events without crash points: an image is begun for memory only, described, or adopted completely.

    Calls `abandon` if the image begun last ends unsealed.
    """
    from unittest import mock

    from tenuto.engine.memory_tier.slot_file import LastingSlot
    from tenuto.engine.memory_tier.tier import MemoryTier

    begin, describe, claimed, ended = MemoryTier.begin, LastingSlot.describe, MemoryTier.claimed, MemoryTier.ended
    last: list[Any] = [None]

    def begun(self: MemoryTier, flattened: Any, *, writing: bool) -> Any:
        plan = begin(self, flattened, writing=writing)
        if plan is not None and not writing:
            last[0] = plan
            passed(BEGUN)
        elif plan is last[0]:
            last[0] = None
        return plan

    def given_up(self: MemoryTier, plan: Any) -> None:
        if plan is not None and plan is last[0]:
            abandon()
        ended(self, plan)

    def described(self: LastingSlot, parts: Any) -> None:
        describe(self, parts)
        passed(DESCRIBED)

    def resealed(self: MemoryTier, *given: Any) -> None:
        claimed(self, *given)
        passed(RESEALED)

    with (
        mock.patch.object(MemoryTier, "begin", begun),
        mock.patch.object(LastingSlot, "describe", described),
        mock.patch.object(MemoryTier, "claimed", resealed),
        mock.patch.object(MemoryTier, "ended", given_up),
    ):
        yield


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    ]


class _Times(ctypes.Structure):
    """`struct itimerspec`: the interval, then the first expiration, each in seconds and nanoseconds."""

    _fields_ = [("interval", ctypes.c_long * 2), ("first", ctypes.c_long * 2)]


def kill_in(seconds: float) -> None:
    """Makes the kernel kill this process after `seconds` (at least a microsecond), without help from its threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    event, timer = _Event(signo=signal.SIGKILL, notify=0), ctypes.c_void_p()
    whole, rest = divmod(max(int(seconds * 1e9), 1000), 1_000_000_000)
    times = _Times((0, 0), (whole, rest))
    made = libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
    if made or libc.timer_settime(timer, 0, ctypes.byref(times), None):
        raise OSError(ctypes.get_errno(), "a timer that kills cannot be set")
