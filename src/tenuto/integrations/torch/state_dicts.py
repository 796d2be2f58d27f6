"""Which mappings torch's objects have returned from `state_dict()`: snapshots, which do not follow training."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, Final

import torch

_SCALER: Final = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})


def owner(value: Mapping[Any, Any]) -> str:
    """Returns what kind of object the mapping is the state_dict() of; empty for any other mapping.

    A copy of a module's state_dict() is a mapping of tensors like any other: it may be an average of weights, which
    somebody updates in place.
    """
    if isinstance(getattr(value, "_metadata", None), Mapping):
        return "module" if _is_shared(value) else ""
    if _is_optimizers(value):
        return "optimizer"
    if value.keys() >= _SCALER:
        return "GradScaler"
    if "_last_lr" in value and value.keys() & {"last_epoch", "_schedulers"}:
        return "scheduler"
    return ""


def _is_optimizers(value: Mapping[Any, Any]) -> bool:
    """Returns whether parameters are numbers in it, or names as FSDP gives them, which they never are in what a user
    gives to an optimizer."""
    groups = value.get("param_groups")
    return (
        isinstance(value.get("state"), Mapping)
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and _are_keys(group.get("params")) for group in groups)
    )


def _are_keys(params: Any) -> bool:
    return isinstance(params, list) and all(isinstance(one, int | str) for one in params)


def _is_shared(value: Mapping[Any, Any]) -> bool:
    """Returns whether tensors of a module lie where the mapping's do. Looks at every object of the process, and only
    where a mapping looks like a module's state_dict()."""
    inner = [_local(tensor) for tensor in value.values() if isinstance(tensor, torch.Tensor)]
    own = {id(tensor) for tensor in (*value.values(), *inner)}
    places = {_place(tensor) for tensor in inner} - {0}
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in value.values()):  # of state_dict(keep_vars=True)
        return True
    return any(
        issubclass(type(found), torch.Tensor) and id(found) not in own and _place(found) in places
        for found in gc.get_objects()
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a distributed tensor that this process holds; any other tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def _place(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own, such as a sparse one
        return 0
