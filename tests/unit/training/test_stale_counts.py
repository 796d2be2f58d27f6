"""A number in the state that is called like a count and never counts is told once; nothing else is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto import every
from tenuto.errors import TenutoWarning
from tenuto.training.stale_counts import StaleCounts


def told(state: dict[str, Any], moments: list[tuple[int, int, dict[str, Any]]]) -> list[str]:
    """Looks after (step, epoch), with what training has assigned until then."""
    counts, found = StaleCounts(state), []
    for step, epoch, assigned in moments:
        state.update(assigned)
        found.append(counts.check(step, epoch))
    return [one for one in found if one]


def test_a_count_of_steps_that_stays_is_told_once() -> None:
    (said,) = told({"global_step": 0}, [(50, 0, {}), (149, 0, {}), (150, 0, {}), (400, 0, {})])
    assert said.startswith("state['global_step'] is 0 as it was 100 steps ago") and "ckpt.step," in said


def test_a_count_of_epochs_is_told_after_two_of_them() -> None:
    (said,) = told({"epoch": 0}, [(10, 0, {}), (900, 1, {}), (910, 2, {}), (920, 9, {})])
    assert said.startswith("state['epoch'] is 0 as it was 2 epochs ago") and "ckpt.epoch," in said


def test_one_in_a_mapping_inside_is_named_by_its_way_there() -> None:
    (said,) = told({"progress": {"epoch": 3}}, [(1, 0, {}), (2, 2, {})])
    assert said.startswith("state['progress']['epoch'] is 3")


@pytest.mark.parametrize(
    "state",
    [
        {"lr": 0.1, "seed": 0, "epochs": 10, "max_steps": 0, "batch_size": 4, "best": float("inf")},
        {"epoch": "0"},
        {"schedule": {"step": 30, "gamma": 0.1}, "slice": {"start": 0, "step": 1}, "solver": {"iter": 20}},
    ],
)
def test_constants_of_a_configuration_are_never_told(state: dict[str, Any]) -> None:
    assert told(state, [(1, 0, {}), (10_000, 50, {})]) == []


def test_what_has_counted_once_is_trusted() -> None:
    updates = [(1, 0, {}), (64, 0, {"step": 1}), (900, 0, {}), (9_000, 0, {})]
    assert told({"step": 0}, updates) == []


def test_a_mapping_that_is_replaced_is_looked_at_anew() -> None:
    moments = [(number * 60, number, {"progress": {"epoch": number}}) for number in range(1, 9)]
    assert told({"progress": {"epoch": 0}}, moments) == []


def test_one_that_becomes_an_array_is_looked_at_by_its_type() -> None:
    assert told({"step": 0}, [(1, 0, {}), (200, 0, {"step": np.arange(3)}), (400, 0, {})]) == []


def test_a_training_says_it(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with tenuto.Checkpointer(tmp_path, {"w": [0.0], "step": 0, "seed": 7}, save=every(steps=50)) as ckpt:
            for _ in ckpt.steps(400):
                pass
    own = [str(one.message) for one in found if issubclass(one.category, TenutoWarning)]  # and none of a collection's
    assert [one.partition(" is ")[0] for one in own] == ["state['step']"]
