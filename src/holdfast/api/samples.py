"""A few elements of each tensor: what tells that it was changed by what no count of changes shows, as when averaged
weights are swapped in through `.data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

ALONG: Final = (1, 16, 4, 3)
"""Elements that are looked at along each dimension, at most, by how many dimensions a tensor has; 2 where it has
more."""


def samples(sources: Sequence[Any], most: int | None = None) -> dict[int, Any]:
    """Of each of the `sources` that counts its changes, by its number; `most`: of so many of them at most, evenly
    spread. They are copied where the tensors are, so that nothing waits for a device."""
    every = 1 if most is None else max(1, -(-len(sources) // most))
    return {at: _sample(sources[at]) for at in range(0, len(sources), every) if counts_changes(sources[at])}


def unchanged(before: Mapping[int, Any], sources: Sequence[Any]) -> bool:
    """Whether what was looked at `before` is still the same. Waits for the device."""
    return all(_same(few, _sample(sources[at])) for at, few in before.items())


def counts_changes(source: Any) -> bool:
    """Whether it is a tensor, which counts what is done to it in place."""
    return getattr(source, "_version", None) is not None and hasattr(source, "data_ptr")


def _sample(source: Any) -> Any:
    shape = source.shape
    along = ALONG[len(shape)] if len(shape) < len(ALONG) else 2
    return source.detach()[tuple(slice(None, None, max(1, -(-size // along))) for size in shape)].clone()


def _same(few: Any, now: Any) -> bool:
    try:
        if few.equal(now):
            return True
    except RuntimeError:  # a dtype whose values torch does not compare
        pass
    return str(few.tolist()) == str(now.tolist())  # where NaN equals itself
