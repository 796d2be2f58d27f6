"""What DistributedDataParallel keeps the same on all ranks: parameters, and buffers that it overwrites with the first
rank's at every forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tenuto.integrations.torch.fence import found_in
from tenuto.integrations.torch.wrappers import places
from tenuto.state.declarations import ShardLayout, everywhere, nowhere


@dataclass(slots=True)
class DDPReplicas:
    """`parameters` and `buffers` by identity. Of the buffers only the first rank's counts: in between two forward
    passes every rank has moved its own on by its own batch."""

    parameters: set[int] = field(default_factory=set)
    buffers: dict[int, bool] = field(default_factory=dict)
    """Whether this rank is the first."""

    def __bool__(self) -> bool:
        return bool(self.parameters or self.buffers)

    def layout(self, tensor: torch.Tensor) -> ShardLayout | None:
        """How a buffer lies; None for any other tensor."""
        first = self.buffers.get(id(tensor))
        return None if first is None else everywhere(tensor.shape) if first else nowhere(tensor.shape)


def replicas(modules: Iterable[nn.Module]) -> DDPReplicas:
    """What is replicated in and below these modules; nothing where there is one rank."""
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
        return  # each rank has its own, and they are the same only where nothing moves them
    first = torch.distributed.get_rank(group) == 0
    for name, buffer in wrapper.module.named_buffers(remove_duplicate=False):
        if name not in ignored:
            found.buffers[id(buffer)] = first


def replicas_in(state: Any) -> DDPReplicas:
    """What is replicated in a state."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return DDPReplicas()
    return replicas(found_in(state)[1])
