"""What is captured before each batch that is read ahead: as a full capture, at a fraction of its cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tenuto.integrations.torch.data.host_generators import HostGenerators, in_full
from tenuto.state.position import rng

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "python": random.random,
    "one of two of python's normal numbers": lambda: random.gauss(0.0, 1.0),
    "python, seeded": lambda: random.seed(7),
    "python, set": lambda: random.setstate(random.Random(9).getstate()),
    "numpy": np.random.rand,
    "one of two of numpy's normal numbers": np.random.randn,
    "numpy, seeded": lambda: np.random.seed(5),
    "torch": lambda: torch.rand(3),
}


@pytest.fixture(autouse=True)
def _as_before():
    before = rng.capture()
    yield
    rng.apply(before)


def test_a_capture_is_as_a_full_one_whatever_was_drawn() -> None:
    generators = HostGenerators(devices=True)
    for first in DRAWS:
        for second in DRAWS:
            for name in (first, second):
                DRAWS[name]()
                found = in_full(generators.capture())
                assert rng.marks(found) == rng.marks(rng.capture()), f"{name}, of {first} and {second}"


def test_numpy_is_asked_once_while_nobody_draws_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    numpy = np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda **given: asked.append("numpy") or numpy(**given))
    generators = HostGenerators()
    for _ in range(5):
        torch.rand(2)
        generators.capture()
    assert asked == ["numpy"]
