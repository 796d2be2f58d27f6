"""One-off saves and loads of several ranks: one checkpoint of all, read on any number of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto.engine.read import node_share
from tenuto.engine.staging import slots
from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    RankFailed,
    RanksDisagree,
    RanksMissing,
    RepositoryError,
    RunNotFound,
    ShardMismatch,
    StateMismatch,
    TenutoWarning,
    Unserialisable,
    UsageError,
)
from tenuto.events import CandidateSkipped
from tenuto.model.ids import CheckpointId
from tenuto.policy import every
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.repo.notes import add_note

ROWS = 12


def whole(number: float = 1.0) -> Any:
    return np.arange(ROWS * 4.0).reshape(ROWS, 4) * number


def state(ranks: Any, number: float = 1.0) -> dict[str, Any]:
    begin, end = (ROWS * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
    return {
        "w": tenuto.shard(whole(number)[begin:end].copy(), whole=(ROWS, 4), offsets=(begin, 0)),
        "lr": 0.5,
        "own": tenuto.per_rank(np.full(2, ranks.rank)),
    }


def save(place: Path, count: int = 3, number: float = 1.0, **more: Any) -> Sequence[Any]:
    return together(count, lambda ranks: tenuto.save(state(ranks, number), place, ranks=ranks, **more))


def test_every_rank_saves_its_part_and_one_checkpoint_is_made(tmp_path: Path) -> None:
    found = save(tmp_path)
    assert {(one.step, one.attempt, one.bytes, one.leaves, one.content) for one in found} == {
        (0, 1, found[0].bytes, 1, found[0].content)
    }
    restored = tenuto.load(tmp_path)
    assert np.array_equal(restored.state["w"], whole()) and restored.state["lr"] == 0.5
    assert restored.checkpoint.content == found[2].content


def test_every_rank_loads_the_best_and_is_told_the_same_metrics(tmp_path: Path) -> None:
    for number in (1.0, 2.0, 3.0):
        save(tmp_path, number=number)
    repo = tenuto.Repository(tmp_path)
    for id, value in zip(repo.checkpoints(), (3.0, 1.0, 2.0), strict=True):
        add_note(repo.repo, id, "metric", {"loss": value})
    found = together(2, lambda ranks: tenuto.load(tmp_path, step="best:loss:min", ranks=ranks))
    assert [(one.step, dict(one.metrics)) for one in found] == [(1, {"loss": 1.0})] * 2
    latest = together(2, lambda ranks: tenuto.load(tmp_path, ranks=ranks))
    assert [(one.step, dict(one.metrics)) for one in latest] == [(2, {"loss": 3.0})] * 2


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_any_number_of_ranks_loads_its_own_part_of_it(tmp_path: Path, readers: int) -> None:
    save(tmp_path, number=1.0)
    save(tmp_path, number=2.0)

    def work(ranks: Any) -> Any:
        restored = tenuto.load(tmp_path, into=state(ranks, 0.0), ranks=ranks)
        return restored.step, restored.state

    for rank, (step, read) in enumerate(together(readers, work)):
        begin, end = (ROWS * one // readers for one in (rank, rank + 1))
        assert step == 1
        assert np.array_equal(_local(read["w"]), whole(2.0)[begin:end])
        if readers == 3:
            assert _local(read["own"]).tolist() == [rank, rank]


def _local(value: Any) -> Any:
    return getattr(value, "value", value)


def test_saves_number_themselves_and_go_on_from_what_was_loaded(tmp_path: Path) -> None:
    def work(ranks: Any) -> list[tuple[int, int]]:
        told = [tenuto.save(state(ranks), tmp_path, ranks=ranks, step=step) for step in (None, None, 7)]
        tenuto.load(tmp_path, ranks=ranks, step=0)
        told.append(tenuto.save(state(ranks), tmp_path, ranks=ranks, step=5))
        return [(one.attempt, one.step) for one in told]

    assert together(2, work) == [[(1, 0), (1, 1), (1, 7), (2, 5)]] * 2
    assert tenuto.load(tmp_path).checkpoint.attempt == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["save", "load"])
def test_a_rank_that_calls_it_alone_is_told_who_is_missing(tmp_path: Path, rank: int, call: str) -> None:
    tenuto.save({"w": whole()}, tmp_path)
    ranks = ThreadRanks(rank, 2, InProcessKVStore())
    with pytest.raises(RanksMissing, match=f"rank {1 - rank}") as raised:
        if call == "save":
            tenuto.save(state(ranks), tmp_path, ranks=ranks, ranks_timeout=0.2)
        else:
            tenuto.load(tmp_path, ranks=ranks, ranks_timeout=0.2)
    assert raised.value.ranks == (1 - rank,) and "tenuto.Solo()" in str(raised.value.hint)
    assert f"tenuto.{call}" in str(raised.value.hint)


def test_one_of_several_saves_and_loads_by_itself_where_it_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    tenuto.save({"w": whole()}, tmp_path, ranks=tenuto.Solo())
    assert np.array_equal(tenuto.load(tmp_path).state["w"], whole())
    assert np.array_equal(tenuto.load(tmp_path, ranks=tenuto.Solo()).state["w"], whole())


def test_ranks_that_mean_different_steps_or_calls_are_told_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path)
    found = together(2, lambda ranks: tenuto.save(state(ranks), tmp_path, ranks=ranks, step=5 + ranks.rank))
    assert all(isinstance(one, RanksDisagree) and "step is '5'" in one.message for one in found), found

    def mixed(ranks: Any) -> Any:
        if ranks.rank:
            return tenuto.load(tmp_path, ranks=ranks, step=5)
        return tenuto.save(state(ranks), tmp_path, ranks=ranks, step=5)

    found = together(2, mixed)
    assert all(isinstance(one, RanksDisagree) and "call is 'tenuto.save'" in one.message for one in found), found
    assert tenuto.load(tmp_path).step == 0


def test_what_one_rank_cannot_represent_is_told_to_the_others(tmp_path: Path) -> None:
    def work(ranks: Any) -> Any:
        odd = {"odd": object()} if ranks.rank == 1 else {}
        return tenuto.save({**state(ranks), **odd}, tmp_path, ranks=ranks)

    found = together(3, work)
    assert isinstance(found[1], Unserialisable)
    for one in (found[0], found[2]):
        assert isinstance(one, RankFailed) and one.ranks == (1,) and "odd" in one.message, one


def test_a_hole_is_one_error_on_every_rank_and_nothing_is_saved(tmp_path: Path) -> None:
    def work(ranks: Any) -> Any:
        return tenuto.save({"w": tenuto.shard(whole()[:2], whole=(9, 4), offsets=(0, 0))}, tmp_path, ranks=ranks)

    found = together(3, work)
    assert {type(one) for one in found} == {ShardMismatch} and len({one.message for one in found}) == 1
    assert "w" in found[0].message
    with pytest.raises(CheckpointNotFound):
        tenuto.load(tmp_path)


def test_a_save_while_a_checkpointer_trains_the_run_is_refused_on_every_rank(tmp_path: Path) -> None:
    with tenuto.Checkpointer(tmp_path, {"w": whole()}, save=every(steps=1)) as ckpt:
        list(ckpt.steps(1))
        for one in save(tmp_path, 2):
            assert isinstance(one, UsageError | RankFailed) and "a Checkpointer of this process" in str(one), one
        assert all(one.run == "other" for one in save(tmp_path, 2, run="other"))


def test_where_there_is_nothing_to_load_every_rank_says_so_and_nothing_is_made(tmp_path: Path) -> None:
    place = tmp_path / "none"
    found = together(2, lambda ranks: tenuto.load(place, ranks=ranks))
    assert isinstance(found[0], RepositoryError)
    assert isinstance(found[1], RankFailed) and "rank 0" in found[1].message
    assert not place.exists()
    tenuto.save({"w": whole()}, place, run="other")
    found = together(2, lambda ranks: tenuto.load(place, ranks=ranks))
    assert {type(one) for one in found} == {RunNotFound}


def flipped(place: Path, id: CheckpointId, name: str, at: int = -9) -> None:
    file = place / id.directory / name
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.chmod(0o600)
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "manifest.json"])
@pytest.mark.parametrize("trained", [False, True], ids=["load", "Checkpointer"])
def test_damage_that_one_rank_meets_moves_all_to_the_one_before_and_every_rank_knows_it(
    tmp_path: Path, trained: bool, name: str
) -> None:
    """A damaged manifest only the first rank reads; in a pack, damage is met by whoever reads that part."""

    def held(ranks: Any, number: float) -> dict[str, Any]:
        return {"w": state(ranks, number)["w"]}

    def saved(number: float) -> CheckpointId:
        found: CheckpointId = together(3, lambda ranks: tenuto.save(held(ranks, number), tmp_path, ranks=ranks))[0].id
        return found

    first, last = saved(1.0), saved(2.0)
    flipped(tmp_path, last, name, at=-9 if name.startswith("rank") else 40)

    class Told:
        def __init__(self) -> None:
            self.skipped: list[CheckpointId] = []

        def emit(self, event: Any) -> None:
            if isinstance(event, CandidateSkipped):
                self.skipped.append(event.id)

    told = [Told() for _ in range(3)]

    def work(ranks: Any) -> Any:
        sinks = [told[ranks.rank]]
        if not trained:
            return tenuto.load(tmp_path, into=held(ranks, 0.0), ranks=ranks, sinks=sinks)
        with tenuto.Checkpointer(tmp_path, held(ranks, 0.0), ranks=ranks, sinks=sinks, save=every(steps=9)) as ckpt:
            return ckpt.restore()

    with pytest.warns(TenutoWarning, match="is passed over") as warned:
        found = together(3, work)
    assert [one.checkpoint.id for one in found] == [first] * 3
    assert [[id for id, _ in one.skipped] for one in found] == [[last]] * 3
    assert len({one.skipped for one in found}) == 1 and found[0].skipped[0][1]
    assert [one.skipped for one in told] == [[last]] * 3
    (message,) = [str(one.message) for one in warned if "passed over" in str(one.message)]
    assert str(last) in message and str(first) in message and found[0].skipped[0][1] in message
    if not trained:
        found = together(3, lambda ranks: tenuto.load(tmp_path, into=held(ranks, 0.0), ranks=ranks, step=1))
        assert all(isinstance(one, CorruptionError | RankFailed) for one in found), found


@pytest.mark.skipif(sys.platform != "linux", reason="windows lie in shared memory on Linux only")
def test_a_load_looks_into_no_other_directory_of_shared_memory_than_that_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    looked, names = set(), slots._names

    def listed(root: str, below: str, user: int | None) -> list[str]:
        looked.add(below.partition("/")[0])
        return names(root, below, user)

    monkeypatch.setattr(slots, "_names", listed)
    monkeypatch.setattr(node_share, "WORTH_SHARING", 1)
    found = together(2, lambda ranks: tenuto.load(tmp_path, into=state(ranks, 0.0), ranks=ranks).step)
    assert (found, looked) == ([0, 0], {"reads"})


class Refusing:
    """Refuses its state on one rank: only its own code knows why."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise ValueError("not today")


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize("trained", [False, True], ids=["load", "Checkpointer"])
def test_what_cannot_be_set_on_one_rank_is_raised_on_all(tmp_path: Path, trained: bool, refusing: int) -> None:
    def held(ranks: Any, refuses: bool) -> dict[str, Any]:
        return {"w": state(ranks)["w"], "odd": Refusing(refuses)}

    together(3, lambda ranks: tenuto.save(held(ranks, False), tmp_path, ranks=ranks))

    def work(ranks: Any) -> Any:
        target = held(ranks, ranks.rank == refusing)
        if not trained:
            return tenuto.load(tmp_path, into=target, ranks=ranks, ranks_timeout=20.0)
        with tenuto.Checkpointer(tmp_path, target, ranks=ranks, ranks_timeout=20.0) as ckpt:
            ckpt.restore()
            for _ in ckpt.steps(3):
                pass
        return None

    for rank, error in enumerate(together(3, work)):
        assert isinstance(error, StateMismatch if rank == refusing else RankFailed), error
        assert "odd: its state could not be set: not today" in str(error), error
        assert rank == refusing or f"rank {refusing} has " in error.message
    assert tenuto.load(tmp_path).checkpoint.attempt == 1, "nobody trains on"


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_long_bytes_that_all_ranks_hold_are_written_in_parts(tmp_path: Path, kind: type) -> None:
    blob = kind(np.random.default_rng(0).bytes(2 << 20))

    def held(empty: bool = False) -> dict[str, Any]:
        return {"blob": kind() if empty else blob, "w": np.ones(3)}

    saved = together(2, lambda ranks: tenuto.save(held(), tmp_path, ranks=ranks))[0]
    packs = sorted((tmp_path / saved.id.directory).glob("rank-*.safetensors"))
    assert len(packs) == 2 and all(pack.stat().st_size > len(blob) // 4 for pack in packs)
    assert tenuto.load(tmp_path).state["blob"] == blob
    for restored in together(2, lambda ranks: tenuto.load(tmp_path, held(empty=True), ranks=ranks)):
        assert restored.state["blob"] == blob and type(restored.state["blob"]) is kind
