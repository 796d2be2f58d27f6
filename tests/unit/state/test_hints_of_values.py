"""What an error tells to do about a value that has no representation."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.errors import Unserialisable
from tenuto.state.encode.flattener import flatten


class Network:
    """An object that can be called, as the models of many frameworks are."""

    def __call__(self, value: float) -> float:
        return value


@pytest.mark.parametrize("code", [lambda: 0, math.sin, Network, Network().__call__, functools.partial(print), math])
def test_code_is_no_state(code: Any) -> None:
    with pytest.raises(Unserialisable, match="leave it out of the state"):
        flatten({"code": code})


def test_an_object_that_can_be_called_is_state_that_somebody_has_to_name() -> None:
    with pytest.raises(Unserialisable, match=r"give it state_dict and load_state_dict, or call tenuto\.register"):
        flatten({"network": Network()})
    assert "register" in tenuto.__all__ and callable(tenuto.register)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([{}, None]), "as a list"),
        (np.zeros(2, [("x", "f4"), ("y", "i4")]), "its fields as arrays of their own"),
    ],
)
def test_each_array_without_a_representation_has_its_own_way_out(array: Any, words: str) -> None:
    with pytest.raises(Unserialisable, match=words):
        flatten({"a": array})
