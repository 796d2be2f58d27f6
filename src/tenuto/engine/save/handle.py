"""The handle of one save: what it is, how far it is, and how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, get_args

from tenuto.concurrency.interruption import Latch
from tenuto.errors import DeadlineExceeded, TenutoError, UsageError
from tenuto.model.ids import CheckpointId
from tenuto.model.timing import RankTimings, TimedPart, Timing

# --------------------------------------------------------------------------------------------------
# Where the time of one save goes: two readings of the clock at each border, none within.


class SaveClock:
    """The times of one save. Each part is measured by one thread at a time, processor time by any; any may read."""

    def __init__(self) -> None:
        self._spent: dict[TimedPart, float] = dict.fromkeys(
            get_args(TimedPart), 0.0
        )  # all of them: its size never changes
        self._joined_at: float | None = None
        self._cpu_at = 0.0
        self._beside_cpu_s = 0.0
        self._adding = threading.Lock()

    def add(self, part: TimedPart, seconds: float) -> None:
        self._spent[part] += seconds

    def put(self, part: TimedPart, seconds: float) -> None:
        self._spent[part] = seconds

    @contextmanager
    def during(self, part: TimedPart) -> Iterator[None]:
        """Adds the time of the block to that part, also where it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - began)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Measures a block in which the training thread waits for the commit; a reading meanwhile includes it."""
        self._joined_at = time.perf_counter()
        try:
            yield
        finally:
            self.put("join_s", time.perf_counter() - self._joined_at)
            self._joined_at = None

    def begin_cpu(self) -> None:
        """Begins to measure the processor time of the calling thread, the one that writes."""
        self._cpu_at = time.thread_time()

    def read_cpu(self) -> None:
        """Reads the processor time of the calling thread, the one that writes."""
        self.put("cpu_s", time.thread_time() - self._cpu_at)

    @contextmanager
    def cpu_in_background(self) -> Iterator[None]:
        """Adds the processor time of the block, which runs in another thread than the one that writes, also where it
        fails."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._add_cpu(time.thread_time() - began)

    def copied(self, late_s: float, cpu_s: float) -> None:
        """Adds the time and processor time of the thread that copies in the background."""
        self.add("late_s", late_s)
        self._add_cpu(cpu_s)

    def _add_cpu(self, seconds: float) -> None:
        with self._adding:
            self._beside_cpu_s += seconds

    @property
    def cpu_s(self) -> float:
        """Processor time of all threads that have reported theirs."""
        return self._spent["cpu_s"] + self._beside_cpu_s

    def timing(self, *, fence_s: float, seconds: float, nbytes: int) -> Timing:
        """Returns what has been measured so far."""
        spent, joined_at = {**self._spent, "cpu_s": self.cpu_s}, self._joined_at
        if joined_at is not None:
            spent["join_s"] = time.perf_counter() - joined_at
        return Timing(**spent, fence_s=fence_s, seconds=seconds, bytes=nbytes)


State = Literal["planned", "capturing", "writing", "committed", "failed"]

STANDSTILL_S: Final = 600.0
"""Seconds without progress, of a save and of those before it, after which it counts as hanging in its store; waiting
for it without a timeout fails then."""


class Save:
    """One save, from the decision to its end. Any thread may use it.

    `stall_s` is for how long the capture blocked the training thread, `fence_s` how long an update then waited for a
    fenced one; `seconds` how long it took to be written; `bytes` what the image holds.
    """

    def __init__(self, id: CheckpointId, save_id: str, *, reason: str = "") -> None:
        self.id = id
        self.save_id = save_id
        self.reason = reason
        self._state: State = "planned"
        self._changing = threading.Lock()
        self._phase = "waiting for its turn"
        self._moved_s = time.monotonic()
        self._behind: Save | None = None
        self.bytes = 0
        self.stall_s = 0.0
        self.fence_s = 0.0
        self.seconds = 0.0
        self.begun_s: float | None = None
        """When it began to be written, by the monotonic clock."""
        self.ranks: RankTimings | None = None
        """Of several ranks: where the time went on each of them. Known once it is committed."""
        self.clock = SaveClock()
        """For the engine, which measures where the time goes."""
        self.error: TenutoError | None = None
        self.inside_step = False
        """Set while the save waits for the end of the step that is still open: waiting for it there would never end."""
        self._ended = Latch()
        self.patience_s: float | None = None
        """Seconds without progress after which a wait without a timeout ends; None: STANDSTILL_S."""
        self.hasten: Callable[[], None] = nothing
        """Called when a wait for it begins; for the engine."""
        self.waits_for: Callable[[], str] = str
        """Returns what of other ranks it waits for, in words; set by the engine."""

    @property
    def state(self) -> State:
        """How far it is. A thread that is late to set it does not undo the end."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        with self._changing:
            if not self.done:
                self._state = state

    @property
    def phase(self) -> str:
        """What it is doing, in words."""
        behind = self._behind
        return self._phase if behind is None else f"waiting for step {behind.step} to be written"

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self.moves()

    def moves(self) -> None:
        """Notes progress; for the engine."""
        self._moved_s = time.monotonic()

    def wait_behind(self, before: Save | None) -> None:
        """Notes that it is written once `before` has ended; for the engine."""
        self._behind = before

    def begin(self) -> None:
        """Notes that it is being written from now on; for the engine."""
        self._behind = None
        self.moves()
        self.begun_s = self._moved_s

    @property
    def moved_s(self) -> float:
        """When it last made progress, or what it waits for did, by the monotonic clock."""
        moved, before = self._moved_s, self._behind
        while before is not None:
            moved, before = max(moved, before._moved_s), before._behind
        return moved

    @property
    def timing(self) -> Timing:
        """Where its time went, as far as it has come."""
        return self.clock.timing(fence_s=self.fence_s, seconds=self.seconds, nbytes=self.bytes)

    @property
    def step(self) -> int:
        """The step that it saves."""
        return self.id.step

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    @property
    def committed(self) -> bool:
        """Whether the checkpoint exists, durably."""
        return self.state == "committed"

    def wait(self, timeout: float | None = None) -> CheckpointId:
        """Returns the checkpoint's id once it is committed.

        Raises what made the save fail (SaveFailed, Superseded), DeadlineExceeded after `timeout` seconds (without
        one, once nothing has moved for ten minutes), and UsageError inside the step whose end the save waits for.
        """
        if self.inside_step and not self.done:
            raise UsageError(
                f"the save of step {self.step} is taken at the end of the step that is still open; waiting "
                f"here would never end",
                subject=str(self.id),
                hint="call save(wait=True), or wait after the step",
            )
        if not self.join(timeout):
            raise self.stuck(timeout)
        if self.error is not None:
            raise self.error
        return self.id

    def join(self, timeout: float | None = None) -> bool:
        """Whether it has ended, well or not, within `timeout` seconds; without one, until it has made no progress for
        `patience_s`."""
        self.hasten()
        if timeout is not None:
            return self._ended.wait(timeout)
        patience_s = self._patience_s
        while not self._ended.wait(max(0.0, self.moved_s + patience_s - time.monotonic())):
            if time.monotonic() - self.moved_s >= patience_s:
                return False
        return True

    @property
    def _patience_s(self) -> float:
        return STANDSTILL_S if self.patience_s is None else self.patience_s

    def stuck(self, timeout: float | None = None) -> DeadlineExceeded:
        """Returns what to raise when `join` returned False."""
        how = f"has not got on for {self._patience_s:g} s" if timeout is None else f"has not ended within {timeout:g} s"
        others = self.waits_for()
        where = "these ranks, and at the store it writes to" if others else "the store it writes to"
        return DeadlineExceeded(
            f"the save of {self.id} {how}; it is {self.phase}{others and ', and waits for ' + others}",
            subject=str(self.id),
            hint=f"look at {where}; `tenuto ls` shows the last committed checkpoint",
        )

    def end(self, error: TenutoError | None = None) -> None:
        """Marks the save as ended; for the engine."""
        self._behind = None
        self.moves()
        with self._changing:
            self.error = error
            self._state = "failed" if error else "committed"
            self._ended.set()

    def __repr__(self) -> str:
        return f"Save({self.id}, {self.state})"


def nothing() -> None:
    """Hastens nothing: everything is captured already."""
