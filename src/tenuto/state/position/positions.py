"""Positions in training data: the part that is saved, and the rest of an epoch after it.

Only batches *delivered to training* count, never what a loader's workers prefetched. A position makes the iterator of
an epoch, counts what it delivers, and saves that in `state_dict`. A source that cannot be positioned restarts the
epoch, with a reason.

The loaders of a framework have their own positions (their order depends on its generators), found by the module of the
value's type and loaded only then.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol, cast

from tenuto.errors import CorruptionError, StateError, StateMismatch, TenutoError, UsageError
from tenuto.events import warn
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.state.frameworks import positions_of


@record
class WorldSizeChange:
    """`saved` ranks saved what `here` ranks resume; this one is `rank`. `lost`: those that saved whose own values the
    checkpoint does not have."""

    saved: int
    here: int
    rank: int
    lost: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        return f"saved by {_ranks(self.saved)} and resumed by {self.here}"

    @property
    def new(self) -> bool:
        """Whether the checkpoint has nothing of this rank's own."""
        return self.rank >= self.saved or self.rank in self.lost

    @property
    def donor(self) -> int:
        """The rank whose random state this one starts from: the same number, or the first that is there for a new
        rank."""
        return next(rank for rank in range(self.saved) if rank not in self.lost) if self.new else self.rank


@record
class OrderCursor:
    """The position of all ranks together in one shared order of samples.

    - `used`: samples of the order of `epoch` that were delivered; `samples` once the epoch is over.
    - `seed`, `shuffle`: determine the order; a seed of None is not chosen yet.
    - `step`: samples that all ranks together take in one batch each.
    """

    epoch: int
    used: int
    samples: int
    seed: int | None
    shuffle: bool
    step: int

    def record(self) -> dict[str, Json]:
        """Returns the JSON form: integers of 64 bits become strings."""
        return {
            "epoch": self.epoch,
            "used": self.used,
            "samples": self.samples,
            "seed": None if self.seed is None else str(self.seed),
            "shuffle": self.shuffle,
            "step": self.step,
        }

    @classmethod
    def of(cls, record: Json, name: str) -> OrderCursor:
        """Reads a record. Raises CorruptionError for a malformed one; `name`: the object that contains it."""
        counts = ("epoch", "used", "samples", "step")
        sound = isinstance(record, Mapping) and all(type(record.get(key)) is int and record[key] >= 0 for key in counts)
        if not sound or record["used"] > record["samples"] or type(record.get("shuffle")) is not bool:
            raise CorruptionError(f"{name}: its position in the data is malformed", subject=name)
        try:
            seed = None if record["seed"] is None else int(str(record["seed"]))
        except (KeyError, ValueError):
            raise CorruptionError(f"{name}: its position in the data has no seed", subject=name) from None
        epoch, used, samples, step = (int(record[key]) for key in counts)
        return cls(epoch, used, samples, seed, record["shuffle"], step)


def _ranks(count: int) -> str:
    return "one process" if count == 1 else f"{count} ranks"


class DataPosition(Protocol):
    """The position in one source of batches.

    - `exact`: a resumed epoch delivers what an uninterrupted one would have; else `reasons` has the reasons.
    - `caveats`: possible differences that this position cannot see.
    - `batches_per_epoch`: None where the source does not know.
    - `elsewhere`: describes the position on another number of ranks.
    - `in_source`: the source counts by itself, whoever iterates it; else only what `iterate` returns is counted.
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
    @property
    def in_source(self) -> bool: ...
    @property
    def at(self) -> tuple[int, int, bool]:
        """The epoch, the batches delivered of it, and whether it is over (or none has begun)."""
        ...

    @property
    def source(self) -> Any:
        """What the batches come from."""
        ...

    def batches_in(self, epoch: int) -> int | None:
        """Returns `batches_per_epoch` of one epoch: one begun by another number of ranks may differ."""
        ...

    def cursor(self, epoch: int, batch: int) -> OrderCursor | None:
        """Returns the position of all ranks together in their shared order, each after `batch` batches of `epoch`; None
        without a shared order."""
        ...

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        """Replaces `load_state_dict` on another number of ranks, each of which had been given `batch` batches of
        `epoch`.

        Returns how many of this rank's batches are done. Where that is not exact, warns and adds to `reasons`.
        """
        ...

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        """Returns the batches of `epoch` after `start` delivered ones.

        Draws everything that creating the iterator takes from global generators before it returns. Continuing the
        loaded epoch (`load_state_dict`, then its epoch and start) leaves the global generators unchanged.
        """
        ...

    def run_out(self, epoch: int) -> None:
        """Replaces `iterate` for a loaded epoch whose last batch was delivered: leaves the source as requesting one
        more batch would. The caller then restores the global generators."""
        ...

    def resumes_after(self, epoch: int, batch: int) -> int:
        """Returns after how many of this source's batches an epoch resumes that was loaded after `batch`: differs if
        batches now have another size."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batches delivered so far."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a saved position; the next `iterate` continues there. Refuses one of another kind of source with a
        warning and a reason."""
        ...


def attach(data: Any) -> DataPosition:
    """Returns the position of `data`: a torch or torchdata loader, anything with `state_dict` and `load_state_dict`, a
    sequence of batches, or any other iterable. A position, as an adapter makes one, stands for itself."""
    if isinstance(data, CountedPosition):
        return cast(DataPosition, data)
    for base in type(data).__mro__:
        module = positions_of(base.__module__.partition(".")[0])
        if module is not None:
            found = module.attach(data)
            if found is not None:
                return cast(DataPosition, found)
    return attach_plain(data)


def attach_plain(data: Any) -> DataPosition:
    """Returns the position of data that is no loader of a known framework."""
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
    """Returns the length, None where there is none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def begin_whole(dataset: Any) -> None:
    """Has an epoch that is not continued begin at its beginning.

    Streams of Hugging Face's `datasets` begin *every* iteration where the state says that was loaded last, unless
    `set_epoch` told them of another epoch: each one after a resume would be as short as the rest of the resumed one.
    """
    if type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "load_state_dict"):
        dataset.load_state_dict(None)


def stream_gaps(dataset: Any) -> tuple[str, ...]:
    """Returns what the state of a stream of `datasets` is known to leave out: the samples in a buffer that shuffles."""
    inside, todo = 0, [getattr(dataset, "_ex_iterable", None)]
    while todo and inside < _MOST_STAGES:
        one, inside = todo.pop(), inside + 1
        if type(one).__name__.startswith("BufferShuffled"):
            return (
                "the stream shuffles in a buffer, and its state does not have the samples in it: inside an epoch it "
                "continues with others",
            )
        todo += [getattr(one, "ex_iterable", None), *(getattr(one, "ex_iterables", None) or ())] if one else []
    return ()


_MOST_STAGES: Final = 1000

Gap = weakref.ReferenceType[Callable[[], None]]

_NOTHING: Final = object()


class Delivered(Iterator[Any]):
    """An epoch's iterator that counts what it delivers."""

    def __init__(
        self, batches: Iterator[Any], delivered: int = 0, *, on_gap: Gap | None = None, on_end: Gap | None = None
    ) -> None:
        """`on_gap` is called when training continues after a batch whose loading raised, `on_end` when there is no
        more. They are weak references: in a cycle with its position an iterator would release its workers only at
        garbage collection."""
        self._batches = batches
        self._on_gap = on_gap
        self._on_end = on_end
        self._failed = False
        self.delivered = delivered
        self.ended = False

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            first, self.ended = not self.ended, True
            self._batches = iter(())  # releases a loader's worker processes
            self._continued()
            ended = self._on_end() if first and self._on_end is not None else None
            if ended is not None:
                ended()
            raise
        except BaseException:  # an interrupt too: a notebook may continue with the same iterator
            self._failed = True
            raise
        self._continued()
        self.delivered += 1
        return batch

    def _continued(self) -> None:
        callback = self._on_gap() if self._failed and self._on_gap is not None else None
        self._failed = False
        if callback is not None:
            callback()


class CountedPosition:
    """The common part of all positions: counting, and refusing foreign states."""

    kind = ""
    in_source = False
    _has_length = True
    """False where the source's length is only a guess."""

    def __init__(self, data: Any, reasons: tuple[str, ...] = (), caveats: tuple[str, ...] = ()) -> None:
        self._data = data
        self._fixed_reasons = reasons
        self._caveats = caveats
        self._added_reasons: tuple[str, ...] = ()
        self._epoch = 0
        self._current = Delivered(iter(()))
        self._begun = False
        self._longest: int | None = None
        """Batches of the longest epoch that has ended, where the source does not know its length."""
        self._resumed = False

    @property
    def reasons(self) -> tuple[str, ...]:
        return self._fixed_reasons + self._added_reasons

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
    def source(self) -> Any:
        return self._data

    @property
    def at(self) -> tuple[int, int, bool]:
        return self._epoch, self._current.delivered, self._current.ended or not self._begun

    @property
    def begun(self) -> bool:
        """Whether an epoch was begun, here or in what was loaded."""
        return self._begun

    def leave_epochs_to_loop(self) -> None:
        """Has the training loop set the epoch of a sampler that takes one, if anybody does."""

    @property
    def elsewhere(self) -> str:
        return f"the position in the data is exact on as many ranks alone ({self._source})"

    @property
    def _source(self) -> str:
        """The owner of the position, in words."""
        return type(self._data).__name__

    def cursor(self, epoch: int, batch: int) -> OrderCursor | None:
        return None

    def run_out(self, epoch: int) -> None:
        if self._begun and self._epoch == epoch:
            self._current.ended = True

    def resumes_after(self, epoch: int, batch: int) -> int:
        return batch

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        self._add_moved_reason(moved, "an interrupted epoch begins again")
        return 0

    def _add_moved_reason(self, moved: WorldSizeChange, so: str) -> None:
        self._add_reason(f"{self._source} was {moved.words}, and its position is exact on as many ranks alone: {so}")

    def _counted(self, epoch: int, batches: Iterator[Any], delivered: int) -> Iterator[Any]:
        self._epoch, self._begun = epoch, True
        self._current = Delivered(
            batches,
            delivered,
            on_gap=weakref.WeakMethod(self._add_gap_reason),
            on_end=None if self._has_length else weakref.WeakMethod(self._note_length),
        )
        return self._current

    def _note_length(self) -> None:
        """Tells of an epoch that is shorter than one before the resume: its source may have begun in its middle."""
        longest, here = self._longest or 0, self._current.delivered
        if self._resumed and here < longest:
            self._add_reason(
                f"epoch {self._epoch} ended after {here} batches, and one before the resume had {longest}: "
                f"{self._source} may begin each epoch where it was resumed"
            )
        self._longest = max(longest, here)

    def _add_gap_reason(self) -> None:
        self._add_reason(
            "a batch could not be loaded, and is not counted: what follows it does not continue where it was"
        )

    def _at_end(self, epoch: int, delivered: int) -> Iterator[Any]:
        """Returns the rest of an epoch that was saved at its end."""
        batches = self._counted(epoch, iter(()), delivered)
        self._current.ended = True
        return batches

    def _progress(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "epoch": self._epoch,
            "delivered": self._current.delivered,
            "ended": self._current.ended or not self._begun,
            **({} if self._has_length else {"longest": self._longest}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `DataPosition`. Raises StateMismatch if `state` is no position, or the source refuses it."""
        kind = state.get("kind")
        if kind != self.kind:
            self._add_reason(
                f"the checkpoint's position is that of another kind of source ({kind!r}, not {self.kind!r})"
            )
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
        self._longest, self._resumed = state.get("longest"), True

    def _add_reason(self, reason: str) -> None:
        """Records why the resume is not exact, and warns once per reason."""
        if reason not in self._added_reasons:
            self._added_reasons += (reason,)
            warn(f"the data does not resume exactly: {reason}")


class StatefulPosition(CountedPosition):
    """Anything with `state_dict` and `load_state_dict` that counts what it yields."""

    kind = "stateful"
    in_source = True
    _loaded: tuple[int, bool] | None = None
    _source_state: Any = None
    """The state loaded into the source, until it is iterated."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, stream_gaps(data))
        self._has_length = length(data) is not None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Those that the source itself says, as a trainer's position does, are among them."""
        return (*super().reasons, *getattr(self._data, "reasons", ()))

    @property
    def caveats(self) -> tuple[str, ...]:
        return (*super().caveats, *getattr(self._data, "caveats", ()))

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        loaded, self._loaded, self._source_state = self._loaded, None, None
        if start and loaded == (epoch, True):
            return self._at_end(epoch, start)
        if loaded is None or loaded[0] != epoch:
            begin_whole(self._data)
        return self._counted(epoch, iter(self._data), start)

    def run_out(self, epoch: int) -> None:
        if self._loaded != (epoch, False):
            return
        before, self._source_state = copy.deepcopy(self._source_state), None
        begins_anew = next(iter(self._data), _NOTHING) is not _NOTHING
        if begins_anew:  # it rewinds when asked again, and that was the first batch of the next epoch
            self._data.load_state_dict(before)
        self._loaded = epoch, True
        self._current.ended = True

    def state_dict(self) -> dict[str, Any]:
        try:
            source = self._data.state_dict()
        except TenutoError:
            raise
        except Exception as error:
            raise StateError(
                f"data: state_dict() of {self._source} failed: {error!r}",
                subject="data",
                hint="pass data that can say its state before the first batch too, or one without state_dict",
            ) from error
        return {**self._progress(), "source": source}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._take(state)
        self._data.load_state_dict(state["source"])
        self._loaded, self._source_state = (state["epoch"], state["ended"]), state["source"]


class SequencePosition(CountedPosition):
    """A sequence of batches, with an order of its own."""

    kind = "sequence"

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        return self._counted(epoch, islice(iter(self._data), start, None), start)

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        self._add_moved_reason(moved, f"the epoch continues after {batch} of this rank's batches")
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {**self._progress(), "length": len(self._data)}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._take(state)
        if state["length"] != len(self._data):
            self._add_reason(f"the data has {len(self._data)} batches, and had {state['length']} when it was saved")


class RestartingPosition(CountedPosition):
    """Data that cannot be positioned: an interrupted epoch restarts."""

    kind = "restarting"

    def __init__(self, data: Any, reason: str, caveats: tuple[str, ...] = ()) -> None:
        super().__init__(
            data, (f"the data cannot be positioned, so an interrupted epoch starts again: {reason}",), caveats
        )
        self._warned = False
        self._over: int | None = None
        """The loaded epoch, if it was saved at its end."""
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
        if start and not self._warned:
            self._warned = True
            warn(self._fixed_reasons[0])
        counted = self._counted(epoch, batches, 0)
        self._given = self._current
        return counted

    def state_dict(self) -> dict[str, Any]:
        return self._progress()

    def _load(self, state: Mapping[str, Any]) -> None:
        """Loads an epoch that was saved at its end; inside an epoch nothing helps, and it restarts."""
        self._over = state["epoch"] if state["ended"] and state["delivered"] else None
        if self._over is not None:
            self._take(state)
