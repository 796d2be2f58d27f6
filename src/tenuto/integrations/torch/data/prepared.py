"""Positions of loaders that accelerate has prepared.

A prepared loader wraps a DataLoader. It reads one batch ahead (with `dispatch_batches`, one of each rank) to know which
one is the last, sets the epoch of the sampler from its own `iteration`, and so on; whatever it does goes on untouched.
Only the loader inside is replaced by one that counts, whoever iterates the prepared one: what has been read, without
what was read ahead, has been delivered. What the reading ahead draws from the global generators (augmentation) is drawn
again from where it was when training resumes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from tenuto.errors import UsageError
from tenuto.integrations.torch.data.host_generators import Captured, HostGenerators, in_full
from tenuto.integrations.torch.data.replay import COUNTED, ReplayPosition, order_sampler
from tenuto.integrations.torch.rng import is_seedable
from tenuto.state.position import rng as global_rng
from tenuto.state.position.positions import (
    CountedPosition,
    DataPosition,
    WorldSizeChange,
    attach,
    begin_whole,
    has_state,
)

HOME: Final = "accelerate.data_loader"
KINDS: Final = frozenset({"DataLoaderShard", "DataLoaderDispatcher"})
NEEDED: Final = ("base_dataloader", "iteration", "end_of_dataloader", "skip_batches")
"""The attributes of a prepared loader that are used here."""
POSITION: Final = "tenuto_position"


def is_prepared(loader: Any) -> bool:
    """Returns whether this is a loader of accelerate's that has what is needed here."""
    kind = type(loader)
    known = kind.__module__ == HOME and kind.__name__ in KINDS
    return known and all(hasattr(loader, name) for name in NEEDED)


def is_divided(indices: Any) -> bool:
    """Returns whether a batch sampler of accelerate's divides a known one among the ranks."""
    kind = type(indices)
    if (kind.__module__, kind.__name__) != (HOME, "BatchSamplerShard"):
        return False
    inside = type(indices.batch_sampler)
    return inside is BatchSampler or inside.__module__.partition(".")[0] == "torchdata"


def plain(base: DataLoader[Any]) -> DataLoader[Any]:
    """Returns a copy of the loader inside a prepared one, as accelerate made it."""
    copied = copy.copy(base)
    copied.__class__ = plain_class(base)
    copied.__dict__.pop(POSITION, None)
    copied.__dict__[COUNTED] = True
    if has_state(copied):  # torchdata's: accelerate has asked for its state, for which it has made an iterator
        copied.__dict__.update({"_iterator": None, "_initial_iter_for_state_dict": False})
    return copied


class PreparedPosition(CountedPosition):
    """The position of a prepared loader. It counts by itself, also for a loop that iterates the loader directly.

    `order`: the position of the DataLoader inside, which reads ahead of this one; None for a stream.
    """

    kind = "prepared"

    def __init__(
        self,
        loader: Any,
        order: ReplayPosition | None,
        reasons: tuple[str, ...] = (),
        caveats: tuple[str, ...] = (),
    ) -> None:
        super().__init__(loader, reasons, caveats)
        base = loader.base_dataloader
        self._order = order
        self._plain: Any = plain(base)
        self._has_length = not isinstance(base.dataset, IterableDataset)
        self._group = _reads_at_once(loader)
        if order is not None:
            order.workers.ahead = 2 * self._group
        self._elsewhere = reads_elsewhere(loader)
        self._reading = Reading(iter(()), 0, 1, None)
        self._iterated = 0
        """The `iteration` of the prepared loader that was begun last."""
        self._loaded: dict[str, Any] | None = None
        _count(base, self)

    # -- what the loader inside reports

    def begin(self) -> Iterator[Any]:
        """Returns the iterator of the loader inside, for an iteration of the prepared one that begins."""
        loaded, self._loaded = self._loaded, None
        epoch = self._iterated = self._data.iteration
        if loaded is not None and (loaded["ended"] or loaded["iteration"] != epoch):
            loaded = None
        delivered = 0 if loaded is None else loaded["delivered"]
        if self._order is not None:
            batches = self._order.iterate(epoch, delivered * self._group)
        elif loaded is None:
            begin_whole(self._plain.dataset)
            batches = iter(self._plain)
        else:
            now = global_rng.capture()
            batches = iter(self._plain)
            global_rng.apply(now)
        ahead = None if loaded is None or self._elsewhere else loaded["ahead"]
        source = None if self._order is not None or self._elsewhere else self._plain.dataset
        reading = Reading(batches, delivered, self._group, source, ahead, draws=self._plain.num_workers == 0)
        self._reading, self._begun = reading, True
        return reading

    @property
    def _ended(self) -> bool:
        """Whether the last batch of the epoch was delivered: the prepared loader knows by having read ahead."""
        if self._loaded is not None:
            return bool(self._loaded["ended"])
        return bool(self._begun and self._data.end_of_dataloader)

    @property
    def delivered(self) -> int:
        """Batches of the epoch that training was given."""
        if self._loaded is not None:
            return int(self._loaded["delivered"])
        groups = math.ceil(self._reading.read / self._group)
        return groups if self._ended else max(groups - 1, 0)

    @property
    def iteration(self) -> int:
        """The `iteration` that the prepared loader has, or will have once it goes past the epoch's last batch."""
        here: int = self._data.iteration
        return here + 1 if self._loaded is None and self._ended and here == self._iterated else here

    @property
    def resumes_inside(self) -> bool:
        """Whether the loader, when it is iterated next, continues an epoch that was restored."""
        return self._loaded is not None and not self._ended and self.delivered > 0

    def forget(self) -> None:
        """Takes note that the restored position is not used."""
        self._loaded = None
        self._add_reason("the script passes over batches by itself")

    # -- as a position

    @property
    def in_source(self) -> bool:  # type: ignore[override]
        """Whether the loader was iterated, by whomever."""
        return self._begun

    @property
    def at(self) -> tuple[int, int, bool]:
        if self._loaded is not None or not self._begun:
            return self._data.iteration, self.delivered if not self._ended else 0, self._ended or not self.delivered
        return self._iterated, self.delivered, self._ended

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        if start and self._loaded is None:
            self._add_reason("the checkpoint holds no position of this loader, so the epoch starts again")
            start = 0
        elif start and self._ended:
            return self._at_end(epoch, start)
        return self._counted(epoch, iter(self._data), start)

    def run_out(self, epoch: int) -> None:
        """Does nothing: with the last batch of an epoch, a prepared loader has asked for one more."""

    def resumes_after(self, epoch: int, batch: int) -> int:
        if batch and self._loaded is not None:
            return batch if self._ended else self.delivered
        return batch

    @property
    def reasons(self) -> tuple[str, ...]:
        inner = self._order.reasons if self._order is not None else ()
        return (*super().reasons, *(reason for reason in inner if reason not in super().reasons))

    def move(self, moved: WorldSizeChange, cursor: Any, epoch: int, batch: int) -> int:
        self._add_moved_reason(moved, "an interrupted epoch begins again")
        return 0

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return {**self._loaded, "iteration": self._data.iteration}
        ended = self._ended
        inside = self._begun and not ended
        if self._order is not None and inside:
            self._order.reopen()
        order = None if self._order is None else self._order.state_dict()
        if self._order is not None and order is not None and inside and "workers" in order:
            order["workers"] = self._order.workers.state(self.delivered * self._group)
        found: dict[str, Any] = {
            "kind": self.kind,
            "iteration": self.iteration,
            "delivered": self.delivered,
            "ended": ended or not self._begun,
            "order": order,
            "seed": getattr(self._seedable, "initial_seed", None),
            "ahead": self._reading.before() if inside else None,
        }
        if self._streams and not inside:
            found["dataset"] = self._plain.dataset.state_dict()
        return found

    @property
    def _seedable(self) -> Any:
        """accelerate's sampler that seeds its order by the epoch; None where the order is another one's."""
        if not self._has_length:
            return None
        sampler = order_sampler(self._plain)
        return sampler if is_seedable(sampler) else None

    @property
    def _streams(self) -> bool:
        return self._order is None and not self._elsewhere and has_state(self._plain.dataset)

    def _load(self, state: Mapping[str, Any]) -> None:
        saved = dict(state)
        if (saved["order"] is None) != (self._order is None):
            self._add_reason("the checkpoint's position is that of another kind of data set, or of another rank")
            return
        if self._order is not None:
            inside = {} if saved["ended"] else {"delivered": saved["delivered"] * self._group}
            self._order.load_state_dict({**saved["order"], **inside})
            if not saved["ended"]:
                groups = self._order.resumes_after(saved["order"]["epoch"], 1) if saved["delivered"] else 0
                saved["delivered"] = groups // self._group
        elif self._streams:
            inside = saved["ahead"]["dataset"] if saved["ahead"] is not None else saved["dataset"]
            self._plain.dataset.load_state_dict(inside)
        if self._seedable is not None and saved["seed"] is not None:
            self._seedable.initial_seed = saved["seed"]
        self._data.iteration = saved["iteration"]
        self._loaded, self._begun = saved, False


class PreparedLoaders(CountedPosition):
    """The positions of all loaders that an Accelerator has prepared, for a loop that iterates them itself."""

    kind = "prepared loaders"
    in_source = True
    _has_length = False

    def __init__(self, loaders: Callable[[], Sequence[Any]]) -> None:
        super().__init__(())
        self._loaders = loaders

    def positions(self) -> list[DataPosition]:
        """Returns the position of each loader. Those that have none begin to be counted."""
        return [position_of(loader) or attach(loader) for loader in self._loaders()]

    @property
    def reasons(self) -> tuple[str, ...]:
        inside = (reason for one in self.positions() for reason in one.reasons)
        return tuple(dict.fromkeys([*super().reasons, *inside]))

    @property
    def at(self) -> tuple[int, int, bool]:
        return next((one.at for one in self.positions()), (0, 0, True))

    @property
    def caveats(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(caveat for one in self.positions() for caveat in one.caveats))

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        raise UsageError("the script iterates the loaders", subject="data", hint="for batch in loader")

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "loaders": [one.state_dict() for one in self.positions()]}

    def _load(self, state: Mapping[str, Any]) -> None:
        positions = self.positions()
        if len(positions) != len(state["loaders"]):
            self._add_reason(f"{len(positions)} loaders are prepared, not {len(state['loaders'])} as saved")
        for position, saved in zip(positions, state["loaders"], strict=False):
            position.load_state_dict(saved)


def position_of(loader: Any) -> PreparedPosition | None:
    """Returns the position that counts a prepared loader; None where none does."""
    base = getattr(loader, "base_dataloader", None)
    return None if base is None else base.__dict__.get(POSITION)


class Reading(Iterator[Any]):
    """One iteration of the loader inside a prepared one: what was read, and where the generators (and a stream) were
    before what was read ahead.

    `again`: where they were before the batches that are read first, which a process before this one has read ahead.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        delivered: int,
        group: int,
        stream: Any,
        again: Mapping[str, Any] | None = None,
        *,
        draws: bool = False,
    ) -> None:
        self._batches, self._group, self._draws = batches, group, draws
        self._stream = stream if has_state(stream) else None
        self._again = dict(again) if again is not None else None
        self._now: Any = None
        self._generators = HostGenerators(devices=True)
        self._before: tuple[Captured | None, Any] = (None, None)
        self.read = delivered * group
        self._rest = group if again is not None else 0
        """Batches left of those that are read again."""

    def __next__(self) -> Any:
        if self.read % self._group == 0:
            self._begin_group()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = iter(())  # releases a loader's worker processes
            self._end_again()
            raise
        self.read += 1
        self._rest -= 1
        if self._rest <= 0:
            self._end_again()
        return batch

    def _begin_group(self) -> None:
        if self._again is not None and self._again.get("random") is not None:
            self._now = global_rng.capture()
            global_rng.apply(self._again["random"])
        self._again = None
        stream = None if self._stream is None else self._stream.state_dict()
        self._before = (self._generators.capture() if self._draws else None, stream)

    def _end_again(self) -> None:
        now, self._now = self._now, None
        if now is not None:
            global_rng.apply(now)

    def before(self) -> dict[str, Any]:
        captured, stream = self._before
        return {"random": None if captured is None else in_full(captured), "dataset": stream}


# -- the loader inside


def _count(base: DataLoader[Any], position: PreparedPosition) -> None:
    """Makes the loader inside a prepared one report to `position`, whoever iterates it."""
    kind = plain_class(base)
    own: dict[str, Any] = {"__iter__": _iterate, "__module__": kind.__module__}
    if has_state(base):  # torchdata's: its own state is not used, and asking for it would draw
        own["state_dict"] = dict
        base.__dict__["_iterator"] = None
    base.__dict__[POSITION] = position
    base.__class__ = type(kind.__name__, (kind,), own)


def _iterate(base: DataLoader[Any]) -> Iterator[Any]:
    position: PreparedPosition = base.__dict__[POSITION]
    return position.begin()


def plain_class(base: DataLoader[Any]) -> type[DataLoader[Any]]:
    """Returns the class of the loader inside, as accelerate made it."""
    kind = type(base)
    return kind.__bases__[0] if POSITION in base.__dict__ else kind


def reads_elsewhere(loader: Any) -> bool:
    """Returns whether another rank reads for this one."""
    return type(loader).__name__ == "DataLoaderDispatcher" and loader.state.process_index != 0


def _reads_at_once(loader: Any) -> int:
    """Returns how many batches of the loader inside make one of the prepared loader."""
    if type(loader).__name__ != "DataLoaderDispatcher" or loader.split_batches:
        return 1
    return int(loader.state.num_processes)
