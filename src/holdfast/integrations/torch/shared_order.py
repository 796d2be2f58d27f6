"""The order that ranks share by a ResumableSampler, counted in one loader's batches and in samples of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler

from holdfast.integrations.torch.sampler import ResumableSampler
from holdfast.model.moved import Cursor


@dataclass(frozen=True, slots=True)
class Base:
    """Where these ranks have begun, inside `epoch`, which others had begun before: `used` samples of its order were
    used, and `batches` of each rank's counted."""

    epoch: int
    batches: int
    used: int


class SharedOrder:
    """What a loader's sampler draws, of which every rank takes its share in batches of one size."""

    def __init__(self, sampler: ResumableSampler, batch_size: int, *, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._base: Base | None = None

    @classmethod
    def of(cls, indices: Any) -> SharedOrder | None:
        """That of what a loader draws from; None where it shares no order that is known here."""
        if type(indices) is ResumableSampler:
            return cls(indices, 1, drop_last=False)
        known = type(indices) is BatchSampler or type(indices).__module__.partition(".")[0] == "torchdata"
        if not known or not isinstance(indices, BatchSampler) or type(indices.sampler) is not ResumableSampler:
            return None
        return cls(indices.sampler, int(indices.batch_size), drop_last=bool(indices.drop_last))

    def batches_in(self, epoch: int) -> int:
        """This rank's batches of an epoch, with those that count as delivered before it began to take part."""
        base = self.base(epoch)
        left = self._sampler.left(base.used)
        return base.batches + (left // self._batch_size if self._drop_last else -(-left // self._batch_size))

    def base(self, epoch: int) -> Base:
        """Where these ranks have begun with an epoch."""
        found = self._base
        return found if found is not None and found.epoch == epoch else Base(epoch, 0, 0)

    def place(self, epoch: int) -> None:
        """The sampler's next iteration is what these ranks take of an epoch."""
        self._sampler.go_to(epoch, self.base(epoch).used)

    def standing(self) -> dict[str, Any]:
        """Where the sampler is, for `stand`."""
        return self._sampler.state_dict()

    def stand(self, at: Mapping[str, Any]) -> None:
        """Puts the sampler where it was. An iteration that has begun goes on as it would have."""
        self._sampler.load_state_dict(at)

    def cursor(self, epoch: int, batch: int) -> Cursor:
        """Where all ranks are once each has been given `batch` batches of an epoch."""
        base, samples = self.base(epoch), len(self._sampler.data_source)
        step = self._batch_size * self._sampler.world_size
        over = 0 < self.batches_in(epoch) <= batch
        used = samples if over else min(base.used + (batch - base.batches) * step, samples)
        return Cursor(epoch, used, samples, self._sampler.seed, self._sampler.shuffle, step)

    def begin_at(self, cursor: Cursor, epoch: int, batch: int) -> tuple[str, ...]:
        """These ranks go on where others were, `batch` batches of the epoch counting as delivered; returns why they go
        through the data differently, where they do."""
        self._sampler.seed = cursor.seed if cursor.seed is not None else self._sampler.seed
        samples = len(self._sampler.data_source)
        self._base = Base(epoch, batch, min(cursor.used, samples)) if batch else None
        reasons = []
        if cursor.samples != samples:
            reasons.append(f"the dataset has {samples} samples, and had {cursor.samples} when it was saved")
        if cursor.shuffle != self._sampler.shuffle:
            reasons.append(f"shuffle is {self._sampler.shuffle}, and was {cursor.shuffle} when it was saved")
        return tuple(reasons)

    def steps_differ(self, step: int) -> tuple[str, ...]:
        """In words, where a step of all ranks takes another number of samples than `step`, which it took."""
        here = self._batch_size * self._sampler.world_size
        if here == step:
            return ()
        return (f"all ranks together take {here} samples in a batch each, and took {step}: steps are cut anew",)

    def cut_anew(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """As `steps_differ`, of what as many ranks have saved."""
        return self.steps_differ(state["batch_size"] * self._sampler.world_size)

    def state_dict(self, epoch: int, batch: int) -> dict[str, Any]:
        """After `batch` batches of `epoch`."""
        base, now = self.base(epoch), self.cursor(epoch, batch)
        found: dict[str, Any] = {"seed": self._sampler.seed, "batch_size": self._batch_size, "used": now.used}
        return found if not base.used else found | {"epoch": epoch, "began_after": base.batches, "began_at": base.used}

    def load_state_dict(self, state: Mapping[str, Any], epoch: int, batch: int) -> bool:
        """What as many ranks have saved after `batch` batches of `epoch`. Whether these ranks begin anew there, because
        their batches are of another size; else they go on from where they had begun."""
        if state["seed"] is not None:
            self._sampler.seed = state["seed"]
        anew = bool(state["batch_size"] != self._batch_size and batch)
        if anew:
            self._base = Base(epoch, batch, min(state["used"], len(self._sampler.data_source)))
        else:
            began = "began_at" in state
            self._base = Base(state["epoch"], state["began_after"], state["began_at"]) if began else None
        return anew
