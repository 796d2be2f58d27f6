"""Saves that are skipped because others are still being written: the same ones on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tenuto
from campaigns.rank_kills.processes import Ended, Job, Plan, raising_noted
from campaigns.rank_kills.training import Numbers
from support.tiny_training import AtStepsOfItsOwn
from tenuto.engine.save.save_writer import SaveWriter
from tenuto.events import Committed, SaveFailedEvent, SaveSkipped
from tenuto.policy import every, on
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

PATIENCE_S = 60.0


def slowly(go_on: threading.Event) -> None:
    """In a forked child: from now on a pack is written only once it is told to go on, and then again at once."""
    original = SaveWriter._write_pack

    def write(self: Any, *words: Any) -> Any:
        go_on.wait(PATIENCE_S)
        return original(self, *words)

    SaveWriter._write_pack = write  # type: ignore[method-assign]


def trained(plan: Plan, rank: int, *, slow: int, alone: int | None = None, in_flight: int = 1) -> Mapping[str, Any]:
    """Rank `slow` writes no pack before the last step but one. `alone`: a rank that saves by itself at step 5."""
    told: dict[str, Any] = {"skipped": [], "committed": [], "failed": {}}
    go_on = threading.Event()

    class Seen:
        def emit(self, event: object) -> None:
            if isinstance(event, SaveSkipped):
                told["skipped"].append(event.step)
            if isinstance(event, Committed):
                told["committed"].append(event.id.step)
            if isinstance(event, SaveFailedEvent):
                told["failed"][str(event.id.step)] = event.error

    numbers = Numbers(rank, plan.world)
    if rank == slow:
        slowly(go_on)
    with tenuto.Checkpointer(
        plan.where,
        numbers.state(),
        save=every(steps=plan.save_every) | on.end(),
        on_busy="skip",
        in_flight=in_flight,
        ranks=plan.ranks(rank),
        ranks_timeout=plan.timeout_s,
        sinks=[Seen()],
        keep=tenuto.keep.latest(99),
    ) as ckpt:
        for number in ckpt.steps(plan.steps):
            numbers.step(number + 1)
            if number + 1 == 5 and rank == alone:
                ckpt.wait()
                ckpt.save()
            if number + 1 >= plan.steps - 2:
                go_on.set()
            time.sleep(0.002)
    return told


def ended(plan: Plan, **more: Any) -> list[Ended]:
    with Job(plan, lambda plan, rank: trained(plan, rank, **more)) as job:
        assert job.wait(PATIENCE_S)
        return [job.ended[rank] for rank in range(plan.world)]


def committed(plan: Plan) -> list[int]:
    repo = Repo.open(open_store(plan.where))
    return sorted(step for attempt in repo.attempts("main") for step in repo.committed("main", attempt))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("slow", [0, 1])
def test_all_ranks_skip_the_same_saves_whoever_is_slow(tmp_path: Path, slow: int, in_flight: int) -> None:
    plan = Plan(tmp_path, 3, 40, save_every=3, timeout_s=30.0)
    found = ended(plan, slow=slow, in_flight=in_flight)
    assert {one.status for one in found} == {0}
    assert not any(one.told["failed"] for one in found), found
    skipped = found[0].told["skipped"]
    assert skipped and all(one.told["skipped"] == skipped for one in found), found
    due = [*range(3, 40, 3), 40]
    assert all(one.told["committed"] == [step for step in due if step not in skipped] for one in found)
    assert committed(plan) == found[0].told["committed"]
    assert due[-1] == 40 and 40 not in skipped  # the last one is never skipped
    assert skipped[0] == 3 * (in_flight + 1)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_saves_alone_is_told_and_all_are_together_again(tmp_path: Path, alone: int) -> None:
    plan = Plan(tmp_path, 2, 30, save_every=3, timeout_s=30.0)
    found = ended(plan, slow=9, alone=alone)
    assert {one.status for one in found} == {0}, found
    said = found[alone].told["failed"]["5"]
    assert "do not agree about the step" in said and ("rank 0: 5" in said or "rank 0: 6" in said), found
    assert 5 not in committed(plan) and {3, 30} <= set(committed(plan))
    assert found[0].told["skipped"] == found[1].told["skipped"]
    assert found[0].told["committed"] == found[1].told["committed"] == committed(plan)


def test_who_waits_for_a_decision_that_never_comes_raises_by_name(tmp_path: Path) -> None:
    def work(plan: Plan, rank: int) -> Mapping[str, Any]:
        numbers = Numbers(rank, plan.world)
        with tenuto.Checkpointer(
            plan.where,
            numbers.state(),
            save=AtStepsOfItsOwn(3 if rank else plan.steps),
            on_busy="skip",
            on_error="raise",
            ranks=plan.ranks(rank),
            ranks_timeout=plan.timeout_s,
        ) as ckpt:
            with raising_noted(plan.raised(rank)):
                for number in ckpt.steps(plan.steps):
                    numbers.step(number + 1)
                    while rank == 0 and number + 2 == plan.steps and not plan.raised(1).exists():
                        time.sleep(0.01)  # it trains on, and saves nothing, for as long as the other waits
        return {}

    plan = Plan(tmp_path, 2, 10, timeout_s=5.0)
    with Job(plan, work) as job:
        assert job.wait(PATIENCE_S)
        first, second = job.ended[0], job.ended[1]
    assert second.told["behind"] == "RanksMissing" and second.told["ranks"] == [0] and "step 3" in second.told["phase"]
    assert first.status != 0 and first.told["ranks"] == [1], first
