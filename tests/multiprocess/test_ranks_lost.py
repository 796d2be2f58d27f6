"""Ranks that are lost while `ranks_timeout=` is minutes: who waits, or trains on, learns it within seconds."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from campaigns.ports import free_port
from campaigns.rank_kills.processes import Death, Ended, Job, Plan, raising_noted
from campaigns.rank_kills.training import Numbers
from campaigns.rank_phases.places import MetAt, Server, StoreDeath
from tenuto.errors import RankFailed, RanksDisagree, RanksMissing
from tenuto.events import Event, Warned
from tenuto.policy import every, on
from tenuto.ranks.handshake import MemberHandshake

TIMEOUT_S = 600.0
KILLED_S, STOPPED_S = 5.0, 30.0
MACHINE_S = 8.0
"""What a busy machine may add to a bound."""


class Warnings:
    def __init__(self) -> None:
        self.told: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Warned):
            self.told.append(event.message)


def training(plan: Plan, rank: int, **more: Any) -> Mapping[str, Any]:
    """Trains without an end, with the default `on_error`, however many saves fail."""
    numbers, seen = Numbers(rank, plan.world), Warnings()
    options = {"save": every(steps=3), "sinks": [seen], "ranks": plan.ranks(rank), **plan.more, **more}
    warnings.simplefilter("always")
    with warnings.catch_warnings(record=True) as warned:
        try:
            with (
                tenuto.Checkpointer(plan.where, numbers.state(), ranks_timeout=plan.timeout_s, **options) as ckpt,
                raising_noted(plan.raised(rank)),
            ):
                for number in ckpt.steps(plan.steps):
                    numbers.step(number + 1)
                    time.sleep(0.02)
        finally:
            (plan.place / f"warned-{rank}").write_text("\n".join(str(one.message) for one in warned))
    return {"step": ckpt.step}


def after(job: Job, rank: int) -> tuple[float, float]:
    """How long after the death this rank raised, and left."""
    assert job.struck_at is not None
    return job.met_error_at(rank) - job.struck_at, job.began + job.ended[rank].seconds - job.struck_at


def struck(plan: Plan, survivors: list[int], bound_s: float, work: Any = training) -> list[Ended]:
    """Plays the job; returns how the survivors ended, each within the bound after the death."""
    with Job(plan, work) as job:
        others = [rank for rank in range(plan.world) if rank not in survivors]
        assert job.wait(60 + bound_s, without=others), job.ended
        for rank in survivors:
            raised_s, left_s = after(job, rank)
            assert raised_s < bound_s + MACHINE_S and left_s < bound_s + MACHINE_S, (rank, raised_s, left_s)
        return [job.ended[rank] for rank in survivors]


def test_a_killed_rank_ends_the_training_of_the_others_by_name(tmp_path: Path) -> None:
    plan = Plan(tmp_path, 3, 10**6, timeout_s=TIMEOUT_S, death=Death(2, "begun, nothing written", nth=2))
    for ended in struck(plan, [0, 1], KILLED_S):
        assert (ended.status, ended.told["error"], ended.told["ranks"]) == (1, "RanksMissing", [2]), ended
        assert "rank 2 (" in ended.told["message"] and "has ended" in ended.told["message"]
    # The job that follows need not wait for the old one's lease.
    with Job(Plan(tmp_path, 2, 30, timeout_s=TIMEOUT_S)) as job:
        assert job.wait(60) and {one.status for one in job.ended.values()} == {0}, job.ended


def test_a_killed_rank_holds_up_no_state_in_memory(tmp_path: Path) -> None:
    plan = Plan(tmp_path, 2, 10**6, timeout_s=TIMEOUT_S, death=Death(0, "memory image sealed", nth=8))
    more = {"memory": every(steps=1), "save": every(steps=10**6)}
    (ended,) = struck(replace(plan, more=more), [1], KILLED_S)
    assert (ended.status, ended.told["error"], ended.told["ranks"]) == (1, "RanksMissing", [0]), ended


def test_a_rank_that_dies_while_the_others_close_holds_none_of_them_up(tmp_path: Path) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        return training(plan, rank, save=on.end())

    plan = Plan(tmp_path, 2, 3, timeout_s=TIMEOUT_S, death=Death(1, "begun, nothing written"))
    (ended,) = struck(plan, [0], KILLED_S, work)
    assert ended.status == 1, ended


@pytest.mark.long
@pytest.mark.parametrize("memory", [False, True])
def test_a_stopped_rank_is_lost_after_the_silence(tmp_path: Path, memory: bool) -> None:
    death = Death(2, "begun, nothing written", nth=2, number=signal.SIGSTOP)
    more = {"on_error": "raise", **({"memory": every(steps=1)} if memory else {})}
    plan = Plan(tmp_path, 3, 10**6, timeout_s=TIMEOUT_S, death=death, more=more)
    for ended in struck(plan, [0, 1], STOPPED_S):
        assert ended.told["behind"] == "RanksMissing" and ended.told["ranks"] == [2], ended
        assert "has been stopped" in ended.told["message"]


def test_a_rank_that_computes_without_a_sign_of_life_is_slow_and_not_lost(tmp_path: Path) -> None:
    """Its process is there, so the others wait for it."""

    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        from tenuto.ranks.background import Heartbeat

        if rank == 1:
            beat = Heartbeat._beat
            silent = [False]
            Heartbeat._beat = lambda self, timeout: None if silent[0] else beat(self, timeout)  # type: ignore[method-assign]
        numbers = Numbers(rank, plan.world)
        with tenuto.Checkpointer(
            plan.where,
            numbers.state(),
            save=every(steps=3),
            on_error="raise",
            ranks=plan.ranks(rank),
            ranks_timeout=60,
            ranks_silence=0.5,
        ) as ckpt:
            for number in ckpt.steps(6):
                numbers.step(number + 1)
                if rank == 1 and number == 4:
                    silent[0] = True
                    time.sleep(2.0)
                    silent[0] = False
        return {"step": ckpt.step}

    with Job(Plan(tmp_path, 2, 6), work) as job:
        assert job.wait(60) and [job.ended[rank].status for rank in (0, 1)] == [0, 0], job.ended


# -- the place where the ranks meet ---


def test_a_store_that_is_gone_ends_the_training_and_gives_the_run_back(tmp_path: Path) -> None:
    """As when the launcher is killed: no rank dies, none can ever save again, and none may hold the run."""
    import torch.distributed  # noqa: F401 - once, before ranks are forked

    with Server() as server:
        point = "commit heard, not yet reported"
        death = StoreDeath(1, point, nth=2, number=signal.SIGKILL, pid=server.pid)
        plan = MetAt(tmp_path, 2, 10**6, timeout_s=TIMEOUT_S, death=death, server=server)
        for ended in struck(plan, [0, 1], KILLED_S):
            assert (ended.status, ended.told["error"]) == (1, "RankStoreLost"), ended
            assert ended.told["phase"] and "restart the job" in ended.told["message"]
    for rank in (0, 1):
        assert len((tmp_path / f"warned-{rank}").read_text().splitlines()) < 12
    with Job(Plan(tmp_path, 1, 30, timeout_s=TIMEOUT_S)) as job:
        assert job.wait(60) and job.ended[0].status == 0, job.ended


def test_a_training_that_hangs_frees_the_run_all_the_same(tmp_path: Path) -> None:
    """Rank 0, which owns the run, waits in a collective for a rank that is dead."""

    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        numbers = Numbers(rank, plan.world)
        options = {"save": every(steps=3), "ranks": plan.ranks(rank), "ranks_timeout": TIMEOUT_S}
        with tenuto.Checkpointer(plan.where, numbers.state(), **options) as ckpt:
            for number in ckpt.steps(10**6):
                numbers.step(number + 1)
                if number == 7:
                    ckpt.wait()
                    (plan.place / f"hangs-{rank}").touch()
                    signal.pause()
        return {}

    with Job(Plan(tmp_path, 2, 10), work) as job:
        until(lambda: all((tmp_path / f"hangs-{rank}").exists() for rank in (0, 1)))
        job.send(1, signal.SIGKILL)
        os.waitpid(job.pids[1], 0)
        job.ended[1] = Ended(-signal.SIGKILL, {}, 0.0)
        began = time.monotonic()
        state = {"whole": np.zeros((60, 48)), "cut": np.zeros((60, 48))}
        with tenuto.Checkpointer(tmp_path / "checkpoints", state) as ckpt:
            for _ in ckpt.steps(8):
                pass
        assert time.monotonic() - began < KILLED_S + MACHINE_S


def until(what: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stopped_server_of_the_store_is_named_and_does_not_hold_anybody_up(tmp_path: Path) -> None:
    """`ranks_silence` here is short: what is measured is that no wait takes longer than that and two requests."""
    import torch.distributed  # noqa: F401 - once, before ranks are forked

    with Server() as server:
        death = StoreDeath(1, "begun, nothing written", nth=2, number=signal.SIGSTOP, pid=server.pid)
        more = {"on_error": "raise", "ranks_silence": 2.0}
        plan = MetAt(tmp_path, 2, 10**6, timeout_s=TIMEOUT_S, death=death, server=server, more=more)
        for ended in struck(plan, [0, 1], STOPPED_S):
            assert ended.told["behind"] == "RankStoreLost", ended


# -- the handshake ---


def test_a_rank_that_dies_in_the_meeting_ends_it(tmp_path: Path) -> None:
    """It has acknowledged; a third rank does not come."""

    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        if rank == 2:
            signal.pause()
        return training(plan, rank)

    with Job(Plan(tmp_path, 3, 10, timeout_s=TIMEOUT_S), work) as job:
        until(lambda: list((tmp_path / "ranks").glob("tenuto/sessions/*/ack/1")))
        job.send(1, signal.SIGKILL)
        began = time.monotonic()
        assert job.wait(KILLED_S + MACHINE_S, without=[2]), job.ended
        assert time.monotonic() - began < KILLED_S + MACHINE_S
        told = job.ended[0].told
        assert (told["error"], told["ranks"], told["phase"]) == (RanksMissing.__name__, [1], "handshake"), told


def apart(place: Path, rank: int, port: int) -> Mapping[str, Any]:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    poll = MemberHandshake._poll

    def slowly(self: MemberHandshake, timeout: float) -> bool | None:
        if self.acknowledged:
            time.sleep(1.0)  # it would raise at once, and its process would be gone by then
        return poll(self, timeout)

    MemberHandshake._poll = slowly  # type: ignore[method-assign]
    with tenuto.Checkpointer(place / "checkpoints", {"w": np.ones(3)}, run=f"run-{rank}", ranks_timeout=TIMEOUT_S):
        return {}


def leaving(place: Path, rank: int, port: int) -> Mapping[str, Any]:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    state = {"w": tenuto.replicated(np.ones(3))}
    options = {"save": every(steps=1), "on_error": "raise", "ranks_timeout": TIMEOUT_S}
    with tenuto.Checkpointer(place / "checkpoints", state, **options) as ckpt:
        for step in ckpt.steps(3):
            if rank == 0 and step == 1:
                raise ValueError("its own trouble")
    return {}


@pytest.mark.parametrize(("work", "error"), [(apart, RanksDisagree), (leaving, RankFailed)])
def test_whoever_serves_the_store_leaves_after_the_others_have_read_why(
    tmp_path: Path, work: Callable[[Path, int, int], Mapping[str, Any]], error: type[Exception]
) -> None:
    """Else they would only see that the store is lost."""
    port = free_port()
    with Job(Plan(tmp_path, 2, 3), lambda plan, rank: work(plan.place, rank, port)) as job:
        assert job.wait(60), job.ended
        told = job.ended[1].told
        assert told.get("behind", told["error"]) == error.__name__, told
