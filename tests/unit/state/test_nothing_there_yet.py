"""Targets that are None, or empty, where the checkpoint has something."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tenuto
from tenuto.errors import StateMismatch


class Average:
    def __init__(self) -> None:
        self.weights = np.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def trained() -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "average": Average(), "best_loss": 0.5}


@pytest.mark.parametrize(
    ("late", "path"),
    [
        ({"optimizer": None}, "optimizer: an optimizer's state"),
        ({"model": None}, "model: a module's entries"),
        ({"average": None}, "average: an object's state"),
    ],
)
def test_an_objects_state_is_refused_where_the_target_has_none_yet(tmp_path: Any, late: Any, path: str) -> None:
    saved = trained() | ({"optimizer": 1} if "model" in late else {})
    tenuto.save(saved, tmp_path)
    target = {**saved, **late}
    with pytest.raises(StateMismatch, match=rf"{path} .* in the checkpoint, None, and not yet the object"):
        tenuto.load(tmp_path, into=target)
    found = tenuto.load(tmp_path, into=target, strict=False)
    assert any(path in one for one in found.report.mismatched) and all(target[name] is None for name in late)
    name = next(iter(late))
    tenuto.load(tmp_path, into=target, exclude=[name, f"{name}/*"])
    assert target[name] is None


def test_a_checkpointer_does_not_go_on_with_an_optimizer_that_is_made_later(tmp_path: Any) -> None:
    with tenuto.Checkpointer(tmp_path, trained(), save=tenuto.every(steps=1)) as ckpt:
        ckpt.step_done()
    late = trained() | {"optimizer": None}
    with tenuto.Checkpointer(tmp_path, late) as ckpt, pytest.raises(StateMismatch, match="optimizer: "):
        ckpt.restore()
    assert late["optimizer"] is None


def test_an_empty_container_is_no_object_either(tmp_path: Any) -> None:
    state = trained()
    optimizers = {"first": state["optimizer"]}
    tenuto.save({"model": state["model"], "optimizers": optimizers, "averages": [Average()]}, tmp_path)
    target: dict[str, Any]
    for target in ({"optimizers": {}}, {"averages": []}):
        with pytest.raises(StateMismatch, match=r"(optimizers/first|averages/0): in the checkpoint only"):
            tenuto.load(tmp_path, into=target)


def test_values_and_tensors_come_back_as_they_were_saved(tmp_path: Any) -> None:
    best = {"weights": torch.arange(3), "mean": np.arange(2), "step": 7, "names": ["a"], "at": (1, 0.5)}
    tenuto.save({"best_loss": 0.5, "best": best}, tmp_path)
    target: dict[str, Any] = {"best_loss": None, "best": None}
    tenuto.load(tmp_path, into=target)
    assert target["best_loss"] == 0.5
    found = target["best"]
    assert torch.equal(found.pop("weights"), torch.arange(3)) and found.pop("mean").tolist() == [0, 1]
    assert found == {"step": 7, "names": ["a"], "at": (1, 0.5)}
