"""Bisection: for any line on which what holds once holds from then on, what it says is what a look at each says."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from tenuto.errors import CheckpointNotFound, LeafNotFound, UsageError
from tenuto.history.bisect import _FIELDS, bisect, by_command, has_nan
from tenuto.history.query import FIELDS, Query
from tenuto.model.ids import CheckpointId
from tenuto.repo.notes import add_note

torch = pytest.importorskip("torch")


def at(attempt, step, run="main"):
    return CheckpointId(run, attempt, step)


LINE = [at(1, step) for step in range(40)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.sets(st.integers(0, 39), max_size=12), st.booleans())
def test_it_finds_what_a_look_at_each_finds(length, first, skipped, linear):
    line = LINE[:length]
    trials = []

    def test(id):
        trials.append(id)
        return ("skip" if id.step in skipped else "bad" if id.step >= first else "good"), ""

    found = bisect(line, test, linear=linear)
    asked = [id for id in line if id.step not in skipped]
    bad = [id for id in asked if id.step >= first]
    good = [id for id in asked if id.step < first]
    assert found.first == (bad[0] if bad else None)
    assert found.last_good == (good[-1] if good else None)
    if bad:
        assert found.unsure == tuple(id for id in line if (not good or id > good[-1]) and id < bad[0])
    assert len(trials) == len(set(trials)) == len(found.trials), "nothing is asked twice"
    assert linear or skipped or len(trials) <= 2 + length.bit_length()


def test_a_checkpoint_that_is_removed_meanwhile_is_skipped():
    def test(id):
        if id.step == 5:
            raise CheckpointNotFound("gone")
        return ("bad" if id.step >= 6 else "good"), ""

    found = bisect(LINE[:10], test)
    assert (found.first, found.last_good, found.unsure) == (at(1, 6), at(1, 4), (at(1, 5),))


def test_a_condition_on_metrics(repository, train):
    train([1, 2, 3])
    train([4, 5, 6, 7], loss=lambda step: step)
    found = repository.bisect(where="loss > 3")
    assert (found.first, found.last_good) == (at(2, 4), at(1, 3))
    assert repository.bisect(where="step >= 2 and attempt == 1", bad=3).first == at(1, 2)
    assert repository.bisect(where="loss > 30").first is None
    assert repository.bisect(where="loss > 3", good=2, bad="a0002/5").line == 4
    missing = repository.bisect(where="accuracy < 1")
    assert {trial.why for trial in missing.trials} == {"accuracy is not logged"} and missing.first is None
    for wrong in ("loss >", 'age > "3d"', 'line == "left"'):
        with pytest.raises(UsageError):
            repository.bisect(where=wrong)
    repository.tag("paper", 4)
    assert repository.bisect(where='tag == "paper"', bad=4).first == at(2, 4)
    with pytest.raises(UsageError, match="one of"):
        repository.bisect()


def test_nan_metrics_say_nothing_and_the_ends_move_inwards(repository, train):
    train(range(1, 9), loss=lambda step: float("nan") if step in (1, 7, 8) else step)
    found = repository.bisect(where="loss > 3")
    assert (found.first, found.last_good) == (at(1, 4), at(1, 3))


def test_ends_on_two_lines_are_refused_and_a_line_left_behind_is_bisected(repository, train):
    train([1, 2, 3])
    repository.rollback(1)
    train([2, 3], loss=lambda step: 9)
    assert repository.bisect(where="loss > 3", bad="a0001/3").first is None
    assert repository.bisect(where="loss > 3").first == at(3, 2)
    for good in ("a0001/2", "a0003/3"):
        with pytest.raises(UsageError, match="not on the line"):
            repository.bisect(where="loss > 3", good=good)


def test_an_end_on_no_line_of_the_run_is_refused_by_name(repository, train):
    train([1, 2, 3])
    train([1, 2], "other")
    for words in ({"where": "loss > 3"}, {"where": "loss > 3", "linear": True, "good": 1}):
        with pytest.raises(UsageError, match="other/a0001/2 is not on the line of training of run 'main'") as caught:
            repository.bisect(bad="other/a0001/2", **words)
        assert "tenuto log" in caught.value.hint


def test_a_condition_may_name_every_field_but_those_of_the_whole_run(repository, train, monkeypatch):
    train([1, 2, 3])
    rows = []
    monkeypatch.setattr(
        Query, "matches", lambda self, row, plain=Query.matches: (rows.append(row), plain(self, row))[1]
    )
    repository.bisect(where="step > 1")
    assert rows and all(row.keys() >= _FIELDS for row in rows)
    assert FIELDS.keys() - _FIELDS == {"line", "best", "age"}
    for kind in ("proven", "verified"):
        add_note(repository.repo, at(1, 2), kind, {})
    assert repository.bisect(where="proven", bad=2).first == at(1, 2)
    add_note(repository.repo, at(1, 2), "suspect", {})
    assert repository.bisect(where="proven", bad=2).first is None


def test_the_first_leaf_with_nan(repository, train):
    def state(step):
        model = {"w": np.ones((3, 4), np.float32), "b": torch.ones(5, dtype=torch.bfloat16)}
        if step >= 3:
            model["b"][2] = float("nan")
        return {"model": model, "n": 3}

    train(range(1, 6), state=state)
    found = repository.bisect(nan=True)
    assert (found.first, found.last_good) == (at(1, 3), at(1, 2))
    assert {trial.why for trial in found.trials} == {"no nan", "nan in model/b"}
    assert repository.bisect(nan="model/w").first is None
    assert repository.bisect(nan="model", linear=True).first == at(1, 3)
    with pytest.raises(LeafNotFound):
        repository.bisect(nan="modle/*")


TYPES = [
    "float64", "float32", "float16", "bfloat16", "complex64", "complex32",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_nan_of_every_type_is_found_and_nothing_else(where, name, monkeypatch):
    monkeypatch.setattr("tenuto.history.bisect.BLOCK", 64)
    kind = getattr(torch, name)
    bits = {1: torch.uint8, 2: torch.int16}.get(kind.itemsize)
    every = torch.arange(1 << 8 * kind.itemsize, dtype=torch.int32).to(bits).view(kind) if bits else torch.ones(64)
    finite = every[~torch.isnan(every.float())] if bits else every.to(kind)
    nan = torch.full((1,), float("nan")).to(kind) if name != "float8_e8m0fnu" else every[-1:]
    state = {"whole": finite, "last": torch.cat([finite, nan]).reshape(1, -1), "empty": finite[:0], "one": nan[0]}
    tenuto.save(state, where)
    with tenuto.open(where) as opened:
        assert {path: has_nan(opened[path]) for path in opened if not path.startswith("#")} == {
            "whole": False,
            "last": True,
            "empty": False,
            "one": True,
        }


def test_integers_have_none(where):
    tenuto.save({"x": np.full(8, 0x7FC0, np.uint16), "t": np.array(["nan"]), "b": b"\xff" * 2000}, where)
    with tenuto.open(where) as opened:
        assert not any(has_nan(opened[path]) for path in opened)


def test_a_command_says_what_it_finds_by_its_exit_status(tmp_path):
    with tenuto.Checkpointer(tmp_path, {"n": 0}, save=tenuto.every(steps=1), keep=tenuto.keep.all(), sinks=[]) as ckpt:
        for _ in ckpt.steps(4):
            pass
    code = "import os,sys; sys.exit({0} if os.environ['TENUTO_STEP'] == sys.argv[1] != sys.argv[2] else 64)"
    repo = tenuto.Repository(tmp_path).repo

    def ask(status):
        return by_command(repo, [sys.executable, "-c", code.replace("{0}", str(status)), "{step}", "{where}"])

    assert [ask(status)(at(1, 2))[0] for status in (0, 1, 125, 127)] == ["good", "bad", "skip", "bad"]
    with pytest.raises(tenuto.TenutoError, match="exit status 130"):
        ask(130)(at(1, 2))
    with pytest.raises(tenuto.TenutoError, match="signal 9"):
        by_command(repo, ["sh", "-c", "kill -9 $$"])(at(1, 2))
    with pytest.raises(UsageError, match="cannot be started"):
        by_command(repo, ["./no-such-program"])(at(1, 2))


def test_a_function_of_ones_own(repository, train):
    train(range(1, 9))
    assert repository.bisect(test=lambda id: id.step > 5).first == at(1, 6)
    assert repository.bisect(test=lambda id: None if id.step == 5 else id.step > 4).unsure == (at(1, 5),)
