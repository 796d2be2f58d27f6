"""Positions in data that belongs to no framework."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tenuto
from tenuto import every
from tenuto.errors import TenutoWarning, UsageError
from tenuto.state.position.positions import attach


class Stateful:
    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 5:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Again:
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize("make", [Stateful, lambda: [0, 1, 2, 3, 4], lambda: range(5)])
@pytest.mark.parametrize("taken", [0, 1, 4, 5])
def test_the_rest_of_an_epoch(make: Any, taken: int) -> None:
    position = attach(make())
    batches = position.iterate(2, 0)
    first = [next(batches) for _ in range(taken)]
    saved = position.state_dict()
    assert saved["delivered"] == taken and saved["epoch"] == 2

    resumed = attach(make())
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    assert first + list(resumed.iterate(2, taken)) == [0, 1, 2, 3, 4]
    assert position.exact and resumed.exact
    assert list(resumed.iterate(3, 0)) == [0, 1, 2, 3, 4]


def test_what_cannot_be_positioned_starts_again_and_says_so() -> None:
    position = attach(Again())
    next(position.iterate(0, 0))
    assert not position.exact
    assert position.batches_per_epoch is None
    resumed = attach(Again())
    resumed.load_state_dict(position.state_dict())
    with pytest.warns(TenutoWarning, match="starts again"):
        batches = resumed.iterate(0, 1)
    assert list(batches) == [0, 1, 2, 3, 4]
    assert batches.delivered == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [Again, lambda: iter(range(5))])
def test_an_epoch_that_was_at_its_end_is_not_given_again_by_what_cannot_be_positioned(make: Any) -> None:
    position = attach(make())
    assert len(list(position.iterate(3, 0))) == 5
    resumed = attach(make())
    resumed.load_state_dict(position.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(resumed.iterate(3, 5)) == []
    assert resumed.state_dict() == position.state_dict()
    assert list(resumed.iterate(4, 0)) == [0, 1, 2, 3, 4]


def test_a_used_up_iterator_is_an_error_and_not_an_empty_epoch() -> None:
    position = attach(iter([1, 2]))
    assert list(position.iterate(0, 0)) == [1, 2]
    with pytest.raises(UsageError, match="used up"):
        position.iterate(1, 0)


def test_an_endless_iterator_goes_on_over_epochs() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    position = attach(endless())
    assert next(position.iterate(0, 0)) == 0
    assert next(position.iterate(1, 0)) == 1


def test_another_length_or_kind_is_said() -> None:
    position = attach([1, 2, 3])
    next(position.iterate(0, 0))
    other = attach([1, 2])
    with pytest.warns(TenutoWarning, match="2 batches"):
        other.load_state_dict(position.state_dict())
    stateful = attach(Stateful())
    with pytest.warns(TenutoWarning, match="another kind"):
        stateful.load_state_dict(position.state_dict())
    assert not stateful.exact


def test_what_is_no_data_at_all() -> None:
    with pytest.raises(UsageError, match="int"):
        attach(3)


class Sized(Stateful):
    def __len__(self) -> int:
        return 5


def test_an_epoch_that_was_saved_at_its_end_is_not_given_again() -> None:
    position = attach(Stateful())
    assert list(position.iterate(0, 0)) == [0, 1, 2, 3, 4]
    resumed = attach(Stateful())
    resumed.load_state_dict(position.state_dict())
    rest = resumed.iterate(0, 5)
    assert resumed.state_dict() == position.state_dict()
    assert list(rest) == []
    assert list(resumed.iterate(1, 0)) == [0, 1, 2, 3, 4]


class Rewinding(Sized):
    """One that goes back to its beginning when it is iterated anew, and not when it comes to its end."""

    def __iter__(self) -> Iterator[int]:
        if self.next >= 5:
            self.next = 0
        while self.next < 5:
            self.next += 1
            yield self.next - 1


@pytest.mark.parametrize("make", [Sized, Rewinding])
@pytest.mark.parametrize("loop", ["steps", "epochs"])
def test_a_source_that_was_saved_on_its_last_batch_goes_on_with_the_next_epoch(
    tmp_path: Path, loop: str, make: type[Sized]
) -> None:
    seen: list[int] = []
    for end in (5, 10):
        with tenuto.Checkpointer(tmp_path / "place", {"n": 0}, data=make(), save=every(steps=1)) as ckpt:
            if loop == "steps":
                seen += [next(ckpt.batches) for _ in ckpt.steps(end)]
                continue
            for _ in ckpt.epochs(2):
                for batch in ckpt.batches:
                    seen.append(batch)
                    if len(seen) == end:
                        ckpt.stop()
    assert seen == [0, 1, 2, 3, 4] * 2


def test_batches_are_let_go_of_with_their_position_and_not_when_the_collector_comes() -> None:
    """An iterator of a loader ends its workers when it goes; long after, they wait for each other."""

    class Batches:
        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            return 1

    class Source(Stateful):
        def __iter__(self) -> Iterator[int]:
            batches = Batches()
            made.append(weakref.ref(batches))
            return batches

    made: list[weakref.ref[Batches]] = []
    position = attach(Source())
    batches = position.iterate(0, 0)
    assert next(batches) == 1
    gc.disable()
    try:
        del batches, position
        assert [held() for held in made] == [None]
    finally:
        gc.enable()
