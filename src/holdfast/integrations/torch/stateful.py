"""Loaders that know their own position: torchdata's StatefulDataLoader, and a DataLoader over a stream with state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.integrations.torch import rng
from holdfast.integrations.torch.epochs import EpochOfSampler
from holdfast.integrations.torch.shared_order import SharedOrder
from holdfast.model.moved import Cursor, Moved
from holdfast.state.data import Position


class StatefulLoaderPosition(Position):
    """A DataLoader with `state_dict` and `load_state_dict`: its own state, and its generator's."""

    kind = "stateful loader"

    def __init__(self, loader: Any, reasons: tuple[str, ...] = (), caveats: tuple[str, ...] = ()) -> None:
        super().__init__(loader, reasons, caveats)
        self._has_length = not isinstance(loader.dataset, IterableDataset)
        indices = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._sampler_epoch = EpochOfSampler(indices)
        self._order = SharedOrder.of(indices) if self._has_length else None
        self._moved = False
        """Gone on with from another number of ranks, and not iterated yet."""
        self._own = rng.generators_of(loader)
        self._loaded: tuple[int, int, bool] | None = None

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded[0] == epoch:
            if start and loaded[2]:
                return self._at_end(epoch, start)
            return self._counted(epoch, iter(self._data), loaded[1])
        begun = self._order.base(epoch).batches if self._order is not None else 0
        if start > begun and not self._moved:
            self._says("the checkpoint holds no position of this loader, so the epoch starts again")
        self._moved = False
        if loaded is not None and not loaded[2]:
            with rng.kept():
                iter(self._data)  # the rest of an epoch that the training loop has left
        self._sampler_epoch.begin(epoch)
        if self._order is not None:
            self._order.place(epoch)
        return self._counted(epoch, iter(self._data), begun)

    def batches_in(self, epoch: int) -> int | None:
        return self.batches_per_epoch if self._order is None else self._order.batches_in(epoch)

    @property
    def elsewhere(self) -> str:
        return super().elsewhere if self._order is None else "the data goes on in the same order, exactly"

    def cursor(self, epoch: int, batch: int) -> Cursor | None:
        return None if self._order is None else self._order.cursor(epoch, batch)

    def move(self, moved: Moved, cursor: Cursor | None, epoch: int, batch: int) -> int:
        if self._order is None or cursor is None:
            return super().move(moved, cursor, epoch, batch)
        self._moved = True
        for reason in self._order.begin_at(cursor, epoch, batch):
            self._says(reason)
        self._caveats += self._order.steps_differ(cursor)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._progress(),
            # A loader that was never iterated would make its iterator for the asking, and draw from a generator.
            "loader": self._data.state_dict() if self._begun or self._loaded is not None else None,
            "generators": [generator.get_state() for generator in self._own],
            "sampler_epoch": self._sampler_epoch.seen,
            **self._shared(),
        }

    def _shared(self) -> dict[str, Any]:
        if self._order is None:
            return {}
        return {"order": self._order.state_dict(self._epoch, self._current.delivered)}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._sampler_epoch.seen = state["sampler_epoch"]
        if self._order is not None and "order" in state:
            self._order.load_state_dict(state["order"], state["epoch"], state["delivered"])
        if state["loader"] is not None:
            with rng.kept():
                self._data.load_state_dict(state["loader"])
                # torchdata makes an iterator from the state here, and not at the next `iter`: what that draws was drawn
                # before. One that is at its end is replaced at `iter`, which draws what the uninterrupted run draws.
                self._data.state_dict()
            self._take(state)
            self._loaded = state["epoch"], state["delivered"], state["ended"]
        if len(state["generators"]) == len(self._own):
            rng.set_generators(self._own, state["generators"], "data/generators")
        else:
            self._says(
                f"the loader has {len(self._own)} generators of its own, not {len(state['generators'])} as saved"
            )


class StreamPosition(Position):
    """A DataLoader over an IterableDataset with a state_dict, read in this process: the dataset's state after whole
    batches is the position."""

    kind = "stream"
    _has_length = False  # torch's own documentation calls the length of a loader over a stream a guess

    def __init__(self, loader: Any, reasons: tuple[str, ...] = (), caveats: tuple[str, ...] = ()) -> None:
        super().__init__(loader, reasons, caveats)
        self._own = rng.generators_of(loader)
        self._loaded: tuple[int, bool] | None = None
        self._batches: Iterator[Any] = iter(())

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if loaded is None or loaded[0] != epoch or not start:
            self._batches = iter(self._data)
        elif loaded[1]:
            self._batches = iter(())
            return self._at_end(epoch, start)
        else:
            own = [generator.get_state() for generator in self._own]
            with rng.kept():
                self._batches = iter(self._data)
            rng.set_generators(self._own, own, "data/generators")
        return self._counted(epoch, self._batches, start)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._progress(),
            "dataset": self._data.dataset.state_dict(),
            "read": self._read(),
            "generators": [generator.get_state() for generator in self._own],
        }

    def _read(self) -> bool:
        """Whether the last batch was cut short by the stream's end: a dataset may then stand at its beginning again."""
        if self._loaded is not None:
            return self._loaded[1]
        return bool(getattr(getattr(self._batches, "_dataset_fetcher", None), "ended", False))

    def _load(self, state: Mapping[str, Any]) -> None:
        self._take(state)
        self._data.dataset.load_state_dict(state["dataset"])
        if len(state["generators"]) == len(self._own):
            rng.set_generators(self._own, state["generators"], "data/generators")
        self._loaded = state["epoch"], state["read"] or (state["ended"] and state["delivered"] > 0)
