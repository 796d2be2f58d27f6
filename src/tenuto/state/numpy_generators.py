"""The states of numpy's random generators as nodes, checked before they are set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.errors import CorruptionError, Unserialisable
from tenuto.model.records import Json
from tenuto.state.encode.walker import StateWalker
from tenuto.state.frameworks import type_name
from tenuto.state.tree import ROOT

if TYPE_CHECKING:
    from tenuto.state.restore.restorer import Thunk


MT19937_WORDS: Final = 624
PHILOX_WORDS: Final = 4
_BIT_GENERATORS: Final = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}


def generator_node(value: Any, path: str, writer: StateWalker) -> Json:
    state = value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else _bits(value).state
    name = type(value).__name__
    if name not in _BIT_GENERATORS and name not in ("Generator", "RandomState"):
        raise Unserialisable(f"{path or ROOT}: a bit generator {type_name(type(value))} is not known", subject=path)
    return {"!": "nprandom", "type": name, "v": writer.encode(state, path)}


def _bits(value: Any) -> Any:
    return value.bit_generator if isinstance(value, np.random.Generator) else value


def set_generator(value: Any, state: Any, path: str) -> Any:
    """Sets the generator `value` to `state` and returns it. Raises CorruptionError for anything but its state."""
    try:
        check_generator(state)
        if isinstance(value, np.random.RandomState):
            value.set_state(state)
        else:
            _bits(value).state = state
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{path or ROOT}: no state of a numpy {type(value).__name__} ({error})", subject=path
        ) from None
    return value


def check_generator(state: Any) -> None:
    """Raises ValueError, or the error of a missing part, for a state with a position outside its words: numpy does not
    check it, and the next draw would read memory there."""
    if state["bit_generator"] == "MT19937":
        inner = state["state"]
        words, at, last = np.shape(inner["key"]) == (MT19937_WORDS,), inner["pos"], MT19937_WORDS
    elif state["bit_generator"] == "Philox":
        words, at, last = np.shape(state["buffer"]) == (PHILOX_WORDS,), state["buffer_pos"], PHILOX_WORDS
    else:
        return
    if not words or not 0 <= at <= last:
        raise ValueError("key or position has the wrong size")


def new_generator(node: Json, state: Thunk, path: str) -> Any:
    """Makes a generator of the kind that the node and the state name, with its state not set yet."""
    values = state()
    name = values.get("bit_generator") if isinstance(values, dict) else None
    bits = _BIT_GENERATORS.get(str(name))
    if bits is None:
        raise CorruptionError(f"{path or ROOT}: a numpy generator of kind {name!r} is not known", subject=path)
    if node.get("type") == "Generator":
        return np.random.Generator(bits())
    return np.random.RandomState(bits()) if node.get("type") == "RandomState" else bits()
