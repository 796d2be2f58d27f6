"""An interrupted epoch goes on as if nothing had happened: batches, their order, and every later random draw."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tenuto.errors import StateMismatch, TenutoWarning
from tenuto.integrations.torch.data.replay import ReplayPosition
from tenuto.integrations.torch.data.sampler import ResumableSampler
from tenuto.integrations.torch.data.stateful import StatefulLoaderPosition
from tenuto.state.position import rng
from tenuto.state.position.positions import DataPosition, attach

SAMPLES = 21


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i, and with `noisy` a draw of the process that reads it."""

    def __init__(self, length: int = SAMPLES, *, noisy: bool = False) -> None:
        self.length = length
        self.noisy = noisy

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(()).item() + random.random() + np.random.rand() if self.noisy else 0.0
        return torch.tensor([float(index), noise], dtype=torch.float64)


Make = Callable[[], Any]


def script(make: Make, seed: int = 7) -> tuple[Any, DataPosition]:
    """What a training script does before its loop, the same in every process."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    loader = make()
    return loader, attach(loader)


def draw() -> tuple[float, float, float]:
    """What training itself draws in a step: dropout and the like."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


class Training:
    """A loop over epochs that counts steps, and can be saved between them."""

    def __init__(self, make: Make, seed: int = 7) -> None:
        self.loader, self.position = script(make, seed)
        self.epoch, self.start = 0, 0
        self.batches: Iterator[Any] | None = None
        self.seen: list[Any] = []

    def step(self) -> None:
        for _ in range(2):
            if self.batches is None:
                self.batches = self.position.iterate(self.epoch, self.start)
            for batch in self.batches:
                self.start += 1
                self.seen.append((self.epoch, batch.tolist(), draw()))
                return
            self.batches, self.epoch, self.start = None, self.epoch + 1, 0
        raise AssertionError("an epoch without batches")

    def save(self) -> Any:
        return copy.deepcopy((self.epoch, self.start, self.position.state_dict(), rng.capture()))

    @classmethod
    def resume(cls, make: Make, saved: Any, *, iterator_first: bool, seed: int = 99) -> Training:
        new = cls(make, seed)
        torch.rand(3)
        new.epoch, new.start, position, generators = copy.deepcopy(saved)
        new.position.load_state_dict(position)
        if iterator_first and new.start:
            new.batches = new.position.iterate(new.epoch, new.start)
        rng.apply(generators)
        return new


def check(make: Make, steps: int, stops: list[int], *, iterator_first: bool = True, plain: bool = True) -> None:
    """Stopping after each of `stops` (counted from the start) and going on in a new 'process' changes nothing."""
    whole = Training(make)
    for _ in range(steps):
        whole.step()
    if plain:
        assert whole.seen == without_tenuto(make, steps)
    pieces, seen = Training(make), []
    for stop in [*stops, steps]:
        while len(seen) + len(pieces.seen) < stop:
            pieces.step()
        seen += pieces.seen
        pieces = Training.resume(make, pieces.save(), iterator_first=iterator_first)
    assert seen == whole.seen


def without_tenuto(make: Make, steps: int) -> list[Any]:
    loader, _ = script(make)
    seen: list[Any] = []
    for epoch in itertools.count():
        for batch in loader:
            seen.append((epoch, batch.tolist(), draw()))
            if len(seen) == steps:
                return seen
    raise AssertionError


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([float(i + 1) for i in range(SAMPLES)], 17)


IN_PROCESS: dict[str, Make] = {
    "sequential": lambda: DataLoader(Numbers(noisy=True), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(noisy=True), batch_size=4, shuffle=True),
    "shuffled, last batch dropped": lambda: DataLoader(Numbers(noisy=True), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(Numbers(noisy=True), batch_size=4, shuffle=True, generator=generator()),
    "own generator, whole batches": lambda: DataLoader(
        Numbers(20, noisy=True), batch_size=4, shuffle=True, generator=generator()
    ),
    "own generator, last batch dropped": lambda: DataLoader(
        Numbers(noisy=True), batch_size=4, shuffle=True, drop_last=True, generator=generator()
    ),
    "sampler's own generator": lambda: DataLoader(
        Numbers(noisy=True), batch_size=4, sampler=RandomSampler(range(SAMPLES), generator=generator())
    ),
    "with replacement": lambda: DataLoader(
        Numbers(noisy=True), batch_size=4, sampler=RandomSampler(range(SAMPLES), replacement=True, num_samples=70)
    ),
    "with replacement, own generator": lambda: DataLoader(
        Numbers(noisy=True),
        batch_size=8,
        sampler=RandomSampler(range(SAMPLES), replacement=True, num_samples=100, generator=generator()),
    ),
    "weighted": lambda: DataLoader(Numbers(noisy=True), batch_size=4, sampler=weighted()),
    "subset": lambda: DataLoader(Numbers(noisy=True), batch_size=2, sampler=SubsetRandomSampler(range(3, 17))),
    "batch sampler": lambda: DataLoader(
        Numbers(noisy=True), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 4, False)
    ),
    "no batching": lambda: DataLoader(Numbers(5, noisy=True), batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("make", IN_PROCESS.values(), ids=IN_PROCESS.keys())
@pytest.mark.parametrize(
    "iterator_first", [True, False], ids=["iterator, then generators", "generators, then iterator"]
)
def test_resumes_anywhere_and_again_and_again(make: Make, iterator_first: bool) -> None:
    per_epoch = len(make())
    steps = 2 * per_epoch + 3
    for stops in ([0], [1, per_epoch - 1, per_epoch + 2], [per_epoch, 2 * per_epoch], [2 * per_epoch - 1, steps - 1]):
        check(make, steps, stops, iterator_first=iterator_first)
    check(make, steps, list(range(1, steps)), iterator_first=iterator_first)
    assert script(make)[1].exact
    assert script(make)[1].batches_per_epoch == per_epoch


@pytest.mark.parametrize("shuffle", [True, False])
def test_our_sampler_repeats_its_order_whatever_else_draws(shuffle: bool) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(
            Numbers(noisy=True), batch_size=4, sampler=ResumableSampler(range(SAMPLES), seed=1, shuffle=shuffle)
        )

    for stop in range(9):
        check(make, 9, [stop])
    assert script(make)[1].exact


def test_a_distributed_sampler_is_told_its_epoch_unless_the_loop_does() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(
            Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=5)
        )

    for stop in range(8):
        check(make, 8, [stop], plain=False)
    training = Training(make)
    for _ in range(6):
        training.step()
    assert training.loader.sampler.epoch == 1

    position = attach(loader := make())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch + 100)
        for _ in position.iterate(epoch, 0):
            pass
        assert loader.sampler.epoch == epoch + 100


WITH_WORKERS: dict[str, Make] = {
    "shuffled": lambda: DataLoader(Numbers(noisy=True), batch_size=4, shuffle=True, num_workers=2),
    "prefetching far": lambda: DataLoader(
        Numbers(noisy=True), batch_size=2, shuffle=True, num_workers=1, prefetch_factor=5, generator=generator()
    ),
    "persistent": lambda: DataLoader(
        Numbers(noisy=True), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "persistent, own generator": lambda: DataLoader(
        Numbers(noisy=True), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, generator=generator()
    ),
}


@pytest.mark.parametrize("make", WITH_WORKERS.values(), ids=WITH_WORKERS.keys())
def test_prefetched_batches_do_not_count(make: Make) -> None:
    per_epoch = len(make())
    steps = 2 * per_epoch + 2
    check(make, steps, [2, per_epoch, per_epoch + 1])
    position = script(make)[1]
    assert position.exact and not position.caveats


class Seeds(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return torch.tensor([index, info.seed - info.id], dtype=torch.int64)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_seeded_as_in_the_uninterrupted_run(persistent: bool) -> None:
    check(
        lambda: DataLoader(Seeds(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=persistent),
        14,
        [3, 6, 12, 13],
    )


@pytest.mark.parametrize(("before", "now"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("replacement", [False, True])
def test_another_number_of_workers_changes_nothing(before: int, now: int, replacement: bool) -> None:
    """They are given more of the order than is delivered, and a sampler draws from its generator as it is asked."""

    def make(workers: int) -> Any:
        order = RandomSampler(
            range(20), replacement=replacement, num_samples=20 * (1 + replacement), generator=generator()
        )
        return DataLoader(Numbers(20), batch_size=4 * (1 + replacement), sampler=order, num_workers=workers)

    for stop in (2, 5):
        whole = Training(lambda: make(before))
        for _ in range(stop):
            whole.step()
        saved = whole.save()
        for _ in range(8):
            whole.step()
        resumed = Training.resume(lambda: make(now), saved, iterator_first=True)
        for _ in range(8):
            resumed.step()
        assert resumed.seen == whole.seen[stop:] and resumed.position.exact


def with_workers(count: int, *, keep: bool) -> Any:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=count, persistent_workers=keep)


@pytest.mark.parametrize("steps", [2, 8], ids=["first epoch", "second epoch"])
@pytest.mark.parametrize(
    ("before", "now"),
    [((1, True), (1, False)), ((1, True), (0, False)), ((1, False), (1, True)), ((0, False), (1, True))],
    ids=["no longer kept", "no workers now", "kept now", "workers now"],
)
def test_workers_that_are_kept_now_or_no_longer_change_nothing_in_the_epoch(
    before: tuple[int, bool], now: tuple[int, bool], steps: int
) -> None:
    """Persistent workers draw their seed once, others in each epoch, and the order is drawn after it."""
    whole = Training(lambda: with_workers(before[0], keep=before[1]))
    for _ in range(steps):
        whole.step()
    saved = whole.save()
    for _ in range(3):
        whole.step()
    with pytest.warns(TenutoWarning, match="persistent_workers is another"):
        resumed = Training.resume(lambda: with_workers(now[0], keep=now[1]), saved, iterator_first=True)
    assert not resumed.position.exact
    resumed.step()
    with pytest.warns(TenutoWarning, match="persistent_workers is another"):
        back = Training.resume(lambda: with_workers(before[0], keep=before[1]), resumed.save(), iterator_first=True)
    back.step(), back.step()
    assert resumed.seen + back.seen == whole.seen[steps:]


STATEFUL: dict[str, Make] = {
    "in process": lambda: StatefulDataLoader(Numbers(noisy=True), batch_size=4, shuffle=True),
    "own generator": lambda: StatefulDataLoader(Numbers(noisy=True), batch_size=4, shuffle=True, generator=generator()),
    "our sampler": lambda: StatefulDataLoader(
        Numbers(noisy=True), batch_size=4, sampler=ResumableSampler(range(SAMPLES), seed=4)
    ),
    "workers": lambda: StatefulDataLoader(Numbers(noisy=True), batch_size=4, shuffle=True, num_workers=2),
    "persistent workers": lambda: StatefulDataLoader(
        Numbers(noisy=True), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "workers that say their state now and then": lambda: StatefulDataLoader(
        Numbers(noisy=True), batch_size=4, shuffle=True, num_workers=2, snapshot_every_n_steps=3
    ),
}


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
def test_a_stateful_loader_keeps_its_own_position(make: Make) -> None:
    assert isinstance(script(make)[1], StatefulLoaderPosition)
    steps = 15
    stops = [[3, 6, 7, 12]] if make().num_workers else [[1, 5, 13], [2, 4, 6, 8], [3, 7, 12], [9, 11, 14], [10]]
    for where in stops:
        check(make, steps, where, plain=make().num_workers == 0 and not isinstance(make().sampler, ResumableSampler))


NOT_KEPT: dict[str, Make] = {
    "weighted": lambda: StatefulDataLoader(Numbers(noisy=True), batch_size=4, sampler=weighted()),
    "own generator": lambda: StatefulDataLoader(
        Numbers(noisy=True), batch_size=4, sampler=RandomSampler(range(SAMPLES), generator=generator())
    ),
    "batch sampler": lambda: StatefulDataLoader(
        Numbers(noisy=True), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 4, drop_last=False)
    ),
    "workers": lambda: StatefulDataLoader(Numbers(noisy=True), batch_size=4, sampler=weighted(), num_workers=1),
}


@pytest.mark.parametrize("make", NOT_KEPT.values(), ids=NOT_KEPT.keys())
def test_an_order_that_a_stateful_loader_would_draw_anew_is_replayed(make: Make) -> None:
    """torchdata keeps the state of its own RandomSampler, and asks torch's for a new order."""
    steps = 2 * len(make()) + 2
    per_epoch = len(make())
    for stops in [[3, per_epoch + 2]] if make().num_workers else [[1, per_epoch, steps - 1], [2, per_epoch + 1], [3]]:
        check(make, steps, stops)
    assert script(make)[1].exact


class Augmented(Numbers):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_an_order_that_a_stateful_loader_may_not_keep_is_told() -> None:
    position = attach(StatefulDataLoader(Augmented(), batch_size=4, sampler=weighted()))
    assert "the order of WeightedRandomSampler is drawn again" in position.reasons[0]
    position = attach(StatefulDataLoader(Numbers(), batch_size=4, sampler=Odd()))
    assert position.exact and "the order of Odd is kept only if" in position.caveats[0]
    for kept in (STATEFUL["in process"], STATEFUL["our sampler"], lambda: StatefulDataLoader(Counted())):
        assert not attach(kept()).reasons and not attach(kept()).caveats


def test_saving_a_stateful_loader_before_its_first_batch_draws_nothing() -> None:
    _, position = script(STATEFUL["in process"])
    before = torch.get_rng_state()
    saved = position.state_dict()
    assert torch.equal(before, torch.get_rng_state())
    check(STATEFUL["in process"], 8, [0])
    _, other = script(STATEFUL["in process"])
    other.load_state_dict(saved)


def leaving_early(make: Make, *, interrupted: bool) -> Training:
    training = Training(make)
    training.step()
    training.step()
    training.batches, training.epoch, training.start = None, 1, 0
    if interrupted:
        training = Training.resume(make, training.save(), iterator_first=True)
    for _ in range(8):
        training.step()
    return training


LEFT: list[Make] = [
    IN_PROCESS["own generator"],
    STATEFUL["own generator"],
    lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True),
    WITH_WORKERS["shuffled"],
]


@pytest.mark.parametrize("make", LEFT)
def test_an_epoch_that_the_loop_left_early_is_not_resumed(make: Make) -> None:
    interrupted = leaving_early(make, interrupted=True)
    assert interrupted.seen[-8:] == leaving_early(make, interrupted=False).seen[-8:]
    assert interrupted.position.exact


def test_what_persistent_workers_drew_for_batches_that_nobody_took_is_told() -> None:
    """They had read ahead of what was delivered, and went on from there."""
    with pytest.warns(TenutoWarning, match="an epoch was left early"):
        interrupted = leaving_early(WITH_WORKERS["persistent"], interrupted=True)
    assert not interrupted.position.exact


@pytest.mark.parametrize("make", [IN_PROCESS["shuffled"], STATEFUL["own generator"], WITH_WORKERS["persistent"]])
def test_going_back_within_one_process(make: Make) -> None:
    training = Training(make)
    training.step()
    saved = training.save()
    for _ in range(9):
        training.step()
    training.epoch, training.start, training.batches = saved[0], saved[1], None
    training.position.load_state_dict(saved[2])
    rng.apply(saved[3])
    for _ in range(9):
        training.step()
    assert training.seen[10:] == training.seen[1:10]


def test_saving_again_before_the_first_batch_after_a_resume() -> None:
    for make in (IN_PROCESS["shuffled"], STATEFUL["own generator"]):
        for stop in (0, 2, 6):
            whole = Training(make)
            for _ in range(9):
                whole.step()
            pieces = Training(make)
            for _ in range(stop):
                pieces.step()
            saved = pieces.save()
            twice = Training.resume(
                make, Training.resume(make, saved, iterator_first=False).save(), iterator_first=True
            )
            for _ in range(9 - stop):
                twice.step()
            assert twice.seen == whole.seen[stop:]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(SAMPLES):
            yield torch.tensor([number, 0])


class Counted(Stream):
    """A stream that knows where it is."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < SAMPLES:
            self.next += 1
            yield torch.tensor([self.next, 0])
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_a_stream_with_state_resumes_in_this_process_only() -> None:
    for stop in range(12):
        check(lambda: DataLoader(Counted(), batch_size=4), 14, [stop])
        check(lambda: DataLoader(Counted(), batch_size=7, generator=generator()), 12, [stop], iterator_first=False)
    assert attach(DataLoader(Counted(), batch_size=4)).exact
    assert "StatefulDataLoader" in attach(DataLoader(Counted(), batch_size=4, num_workers=2)).reasons[0]


def test_a_stream_without_state_starts_its_epoch_again_and_says_so() -> None:
    training = Training(lambda: DataLoader(Stream(), batch_size=4))
    training.step()
    assert not training.position.exact
    assert training.position.batches_per_epoch is None
    with pytest.warns(TenutoWarning, match="Stream is an IterableDataset without state_dict"):
        resumed = Training.resume(lambda: DataLoader(Stream(), batch_size=4), training.save(), iterator_first=True)
    resumed.step()
    assert resumed.seen[0][1] == training.seen[0][1]


class Odd(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Uncounted(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def test_an_unknown_sampler_is_replayed_and_named() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(noisy=True), batch_size=4, sampler=Odd())

    check(make, 9, [2, 7])
    position = attach(make())
    assert not position.exact
    assert "Odd" in position.reasons[0]

    class OwnRandom(RandomSampler):
        pass

    assert not attach(DataLoader(Numbers(), sampler=OwnRandom(range(3)))).exact
    assert not attach(DataLoader(Numbers(), num_workers=2, in_order=False)).exact


def test_another_kind_of_source_is_refused_in_words() -> None:
    _, position = script(IN_PROCESS["shuffled"])
    _, other = script(STATEFUL["in process"])
    with pytest.warns(TenutoWarning, match="another kind of source"):
        position.load_state_dict(other.state_dict())
    assert not position.exact


def ours(batch_size: int = 4, *, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(
        Numbers(), batch_size=batch_size, sampler=ResumableSampler(range(SAMPLES), seed=1, shuffle=shuffle)
    )


def others(loader: Any = DataLoader, *, shuffle: bool) -> DataLoader[Any]:
    order = DistributedSampler(Numbers(), num_replicas=2, rank=0, shuffle=shuffle)
    return loader(Numbers(), batch_size=4, sampler=order)


@pytest.mark.filterwarnings("ignore:the data does not resume exactly")  # where another one is expected besides
@pytest.mark.parametrize("taken", [0, 2, 6], ids=["before a batch", "inside", "at the end"])
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (IN_PROCESS["sequential"], IN_PROCESS["shuffled"], "that of RandomSampler, and was that of SequentialSampler"),
        (
            IN_PROCESS["shuffled"],
            IN_PROCESS["weighted"],
            "that of WeightedRandomSampler, and was that of RandomSampler",
        ),
        (IN_PROCESS["shuffled"], IN_PROCESS["own generator"], "has 1 generators of its own, not 0"),
        (ours, lambda: ours(shuffle=False), r"ResumableSampler\(shuffle=False\), and was that of Resu.*shuffle=True"),
        (
            lambda: others(shuffle=False),
            lambda: others(shuffle=True),
            r"DistributedSampler\(shuffle=True\), and was that of Distr.*shuffle=False",
        ),
        (
            lambda: StatefulDataLoader(Numbers(), batch_size=4),
            STATEFUL["in process"],
            "that of RandomSampler, and was that of SequentialSampler",
        ),
        (
            lambda: others(StatefulDataLoader, shuffle=False),
            lambda: others(StatefulDataLoader, shuffle=True),
            r"DistributedSampler\(shuffle=True\), and was that of Distr.*shuffle=False",
        ),
    ],
    ids=[
        "sequential, shuffled",
        "random, weighted",
        "a generator of its own",
        "our sampler, no longer shuffled",
        "distributed, shuffled",
        "stateful, sequential, shuffled",
        "stateful, distributed, shuffled",
    ],
)
def test_another_order_is_told(before: Make, now: Make, said: str, taken: int) -> None:
    position = attach(before())
    batches = position.iterate(0, 0)
    for _ in range(taken):
        next(batches, None)
    resumed = attach(now())
    with pytest.warns(TenutoWarning, match=said):
        resumed.load_state_dict(copy.deepcopy(position.state_dict()))
    assert not resumed.exact
    same = attach(before())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(copy.deepcopy(position.state_dict()))
    assert same.exact


def test_our_sampler_goes_on_from_its_sample_in_batches_of_another_size_and_says_so() -> None:
    position = attach(ours())
    batches = position.iterate(0, 0)
    next(batches), next(batches)
    for size, caveats in (
        (4, ()),
        (8, ("all ranks together take 8 samples in a batch each, and took 4: steps take other samples",)),
    ):
        resumed = attach(ours(size))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.load_state_dict(copy.deepcopy(position.state_dict()))
        assert (resumed.exact, resumed.caveats) == (True, caveats)


def test_another_batch_size_goes_on_from_the_same_sample() -> None:
    training = Training(lambda: DataLoader(Numbers(), batch_size=4, shuffle=True))
    for _ in range(2):
        training.step()
    with pytest.warns(TenutoWarning, match="batch size"):
        resumed = Training.resume(
            lambda: DataLoader(Numbers(), batch_size=2, shuffle=True), training.save(), iterator_first=True
        )
    rest = [sample[0] for batch in resumed.batches or () for sample in batch.tolist()]
    seen = [sample[0] for _, batch, _ in training.seen for sample in batch]
    assert sorted(seen + rest) == list(range(SAMPLES))


def test_a_checkpoint_without_a_position_says_that_the_order_is_new() -> None:
    _, position = script(IN_PROCESS["shuffled"])
    with pytest.warns(TenutoWarning, match="no position"):
        rest = list(position.iterate(0, 4))
    assert len(rest) == 2


def test_the_users_loader_is_not_touched() -> None:
    loader = DataLoader(Numbers(), batch_size=4, sampler=SequentialSampler(range(SAMPLES)))
    before = dict(loader.__dict__)
    position = attach(loader)
    next(position.iterate(0, 0))
    assert isinstance(position, ReplayPosition)
    assert loader.__dict__ == before
    assert type(loader.batch_sampler) is BatchSampler


def test_a_stale_iterator_does_not_move_the_position() -> None:
    _, position = script(IN_PROCESS["sequential"])
    stale = position.iterate(0, 0)
    next(stale)
    next(position.iterate(1, 0))
    next(stale)
    assert position.state_dict()["delivered"] == 1
    assert position.state_dict()["epoch"] == 1


def test_no_warning_where_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(IN_PROCESS["shuffled"], 9, [4, 6])


class Elsewhere(DataLoader[Any]):
    """Hands out what another loader reads, as wrappers of loaders do."""

    def __iter__(self) -> Any:
        return iter(DataLoader(Numbers(), batch_size=4))


def test_a_loader_that_cannot_be_positioned_starts_again_and_says_so() -> None:
    training = Training(lambda: Elsewhere(Numbers(), batch_size=4))
    training.step()
    training.step()
    assert "Elsewhere" in training.position.reasons[0]
    with pytest.warns(TenutoWarning, match="elsewhere than its sampler"):
        resumed = Training.resume(lambda: Elsewhere(Numbers(), batch_size=4), training.save(), iterator_first=True)
    assert resumed.position.state_dict()["delivered"] == 0
    resumed.step()
    assert resumed.seen[0][1] == training.seen[0][1]


class Unsized(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, 0])


def test_a_data_set_without_a_length() -> None:
    check(lambda: DataLoader(Unsized(), batch_size=4, sampler=SequentialSampler(range(SAMPLES))), 9, [2, 6])


@pytest.mark.parametrize(
    "make", [IN_PROCESS["shuffled"], STATEFUL["in process"], lambda: DataLoader(Counted()), lambda: [1]]
)
def test_what_is_no_position_is_a_mismatch(make: Make) -> None:
    position = attach(make())
    kind = position.state_dict()["kind"]
    for broken in (
        {},
        {"epoch": 0, "delivered": 1, "ended": False, "generators": 3},
        {"generators": [], "epoch": "x"},
    ):
        with pytest.raises(StateMismatch):
            position.load_state_dict({"kind": kind, **broken})


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Counted(), batch_size=None),
        lambda: StatefulDataLoader(Counted()),
        lambda: DataLoader(Stream(), batch_size=None),
        lambda: DataLoader(Numbers(), batch_size=None, sampler=Uncounted()),
    ],
    ids=["stream", "stateful", "stream without state", "sampler without a length"],
)
def test_what_was_saved_at_its_end_is_not_given_again(make: Make) -> None:
    """None of these says beforehand how many batches an epoch has."""
    _, position = script(make)
    first = [batch.tolist() for batch in position.iterate(0, 0)]
    assert len(first) == SAMPLES
    _, resumed = script(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(copy.deepcopy(position.state_dict()))
        assert list(resumed.iterate(0, SAMPLES)) == []
    assert [batch.tolist() for batch in resumed.iterate(1, 0)] == first


class Broken(Numbers):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise self.error("no such luck")
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_batch_that_could_not_be_loaded_makes_the_position_inexact_once_training_goes_on(
    error: type[BaseException],
) -> None:
    """An interrupt too: a notebook that runs its loop again goes on with the same iterator."""
    _, position = script(lambda: DataLoader(Broken(error), batch_size=4))
    batches = position.iterate(0, 0)
    next(batches), next(batches)
    with pytest.raises(error):
        next(batches)
    assert position.exact
    with pytest.warns(TenutoWarning, match="could not be loaded"):
        assert next(batches)[0, 0] == 12
    assert not position.exact
