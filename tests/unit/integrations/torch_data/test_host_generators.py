"""What is captured before each batch that is read ahead: as a full capture, at a fraction of its cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tenuto.integrations.torch.data import host_generators
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


def test_generators_that_nobody_draws_from_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    python, numpy = random.getstate, np.random.get_state
    host_generators._python_generator()  # looks once whether its memory is as it says
    monkeypatch.setattr(random, "getstate", lambda: asked.append("python") or python())
    monkeypatch.setattr(np.random, "get_state", lambda **given: asked.append("numpy") or numpy(**given))
    generators = HostGenerators()
    for _ in range(5):
        torch.rand(2)
        generators.capture()
    assert sorted(asked) == ["numpy", "python"]


def test_a_generator_elsewhere_in_memory_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_generators, "_python_generator", lambda: None)
    generators = HostGenerators()
    for _ in range(3):
        random.random()
        assert rng.marks(in_full(generators.capture())) == rng.marks(rng.capture())
