"""Where a process is: the places of the protocol that it is in, told in memory that it shares with its parent.

What a killed process last wrote there is the truth about where it was, whatever the kill was aimed at. A child kills
itself at a named point, or sets a timer as it enters a place: the kernel then ends it some microseconds later, wherever
each of its threads has come to.
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
"""No crash points, but ends of functions of the memory tier, followed alike."""

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
"""The points of each place, in the order in which a process comes by: it is in the place from the first to the last.
A flush is entered and left by name."""

ORDER: Final[tuple[Place, ...]] = ("flush", "adopt", "seal", "capture", "write")
"""A process that is killed in several at once, in threads of its own, is counted at the first of these."""
ALL: Final = tuple(dict.fromkeys(point for place in ORDER for point in POINTS[place]))

_HEAD: Final = struct.Struct("qq")
_VISIT: Final = struct.Struct("qqd")


@dataclass(frozen=True, slots=True)
class Death:
    """How a process is to end itself: at a named point of `place`, or `moment` (a share of the time that a passage
    through it takes) after it has entered it; once `due` says so."""

    place: Place
    point: str | None
    moment: float
    due: Callable[[], bool] = lambda: True


class Trace:
    """One process's. Made by the parent, before it forks."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._entered: dict[Place, float] = {}

    # -- what the parent reads, of a process that has ended ------------------------------------------------------------

    @property
    def place(self) -> Place | None:
        """The place that it was in at its end: the one that it killed itself in, if it did at a point."""
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
        """How often it came through each place to its end."""
        return {place: self._visit(place)[1] for place in ORDER}

    def seconds(self, place: Place) -> float:
        """How long its last passage took; 0.0 if there was none."""
        return float(self._visit(place)[2])

    # -- what the child does -------------------------------------------------------------------------------------------

    @contextmanager
    def followed(self, death: Death | None = None, *, usual_s: Mapping[Place, float] | None = None) -> Iterator[None]:
        """Within the block every point that the process comes by is noted. `usual_s`: how long a passage through each
        place takes, as far as other processes have found out."""
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
            stack.enter_context(_functions_followed(passed, self._abandon))
            yield

    @contextmanager
    def inside(self, place: Place, death: Death | None = None, *, usual_s: float = 0.0) -> Iterator[None]:
        """Within the block the process is in this place."""
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
        """The image that was begun last will not be sealed."""
        for place in ("capture", "seal"):
            _, passages, seconds = self._visit(place)
            self._put(place, 0, passages, seconds)

    def _visit(self, place: Place) -> tuple[Any, ...]:
        return _VISIT.unpack_from(self._page, _HEAD.size + ORDER.index(place) * _VISIT.size)

    def _put(self, place: Place, inside: int, passages: int, seconds: float) -> None:
        _VISIT.pack_into(self._page, _HEAD.size + ORDER.index(place) * _VISIT.size, inside, passages, seconds)


@contextmanager
def _functions_followed(passed: Callable[[str], None], abandon: Callable[[], None]) -> Iterator[None]:
    """Tells of what has no crash point: an image is begun for memory alone, described, and taken over whole. `abandon`
    is told where the one begun last ends unsealed."""
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
    """`struct itimerspec`: the interval, then the first time, each in seconds and nanoseconds."""

    _fields_ = [("interval", ctypes.c_long * 2), ("first", ctypes.c_long * 2)]


def kill_in(seconds: float) -> None:
    """The kernel kills this process so much later (a microsecond at least): it needs no turn of any of its threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    event, timer = _Event(signo=signal.SIGKILL, notify=0), ctypes.c_void_p()
    whole, rest = divmod(max(int(seconds * 1e9), 1000), 1_000_000_000)
    times = _Times((0, 0), (whole, rest))
    made = libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
    if made or libc.timer_settime(timer, 0, ctypes.byref(times), None):
        raise OSError(ctypes.get_errno(), "a timer that kills cannot be set")
