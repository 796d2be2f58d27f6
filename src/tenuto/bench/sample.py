"""A state to measure with: as many bytes and leaves as the user's own, with incompressible values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tenuto.codec.digest import digest
from tenuto.errors import UsageError

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """A state to measure with.

    arrays: the state in host memory, by path.
    state: the same memory as a training would hold it, ready to save.
    copy: `copy(into)` copies every array into the one of the same name, as the framework does.
    made_of: a description in words.
    """

    arrays: Arrays
    state: Mapping[str, Any]
    copy: Callable[[Arrays], None]
    made_of: str

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def fingerprint(self) -> list[bytes]:
        return [digest(array) for array in self.arrays.values()]


def even_sizes(nbytes: int, leaves: int) -> list[int]:
    """Returns `leaves` equal lengths in bytes, multiples of 4. Raises UsageError if that leaves nothing for each."""
    each = nbytes // leaves // 4 * 4
    if each < 4:
        raise UsageError(f"{nbytes} bytes are too few for {leaves} leaves", hint="a larger --size, or fewer --leaves")
    return [each] * leaves


def make_arrays(sizes: Sequence[int]) -> Arrays:
    """Builds arrays of these lengths in bytes with random bits: float32 if the length allows, else uint8."""
    generator = np.random.default_rng(0)
    wide = len(str(max(len(sizes) - 1, 0)))
    found: Arrays = {}
    for number, length in enumerate(sizes):
        words = generator.integers(0, 2**64, -(-length // 8), np.uint64, endpoint=False)
        array = words.view(np.uint8)[:length]
        found[f"leaf-{number:0{wide}d}"] = array.view(np.float32) if length % 4 == 0 else array
    return found


def numpy_sample(sizes: Sequence[int]) -> Sample:
    """Builds the state as numpy arrays, which copies on one thread."""
    arrays = make_arrays(sizes)

    def copy(into: Arrays) -> None:
        for name, array in arrays.items():
            np.copyto(into[name], array)

    return Sample(arrays, {"state": arrays}, copy, "numpy arrays")
