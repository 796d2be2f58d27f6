"""What ranks hold alike and is not: when it is looked for, how it is told. On real ranks: tests/sharded_saves.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tenuto
from support.rank_threads import on_ranks
from tenuto.engine.group import group_save
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import SaveFailed
from tenuto.ranks.agreement import Agreement
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import Flattener
from tenuto.store.memory import MemoryStore

Array = np.ndarray[Any, Any]
ODD = 1


def parameter(value: Array) -> nn.Parameter:
    made = nn.Parameter(torch.from_numpy(value))
    tenuto.declare(tenuto.replicated(made))
    return made


DECLARED: dict[str, Callable[[Array], Any]] = {
    "an array": tenuto.replicated,
    "a tensor": lambda value: tenuto.replicated(torch.from_numpy(value)),
    "a parameter": parameter,
    "what lies in one": lambda value: tenuto.replicated({"deep": [value]}),
}


@pytest.fixture
def repo() -> Repo:
    return Repo.create_or_open(MemoryStore("apart"))


def train(
    repo: Repo, hold: Callable[[Array, int], Any], *, of: int, steps: int, odd: int, at: int
) -> tuple[list[list[str]], list[int]]:
    """By rank what became of each save: "", or why it failed; and the steps that are committed. From step `at` on rank
    `odd` has one element, of what all hold as `hold` says, in another bit."""
    attempt = claim(repo, "main", None)

    def work(agreement: Agreement) -> list[str]:
        saver = Saver(repo, "main", lasting=False, protocol=GroupCommit(repo, agreement, deadline_s=60))
        saver.attempt = attempt
        value, told = np.arange(12.0).reshape(4, 3), []
        flattener = Flattener({"first": np.ones(2), "w": hold(value, agreement.rank)})
        for step in range(1, steps + 1):
            value += 1
            if step == at and agreement.rank == odd:
                value.view(np.uint64)[3, 2] ^= 1
            try:
                saver.save(flattener.flatten(), step, wait=True, about=ManifestDetails()).wait(60)
                told.append("")
            except SaveFailed as error:
                told.append(str(error))
        saver.close()
        return told

    try:
        return on_ranks(of, work), sorted(repo.committed("main", attempt.number))
    finally:
        attempt.release()


@pytest.mark.parametrize("kind", DECLARED)
def test_what_is_declared_to_be_equal_is_compared_at_the_first_save(repo: Repo, kind: str) -> None:
    found, committed = train(repo, lambda value, _: DECLARED[kind](value), of=3, steps=1, odd=ODD, at=1)
    path = "w/deep/0" if kind == "what lies in one" else "w"
    for (said,) in found:
        assert f"{path} is not the same on rank 1 as on ranks 0 and 2" in said
    assert committed == []


@pytest.mark.parametrize("kind", DECLARED)
def test_it_is_compared_again_after_so_many_saves(repo: Repo, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(group_save, "COMPARE_EVERY", 2)
    found, committed = train(repo, lambda value, _: DECLARED[kind](value), of=2, steps=4, odd=ODD, at=3)
    for said in found:
        assert said[:3] == [""] * 3, "the third is not one of those that are compared"
        assert " is not the same on rank 1 as on rank 0" in said[3]
    assert committed == [1, 2, 3]


def test_what_nothing_declares_is_compared_at_every_save(repo: Repo) -> None:
    found, committed = train(repo, lambda value, _: value, of=2, steps=3, odd=ODD, at=3)
    assert committed == [1, 2]
    for said in found:
        assert said[:2] == ["", ""] and "w is not the same on rank 1 as on rank 0" in said[2]


@pytest.mark.parametrize(("at", "steps"), [(1, 1), (3, 4)])
def test_of_a_box_that_some_ranks_hold_those_are_named(
    repo: Repo, monkeypatch: pytest.MonkeyPatch, at: int, steps: int
) -> None:
    """Two halves, each on two of four ranks, as sharding over one axis of a mesh and replication over the other have
    it."""
    monkeypatch.setattr(group_save, "COMPARE_EVERY", 2)

    def hold(value: Array, rank: int) -> Any:
        return tenuto.shard(value, whole=(8, 3), offsets=(4 * (rank % 2), 0))

    for said in train(repo, hold, of=4, steps=steps, odd=2, at=at)[0]:
        assert "w is not the same on rank 2 as on rank 0" in said[-1] and said[:-1] == [""] * (steps - 1)
