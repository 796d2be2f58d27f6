"""Spikes of a loss, its divergence, and values that are no numbers."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from tenuto.policy.spikes import FEWEST, LASTING, WINDOW, falls, spikes


def falling(count: int, *, seed: int = 0) -> list[tuple[int, float]]:
    noise = random.Random(seed)
    return [(step, 2 / (1 + step / 100) + noise.gauss(0, 0.02)) for step in range(count)]


def test_a_loss_that_falls_with_noise_has_no_spikes() -> None:
    assert not any(spikes(falling(500, seed=seed)) for seed in range(5))


def test_a_single_jump_is_one_spike() -> None:
    series = falling(200)
    series[120] = (120, 6.0)
    (found,) = spikes(series)
    assert (found.step, found.value, found.kind) == (120, 6.0, "spike") and 0.5 < found.median < 1.5


def test_what_stays_high_diverges_and_is_usual_in_the_end() -> None:
    series = [(step, value + (5 if step >= 100 else 0)) for step, value in falling(300)]
    found = spikes(series)
    assert [spike.kind for spike in found[:LASTING]] == ["spike"] * (LASTING - 1) + ["divergence"]
    assert [spike.step for spike in found] == list(range(100, 100 + len(found)))
    assert LASTING < len(found) <= WINDOW


def test_nan_and_infinities_are_named_from_the_first_on_and_move_no_median() -> None:
    series = [(0, math.nan), *((step, 1.0) for step in range(1, 20)), (20, math.inf), (21, 1.0)]
    assert [(spike.step, spike.kind) for spike in spikes(series)] == [(0, "nan"), (20, "nan")]


def test_a_constant_loss_may_move_a_little() -> None:
    assert not spikes((step, 1.0 if step < 50 else 1.05) for step in range(60))


@given(st.lists(st.floats(-1e6, 1e6), max_size=FEWEST))
def test_too_few_values_are_not_judged(values: list[float]) -> None:
    assert not spikes(enumerate(values))


def test_which_metrics_fall() -> None:
    assert falls("val_loss", None) and falls("bits", "min")
    assert not falls("accuracy", None) and not falls("negative_loss", "max")
