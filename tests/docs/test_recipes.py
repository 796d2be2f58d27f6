"""The recipes of the guide on logging, with stand-ins for the packages that they write to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tenuto
from support.pages import blocks
from tenuto import every

GUIDE = Path(__file__).parents[2] / "docs/guides/logging.md"


@pytest.fixture(scope="module")
def recipes() -> dict[str, Callable[..., Any]]:
    names: dict[str, Any] = {}
    for block in blocks(GUIDE.read_text()):
        if block.language == "python" and "def to_tensorboard" in block.text:
            exec(block.text, names)
    return names


def train(where: Path, sink: Any) -> None:
    with tenuto.Checkpointer(where, {"seen": []}, save=every(steps=2), sinks=[sink]) as ckpt:
        for _ in ckpt.steps(4):
            pass


def test_tensorboard(recipes: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    scalars: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda name, value, step: scalars.append((name, value, step)))
    train(tmp_path / "run", recipes["to_tensorboard"](writer))
    blocked = [(step, value) for name, value, step in scalars if name == "checkpoint/blocked_s"]
    assert [step for step, _ in blocked] == [2, 4]
    assert all(value > 0 for _, value in blocked)


def test_wandb(recipes: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    train(tmp_path / "run", recipes["to_wandb"](SimpleNamespace(log=rows.append)))
    assert [row["checkpoint/step"] for row in rows] == [2, 4]


def test_mlflow(recipes: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    metrics: list[tuple[str, str, int]] = []

    class Client:
        def log_metric(self, run_id: str, key: str, value: float, step: int) -> None:
            assert value > 0
            metrics.append((run_id, key, step))

    train(tmp_path / "run", recipes["to_mlflow"](SimpleNamespace(MlflowClient=Client), "run-1"))
    assert metrics == [("run-1", "checkpoint_blocked_s", 2), ("run-1", "checkpoint_blocked_s", 4)]
