"""The random generators that reading a batch may draw from, captured cheaply enough for every batch."""

from __future__ import annotations

import ctypes
import random
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

    numpy takes 60 us to say its state: it is asked again only where the words of its generator have changed, and from
    the second change on each time, since one of two normal numbers that are drawn together changes none of them.
    """

    def __init__(self, *, devices: bool = False) -> None:
        self._devices = devices
        self._words: bytes | None = None
        self._numpy: Mapping[str, Any] | None = None
        self._changes = 0

    def capture(self) -> Captured:
        words = _numpy_words()
        if self._numpy is None or self._changes > 1 or words is None or words != self._words:
            self._changes += 1
            self._words, self._numpy = words, np.random.get_state(legacy=False)
        return Captured(random.getstate(), self._numpy, rng.capture(devices=self._devices))


_WORDS: Final = 625 * 4


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
