"""Where training is, and the random state that goes with it: captured with every save, put back on resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CorruptionError, UsageError
from holdfast.model.checkpoint import Json, Manifest
from holdfast.state.data import DataPosition, attach
from holdfast.state.rng import apply, capture


@dataclass(slots=True)
class Counters:
    """Completed steps and epochs, and batches that training has been given in the epoch that is open."""

    step: int = 0
    epoch: int = 0
    batch: int = 0

    def progress(self) -> dict[str, Json]:
        return {"step": self.step, "epoch": self.epoch, "batch": self.batch}

    @classmethod
    def of(cls, manifest: Manifest) -> Counters:
        """Where the checkpoint's training was. One of `holdfast.save` says its step alone: nobody counted epochs.

        CorruptionError where it says no step, another than its own, or what is no count.
        """
        progress = manifest.progress
        said = {"step": progress.get("step"), "epoch": progress.get("epoch", 0), "batch": progress.get("batch", 0)}
        wrong = [f"{name} {value!r}" for name, value in said.items() if type(value) is not int or value < 0]
        if not wrong and said["step"] != manifest.id.step:
            wrong = [f"step {said['step']}"]
        if wrong:
            raise CorruptionError(
                f"{manifest.id.manifest}: its progress says {', '.join(wrong)}, so how far training was is not known",
                subject=manifest.id.manifest,
                hint="holdfast.load(…) restores its state without a position",
            )
        return cls(**said)


class Position:
    """The user's data and the random state, with the counters that say how much of the data is used.

    The order on resume is what makes it exact: saved inside an epoch, the random state is put back after the rebuilt
    iterator exists; saved at an epoch's end, before the next iterator is made (making one draws from it).
    """

    def __init__(self, data: Any) -> None:
        self.counters = Counters()
        self.data: DataPosition | None = attach(data) if data is not None else None
        self._iterator: Iterator[Any] | None = None
        self._pending: Any = None
        self.on_batch: Callable[[Any], None] | None = None
        """Called with each batch that training is given."""

    def private(self) -> dict[str, Any]:
        """What belongs to this process alone and goes into every save."""
        data = self.data.state_dict() if self.data is not None else None
        return {"data": data, "random": capture()}

    def load(self, private: Mapping[str, Any], counters: Counters) -> None:
        """Takes over a checkpoint's position. The random state is put back now, and again where `settle` says."""
        self.counters.step, self.counters.epoch, self.counters.batch = counters.step, counters.epoch, counters.batch
        self._iterator = None
        if self.data is not None and private.get("data"):
            self.data.load_state_dict(private["data"])
        self._pending = private.get("random") or None
        if self._pending is not None:
            apply(self._pending)

    def roll_over_finished_epoch(self) -> None:
        """An epoch whose last batch was used is over, where epochs end by themselves (`steps`)."""
        if self.at_end:
            self.counters.epoch += 1
            self.counters.batch = 0
            self._iterator = None

    def settle(self) -> None:
        """Before the body of the first step: the random state is as it was at the save."""
        if self._pending is None:
            return
        if self.data is not None and self.counters.batch > 0 and not self.at_end:
            self.iterator()  # puts the random state back, after itself
        if self._pending is not None:
            apply(self._pending)
            self._pending = None

    def iterator(self) -> Iterator[Any]:
        """The rest of this epoch's batches; the same iterator until the epoch ends."""
        if self.data is None:
            raise UsageError(
                "this Checkpointer was given no data=", subject="batches", hint="Checkpointer(..., data=loader)"
            )
        if self._iterator is None:
            inside = self.counters.batch > 0
            if self.at_end:
                self._iterator = iter(())
            else:
                self._iterator = self.data.iterate(self.counters.epoch, self.counters.batch)
                # Data that cannot be positioned starts its epoch again; then the count does too.
                self.counters.batch = int(getattr(self._iterator, "delivered", self.counters.batch))
            if inside and self._pending is not None:
                apply(self._pending)
                self._pending = None
        return self._iterator

    def next_batch(self) -> Any:
        """The next batch of this epoch; StopIteration at its end."""
        batch = next(self.iterator())
        self.counters.batch += 1
        if self.on_batch is not None:
            self.on_batch(batch)
        return batch

    def end_epoch(self) -> None:
        self.counters.epoch += 1
        self.counters.batch = 0
        self._iterator = None

    @property
    def at_end(self) -> bool:
        """Whether the last batch of this epoch is used, where the data says how many there are."""
        length = self.data.batches_per_epoch if self.data is not None else None
        return length is not None and 0 < length <= self.counters.batch
