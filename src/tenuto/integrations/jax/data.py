"""Positions of Grain's data sets, loaders and iterators, whose iterators have `get_state` and `set_state`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from tenuto.errors import StateError, StateMismatch, UsageError
from tenuto.state.position.positions import CountedPosition, DataPosition


def attach(data: Any) -> DataPosition | None:
    """Returns the position of a data set or loader of Grain, or of an iterator of one; None for anything else."""
    from_grain = any(base.__module__.partition(".")[0] == "grain" for base in type(data).__mro__)
    return GrainPosition(data) if from_grain and hasattr(data, "__iter__") else None


class GrainPosition(CountedPosition):
    """What Grain's own iterator says: which elements were delivered, whatever its threads have read ahead.

    A data set begins anew with each epoch; an iterator is used up, and one epoch is all that it has.
    """

    kind = "grain"

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.in_source = _has_state(data)
        self._iterator = data if self.in_source else None
        self._loaded: tuple[int, bool] | None = None

    @property
    def batches_per_epoch(self) -> int | None:
        found = super().batches_per_epoch
        return found if found is not None and found < 2**62 else None  # endless ones have the largest length there is

    def iterate(self, epoch: int, start: int) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if start and loaded == (epoch, True):
            return self._at_end(epoch, start)
        if loaded is None or loaded[0] != epoch:
            self._iterator = self._new()
        batches: Any = self._iterator
        return self._counted(epoch, iter(batches), start)

    def _new(self) -> Any:
        """Returns an iterator from the beginning. Raises UsageError for one that is used up, or has no state."""
        if self.in_source:
            if self._begun and self._current.ended:
                raise UsageError(
                    "data is an iterator of Grain that has been used up, and another epoch is asked of it",
                    subject="data",
                    hint="pass the data set, or repeat it: dataset.repeat()",
                )
            return self._data
        made = iter(self._data)
        if not _has_state(made):
            raise UsageError(
                f"an iterator of {self._source} has no get_state: its position is not known",
                subject="data",
                hint="pass a grain.MapDataset, grain.IterDataset or grain.DataLoader",
            )
        return made

    def state_dict(self) -> dict[str, Any]:
        if self._iterator is None:
            return {**self._progress(), "source": None}
        try:
            source = self._iterator.get_state()
        except Exception as error:
            raise StateError(f"data: get_state() of {self._source} failed: {error!r}", subject="data") from error
        return {**self._progress(), "source": copy.deepcopy(source)}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._take(state)
        self._loaded = state["epoch"], state["ended"]
        if state["source"] is None:
            return
        self._iterator = self._data if self.in_source else self._new()
        try:
            self._iterator.set_state(copy.deepcopy(state["source"]))
        except ValueError as error:
            raise StateMismatch(
                f"{self._source} does not take its position back: {error}",
                subject="data",
                hint="Grain compares the data source by its repr: give the class a __repr__ without an address in it",
            ) from error


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "get_state", None)) and callable(getattr(value, "set_state", None))
