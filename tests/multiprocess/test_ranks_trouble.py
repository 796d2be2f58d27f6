"""What goes wrong on one rank of a job fails the save on all of them, by name; the saves after it succeed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from campaigns.rank_kills.processes import Ended, Job, Plan
from campaigns.rank_kills.training import Numbers, untouched
from support.thinning import crossed
from support.tiny_training import AtStepsOfItsOwn
from tenuto.engine.group import group_save
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.save.job import Job as SaveJob
from tenuto.engine.save.save_writer import SaveWriter
from tenuto.engine.staging.capture import Capturer
from tenuto.errors import SaveFailed, StoreError, StoreFull
from tenuto.events import Committed, SaveFailedEvent, SaveStarted
from tenuto.model.ids import CheckpointId
from tenuto.policy import every, on
from tenuto.repo.repository import Repo
from tenuto.store.contract import leftovers_of
from tenuto.store.registry import open_store

PATIENCE_S = 60.0
Step = Callable[[tenuto.Checkpointer, int], None]


def nothing(ckpt: tenuto.Checkpointer, number: int) -> None: ...


def trained(plan: Plan, rank: int, step: Step = nothing, **more: Any) -> Mapping[str, Any]:
    """Trains, and tells which saves were committed and which failed, and why."""
    numbers, failed, saved = more.pop("numbers", None) or Numbers(rank, plan.world), {}, []

    class Seen:
        def emit(self, event: object) -> None:
            if isinstance(event, Committed):
                saved.append(event.id.step)
            if isinstance(event, SaveFailedEvent):
                failed[event.id.step] = event.error

    arguments = {"save": every(steps=plan.save_every), "ranks": plan.ranks(rank), **more}
    with tenuto.Checkpointer(
        arguments.pop("where", plan.where),
        numbers.state() if isinstance(numbers, Numbers) else numbers,
        ranks_timeout=plan.timeout_s,
        in_flight=plan.in_flight,
        sinks=[Seen(), *arguments.pop("sinks", [])],
        **arguments,
    ) as ckpt:
        for number in ckpt.steps(plan.steps):
            if isinstance(numbers, Numbers):
                numbers.step(number + 1)
            step(ckpt, number + 1)
    return {"committed": saved, "failed": {str(number): why for number, why in failed.items()}}


def ended(plan: Plan, work: Callable[[Plan, int], Mapping[str, Any]]) -> list[Ended]:
    with Job(plan, work) as job:
        assert job.wait(PATIENCE_S)
        return [job.ended[rank] for rank in range(plan.world)]


def committed(plan: Plan) -> list[int]:
    repo = Repo.open(open_store(plan.where))
    return [step for attempt in repo.attempts("main") for step in repo.committed("main", attempt)]


def failing(owner: type, name: str, error: Callable[[], Exception], *, after: int) -> None:
    """In a forked child: from now on the method raises, once, after so many calls."""
    original, calls = getattr(owner, name), [0]

    def method(self: Any, *words: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == after + 1:
            raise error()
        return original(self, *words, **more)

    setattr(owner, name, method)


TROUBLES = {
    "no room": (SaveWriter, "_check_space", lambda: StoreFull("rank's own disk is full"), "disk is full"),
    "its capture": (Capturer, "capture", lambda: SaveFailed("its memory went"), "memory went"),
    "its pack": (SaveWriter, "_write_pack", lambda: StoreError("its pack was lost"), "pack was lost"),
    "its index": (SaveJob, "index", lambda: StoreError("its index was lost"), "index was lost"),
    "its digests": (GroupCommit, "_take_share", lambda: StoreError("its digests failed"), "digests failed"),
    "its last word": (GroupCommit, "_commit", lambda: StoreError("it cannot commit"), "cannot commit"),
}


@pytest.mark.parametrize(
    ("what", "rank"),
    [*crossed([what for what in TROUBLES if what != "its last word"], [0, 1]), ("its last word", 0)],
)
def test_what_fails_on_one_rank_fails_that_save_on_all_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, rank: int
) -> None:
    """All ranks compare what they hold alike at the same saves afterwards too."""
    monkeypatch.setattr(group_save, "COMPARE_EVERY", 2)
    owner, name, error, words = TROUBLES[what]

    def work(plan: Plan, here: int) -> Mapping[str, Any]:
        if here == rank:
            failing(owner, name, error, after=1)
        return trained(plan, here)

    plan = Plan(tmp_path, 3, 12, timeout_s=30.0)
    for one in ended(plan, work):
        assert one.told["committed"] == [3, 9, 12], one
        assert words in one.told["failed"]["6"], one
        assert one.status == 0
    repo, failed = Repo.open(open_store(plan.where)), CheckpointId("main", 1, 6)
    left = {entry.name.removeprefix(f"{failed.directory}/") for entry in repo.store.walk(failed.directory)}
    assert left <= {"begin.json", "manifest.json"}, left  # what says that it was begun, and that it is closed
    assert [entry.name for entry in leftovers_of(repo.store, "")] == []


def test_a_step_that_raises_on_one_rank_is_told_to_the_others(tmp_path: Path) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        def step(ckpt: tenuto.Checkpointer, number: int) -> None:
            if rank == 1 and number == 5:
                raise ZeroDivisionError("the loss is not a number")

        return trained(plan, rank, step, on_error="raise")

    found = ended(Plan(tmp_path, 3, 12, timeout_s=30.0), work)
    assert found[1].told["error"] == "ZeroDivisionError"
    for one in (found[0], found[2]):
        assert one.status != 0 and one.told["ranks"] == [1] and "the loss is not a number" in one.told["message"]
        assert one.seconds < 25


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_saves_alone_fails_by_name_and_all_come_together_again(tmp_path: Path, rank: int) -> None:
    def work(plan: Plan, here: int) -> Mapping[str, Any]:
        def step(ckpt: tenuto.Checkpointer, number: int) -> None:
            if here == rank and number == 5:
                ckpt.save()

        return trained(plan, here, step)

    plan = Plan(tmp_path, 3, 15, timeout_s=30.0)
    for here, one in enumerate(ended(plan, work)):
        assert one.told["committed"] == [3, 9, 12, 15], one
        said = one.told["failed"]["5" if here == rank else "6"]
        assert "do not agree about the step" in said and f"rank {rank}: 5" in said, one


def test_ranks_whose_policies_decide_differently_are_told_the_steps(tmp_path: Path) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        return trained(plan, rank, save=AtStepsOfItsOwn(4 if rank == 1 else 3))

    for one in ended(Plan(tmp_path, 2, 12, timeout_s=30.0), work):
        assert one.status == 1 and one.told["committed"] == [], one
        assert any("do not agree about the step" in said for said in one.told["failed"].values()), one


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"run": "other"}, "run is"),
        ({"where": "elsewhere"}, "not one location for all ranks"),
        ({"writers": "one"}, "writers is"),
        (
            {"on_busy": "skip", "resume_from": None, "save": every(steps=4)},
            "save is 'every(steps=3)' on rank 0 (H pid N) and 'every(steps=4)' on rank 1 (H pid N); "
            "resume_from is 'latest' on rank 0 (H pid N) and 'None' on rank 1 (H pid N); "
            "on_busy is 'wait' on rank 0 (H pid N) and 'skip' on rank 1 (H pid N)",
        ),
    ],
    ids=["run", "where", "writers", "arguments"],
)
def test_ranks_that_mean_different_things_never_begin(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        given = {name: str(tmp_path / value) if name == "where" else value for name, value in more.items()}
        return trained(plan, rank, **(given if rank == 1 else {}))

    for one in ended(Plan(tmp_path, 2, 3, timeout_s=30.0), work):
        said = re.sub(r"pid \d+", "pid N", str(one.told["message"])).replace(socket.gethostname(), "H")
        assert (one.status, one.told["error"]) == (1, "RanksDisagree") and words in said, one


def lies_in(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def refused_by_place(plan: Plan, other: Path) -> None:
    """Every rank says which one looks into another place, on which machine, and where."""

    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        return trained(plan, rank, **({"where": other} if rank == 1 else {}))

    for one in ended(plan, work):
        assert (one.status, one.told["error"], one.told["ranks"]) == (1, "RanksDisagree", [1]), one
        said = one.told["message"]
        assert "not one location for all ranks" in said and "give a directory that all ranks share" in said
        assert f"rank 1, {other} on {socket.gethostname()}: " in said


def test_a_copy_of_the_repository_is_found_out_before_anything_is_saved(tmp_path: Path) -> None:
    """A checkpoint that was staged on each node, under one path: it restores, and its repository's id is the same."""
    plan = Plan(tmp_path, 3, 3, timeout_s=30.0)
    assert {one.status for one in ended(plan, trained)} == {0}
    copy = Path(shutil.copytree(plan.where, tmp_path / "copy"))
    before, copied = lies_in(plan.where), lies_in(copy)
    refused_by_place(replace(plan, steps=6), copy)
    assert lies_in(copy) == copied
    new = {name: data for name, data in lies_in(plan.where).items() if before.get(name) != data}
    assert {name.rpartition("/")[0] for name in new} == {"runs/main/a0002", "runs/main/a0002/lease"}, "the claim alone"
    assert {one.status for one in ended(replace(plan, steps=6), trained)} == {0}
    assert committed(plan)[-1] == 6


def test_another_repository_of_that_name_is_found_out_when_ranks_meet(tmp_path: Path) -> None:
    plan, other = Plan(tmp_path, 2, 3, timeout_s=30.0), tmp_path / "elsewhere"
    for place in (plan.where, other):
        tenuto.save({"w": np.ones(3)}, place)
        Repo.create_or_open(open_store(place))  # as training does, which keeps twice what the repository is
    before = lies_in(plan.where), lies_in(other)
    refused_by_place(plan, other)
    assert (lies_in(plan.where), lies_in(other)) == before
    assert "another repository lies there" in (tmp_path / "rank-0.json").read_text()


def rows(rank: int, of: int, *, begin: int = 0, whole: int = 12, kind: str = "<f8", width: int = 4) -> dict[str, Any]:
    length = 12 // of
    value = np.ones((length, width), kind)
    return {"w": tenuto.shard(value, whole=(whole, width), offsets=(rank * length + begin, 0))}


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"kind": "<f4"}, "w"),
        ({"width": 5}, "w"),
        ({"whole": 13}, "w"),
        ({"begin": -1}, "w"),
    ],
    ids=["dtype", "shape", "whole", "overlap"],
)
def test_states_that_do_not_fit_together_are_one_error_on_every_rank(tmp_path: Path, odd: Any, words: str) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        return trained(plan, rank, numbers=rows(rank, plan.world, **(odd if rank == 1 else {})))

    plan = Plan(tmp_path, 3, 3, timeout_s=30.0)
    found = ended(plan, work)
    assert {(one.status, one.told["error"]) for one in found} == {(1, "ShardMismatch")}, found
    assert len({one.told["message"] for one in found}) == 1 and words in found[0].told["message"]
    assert "rank" in found[0].told["message"]
    assert committed(plan) == []


def test_ranks_that_hold_nothing_of_a_leaf_save_with_the_others(tmp_path: Path) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        held = np.full((1 if rank < 2 else 0, 3), float(rank))
        state = {"w": tenuto.shard(held, whole=(2, 3), offsets=(min(rank, 2), 0))}
        return trained(plan, rank, numbers=state)

    plan = Plan(tmp_path, 4, 3, timeout_s=30.0)
    assert {one.status for one in ended(plan, work)} == {0}
    assert tenuto.load(plan.where).state["w"].tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("worlds", [(2, 1), (1, 3)])
def test_one_rank_alone_goes_on_with_what_many_have_cut_and_many_with_what_one_has(
    tmp_path: Path, worlds: tuple[int, int]
) -> None:
    for number, world in enumerate(worlds, 1):
        plan = Plan(tmp_path, world, 3 * number, timeout_s=30.0)
        assert {one.status for one in ended(plan, trained)} == {0}
    found, wanted = tenuto.load(tmp_path / "checkpoints"), untouched(6)
    assert found.step == 6
    assert all(np.array_equal(found.state[name], wanted[name]) for name in wanted)


# -- saves that are not a function of the step ---


@pytest.mark.parametrize("rank", [0, 2])
def test_a_signal_to_one_rank_ends_all_at_one_saved_step(tmp_path: Path, rank: int) -> None:
    def work(plan: Plan, here: int) -> Mapping[str, Any]:
        def step(ckpt: tenuto.Checkpointer, number: int) -> None:
            time.sleep(0.003)
            if here == rank and number == 4:
                os.kill(os.getpid(), signal.SIGTERM)

        return trained(plan, here, step, save=on.signal())

    plan = Plan(tmp_path, 3, 10**6, timeout_s=30.0)
    assert [one.status for one in ended(plan, work)] == [128 + signal.SIGTERM] * 3
    assert len(committed(plan)) == 1


def test_a_signal_behind_the_last_step_ends_the_process_with_its_status(tmp_path: Path) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        numbers = Numbers(rank, plan.world)
        save = on.end() | on.signal()
        with tenuto.Checkpointer(plan.where, numbers.state(), ranks=plan.ranks(rank), save=save) as ckpt:
            for number in ckpt.steps(plan.steps):
                numbers.step(number + 1)
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    plan = Plan(tmp_path, 2, 3, timeout_s=30.0)
    assert [one.status for one in ended(plan, work)] == [128 + signal.SIGTERM] * 2
    assert committed(plan) == [3]


def test_one_rank_decides_by_its_clock_and_its_metrics_for_all(tmp_path: Path) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        reasons: dict[int, str] = {}

        class Seen:
            def emit(self, event: object) -> None:
                if isinstance(event, SaveStarted):
                    reasons[event.id.step] = event.reason

        def step(ckpt: tenuto.Checkpointer, number: int) -> None:
            time.sleep(0.01)
            if rank == 0:
                ckpt.log(loss=1.0 / number)
            if number == 100:
                ckpt.log(tag="middle")
            if number > 100 and len(reasons) > 3:  # the tag's, and those that the clock and the loss ask for
                ckpt.stop()

        save, keep = every(minutes=0.01) | on.improve("loss"), tenuto.keep.latest(2)
        return {**trained(plan, rank, step, save=save, keep=keep, sinks=[Seen()]), "reasons": reasons}

    plan = Plan(tmp_path, 3, 10**6, timeout_s=8.0, in_flight=2)
    found = ended(plan, work)
    assert {one.status for one in found} == {0}
    assert len({tuple(one.told["committed"]) for one in found}) == 1
    assert sum("minutes" in why or "loss" in why for why in found[0].told["reasons"].values()) > 1
    assert tenuto.load(plan.where, step="middle").step == 100


def test_a_stop_on_all_ranks_saves_and_ends(tmp_path: Path) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        return trained(plan, rank, lambda ckpt, number: ckpt.stop() if number == 5 else None, capture="fenced")

    plan = Plan(tmp_path, 3, 50, timeout_s=30.0)
    assert [one.told["committed"] for one in ended(plan, work)] == [[3, 5]] * 3
