"""A run that is gone on with by another number of ranks than has saved it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenuto.errors import CorruptionError
from tenuto.model.records import Json


@dataclass(frozen=True, slots=True)
class WorldSizeChange:
    """`saved` ranks have saved what `here` ranks go on from; this one is `rank`."""

    saved: int
    here: int
    rank: int

    @property
    def words(self) -> str:
        return f"saved by {_ranks(self.saved)} and gone on with by {self.here}"

    @property
    def donor(self) -> int:
        """The rank whose random state this one begins with: that of its own number; a new one has the first's."""
        return self.rank if self.rank < self.saved else 0


@dataclass(frozen=True, slots=True)
class OrderCursor:
    """Where all ranks together are in one order of samples that they share.

    used: samples of `epoch`'s order that training has been given, of `samples`; `samples` itself once the epoch is
    over. seed, shuffle: what the order follows from; a seed of None is yet to be chosen. step: samples that all ranks
    together take in one batch each.
    """

    epoch: int
    used: int
    samples: int
    seed: int | None
    shuffle: bool
    step: int

    def record(self) -> dict[str, Json]:
        """As a checkpoint holds it: JSON has no integers of 64 bits."""
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
        """CorruptionError for what is none; `name`: of the object that holds it."""
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
