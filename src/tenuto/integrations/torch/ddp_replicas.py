"""The replicas of DistributedDataParallel: parameters, and buffers that rank 0 broadcasts at every forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tenuto.integrations.torch.fence import found_in
from tenuto.integrations.torch.wrappers import places
from tenuto.state.declarations import ShardLayout, absent_layout, replicated_layout


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
