"""Positions of loaders with their own state: torchdata's StatefulDataLoader, and a DataLoader over a stateful
stream."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from tenuto.integrations.torch import rng
from tenuto.integrations.torch.data.replay import (
    COUNTED,
    EpochCut,
    EpochOfSampler,
    index_sampler,
    order_differs,
    order_name,
)
from tenuto.integrations.torch.data.sampler import SharedOrder
from tenuto.integrations.torch.data.worker_generators import LEFT_EARLY, WorkerGenerators
from tenuto.state.position.positions import (
    CountedPosition,
    Delivered,
    OrderCursor,
    WorldSizeChange,
    begin_whole,
    length,
)


class StatefulLoaderPosition(CountedPosition):
    """A DataLoader with `state_dict` and `load_state_dict`: its own state, and its generators'."""

    kind = "stateful loader"

    def __init__(self, loader: Any, reasons: tuple[str, ...] = (), caveats: tuple[str, ...] = ()) -> None:
        super().__init__(loader, reasons, caveats)
        self._has_length = not isinstance(loader.dataset, IterableDataset)
        self._loader = loader
        if loader.num_workers:  # a copy, so that whoever iterates the loader itself is sent plain batches
            self._loader = copy.copy(loader)
            self._loader.__dict__.update({"_iterator": None, "_initial_iter_for_state_dict": False, COUNTED: True})
        self._keeps_workers = loader.persistent_workers and loader.num_workers > 0
        self._started_workers = False
        self.workers = WorkerGenerators(loader, weakref.WeakMethod(self._add_reason))
        self.workers.ahead = getattr(loader, "snapshot_every_n_steps", 1)
        indices = index_sampler(loader)
        self._sampler_epoch = EpochOfSampler(indices)
        self._order = SharedOrder.of(indices) if self._has_length else None
        self._samples = length(indices.sampler) if self._has_length and _counts_samples(loader) else None
        """Samples of an epoch, if the loader counts its own position in samples rather than batches."""
        self._cut_anew = (0, 0)
        """Batches, and the samples in them, delivered in this epoch before the batch size changed."""
        self._moved = False
        """Resumed on another number of ranks, and not iterated yet."""
        self._own = rng.generators_of(loader)
        self._loaded: tuple[int, int, bool] | None = None
        self._order_at: dict[str, Any] = {}
        """The position of the order when the iterator of the loaded position was made."""
        self._unusable_epoch: int | None = None
        """The loaded epoch, if its position is of no use here."""

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        self._restore_order()
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded[0] == epoch:
            if start and loaded[2]:
                return self._at_end(epoch, start)
            return self._counted(epoch, self.workers.received(iter(self._loader), loaded[1]), loaded[1])
        self._cut_anew = 0, 0
        begun = self._order.base(epoch).batches if self._order is not None else 0
        if start > begun and not self._moved:
            self._add_reason("the checkpoint holds no position of this loader, so the epoch starts again")
        self._moved = False
        if loaded is not None and not loaded[2]:
            if self._keeps_workers and self.workers.drawn:
                self._add_reason(LEFT_EARLY)
            with rng.preserved():
                iter(self._loader)  # the rest of an epoch that the training loop has left
        self._sampler_epoch.begin(epoch)
        if self._order is not None:
            self._order.place(epoch)
        begin_whole(self._loader.dataset)
        if self._keeps_workers and self._started_workers:
            _, delivered, ended = self.at
            self.workers.goes_on(left_early=not ended and delivered > 0)
        else:
            self.workers.begin(self._loader, 0, fresh=True)
        self._started_workers = True
        return self._counted(epoch, self.workers.received(iter(self._loader), begun), begun)

    def _restore_order(self) -> None:
        """Restores the order: a loop that calls set_epoch after the load has set it to the epoch's beginning."""
        if self._order is not None and self._loaded is not None and not self._loaded[2]:
            self._order.restore_state(self._order_at)

    def run_out(self, epoch: int) -> None:
        loaded = self._loaded
        if loaded is not None and loaded[0] == epoch and not loaded[2]:
            self._restore_order()
            with rng.preserved():
                next(iter(self._loader), None)
            self._loaded = epoch, loaded[1], True
        super().run_out(epoch)

    def leave_epochs_to_loop(self) -> None:
        self._sampler_epoch.left_to_loop = True

    def batches_in(self, epoch: int) -> int | None:
        return self.batches_per_epoch if self._order is None else self._order.batches_in(epoch)

    def resumes_after(self, epoch: int, batch: int) -> int:
        if batch and self._unusable_epoch == epoch:
            return 0
        return self._loaded[1] if batch and self._loaded is not None and self._loaded[0] == epoch else batch

    @property
    def elsewhere(self) -> str:
        return super().elsewhere if self._order is None else "the data continues in the same order, exactly"

    def cursor(self, epoch: int, batch: int) -> OrderCursor | None:
        return None if self._order is None else self._order.cursor(epoch, batch)

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        if self._order is None or cursor is None:
            return super().move(moved, cursor, epoch, batch)
        self._moved = True
        self._epoch, self._current = epoch, Delivered(iter(()), batch)
        for reason in self._order.begin_at(cursor, epoch, batch):
            self._add_reason(reason)
        self._caveats += self._order.steps_differ(cursor.step)
        return batch

    def state_dict(self) -> dict[str, Any]:
        if self._keeps_workers and self._started_workers and (changed := self.workers.changed()):
            self._add_reason(changed)
        self._restore_order()
        # A loader never iterated would make its iterator to answer, and draw from a generator.
        loader = self._loader.state_dict() if self._begun or self._loaded is not None else None
        read_again = (loader or {}).get("_steps_since_snapshot", 0)
        return {
            **self._progress(),
            "loader": loader,
            "generators": [generator.get_state() for generator in self._own],
            "sampler_epoch": self._sampler_epoch.seen,
            **self._counts(),
            **self._shared(),
            **({"workers": self.workers.state(self._current.delivered - read_again)} if self.workers.workers else {}),
        }

    def _shared(self) -> dict[str, Any]:
        if self._order is None:
            return {}
        return {"order": self._order.state_dict(self._epoch, self._current.delivered)}

    def _counts(self) -> dict[str, Any]:
        """Returns the units in which the position is counted."""
        used, cut = None, EpochCut.of(self._data, self.batches_per_epoch)
        if self._samples is not None and cut.size:
            batches, before = self._cut_anew
            used = min(before + (self._current.delivered - batches) * cut.size, self._samples)
        samples = length(self._data.dataset) if self._has_length else None
        order = {"order_of": order_name(self._data)} if self._has_length else {}
        return {"samples": samples, **cut.record(), "used": used, **order}

    def _load(self, state: Mapping[str, Any]) -> None:
        if self._has_length and (other := order_differs(self._data, state)):
            self._add_reason(other)
        self._sampler_epoch.seen = state["sampler_epoch"]
        begins_there = False
        if self._order is not None and "order" in state:
            anew = self._order.load_state_dict(state["order"], state["epoch"], state["delivered"])
            # A loader that counts batches would skip as many of another size: it restarts there, as the order does.
            begins_there = anew and self._samples is None
            self._caveats += self._order.cut_anew(state["order"])
            self._order.place(state["epoch"])
        self._loaded = self._unusable_epoch = None
        here = self._batches_before(state)
        if state["loader"] is None or here is None or begins_there:
            self._unusable_epoch = state["epoch"] if here is None else None
            self._epoch, self._current, self._begun = state["epoch"], Delivered(iter(()), here or 0), False
        else:
            for reason in self.workers.load(state.get("workers"), inside=not state["ended"]):
                self._add_reason(reason)
            self.workers.begin(self._loader, 0, fresh=False)
            self._started_workers = True
            with rng.preserved():
                self._loader.load_state_dict(state["loader"])
                # torchdata makes an iterator from the state here, not at the next `iter`: its draws were made before.
                # One at its end is replaced at `iter`, which draws what the uninterrupted run draws.
                self._loader.state_dict()
            if self._order is not None:
                self._order_at = self._order.sampler_state()
            self._take({**state, "delivered": here})
            self._loaded = state["epoch"], here, state["ended"]
            self._cut_anew = (0, 0) if state.get("used") is None else (here, state["used"])
        if len(state["generators"]) == len(self._own):
            rng.set_generators(self._own, state["generators"], "data/generators")
        else:
            self._add_reason(
                f"the loader has {len(self._own)} generators of its own, not {len(state['generators'])} as saved"
            )

    def _batches_before(self, state: Mapping[str, Any]) -> int | None:
        """Returns after how many of this loader's batches it resumes; None if it would count batches of another
        size."""
        delivered: int = state["delivered"]
        samples, batches = length(self._data.dataset) if self._has_length else None, self.batches_per_epoch
        if state.get("samples", samples) != samples:
            self._add_reason(f"the dataset has {samples} samples, and had {state['samples']} when it was saved")
            batches = None  # their number implies nothing about their size
        here, saved = EpochCut.of(self._data, batches), EpochCut.saved(state)
        differs = here.differs(saved) if self._order is None else ""  # a shared order counts samples
        if not differs or not delivered:
            return delivered
        if state["ended"] or saved.ends(delivered):
            self._add_reason(differs)
            return here.batches or delivered
        if not self._has_length:
            self._add_reason(f"{differs}; a stream without a state of its own is passed over in batches")
            return delivered
        if here.batches is None or here.size is None or self._samples is None or state.get("used") is None:
            self._add_reason(f"{differs}, and {self._source} counts batches: the epoch begins again")
            return None
        self._add_reason(f"{differs}; the epoch continues from the same sample")
        rest: int = max(self._samples - state["used"], 0)
        return here.batches - (rest // here.size if self._data.batch_sampler.drop_last else -(-rest // here.size))


def _counts_samples(loader: Any) -> bool:
    """Returns whether a loader counts samples drawn. torchdata does where its own batch sampler makes the batches;
    batches of another one it skips one by one, and so the last few where workers report their state only now and then.
    """
    indices = index_sampler(loader)
    its_own = isinstance(indices, BatchSampler) and type(indices).__module__.partition(".")[0] == "torchdata"
    return its_own and (loader.num_workers == 0 or getattr(loader, "snapshot_every_n_steps", 1) == 1)


class StreamPosition(CountedPosition):
    """A DataLoader over an IterableDataset with a state_dict, read in this process: the position is the dataset's state
    after complete batches."""

    kind = "stream"
    _has_length = False  # torch's documentation calls the length of a loader over a stream a guess

    def __init__(self, loader: Any, reasons: tuple[str, ...] = (), caveats: tuple[str, ...] = ()) -> None:
        super().__init__(loader, reasons, caveats)
        self._own = rng.generators_of(loader)
        self._loaded: tuple[int, bool] | None = None
        self._batches: Iterator[Any] = iter(())

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if loaded is None or loaded[0] != epoch or not start:
            begin_whole(self._data.dataset)
            self._batches = iter(self._data)
        elif loaded[1]:
            self._batches = iter(())
            return self._at_end(epoch, start)
        else:
            own = [generator.get_state() for generator in self._own]
            with rng.preserved():
                self._batches = iter(self._data)
            rng.set_generators(self._own, own, "data/generators")
        return self._counted(epoch, self._batches, start)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._progress(),
            "dataset": self._data.dataset.state_dict(),
            "read": self._read(),
            "generators": [generator.get_state() for generator in self._own],
            "batch_size": EpochCut.of(self._data, None).size,
        }

    def _read(self) -> bool:
        """Returns whether the stream's end cut the last batch short: the dataset may then have rewound."""
        if self._loaded is not None:
            return self._loaded[1]
        return bool(getattr(getattr(self._batches, "_dataset_fetcher", None), "ended", False))

    def _load(self, state: Mapping[str, Any]) -> None:
        self._take(state)
        self._data.dataset.load_state_dict(state["dataset"])
        differs = EpochCut.of(self._data, None).differs(EpochCut.saved(state))
        if differs:
            self._add_reason(f"{differs}; the stream continues from the same sample")
        if len(state["generators"]) == len(self._own):
            rng.set_generators(self._own, state["generators"], "data/generators")
        self._loaded = state["epoch"], state["read"] or (state["ended"] and state["delivered"] > 0)
