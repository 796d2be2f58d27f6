"""The random generators of many ranks: which are equal on all of them, and the state of a new rank.

Generators that are equal on all ranks (a shuffle that each computes for itself relies on it) stay equal on any number
of ranks. The others belong to their rank: a new rank gets its own stream, derived from rank 0's and its number.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tenuto.state.frameworks import named
from tenuto.state.position.rng import PLAIN

MT19937: Final = "MT19937"


def marks(captured: Mapping[str, Any]) -> dict[str, str]:
    """Returns a digest of the state of each generator, or kind of device, by name: "python", "numpy", "torch/cpu", …
    Equal states have equal digests."""
    return {name: _hashed(b"", state).hexdigest()[:32] for name, state in _each(captured)}


def alike(ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the names with equal digests on all ranks, sorted."""
    first, *others = ranks
    return sorted(name for name, mark in first.items() if all(other.get(name) == mark for other in others))


def names(captured: Mapping[str, Any]) -> list[str]:
    """Returns the names of the generators in a captured state, in its order."""
    return [name for name, _ in _each(captured)]


def of_new_rank(captured: Mapping[str, Any], alike: Collection[str], rank: int) -> dict[str, Any]:
    """Returns the state of a rank that the checkpoint does not know: rank 0's `captured` for generators that are alike
    on all, else one derived from it and `rank`. Devices absent here are left out."""
    found: dict[str, Any] = {}
    for name, state in _each(captured):
        kind, _, part = name.partition("/")
        new = state if name in alike else _derived(kind, part, state, _seed(name, state, rank))
        if new is None:
            continue
        if part:
            found.setdefault(kind, {})[part] = new
        else:
            found[kind] = new
    return found


def _each(captured: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for kind, state in captured.items():
        if kind not in PLAIN:
            yield from ((f"{kind}/{part}", inner) for part, inner in state.items())
        else:
            yield kind, state


def _seed(name: str, state: Any, rank: int) -> int:
    return int.from_bytes(_hashed(f"{name} {rank}\n".encode(), state).digest(), "big")


def _hashed(head: bytes, state: Any) -> hashlib._Hash:
    hashed = hashlib.sha256(head)
    for piece in _spelled(state):
        hashed.update(piece)
    return hashed


def _derived(kind: str, part: str, state: Any, seed: int) -> Any:
    """Returns a state in the form of `state`; None where none can be made here."""
    if kind == "python":
        version, keys, gauss = random.Random(seed).getstate()
        return {"version": version, "keys": np.array(keys, dtype=np.uint32), "gauss": gauss}
    if kind == "numpy":
        if state.get("bit_generator") != MT19937:
            return None
        return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed))).get_state(legacy=False)
    framework = named(kind)
    if framework is None or not framework.loaded or not framework.rng:
        return None
    return framework.ability("rng").derived(part, state, seed)


def _spelled(value: Any) -> Iterator[bytes]:
    """Yields bytes that are equal for equal states, captured or restored."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield f"{key}:".encode()
            yield from _spelled(value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _spelled(one)
    elif hasattr(value, "__array__") and not isinstance(value, np.generic):
        yield np.ascontiguousarray(value).tobytes()
    else:
        yield f"{value!r};".encode()
