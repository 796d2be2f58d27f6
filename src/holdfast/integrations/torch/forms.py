"""What the leaf of a dense tensor depends on: all of it that two tensors of one form have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch

from holdfast.integrations.torch.device import TORCH_DTYPES, TorchDevice, device_of
from holdfast.model.checkpoint import Json
from holdfast.model.dtypes import DTYPES
from holdfast.state.memory import Geometry

_NAMES: Final = {kind: name for name, kind in TORCH_DTYPES.items() if name in DTYPES and str(kind) == f"torch.{name}"}

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types that are what they seem; any other may compute what it holds, or hold nothing yet."""

Look = tuple[torch.dtype, torch.Size, Any, torch.device, bool, bool, bool, str]


def look(tensor: torch.Tensor) -> Look:
    """Everything of a dense tensor that its leaf depends on, its type, address and values apart."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        _role(tensor),
    )


def _role(tensor: torch.Tensor) -> str:
    """What a tensor is to a module, as its node names it; empty for a mere tensor."""
    # A buffer is a Tensor that says so itself; asking every tensor by isinstance costs more than copying it.
    if type(tensor) is torch.Tensor and not tensor.__dict__:
        return ""
    if isinstance(tensor, torch.nn.Parameter):
        return "param"
    return "buffer" if isinstance(tensor, torch.nn.Buffer) else ""


def about(seen: Look) -> dict[str, Json]:
    """What a node says of a tensor beside its numbers."""
    said: dict[str, Json] = {"as": "torch"}
    if seen[7]:
        said[seen[7]] = True
    if seen[4]:
        said["grad"] = True
    if seen[3].type != "cpu":
        said["device"] = seen[3].type
    return said


@dataclass(frozen=True, slots=True)
class Form:
    """What the leaves of all tensors of one look have in common: dtype name and shape, what a node says of them, what
    copies them, what their memory looks like."""

    spec: tuple[str, tuple[int, ...]]
    about: Json
    device: TorchDevice
    geometry: Geometry


@lru_cache(maxsize=4096)
def form_of(seen: Look) -> Form | None:
    """None for a type that has no name. States have many tensors of few forms."""
    kind, shape, strides, device, _, conjugate, negative, _ = seen
    name = _NAMES.get(kind)
    if name is None:
        return None
    lies = _geometry((kind, shape, strides, device, conjugate, negative))
    return Form((name, tuple(shape)), about(seen), device_of(device), lies)


def geometry(tensor: torch.Tensor) -> Geometry:
    """What tells two views of one address apart: type, shape, strides, conjugate and negative bits."""
    return _geometry((tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg()))


@lru_cache(maxsize=4096)
def _geometry(view: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device, bool, bool]) -> Geometry:
    dtype, shape, strides, device, conjugate, negative = view
    reach = sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    return Geometry(
        str(device),
        0 if 0 in shape else dtype.itemsize * (1 + reach),
        (dtype, shape, strides, (conjugate, negative) if conjugate or negative else None),
    )


def address(tensor: torch.Tensor) -> int:
    """Where the first element lies; an empty tensor lies nowhere and is only the same as itself."""
    return tensor.data_ptr() or id(tensor)
