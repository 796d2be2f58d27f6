"""Modules that wrap another: names without the wrappers' prefixes, and the replicas of DistributedDataParallel.

Its replicas are the parameters, and the buffers that rank 0 broadcasts at every forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from tenuto.integrations.torch.fence import found_in
from tenuto.state.declarations import ShardLayout, absent_layout, replicated_layout

_WRAPPERS: Final = (
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper", "_checkpoint_wrapped_module"),
)


def wrapped_name(module: nn.Module) -> str | None:
    """Returns the attribute with the wrapped module; None for any other module.

    The classes are looked up, not imported: a class that nothing has imported has no instances.
    """
    for home, name, attribute in _WRAPPERS:
        kind = getattr(sys.modules.get(home), name, None)
        if kind is not None and isinstance(module, kind):
            return attribute
    return None


@dataclass(frozen=True, slots=True)
class WrappedModule:
    """A module within the saved one: its prefix in state_dict(), and the same without wrappers."""

    module: nn.Module
    raw: str
    canonical: str
    wrapper: bool


def places(module: nn.Module, raw: str = "", canonical: str = "") -> Iterator[WrappedModule]:
    """Yields `module` and every module below, in the order of state_dict(); a shared one once per name."""
    attribute = wrapped_name(module)
    yield WrappedModule(module, raw, canonical, attribute is not None)
    for name, child in module._modules.items():
        if child is not None:
            yield from places(child, f"{raw}{name}.", canonical if name == attribute else f"{canonical}{name}.")


def own_tensors(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
    """Yields (raw name, canonical name, tensor, whether state_dict() has it) of every parameter and buffer."""
    for place in places(module):
        for name, parameter in place.module._parameters.items():
            if parameter is not None:
                yield place.raw + name, place.canonical + name, parameter, True
        for name, buffer in place.module._buffers.items():
            if buffer is not None:
                persistent = name not in place.module._non_persistent_buffers_set
                yield place.raw + name, place.canonical + name, buffer, persistent


@dataclass(slots=True)
class DDPReplicas:
    """Replicated `parameters` and `buffers` by identity. Only the first rank's buffers count: between two forward
    passes each rank updates its own with its own batch."""

    parameters: set[int] = field(default_factory=set)
    buffers: dict[int, bool] = field(default_factory=dict)
    """By buffer: whether this rank is the first."""

    def __bool__(self) -> bool:
        return bool(self.parameters or self.buffers)

    def layout(self, tensor: torch.Tensor) -> ShardLayout | None:
        """Returns the layout of a buffer; None for any other tensor."""
        first = self.buffers.get(id(tensor))
        return None if first is None else replicated_layout(tensor.shape) if first else absent_layout(tensor.shape)


def replicas(modules: Iterable[nn.Module]) -> DDPReplicas:
    """Returns the replicas in and below these modules; none with a single rank."""
    found = DDPReplicas()
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return found
    for module in modules:
        for place in places(module):
            if place.wrapper and isinstance(place.module, nn.parallel.DistributedDataParallel):
                _gather(place.module, found)
    return found


def _gather(wrapper: nn.parallel.DistributedDataParallel, found: DDPReplicas) -> None:
    group: Any = wrapper.process_group
    if torch.distributed.get_world_size(group) < 2:
        return
    ignored = wrapper.parameters_to_ignore
    for name, parameter in wrapper.module.named_parameters(remove_duplicate=False):
        if name not in ignored:
            found.parameters.add(id(parameter))
    if not wrapper.broadcast_buffers:
        return  # each rank has its own; they are equal only while nothing updates them
    first = torch.distributed.get_rank(group) == 0
    for name, buffer in wrapper.module.named_buffers(remove_duplicate=False):
        if name not in ignored:
            found.buffers[id(buffer)] = first


def replicas_in(state: Any) -> DDPReplicas:
    """Returns the replicas in a state."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return DDPReplicas()
    return replicas(found_in(state)[1])
