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
    # Not by getattr: a mapping with attributes for its keys may make an entry of each that it is asked for.
    if isinstance(getattr(value, "__dict__", {}).get("_metadata"), Mapping):
        return "module" if _is_a_modules(value) else ""
    if _is_optimizers(value):
        return "optimizer"
    if value.keys() >= _SCALER:
        return "GradScaler"
    if "_last_lr" in value and value.keys() & {"last_epoch", "_schedulers"}:
        return "scheduler"
    return ""


def _is_optimizers(value: Mapping[Any, Any]) -> bool:
    """Returns whether parameters are numbers in it, or names as FSDP gives them, which they never are in what a user
    gives to an optimizer, and whether its state is that of these parameters."""
    state, groups = value.get("state"), value.get("param_groups")
    if not (
        isinstance(state, Mapping) and isinstance(groups, list) and all(isinstance(one, Mapping) for one in groups)
    ):
        return False
    parameters = [group.get("params") for group in groups]
    if not all(isinstance(some, list) and all(isinstance(one, int | str) for one in some) for some in parameters):
        return False
    known = {one for some in parameters for one in some}
    return bool(known) and state.keys() <= known


def _is_a_modules(value: Mapping[Any, Any]) -> bool:
    """Returns whether parameters of a module lie where the mapping's tensors do. Looks at every object of the process,
    and only where a mapping looks like a module's state_dict(). Tensors that are no parameters may be the user's own
    views of a copy."""
    tensors = [tensor for tensor in value.values() if isinstance(tensor, torch.Tensor)]
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors):  # of state_dict(keep_vars=True)
        return True
    places = {_place(tensor) for tensor in tensors} - {0}
    return any(
        issubclass(type(found), torch.Tensor) and isinstance(found, torch.nn.Parameter) and _place(found) in places
        for found in gc.get_objects()
    )


def _place(tensor: torch.Tensor) -> int:
    """Returns where the memory of a tensor begins, or of the part of a distributed one that this process holds."""
    part = getattr(tensor, "_local_tensor", None)
    try:
        return (part if isinstance(part, torch.Tensor) else tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own, such as a sparse one
        return 0
