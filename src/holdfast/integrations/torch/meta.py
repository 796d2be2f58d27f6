"""Targets on the meta device: given memory on load, as the same objects that optimizers, ties and the state hold."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from holdfast.errors import StateError
from holdfast.model.leaf import LeafSpec
from holdfast.state.restorer import SWAPS, Restorer, Thunk

_HINT = "build the model on the device that it trains on, or load before anything else refers to its tensors"


def materialise(tensor: torch.Tensor, number: int, spec: LeafSpec, path: str, restorer: Restorer) -> Thunk:
    """Plans giving a meta tensor memory and the bytes of leaf `number`; `tensor` stays the same object."""
    plan = plans(restorer)
    restorer.restored.append(path)
    if id(tensor) in plan.taken:
        return lambda: tensor
    plan.taken[id(tensor)] = tensor
    base = restorer.new_base(number, spec, {"as": "torch"}, path)
    if weakref.getweakrefcount(tensor):
        restorer.faults.append(
            f"{path}: a meta tensor that something holds a weak reference to cannot be given memory ({_HINT})"
        )
    restorer.later(path, lambda: _swap(tensor, base, path), SWAPS)
    return lambda: tensor


def _swap(tensor: torch.Tensor, base: torch.Tensor, path: str) -> None:
    made: torch.Tensor = base.detach()
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    elif type(tensor) is not torch.Tensor:
        made = made.as_subclass(type(tensor))
    if made.requires_grad != tensor.requires_grad:
        made.requires_grad_(tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise StateError(
            f"{path}: a meta tensor that cannot be given memory: {error}", subject=path, hint=_HINT
        ) from error


class Plan:
    """The meta tensors that one restore fills."""

    def __init__(self) -> None:
        self.taken: dict[int, Any] = {}


def plans(restorer: Restorer) -> Plan:
    found: Plan = restorer.extra.setdefault("meta", Plan())
    return found


def device_after(tensor: torch.Tensor, restorer: Restorer) -> Any:
    """Where a tensor will lie once the restore is done."""
    if not tensor.is_meta:
        return tensor.device
    return torch.device(restorer.device if restorer.device is not None else "cpu")
