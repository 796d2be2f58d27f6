"""What ranks tell each other when a structure is planned: each tree by one rank, and to each rank its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import on_ranks, outcomes
from tenuto.api.save_load import load
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.group.replica_check import ComparedRows, check_replicas, check_sets, compared_rows, replica_groups
from tenuto.engine.group.rounds import WaitPoints, through
from tenuto.engine.save.handle import Save
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import RanksDisagree, ShardMismatch
from tenuto.model.leaf import Box
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.round import Round
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.sharding.holdings import distinct_boxes, gather, shards
from tenuto.state.encode.flattener import Flattener
from tenuto.store.memory import MemoryStore


@pytest.fixture
def repo() -> Repo:
    return Repo.create_or_open(MemoryStore("planning"))


def saved(repo: Repo, count: int, state: Callable[[int, int], Any], steps: int = 1) -> Any:
    """Saves of `count` ranks, `state(rank, step)` of each; what each rank has posted, by topic and rank."""
    posts: dict[tuple[str, int], bytes] = {}
    post = Round.send

    def noted(round: Round, data: bytes) -> None:
        posts[round.name, round._session.rank] = data
        post(round, data)

    attempt = claim(repo, "main", None)

    def work(agreement: Agreement) -> list[Save]:
        saver = Saver(repo, "main", lasting=False, protocol=GroupCommit(repo, agreement, deadline_s=60))
        saver.attempt = attempt
        taken = [saver.save(Flattener(state(agreement.rank, step)).flatten(), step, wait=True, about=ManifestDetails())
                 for step in range(1, steps + 1)]  # fmt: skip
        for save in taken:
            save.wait(60)
        saver.close()
        return taken

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Round, "send", noted)
        try:
            on_ranks(count, work)
        finally:
            attempt.release()
    return posts


def stage(rank: int, step: int) -> dict[str, Any]:
    """Two stages of a pipeline, each on two ranks: every stage has layers of its own."""
    layers = {f"layer{rank // 2}.{number}": np.full(3, 10 * (rank // 2) + number + step) for number in range(2)}
    return {"model": layers, "step": step}


def test_of_ranks_with_one_tree_none_but_the_coordinator_spells_it(repo: Repo) -> None:
    posts = saved(repo, 3, lambda rank, step: {"weight": np.arange(6.0) + step, "step": step}, steps=2)
    assert not any(b'"as"' in data for data in posts.values())
    assert load(repo.store, step=2).state["step"] == 2


def test_of_ranks_with_different_trees_one_of_each_spells_it(repo: Repo) -> None:
    posts = saved(repo, 4, stage, steps=2)
    spelled = sorted((round, rank) for (round, rank), data in posts.items() if b'"as"' in data)
    # In the second round of planning, and at each commit: always rank 2, for itself and rank 3.
    assert [rank for _, rank in spelled] == [2] * 3
    model = load(repo.store, step=2).state["model"]
    assert {name: int(value[0]) for name, value in model.items()} == {
        "layer0.0": 2, "layer0.1": 3, "layer1.0": 12, "layer1.1": 13,
    }  # fmt: skip


def test_each_rank_reads_its_own_answer_and_they_are_removed() -> None:
    def take_part(agreement: Agreement) -> bytes:
        with agreement.round("plan") as round:
            round.send(b"")
            if agreement.is_coordinator:
                round.gather(60)
                round.broadcast(b"all", [b"for %d" % rank for rank in range(3)])
                keys = round.keys()
                assert keys[-3:] == [round.reply_key(rank) for rank in range(3)]
                assert all(agreement.session.kv_store.get(key, timeout=5) is not None for key in keys[-3:])
            assert round.receive(60) == b"all"
            return round.own_reply()

    assert on_ranks(3, take_part) == [b"for 0", b"for 1", b"for 2"]


def test_an_answer_that_nobody_has_given_is_refused() -> None:
    def take_part(agreement: Agreement) -> bytes:
        with agreement.round("plan") as round:
            round.send(b"")
            if agreement.is_coordinator:
                round.gather(60)
                round.broadcast(b"all")
            round.receive(60)
            return round.own_reply()

    assert all(isinstance(one, RanksDisagree) for one in outcomes(2, take_part))


def world() -> Any:
    """Leaf 0 and 1 on ranks 0 and 1, leaf 2 on all three, leaf 3 on rank 2 alone."""
    held = [(0, 1, 2), (0, 1, 2), (2, 3)]
    return gather(
        [shards(some, [Box.whole((4,))] * len(some), [(4,)] * len(some), [("uint8", 1)] * len(some)) for some in held],
        leaves=4,
        paths=["a", "b", "c", "d"],
    )


def test_one_digest_stands_for_all_that_the_same_ranks_hold() -> None:
    held = world()
    groups = replica_groups(held, distinct_boxes(held))
    assert groups.set[[0, 1, 3, 4]].tolist() == [groups.set[0]] * 4
    assert groups.set[[2, 5, 6]].tolist() == [groups.set[2]] * 3 and groups.set[2] != groups.set[0]
    assert (groups.group[7], groups.set[7]) == (-1, -1)
    lines = np.flatnonzero(groups.group >= 0)
    told = [b"x" * 16 + b"y" * 16, b"x" * 16 + b"y" * 16, b"y" * 16]
    if groups.set[2] < groups.set[0]:
        told = [one[16:] + one[:16] for one in told]
    assert check_sets(held, groups, lines, told)
    assert not check_sets(held, groups, lines, [*told[:2], b"z" * 16])
    with pytest.raises(ShardMismatch, match="where 5 digests are compared"):
        check_sets(held, groups, lines, told[:2])


@pytest.mark.parametrize(("rank", "row", "path"), [(0, 0, "a"), (1, 1, "b"), (2, 0, "c")])
def test_the_row_that_differs_is_named(rank: int, row: int, path: str) -> None:
    held = world()
    groups = replica_groups(held, distinct_boxes(held))
    lines = np.flatnonzero(groups.group >= 0)
    rows = []
    for one in range(3):
        sets = groups.set[held.of(one)] + 1
        order = sorted(np.flatnonzero(sets).tolist(), key=lambda at, sets=sets: (sets[at], at))  # type: ignore[misc]
        leaves = held.leaf[held.of(one)][order].tolist()
        rows.append(b"".join((b"%d" % leaf).ljust(16, b"!" if (one, at) == (rank, row) else b".")
                             for leaf, at in zip(leaves, order, strict=True)))  # fmt: skip
    with pytest.raises(ShardMismatch, match=f"{path} is not the same on rank"):
        check_replicas(held, groups, lines, rows)


def test_rows_that_are_compared_are_in_an_order_that_all_ranks_have() -> None:
    flattened = Flattener({"a": np.zeros(1), "b": tenuto.replicated(np.zeros(2)), "c": np.zeros(3)}).flatten()
    always, sometimes = compared_rows(flattened, np.array([7, 2, 5]), np.array([1, 2, 1]))
    assert (list(sometimes.rows), list(sometimes.bounds)) == ([2, 0, 1], [0, 2, 3])
    assert (list(always.rows), list(always.bounds)) == ([2, 0], [0, 2])
    assert len(sometimes.of_sets(b"1" * 48)) == 32 and ComparedRows().of_sets(b"") == b""
    assert always.of_sets(b"1" * 16 + b"2" * 16) != always.of_sets(b"2" * 16 + b"1" * 16)


def test_steps_are_taken_to_their_end() -> None:
    def steps() -> WaitPoints[int]:
        yield
        yield
        return 3

    assert through(steps()) == 3
