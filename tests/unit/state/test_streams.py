"""Random generators of many ranks: which are alike, and what a new rank begins with."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.state.position import rng


def seeded(seed: int) -> dict[str, Any]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return rng.capture()


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def begun(captured: dict[str, Any], alike: list[str], rank: int) -> tuple[float, float, float]:
    rng.apply(rng.of_new_rank(captured, alike, rank))
    return draws()


NAMES = ["python", "numpy", "torch/cpu"]


def test_marks_are_equal_for_equal_states_alone() -> None:
    first, again, other = rng.marks(seeded(1)), rng.marks(seeded(1)), rng.marks(seeded(2))
    assert list(first) == rng.names(seeded(1)) == NAMES
    assert first == again
    assert all(first[name] != other[name] for name in NAMES)
    seeded(2)
    random.random()
    moved = rng.marks(rng.capture())
    assert [name for name in NAMES if moved[name] != other[name]] == ["python"]


def test_alike_is_what_is_equal_on_all_ranks() -> None:
    one, other = rng.marks(seeded(1)), rng.marks(seeded(2))
    assert rng.alike([one, one, one]) == sorted(NAMES)
    assert rng.alike([one, {**other, "numpy": one["numpy"]}]) == ["numpy"]
    assert rng.alike([one, {"python": one["python"]}]) == ["python"]
    assert rng.alike([{"python": one["python"]}, one]) == ["python"]


def test_what_is_alike_stays_so_and_of_the_rest_each_new_rank_has_a_stream_of_its_own() -> None:
    saved = seeded(3)
    first = draws()
    assert begun(saved, NAMES, 5) == first
    fourth, fifth = begun(saved, [], 4), begun(saved, [], 5)
    assert len({*first, *fourth, *fifth}) == 9
    assert begun(saved, [], 5) == fifth
    assert begun(seeded(4), [], 5) != fifth
    mixed = begun(saved, ["numpy"], 5)
    assert mixed == (fifth[0], first[1], fifth[2])


def test_states_that_have_no_form_here_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {**seeded(1), "numpy": {"bit_generator": "PCG64", "state": {}}}
    saved["torch"]["mps"] = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    found = rng.of_new_rank(saved, [], 1)
    assert "numpy" not in found and list(found["torch"]) == ["cpu"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_new_rank_has_streams_of_its_own_on_every_device() -> None:
    torch.rand(1, device="cuda")
    saved = seeded(1)
    one, other = (rng.of_new_rank(saved, [], rank)["torch"]["cuda"] for rank in (4, 5))
    assert len(one) == torch.cuda.device_count() and not torch.equal(one[0], other[0])
    rng.apply(rng.of_new_rank(saved, [], 4))
