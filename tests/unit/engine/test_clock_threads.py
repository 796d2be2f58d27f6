"""Processor time of several threads comes together in one save's, and what several ranks copied beside training in
one table."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tenuto.engine.save import handle as clocks
from tenuto.engine.save.handle import SaveClock
from tenuto.model.timing import RankTimings, Timing
from tenuto.training.stats import slowest_lines


class OfEachThread:
    """A clock for each thread, which it moves."""

    def __init__(self) -> None:
        self._own = threading.local()

    def move(self, seconds: float) -> None:
        self._own.now = self.thread_time() + seconds

    def thread_time(self) -> float:
        return float(getattr(self._own, "now", 100.0))


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> OfEachThread:
    moved = OfEachThread()
    monkeypatch.setattr(clocks, "time", moved)
    return moved


def told(clock: SaveClock) -> Timing:
    return clock.timing(fence_s=0.0, seconds=0.0, nbytes=0)


def test_each_thread_counts_by_its_own_clock(time: OfEachThread) -> None:
    clock = SaveClock()

    def beside() -> None:
        time.move(7)
        with clock.cpu_in_background():
            time.move(3)
        clock.copied(0.5, 4.0)

    clock.begin_cpu()
    time.move(2)
    thread = threading.Thread(target=beside)
    thread.start()
    thread.join(60)
    clock.read_cpu()
    assert told(clock) == Timing(cpu_s=9.0, late_s=0.5)
    time.move(1)
    clock.read_cpu()
    assert told(clock).cpu_s == clock.cpu_s == 10.0, "the writer's is read anew, the others' stays"


def test_what_failed_counts_too(time: OfEachThread) -> None:
    clock = SaveClock()
    with pytest.raises(ValueError), clock.cpu_in_background():
        time.move(3)
        raise ValueError
    assert clock.cpu_s == 3.0


def test_a_manifest_of_before_is_read_as_one_without_a_copy_beside_training() -> None:
    assert Timing.read({"capture_s": 1.0, "cpu_s": 2.0}, 7) == Timing(capture_s=1.0, cpu_s=2.0, bytes=7)
    ranks = RankTimings.read({"ranks": 2, "parts": {"capture_s": [1, 2]}})
    assert ranks is not None and "late_s" not in ranks.parts


def test_the_slowest_of_several_ranks_is_named_for_it() -> None:
    timings = RankTimings.of([Timing(late_s=0.5), Timing(late_s=2.0)])
    read: Any = RankTimings.read(timings.to_json())
    assert read.parts["late_s"].slowest[0] == (1, 2.0)
    assert "copy in background   rank 1  2.00 s  0.50 s  0.50 s" in slowest_lines(read)
