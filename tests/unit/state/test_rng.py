"""Global generators, captured and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tenuto.errors import StateMismatch
from tenuto.state.position import rng


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.standard_normal())]


def test_later_draws_repeat_and_the_captured_state_does_not_move() -> None:
    random.gauss(0, 1)
    np.random.standard_normal()  # both keep a second normal number for the next call
    saved = rng.capture()
    first = draws()
    assert draws() != first
    assert rng.apply(saved) == ()
    assert draws() == first
    rng.apply(saved)
    assert draws() == first


def test_capturing_draws_nothing() -> None:
    saved = rng.capture()
    first = draws()
    rng.apply(saved)
    rng.capture()
    assert draws() == first


def test_only_plain_values_and_arrays() -> None:
    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                assert isinstance(key, str)
                walk(inner)
        else:
            assert value is None or isinstance(value, (bool, int, float, str, np.ndarray)), type(value)

    walk(rng.capture(frameworks=False))


@pytest.mark.parametrize(
    "state",
    [
        {"python": {"version": 3, "keys": np.zeros(3, np.uint32), "gauss": None}},
        {"python": {"version": 3, "keys": None, "gauss": None}},
        {"python": {}},
        {
            "numpy": {
                "bit_generator": "MT19937",
                "state": {"key": np.zeros(7, np.uint32), "pos": 0},
                "has_gauss": 0,
                "gauss": 0.0,
            }
        },
        {
            "numpy": {
                "bit_generator": "MT19937",
                "state": {"key": np.zeros(624, np.uint32), "pos": 10**6},
                "has_gauss": 0,
                "gauss": 0.0,
            }
        },
        {"numpy": {"bit_generator": "Other"}},
    ],
)
def test_what_is_no_state_is_refused_by_name(state: dict[str, Any]) -> None:
    with pytest.raises(StateMismatch) as caught:
        rng.apply(state)
    assert caught.value.subject == f"rng/{next(iter(state))}"
