"""A sampler whose order depends only on a seed and an epoch, for one process or many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, Sampler

from tenuto.errors import StateMismatch, UsageError
from tenuto.record import record
from tenuto.state.position.positions import OrderCursor

_SLICE: Final = 8192
"""Indices converted to Python ints at a time: a permutation of 10^9 samples stays a tensor."""


class ResumableSampler(Sampler[int]):
    """Draws every sample of `data_source` once per epoch, in an order that depends only on (seed, epoch).

    It draws from no global generator, so dropout, augmentation or another loader never change the order, and reaches
    any position of any epoch without replay. `seed=None` takes `torch.initial_seed()` when the first epoch begins, and
    0 with several ranks; the seed is part of the state, so a resumed run keeps it.

    Several ranks share one order: of each `world_size` consecutive samples, rank r draws the r-th. So a step with a
    batch of B per rank uses the next B * world_size samples of the order. `rank` and `world_size` default to those of
    torch.distributed; give them where several ranks need the same samples (tensor or pipeline parallelism: the rank and
    the number of data-parallel groups).

    The checkpoint of several ranks has one number: how many samples of the epoch's order they used. With
    `tenuto.Checkpointer(data=loader)`, or `state_dict` and `load_state_dict`, any number of ranks resumes from it: no
    sample is left out or repeated, and if batch size times `world_size` is unchanged, each step uses the same samples
    as without the interruption.

    Every rank draws equally many samples. If the rest of an epoch does not divide among the ranks, the last few ranks
    repeat samples from the order's beginning, as with DistributedSampler; with `drop_last` the remainder of less than
    `world_size` samples is left out instead. Ranks that resume inside an epoch divide its rest, so only their own
    remainder is repeated or left out.

    `state_dict` counts what this sampler's iterator has *drawn*, which is what torchdata's StatefulDataLoader requires
    and what training has seen if nothing prefetches. `tenuto.Checkpointer(data=loader)` counts what was delivered to
    training, and so is correct with prefetching workers too.

    Raises UsageError for a seed beyond 64 bits, and for a rank outside `world_size`.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise UsageError(f"seed must fit in 64 bits, not {seed}", subject="seed")
        self.data_source = data_source
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.drop_last = drop_last
        self.rank, self.world_size = _share(rank, world_size)
        self._begin = 0
        """Samples of the epoch's order used before these ranks began to share its rest."""
        self._drawn = 0
        """Drawn by this rank since then."""
        self._placed = True
        """The next iteration starts at `_begin` and `_drawn`, not at the next epoch."""

    def __len__(self) -> int:
        """Returns how many samples this rank draws in an epoch that it begins."""
        return self.left(0)

    def left(self, used: int) -> int:
        """Returns how many samples each rank draws of an epoch of which all ranks together used `used`."""
        rest = max(len(self.data_source) - used, 0)
        return rest // self.world_size if self.drop_last else -(-rest // self.world_size)

    @property
    def used(self) -> int:
        """The samples of the epoch's order that all ranks together have drawn, if each has drawn as many as this one;
        all of them once this one has drawn its last."""
        if self._drawn >= self.left(self._begin):
            return len(self.data_source)
        return self._begin + self._drawn * self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch` (0, 1, ...), from its beginning."""
        self.go_to(epoch, 0)

    def go_to(self, epoch: int, used: int) -> None:
        """Makes the next iteration the rest of `epoch` after `used` samples of all ranks together."""
        self.epoch, self._begin, self._drawn, self._placed = epoch, used, 0, True

    def __iter__(self) -> Iterator[int]:
        if not self._placed and (self._drawn or self._begin):
            self.epoch, self._begin, self._drawn = self.epoch + 1, 0, 0
        self._placed = False
        order, begin = self._order(self.epoch), self._begin
        length, count = len(self.data_source), self.left(begin)
        for first in range(self._drawn, count, _SLICE):
            places = torch.arange(first, min(first + _SLICE, count)) * self.world_size + (begin + self.rank)
            places %= length  # past the last one: from the beginning again
            for index in (places if order is None else order[places]).tolist():
                self._drawn += 1
                yield index

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        generator = torch.Generator()
        generator.manual_seed(_mix(self._chosen_seed(), epoch))
        return torch.randperm(len(self.data_source), generator=generator)

    def _chosen_seed(self) -> int:
        """Returns the seed, chosen at the first call if none was given."""
        if self.seed is None:
            self.seed = _signed(torch.initial_seed()) if self.world_size == 1 else 0
        return self.seed

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed, the epoch, and how much of it was drawn."""
        out = {
            "seed": self.seed,
            "epoch": self.epoch,
            "drawn": self._drawn,
            "length": len(self.data_source),
            "shuffle": self.shuffle,
        }
        if self.world_size == 1 and not self._begin:
            return out
        return out | {"begin": self._begin, "of": self.world_size, "used": self.used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken, by the same or another number of ranks. Raises StateMismatch for other
        data or another order."""
        for name, here in (("length", len(self.data_source)), ("shuffle", self.shuffle)):
            if state[name] != here:
                raise StateMismatch(
                    f"the saved sampler had {name} {state[name]}, and this one has {here}", subject=f"sampler/{name}"
                )
        self.seed = state["seed"]
        if state.get("of", 1) == self.world_size:
            self.go_to(state["epoch"], state.get("begin", 0))
            self._drawn = state["drawn"]
        else:
            self.go_to(state["epoch"], state.get("used", state["drawn"]))


def _share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Returns rank and number of ranks; defaults to torch.distributed."""
    if rank is None and world_size is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world_size = 0 if rank is None else rank, 1 if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} is not one of {world_size} ranks", subject="rank", hint="give both: rank=, world_size="
        )
    return rank, world_size


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def _mix(seed: int, epoch: int) -> int:
    """Mixes both with splitmix64's finaliser: (seed 0, epoch 1) is not (seed 1, epoch 0)."""
    word = (seed + 0x9E3779B97F4A7C15 * (epoch + 1)) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return _signed(word ^ (word >> 31))


# -- the shared order, counted in one loader's batches and in samples of all ranks


@record
class OrderBase:
    """The position inside `epoch` where these ranks took over: after `used` samples of its order, counted as `batches`
    of each rank."""

    epoch: int
    batches: int
    used: int


class SharedOrder:
    """The order of a loader's sampler, of which every rank takes its share in batches of one size."""

    def __init__(self, sampler: ResumableSampler, batch_size: int, *, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._base: OrderBase | None = None

    @classmethod
    def of(cls, indices: Any) -> SharedOrder | None:
        """Returns the shared order of a loader's index source; None if it has none that is known here."""
        if type(indices) is ResumableSampler:
            return cls(indices, 1, drop_last=False)
        known = type(indices) is BatchSampler or type(indices).__module__.partition(".")[0] == "torchdata"
        if not known or not isinstance(indices, BatchSampler) or type(indices.sampler) is not ResumableSampler:
            return None
        return cls(indices.sampler, int(indices.batch_size), drop_last=bool(indices.drop_last))

    def batches_in(self, epoch: int) -> int:
        """Returns this rank's batches of an epoch, with those that count as delivered before it took part."""
        base = self.base(epoch)
        left = self._sampler.left(base.used)
        return base.batches + (left // self._batch_size if self._drop_last else -(-left // self._batch_size))

    def base(self, epoch: int) -> OrderBase:
        """Returns where these ranks began an epoch."""
        found = self._base
        return found if found is not None and found.epoch == epoch else OrderBase(epoch, 0, 0)

    def place(self, epoch: int) -> None:
        """Makes the sampler's next iteration the share of these ranks in an epoch."""
        self._sampler.go_to(epoch, self.base(epoch).used)

    def sampler_state(self) -> dict[str, Any]:
        """Returns the state of the sampler, for `stand`."""
        return self._sampler.state_dict()

    def restore_state(self, at: Mapping[str, Any]) -> None:
        """Restores the state of the sampler. A running iteration is unaffected."""
        self._sampler.load_state_dict(at)

    def cursor(self, epoch: int, batch: int) -> OrderCursor:
        """Returns the position of all ranks after `batch` batches of an epoch each."""
        base, samples = self.base(epoch), len(self._sampler.data_source)
        step = self._batch_size * self._sampler.world_size
        over = 0 < self.batches_in(epoch) <= batch
        used = samples if over else min(base.used + (batch - base.batches) * step, samples)
        return OrderCursor(epoch, used, samples, self._sampler.seed, self._sampler.shuffle, step)

    def begin_at(self, cursor: OrderCursor, epoch: int, batch: int) -> tuple[str, ...]:
        """Continues where other ranks were, with `batch` batches of the epoch counted as delivered. Returns why the
        data differs, if it does."""
        self._sampler.seed = cursor.seed if cursor.seed is not None else self._sampler.seed
        samples = len(self._sampler.data_source)
        self._base = OrderBase(epoch, batch, min(cursor.used, samples)) if batch else None
        reasons = []
        if cursor.samples != samples:
            reasons.append(f"the dataset has {samples} samples, and had {cursor.samples} when it was saved")
        if cursor.shuffle != self._sampler.shuffle:
            reasons.append(f"shuffle is {self._sampler.shuffle}, and was {cursor.shuffle} when it was saved")
        return tuple(reasons)

    def steps_differ(self, step: int) -> tuple[str, ...]:
        """Describes a changed number of samples per step of all ranks; `step` is the saved one."""
        here = self._batch_size * self._sampler.world_size
        if here == step:
            return ()
        return (f"all ranks together take {here} samples in a batch each, and took {step}: steps take other samples",)

    def cut_anew(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """As `steps_differ`, for a state saved by the same number of ranks."""
        return self.steps_differ(state["batch_size"] * self._sampler.world_size)

    def state_dict(self, epoch: int, batch: int) -> dict[str, Any]:
        """Returns the state after `batch` batches of `epoch`."""
        base, now = self.base(epoch), self.cursor(epoch, batch)
        found: dict[str, Any] = {"seed": self._sampler.seed, "batch_size": self._batch_size, "used": now.used}
        return found if not base.used else found | {"epoch": epoch, "began_after": base.batches, "began_at": base.used}

    def load_state_dict(self, state: Mapping[str, Any], epoch: int, batch: int) -> bool:
        """Loads what the same number of ranks saved after `batch` batches of `epoch`. Returns whether the batch size
        changed, so that these ranks start anew from there; else they keep their base."""
        if state["seed"] is not None:
            self._sampler.seed = state["seed"]
        anew = bool(state["batch_size"] != self._batch_size and batch)
        if anew:
            self._base = OrderBase(epoch, batch, min(state["used"], len(self._sampler.data_source)))
        else:
            began = "began_at" in state
            self._base = OrderBase(state["epoch"], state["began_after"], state["began_at"]) if began else None
        return anew
