"""Where a child is killed, as it tells itself, and what a campaign makes of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from campaigns.kills import totals
from campaigns.kills.campaign import Shape
from campaigns.kills.rounds import PLACES, Ending, Flushed, Round, draw_everywhere
from campaigns.kills.trace import ALL, FUNCTIONS, POINTS, Death, Trace
from tenuto.crashpoints import NAMES, crashpoint
from tenuto.demo.comparison import Comparison
from tenuto.demo.processes import Life
from tenuto.demo.runner import Outcome

CAPTURED, SEALED = "memory image captured, not sealed", "memory image sealed"


def died(trace: Trace, body: Callable[[], None], death: Death | None = None) -> int:
    """The exit status of a forked child that `trace` follows."""
    pid = os.fork()
    if not pid:
        try:
            with trace.traced(death):
                body()
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_every_point_is_one_that_the_product_comes_by() -> None:
    assert {point for point in ALL if point not in NAMES} == set(FUNCTIONS)


def test_a_trace_tells_of_places_that_were_left_and_of_the_one_that_was_not() -> None:
    def body() -> None:
        crashpoint(CAPTURED)
        crashpoint(SEALED)
        crashpoint("save begun")

    trace = Trace()
    assert died(trace, body) == 3
    assert trace.passages["seal"] == 1 and trace.seconds("seal") > 0
    assert trace.place == "write" and trace.point is None


@pytest.mark.parametrize("place", PLACES)
def test_a_child_kills_itself_at_a_named_point_of_the_place_that_it_is_in(place: str) -> None:
    def body() -> None:
        with trace.inside("capture"):
            for point in ALL:
                if point in NAMES:
                    crashpoint(point)

    trace, point = Trace(), next(point for point in reversed(POINTS[place]) if point in NAMES)  # type: ignore[index]
    assert died(trace, body, Death(place, point, 0.0)) == -signal.SIGKILL  # type: ignore[arg-type]
    assert (trace.place, trace.point) == (place, point)


def test_a_point_of_a_place_that_it_is_not_in_kills_nothing() -> None:
    trace = Trace()
    assert died(trace, lambda: crashpoint("attempt claimed"), Death("adopt", "attempt claimed", 0.0)) == 3
    assert died(trace, lambda: crashpoint("save begun"), Death("write", "save begun", 0.0, lambda: False)) == 3
    assert trace.point is None


def test_a_timer_kills_wherever_the_process_is_by_then() -> None:
    def body() -> None:
        crashpoint("save begun")
        time.sleep(60)

    trace = Trace()
    assert died(trace, body, Death("write", None, 0.5)) == -signal.SIGKILL
    assert trace.place == "write" and trace.point is None


def test_a_seed_tells_the_kills_of_every_place_and_the_flushes_between_them() -> None:
    plan = draw_everywhere(kills=60, steps=200, save_every=7, seed=3)
    assert plan == draw_everywhere(kills=60, steps=200, save_every=7, seed=3)
    assert plan.memory
    assert {kill.during for kill in plan.kills} == {*PLACES, "step", "start"}
    assert {kill.point is None for kill in plan.kills if kill.during in PLACES} == {True, False}
    assert all(kill.point is None or kill.point in POINTS[kill.during] for kill in plan.kills)  # type: ignore[index]
    flushes = [kill.then for kill in plan.kills if kill.then is not None]
    assert {(flush.point is None, flush.moment is None) for flush in flushes} == {
        (True, True),
        (True, False),
        (False, True),
    }
    shape = Shape(per_round=20, steps=200, save_every=7, seed=3, memory=True)
    assert [shape.round(number).capture for number in range(4)] == ["eager", "eager", "fenced", "eager"]


def a_round(*killed: tuple[Life, Ending], flushes: tuple[Flushed, ...] = ()) -> Round:
    untouched = Life(0, 30, 0, False, 1.0, sealed={step: f"c{step}" for step in range(31)})
    plan = draw_everywhere(kills=2, steps=30, save_every=5, seed=0)
    lives, endings = zip(*killed, strict=True)
    return Round("killed", Outcome(plan, untouched, lives, Comparison(1, 1), None, None, 1.0), endings, flushes)


FIRST = Life(0, 9, -9, False, 1.0, sealed={7: "c7", 8: "c8"}, durable=5), Ending("seal", CAPTURED)
SECOND = Life(8, 0, -9, False, 1.0, restored=(8, "c8"), from_memory=True, durable=5), Ending("adopt")
LAST = Life(8, 30, 0, False, 1.0, restored=(8, "c8"), from_memory=True, durable=30), Ending()


def changed(one: tuple[Life, Ending], **changes: Any) -> tuple[Life, Ending]:
    return replace(one[0], **changes), one[1]


def test_kills_are_counted_where_they_were_with_what_they_lost() -> None:
    flushes = (Flushed(0, True, Ending("flush", "save begun"), False), Flushed(1, False, Ending(), True))
    found = totals.counts([a_round(FIRST, SECOND, LAST, flushes=flushes)])
    assert found["kills_by_place"] == {"adopt": 1, "flush": 1, "seal": 1}
    late = totals.counts([a_round(FIRST, LAST, flushes=(Flushed(0, True, Ending(), True),))])
    assert late["kills_by_place"] == {"after a flush": 1, "seal": 1}
    assert found["kills_at_named_points"] == {"flush": {"save begun": 1}, "seal": {CAPTURED: 1}}
    assert found["flushes"]["killed"] == 1 and found["flushes"]["ended_and_written"] == 1
    assert found["steps_lost"]["after_the_first_sealed_state"] == {"0": 1, "1": 1}
    assert found["steps_lost"]["by_place_after_it"] == {"adopt": {"0": 1}, "seal": {"1": 1}}
    assert found["not_from_the_newest_sealed_state"] == {"but_from_the_one_going_to_the_store": 0, "otherwise": []}


def test_a_restart_behind_what_was_sealed_is_found_out() -> None:
    behind = changed(SECOND, began=7, restored=(7, "c7"))
    (first, second) = totals.killings(a_round(FIRST, behind, changed(LAST, began=7)))
    assert (first.behind, first.written, first.lost) == (1, False, 2) and second.behind == 0
    found = totals.counts([a_round(FIRST, behind, LAST)])["not_from_the_newest_sealed_state"]
    assert [one["life"] for one in found["otherwise"]] == [0]
    (first, _) = totals.killings(a_round(changed(FIRST, saved=7), behind, LAST))
    assert first.written
    nothing = Life(None, 0, -9, False, 1.0, durable=5), Ending()
    (first, second) = totals.killings(a_round(FIRST, nothing, changed(LAST, began=7)))
    assert first.behind == 1 and second.behind == 0


def test_a_restart_from_another_content_is_found_out() -> None:
    assert totals.restarts(a_round(FIRST, SECOND, LAST))["restarts_equal"] == 2
    wrong = a_round(FIRST, changed(SECOND, restored=(8, "other")), LAST)
    assert totals.restarts(wrong)["restarts_different"] == 1
    assert totals.restarts(a_round(FIRST, changed(SECOND, restored=(99, "c8")), LAST))["restarts_different"] == 1


def test_a_kill_without_a_place_is_told_by_what_the_process_had_done() -> None:
    assert totals.place_of(Life(None, 0, -9, False, 1.0), Ending()) == "starting"
    assert totals.place_of(Life(3, 8, -9, True, 1.0), Ending()) == "write"
    assert totals.place_of(Life(3, 8, -9, False, 1.0), Ending()) == "between"
