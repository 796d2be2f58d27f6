"""The position of a torch loader that keeps its own, as torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.integrations.torch import rng
from holdfast.integrations.torch.epochs import EpochOfSampler
from holdfast.state.data import Position


class StatefulLoaderPosition(Position):
    """A DataLoader with `state_dict` and `load_state_dict`: its own state, and its generator's."""

    kind = "stateful loader"

    def __init__(self, loader: Any, reasons: tuple[str, ...] = (), caveats: tuple[str, ...] = ()) -> None:
        super().__init__(loader, reasons, caveats)
        self._sampler_epoch = EpochOfSampler(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        self._loaded: tuple[int, int, bool] | None = None

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded[0] == epoch:
            return self._counted(epoch, iter(self._data), loaded[1])
        if start:
            self._says("the checkpoint holds no position of this loader, so the epoch starts again")
        if loaded is not None and not loaded[2]:
            with rng.kept():
                iter(self._data)  # the rest of an epoch that the training loop has left
        self._sampler_epoch.begin(epoch)
        return self._counted(epoch, iter(self._data), 0)

    def state_dict(self) -> dict[str, Any]:
        generator = self._data.generator
        return {
            **self._progress(),
            # A loader that was never iterated would make its iterator for the asking, and draw from a generator.
            "loader": self._data.state_dict() if self._begun or self._loaded is not None else None,
            "generator": generator.get_state() if isinstance(generator, torch.Generator) else None,
            "sampler_epoch": self._sampler_epoch.seen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._ours(state) or state["loader"] is None:
            return
        self._sampler_epoch.seen = state["sampler_epoch"]
        with rng.kept():
            self._data.load_state_dict(state["loader"])
            # torchdata makes an iterator from the state here, and not at the next `iter`: what that draws is a
            # repetition. One that is at its end is replaced at `iter`, which draws what the uninterrupted run draws.
            self._data.state_dict()
        if state["generator"] is not None and isinstance(self._data.generator, torch.Generator):
            rng.set_generator(self._data.generator, state["generator"], "data/generator")
        self._take(state)
        self._loaded = state["epoch"], state["delivered"], state["ended"]
