"""An order that ranks share: gone on with by any number of them, nothing comes twice and nothing is left out."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tenuto.errors import CorruptionError, TenutoWarning, UsageError
from tenuto.integrations.torch.data.sampler import ResumableSampler
from tenuto.state.position.positions import DataPosition, OrderCursor, WorldSizeChange, attach

SEED = 11


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def order_of(length: int, epoch: int, *, shuffle: bool = True, seed: int = SEED) -> list[int]:
    """The whole order of an epoch, as one rank draws it."""
    sampler = ResumableSampler(range(length), shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def rounds(taken: Sequence[Sequence[int]]) -> list[int]:
    """What ranks have drawn one after the other, in turn."""
    assert len({len(one) for one in taken}) <= 1, "some rank draws more than another"
    return [index for round in zip(*taken, strict=True) for index in round]


# -- the sampler -----------------------------------------------------------------------------------------------------


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    length=st.integers(0, 60),
    ranks=st.integers(1, 7),
    used=st.integers(0, 70),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_ranks_share_out_what_is_left_of_one_order(
    length: int, ranks: int, used: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    whole = order_of(length, epoch, shuffle=shuffle)
    used = min(used, length)
    taken = []
    for rank in range(ranks):
        sampler = ResumableSampler(
            range(length), seed=SEED, shuffle=shuffle, rank=rank, world_size=ranks, drop_last=drop_last
        )
        sampler.go_to(epoch, used)
        taken.append(list(sampler))
        assert len(taken[-1]) == sampler.left(used)
        assert sampler.used == length, "it has drawn its last"
    found, rest = rounds(taken), whole[used:]
    if drop_last:
        assert found == rest[: len(found)] and 0 <= len(rest) - len(found) < ranks
    else:
        assert found[: len(rest)] == rest
        again = found[len(rest) :]
        assert len(again) < ranks
        assert again == [whole[number % length] for number in range(len(again))]


def test_all_of_one_epoch_is_the_default_and_so_is_one_rank() -> None:
    assert rounds([list(ResumableSampler(range(10), seed=1, rank=rank, world_size=4)) for rank in range(4)])[:10] == (
        order_of(10, 0, seed=1)
    )
    assert len(ResumableSampler(range(10), rank=3, world_size=4)) == 3
    assert len(ResumableSampler(range(10), rank=3, world_size=4, drop_last=True)) == 2


def test_ranks_agree_on_an_order_without_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for rank in range(3):
        torch.manual_seed(rank)  # as many scripts do, for dropout
        taken.append(list(ResumableSampler(range(30), rank=rank, world_size=3)))
    assert sorted(rounds(taken)) == list(range(30))


def test_rank_and_number_of_ranks_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
    sampler = ResumableSampler(range(10))
    assert (sampler.rank, sampler.world_size) == (2, 5)
    assert ResumableSampler(range(10), rank=0, world_size=1).world_size == 1


@pytest.mark.parametrize(("rank", "of"), [(1, None), (-1, 2), (2, 2), (None, 0)])
def test_a_rank_that_is_none_is_refused(rank: int | None, of: int | None) -> None:
    with pytest.raises(UsageError, match="not one of"):
        ResumableSampler(range(3), rank=rank, world_size=of)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    length=st.integers(1, 40),
    ranks=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    taken=st.integers(0, 12),
    drop_last=st.booleans(),
)
def test_the_state_of_one_rank_is_that_of_all(length: int, ranks: list[int], taken: int, drop_last: bool) -> None:
    """state_dict of any rank, load_state_dict on each of another number of them, again and again."""
    saved: Any = None
    found: list[int] = []
    for of in ranks:
        samplers = [
            ResumableSampler(range(length), seed=SEED, rank=rank, world_size=of, drop_last=drop_last)
            for rank in range(of)
        ]
        for sampler in samplers:
            if saved is not None:
                sampler.load_state_dict(saved)
        drawn = [list(islice(iter(sampler), taken)) for sampler in samplers]
        found += rounds(drawn)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state == states[0] for state in states)
        saved = states[0]
        if samplers[0].used == length:
            break
    whole = order_of(length, 0)
    assert found[:length] == whole[: len(found)]


# -- loaders ---------------------------------------------------------------------------------------------------------

Make = Callable[[int, int, int], Any]
"""A loader of (samples, rank, number of ranks) with batches of a size of its own."""


def plain(batch: int, **more: Any) -> Make:
    def make(length: int, rank: int, of: int) -> Any:
        sampler = ResumableSampler(Numbers(length), seed=SEED, rank=rank, world_size=of)
        return DataLoader(Numbers(length), batch_size=batch, sampler=sampler, **more)

    return make


def stateful(batch: int) -> Make:
    def make(length: int, rank: int, of: int) -> Any:
        sampler = ResumableSampler(Numbers(length), seed=SEED, rank=rank, world_size=of)
        return StatefulDataLoader(Numbers(length), batch_size=batch, sampler=sampler)

    return make


def in_batches(batch: int) -> Make:
    def make(length: int, rank: int, of: int) -> Any:
        sampler = ResumableSampler(Numbers(length), seed=SEED, rank=rank, world_size=of)
        return DataLoader(Numbers(length), batch_sampler=BatchSampler(sampler, batch, drop_last=False))

    return make


def stateful_in_batches(batch: int) -> Make:
    def make(length: int, rank: int, of: int) -> Any:
        sampler = ResumableSampler(Numbers(length), seed=SEED, rank=rank, world_size=of)
        return StatefulDataLoader(Numbers(length), batch_sampler=BatchSampler(sampler, batch, drop_last=False))

    return make


MAKES = pytest.mark.parametrize(
    "make",
    [plain, stateful, in_batches, stateful_in_batches],
    ids=["plain", "stateful", "batch sampler", "stateful, batch sampler"],
)


def unbatched(length: int, rank: int, of: int) -> Any:
    return DataLoader(
        Numbers(length), batch_size=None, sampler=ResumableSampler(Numbers(length), seed=SEED, rank=rank, world_size=of)
    )


class Ranks:
    """A training loop of several ranks over epochs, that can be saved between two steps."""

    def __init__(self, make: Make, length: int, of: int) -> None:
        self.positions: list[DataPosition] = [attach(make(length, rank, of)) for rank in range(of)]
        self.of, self.epoch, self.batch = of, 0, 0
        self.iterators: list[Iterator[Any]] | None = None
        self.steps: list[tuple[int, list[int]]] = []
        """Of each step its epoch and what all ranks were given, in turn."""

    def step(self) -> None:
        if self.positions[0].batches_in(self.epoch) == self.batch and self.batch:
            self.epoch, self.batch, self.iterators = self.epoch + 1, 0, None
        if self.iterators is None:
            self.iterators = [position.iterate(self.epoch, self.batch) for position in self.positions]
        given = [next(iterator) for iterator in self.iterators]
        self.steps.append((self.epoch, rounds([one.reshape(-1).tolist() if hasattr(one, "reshape") else [one]
                                               for one in given])))  # fmt: skip
        self.batch += 1

    def save(self) -> dict[str, Any]:
        cursors = [position.cursor(self.epoch, self.batch) for position in self.positions]
        assert all(cursor == cursors[0] for cursor in cursors), "one for all ranks"
        assert cursors[0] is not None
        return {
            "counts": (self.epoch, self.batch),
            "cursor": cursors[0].record(),
            "own": [position.state_dict() for position in self.positions],
        }

    @classmethod
    def resume(cls, make: Make, length: int, of: int, saved: dict[str, Any]) -> Ranks:
        new = cls(make, length, of)
        new.epoch, batch = saved["counts"]
        cursor = OrderCursor.of(saved["cursor"], "a manifest")
        here = []
        for rank, position in enumerate(new.positions):
            if of == len(saved["own"]):
                position.load_state_dict(saved["own"][rank])
                here.append(batch)
            else:
                here.append(position.move(WorldSizeChange(len(saved["own"]), of, rank), cursor, new.epoch, batch))
        assert len(set(here)) == 1
        new.batch = here[0]
        return new


def epochs_of(steps: list[tuple[int, list[int]]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for epoch, taken in steps:
        found.setdefault(epoch, []).extend(taken)
    return found


def check(length: int, lives: list[tuple[Make, int, int]]) -> list[tuple[int, list[int]]]:
    """Each of `lives` (loader, ranks, steps) goes on from the one before; every epoch that is left is its order."""
    ranks: Ranks | None = None
    saved: dict[str, Any] | None = None
    steps: list[tuple[int, list[int]]] = []
    most = max(of for _, of, _ in lives)
    for make, of, count in lives:
        ranks = Ranks(make, length, of) if saved is None else Ranks.resume(make, length, of, saved)
        for _ in range(count):
            ranks.step()
        assert all(position.exact for position in ranks.positions), ranks.positions[0].reasons
        steps += ranks.steps
        saved = ranks.save()
    found = epochs_of(steps)
    for epoch, taken in found.items():
        whole = order_of(length, epoch)
        assert taken[:length] == whole[: len(taken)], "the order, without a gap and without a repetition"
        if epoch < max(found):
            assert length <= len(taken) < length + most
            assert taken[length:] == [whole[number % length] for number in range(len(taken) - length)]
    return steps


@settings(max_examples=75, derandomize=True, deadline=None)
@given(
    length=st.integers(1, 40),
    lives=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 9)), min_size=2, max_size=4),
)
def test_any_number_of_ranks_goes_on_in_the_same_order(length: int, lives: list[tuple[int, int, int]]) -> None:
    """(batch size, ranks, steps) of each life, at random: uneven remainders, ends of epochs, as many ranks again."""
    check(length, [(plain(batch), of, steps) for batch, of, steps in lives])


@pytest.mark.parametrize("first", range(9))
@MAKES
def test_steps_take_what_they_would_have_taken_where_all_ranks_take_as_much(
    make: Callable[[int], Make], first: int
) -> None:
    """12 samples a step of 48: 4 ranks, 2, 3, 1, whatever step they change at."""
    whole = check(48, [(make(3), 4, 11)])
    pieces = check(48, [(make(3), 4, first), (make(6), 2, 1), (make(4), 3, 1), (make(12), 1, 9 - first)])
    assert [(epoch, sorted(given)) for epoch, given in pieces] == [(epoch, sorted(given)) for epoch, given in whole]


@MAKES
def test_ranks_that_change_twice_in_an_epoch_and_save_before_a_batch(make: Callable[[int], Make]) -> None:
    """What has moved is saved as it came, gone on with by as many, and moved again, in batches of another size too."""
    lives = [(make(2), 2, 17), (make(2), 3, 0), (make(2), 3, 0), (make(2), 3, 2), (make(3), 3, 0), (make(3), 5, 3)]
    check(60, lives)


@MAKES
def test_as_many_ranks_go_on_where_they_began_inside_the_epoch(make: Callable[[int], Make]) -> None:
    """Behind a position that other ranks left, and behind one that was counted in batches of another size."""
    check(60, [(make(2), 2, 5), (make(2), 3, 2), (make(2), 3, 2), (make(3), 3, 1), (make(3), 3, 4)])


def test_without_batches_of_the_loader_a_sample_is_a_batch() -> None:
    check(11, [(unbatched, 3, 2), (unbatched, 2, 3)])


def test_workers_that_fetch_ahead_are_not_counted() -> None:
    many = {"num_workers": 1, "prefetch_factor": 4}
    check(40, [(plain(2, **many), 2, 3), (plain(2, **many), 1, 3), (plain(2, **many), 1, 4), (plain(2), 3, 8)])


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    length=st.integers(1, 30),
    lives=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 5)), min_size=2, max_size=3),
)
def test_an_epoch_whose_rest_is_left_out_is_over_on_any_number_of_ranks(
    length: int, lives: list[tuple[int, int, int]]
) -> None:
    def dropping(batch: int) -> Make:
        def make(length: int, rank: int, of: int) -> Any:
            sampler = ResumableSampler(Numbers(length), seed=SEED, rank=rank, world_size=of, drop_last=True)
            return DataLoader(Numbers(length), batch_size=batch, sampler=sampler, drop_last=True)

        return make

    saved, steps = None, []
    for batch, of, count in lives:
        if length < batch * of:
            return  # an epoch without a batch
        make = dropping(batch)
        ranks = Ranks(make, length, of) if saved is None else Ranks.resume(make, length, of, saved)
        for _ in range(count):
            ranks.step()
            assert len(ranks.steps[-1][1]) == batch * of
        steps += ranks.steps
        saved = ranks.save()
    for epoch, taken in epochs_of(steps).items():
        assert taken == order_of(length, epoch)[: len(taken)], "a beginning of the order"


# -- what is told ----------------------------------------------------------------------------------------------------


def moved_from(saved: OrderCursor | None, loader: Any, batch: int = 3, epoch: int = 1) -> tuple[DataPosition, int]:
    position = attach(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        here = position.move(WorldSizeChange(4, 2, 0), saved, epoch, batch)
    assert len(caught) == len(position.reasons)
    return position, here


def cursor(samples: int = 40, *, shuffle: bool = True, step: int = 8) -> OrderCursor:
    return OrderCursor(1, 24, samples, SEED, shuffle, step)


def test_other_data_and_another_order_are_told() -> None:
    position, _ = moved_from(cursor(), plain(4)(41, 0, 2))
    assert position.reasons == ("the dataset has 41 samples, and had 40 when it was saved",)
    position, _ = moved_from(cursor(shuffle=False), plain(4)(40, 0, 2))
    assert position.reasons == ("shuffle is True, and was False when it was saved",)


def test_steps_of_another_size_are_no_inexact_position_and_are_told() -> None:
    position, _ = moved_from(cursor(), plain(4)(40, 0, 2))
    assert position.exact and not position.caveats
    position, _ = moved_from(cursor(), plain(3)(40, 0, 2))
    assert position.exact
    caveat = "all ranks together take 6 samples in a batch each, and took 8: steps take other samples"
    assert position.caveats == (caveat,)


class OwnState:
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def distributed() -> Any:
    return DataLoader(Numbers(40), batch_size=2, sampler=DistributedSampler(Numbers(40), num_replicas=2, rank=0))


@pytest.mark.parametrize(
    ("loader", "source", "here"),
    [
        (distributed, "the order of DistributedSampler", 6),
        (lambda: DataLoader(Numbers(40), batch_size=2, shuffle=True), "the order of RandomSampler", 3),
        (lambda: StatefulDataLoader(Numbers(40), batch_size=2), "StatefulDataLoader", 0),
        (lambda: [[1], [2], [3], [4], [5]], "list", 3),
        (OwnState, "OwnState", 0),
        (lambda: iter([1, 2, 3]), "list_iterator", 0),
    ],
    ids=["distributed", "random", "stateful", "list", "own state", "iterator"],
)
def test_what_ranks_do_not_share_is_told_by_name_and_goes_on_inexactly(
    loader: Callable[[], Any], source: str, here: int
) -> None:
    position = attach(loader())
    assert position.cursor(1, 3) is None
    assert source in position.elsewhere
    fixed = len(position.reasons)
    with pytest.warns(TenutoWarning, match=f"{source} was saved by 4 ranks and resumed by 2"):
        assert position.move(WorldSizeChange(4, 2, 0), None, 1, 3) == here
    assert not position.exact and len(position.reasons) == fixed + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert next(position.iterate(1, here)) is not None


def test_a_shared_order_that_was_saved_without_one_is_told() -> None:
    position, here = moved_from(None, plain(4)(40, 0, 2))
    assert here == 3 and "the order of ResumableSampler was saved by 4 ranks" in position.reasons[0]


# -- as a checkpoint holds it ----------------------------------------------------------------------------------------


def test_a_cursor_comes_back() -> None:
    for one in (cursor(), OrderCursor(0, 0, 0, None, False, 1), OrderCursor(3, 2, 2, -(2**63), True, 7)):
        assert OrderCursor.of(one.record(), "m") == one


@pytest.mark.parametrize(
    "wrong",
    [
        {"used": 41},
        {"used": -1},
        {"used": 1.0},
        {"used": True},
        {"samples": "40"},
        {"seed": "x"},
        {"seed": [1]},
        {"shuffle": 1},
        {"step": None},
    ],
)
def test_a_malformed_cursor_is_damage(wrong: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError, match="position in the data"):
        OrderCursor.of({**cursor().record(), **wrong}, "m")
    with pytest.raises(CorruptionError):
        OrderCursor.of({}, "m")
    with pytest.raises(CorruptionError):
        OrderCursor.of([], "m")


def test_all_of_an_order_is_drawn_once_where_it_divides() -> None:
    found = Counter(index for _, given in check(24, [(plain(2), 3, 2), (plain(2), 4, 2)]) for index in given[:12])
    assert set(found.values()) == {1}
