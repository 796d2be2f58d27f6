"""The random generators that reading a batch may draw from, captured cheaply enough for every batch."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from tenuto.integrations.torch import rng


class Captured(NamedTuple):
    """The states of a moment; `in_full` returns them in the form of a checkpoint."""

    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    torch: Mapping[str, Any]


class HostGenerators:
    """Captures Python's, numpy's and torch's generators.

    devices: those of torch's devices too, as far as training has begun to use them.

    Python takes 10 us and numpy 60 us to say their states. They are asked again only where the words of their
    generators have changed; numpy from the second change on each time: one of two normal numbers that are drawn
    together changes none of them.
    """

    def __init__(self, *, devices: bool = False) -> None:
        self._devices = devices
        self._python_words: tuple[bytes, Any] | None = None
        self._python: tuple[Any, ...] = ()
        self._words: bytes | None = None
        self._numpy: Mapping[str, Any] | None = None
        self._changes = 0

    def capture(self) -> Captured:
        drawn = _python_words()
        if drawn is None or drawn != self._python_words:
            self._python_words, self._python = drawn, random.getstate()
        words = _numpy_words()
        if self._numpy is None or self._changes > 1 or words is None or words != self._words:
            self._changes += 1
            self._words, self._numpy = words, np.random.get_state(legacy=False)
        return Captured(self._python, self._numpy, rng.capture(devices=self._devices))


def _python_words() -> tuple[bytes, Any] | None:
    """Returns the words of Python's global generator, and the normal number that it holds back; None where they do not
    lie where CPython has them."""
    generator = _python_generator()
    return None if generator is None else (ctypes.string_at(_words_of(generator), _WORDS), generator.gauss_next)


_WORDS: Final = 625 * 4


def _words_of(generator: random.Random) -> int:
    return id(generator) + object.__basicsize__


@functools.cache
def _python_generator() -> Any:
    """Returns the object behind `random.getstate` if its memory is what it says of itself: a position and 624 words."""
    generator: Any = getattr(random.getstate, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    if random.Random.__basicsize__ < object.__basicsize__ + _WORDS:
        return None
    *words, position = generator.getstate()[1]
    said = np.array([position, *words], dtype=np.uint32).tobytes()
    return generator if ctypes.string_at(_words_of(generator), _WORDS) == said else None


def _numpy_words() -> bytes | None:
    """Returns the words of numpy's global generator; None if it is another kind than numpy's own."""
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _WORDS)


def in_full(captured: Captured) -> dict[str, Any]:
    """Returns what was captured as `state.position.rng.apply` takes it."""
    version, keys, gauss = captured.python
    python = {"version": version, "keys": np.array(keys, dtype=np.uint32), "gauss": gauss}
    return {"python": python, "numpy": captured.numpy, "torch": dict(captured.torch)}
