"""A sampler whose order follows from a seed and an epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final

import torch
from torch.utils.data import Sampler

from holdfast.errors import StateMismatch, UsageError

_SLICE: Final = 8192
"""Indices turned into Python ints at a time: a permutation of 10^9 samples stays a tensor."""


class ResumableSampler(Sampler[int]):
    """Draws every sample of `data_source` once per epoch, in an order that depends on (seed, epoch) and nothing else.

    No draw from a global generator takes part, so dropout, augmentation or another loader never change the order, and
    any position of any epoch is reached without replaying the ones before. `seed=None` takes `torch.initial_seed()`
    when the first epoch begins; it is part of the state, so a resumed run keeps it.

    `state_dict` counts what this sampler's iterator has *drawn*, which is what torchdata's StatefulDataLoader asks for
    and what training has seen where nothing prefetches. `holdfast.Checkpointer(data=loader)` counts what was delivered
    to training, and so is right with prefetching workers too.
    """

    def __init__(self, data_source: Sized, *, shuffle: bool = True, seed: int | None = None) -> None:
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise UsageError(f"seed must fit in 64 bits, not {seed}", subject="seed")
        self.data_source = data_source
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._drawn = 0
        self._placed = True
        """The next iteration starts at (epoch, drawn), instead of at the next epoch's beginning."""

    def __len__(self) -> int:
        return len(self.data_source)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of `epoch` (0, 1, ...), from its beginning."""
        self.epoch, self._drawn, self._placed = epoch, 0, True

    def __iter__(self) -> Iterator[int]:
        if not self._placed and self._drawn:
            self.epoch, self._drawn = self.epoch + 1, 0
        self._placed = False
        order = self._order(self.epoch)
        length = len(self.data_source)
        for begin in range(self._drawn, length, _SLICE):
            stop = min(begin + _SLICE, length)
            for index in range(begin, stop) if order is None else order[begin:stop].tolist():
                self._drawn += 1
                yield index

    def _order(self, epoch: int) -> torch.Tensor | None:
        if self.seed is None:
            self.seed = _signed(torch.initial_seed())
        if not self.shuffle:
            return None
        generator = torch.Generator()
        generator.manual_seed(_mix(self.seed, epoch))
        return torch.randperm(len(self.data_source), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "drawn": self._drawn,
            "length": len(self),
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where `state` was taken; StateMismatch for other data or another order."""
        for name, here in (("length", len(self)), ("shuffle", self.shuffle)):
            if state[name] != here:
                raise StateMismatch(
                    f"the saved sampler had {name} {state[name]}, and this one has {here}", subject=f"sampler/{name}"
                )
        self.seed, self.epoch, self._drawn, self._placed = state["seed"], state["epoch"], state["drawn"], True


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def _mix(seed: int, epoch: int) -> int:
    """splitmix64's finaliser over both: seed 0, epoch 1 is not seed 1, epoch 0."""
    word = (seed + 0x9E3779B97F4A7C15 * (epoch + 1)) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return _signed(word ^ (word >> 31))
