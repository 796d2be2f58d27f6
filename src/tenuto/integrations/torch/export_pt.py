"""Writes a restored state as a `.pt` file for `torch.load(weights_only=True)`: nested dicts, tensors, plain values."""

from __future__ import annotations

import collections
import enum
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch

from tenuto.errors import StateError
from tenuto.state.frameworks import Tagged

_UNCHANGED_TYPES = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)


def write(state: Any, file: IO[bytes]) -> list[str]:
    """Writes `state`. Returns descriptions of what was converted. Raises StateError if torch refuses."""
    converter = _Plain()
    plain = converter.convert(state)
    try:
        torch.save(plain, file)
    except (TypeError, AttributeError) as error:
        raise StateError(f"torch cannot write the state: {error}") from error
    return [f"{count} of type {kind} written as {form}" for (kind, form), count in converter.changed.items()]


class _Plain:
    """Converts values to those that torch reads without running code, and counts the conversions."""

    def __init__(self) -> None:
        self.changed: collections.Counter[tuple[str, str]] = collections.Counter()

    def convert(self, value: Any) -> Any:
        if type(value) in _UNCHANGED_TYPES:
            return value
        if isinstance(value, torch.Tensor):
            return value.detach()
        if isinstance(value, Mapping):
            return {self.convert(key): self.convert(inner) for key, inner in value.items()}
        if isinstance(value, tuple):
            return tuple(self.convert(inner) for inner in value)
        if isinstance(value, (list, collections.deque)):
            return [self.convert(inner) for inner in value]
        if isinstance(value, (set, frozenset)):
            return {self.convert(inner) for inner in value}
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, Tagged):
            return self._as(value, value.type_name, self.convert(value.value), "what it holds")
        if isinstance(value, np.generic):
            return self._as(value, "", self.convert(value.item()), "a Python number")
        if isinstance(value, np.ndarray):
            try:
                return self._as(value, "", torch.from_numpy(np.ascontiguousarray(value)), "a tensor")
            except TypeError:
                return self._as(value, "", self.convert(value.tolist()), "a list")
        if isinstance(value, torch.Generator):
            return self._as(value, "", value.get_state(), "its state")
        if isinstance(value, enum.Enum):
            return self._as(value, "", self.convert(value.value), "its value")
        return self._as(value, "", str(value), "text")

    def _as(self, value: Any, name: str, plain: Any, form: str) -> Any:
        self.changed[name or type(value).__qualname__, form] += 1
        return plain
