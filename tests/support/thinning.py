"""Which of many alike a test run takes, and which `make test-long` alone: those marked `long`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def _later(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)


def thinned(values: Iterable[Any], every: int) -> list[Any]:
    """One of so many, beginning with the first."""
    return [value if not number % every else _later(value) for number, value in enumerate(values)]


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Every combination, of which a test run takes so many that each value of each axis comes up."""
    fewest = min(map(len, axes))
    numbered = (zip(*one, strict=True) for one in product(*map(enumerate, axes)))
    return [values if not sum(numbers) % fewest else _later(values) for numbers, values in numbered]
