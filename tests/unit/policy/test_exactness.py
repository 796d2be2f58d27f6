"""The verdict on a resume, from trails alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.certify.verdict import Row, Trail, Trails, compare, first_difference, judge

SAVED, LAST = 3, 6
PYTHON, NUMPY = "#private/random/python/keys", "#private/random/numpy/state/key"
CERTIFICATE = {"leaves_out": ["closures"], "caveats": [], "reasons": ["the loader is a stream"]}


def row(step, start=False, **changed):
    entries = {"weight": f"w{step}", "lr": "0.1", PYTHON: "p", NUMPY: f"n{step}", "#private/data/delivered": f"d{step}"}
    return Row(step, 0, step, {**entries, **changed}, () if start else (f"b{step}",), start)


def trail(first=0, last=LAST, changes=None, start=None):
    changes = changes or {}
    rows = [row(step, start=step == first, **changes.get(step, {})) for step in range(first, last + 1)]
    return Trail((start or rows[0], *rows[1:]), CERTIFICATE)


def verdict(whole=None, interrupted=None, resumed=None, repeated=None):
    return judge(
        Trails(
            whole or trail(),
            interrupted or trail(last=SAVED + 1),
            resumed or trail(SAVED),
            repeated or whole or trail(),
        )
    )


def test_equal_trails_are_exact():
    assert verdict().kind == "exact"
    assert verdict().difference is None


@given(st.integers(SAVED + 1, LAST), st.sampled_from(["weight", "lr", NUMPY, "#private/data/delivered"]))
def test_any_entry_that_differs_after_the_resume_is_found_where_it_is(step, path):
    found = verdict(resumed=trail(SAVED, changes={later: {path: "x"} for later in range(step, LAST + 1)}))
    assert found.kind == "inexact"
    assert (found.difference.step, found.difference.first.path) == (step, path)
    found = verdict(repeated=trail(), resumed=trail(SAVED, changes={step: {path: None}}))
    assert (found.kind, found.difference.step) == ("inexact", step)


@given(st.integers(1, LAST), st.sampled_from(["weight", NUMPY]))
def test_a_training_that_differs_by_itself_is_never_called_a_faulty_resume(step, path):
    changes = {later: {path: "x"} for later in range(step, LAST + 1)}
    found = verdict(repeated=trail(changes=changes), resumed=trail(SAVED, changes={LAST: {"weight": "y"}}))
    assert (found.kind, found.difference.step) == ("unrepeatable", step)


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"weight": "x"}, "uncovered state"),
        ({"optimizer/param_groups/0/lr": "x"}, "learning rate"),
        ({"weight": "x", "optimizer/param_groups/0/lr": "x"}, "uncovered state"),
        ({"weight": "x", NUMPY: "x"}, "random draws"),
        ({"weight": "x", NUMPY: "x", "#private/data/delivered": "x"}, "data position"),
    ],
)
def test_the_cause_is_what_comes_first_in_a_step(changed, cause):
    found = verdict(resumed=trail(SAVED, changes={SAVED + 1: changed}))
    assert (found.kind, found.cause.name) == ("inexact", cause)


def test_other_batches_at_the_same_place():
    resumed = trail(SAVED)
    rows = (*resumed.rows[:1], replace(resumed.rows[1], batches=("other",)), *resumed.rows[2:])
    assert verdict(resumed=Trail(rows, CERTIFICATE)).cause.name == "data contents"
    rows = tuple(replace(one, batches=("other",)) if one.step == 2 else one for one in trail().rows)
    assert verdict(repeated=Trail(rows), resumed=Trail(rows[SAVED:])).cause.name == "unseeded data"


def test_what_was_not_restored_is_told_from_what_was_lost_later():
    found = verdict(resumed=trail(SAVED, start=row(SAVED, start=True, weight="x")))
    assert (found.cause.name, found.difference.start, found.difference.step) == ("restore", True, SAVED)
    found = verdict(resumed=trail(SAVED, start=row(SAVED, start=True, **{"#private/data/delivered": "x"})))
    assert (found.cause.name, "the loader is a stream" in found.cause.advice) == ("data position", True)


def test_a_generator_that_is_not_restored_is_found_though_nobody_seeds_it():
    """It differs from run to run anyhow; what was saved must come back all the same."""
    other = {step: {PYTHON: "q"} for step in range(LAST + 1)}
    interrupted = trail(last=SAVED + 1, changes=other)
    assert verdict(interrupted=interrupted, resumed=trail(SAVED, changes=other)).kind == "exact"
    assert verdict(interrupted=interrupted, resumed=trail(SAVED, changes=other)).unseeded == ("python",)
    found = verdict(interrupted=interrupted, resumed=trail(SAVED))
    assert (found.kind, found.difference.first.path) == ("inexact", PYTHON)


def test_what_an_epoch_began_with_is_a_generator_too():
    epoch = "#private/data/start/global/python/keys"
    changes = [{step: {PYTHON: name, epoch: name} for step in range(LAST + 1)} for name in "pq"]
    whole, interrupted = trail(changes=changes[0]), trail(last=SAVED + 1, changes=changes[1])
    found = verdict(whole=whole, interrupted=interrupted, resumed=trail(SAVED, changes=changes[1]))
    assert (found.kind, found.unseeded) == ("exact", ("python",))


def test_a_generator_is_blamed_only_if_it_was_drawn_from():
    other = {step: {PYTHON: "q", **({"weight": "x"} if step > 1 else {})} for step in range(LAST + 1)}
    drawn = {step: {NUMPY: f"m{step}", **({"weight": "x"} if step > 1 else {})} for step in range(LAST + 1)}
    unrelated = verdict(repeated=trail(changes=other), resumed=trail(SAVED, changes=other))
    assert (unrelated.kind, unrelated.cause.name) == ("unrepeatable", "nondeterministic step")
    guilty = verdict(repeated=trail(changes=drawn), resumed=trail(SAVED, changes=drawn))
    assert (guilty.cause.name, guilty.unseeded) == ("unseeded", ("numpy",))


def test_other_values_at_the_start_from_the_same_generators():
    other = {step: {"weight": f"x{step}"} for step in range(LAST + 1)}
    found = verdict(repeated=trail(changes=other), resumed=trail(SAVED, changes=other))
    assert (found.cause.name, found.difference.step, found.difference.start) == ("unseeded start", 0, True)


def test_a_run_that_began_anew_did_not_resume():
    found = verdict(resumed=trail())
    assert (found.kind, found.cause.name, found.difference) == ("inexact", "no resume", None)
    without_restore = Trail(trail().rows[1:])
    assert verdict(resumed=without_restore).cause.name == "no resume"


def test_what_comes_by_chance_before_the_kill_is_no_verdict_on_the_resume():
    found = verdict(interrupted=trail(last=SAVED + 1, changes={2: {"weight": "x"}}))
    assert (found.kind, found.cause.name) == ("unrepeatable", "now and then")


def test_steps_that_only_one_of_them_counts():
    rows = tuple(one for one in trail().rows if one.step != 5)
    found = first_difference(Trail(rows), trail(SAVED))
    assert (found.step, found.of("data")[0].path) == (5, "steps that were counted")


def test_the_end_of_an_epoch_is_a_row_of_its_own():
    whole, resumed = trail(), trail(SAVED)
    ended = Row(4, 1, 0, {"weight": "after"})
    both = [
        Trail((*one.rows[: 5 - one.rows[0].step], ended, *one.rows[5 - one.rows[0].step :])) for one in (whole, resumed)
    ]
    assert first_difference(*both) is None
    other = Trail(tuple(replace(one, entries={"weight": "x"}) if one is ended else one for one in both[1].rows))
    assert first_difference(both[0], other).step == 4


def test_rows_are_the_same_after_their_way_through_json():
    one = row(3)
    assert Row.of(one.record()) == one
    assert compare(one, one) == {}
