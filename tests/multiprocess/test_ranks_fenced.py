"""Fenced saves of torch's optimizers on several ranks: their images are those of eager saves, bit for bit; what is
changed behind the optimizer's back tears a save, and a torn one is never committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tenuto
from support import forked_processes as forked
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

PROGRAM = Path(__file__).with_name("fenced_program.py")
STEPS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("fenced")
    status = forked.job(PROGRAM, 2, str(where), log=where / "log", timeout=280)
    assert not any(status), forked.told(where / "log", 2)
    return where


def committed(where: Path) -> list[int]:
    repo = Repo.open(open_store(where))
    return sorted(step for attempt in repo.attempts("main") for step in repo.committed("main", attempt))


def tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: one for key, child in children for name, one in tensors(child, f"{path}/{key}").items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_fenced_images_are_those_of_eager_saves(place: Path, kind: str) -> None:
    steps = committed(place / f"{kind}-fenced")
    assert steps == committed(place / f"{kind}-eager") == list(range(1, STEPS + 1))
    assert_equal(place / f"{kind}-fenced", place / f"{kind}-eager", steps)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_no_torn_image_is_ever_committed(place: Path, kind: str) -> None:
    steps = committed(place / f"{kind}-fenced-meddled")
    assert steps == [1, 2, 3, 5, 6, 7, 8], "the state of step 4 was changed while it was being copied"
    assert_equal(place / f"{kind}-fenced-meddled", place / f"{kind}-eager-meddled", steps)


def assert_equal(fenced: Path, eager: Path, steps: list[int]) -> None:
    for step in steps:
        one, other = (tensors(tenuto.load(where, step=step).state) for where in (fenced, eager))
        assert one.keys() == other.keys() and len(one) > 10
        differing = [name for name in one if not torch.equal(one[name], other[name])]
        assert not differing, (step, differing)
