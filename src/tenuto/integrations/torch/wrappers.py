"""Modules that wrap another: their prefixes are left out of names where the wrapper's instance is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

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
