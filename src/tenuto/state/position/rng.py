"""The global random generators as plain values: Python's `random`, numpy's legacy generator, and those of frameworks.

Capturing never imports a framework: only those the program has imported are asked.

Generators that are equal on all ranks (a shuffle that each computes for itself relies on it) stay equal on any number
of ranks. The others belong to their rank: a new rank gets its own stream, derived from rank 0's and its number.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tenuto.errors import StateMismatch
from tenuto.state.frameworks import loaded, named
from tenuto.state.numpy_arrays import check_generator

PLAIN: Final = ("python", "numpy")
"""The generators that every program has."""


def capture(*, frameworks: bool = True) -> dict[str, Any]:
    """Returns the state of every global generator, as fresh values.

    - `python`: `version`, `keys` (uint32 [625], the last one the position), `gauss` (float or None).
    - `numpy`: `numpy.random.get_state(legacy=False)`.
    - one entry per framework.
    """
    version, keys, gauss = random.getstate()
    out: dict[str, Any] = {
        "python": {"version": version, "keys": np.array(keys, dtype=np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }
    if frameworks:
        out.update((framework.name, module.capture()) for framework, module in loaded("rng"))
    return out


def apply(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Sets the generators to `state`. Returns remarks on parts without a counterpart here (an absent device, an unused
    framework). Raises StateMismatch for a value that is no generator state."""
    notes: list[str] = []
    if "python" in state:
        _apply_python(state["python"])
    if "numpy" in state:
        _apply_numpy(state["numpy"])
    for name in (name for name in state if name not in PLAIN):
        framework = named(name)
        if framework is not None and framework.loaded and framework.rng:
            notes.extend(framework.ability("rng").apply(state[name]))
        else:
            notes.append(
                f"the checkpoint holds random number generators of {name}, which this program has not imported"
            )
    return tuple(notes)


def _apply_python(state: Mapping[str, Any]) -> None:
    try:
        keys = tuple(int(key) for key in np.asarray(state["keys"]).tolist())
        random.setstate((int(state["version"]), keys, state["gauss"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateMismatch(f"this is not a state of Python's random module: {error}", subject="rng/python") from error


def _apply_numpy(state: Mapping[str, Any]) -> None:
    try:
        found = _plain(state)
        check_generator(found)
        np.random.set_state(found)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateMismatch(f"this is not a state of numpy's global generator: {error}", subject="rng/numpy") from error


def _plain(value: Any) -> Any:
    """Converts to real dicts and arrays, which numpy requires, whatever a restore returned."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return np.asarray(value) if hasattr(value, "__array__") and not isinstance(value, np.generic) else value


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
    """Returns the state of a rank that the checkpoint does not know: another's `captured` for generators that are
    alike on all, else one derived from it and `rank`. Devices absent here are left out."""
    found: dict[str, Any] = {}
    for name, state in _each(captured):
        kind, _, part = name.partition("/")
        seed = int.from_bytes(_hashed(f"{name} {rank}\n".encode(), state).digest(), "big")
        new = state if name in alike else _derived(kind, part, state, seed)
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
