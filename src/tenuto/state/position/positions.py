"""Where training is in its data: the position that is saved, and the rest of an epoch after it.

What counts is what was *delivered to training*, never what a loader's workers have prefetched. A position is asked for
an epoch's iterator, counts what it hands out, and says what it is in `state_dict`. What it cannot position, it starts
again from the epoch's beginning, and says why: training goes on.

A framework's loaders have their own positions (their order depends on that framework's generators); they are found by
the module of the value's type and loaded only then.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol, cast

from tenuto.errors import StateMismatch, UsageError
from tenuto.state.frameworks import positions_of
from tenuto.state.position.world_size_change import OrderCursor, WorldSizeChange


class DataPosition(Protocol):
    """The position in one source of batches.

    exact: a resumed epoch delivers what an uninterrupted one would have; `reasons` says why not (and is empty if so).
    caveats: what may differ all the same, and is out of this position's sight.
    batches_per_epoch: None where the source does not say.
    elsewhere: in words, what becomes of the position on another number of ranks than has saved it.
    """

    @property
    def exact(self) -> bool: ...
    @property
    def reasons(self) -> tuple[str, ...]: ...
    @property
    def caveats(self) -> tuple[str, ...]: ...
    @property
    def batches_per_epoch(self) -> int | None: ...
    @property
    def elsewhere(self) -> str: ...

    def batches_in(self, epoch: int) -> int | None:
        """As `batches_per_epoch`, for one epoch: one that other ranks have begun may have another number."""
        ...

    def cursor(self, epoch: int, batch: int) -> OrderCursor | None:
        """Where all ranks together are in the order that they share, each having been given `batch` batches of
        `epoch`; None where they share none."""
        ...

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        """In place of `load_state_dict`, on another number of ranks than has saved: each of those had been given
        `batch` batches of `epoch`. Returns after how many of this rank's batches the epoch goes on; where that is not
        exact it is told with a warning, and in `reasons`."""
        ...

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of `epoch` that follow `start` delivered ones.

        Everything that creating the iterator draws from global generators is drawn before this returns. Continuing the
        epoch that was loaded (`load_state_dict`, then its epoch and start) leaves the global generators as they were.
        """
        ...

    def run_out(self, epoch: int) -> None:
        """In place of `iterate` for the epoch that was loaded, where its last batch was delivered: leaves the source as
        asking for one batch more would. The global generators are put back after it."""
        ...

    def goes_on_after(self, epoch: int, batch: int) -> int:
        """After how many of this source's batches an epoch goes on that was loaded after `batch`: another number where
        they are of another size now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position now: after the batches that training has been given so far."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a saved position; the next `iterate` continues there. One of another kind of source is refused with a
        warning, and told in `reasons`."""
        ...


def attach(data: Any) -> DataPosition:
    """The position of `data`: a torch or torchdata loader, anything with `state_dict` and `load_state_dict`, a
    sequence of batches, or any other iterable."""
    for base in type(data).__mro__:
        module = positions_of(base.__module__.partition(".")[0])
        if module is not None:
            found = module.attach(data)
            if found is not None:
                return cast(DataPosition, found)
    return attach_plain(data)


def attach_plain(data: Any) -> DataPosition:
    """The position of something that is no loader of a known framework."""
    if not isinstance(data, Iterable):
        raise UsageError(
            f"data must be something that yields batches, not {type(data).__name__}",
            subject="data",
            hint="pass a DataLoader, or any iterable",
        )
    if has_state(data):
        return StatefulPosition(data)
    if isinstance(data, Sequence):
        return SequencePosition(data)
    return RestartingPosition(data, "it has neither a state_dict nor a length and an order of its own")


def has_state(data: Any) -> bool:
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def length(sized: Any) -> int | None:
    """Its length, or None where it does not say."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


Gap = weakref.ReferenceType[Callable[[], None]]

_NOTHING: Final = object()


class Delivered(Iterator[Any]):
    """An epoch's iterator that counts what it hands out."""

    def __init__(self, batches: Iterator[Any], delivered: int = 0, *, on_gap: Gap | None = None) -> None:
        """`on_gap` is called where training goes on behind a batch whose loading raised. It is held weakly: in a cycle
        with its position an iterator would let go of its workers only when the collector comes."""
        self._batches = batches
        self._on_gap = on_gap
        self._failed = False
        self.delivered = delivered
        self.ended = False

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self.ended = True
            self._batches = iter(())  # lets go of a loader's worker processes
            self._gone_on()
            raise
        except BaseException:  # an interrupt too: in a notebook the same iterator may be gone on with
            self._failed = True
            raise
        self._gone_on()
        self.delivered += 1
        return batch

    def _gone_on(self) -> None:
        told = self._on_gap() if self._failed and self._on_gap is not None else None
        self._failed = False
        if told is not None:
            told()


class CountedPosition:
    """What all positions share: counting, and refusing what is not theirs."""

    kind = ""
    _has_length = True
    """False where the source has a length that is only a guess."""

    def __init__(self, data: Any, reasons: tuple[str, ...] = (), caveats: tuple[str, ...] = ()) -> None:
        self._data = data
        self._fixed_reasons = reasons
        self._caveats = caveats
        self._met: tuple[str, ...] = ()
        self._epoch = 0
        self._current = Delivered(iter(()))
        self._begun = False

    @property
    def reasons(self) -> tuple[str, ...]:
        return self._fixed_reasons + self._met

    @property
    def exact(self) -> bool:
        return not self.reasons

    @property
    def caveats(self) -> tuple[str, ...]:
        return self._caveats

    @property
    def batches_per_epoch(self) -> int | None:
        if not self._has_length:
            return None
        return length(self._data)

    def batches_in(self, epoch: int) -> int | None:
        return self.batches_per_epoch

    @property
    def elsewhere(self) -> str:
        return f"the position in the data is exact on as many ranks alone ({self._source})"

    @property
    def _source(self) -> str:
        """What has the position, in words."""
        return type(self._data).__name__

    def cursor(self, epoch: int, batch: int) -> OrderCursor | None:
        return None

    def run_out(self, epoch: int) -> None:
        if self._begun and self._epoch == epoch:
            self._current.ended = True

    def goes_on_after(self, epoch: int, batch: int) -> int:
        return batch

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        self._says_moved(moved, "an interrupted epoch begins again")
        return 0

    def _says_moved(self, moved: WorldSizeChange, so: str) -> None:
        self._says(f"{self._source} was {moved.words}, and its position is exact on as many ranks alone: {so}")

    def _counted(self, epoch: int, batches: Iterator[Any], delivered: int) -> Iterator[Any]:
        self._epoch, self._begun = epoch, True
        self._current = Delivered(batches, delivered, on_gap=weakref.WeakMethod(self._says_gap))
        return self._current

    def _says_gap(self) -> None:
        self._says("a batch could not be loaded, and is not counted: what follows it does not go on at its place")

    def _at_end(self, epoch: int, delivered: int) -> Iterator[Any]:
        """The rest of an epoch that was saved at its end."""
        batches = self._counted(epoch, iter(()), delivered)
        self._current.ended = True
        return batches

    def _progress(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "epoch": self._epoch,
            "delivered": self._current.delivered,
            "ended": self._current.ended or not self._begun,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `DataPosition`; StateMismatch where `state` is no position, or the source refuses it."""
        kind = state.get("kind")
        if kind != self.kind:
            self._says(f"the checkpoint's position is that of another kind of source ({kind!r}, not {self.kind!r})")
            return
        try:
            self._load(state)
        except StateMismatch:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise StateMismatch(f"the saved position in the data cannot be used: {error!r}", subject="data") from error

    def _load(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _take(self, state: Mapping[str, Any]) -> None:
        """Counts from a loaded position, so that saving before the next batch saves the same one."""
        self._counted(state["epoch"], iter(()), state["delivered"])
        self._current.ended = state["ended"]

    def _says(self, reason: str) -> None:
        """Records why the resume is not exact, and tells the user, once per reason."""
        if reason not in self._met:
            self._met += (reason,)
            warnings.warn(f"the data does not resume exactly: {reason}", RuntimeWarning, stacklevel=4)


class StatefulPosition(CountedPosition):
    """Anything with `state_dict` and `load_state_dict` that counts what it yields."""

    kind = "stateful"
    _loaded: tuple[int, bool] | None = None
    _source_state: Any = None
    """What the source was loaded with, until it is iterated."""

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        loaded, self._loaded, self._source_state = self._loaded, None, None
        if start and loaded == (epoch, True):
            return self._at_end(epoch, start)
        return self._counted(epoch, iter(self._data), start)

    def run_out(self, epoch: int) -> None:
        if self._loaded != (epoch, False):
            return
        before, self._source_state = copy.deepcopy(self._source_state), None
        begins_anew = next(iter(self._data), _NOTHING) is not _NOTHING
        if begins_anew:  # it goes back to its beginning when it is asked again, and that was the next epoch's first
            self._data.load_state_dict(before)
        self._loaded = epoch, True
        self._current.ended = True

    def state_dict(self) -> dict[str, Any]:
        return {**self._progress(), "source": self._data.state_dict()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._take(state)
        self._data.load_state_dict(state["source"])
        self._loaded, self._source_state = (state["epoch"], state["ended"]), state["source"]


class SequencePosition(CountedPosition):
    """A list of batches, or the like: its order is its own."""

    kind = "sequence"

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        return self._counted(epoch, islice(iter(self._data), start, None), start)

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        self._says_moved(moved, f"the epoch goes on after {batch} of this rank's batches")
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {**self._progress(), "length": len(self._data)}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._take(state)
        if state["length"] != len(self._data):
            self._says(f"the data has {len(self._data)} batches, and had {state['length']} when it was saved")


class RestartingPosition(CountedPosition):
    """What cannot be positioned: an interrupted epoch begins again."""

    kind = "restarting"

    def __init__(self, data: Any, reason: str, caveats: tuple[str, ...] = ()) -> None:
        super().__init__(
            data, (f"the data cannot be positioned, so an interrupted epoch starts again: {reason}",), caveats
        )
        self._told = False
        self._over: int | None = None
        """The loaded epoch, where it was saved at its end."""
        self._given: Delivered | None = None
        """The latest iterator of the source itself."""

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        over, self._over = self._over, None
        if start and over == epoch:
            return self._at_end(epoch, start)
        batches = iter(self._data)
        if batches is self._data and self._given is not None and self._given.ended:
            raise UsageError(
                "data is an iterator that has been used up, and another epoch is asked of it",
                subject="data",
                hint="pass an iterable that can be iterated again, such as a DataLoader or a list",
            )
        if start and not self._told:
            self._told = True
            warnings.warn(self._fixed_reasons[0], RuntimeWarning, stacklevel=3)
        counted = self._counted(epoch, batches, 0)
        self._given = self._current
        return counted

    def state_dict(self) -> dict[str, Any]:
        return self._progress()

    def _load(self, state: Mapping[str, Any]) -> None:
        """Nothing of it helps inside an epoch, which begins again; one that was saved at its end does not."""
        self._over = state["epoch"] if state["ended"] and state["delivered"] else None
        if self._over is not None:
            self._take(state)
