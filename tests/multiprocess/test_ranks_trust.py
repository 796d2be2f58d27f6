"""Jobs of several ranks of which one is killed or stopped, wherever it is: the others say who and where, nothing is
lost that was committed, and the job goes on, on fewer ranks too."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tenuto
from campaigns.rank_kills.campaign import campaign
from campaigns.rank_kills.kinds import OfNumbers, OnNodes
from campaigns.rank_kills.processes import Death, Job, Plan
from campaigns.rank_kills.training import untouched
from support.thinning import thinned
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

PATIENCE_S = 60.0
"""A rank must have ended so long after its deadline; the machine may be busy."""
STEPS = 18
KILL, STOP = signal.SIGKILL, signal.SIGSTOP

EVERY_RANK = {
    "ranks met, repository not yet opened": "opening the repository",
    "part restored, not yet voted for": "the restore of main/a0001/6",
    "structure told, plan not yet heard": "save ",
    "ready told, not yet begun": "(step ",
    "begun, nothing written": "(step ",
    "pack durable, index not yet": "(step ",
    "parts put and told, manifest not yet": "(step ",
    "commit heard, not yet reported": "save ",
}
"""Crash points, and the phase that the others are in; it may be the one of the next save already."""
COORDINATOR = ["attempt claimed", "save begun", "manifest durable, not yet announced"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks have left after six steps."""
    place = tmp_path_factory.mktemp("begun")
    ended_well(Plan(place, 3, 6, timeout_s=30.0))
    return place


def ended_well(plan: Plan) -> None:
    with Job(plan) as job:
        assert job.wait(PATIENCE_S)
    assert [job.ended[rank].status for rank in range(plan.world)] == [0] * plan.world, job.ended


def committed(plan: Plan) -> list[tuple[int, int]]:
    repo = Repo.open(open_store(plan.where))
    return [(attempt, step) for attempt in repo.attempts("main") for step in repo.committed("main", attempt)]


def is_untouched(plan: Plan) -> bool:
    found = tenuto.load(plan.where)
    state = untouched(plan.steps)
    return found.step == plan.steps and all(np.array_equal(found.state[name], state[name]) for name in state)


def cases() -> Iterable[tuple[str, int, signal.Signals]]:
    for number, point in enumerate(EVERY_RANK):
        yield from ((point, 0, KILL), (point, 2, KILL), (point, 0 if number % 2 else 2, STOP))
    yield from ((point, 0, number) for point in COORDINATOR for number in (KILL, STOP))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 6))])
def test_whoever_is_killed_or_stopped_wherever_the_others_say_so_and_the_job_goes_on(
    begun: Path, tmp_path: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixth of all cases, side by side: they mostly wait."""
    monkeypatch.setattr("tenuto.repo.ownership.claim.DYING_S", 0.5)  # a coordinator that is stopped still owns the run
    mine = list(cases())[part::6]
    with ExitStack() as stack:
        jobs = []
        for number, (point, rank, how) in enumerate(mine):
            place = shutil.copytree(begun, tmp_path / str(number))
            plan = Plan(place, 3, STEPS, timeout_s=8.0, death=Death(rank, point, 1, number=how))
            jobs.append(stack.enter_context(Job(plan)))
        for job in jobs:
            others_tell(job)
        nexts = [stack.enter_context(Job(going_on(job, 2 + number % 2))) for number, job in enumerate(jobs)]
        for job, following in zip(jobs, nexts, strict=True):
            went_on(job, following)


@pytest.mark.parametrize(("kind", "kills"), thinned([(OfNumbers, 2), (OnNodes, 1)], 2))
def test_a_slice_of_the_campaign(tmp_path: Path, kind: type[OfNumbers], kills: int) -> None:
    """Single ranks killed at random moments and places: every round ends as the training that nothing disturbed."""
    *_, tallies = campaign(kills, 3, tmp_path, [kind(30)], alone_every=5)
    tally = tallies[kind.name]
    assert (tally.kills, tally.equal, tally.faults) == (kills, tally.rounds, [])


def others_tell(job: Job) -> None:
    death = job.plan.death
    assert death is not None
    left_out = [death.rank] if death.number == STOP else []
    assert job.wait(job.plan.timeout_s + PATIENCE_S, without=left_out), (death, job.ended)
    if death.number == KILL:
        assert job.ended[death.rank].status == -KILL, (death, job.ended)
    for rank in {0, 1, 2} - {death.rank}:
        ended = job.ended[rank]
        assert ended.status != 0 and ended.told["ranks"] == [death.rank], (death, ended)
        assert f"rank {death.rank}" in ended.told["message"], (death, ended)
        # A step that finds the rank dead may raise before the wait does: it says what this one was doing.
        at_a_step = "nothing can be saved any more" in ended.told["message"]
        assert ended.told["phase"] != "" and (at_a_step or EVERY_RANK.get(death.point, "") in ended.told["phase"]), (
            ended
        )


def going_on(job: Job, world: int) -> Plan:
    assert (1, 6) in committed(job.plan)
    return replace(job.plan, death=None, world=world, timeout_s=30.0, more={"takeover": True})


def went_on(before: Job, job: Job) -> None:
    """On as many ranks or fewer; and one that was stopped and comes back changes nothing."""
    plan, death = job.plan, before.plan.death
    assert job.wait(PATIENCE_S) and death is not None
    assert {ended.status for ended in job.ended.values()} == {0}, (death, job.ended)
    assert is_untouched(plan), death
    after = committed(plan)
    before.send(death.rank, signal.SIGCONT)
    assert before.wait(PATIENCE_S), (death, before.ended)
    assert before.ended[death.rank].status != 0, (death, before.ended)
    assert committed(plan) == after and is_untouched(plan), death
