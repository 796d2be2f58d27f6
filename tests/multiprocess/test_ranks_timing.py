"""Where the time of a save and of a restore goes on each rank: told on all of them, in the checkpoint, and by
`tenuto show`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tenuto
from campaigns.rank_kills.processes import Job, Plan
from campaigns.rank_kills.training import Numbers
from tenuto.cli import main
from tenuto.engine.group import group_restore
from tenuto.engine.read.peer_window import Window
from tenuto.engine.read.sharded_reader import ShardedReader
from tenuto.engine.save import handle
from tenuto.engine.save.job import Job as SaveJob
from tenuto.events import Event, RestoredEvent
from tenuto.policy import every
from tenuto.telemetry.log import sentence

SLOW_S = 0.5
PATIENCE_S = 60.0


class Clock:
    """Stands for the module `time` where durations are measured: nothing takes long but what adds to it, however busy
    the machine is."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def take(self, seconds: float) -> None:
        self._now_s += seconds

    def perf_counter(self) -> float:
        self._now_s += 1e-3
        return self._now_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def trained(plan: Plan, rank: int) -> Mapping[str, Any]:
    clock = Clock()
    setattr(handle, "time", clock)  # noqa: B010 - a module for the type checker
    if rank == 1:
        original = SaveJob.index

        def slowly(self: Any) -> Any:
            clock.take(SLOW_S)
            return original(self)

        SaveJob.index = slowly  # type: ignore[method-assign]
    numbers = Numbers(rank, plan.world)
    with tenuto.Checkpointer(
        plan.where,
        numbers.state(),
        save=every(steps=3),
        ranks=plan.ranks(rank),
        ranks_timeout=plan.timeout_s,
    ) as ckpt:
        for number in ckpt.steps(plan.steps):
            numbers.step(number + 1)
        ckpt.wait()
        stats = ckpt.stats
    assert stats.ranks is not None
    part = stats.ranks.parts["index_s"]
    return {"slowest": part.slowest[0], "median": part.median, "each": part.each, "text": str(stats)}


def show(plan: Plan, *more: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["show", str(plan.where), "--timing", *more])
    assert left.value.code in (0, None)


def test_the_slowest_rank_is_named_on_all_of_them_and_in_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(tmp_path, 3, 3, timeout_s=30.0)
    with Job(plan, trained) as job:
        assert job.wait(60)
        found = [job.ended[rank] for rank in range(3)]
    assert {one.status for one in found} == {0}, found
    for one in found:
        rank, most = one.told["slowest"]
        assert rank == 1 and most >= SLOW_S > one.told["median"]
        assert len(one.told["each"]) == 3
        line = next(text for text in one.told["text"].splitlines() if text.startswith("index "))
        assert "rank 1" in line and "of 3 ranks" in one.told["text"]
    show(plan, "--json")
    ranks = json.loads(capsys.readouterr().out)["checkpoints"][-1]["ranks"]
    index = ranks["parts"]["index_s"]
    assert (ranks["ranks"], index["slowest"][0]["rank"]) == (3, 1)
    assert index["each"][1] >= SLOW_S and index["median"] == pytest.approx(found[0].told["median"], abs=1e-5)
    assert sum(ranks["parts"]["bytes"]["each"]) > 0
    show(plan)
    shown = capsys.readouterr().out
    assert any(text.startswith("index ") and "rank 1" in text for text in shown.splitlines()), shown


class Told:
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, RestoredEvent):
            self.sentences.append(sentence(event) or "")


def resumed(plan: Plan, rank: int) -> Mapping[str, Any]:
    """Rank 1 is slow to read, and the others wait for what it asks of the node."""
    clock = Clock()
    setattr(group_restore, "time", clock)  # noqa: B010 - a module for the type checker
    read, request = ShardedReader.read, Window.request

    def slowly(self: Any, *arguments: Any) -> int:
        until = time.monotonic() + PATIENCE_S
        while not all((plan.place / f"waits-{other}").exists() for other in (0, 2)):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(SLOW_S)  # that long at least the others wait, by the machine's clock
        clock.take(PATIENCE_S)  # more than it may wait itself, by the same
        return read(self, *arguments)

    def asks(self: Any, data: bytes) -> None:
        request(self, data)
        (plan.place / f"waits-{rank}").touch()

    if rank == 1:
        ShardedReader.read = slowly  # type: ignore[method-assign]
    else:
        Window.request = asks  # type: ignore[method-assign]
    numbers, told = Numbers(rank, plan.world), Told()
    ranks = plan.ranks(rank)
    with tenuto.Checkpointer(
        plan.where, numbers.state(), ranks=ranks, ranks_timeout=plan.timeout_s, sinks=[told]
    ) as ckpt:
        restored = ckpt.restore()
    assert restored is not None and restored.ranks is not None
    parts = restored.ranks.parts
    slowest = {name: part.slowest[0] for name, part in parts.items()}
    return {"slowest": slowest, "each": {name: part.each for name, part in parts.items()}, "told": told.sentences}


def test_the_slowest_rank_of_a_restore_is_named_on_all_of_them(tmp_path: Path) -> None:
    plan = Plan(tmp_path, 3, 3, timeout_s=30.0)
    with Job(plan) as job:
        assert job.wait(60)
    with Job(plan, resumed) as job:
        assert job.wait(60)
        found = [job.ended[rank] for rank in range(3)]
    assert {one.status for one in found} == {0}, found
    assert len({json.dumps(one.told["slowest"]) for one in found}) == 1
    for one in found:
        rank, most = one.told["slowest"]["read_s"]
        assert rank == 1 and most >= SLOW_S
        assert one.told["slowest"]["seconds"][0] == 1
        assert one.told["slowest"]["wait_s"][0] != 1, "who is slow has not waited for the others"
        each = one.told["each"]
        assert len(each["bytes"]) == 3 and min(each["bytes"]) > 0
        assert each["seconds"] == pytest.approx([a + b for a, b in zip(each["match_s"], each["read_s"], strict=True)])
        assert len(one.told["told"]) == 1 and "rank 1 was the slowest" in one.told["told"][0]
