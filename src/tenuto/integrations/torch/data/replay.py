"""Positions of map-style DataLoaders: rebuild an epoch's order from the generators' state at its beginning.

A loader draws its order and the seed of its workers from generators when an epoch begins. The position is their state
at that moment and the number of batches delivered since. Continuing restores them, lets the loader draw again, skips
the delivered batches' *indices* (no sample is read), and sets the generators to where training left them. Only the
object that yields indices is replaced, so the numbers are those of the same loader without Tenuto.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from tenuto.integrations.torch import rng
from tenuto.integrations.torch.data.sampler import ResumableSampler, SharedOrder
from tenuto.integrations.torch.data.worker_generators import LEFT_EARLY, WorkerGenerators
from tenuto.record import record
from tenuto.state.position import rng as global_rng
from tenuto.state.position.positions import CountedPosition, OrderCursor, WorldSizeChange, length

# -- positions counted in batches of another size


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Returns what the loader draws from: its batch sampler, or without automatic batching its sampler."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


@record
class EpochCut:
    """The division of an epoch: `size` samples per batch, `batches` batches; None where unknown."""

    size: int | None
    batches: int | None

    @classmethod
    def of(cls, loader: DataLoader[Any], batches: int | None) -> EpochCut:
        size = getattr(index_sampler(loader), "batch_size", None)  # a batch sampler's size is not the loader's
        return cls(size if type(size) is int and size > 0 else None, batches)

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> EpochCut:
        """Returns the cut of a position; a position of an older version has less of it, or nothing."""
        return cls(state.get("batch_size"), state.get("batches"))

    def record(self) -> dict[str, Any]:
        return {"batch_size": self.size, "batches": self.batches}

    def differs(self, saved: EpochCut) -> str:
        """Describes how a batch of `saved` differs from one here; empty if it does not, or nothing is known."""
        if self.size and saved.size:
            same = self.size == saved.size
            return "" if same else f"the batch size is {self.size}, not {saved.size} as saved"
        if self.batches is None or saved.batches is None or self.batches == saved.batches:
            return ""
        return f"an epoch has {self.batches} batches, and had {saved.batches} when it was saved"

    def ends(self, delivered: int) -> bool:
        """Returns whether an epoch is known to be over after `delivered` batches."""
        return self.batches is not None and 0 < self.batches <= delivered

    def before(self, saved: EpochCut, delivered: int) -> int:
        """Returns how many of these batches precede a position counted in `saved`. Only complete ones: the samples of a
        batch it falls into repeat, so that none is left out."""
        if self.batches is not None and saved.ends(delivered):
            return self.batches
        if self.size and saved.size:
            return delivered * saved.size // self.size
        if self.batches is not None and saved.batches:
            return delivered * self.batches // saved.batches
        return delivered

    def resumes(self, saved: EpochCut, delivered: int) -> str:
        """Describes where the epoch resumes."""
        before = self.before(saved, delivered)
        if saved.ends(delivered):
            return "it was saved at the epoch's end"
        if not (self.size and saved.size):
            return f"the epoch continues after {before} of them"
        again = delivered * saved.size - before * self.size
        return "the epoch continues " + (
            f"{again} samples before, which come again" if again else "from the same sample"
        )


# -- samplers with an epoch


class EpochOfSampler:
    """Sets the epoch of a sampler such as torch's DistributedSampler, unless the training loop does so itself.

    A sampler without its epoch repeats one order for ever, an easy mistake where epochs roll over by themselves. A loop
    that calls `set_epoch` with its own numbers keeps them.
    """

    def __init__(self, index_sampler: Any) -> None:
        self._sampler = next(
            (found for found in (index_sampler, getattr(index_sampler, "sampler", None)) if _takes_epochs(found)), None
        )
        self.left_to_loop = False
        """Whether only a ResumableSampler, which needs it, gets its epoch from here."""
        self._seen: int | None = None if self._sampler is None else self._sampler.epoch

    @property
    def seen(self) -> int | None:
        """The epoch of the sampler's latest iteration; None if it takes none."""
        return self._seen

    @seen.setter
    def seen(self, epoch: int | None) -> None:
        if self._sampler is not None and epoch is not None:
            self._seen = epoch
            self._sampler.set_epoch(epoch)

    def begin(self, epoch: int) -> None:
        """Sets the epoch before its iterator is made."""
        if self._sampler is None:
            return
        alone = self._sampler.epoch == self._seen and not self.left_to_loop
        if alone or isinstance(self._sampler, ResumableSampler):
            self._sampler.set_epoch(epoch)
        self._seen = self._sampler.epoch

    def repeat(self) -> None:
        """Sets the epoch before the iterator of a continued one is made."""
        if self._sampler is not None and self._seen is not None:
            self._sampler.set_epoch(self._seen)


def _takes_epochs(sampler: Any) -> bool:
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)


# -- source of the order


def order_sampler(loader: DataLoader[Any]) -> Any:
    """Returns the sampler of the order; the one inside a batch sampler, or inside the one that accelerate divides."""
    found = index_sampler(loader)
    if not isinstance(found, BatchSampler):
        return found
    return getattr(getattr(found, "batch_sampler", found), "sampler", found)


def order_name(loader: DataLoader[Any]) -> str:
    """Returns that sampler's class, with its shuffle setting if it has one."""
    sampler = order_sampler(loader)
    name, shuffle = type(sampler).__name__, getattr(sampler, "shuffle", None)
    return f"{name}(shuffle={shuffle})" if isinstance(shuffle, bool) else name


def order_differs(loader: DataLoader[Any], state: Mapping[str, Any]) -> str:
    """Describes how the order differs from that of a saved position; empty if it does not, or an older version did not
    save it."""
    here = order_name(loader)
    saved = state.get("order_of", here)
    return "" if saved == here else f"the order is that of {here}, and was that of {saved} when it was saved"


class Skipping(Sampler[Any]):
    """Wraps a sampler; its next iteration can start after a number of draws."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._skip = 0
        self._latest: Draws | None = None
        self.before: Callable[[], None] | None = None
        """Called once, before the next order is made."""

    def start_after(self, skip: int) -> None:
        """Sets the draws to skip in iterations requested until `begin`."""
        self._skip, self._latest = skip, None

    def begin(self) -> bool:
        """Makes the order of the latest iteration. Returns False if none was requested since `start_after`."""
        self._skip = 0
        if self._latest is None:
            return False
        self._latest.begin()
        return True

    @property
    def drawn(self) -> int | None:
        """The number of requests of the latest iteration to the wrapped sampler; None before the first."""
        return None if self._latest is None else self._latest.drawn

    def run_out(self) -> None:
        """Exhausts the latest iteration."""
        for _ in self._latest or ():
            pass

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers requests an iterator twice and uses the second, so the request alone must draw nothing.
        self._latest = Draws(self._inner, self._skip, self._begins)
        return self._latest

    def _begins(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            before()

    def __len__(self) -> int:
        return len(self._inner)


class Draws(Iterator[Any]):
    """One iteration of a sampler, started by `begin` or by the first draw."""

    def __init__(self, inner: Any, skip: int, begins: Callable[[], None]) -> None:
        self._inner = inner
        self._skip = skip
        self._begins = begins
        self._draws: Iterator[Any] | None = None
        self._first: list[Any] = []
        self._ended = False
        self.drawn = 0

    def begin(self) -> Iterator[Any]:
        """Makes the sampler's order now, not at the first batch: it may draw from a global generator."""
        if self._draws is None:
            self._begins()
            self._draws = iter(self._inner)
            self.drawn = max(self._skip, 1)
            if self._skip:
                next(islice(self._draws, self._skip - 1, None), None)
            else:
                self._first = list(islice(self._draws, 1))
        return self._draws

    def __next__(self) -> Any:
        draws = self.begin()
        if self._first:
            return self._first.pop()
        self.drawn += not self._ended
        try:
            return next(draws)
        except StopIteration:
            self._ended = True
            raise


@record
class EpochStart:
    """Everything an epoch's order follows from.

    - `generators`: the global ones, as from `position.rng.capture`.
    - `own`: the loader's and the sampler's, in the order of `ReplayPosition._own`.
    - `cold`: workers were started in this epoch, so their seed was drawn in it.
    - `late`: the state is that at the first batch, where a loader without workers makes its order; else at `iter`.
    """

    generators: Mapping[str, Any]
    own: tuple[Any, ...]
    cold: bool
    late: bool = False


class ReplayPosition(CountedPosition):
    """The position of a DataLoader over a map-style dataset."""

    kind = "replay"

    def __init__(self, loader: DataLoader[Any], reasons: tuple[str, ...] = (), caveats: tuple[str, ...] = ()) -> None:
        super().__init__(loader, reasons, caveats)
        self._indices = Skipping(index_sampler(loader))
        self._loader = _with_indices(loader, self._indices)
        self._own = rng.generators_of(loader)
        self._sampler_epoch = EpochOfSampler(index_sampler(loader))
        self._order = SharedOrder.of(index_sampler(loader))
        self._moved = False
        """Resumed by other ranks, or in batches of another size, and not iterated yet."""
        self._keeps_workers = loader.persistent_workers and loader.num_workers > 0
        self.workers = WorkerGenerators(loader, weakref.WeakMethod(self._add_reason))
        self._turned = False
        """Whether persistent workers began in the middle of an epoch, under other numbers than torch gives them."""
        self._started_workers = False
        self._worker_seed: Any = None
        """With persistent workers: the state of the generator from which their seed was drawn, epochs ago. None where
        each epoch starts and seeds new workers."""
        self._start: EpochStart | None = None
        self._loaded: tuple[int, int] | None = None
        self._over: int | None = None
        """The loaded epoch, if it was saved at its end."""
        self._drawn: int | None = None
        """The requests to the loaded epoch's sampler by then: workers get more than is delivered."""
        self._passed_over = True
        """Whether the delivered batches were skipped when the iterator was made."""
        self._late = False
        """Whether others draw between `iter` and the first batch, so that the order is to be made where the loader
        itself makes it."""

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if loaded is not None and epoch == loaded[0] and (start > 0 or loaded[1] == 0):
            batches = self._continued(loaded[1])
            first = loaded[1] if self._passed_over else 0
            return self._counted(epoch, self.workers.received(batches, first), first)
        over, self._over = self._over, None
        if start and epoch == over:
            return self._at_end(epoch, start)
        if start and not self._moved:
            self._add_reason(
                "the checkpoint holds no position of this loader, so the batches were passed over in a new order"
            )
        self._moved = False
        self._sampler_epoch.begin(epoch)
        if not self._keeps_workers:
            self._worker_seed = None
        elif loaded is not None and self.workers.drawn:
            self._add_reason(LEFT_EARLY)
        elif self._started_workers:
            _, delivered, ended = self.at
            self._keep_workers(left_early=not ended and delivered < (self.batches_in(self._epoch) or delivered + 1))
        cold = self._keeps_workers and not self._started_workers and self._worker_seed is None
        self._start = EpochStart(_order_generators(), self._own_states(), cold)
        skip = self._placed(epoch, start)
        late = self._late and not skip and self._loader.num_workers == 0
        if late:
            self._indices.before = self._note_start
        batches = self._opened(skip, cold=cold, late=late)
        first = start if self._passed_over else 0
        return self._counted(epoch, self.workers.received(batches, first), first)

    def _keep_workers(self, *, left_early: bool) -> None:
        """Has persistent workers begin another epoch; new ones in their place, if torch would number them otherwise."""
        self.workers.goes_on(left_early=left_early)
        if self._turned:
            if self.workers.unknown:
                self._add_reason(LEFT_EARLY)
            self._loader, self._started_workers = _with_indices(self._data, self._indices), False

    def _note_start(self) -> None:
        self._start = EpochStart(_order_generators(), self._own_states(), cold=False, late=True)

    def _placed(self, epoch: int, delivered: int) -> int:
        """Places a shared order at its base. Returns how many batches of the epoch to skip."""
        if self._order is None:
            return delivered
        self._order.place(epoch)
        return max(delivered - self._order.base(epoch).batches, 0)

    def _continued(self, delivered: int) -> Iterator[Any]:
        """Returns the rest of the loaded epoch; leaves global and own generators where they are now."""
        if delivered >= (self.batches_in(self._epoch) or delivered + 1):
            self._passed_over = True
            self._run_out(delivered)
            return iter(())
        assert self._start is not None
        now, own_now = _order_generators(), self._own_states()
        global_rng.apply(self._start.generators)
        self._set_own(self._start.own)
        self._sampler_epoch.repeat()
        batches = self._opened(self._placed(self._epoch, delivered), cold=self._start.cold, start=self._start)
        global_rng.apply(now)
        if self._drawn is None or self._drawn == self._indices.drawn:
            self._set_own(own_now)  # else the number of workers changed, and with it how far the order was drawn
        return batches

    def run_out(self, epoch: int) -> None:
        if self._loaded is not None and self._loaded[0] == epoch:
            self._run_out(self._loaded[1])
        super().run_out(epoch)

    def _run_out(self, delivered: int) -> None:
        """Exhausts the sampler, which may draw once more at its end. One that feeds workers has ended before the last
        batch was delivered."""
        start = self._start
        has_ended = self._loader.num_workers > 0 if self._drawn is None else self._drawn > delivered
        if start is None or has_ended or not self._own:
            return
        now, own_now = _order_generators(), self._own_states()
        global_rng.apply(start.generators)
        self._set_own(start.own)
        self._sampler_epoch.repeat()
        self._indices.start_after(self._placed(self._epoch, delivered))
        iter(_without_workers(self._loader))
        self._place_late(start)
        if self._indices.begin():
            self._indices.run_out()
        else:
            self._set_own(own_now)
        global_rng.apply(now)

    def resumes_after(self, epoch: int, batch: int) -> int:
        if batch and self._loaded is not None and self._loaded[0] == epoch:
            return self._loaded[1]
        if batch and self._over == epoch:
            return self.batches_in(epoch) or batch
        return batch

    def _place_late(self, start: EpochStart | None) -> None:
        """Restores the generators as they were where the order was made, if that was behind `iter`."""
        if start is not None and start.late:
            global_rng.apply(start.generators)
            self._set_own(start.own)

    def _opened(self, skip: int, *, cold: bool, late: bool = False, start: EpochStart | None = None) -> Iterator[Any]:
        """Returns the loader's iterator, after all draws that belong to the beginning of the epoch (`late`: after those
        that belong to `iter`). `start`: of an epoch that is continued."""
        self._indices.start_after(skip)
        if not self._started_workers:
            self.workers.begin(self._loader, skip, fresh=start is None and (cold or not self._keeps_workers))
            self._turned = self._keeps_workers and skip % self.workers.workers != 0
        drawn_before = self._worker_seed is not None and not cold
        if drawn_before and not self._started_workers:
            batches = self._with_seeded_workers()
        else:
            if cold:
                self._worker_seed = (self._data.generator or torch.default_generator).get_state()
            batches = iter(self._loader)
        self._started_workers = self._keeps_workers
        self._place_late(start)
        self._passed_over = late or self._indices.begin()
        if skip and not self._passed_over:
            self._add_reason("the loader takes its batches from elsewhere than its sampler, so the epoch starts again")
        return batches

    def _with_seeded_workers(self) -> Iterator[Any]:
        """Starts new workers, or none, in place of an earlier process's persistent ones: with the same seed, and
        without the draw that the uninterrupted run made once, epochs ago."""
        generator = torch.Generator()
        rng.set_generators([generator], [self._worker_seed], "data/worker_seed")
        before = self._loader.generator
        self._loader.generator = generator
        try:
            return iter(self._loader)
        finally:
            self._loader.generator = before

    def _own_states(self) -> tuple[torch.Tensor, ...]:
        return tuple(generator.get_state() for generator in self._own)

    def _set_own(self, states: tuple[Any, ...]) -> None:
        rng.set_generators(self._own, states, "data/generators")

    def reopen(self) -> None:
        """Takes an epoch as not over whose last batch was read, and not delivered yet."""
        self._current.ended = False

    def leave_epochs_to_loop(self) -> None:
        self._sampler_epoch.left_to_loop = self._late = True

    def batches_in(self, epoch: int) -> int | None:
        return self.batches_per_epoch if self._order is None else self._order.batches_in(epoch)

    @property
    def elsewhere(self) -> str:
        return super().elsewhere if self._order is None else "the data continues in the same order, exactly"

    @property
    def _source(self) -> str:
        return f"the order of {type(order_sampler(self._data)).__name__}"

    def cursor(self, epoch: int, batch: int) -> OrderCursor | None:
        return None if self._order is None else self._order.cursor(epoch, batch)

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        self._loader, self._started_workers = _with_indices(self._data, self._indices), False
        self._moved = True
        if self._order is not None and cursor is not None:
            for reason in self._order.begin_at(cursor, epoch, batch):
                self._add_reason(reason)
            self._caveats += self._order.steps_differ(cursor.step)
            self._take({"epoch": epoch, "delivered": batch, "ended": False})
            return batch
        shared = isinstance(order_sampler(self._data), DistributedSampler)
        here = batch * moved.saved // moved.here if shared else batch
        self._add_moved_reason(moved, f"the epoch continues after {here} of this rank's batches")
        return here

    def state_dict(self) -> dict[str, Any]:
        if self._started_workers and (changed := self.workers.changed()):
            self._add_reason(changed)
        out = {
            **self._progress(),
            "generators": list(self._own_states()),
            "worker_seed": self._worker_seed,
            "keeps_workers": self._keeps_workers,
            "sampler_epoch": self._sampler_epoch.seen,
            "order_of": order_name(self._data),
            "samples": length(self._data.dataset),
            **EpochCut.of(self._data, self.batches_per_epoch).record(),
        }
        if self._order is not None:
            out["order"] = self._order.state_dict(self._epoch, self._current.delivered)
        if self.workers.workers and (self._keeps_workers or not out["ended"]):
            out["workers"] = self.workers.state()
        # Unused for an epoch that is over, and unknown to a process that resumed there.
        out["drawn"] = None if out["ended"] else self._indices.drawn if self._loaded is None else self._drawn
        if self._start is not None and not out["ended"]:
            out["start"] = {
                "global": dict(self._start.generators),
                "own": list(self._start.own),
                "cold": self._start.cold,
                **({"late": True} if self._start.late else {}),
            }
        return out

    def _load(self, state: Mapping[str, Any]) -> None:
        if differs := order_differs(self._data, state):
            self._add_reason(differs)
        if len(state["generators"]) != len(self._own):
            self._add_reason(
                f"the loader has {len(self._own)} generators of its own, not {len(state['generators'])} as saved"
            )
            return
        # Releases workers this process has started: the saved epoch may have drawn their seed.
        self._loader, self._started_workers = _with_indices(self._data, self._indices), False
        self._loaded = self._over = None
        self._set_own(tuple(state["generators"]))
        self._sampler_epoch.seen = state["sampler_epoch"]
        self._worker_seed = state["worker_seed"]
        if state.get("keeps_workers", self._keeps_workers) != self._keeps_workers:
            self._add_reason(
                "persistent_workers is another than it was when it was saved, so later epochs draw otherwise"
            )
        for reason in self.workers.load(state.get("workers"), inside=not state["ended"]):
            self._add_reason(reason)
        self._take(state)
        if self._order is not None and "order" in state:
            self._moved = self._order.load_state_dict(state["order"], state["epoch"], state["delivered"])
            self._caveats += self._order.cut_anew(state["order"])
            self._moved |= "start" not in state and not state["ended"]  # moved before, and saved before a batch
        if "start" in state and not self._moved:
            start: Mapping[str, Any] = state["start"]
            # Temporary workers drew their seed in this epoch too, and those here stay from now on.
            cold = start["cold"] or (self._keeps_workers and self._worker_seed is None)
            self._start = EpochStart(start["global"], tuple(start["own"]), cold, start.get("late", False))
            self._loaded = state["epoch"], self._batches_before(state)
            self._drawn = state.get("drawn") if self._loaded[1] == state["delivered"] else None
            self._current.delivered = self._loaded[1]
        elif state["ended"] and not self._moved:
            self._over = state["epoch"]

    def _batches_before(self, state: Mapping[str, Any]) -> int:
        """Returns how many of this loader's batches precede the saved position, counted in samples."""
        delivered: int = state["delivered"]
        samples, batches = length(self._data.dataset), self.batches_per_epoch
        if state["samples"] != samples:
            self._add_reason(f"the dataset has {samples} samples, and had {state['samples']} when it was saved")
            batches = None  # their number implies nothing about their size
        here, saved = EpochCut.of(self._data, batches), EpochCut.saved(state)
        differs = here.differs(saved)
        if not differs:
            return delivered
        self._add_reason(f"{differs}; {here.resumes(saved, delivered)}")
        return here.before(saved, delivered)


COUNTED: Final = "_tenuto_counted"
"""Set on loaders of which a position counts the batches."""


def _with_indices(loader: DataLoader[Any], indices: Skipping) -> DataLoader[Any]:
    """Returns a shallow copy of the loader that draws from `indices`, with all settings of the user, later torch
    versions and subclasses."""
    copied = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    copied.__dict__.update({name: indices, "_iterator": None, COUNTED: True})
    return copied


def _without_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Returns a copy of the loader that draws the same and starts no process."""
    copied = copy.copy(loader)
    copied.__dict__.update({"num_workers": 0, "persistent_workers": False, "timeout": 0, "_iterator": None})
    return copied


def _order_generators() -> dict[str, Any]:
    """Returns the global generators that an order can be drawn from: those of the host."""
    captured = global_rng.capture()
    return {**captured, "torch": {"cpu": captured["torch"]["cpu"]}}
