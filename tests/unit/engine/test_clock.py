"""Telling where a save's time goes: what counts for which part, by a clock that the test moves."""

from __future__ import annotations

import pytest

from tenuto.engine.save import handle as clocks
from tenuto.engine.save.handle import SaveClock
from tenuto.model.timing import Timing


class Moved:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Moved:
    moved = Moved()
    monkeypatch.setattr(clocks, "time", moved)
    return moved


def told(clock: SaveClock) -> Timing:
    return clock.timing(fence_s=0.0, seconds=0.0, nbytes=0)


def test_a_block_counts_for_its_part_each_time_and_where_it_fails(time: Moved) -> None:
    clock = SaveClock()
    with clock.during("begin_s"):
        time.now += 2
    with pytest.raises(ValueError), clock.during("begin_s"):
        time.now += 3
        raise ValueError
    clock.add("write_s", 0.5)
    clock.put("digest_s", 0.25)
    clock.put("digest_s", 0.75)
    assert told(clock) == Timing(begin_s=5.0, write_s=0.5, digest_s=0.75)


def test_waiting_for_the_commit_counts_while_it_goes_on(time: Moved) -> None:
    clock = SaveClock()
    with clock.joining():
        time.now += 4
        assert told(clock).join_s == 4.0
        time.now += 1
    time.now += 10
    assert told(clock).join_s == 5.0


def test_processor_time_is_that_since_the_writing_began(time: Moved) -> None:
    clock = SaveClock()
    time.now += 7
    clock.begin_cpu()
    time.now += 2
    clock.read_cpu()
    time.now += 50
    assert told(clock).cpu_s == 2.0


def test_what_the_handle_knows_is_said_as_well() -> None:
    assert SaveClock().timing(fence_s=1.0, seconds=2.0, nbytes=3) == Timing(fence_s=1.0, seconds=2.0, bytes=3)
