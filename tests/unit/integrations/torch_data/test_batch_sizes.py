"""An epoch that is gone on with in batches of another size: nothing is left out, and what comes again is said."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import tenuto
from support.thinning import crossed
from tenuto import every
from tenuto.errors import TenutoWarning
from tenuto.state.position.positions import attach


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Numbers without an end, and the next one as its state."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Own(Sampler[list[int]]):
    """Batches of somebody's own, that say how many they are and not of what size."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return (63 + self._width) // self._width

    def __iter__(self) -> Iterator[list[int]]:
        yield from BatchSampler(RandomSampler(range(64)), self._width, drop_last=False)


OF_A_SIZE: dict[str, Callable[[int], Any]] = {
    "plain": lambda size: DataLoader(Numbers(), batch_size=size, shuffle=True),
    "batch sampler": lambda size: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(range(64)), size, drop_last=False)
    ),
    "batches of one's own": lambda size: DataLoader(Numbers(), batch_sampler=Own(size)),
    "unbatched": lambda size: DataLoader(
        Numbers(), batch_size=None, sampler=BatchSampler(RandomSampler(range(64)), size, drop_last=False)
    ),
    "stateful": lambda size: StatefulDataLoader(Numbers(), batch_size=size, shuffle=True),
}


@pytest.mark.parametrize(("name", "case"), crossed(list(OF_A_SIZE), [(10, 8, 3), (10, 2, 12), (16, 8, 0), (16, 2, 0)]))
def test_another_batch_size_loses_nothing_of_the_epoch(tmp_path: Path, name: str, case: tuple[int, int, int]) -> None:
    make, (saved_at, size, rest) = OF_A_SIZE[name], case
    seen: list[int] = []

    def train(batch_size: int, stop_at: int) -> int:
        loader = make(batch_size)
        with tenuto.Checkpointer(tmp_path / "place", {"n": 0}, data=loader, save=every(steps=1)) as ckpt:
            for _ in ckpt.epochs(1):
                begun = ckpt.step
                for batch in ckpt.batches:
                    seen.extend(map(int, batch))
                    if ckpt.step + 1 == stop_at:
                        ckpt.stop()
                return ckpt.step - begun
        return 0

    train(4, saved_at)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train(size, 0) == rest
    assert len(seen) == saved_at * 4 + rest * size and sorted(seen) == list(range(64))
    # An epoch that was stopped in its last batch is over: the next one has only its own size.
    told = any("as saved" in str(one.message) or "batches, and had" in str(one.message) for one in caught)
    assert told or saved_at * 4 == 64


def lives(make: Callable[[int], Any], *sizes_and_batches: tuple[int, int]) -> list[int]:
    """The samples of one epoch that is taken so many batches of a size at a time, and then to its end."""
    saved, delivered, seen = None, 0, []
    for size, count in sizes_and_batches:
        position = attach(make(size))
        if saved is not None:
            position.load_state_dict(copy.deepcopy(saved))
            delivered = position.resumes_after(0, delivered)
        batches = position.iterate(0, delivered)
        for batch in itertools.islice(batches, count):
            seen.extend(map(int, batch))
            delivered += 1
        saved = position.state_dict()
        assert saved["delivered"] == delivered
    for batch in batches:
        seen.extend(map(int, batch))
        delivered += 1
    assert delivered == position.batches_in(0), "counted to the end, in batches of the last size"
    return seen


@pytest.mark.filterwarnings("ignore:the data does not resume exactly")
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("changes", [[(4, 3), (5, 1)], [(4, 3), (8, 0), (5, 2), (3, 1)], [(4, 1), (3, 1), (60, 0)]])
def test_sizes_that_do_not_divide_leave_nothing_out(changes: list[tuple[int, int]], drop_last: bool) -> None:
    def plain(size: int) -> Any:
        return DataLoader(Numbers(), batch_size=size, shuffle=True, drop_last=drop_last)

    def stateful(size: int) -> Any:
        return StatefulDataLoader(Numbers(), batch_size=size, shuffle=True, drop_last=drop_last)

    dropped = changes[-1][0] - 1 if drop_last else 0
    assert len(set(lives(plain, *changes))) >= 64 - dropped
    seen = lives(stateful, *changes)
    assert len(set(seen)) == len(seen) >= 64 - dropped, "and nothing comes twice: it counts samples"


def test_what_counts_batches_begins_the_epoch_again_where_they_are_of_another_size() -> None:
    def make(size: int) -> Any:
        return StatefulDataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(64)), size, False))

    position = attach(make(4))
    batches = position.iterate(0, 0)
    for _ in range(10):
        next(batches)
    resumed = attach(make(8))
    with pytest.warns(TenutoWarning, match="the batch size is 8, not 4 as saved.* the epoch begins again"):
        resumed.load_state_dict(position.state_dict())
    assert not resumed.exact and resumed.resumes_after(0, 10) == 0
    assert resumed.state_dict()["delivered"] == 0
    assert [index for batch in resumed.iterate(0, 0) for index in batch.tolist()] == list(range(64))


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_a_stream_goes_on_from_its_sample_in_batches_of_another_size_and_says_so(loader: Any) -> None:
    position = attach(loader(Stream(), batch_size=4))
    next(position.iterate(0, 0))
    resumed = attach(loader(Stream(), batch_size=8))
    with pytest.warns(TenutoWarning, match="the batch size is 8, not 4 as saved"):
        resumed.load_state_dict(position.state_dict())
    assert next(resumed.iterate(0, resumed.resumes_after(0, 1))).tolist() == list(range(4, 12))


def of_an_older_version(state: dict[str, Any]) -> dict[str, Any]:
    """What a position held before it said what it is counted in."""
    later = {"batches", "used", "keeps_workers", "drawn", "order_of"} | (
        {"samples", "batch_size"} if state["kind"] != "replay" else set()
    )
    return {name: value for name, value in copy.deepcopy(state).items() if name not in later}


@pytest.mark.parametrize("make", [OF_A_SIZE["plain"], OF_A_SIZE["batch sampler"], OF_A_SIZE["stateful"]])
@pytest.mark.parametrize("taken", [6, 16])
def test_a_position_of_an_older_version_is_taken(make: Callable[[int], Any], taken: int) -> None:
    position = attach(make(4))
    batches = position.iterate(0, 0)
    for _ in range(taken):
        next(batches)
    saved = of_an_older_version(position.state_dict())
    resumed = attach(make(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(saved)
        assert resumed.resumes_after(0, taken) == taken
        rest = resumed.iterate(0, taken)
    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in batches]
    assert resumed.exact


@pytest.mark.parametrize("make", [OF_A_SIZE["plain"], OF_A_SIZE["stateful"]])
def test_other_data_is_said(make: Callable[[int], Any]) -> None:
    position = attach(make(4))
    next(position.iterate(0, 0))
    resumed = attach(make(4))
    with pytest.warns(TenutoWarning, match="the dataset has 64 samples, and had 63"):
        resumed.load_state_dict({**position.state_dict(), "samples": 63})
    assert resumed.resumes_after(0, 1) == 1 and not resumed.exact
