"""Modules that wrap another, and what data parallelism makes of them: names without the wrappers' prefixes, and the
replicas of DistributedDataParallel and of FSDP2.

The parameters of the former are replicas. So are the buffers of both: the first rank's count, whether rank 0 broadcasts
them at every forward pass or each rank updates its own with its own batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from tenuto.errors import StateError
from tenuto.integrations.torch.fence import found_in
from tenuto.integrations.torch.meshes import is_dtensor
from tenuto.record import record
from tenuto.state.declarations import ShardLayout, absent_layout, replicated_layout
from tenuto.state.tree import ROOT

_FSDP1: Final = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_FSDP2: Final = ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule")
_WRAPPERS: Final = (
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (*_FSDP1, "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper", "_checkpoint_wrapped_module"),
)


def wrapped_name(module: nn.Module) -> str | None:
    """Returns the attribute with the wrapped module; None for any other module."""
    return next((attribute for home, name, attribute in _WRAPPERS if _is(module, home, name)), None)


def _is(module: nn.Module, home: str, name: str) -> bool:
    """Returns whether the module is an instance of a class, which is looked up and not imported: a class that nothing
    has imported has no instances."""
    kind = getattr(sys.modules.get(home), name, None)
    return kind is not None and isinstance(module, kind)


def refuse_unknown(module: nn.Module, path: str) -> None:
    """Raises StateError for FSDP1 over several ranks: it hides what each rank has of its parameters."""
    for place in places(module):
        if _is(place.module, *_FSDP1) and torch.distributed.get_world_size(place.module.process_group) > 1:  # type: ignore[arg-type]
            raise StateError(
                f"{path or ROOT}: FullyShardedDataParallel (FSDP1) is not understood: its parameters do not say which "
                "part of them a rank has",
                subject=path or ROOT,
                hint="use FSDP2: torch.distributed.fsdp.fully_shard(model) where FullyShardedDataParallel(model) is",
            )


@record
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


def unwrapped_names(module: nn.Module) -> Callable[[str], str]:
    """Returns a function that takes the prefixes of wrappers off a name below `module`."""
    prefixes = {place.raw: place.canonical for place in places(module)}
    longest_first = sorted(prefixes, key=len, reverse=True)

    def unwrapped(name: str) -> str:
        raw = next(raw for raw in longest_first if name.startswith(raw))
        return prefixes[raw] + name[len(raw) :]

    return unwrapped


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
class DataParallelReplicas:
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


def replicas(modules: Iterable[nn.Module]) -> DataParallelReplicas:
    """Returns the replicas in and below these modules; none with a single rank."""
    found = DataParallelReplicas()
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return found
    for module in modules:
        for place in places(module):
            if place.wrapper and isinstance(place.module, nn.parallel.DistributedDataParallel):
                _gather(place.module, found)
            elif _is(place.module, *_FSDP2):  # of several around one buffer the innermost, which comes last
                _gather_sharded(place.module, found)
    return found


def _gather(wrapper: nn.parallel.DistributedDataParallel, found: DataParallelReplicas) -> None:
    group: Any = wrapper.process_group
    if torch.distributed.get_world_size(group) < 2:
        return
    ignored = wrapper.parameters_to_ignore
    for name, parameter in wrapper.module.named_parameters(remove_duplicate=False):
        if name not in ignored:
            found.parameters.add(id(parameter))
    first = torch.distributed.get_rank(group) == 0
    for name, buffer in wrapper.module.named_buffers(remove_duplicate=False):
        if name not in ignored:
            found.buffers[id(buffer)] = first


def _gather_sharded(module: nn.Module, found: DataParallelReplicas) -> None:
    first = _is_first(module)
    if first is not None:
        found.buffers.update({id(buffer): first for buffer in module.buffers() if not is_dtensor(buffer)})


def _is_first(module: nn.Module) -> bool | None:
    """Returns whether this rank is the first of those that share a module of FSDP2; None where it shares it with no
    other. Ranks that tensor parallelism sets apart have a first one each."""
    for one in module.modules():
        if not _is(one, *_FSDP2):
            continue
        state: Any = one._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        about = getattr(groups[0], "mesh_info", None)
        if about is None:  # it has no parameter that is not in a module below, which knows its ranks
            continue
        along = [dim for dim in (about.shard_mesh_dim, about.replicate_mesh_dim) if dim is not None]
        at = about.mesh.get_coordinate()
        if at is None or all(about.mesh.size(dim) < 2 for dim in along):
            return None
        return all(at[dim] == 0 for dim in along)
    return None


def unsynchronised(module: nn.Module) -> list[str]:
    """Returns the names of the saved buffers in a data-parallel module that nothing keeps equal on its ranks."""
    shared = replicas([module]).buffers
    for place in places(module) if shared else ():
        one = place.module
        broadcast = isinstance(one, nn.parallel.DistributedDataParallel) and one.broadcast_buffers
        if broadcast or isinstance(one, nn.SyncBatchNorm):
            for buffer in one.buffers():
                shared.pop(id(buffer), None)
    return [name for _, name, tensor, persistent in own_tensors(module) if persistent and id(tensor) in shared]


def replicas_in(state: Any) -> DataParallelReplicas:
    """Returns the replicas in a state."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return DataParallelReplicas()
    return replicas(found_in(state)[1])
