"""Gives meta tensors memory on load, as the same objects that optimizers, ties and the state refer to."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tenuto.errors import StateError
from tenuto.integrations.torch.meshes import is_dtensor, local_of
from tenuto.model.leaf import LeafSpec
from tenuto.state.declarations import ShardLayout
from tenuto.state.restore.restorer import SWAPS, Restorer, Thunk

_HINT = "build the model on the device that it trains on, or load before anything else refers to its tensors"


def materialise(tensor: torch.Tensor, number: int, spec: LeafSpec, path: str, restorer: Restorer) -> Thunk:
    """Plans giving a meta tensor memory and the bytes of leaf `number`; `tensor` stays the same object."""
    if not _note_filled(tensor, path, restorer):
        return lambda: tensor
    base = restorer.new_base(number, spec, {"as": "torch"}, path)
    return _swapped(tensor, base, path, restorer)


def materialise_part(tensor: torch.Tensor, layout: ShardLayout, number: int, path: str, restorer: Restorer) -> Thunk:
    """`materialise` for a tensor with a layout, a DTensor or a declared one: gives it memory for this rank's part."""
    from tenuto.integrations.torch.sharded import around, sinks

    if not _note_filled(tensor, path, restorer):
        return lambda: tensor
    local = torch.empty_like(local_of(tensor), device=restorer.device if restorer.device is not None else "cpu")
    local = local.detach()
    restorer.want_boxes(number, sinks(local, layout))
    return _swapped(tensor, around(local, tensor) if is_dtensor(tensor) else local, path, restorer)


def _note_filled(tensor: torch.Tensor, path: str, restorer: Restorer) -> bool:
    """Notes that a meta tensor is filled. Returns False if it already is."""
    plan = plans(restorer)
    restorer.restored.append(path)
    if id(tensor) in plan.taken:
        return False
    plan.taken[id(tensor)] = tensor
    return True


def _swapped(tensor: torch.Tensor, base: torch.Tensor, path: str, restorer: Restorer) -> Thunk:
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
    elif type(tensor) is not torch.Tensor and not is_dtensor(tensor):
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


class MetaPlan:
    """The meta tensors that one restore fills."""

    def __init__(self) -> None:
        self.taken: dict[int, Any] = {}


def plans(restorer: Restorer) -> MetaPlan:
    found: MetaPlan = restorer.extra.setdefault("meta", MetaPlan())
    return found


def device_after(tensor: torch.Tensor, restorer: Restorer) -> Any:
    """Returns the device of a tensor after the restore."""
    if not tensor.is_meta:
        return tensor.device
    return torch.device(restorer.device if restorer.device is not None else "cpu")
