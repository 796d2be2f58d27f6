"""Random numbers that a loader's workers draw are, after a resume inside an epoch, those of the uninterrupted run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    SequentialSampler,
    Subset,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from tenuto.errors import StateMismatch, TenutoWarning
from tenuto.integrations.torch.data.worker_generators import WorkerGenerators
from unit.integrations.torch_data.test_positions import SAMPLES, Make, Numbers, Training, check, script


class Jitter:
    """A transform with generators of its own."""

    def __init__(self) -> None:
        self.numpy = np.random.default_rng(5)
        self.old_numpy = np.random.RandomState(6)
        self.python = random.Random(7)
        self.torch = torch.Generator().manual_seed(8)

    def __call__(self, value: float) -> float:
        drawn = self.numpy.normal() + self.old_numpy.normal() + self.python.random()
        return value + drawn + torch.rand((), generator=self.torch).item()


class Transformed(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.transforms = [Jitter(), Jitter()]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        value = float(index)
        for transform in self.transforms:
            value = transform(value)
        return torch.tensor(value, dtype=torch.float64)


class Mixing:
    """Mixes the samples of a batch at random."""

    def __init__(self) -> None:
        self.rng = np.random.Generator(np.random.MT19937(3))

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * self.rng.beta(0.4, 0.4)


class Numbered(Numbers):
    """Says which worker reads, and draws."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        return torch.tensor([index, info.id, info.seed % 2**31, random.random()], dtype=torch.float64)


class Lazy(Numbers):
    """Makes its generator when it is first needed, with a seed of the worker's."""

    rng: np.random.Generator | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed() % 2**32)
        return torch.tensor([index, self.rng.normal()], dtype=torch.float64)


def seeded_by_number(worker: int) -> None:
    random.seed(1000 + worker)


def pairs() -> BatchSampler:
    return BatchSampler(SequentialSampler(range(SAMPLES)), 2, drop_last=False)


LOADERS: dict[str, Make] = {
    "own generators": lambda: DataLoader(Transformed(), batch_size=3, shuffle=True, num_workers=2),
    "own generators, wrapped, persistent": lambda: DataLoader(
        ConcatDataset([Subset(Transformed(), range(10)), Transformed()]),
        batch_size=4,
        shuffle=True,
        num_workers=3,
        persistent_workers=True,
    ),
    "collate_fn draws": lambda: DataLoader(Numbers(), batch_size=3, num_workers=2, collate_fn=Mixing()),
    "numbers of workers": lambda: DataLoader(Numbered(), batch_size=2, shuffle=True, num_workers=3),
    "worker_init_fn": lambda: DataLoader(
        Numbered(), batch_size=2, num_workers=3, worker_init_fn=seeded_by_number, prefetch_factor=4
    ),
    "worker_init_fn, persistent": lambda: DataLoader(
        Numbered(), batch_size=2, num_workers=3, worker_init_fn=seeded_by_number, persistent_workers=True
    ),
    "made late": lambda: DataLoader(Lazy(), batch_size=3, shuffle=True, num_workers=2),
    "batch sampler": lambda: DataLoader(Numbers(noisy=True), batch_sampler=pairs(), num_workers=2),
    "no batches": lambda: DataLoader(Numbers(noisy=True), batch_size=None, num_workers=2),
    "forkserver": lambda: DataLoader(
        Numbers(noisy=True), batch_size=6, num_workers=1, multiprocessing_context="forkserver", shuffle=True
    ),
    "torchdata": lambda: StatefulDataLoader(Transformed(), batch_size=3, shuffle=True, num_workers=2),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_draws_in_workers_go_on_where_they_were(make: Make) -> None:
    per_epoch = len(make())
    check(
        make, 2 * per_epoch + 3, [1, 3, per_epoch + 2, 2 * per_epoch], plain=not isinstance(make(), StatefulDataLoader)
    )
    assert script(make)[1].exact and not script(make)[1].caveats


def resumed(before: Make, now: Make) -> Training:
    training = Training(before)
    for _ in range(3):
        training.step()
    return Training.resume(now, training.save(), iterator_first=True)


def test_another_number_of_workers_is_told_where_they_draw() -> None:
    def make(workers: int, *, noisy: bool) -> Make:
        return lambda: DataLoader(Numbers(noisy=noisy), batch_size=4, shuffle=True, num_workers=workers)

    with pytest.warns(TenutoWarning, match="the loader has one worker, and had 2 when it was saved"):
        assert not resumed(make(2, noisy=True), make(1, noisy=True)).position.exact
    assert resumed(make(2, noisy=False), make(1, noisy=False)).position.exact


def test_a_generator_that_is_gone_is_told() -> None:
    def make(dataset: Callable[[], Any]) -> Make:
        return lambda: DataLoader(dataset(), batch_size=4, num_workers=1)

    training = resumed(make(Transformed), make(lambda: Numbers(SAMPLES)))
    with pytest.warns(TenutoWarning, match=r"dataset\.transforms\.0\.numpy.* is not there any more"):
        training.step()
    assert not training.position.exact


class Aging(Numbers):
    """Augments by an epoch that the training process sets."""

    epoch = 0

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.epoch])


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_an_epoch_that_persistent_workers_do_not_see_is_told(kind: Any) -> None:
    for persistent in (True, False):
        training = Training(lambda: kind(Aging(), batch_size=7, num_workers=1, persistent_workers=persistent))  # noqa: B023
        for step in range(5):
            if step == 3:
                training.loader.dataset.epoch = 1
            training.step()
        if persistent:
            with pytest.warns(TenutoWarning, match=r"Aging\.epoch was changed in this process after"):
                training.save()
        else:
            training.save()
        assert training.position.exact is not persistent


@pytest.mark.parametrize("damage", ["short", "header", "words", "sizes"])
def test_malformed_generators_are_refused(damage: str) -> None:
    make = LOADERS["numbers of workers"]
    training = Training(make)
    training.step()
    epoch, start, position, generators = training.save()
    workers = position["workers"]
    if damage == "sizes":
        workers["sizes"][0] = 10**9
    elif damage == "short":
        workers["sizes"][0] = 2
    elif damage == "header":
        workers["records"][0, 4:40] = 0
    else:
        workers["sizes"][0] -= 100
    with pytest.raises(StateMismatch):
        new = Training.resume(make, (epoch, start, position, generators), iterator_first=True)
        for _ in range(4):
            new.step()


def test_a_loader_without_workers_saves_nothing_of_them() -> None:
    assert WorkerGenerators(DataLoader(Numbers()), lambda: None).workers == 0  # type: ignore[arg-type]
    assert "workers" not in script(lambda: DataLoader(Numbers()))[1].state_dict()
