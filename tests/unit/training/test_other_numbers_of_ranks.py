"""A run that is gone on with by another number of ranks: its position in the data, its random states, and what is told.

Ranks are threads here, which share one set of random generators: what is each rank's own is tried on `Position` itself,
and on processes in tests/e2e/test_resume_ranks.py.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import tenuto
from tenuto import every, on
from tenuto.errors import CorruptionError, SaveFailed, TenutoWarning
from tenuto.integrations.torch.data.sampler import ResumableSampler
from tenuto.model.ids import CheckpointId
from tenuto.model.records import IndexEntry, Manifest
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.repo.repository import Repo
from tenuto.state.position import rng
from tenuto.state.position.positions import WorldSizeChange
from tenuto.state.position.training_position import Counters, TrainingPosition
from tenuto.store.registry import open_store
from tenuto.training.snapshot import Snapshots

SAMPLES = 50


def shared(rank: int, of: int, seed: int = 7) -> Any:
    order = ResumableSampler(range(SAMPLES), seed=seed, rank=rank, world_size=of)
    return DataLoader(range(SAMPLES), batch_size=12 // of, sampler=order)


def distributed(rank: int, of: int) -> Any:
    order = DistributedSampler(range(SAMPLES), num_replicas=of, rank=rank)
    return DataLoader(range(SAMPLES), batch_size=12 // of, sampler=order)


def train(where: Path, of: int, steps: int, make: Any = shared) -> list[tuple[list[Any], Any]]:
    """Of each rank its batches, and what was restored. Raises what a rank has raised, the first one's first."""
    kv_store = InProcessKVStore()
    found: list[Any] = [None] * of

    def work(rank: int) -> None:
        given = []
        ranks = {"ranks": ThreadRanks(rank, of, kv_store), "ranks_timeout": 60.0} if of > 1 else {}
        state = {"weights": np.ones(3)}
        try:
            with tenuto.Checkpointer(
                where, state, data=make(rank, of), save=every(steps=100) | on.end(), on_error="raise", **ranks
            ) as ckpt:
                restored = ckpt.restore()
                for _ in ckpt.steps(steps):
                    given.append((ckpt.epoch, next(ckpt.batches).tolist()))
                    state["weights"] += 1
            found[rank] = (given, restored)
        except BaseException as error:  # noqa: BLE001 - raised below
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(of)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def steps_of(found: list[tuple[list[Any], Any]]) -> list[tuple[int, list[int]]]:
    """Of each step its epoch, and what all ranks were given."""
    given = zip(*(batches for batches, _ in found), strict=True)
    return [(ranks[0][0], sorted(index for _, batch in ranks for index in batch)) for ranks in given]


@pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")
def test_the_data_goes_on_in_the_same_order_on_any_number_of_ranks(tmp_path: Path) -> None:
    whole = steps_of(train(tmp_path / "whole", 1, 9))
    lives = [train(tmp_path / "lives", of, steps) for of, steps in ((4, 3), (2, 4), (3, 6), (1, 9))]
    found = [step for life in lives for step in steps_of(life)]
    assert [epoch for epoch, _ in found] == [epoch for epoch, _ in whole]
    for (_, now), (_, wanted) in zip(found, whole, strict=True):
        assert now == wanted or (len(wanted) == SAMPLES % 12 and set(wanted) < set(now))
    certificate = lives[1][1][1].certificate
    assert not any("position" in one or "order" in one for one in certificate["reasons"])
    assert certificate["caveats"][-1] == (
        "saved by 4 ranks and resumed by 2: sums over ranks add up in another order, so results agree but for rounding"
    )
    assert lives[1][0][1].progress["data"] == {
        "epoch": 0,
        "samples": SAMPLES,
        "seed": "7",
        "shuffle": True,
        "step": 12,
        "used": 36,
    }


@pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")
def test_another_position_is_told_by_name_in_the_certificates_and_by_a_warning(tmp_path: Path) -> None:
    train(tmp_path, 2, 3, distributed)
    with pytest.warns(TenutoWarning, match="the order of DistributedSampler was saved by 2 ranks"):
        found = train(tmp_path, 3, 4, distributed)
    (restored,) = {id(one): one for _, one in found[:1]}.values()
    assert not restored.certificate["exact"]
    assert any("the order of DistributedSampler" in one for one in restored.certificate["reasons"])
    repo = Repo.open(open_store(tmp_path))
    saved: Mapping[str, Any] = repo.manifest(CheckpointId("main", 2, 4)).certificate
    assert not saved["exact"] and saved["reasons"] == restored.certificate["reasons"][-1:]
    assert (
        "the position in the data is exact on as many ranks alone (the order of DistributedSampler)"
        in (saved["at_other_ranks"])
    )


@pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")
def test_ranks_that_do_not_share_one_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match="where they are in the data that they share") as raised:
        train(tmp_path, 2, 2, lambda rank, of: shared(rank, of, seed=rank))
    assert "seed=" in str(raised.value.hint)


@pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")
def test_a_rank_without_data_says_nothing_of_it(tmp_path: Path) -> None:
    train_data = lambda rank, of: shared(0, 1) if rank == 1 else [np.zeros(1)] * 9  # noqa: E731
    train(tmp_path, 2, 2, train_data)
    assert Repo.open(open_store(tmp_path)).manifest(CheckpointId("main", 1, 2)).progress["data"]["used"] == 24


# -- random states ---------------------------------------------------------------------------------------------------

NAMES = ["python", "numpy", "torch/cpu"]


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def captured(seed: int) -> dict[str, Any]:
    random.seed(1)  # alike on all ranks
    np.random.seed(seed)
    torch.manual_seed(seed)
    return rng.capture()


def going_on(rank: int, saved: int, here: int, alike: list[str]) -> tuple[TrainingPosition, tuple[float, float, float]]:
    moved = WorldSizeChange(saved, here, rank)
    position = TrainingPosition(None, rank, here)
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    position.load({"random": captured(moved.donor)}, Counters(3, alike=tuple(alike), ranks=saved), moved)
    random.seed(98)
    position.settle()
    return position, draws()


def test_ranks_that_were_there_go_on_with_their_own_and_new_ones_with_new_ones() -> None:
    wanted = []
    for rank in range(4):
        rng.apply(captured(rank))
        wanted.append(draws())
    found = [going_on(rank, 2, 4, ["python"])[1] for rank in range(4)]
    assert found[:2] == wanted[:2]
    assert {one[0] for one in found} == {wanted[0][0]}, "alike on all ranks, as it was"
    assert len({one[1] for one in found}) == len({one[2] for one in found}) == 4
    assert found[2][1:] != wanted[2][1:]
    assert going_on(3, 2, 4, ["python"])[1] == found[3], "derived, and not drawn"


def test_what_becomes_of_streams_is_told() -> None:
    position, _ = going_on(0, 2, 4, ["python"])
    assert position.reasons == (
        "saved by 2 ranks and resumed by 4: random generators (numpy, torch/cpu) of ranks 2 to 3 begin streams of "
        "their own, derived from those of rank 0",
    )
    position, _ = going_on(0, 3, 2, ["python", "numpy"])
    assert position.reasons == (
        "saved by 3 ranks and resumed by 2: random generators (torch/cpu) of rank 2 are dropped",
    )
    certificate = position.amended({"exact": True, "reasons": [], "caveats": ["c"]}, WorldSizeChange(3, 2, 0))
    assert not certificate["exact"] and certificate["reasons"] == list(position.reasons)
    position, _ = going_on(0, 3, 2, NAMES)
    assert position.reasons == () and position.amended({"reasons": []}, WorldSizeChange(3, 2, 0))["exact"]
    assert position.amended({"exact": False, "reasons": ["r"]}, None) == {"exact": False, "reasons": ["r"]}


def test_one_process_gives_its_state_to_all() -> None:
    rng.apply(captured(0))
    wanted = draws()
    position, found = going_on(2, 1, 3, [])
    assert found == wanted and position.reasons == ()


def test_what_tells_ranks_apart_is_said_by_several_alone() -> None:
    snapshots = [Snapshots({"w": 1}, TrainingPosition(None, 0, of)) for of in (1, 2)]
    alone, together = (one.about(parent=None, metrics={}, reason="r") for one in snapshots)
    assert (
        alone.marks == {}
        and "at_other_ranks" not in alone.certificate
        and alone.progress.keys()
        == {
            "step",
            "epoch",
            "batch",
        }
    )
    assert together.marks == rng.marks(rng.capture()) and together.progress["ranks"] == 2
    assert len(together.certificate["at_other_ranks"]) == 3


# -- as a checkpoint holds it ----------------------------------------------------------------------------------------


def manifest(**progress: Any) -> Manifest:
    entry = IndexEntry("rank-00000.index", 8, bytes(16))
    return Manifest(
        CheckpointId("main", 1, 3), "0" * 32, None, (entry,), "0" * 64, 0, 0, 1, progress={"step": 3, **progress}
    )


def test_how_many_ranks_have_saved_is_said_by_the_indexes_or_in_memory_by_the_progress() -> None:
    assert TrainingPosition(None).moved(Counters.of(manifest())) is None
    assert TrainingPosition(None, 1, 2).moved(Counters.of(manifest())) == WorldSizeChange(1, 2, 1)
    assert TrainingPosition(None, 1, 2).moved(Counters.of(manifest(ranks=2))) is None


@pytest.mark.parametrize("wrong", [{"alike": "python"}, {"alike": [1]}, {"ranks": "2"}, {"data": {}}, {"data": None}])
def test_malformed_progress_is_damage(wrong: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError):
        Counters.of(manifest(**wrong))


def test_nothing_warns_on_as_many_ranks(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path, 1, 2)
        found = train(tmp_path, 1, 4)
    assert found[0][1].certificate["exact"]
