"""Loaders that count their own position, whoever iterates them.

In a loop of the user's own the Checkpointer never sees the batches. A loader of a subclass of its class does: it is
what a trainer expects, draws what it would draw, and says its position by `state_dict`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol, TypeVar, cast

from torch.utils.data import DataLoader

from tenuto.errors import UsageError
from tenuto.integrations.torch.data import loaders
from tenuto.state.position.positions import DataPosition, OrderCursor, WorldSizeChange

_POSITION: Final = "_tenuto_position"
Loader = TypeVar("Loader", bound=DataLoader[Any])


def resumable(loader: Loader, *, runs_out: bool = True) -> Loader:
    """Returns the loader as one that counts what it gives, with `state_dict` and `load_state_dict`.

    It is of a subclass of the loader's class, gives the same batches and draws the same random numbers. Pass it as
    `data=`, or as an entry of the state, and have the trainer iterate it: a resume inside an epoch then continues with
    the next batch, without reading those before. Loading a state changes no global generator, nor does the iterator of
    an epoch that is continued; that of a new epoch draws its order.

    runs_out: whether the trainer asks for a batch past the last one, as `for` does. False for one that stops at
        `len(loader)`: the epoch is then over with its last batch.

    Of the iterators of one loader the newest counts, and an epoch that was left early is over. A batch counts when it
    is given out: for a trainer that reads ahead of what it trains on, the position is ahead as well.

    Raises UsageError for anything but a DataLoader, such as a loader that accelerate has prepared.
    """
    kind = type(loader)
    if not issubclass(kind, DataLoader):
        raise UsageError(
            f"resumable() takes a DataLoader of torch, not {kind.__module__}.{kind.__name__}",
            subject="resumable",
            hint="wrap the DataLoader itself, before a trainer prepares it",
        )
    plain: type[Any] = kind
    if issubclass(plain, ResumableLoader):
        if plain.runs_out == runs_out:
            return loader
        plain = plain.plain_class
    made = copy.copy(loader)
    made.__dict__.pop(_POSITION, None)
    made.__class__ = _class_of(plain, runs_out)
    return made


def position_of(loader: Any) -> ResumablePosition | None:
    """Returns the position of a resumable loader; None for anything else."""
    return loader.position if isinstance(loader, ResumableLoader) else None


def any_made() -> bool:
    """Returns whether this process has made any loader resumable."""
    return bool(_classes)


_classes: Final[dict[tuple[type[Any], bool], type[Any]]] = {}


def _class_of(kind: type[Any], runs_out: bool) -> type[Any]:
    found = _classes.get((kind, runs_out))
    if found is None:
        own = {"runs_out": runs_out, "plain_class": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
        found = _classes[kind, runs_out] = type(kind.__name__, (ResumableLoader, kind), own)
    return found


class ResumableLoader(DataLoader[Any]):
    """What the subclasses add. A trainer that makes a loader anew from the arguments of this one, as for another
    sampler, makes one that counts as well."""

    runs_out = True
    plain_class: type[Any] = DataLoader

    @property
    def position(self) -> ResumablePosition:
        found: ResumablePosition | None = self.__dict__.get(_POSITION)
        if found is None:
            found = self.__dict__[_POSITION] = ResumablePosition(self._plain(), self.runs_out)
        return found

    def _plain(self) -> DataLoader[Any]:
        made = copy.copy(self)
        made.__dict__.pop(_POSITION, None)
        made.__class__ = self.plain_class
        return made

    def __iter__(self) -> Any:
        return self.position.begin()

    def state_dict(self) -> dict[str, Any]:
        return self.position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position.load_state_dict(state)


class Batches(Iterator[Any]):
    """The batches of one epoch, as whoever trains takes them."""

    def __init__(self, batches: Iterator[Any], position: ResumablePosition, length: int | None) -> None:
        self._batches = batches
        self._position = position
        self._length = length

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._position.given(self._batches)
        return batch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this data does not say how many batches an epoch has")
        return self._length


class LoaderPosition(DataPosition, Protocol):
    """The position of a loader that nobody has made resumable."""

    kind: str

    @property
    def begun(self) -> bool: ...
    def leave_epochs_to_loop(self) -> None: ...


class ResumablePosition:
    """The position of a resumable loader: that of the loader, begun by whoever iterates it.

    What it saves is what the loader's own position saves, so that either continues what the other has saved.
    """

    def __init__(self, loader: DataLoader[Any], runs_out: bool) -> None:
        self._inner = cast(LoaderPosition, loaders.attach(loader))
        self._inner.leave_epochs_to_loop()
        self._runs_out = runs_out
        self._resume: tuple[int, int] | None = None
        """Epoch and batches given of it, where the next iterator continues a loaded position."""
        self._newest: Iterator[Any] | None = None
        self.iterated = False
        """Whether anybody has iterated the loader since its position was loaded, if ever."""

    # -- whoever iterates the loader

    def begin(self) -> Iterator[Any]:
        """Returns the iterator of the next epoch, or of the rest of the loaded one."""
        epoch, start = self._resume or self._next()
        return Batches(self.iterate(epoch, start), self, self.batches_per_epoch)

    def _next(self) -> tuple[int, int]:
        epoch, _, _ = self._inner.at
        return (epoch + 1 if self._inner.begun else epoch), 0

    def given(self, batches: Iterator[Any]) -> None:
        """Notes that a batch was given out."""
        epoch, delivered, ended = self._inner.at
        if not self._runs_out and not ended and batches is self._newest and self._is_last(epoch, delivered):
            self._inner.run_out(epoch)

    def _is_last(self, epoch: int, delivered: int) -> bool:
        length = self.batches_in(epoch)
        return length is not None and 0 < length <= delivered

    # -- DataPosition

    @property
    def exact(self) -> bool:
        return self._inner.exact

    @property
    def reasons(self) -> tuple[str, ...]:
        return self._inner.reasons

    @property
    def caveats(self) -> tuple[str, ...]:
        return self._inner.caveats

    @property
    def batches_per_epoch(self) -> int | None:
        return self._inner.batches_per_epoch

    @property
    def elsewhere(self) -> str:
        return self._inner.elsewhere

    @property
    def source(self) -> Any:
        return self._inner.source

    @property
    def in_source(self) -> bool:
        return self.iterated

    @property
    def at(self) -> tuple[int, int, bool]:
        return self._inner.at

    def batches_in(self, epoch: int) -> int | None:
        return self._inner.batches_in(epoch)

    def cursor(self, epoch: int, batch: int) -> OrderCursor | None:
        own, delivered, _ = self._inner.at
        return self._inner.cursor(own, delivered)

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        if cursor is None:
            here = self._inner.move(moved, None, epoch, batch)
            self._resume = epoch, here
            return here
        over = cursor.used >= cursor.samples
        self._inner.move(moved, cursor, cursor.epoch, 0)
        self._resume = (cursor.epoch + 1 if over else cursor.epoch), 0
        return 0

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        self._resume = None
        self.iterated = True
        self._newest = self._inner.iterate(epoch, start)
        return self._newest

    def run_out(self, epoch: int) -> None:
        self._inner.run_out(epoch)

    def resumes_after(self, epoch: int, batch: int) -> int:
        return self._inner.resumes_after(epoch, batch)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)
        self._resume, self.iterated = None, False
        if state.get("kind") != self._inner.kind:
            return  # refused, with a reason
        epoch, delivered, ended = int(state["epoch"]), int(state["delivered"]), bool(state["ended"])
        start = self._inner.resumes_after(epoch, delivered)
        if not ended and not self._runs_out and self._is_last(epoch, start):
            self._inner.run_out(epoch)
            ended = True
        self._resume = (epoch + 1 if delivered else epoch, 0) if ended else (epoch, start)
