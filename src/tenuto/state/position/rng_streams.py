"""The random generators of many ranks: which are the same on all of them, and what a rank begins with that is new.

What is equal on all ranks (a shuffle that each makes for itself relies on it) stays equal on any number of them. What
differs belongs to its rank: a new rank gets a stream of its own, which follows from the first rank's and its number.
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
    """A digest of the state of each generator, or kind of device, by name: "python", "numpy", "torch/cpu", … Equal for
    equal states."""
    return {name: _hashed(b"", state).hexdigest()[:32] for name, state in _each(captured)}


def alike(ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """The names whose marks are there and equal on all ranks, sorted."""
    first, *others = ranks
    return sorted(name for name, mark in first.items() if all(other.get(name) == mark for other in others))


def names(captured: Mapping[str, Any]) -> list[str]:
    """Of the generators of a captured state, in its order."""
    return [name for name, _ in _each(captured)]


def of_new_rank(captured: Mapping[str, Any], alike: Collection[str], rank: int) -> dict[str, Any]:
    """What a rank begins with that the checkpoint does not know: the first rank's state, `captured`, of what is alike
    on all; of all else one that follows from it and from `rank`. Devices that are not here are left out."""
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
    """A state in the form of `state`; None where none can be made here."""
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
    """Bytes that are equal for equal states, as they are captured or restored."""
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
