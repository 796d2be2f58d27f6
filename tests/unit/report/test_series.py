"""Which values of a series stand out, and which are drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tenuto.report.series import spikes, thinned

numbers = arrays(np.float64, st.integers(0, 300), elements=st.floats(width=64))
NOISE = np.random.default_rng(0).normal(size=400)


@pytest.mark.parametrize("place", [5, 200, 398, 399])
def test_one_value_far_from_its_neighbours_is_a_spike(place: int) -> None:
    values = 1 + 0.01 * NOISE
    values[place] = 3
    assert spikes(values).tolist() == [place]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(NOISE, id="noise"),
        pytest.param(3 * (np.arange(400) + 5.0) ** -0.35 + 0.02 * NOISE, id="a loss that falls"),
        pytest.param(np.repeat([1.0, 0.1, 0.01], 40), id="steps"),
        pytest.param(np.concatenate([np.linspace(0, 1, 20), np.cos(np.linspace(0, 1.5, 300))]), id="a warm-up"),
        pytest.param(np.ones(50), id="a constant"),
        pytest.param(np.array([1.0, 9.0, 1.0]), id="too few"),
        pytest.param(np.full(30, np.nan), id="none finite"),
        pytest.param(np.empty(0), id="nothing"),
    ],
)
def test_what_goes_its_way_has_no_spike(values: np.ndarray) -> None:
    assert not len(spikes(values))


def test_values_that_are_not_finite_do_not_hide_a_spike() -> None:
    values = 1 + 0.01 * NOISE
    values[100:120], values[125] = np.nan, 5
    assert spikes(values).tolist() == [125]


@given(numbers, st.integers(8, 60))
def test_what_is_drawn_keeps_ends_extremes_and_gaps(values: np.ndarray, most: int) -> None:
    shown = thinned(values, most)
    assert (np.diff(shown) > 0).all() and set(shown) <= set(range(len(values)))
    drawn, finite = values[shown], values[np.isfinite(values)]
    if len(values):
        assert {0, len(values) - 1} <= set(shown)
    if len(finite):
        kept = drawn[np.isfinite(drawn)]
        assert kept.min() == finite.min() and kept.max() == finite.max()
    gap = np.isnan(values).any()
    assert gap == np.isnan(drawn).any() or (np.isinf(values).any() and not np.isfinite(drawn).all())
    assert set(spikes(values)) <= set(shown)


def test_a_long_line_is_drawn_with_about_a_thousand_points() -> None:
    assert len(thinned(np.random.default_rng(0).normal(size=100_000))) < 1_100
