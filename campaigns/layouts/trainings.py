"""A small training under each way to spread it over ranks, its values and its optimizer's state following from a seed.

What a rank has to hold is told by torch: a second model is built from the whole values and wrapped in the same way, one
for the parameters and one for each tensor that the optimizer keeps of every parameter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from campaigns.layouts.meshes import Key, Meshes
from campaigns.layouts.truth import content
from tenuto.integrations.torch.adapter import declare
from tenuto.state.declarations import fused, replicated, shard

OPTIMIZERS: Final[Mapping[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9, centered=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}
WIDTHS: Final = (8, 12, 16, 5, 7, 3, 1, 6, 24)
STRIDED: Final = (8, 12, 16, 5, 7, 3, 1, 6)
DTYPES: Final = ("float32", "float32", "bfloat16", "float64")
FEATURES: Final = 5


@dataclass(frozen=True, slots=True)
class Spread:
    """How the training lies over `world` ranks. `number` tells ways of one kind apart."""

    kind: str
    world: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained, however it is spread."""

    width: int
    dtype: str
    optimizer: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "first.weight": (self.width, FEATURES),
            "first.bias": (self.width,),
            "last.weight": (3, self.width),
            "last.bias": (3,),
            "table": (7, 2, 3),
        }


STAGES: Final = {"first.weight": 0, "first.bias": 0, "table": 1, "last.weight": 2, "last.bias": 3}


def draw_spread(chance: random.Random, world: int, trained: Trained) -> Spread:
    if world == 1:
        return Spread("one process", 1)
    kinds = ["DDP", "FSDP2", "FSDP2", "FSDP2, last dimension", "TP", "pipeline stages"]
    if world == 4:
        kinds += ["HSDP", "HSDP"] + ["FSDP2 around TP"] * 3 * (trained.width in STRIDED)
    if trained.width % world == 0:
        kinds += ["declared", "declared"]
    return Spread(chance.choice(kinds), world, chance.randrange(4))


def meshes_of_spread(spread: Spread) -> list[Key]:
    ranks = tuple(range(spread.world))
    if spread.kind in ("HSDP", "FSDP2 around TP"):
        return [((2, 2), ranks)]
    return [((spread.world,), ranks)]


class Net(nn.Module):
    """`names`: which of the parameters it has."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            module, _, last = name.rpartition(".")
            if module and not hasattr(self, module):
                setattr(self, module, _Linear() if last else nn.Module())
            (getattr(self, module) if module else self).register_parameter(last, nn.Parameter(value.clone()))


class _Linear(nn.Linear):
    """Without parameters until they are given."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.in_features = self.out_features = 0


@dataclass
class Training:
    """One rank's: the module as it is wrapped, and its optimizer."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        return {"model": self.module, "optimizer": self.optimizer}

    def parameters(self) -> dict[str, Any]:
        return {name.removeprefix("module."): one for name, one in self.module.named_parameters()}

    def read(self) -> dict[str, Any]:
        """What this rank holds, by path."""
        found: dict[str, Any] = {}
        for name, parameter in self.parameters().items():
            found[f"model/{name}"] = local_of(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer/state/model/{name}/{key}"] = local_of(value)
        return found


def local_of(tensor: Any) -> Any:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def build(
    trained: Trained, spread: Spread, seed: object, rank: int, meshes: Meshes, *, stepped: bool = True
) -> Training:
    """The training as `seed` has it. `stepped`: whether its optimizer has any state yet."""
    training = _wrapped(trained, spread, rank, meshes, _values(trained, seed, ""))
    if not stepped:
        training.optimizer.state.clear()
        return training
    parameters = training.parameters()
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    training.optimizer.step()
    training.optimizer.zero_grad()
    keys = sorted({key for state in training.optimizer.state.values() for key in state})
    for key in ["", *every_key(trained)]:
        # A step quiets a nan also where the gradient is nought. Wrapping is the business of all ranks, whatever each
        # of them holds.
        shadow = _wrapped(trained, spread, rank, meshes, _values(trained, seed, f"/{key}" if key else "")).parameters()
        for name, parameter in parameters.items():
            value = training.optimizer.state[parameter].get(key) if key else parameter
            if isinstance(value, torch.Tensor):
                lies = local_of(shadow[name]) if value.ndim else _number(seed, name, key, value.dtype)
                local_of(value).copy_(lies.to(value.dtype))
    assert set(keys) <= set(every_key(trained)), keys
    return training


def every_key(trained: Trained) -> list[str]:
    """What the optimizer keeps of each parameter."""
    alone = nn.Parameter(torch.zeros(1))
    alone.grad = torch.zeros(1)
    optimizer = OPTIMIZERS[trained.optimizer]([alone])
    optimizer.step()
    return sorted(key for key, value in optimizer.state[alone].items() if isinstance(value, torch.Tensor))


def of_one_process(trained: Trained, seed: object, *, fresh: bool) -> Training:
    """The training of one process that has no group. `fresh`: its optimizer has no state yet."""
    module = Net(_values(trained, seed, ""))
    training = Training(module, OPTIMIZERS[trained.optimizer](module.parameters()))
    if fresh:
        training.optimizer.state.clear()
        return training
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return training


def full_tensors(trained: Trained, seed: object) -> dict[str, torch.Tensor]:
    """Every tensor of the training as a whole, by path."""
    kind = getattr(torch, trained.dtype)
    found = {f"model/{name}": value for name, value in _values(trained, seed, "").items()}
    training = of_one_process(trained, seed, fresh=False)
    for name, parameter in training.parameters().items():
        for key, value in training.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                path = f"optimizer/state/model/{name}/{key}"
                if value.ndim:
                    found[path] = content(seed, f"{name}/{key}", kind, tuple(parameter.shape))
                else:
                    found[path] = _number(seed, name, key, value.dtype)
    return found


def _values(trained: Trained, seed: object, what: str) -> dict[str, torch.Tensor]:
    kind = getattr(torch, trained.dtype)
    return {name: content(seed, f"{name}{what}", kind, shape) for name, shape in trained.shapes().items()}


def _number(seed: object, name: str, key: str, dtype: torch.dtype) -> torch.Tensor:
    return content(seed, f"{name}/{key}", dtype, ())


def _wrapped(
    trained: Trained, spread: Spread, rank: int, meshes: Meshes, values: Mapping[str, torch.Tensor]
) -> Training:
    module: nn.Module
    if spread.kind == "pipeline stages":
        values = {name: value for name, value in values.items() if STAGES[name] % spread.world == rank}
    if spread.kind == "declared":
        module = _declared(values, rank, spread.world)
    else:
        module = Net(values)
        wrap = _WRAPS.get(spread.kind)
        module = module if wrap is None else wrap(module, spread, meshes)
    parameters = list(module.parameters())
    return Training(module, OPTIMIZERS[trained.optimizer](parameters))


def _ddp(module: nn.Module, spread: Spread, meshes: Meshes) -> nn.Module:
    group = meshes.get(*meshes_of_spread(spread)[0]).get_group()
    wrap: Any = nn.parallel.DistributedDataParallel
    wrapped: nn.Module = wrap(module, process_group=group)
    return wrapped


def _fsdp(module: nn.Module, spread: Spread, meshes: Meshes) -> nn.Module:
    mesh = meshes.get(*meshes_of_spread(spread)[0])

    def along_the_last(one: nn.Parameter) -> Shard | None:
        return Shard(one.ndim - 1) if one.shape[-1] % spread.world == 0 else None

    more: dict[str, Any] = {}
    if spread.kind == "FSDP2, last dimension":
        more["shard_placement_fn"] = along_the_last
    for layer in _layers(module)[: spread.number % 3]:
        fully_shard(layer, mesh=mesh, **more)
    fully_shard(module, mesh=mesh, **more)
    return module


def _tp(module: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(module, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()}, src_data_rank=None)


def _fsdp_around_tp(module: nn.Module, spread: Spread, meshes: Meshes) -> nn.Module:
    mesh = meshes.get(*meshes_of_spread(spread)[0])
    fully_shard(_tp(module, mesh["two"]), mesh=mesh["one"])
    return module


_WRAPS: Final[Mapping[str, Callable[[nn.Module, Spread, Meshes], nn.Module]]] = {
    "DDP": _ddp,
    "FSDP2": _fsdp,
    "FSDP2, last dimension": _fsdp,
    "HSDP": _fsdp,
    "TP": lambda module, spread, meshes: _tp(module, meshes.get(*meshes_of_spread(spread)[0])),
    "FSDP2 around TP": _fsdp_around_tp,
}


def _layers(module: Any) -> Sequence[nn.Module]:
    return [module.first, module.last]


def _declared(values: Mapping[str, torch.Tensor], rank: int, world: int) -> nn.Module:
    """As other frameworks spread it: plain parameters, of which is said where they lie. The first layer is fused of a
    third and the rest where its width allows."""
    width = len(values["first.bias"])
    third = width // (3 * world) * world
    sizes = [size for size in (third, width - third) if size]

    def cut(one: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece.chunk(world)[rank] for piece in torch.split(one, sizes)])

    module = Net(
        {
            **values,
            "first.weight": cut(values["first.weight"]),
            "first.bias": cut(values["first.bias"]),
            "last.weight": values["last.weight"].chunk(world, 1)[rank],
        }
    )
    declare(
        module,
        {
            "first.*": lambda one: fused(one, sizes=sizes, rank=rank, of=world),
            "last.weight": lambda one: shard(one, dim=1, rank=rank, of=world),
            "*": replicated,
        },
    )
    return module
