"""torch's part of two commands: `.pt` files for `tenuto restore`, and the sample state of `tenuto bench`.

A `.pt` file holds nested dicts, tensors and plain values, for `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import collections
import enum
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from tenuto.errors import SaveFailed, StateError
from tenuto.state.frameworks import Tagged

if TYPE_CHECKING:
    from tenuto.bench.measure import Arrays, Sample


_UNCHANGED_TYPES = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)


def write_file(state: Any, file: IO[bytes]) -> list[str]:
    """Writes `state`. Returns descriptions of what was converted. Raises StateError if torch refuses."""
    converter = _Plain()
    plain = converter.convert(state)
    try:
        torch.save(plain, file)
    except (TypeError, AttributeError) as error:
        raise StateError(f"torch cannot write the state: {error}") from error
    return [f"{count} of type {kind} written as {form}" for (kind, form), count in converter.changed.items()]


def read_back(path: Path) -> None:
    """Reads what `write_file` has written as its reader will. Raises SaveFailed if torch refuses."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        words = str(error).splitlines()[0]
        raise SaveFailed(f"what was written is refused by torch.load(weights_only=True): {words}") from error


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


def torch_sample(sizes: Sequence[int]) -> Sample:
    """Returns tensors of these lengths in bytes, copied by torch with its default threads."""
    from tenuto.bench.measure import Sample, make_arrays

    arrays = make_arrays(sizes)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def copy(into: Arrays) -> None:
        for name, tensor in tensors.items():
            torch.from_numpy(into[name]).copy_(tensor)

    words = f"torch {torch.__version__} tensors, {torch.get_num_threads()} threads"
    return Sample(arrays, {"state": tensors}, copy, words)
