"""capture="fenced" of parameters that are DTensors: torch counts what is done to them in place at the DTensor, and not
at the local tensor that is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tenuto
from support.fenced_training import HeldCopy, Tensors, holding, owned, stepping, tensors_in, train

pytestmark = pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path) -> Iterator[None]:
    """A world of one rank."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "world"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def held_copy() -> Iterator[HeldCopy]:
    with holding() as held:
        yield held


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert all(isinstance(one, DTensor) for one in model.parameters())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def whole(tensors: Tensors) -> Tensors:
    return {path: one.full_tensor() if isinstance(one, DTensor) else one for path, one in tensors.items()}


def assert_right(place: Path, snapshots: dict[int, Tensors]) -> list[int]:
    """Every committed image is what the state was when it was taken. Their steps."""
    steps = sorted(id.step for id in tenuto.Repository(place).checkpoints("main"))
    for step in steps:
        found, wanted = dict(tensors_in(tenuto.load(place, step=step).state)), whole(snapshots[step])
        names = [name for name in wanted if name.startswith("/model/")]
        assert len(names) == 4 and all(torch.equal(found[name], wanted[name]) for name in names), step
    return steps


def in_place(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight.mul_(0.5)


def by_loading(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: one * 0.5 for name, one in model.state_dict().items()})


def on_the_local_tensor(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight.to_local().mul_(0.5)


def of_a_moment(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model[2].weight]["exp_avg"].zero_()


@pytest.mark.parametrize(
    ("write", "path"),
    [
        (in_place, "model/2.weight"),
        (by_loading, "model/2.weight"),
        (on_the_local_tensor, "model/2.weight"),
        (of_a_moment, "optimizer/state/model/2.weight/exp_avg"),
    ],
)
def test_a_write_to_a_dtensor_while_it_is_copied_tears_and_is_not_committed(
    tmp_path: Path, held_copy: HeldCopy, write: Callable[[Any, torch.optim.Optimizer], None], path: str
) -> None:
    model, optimizer = sharded()

    def body(step: int) -> None:
        if step == 6:
            with torch.no_grad():
                write(model, optimizer)
        held_copy.let_go()
        stepping(model, optimizer)(step)
        if step == 5:
            held_copy.hold()

    told = train(tmp_path / "p", {"model": model, "optimizer": optimizer}, body, steps=9)
    assert path in told.late[6] and path in told.torn[6] and path in told.demoted
    assert list(told.failed) == [6] and "changed in place" in told.failed[6]
    assert assert_right(tmp_path / "p", told.snapshots) == [1, 2, 3, 4, 5, 7, 8, 9]


def test_training_alone_tears_nothing(tmp_path: Path) -> None:
    model, optimizer = sharded()
    told = train(tmp_path / "p", {"model": model, "optimizer": optimizer}, stepping(model, optimizer))
    assert {"model/0.weight", "optimizer/state/model/0.weight/exp_avg"} <= owned(told)
    assert not told.demoted and not told.failed
    assert assert_right(tmp_path / "p", told.snapshots) == list(range(1, 9))
