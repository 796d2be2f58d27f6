"""`best:METRIC`: the best checkpoint of a run, against what anybody would compute by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import CheckpointNotFound, CorruptionError, MetricNotLogged, RunNotFound, UsageError
from tenuto.model.canonical_json import tag_number
from tenuto.model.ids import CheckpointId
from tenuto.repo.best import best_of_each, measured
from tenuto.repo.lineage import resolve
from tenuto.repo.notes import add_note
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort

VALUES = (0.0, -0.0, 1.0, 1.0, 2.5, -3.0, math.inf, -math.inf, math.nan)


def best_by_hand(logged: dict[CheckpointId, float], mode: str) -> CheckpointId | None:
    """Looks at each checkpoint in the order in which it was saved; an equal one replaces the one before."""
    found: CheckpointId | None = None
    for id in sorted(logged, key=lambda id: (id.attempt, id.step)):
        value = logged[id]
        if value != value:
            continue
        if found is None or (value <= logged[found] if mode == "min" else value >= logged[found]):
            found = id
    return found


@settings(max_examples=30, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_best_is_what_one_finds_by_hand(new_maker: Callable[[], Any], seed: int) -> None:
    draw, make = random.Random(seed), new_maker()
    logged: dict[CheckpointId, float] = {}
    for number in range(1, draw.randint(2, 4)):
        parent = draw.choice([None, *logged]) if logged else None
        make.attempt(number, parent)
        for step in sorted(draw.sample(range(20), draw.randint(0, 4))):
            if draw.random() < 0.1:
                abort(make.repo, *make.begin(number, step))
                continue
            value = draw.choice(VALUES)
            at_once = draw.random() < 0.5
            id = make.checkpoint(number, step, metrics={"loss": value} if at_once else {})
            if draw.random() < 0.2:  # never logged, or found damaged: no candidate
                if at_once:
                    add_note(make.repo, id, "suspect", {})
                continue
            if not at_once:
                add_note(make.repo, id, "metric", {"loss": tag_number(draw.choice(VALUES))})
                add_note(make.repo, id, "metric", {"loss": tag_number(value)})  # the later value counts
            logged[id] = value
    make.attempt(1, run="other")
    make.checkpoint(1, 3, run="other", metrics={"loss": -1000.0})
    for mode in ("min", "max"):
        expected = best_by_hand(logged, mode)
        if expected is None:
            with pytest.raises((CheckpointNotFound, MetricNotLogged, RunNotFound)):
                resolve(make.repo, "gpt", f"best:loss:{mode}")
        else:
            assert resolve(make.repo, "gpt", f"best:loss:{mode}") == expected


def test_the_direction_is_the_one_that_training_recorded_last(repo: Repo, make: Any) -> None:
    make.attempt(1)
    low = make.checkpoint(1, 1, metrics={"acc": 0.1}, certificate={"modes": {"acc": "min"}})
    high = make.checkpoint(1, 2, metrics={"acc": 0.9}, certificate={"modes": {"acc": "max"}})
    assert resolve(repo, "gpt", "best:acc") == high
    assert resolve(repo, "gpt", "best:acc:min") == low
    make.checkpoint(1, 3, metrics={"acc": 0.5}, certificate={"modes": {"acc": "sideways"}})
    assert resolve(repo, "gpt", "best:acc") == high


def test_a_listing_marks_the_best_by_each_metric_with_a_recorded_direction(repo: Repo, make: Any) -> None:
    make.attempt(1)
    modes = {"acc": "max", "loss": "min", "bleu": "max"}
    high = make.checkpoint(1, 1, metrics={"acc": 0.9, "loss": 3.0}, certificate={"modes": modes})
    low = make.checkpoint(1, 2, metrics={"acc": 0.1, "loss": 1.0, "time": 1.0}, certificate={"modes": modes})
    assert best_of_each(measured(repo, "gpt"), "gpt") == {"acc": high, "loss": low}


def test_without_a_recorded_direction_one_is_asked_for(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 1, metrics={"score": 1.0})
    with pytest.raises(UsageError, match="is the lowest score the best or the highest") as caught:
        resolve(repo, "gpt", "best:score")
    assert caught.value.hint == "best:score:min, or best:score:max"


def test_a_metric_that_nobody_logged_names_the_nearest_and_all_that_exist(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 1, metrics={"loss": 1.0, "val_loss": 2.0})
    with pytest.raises(
        MetricNotLogged, match="has a metric 'val_los'; metrics that there are: loss, val_loss"
    ) as caught:
        resolve(repo, "gpt", "best:val_los:min")
    assert caught.value.hint == "did you mean 'val_loss'?"
    with pytest.raises(MetricNotLogged) as caught:
        resolve(repo, "gpt", "best:val_loss:lowest")
    assert caught.value.hint == "best:val_loss:min, or best:val_loss:max"
    with pytest.raises(UsageError, match="names no metric"):
        resolve(repo, "gpt", "best:")


def test_a_metric_that_is_always_nan_has_no_best(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 1, metrics={"loss": math.nan})
    with pytest.raises(CheckpointNotFound, match="loss is nan in all 1 that have it"):
        resolve(repo, "gpt", "best:loss:min")


def test_metrics_may_have_colons_and_slashes_in_their_names(repo: Repo, make: Any) -> None:
    make.attempt(1)
    id = make.checkpoint(1, 5, metrics={"val/top:5": 1.0, "a1/5": 2.0})
    assert resolve(repo, "gpt", "best:val/top:5:max") == id
    assert resolve(repo, "gpt", "best:a1/5:min") == id


def test_a_damaged_manifest_hides_nothing(repo: Repo, make: Any) -> None:
    make.attempt(1)
    whole = make.checkpoint(1, 1, metrics={"loss": 1.0})
    make.damage(make.checkpoint(1, 2, metrics={"loss": 0.5}).manifest)
    assert resolve(repo, "gpt", "best:loss:min") == whole
    make.damage(whole.manifest)
    with pytest.raises((CheckpointNotFound, CorruptionError), match="no checkpoint that can be read"):
        resolve(repo, "gpt", "best:loss:min")


def test_an_unknown_run_is_named_with_those_that_exist(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 1, metrics={"loss": 1.0})
    with pytest.raises(RunNotFound, match="no run 'gtp'") as caught:
        resolve(repo, "gtp", "best:loss:min")
    assert caught.value.hint == "did you mean 'gpt'?"
