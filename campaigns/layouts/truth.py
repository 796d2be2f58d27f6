"""What is saved, as whole tensors: every one follows from a seed and its path, whoever holds which part of it.

Nothing here, and nothing in `places`, `meshes` and `trainings`, asks the product where anything lies: parts are cut out
of these tensors by torch, and compared with what comes back.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import torch

DTYPES: Final = (
    *("float32",) * 4,
    *("bfloat16",) * 3,
    *("float8_e4m3fn", "float8_e5m2", "float16", "float64"),
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("complex64", "complex128"),
)
LENGTHS: Final = (1, 1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 17, 24)
EMPTY: Final = 0.06
"""How many of the leaves have no elements."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor by its whole shape."""

    path: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def kind(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def draw_leaves(chance: random.Random, count: int) -> list[Leaf]:
    """Awkward shapes: primes, ones, none at all; more ranks than indices."""
    found = []
    for number in range(count):
        shape = tuple(chance.choice(LENGTHS) for _ in range(chance.choice((0, 1, 1, 2, 2, 2, 3, 4))))
        if shape and chance.random() < EMPTY:
            at = chance.randrange(len(shape))
            shape = (*shape[:at], 0, *shape[at + 1 :])
        found.append(Leaf(f"t{number}", chance.choice(DTYPES), shape))
    return found


def content(seed: object, path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Every bit drawn: nan with any payload, subnormals and negative noughts among them."""
    word = hashlib.sha256(f"{seed} {path}".encode()).digest()
    numbers = np.random.Generator(np.random.PCG64(int.from_bytes(word[:16], "little")))
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    data = bytearray(numbers.bytes(prod(shape) * dtype.itemsize))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def of_leaf(seed: object, leaf: Leaf) -> torch.Tensor:
    return content(seed, leaf.path, leaf.kind, leaf.shape)


def bits(value: Any) -> bytes:
    """The bytes of a tensor or array in row-major order."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    found: bytes = value.tobytes()
    return found


def form(value: Any) -> tuple[str, tuple[int, ...]]:
    return str(value.dtype).removeprefix("torch."), tuple(value.shape)


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What is not there, there beside it, of another form, or has another bit."""
    told = [f"{path} is missing" for path in wanted.keys() - found.keys()]
    told += [f"{path} is not wanted" for path in found.keys() - wanted.keys()]
    for path in sorted(wanted.keys() & found.keys()):
        one, other = found[path], wanted[path]
        if form(one) != form(other):
            told.append(f"{path} is {form(one)} and not {form(other)}")
        elif bits(one) != bits(other):
            told.append(f"{path} has other bits")
    return told


def digest(values: Mapping[str, Any]) -> str:
    """Of all tensors by path, with their forms."""
    found = hashlib.sha256()
    for path in sorted(values):
        found.update(f"{path} {form(values[path])} ".encode())
        found.update(bits(values[path]))
    return found.hexdigest()
