"""Samplers that must be told the epoch, as torch's DistributedSampler."""

from __future__ import annotations

from typing import Any

from holdfast.integrations.torch.sampler import ResumableSampler


class EpochOfSampler:
    """Tells a sampler its epoch, unless the training loop does so itself.

    A sampler that nobody tells the epoch repeats one order for ever, a mistake that is easily made where epochs roll
    over by themselves; a loop that calls `set_epoch` with numbers of its own is left its numbers.
    """

    def __init__(self, index_sampler: Any) -> None:
        self._sampler = next(
            (found for found in (index_sampler, getattr(index_sampler, "sampler", None)) if _takes_epochs(found)), None
        )
        self._seen: int | None = None if self._sampler is None else self._sampler.epoch

    @property
    def seen(self) -> int | None:
        """The epoch that the sampler's latest iteration began with; None where it takes none."""
        return self._seen

    @seen.setter
    def seen(self, epoch: int | None) -> None:
        if self._sampler is not None and epoch is not None:
            self._seen = epoch
            self._sampler.set_epoch(epoch)

    def begin(self, epoch: int) -> None:
        """Before an epoch's iterator is made."""
        if self._sampler is None:
            return
        if self._sampler.epoch == self._seen or isinstance(self._sampler, ResumableSampler):
            self._sampler.set_epoch(epoch)
        self._seen = self._sampler.epoch

    def repeat(self) -> None:
        """Before the iterator of an epoch that is continued is made."""
        if self._sampler is not None and self._seen is not None:
            self._sampler.set_epoch(self._seen)


def _takes_epochs(sampler: Any) -> bool:
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)
