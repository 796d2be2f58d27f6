"""The kinds of data and loaders."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tenuto.integrations.torch.data.sampler import ResumableSampler

SAMPLES: Final = 22
BATCH: Final = 4
Batch = tuple[torch.Tensor, torch.Tensor]


class Points(Dataset[Batch]):
    """Read in the training process, each sample also draws from every global generator, as augmentation does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Batch:
        point = torch.sin(torch.arange(8.0) * (index + 1))
        if get_worker_info() is None:
            point = point + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return point, point.sum()


class Stream(IterableDataset[Batch]):
    """The same points one after the other, from where its own state says."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.next < SAMPLES:
            self.next += 1
            yield Points()[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class OwnOrder(Sampler[int]):
    """An order out of a generator of its own that nobody can put back: for a control."""

    def __init__(self) -> None:
        self._own = random.Random(4)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from self._own.sample(range(SAMPLES), SAMPLES)


def shuffled(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Points(), batch_size=BATCH, shuffle=True, **settings)


def in_order(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Points(), batch_size=BATCH, **settings)


def own_generator(**settings: Any) -> DataLoader[Any]:
    return shuffled(generator=torch.Generator().manual_seed(9), **settings)


def own_generator_whole_batches() -> DataLoader[Any]:
    """The sampler ends only when one batch more is asked for, and draws once more then."""
    whole = Subset(Points(), range(SAMPLES // BATCH * BATCH))
    return DataLoader(whole, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(9))


def our_sampler() -> DataLoader[Any]:
    return in_order(sampler=ResumableSampler(Points(), seed=3))


def with_replacement() -> DataLoader[Any]:
    drawn = RandomSampler(Points(), replacement=True, num_samples=SAMPLES, generator=torch.Generator().manual_seed(5))
    return in_order(sampler=drawn)


def weighted() -> DataLoader[Any]:
    return in_order(sampler=WeightedRandomSampler([1.0 + index % 3 for index in range(SAMPLES)], SAMPLES))


def subset() -> DataLoader[Any]:
    return in_order(sampler=SubsetRandomSampler(range(3, SAMPLES)))


def distributed() -> DataLoader[Any]:
    return in_order(sampler=DistributedSampler(Points(), num_replicas=2, rank=1, seed=6))


def batch_sampler() -> DataLoader[Any]:
    return DataLoader(Points(), batch_sampler=BatchSampler(RandomSampler(Points()), 5, drop_last=True))


def own_order() -> DataLoader[Any]:
    return in_order(sampler=OwnOrder())


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=BATCH)


def listed() -> list[Batch]:
    points = Points()
    batches = [[points[(5 * number + one) % SAMPLES] for one in range(BATCH)] for number in range(7)]
    return [(torch.stack([one for one, _ in batch]), torch.stack([one for _, one in batch])) for batch in batches]


def stateful(**settings: Any) -> Any:
    loaders = importlib.import_module("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(Points(), batch_size=BATCH, shuffle=True, **settings)
