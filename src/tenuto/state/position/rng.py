"""The global random generators as plain values: Python's `random`, numpy's legacy generator, and those of frameworks.

Capturing never imports a framework: only those the program has imported are asked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tenuto.errors import StateMismatch
from tenuto.state.frameworks import loaded, named
from tenuto.state.numpy_generators import check_generator

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
        raise StateMismatch(f"this is no state of Python's random module: {error}", subject="rng/python") from error


def _apply_numpy(state: Mapping[str, Any]) -> None:
    try:
        found = _plain(state)
        check_generator(found)
        np.random.set_state(found)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateMismatch(f"this is no state of numpy's global generator: {error}", subject="rng/numpy") from error


def _plain(value: Any) -> Any:
    """Converts to real dicts and arrays, which numpy requires, whatever a restore returned."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return np.asarray(value) if hasattr(value, "__array__") and not isinstance(value, np.generic) else value
