"""States of several ranks that do not fit together, or not to a checkpoint: one clear error on every rank. And odd ones
that are whole all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tenuto
from support.rank_threads import together
from tenuto.engine.group.group import joined_group
from tenuto.errors import (
    CheckpointNotFound,
    RankFailed,
    RanksDisagree,
    SaveFailed,
    ShardMismatch,
    StateError,
    StateMismatch,
)
from tenuto.events import Emitter
from tenuto.ranks.kv.in_process import ThreadRanks

State = Callable[[int, int], dict[str, Any]]


def saved(place: Path, state: State, count: int = 3, **more: Any) -> list[Any]:
    return list(
        together(count, lambda ranks: tenuto.save(state(ranks.rank, ranks.world_size), place, ranks=ranks, **more))
    )


def loaded(place: Path, state: State, count: int = 2) -> list[Any]:
    return list(
        together(count, lambda ranks: tenuto.load(place, into=state(ranks.rank, ranks.world_size), ranks=ranks))
    )


def rows(rank: int, of: int, *, kind: str = "<f8", width: int = 3, whole: int = 12) -> Any:
    begin, end = (whole * one // of for one in (rank, rank + 1))
    return tenuto.shard(np.ones((end - begin, width), kind), whole=(whole, width), offsets=(begin, 0))


# -- odd, and whole ----------------------------------------------------------------------------------------------------

NOTHING: dict[str, Callable[[int, int], Any]] = {
    "a shard": lambda rank, of: tenuto.shard(np.zeros((0, 3)), whole=(0, 3), offsets=(0, 0)),
    "a shard by dimension": lambda rank, of: tenuto.shard(np.zeros((0, 3)), dim=0, rank=rank, of=of),
    "a flat part": lambda rank, of: tenuto.flat(np.zeros(0), whole=(0, 3), begin=0),
    "a tensor": lambda rank, of: tenuto.shard(torch.zeros(0, 3), whole=(0, 3), offsets=(0, 0)),
    "no scalar": lambda rank, of: tenuto.shard(np.zeros((2, 0)), whole=(2 * of, 0), offsets=(2 * rank, 0)),
}


@pytest.mark.parametrize("what", NOTHING)
def test_a_leaf_without_elements_is_saved_by_ranks_that_all_hold_nothing_of_it(tmp_path: Path, what: str) -> None:
    def state(rank: int, of: int) -> dict[str, Any]:
        return {"none": NOTHING[what](rank, of), "w": rows(rank, of)}

    assert {one.leaves for one in saved(tmp_path, state)} == {2}
    alone = tenuto.load(tmp_path).state
    assert 0 in alone["none"].shape and alone["w"].shape == (12, 3)
    if what != "no scalar":
        assert tuple(alone["none"].shape) == (0, 3)
        assert [one.step for one in loaded(tmp_path, state)] == [0, 0]


def test_more_ranks_than_there_are_rows(tmp_path: Path) -> None:
    """Some hold nothing at all of the only tensor."""

    def state(rank: int, of: int) -> dict[str, Any]:
        return {"w": rows(rank, of, whole=2)}

    assert {one.leaves for one in saved(tmp_path, state, 5)} == {1}
    assert tenuto.load(tmp_path).state["w"].tolist() == [[1.0] * 3] * 2
    for count in (1, 3, 7):
        assert [one.step for one in loaded(tmp_path, state, count)] == [0] * count


# -- ranks that disagree -----------------------------------------------------------------------------------------------

DIFFERING: dict[str, tuple[State, str]] = {
    "a plain value": (lambda rank, of: {"w": rows(rank, of), "lr": 0.1 * (rank == 1)}, "lr"),
    "the length of a list": (lambda rank, of: {"w": [np.ones(3)] * (1 + (rank == 1))}, "w"),
    "the kind of a thing": (lambda rank, of: {"w": {"a": 1} if rank == 1 else [1]}, "w"),
    "a replica": (lambda rank, of: {"w": np.full(3, float(rank == 1))}, "w"),
    "a dtype": (lambda rank, of: {"w": rows(rank, of, kind="<f4" if rank == 1 else "<f8")}, "w"),
    "a width": (lambda rank, of: {"w": rows(rank, of, width=3 + (rank == 1))}, "w"),
    "a whole": (lambda rank, of: {"w": rows(rank, of, whole=12 + (rank == 1))}, "w"),
    "an overlap": (
        lambda rank, of: {"w": tenuto.shard(np.ones((3, 2)), whole=(7, 2), offsets=(2 * rank, 0))},
        "w",
    ),
    "a hole": (lambda rank, of: {"w": tenuto.shard(np.ones((2, 2)), whole=(12, 2), offsets=(4 * rank, 0))}, "w"),
    "sharded or not": (lambda rank, of: {"w": rows(rank, of) if rank else np.ones((12, 3))}, "w"),
    "nobody's": (lambda rank, of: {"w": tenuto.shard(np.ones((0, 3)), whole=(12, 3), offsets=(0, 0))}, "w"),
}


@pytest.mark.parametrize("what", DIFFERING)
def test_ranks_whose_states_do_not_fit_say_so_alike_and_save_nothing(tmp_path: Path, what: str) -> None:
    state, path = DIFFERING[what]
    found = saved(tmp_path, state)
    for one in found:
        assert isinstance(one, SaveFailed if what == "a replica" else ShardMismatch), found
        assert path in str(one), found
        assert what in ("nobody's", "a hole") or "rank" in str(one), found
    with pytest.raises(CheckpointNotFound):
        tenuto.load(tmp_path)


@pytest.mark.parametrize(
    ("fact", "one", "other"), [("run", "one", "other"), ("step", 3, 4), ("version", "0.9", "1.1"), ("call", None, None)]
)
def test_ranks_that_disagree_about_what_they_do_are_named_on_every_rank(
    tmp_path: Path, fact: str, one: Any, other: Any
) -> None:
    tenuto.save({"w": np.ones(3)}, tmp_path)

    def work(ranks: ThreadRanks) -> Any:
        state, mine = {"w": rows(ranks.rank, 2)}, other if ranks.rank else one
        if fact == "call" and ranks.rank:
            return tenuto.load(tmp_path, ranks=ranks)
        if fact == "version":
            with joined_group(ranks, tmp_path, "main", Emitter(), 60.0, call="save", facts={"version": mine}):
                return None
        more = {fact: mine} if fact in ("run", "step") else {}
        return tenuto.save(state, tmp_path, ranks=ranks, **more)

    for found in together(2, work):
        assert isinstance(found, RanksDisagree) and f"{fact} is" in found.message, found
        assert "rank 0" in found.message and "rank 1" in found.message


# -- states that do not fit a checkpoint -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lambda rank, of: {"w": rows(rank, of, kind="<f4")}, "float"),
        (lambda rank, of: {"w": rows(rank, of, width=4)}, "[12, 4]"),
        (lambda rank, of: {"w": rows(rank, of, whole=13)}, "[13, 3]"),
        (lambda rank, of: {"w": rows(rank, of), "more": np.ones(3)}, "more"),
    ],
    ids=["dtype", "width", "whole", "more"],
)
def test_a_form_that_has_changed_since_the_save_is_one_error_on_every_rank(
    tmp_path: Path, target: State, words: str
) -> None:
    saved(tmp_path, lambda rank, of: {"w": rows(rank, of)})
    for count in (2, 3):
        for one in loaded(tmp_path, target, count):
            assert isinstance(one, StateMismatch | StateError), one
            assert words.strip("[]") in str(one).replace("(", "[").replace(")", "]"), one


def test_a_form_that_has_changed_on_one_rank_alone_is_told_to_the_others(tmp_path: Path) -> None:
    saved(tmp_path, lambda rank, of: {"w": rows(rank, of)})
    found = loaded(tmp_path, lambda rank, of: {"w": rows(rank, of, kind="<f4" if rank == 1 else "<f8")}, 3)
    assert isinstance(found[1], StateMismatch)
    for one in (found[0], found[2]):
        assert isinstance(one, RankFailed) and one.ranks == (1,) and "w" in one.message, one
