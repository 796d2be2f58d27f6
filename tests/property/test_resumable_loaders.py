"""A loader that counts for itself, iterated by a loop that knows nothing of it: stopped after any batch and resumed, it
gives what an uninterrupted loader gives, and leaves every generator as that one does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from tenuto.state.position import rng
from tenuto.torch import ResumableSampler, resumable

EPOCHS, SAMPLES = 3, 11


class Stream(IterableDataset[int]):
    """A stream with a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < SAMPLES:
            self.at += 1
            yield self.at - 1 + int(torch.randint(100, ()).item()) * 100
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader_of(kind: str, workers: int = 0) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(SAMPLES))
    more: dict[str, Any] = {"batch_size": 3, "num_workers": workers}
    match kind:
        case "in order":
            return DataLoader(data, **more)
        case "shuffled":
            return DataLoader(data, shuffle=True, **more)
        case "own generator":
            return DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(5), drop_last=True, **more)
        case "subset":
            return DataLoader(data, sampler=SubsetRandomSampler(range(2, 9)), **more)
        case "weighted":
            return DataLoader(data, sampler=WeightedRandomSampler([1.0] * SAMPLES, 10), **more)
        case "batch sampler":
            sampler = BatchSampler(RandomSampler(data), 4, drop_last=False)
            return DataLoader(data, batch_sampler=sampler, num_workers=workers)
        case "distributed":
            return DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=3), **more)
        case "shared order":
            return DataLoader(data, sampler=ResumableSampler(data, seed=4, rank=0, world_size=2), **more)
    return DataLoader(Stream(), batch_size=3)


KINDS = ("in order", "shuffled", "own generator", "subset", "weighted", "batch sampler", "distributed", "shared order")


class Loop:
    """Somebody's loop. `asks_past`: whether it asks for a batch behind the last one."""

    def __init__(self, loader: Any, asks_past: bool) -> None:
        self.loader, self.asks_past = loader, asks_past
        self.epoch = self.batch = 0

    def run(self, most: int) -> list[Any]:
        """Trains for so many batches, or to the end; returns what each step saw."""
        seen: list[Any] = []
        while self.epoch < EPOCHS and len(seen) < most:
            if isinstance(getattr(self.loader, "sampler", None), DistributedSampler):
                self.loader.sampler.set_epoch(self.epoch)
            batches = iter(self.loader)
            while True:
                if not self.asks_past and self.batch == len(self.loader):
                    break
                if len(seen) == most:
                    return seen
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                self.batch += 1
                seen.append((self.epoch, [one.tolist() for one in batch], torch.rand(()).item(), random.random()))
            self.epoch, self.batch = self.epoch + 1, 0
        return seen


def seeded() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def stopped(kind: str, stops: list[int], *, runs_out: bool, workers: int = 0) -> list[Any]:
    """Stops after each of these numbers of batches, and resumes in a loop with a loader of its own."""
    seeded()
    loop = Loop(resumable(loader_of(kind, workers), runs_out=runs_out), runs_out)
    seen: list[Any] = []
    for stop in [*stops, 1000]:
        seen += loop.run(stop)
        saved, generators = loop.loader.state_dict(), rng.capture()
        again = Loop(resumable(loader_of(kind, workers), runs_out=runs_out), runs_out)
        again.loader.load_state_dict(saved)
        torch.rand(5)  # a trainer's own checks
        rng.apply(generators)
        again.epoch, again.batch = loop.epoch, loop.batch
        if not runs_out and loop.batch == len(loop.loader):
            again.epoch, again.batch = loop.epoch + 1, 0  # such a loop knows that its epoch is over
        loop = again
    return seen


def whole(kind: str, runs_out: bool, workers: int = 0) -> list[Any]:
    seeded()
    loader = loader_of(kind, workers)
    if kind == "shared order":  # which takes its epochs from whoever counts them
        loader = resumable(loader, runs_out=runs_out)
    return Loop(loader, runs_out).run(1000)


@settings(max_examples=12, deadline=None)
@given(stops=st.lists(st.integers(0, 5), max_size=5), runs_out=st.booleans())
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_after_any_batch_it_gives_the_rest(kind: str, stops: list[int], runs_out: bool) -> None:
    assert stopped(kind, stops, runs_out=runs_out) == whole(kind, runs_out)


@settings(max_examples=12, deadline=None)
@given(stops=st.lists(st.integers(0, 5), max_size=5))
def test_a_stream_that_says_where_it_is_resumes_there(stops: list[int]) -> None:
    assert stopped("stream", stops, runs_out=True) == whole("stream", True)


@pytest.mark.parametrize("runs_out", [True, False])
@pytest.mark.parametrize("kind", ["shuffled", "own generator"])
def test_with_workers_that_read_ahead(kind: str, runs_out: bool) -> None:
    assert stopped(kind, [2, 3], runs_out=runs_out, workers=2) == whole(kind, runs_out, workers=2)
