"""What state_dict() returns is no state to train with: it is recognised, wherever it lies, and nothing else is."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

import tenuto
from tenuto.errors import UsageError
from tenuto.state.frameworks import find_snapshot


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9)


def stepped(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in made.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    made.step()
    return made


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda own: lr_scheduler.LambdaLR(own, lambda epoch: 0.9),
    "MultiplicativeLR": lambda own: lr_scheduler.MultiplicativeLR(own, lambda epoch: 0.9),
    "StepLR": lambda own: lr_scheduler.StepLR(own, 3),
    "MultiStepLR": lambda own: lr_scheduler.MultiStepLR(own, [2, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda own: lr_scheduler.ExponentialLR(own, 0.9),
    "SequentialLR": lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.ConstantLR(own), lr_scheduler.StepLR(own, 3)], [2]
    ),
    "CosineAnnealingLR": lambda own: lr_scheduler.CosineAnnealingLR(own, 10),
    "ChainedScheduler": lambda own: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(own)]),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "CyclicLR": lambda own: lr_scheduler.CyclicLR(own, 0.1, 0.2),
    "CosineAnnealingWarmRestarts": lambda own: lr_scheduler.CosineAnnealingWarmRestarts(own, 10),
    "OneCycleLR": lambda own: lr_scheduler.OneCycleLR(own, 0.2, total_steps=10),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "SWALR": lambda own: SWALR(own, 0.05),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_each_scheduler_is_recognised(name: str) -> None:
    scheduler = SCHEDULERS[name](optimizer())
    for _ in range(2):
        found = find_snapshot({"scheduler": scheduler.state_dict()})
        assert found is not None and (found.keys, found.owner) == (("scheduler",), "scheduler")
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))


def test_no_scheduler_of_torch_is_left_out() -> None:
    assert {*SCHEDULERS, "LRScheduler"} >= {*lr_scheduler.__all__}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.LBFGS])
def test_the_state_of_an_optimizer_is_recognised_before_its_first_step_and_after(kind: Any) -> None:
    made = kind(model().parameters(), lr=0.1)
    for own in (made, stepped(made)) if kind is not torch.optim.LBFGS else (made,):
        found = find_snapshot({"optimizer": own.state_dict()})
        assert found is not None and found.owner == "optimizer"


def test_the_state_of_a_module_is_recognised_plain_averaged_compiled_and_over_ranks() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        plain = model()
        kinds = [plain, AveragedModel(plain), torch.compile(plain), nn.parallel.DistributedDataParallel(plain)]
        for module in kinds:
            for content in (module.state_dict(), module.state_dict(keep_vars=True)):
                found = find_snapshot({"model": content})
                assert found is not None and found.owner == "module", type(module)
    finally:
        torch.distributed.destroy_process_group()


def test_the_state_of_a_gradient_scaler_is_recognised() -> None:
    found = find_snapshot({"scaler": torch.amp.GradScaler("cpu").state_dict()})
    assert found is not None and found.owner == "GradScaler"


def test_it_is_found_in_containers_and_named_by_its_way_there() -> None:
    held = model()
    found = find_snapshot(
        {"w": torch.ones(2), "agents": [{"actor": held}, {"actor": held, "critic": (held.state_dict(),)}]}
    )
    assert found is not None and (found.keys, found.owner) == (("agents", 1, "critic", 0), "module")
    circle: dict[str, Any] = {}
    circle["again"] = [circle]
    assert find_snapshot(circle) is None


class Average:
    """A user's own: what it returns is asked for at every save."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])


class Recorded(dict[str, Any]):
    """A mapping that says its state by itself."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


class Attributes(dict[str, Any]):
    """A mapping that makes an entry of each attribute that it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Attributes())


def test_what_looks_like_it_and_follows_training_is_left_alone() -> None:
    held = model()
    copied = copy.deepcopy(held.state_dict())
    views = [tensor.view(-1) for tensor in copied.values()], [tensor.detach() for tensor in copied.values()]
    made = Attributes(weight=held[0].weight)  # type: ignore[index]
    clones = {name: value.clone() for name, value in held.state_dict().items()}
    config = {"lr": 0.1, "scale": 2.0, "last_epoch": 9, "optimizer": {"name": "adamw", "param_groups": 2, "state": {}}}
    legitimate = {
        "shadow": clones,
        "copied": copied,
        "made": made,
        "ordered": OrderedDict(clones),
        "average": Average(held),
        "recorded": Recorded(optimizer=optimizer().state_dict()),
        "config": config,
        "groups": {"state": {}, "param_groups": [{"params": [torch.ones(1)]}]},
        "no groups": {"state": {"phase": 1}, "param_groups": []},
        "groups by name": {"state": {"phase": 1}, "param_groups": [{"params": ["weight", "bias"], "lr": 0.1}]},
        "nothing": {},
    }
    assert find_snapshot(legitimate) is None
    assert list(made) == ["weight"], "looking makes no entry"
    assert held is not None and views


@pytest.mark.parametrize(
    ("state", "entry", "hint"),
    [
        (lambda m, o: {"model": m, "optimizer": o.state_dict()}, "state['optimizer']", "`optimizer` itself, not `opt"),
        (
            lambda m, o: {"model_state_dict": m.state_dict()},
            "state['model_state_dict']",
            "`model` itself, not `model.st",
        ),
        (lambda m, o: {"a": [m.state_dict()]}, "state['a'][0]", "`model` itself"),
        (lambda m, o: m.state_dict(), "state is what", '`{"model": model}` itself'),
    ],
)
def test_a_checkpointer_refuses_it_and_says_what_to_pass(tmp_path: Path, state: Any, entry: str, hint: str) -> None:
    held = model()
    made = torch.optim.AdamW(held.parameters())
    with pytest.raises(UsageError) as caught:
        tenuto.Checkpointer(tmp_path / "ckpts", state(held, made))
    assert caught.value.message.startswith(entry) and hint in (caught.value.hint or "")
    assert not (tmp_path / "ckpts").exists()


def test_one_save_takes_it_for_there_it_is_right(tmp_path: Path) -> None:
    held = model()
    tenuto.save({"model": held.state_dict(), "optimizer": optimizer().state_dict()}, tmp_path)
    assert torch.equal(tenuto.load(tmp_path).state["model"]["0.weight"], held.state_dict()["0.weight"])
