"""A position that was counted in batches of another size than those it is gone on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What the loader draws from: its batch sampler, or without automatic batching its sampler."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


@dataclass(frozen=True, slots=True)
class Cut:
    """How an epoch is cut: `size` samples in a batch, and so many `batches`; each None where nothing says so."""

    size: int | None
    batches: int | None

    @classmethod
    def of(cls, loader: DataLoader[Any], batches: int | None) -> Cut:
        size = getattr(index_sampler(loader), "batch_size", None)  # that of a batch sampler is not the loader's
        return cls(size if type(size) is int and size > 0 else None, batches)

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> Cut:
        """That of a position; one that an older version has saved says less of it, or nothing."""
        return cls(state.get("batch_size"), state.get("batches"))

    def record(self) -> dict[str, Any]:
        return {"batch_size": self.size, "batches": self.batches}

    def differs(self, saved: Cut) -> str:
        """In words, what makes a batch of `saved` another one here; empty where nothing does, or nothing is known."""
        if self.size and saved.size:
            same = self.size == saved.size
            return "" if same else f"the batch size is {self.size}, not {saved.size} as saved"
        if self.batches is None or saved.batches is None or self.batches == saved.batches:
            return ""
        return f"an epoch has {self.batches} batches, and had {saved.batches} when it was saved"

    def ends(self, delivered: int) -> bool:
        """Whether an epoch is known to be over after so many batches."""
        return self.batches is not None and 0 < self.batches <= delivered

    def before(self, saved: Cut, delivered: int) -> int:
        """How many of these batches lie before a position that was counted in `saved`. Whole ones alone: the samples of
        one that it falls into come again, so that none is left out."""
        if self.batches is not None and saved.ends(delivered):
            return self.batches
        if self.size and saved.size:
            return delivered * saved.size // self.size
        if self.batches is not None and saved.batches:
            return delivered * self.batches // saved.batches
        return delivered

    def goes_on(self, saved: Cut, delivered: int) -> str:
        """In words, where that is."""
        before = self.before(saved, delivered)
        if saved.ends(delivered):
            return "it was saved at the epoch's end"
        if not (self.size and saved.size):
            return f"the epoch goes on after {before} of them"
        again = delivered * saved.size - before * self.size
        return "the epoch goes on " + (f"{again} samples before, which come again" if again else "from the same sample")
