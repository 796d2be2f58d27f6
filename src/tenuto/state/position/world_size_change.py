"""A run resumed by another number of ranks than saved it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenuto.errors import CorruptionError
from tenuto.model.records import Json


@dataclass(frozen=True, slots=True)
class WorldSizeChange:
    """`saved` ranks saved what `here` ranks resume; this one is `rank`."""

    saved: int
    here: int
    rank: int

    @property
    def words(self) -> str:
        return f"saved by {_ranks(self.saved)} and resumed by {self.here}"

    @property
    def donor(self) -> int:
        """The rank whose random state this one starts from: the same number, or rank 0 for a new rank."""
        return self.rank if self.rank < self.saved else 0


@dataclass(frozen=True, slots=True)
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
