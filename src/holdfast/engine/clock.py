"""Telling where the time of one save goes, while it goes: two readings of the clock at each border, none within."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

from holdfast.model.timing import Part, Timing


class Clock:
    """The parts of one save. Each part is told by one thread at a time, processor time by any; anybody may ask."""

    def __init__(self) -> None:
        self._spent: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)  # all of them: its size never changes
        self._joined_at: float | None = None
        self._cpu_at = 0.0
        self._beside_cpu_s = 0.0
        self._adding = threading.Lock()

    def add(self, part: Part, seconds: float) -> None:
        self._spent[part] += seconds

    def put(self, part: Part, seconds: float) -> None:
        self._spent[part] = seconds

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """The block is that part's, also where it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - began)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Within the block the training thread waits for the commit: that counts while it does."""
        self._joined_at = time.perf_counter()
        try:
            yield
        finally:
            self.put("join_s", time.perf_counter() - self._joined_at)
            self._joined_at = None

    def begin_cpu(self) -> None:
        """The calling thread is the one that writes."""
        self._cpu_at = time.thread_time()

    def read_cpu(self) -> None:
        """By the thread that writes."""
        self.put("cpu_s", time.thread_time() - self._cpu_at)

    @contextmanager
    def cpu_beside(self) -> Iterator[None]:
        """The block's processor time counts too, also where it fails: it runs in another thread than the one that
        writes."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._add_cpu(time.thread_time() - began)

    def copied(self, late_s: float, cpu_s: float) -> None:
        """By the thread that copies beside training: how long that took, and how much of a processor."""
        self.add("late_s", late_s)
        self._add_cpu(cpu_s)

    def _add_cpu(self, seconds: float) -> None:
        with self._adding:
            self._beside_cpu_s += seconds

    @property
    def cpu_s(self) -> float:
        """Processor time of all threads that have told theirs."""
        return self._spent["cpu_s"] + self._beside_cpu_s

    def timing(self, *, fence_s: float, seconds: float, nbytes: int) -> Timing:
        """All that has been told so far."""
        spent, joined_at = {**self._spent, "cpu_s": self.cpu_s}, self._joined_at
        if joined_at is not None:
            spent["join_s"] = time.perf_counter() - joined_at
        return Timing(**spent, fence_s=fence_s, seconds=seconds, bytes=nbytes)
