"""Simulated trainings against the closed form, an independent simulation step by step, and published settings."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import UsageError
from tenuto.policy.interval import SaveCosts, waste
from tenuto.policy.simulation import Job, simulate

HOUR, DAY = 3600.0, 86_400.0


@pytest.mark.parametrize("mtbf_s", [600.0, 3.09 * HOUR, DAY])
@pytest.mark.parametrize("costs", [SaveCosts(0.2, 10), SaveCosts(30), SaveCosts(5, 20, 0.1)])
def test_it_comes_to_what_the_closed_form_says(mtbf_s: float, costs: SaveCosts) -> None:
    job = Job(work_s=20_000 * mtbf_s, mtbf_s=mtbf_s, costs=costs, restart_s=60)
    expected = 1 - waste(job.between_saves_s, costs, mtbf_s, job.restart_s)
    assert simulate(job, 1).ettr == pytest.approx(expected, abs=0.006)


def step_by_step(job: Job, seed: int) -> float:
    """The same second by second, knowing no formula: the time that the work takes."""
    source = random.Random(seed)
    scale = job.mtbf_s / math.gamma(1 + 1 / job.shape)
    done, stored, elapsed = 0, 0, 0.0
    while True:
        fails = source.weibullvariate(scale, job.shape)
        now, at, due, pending, sealed = 0.0, done, stored + job.between_saves_s, [], done
        while at < job.work_s:
            if at >= due:
                if now + job.costs.stall_s > fails:
                    break
                now, due = now + job.costs.stall_s, at + job.between_saves_s
                pending.append((now + job.costs.persist_s, at))
            if now + 1 > fails:
                break
            now, at = now + 1, at + 1
            if job.memory_s and (at - done) % job.memory_s == 0:
                sealed = at
        else:
            return elapsed + now
        stored = max([stored, *(step for ready, step in pending if ready <= fails)])
        lost = job.memory_s is None or source.random() < job.node_share
        memory = job.memory_s is not None and (job.replicas or not lost)
        pause = (job.restart_s + memory * job.costs.persist_s) if lost else job.memory_restart_s
        while (again := source.weibullvariate(scale, job.shape)) < pause:
            elapsed += again
        elapsed += fails + pause
        done = max(stored, sealed) if memory else stored
        if lost and memory:
            stored = done


@settings(max_examples=60)
@given(
    st.integers(0, 1000), st.integers(5, 200), st.integers(0, 3), st.integers(0, 30), st.sampled_from([0.7, 1.0]),
    st.sampled_from([None, 1, 4, 7]), st.sampled_from([0.0, 0.25, 1.0]), st.booleans(),
)  # fmt: skip
def test_it_is_the_training_second_by_second(
    seed: int,
    save_s: int,
    stall_s: int,
    persist_s: int,
    shape: float,
    memory_s: int | None,
    node_share: float,
    replicas: bool,
) -> None:
    memory = {"memory_s": memory_s, "memory_restart_s": 2, "node_share": node_share, "replicas": replicas}
    job = Job(1500, 300, SaveCosts(stall_s, persist_s), 7, save_s=save_s, shape=shape, **memory)
    assert simulate(job, seed).elapsed_s == pytest.approx(step_by_step(job, seed), abs=1e-6)


def test_a_lost_node_loses_what_was_done_since_the_last_save_however_often_memory_has_helped() -> None:
    job = Job(400 * DAY, 600, SaveCosts(0), 0, save_s=3600, memory_s=10, node_share=0.05)
    found = simulate(job, 2)
    by_nodes, rate = found.failures - found.from_memory, 0.05 / 600
    expected_s = 1 / rate - 3600 / math.expm1(rate * 3600)  # of work since a save, where node failures have no memory
    assert (found.lost_s - found.from_memory * 5.0) / by_nodes == pytest.approx(expected_s, rel=0.04)


def test_the_parts_are_the_whole() -> None:
    job = Job(30 * DAY, 2 * HOUR, SaveCosts(1, 20, 0.2), 120, memory_s=10, memory_stall_s=0.02, memory_restart_s=8)
    found = simulate(job, 3)
    assert found.work_s + found.saving_s + found.lost_s + found.down_s == pytest.approx(found.elapsed_s)
    assert 0.7 < found.from_memory / found.failures < 0.8


def test_published_settings_reach_what_is_aimed_at() -> None:
    llama3 = Job(54 * DAY, 3.09 * HOUR, SaveCosts(0.2, 10), 60)
    assert simulate(llama3, 0).ettr >= 0.985
    every_ten_minutes = Job(10 * DAY, 600, SaveCosts(0.2, 10), 60, memory_s=5, memory_restart_s=5, node_share=0)
    assert simulate(every_ten_minutes, 0).ettr >= 0.97
    with_nodes = replace(every_ten_minutes, node_share=0.1, replicas=True)
    assert simulate(with_nodes, 0).ettr >= max(0.97, simulate(replace(with_nodes, replicas=False), 0).ettr + 0.004)


def test_a_job_that_never_ends_and_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="it does not end"):
        simulate(Job(DAY, 1, SaveCosts(5, 50), 1, save_s=60), most_failures=1000)
    with pytest.raises(UsageError, match="it does not end"):  # it never comes back
        simulate(Job(DAY, 5, SaveCosts(0.2), 300), most_failures=1000)
    for wrong in (
        Job(0, 1, SaveCosts(1), 1),
        Job(1, math.inf, SaveCosts(1), 1),
        Job(1, 1, SaveCosts(1), -1),
        Job(1, 1, SaveCosts(1), 1, save_s=0),
        Job(1, 1, SaveCosts(1), 1, memory_s=0),
        Job(1, 1, SaveCosts(1), 1, node_share=2),
        Job(1, 1, SaveCosts(1), 1, shape=0),
    ):
        with pytest.raises(UsageError):
            simulate(wrong)
