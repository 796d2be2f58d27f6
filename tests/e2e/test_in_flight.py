"""Several saves in flight, in real processes that are killed: what is there is whole and in order."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.held_store import Held, held
from support.memory_training import Kill, fork
from tenuto import every, keep
from tenuto.crashpoints import armed
from tenuto.engine.memory_tier.listing import images
from tenuto.maintenance.flush import execute, plan_flush
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

linux = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "ckpts"
    yield place
    assert_whole(Repo.open(open_store(place)))


def state() -> dict[str, Any]:
    return {"w": np.zeros(30_000, np.float32), "n": 0}


def steps(ckpt: tenuto.Checkpointer, one: dict[str, Any], count: int) -> None:
    for _ in range(count):
        one["w"] += 1
        one["n"] += 1
        ckpt.step_done()


def killed_with_all_in_flight(store: Held, slow: int, **options: Any) -> int:
    """Saves every step, and is killed while `slow` is being written and those behind it wait: its exit status. Where
    the state is kept in memory, what waits is sealed by then."""

    def body() -> None:
        one = state()
        ckpt = tenuto.Checkpointer(store, one, keep=keep.latest(100), **options)
        ckpt.restore()
        steps(ckpt, one, slow)
        store.await_pack(slow)
        steps(ckpt, one, 2)
        training = ckpt._training
        assert training is not None and ckpt.stats.in_flight == 3
        if training.saving.memory is not None:
            await_sealed(ckpt)
        os.kill(os.getpid(), signal.SIGKILL)

    return fork(body)


def await_sealed(ckpt: tenuto.Checkpointer) -> None:
    """Returns once all that was taken is sealed in memory."""
    training = ckpt._training
    assert training is not None and training.saving.memory is not None
    pool = training.saving.memory.tier._pool
    assert pool is not None
    pool.await_sealed(60)


def steps_of(where: Path) -> list[int]:
    return [id.step for id in tenuto.Repository(where).checkpoints()]


def slots_of(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("0-*") if path.suffix != ".lock")


def right(one: dict[str, Any], step: int) -> bool:
    return one["n"] == step and bool(np.all(one["w"] == step))


def test_killed_with_several_in_flight_only_whole_ones_are_there_and_in_order(where: Path) -> None:
    assert killed_with_all_in_flight(held(where, 3), 3, in_flight=3, save=every(steps=1)) == -signal.SIGKILL
    assert steps_of(where) == [2, 1]
    one = state()
    with tenuto.Checkpointer(where, one, in_flight=3, save=every(steps=1), keep=keep.latest(100)) as ckpt:
        assert ckpt.restore() is not None
        assert right(one, 2)
        steps(ckpt, one, 3)
    assert steps_of(where) == [5, 4, 3, 2, 1]
    assert right(tenuto.load(where).state, 5)


@pytest.mark.parametrize(
    "at",
    [
        "save begun",
        "pack durable, index not yet",
        "packs and indexes durable, manifest not yet",
        "manifest durable, not yet reported",
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_killed_anywhere_what_is_there_is_a_beginning_of_what_was_taken(where: Path, at: str, count: int) -> None:
    def body() -> None:
        one = state()
        with armed(at, Kill(count)):
            with tenuto.Checkpointer(where, one, in_flight=3, save=every(steps=1), keep=keep.latest(100)) as ckpt:
                steps(ckpt, one, 5)

    assert fork(body) == -signal.SIGKILL
    done = count if at.startswith("manifest") else count - 1
    assert steps_of(where) == list(range(done, 0, -1))
    assert all(right(tenuto.load(where, step=step).state, step) for step in range(1, done + 1))


@linux
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_the_next_process_goes_on_from_the_newest_image_whatever_its_number_of_slots(
    where: Path, root: Path, after: int
) -> None:
    """Steps 1 to 3 are in flight, and none is committed: all three are whole in memory."""
    options: dict[str, Any] = {"save": every(steps=1), "memory": every(steps=1)}
    assert killed_with_all_in_flight(held(where, 1), 1, in_flight=3, **options) == -signal.SIGKILL
    assert steps_of(where) == []
    assert slots_of(root) == ["0-0", "0-1", "0-2", "0-3"]
    found = {one.name: one.footer for one in images()}
    assert sorted(footer.id.step for footer in found.values() if footer is not None) == [1, 2, 3]

    one = state()
    with tenuto.Checkpointer(where, one, in_flight=after, keep=keep.latest(100), **options) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.source.startswith("from memory, step 3")
        assert right(one, 3)
        steps(ckpt, one, 1)
        assert len(slots_of(root)) == after + 1, "what is too many is given back"
        assert all(found.alive for found in images())
        steps(ckpt, one, after + 2)
    assert right(tenuto.load(where).state, 6 + after)
    assert slots_of(root) == []


@linux
def test_a_process_with_more_slots_finds_what_one_with_two_left(where: Path, root: Path) -> None:
    def body() -> None:
        one = state()
        ckpt = tenuto.Checkpointer(where, one, save=every(steps=100), memory=every(steps=1))
        steps(ckpt, one, 3)
        training = ckpt._training
        assert training is not None and training.saving.memory is not None
        assert training.saving.memory._saver.join(60)
        os.kill(os.getpid(), signal.SIGKILL)

    assert fork(body) == -signal.SIGKILL
    assert slots_of(root) == ["0-0", "0-1"]
    one = state()
    with tenuto.Checkpointer(where, one, in_flight=2, save=every(steps=1), memory=every(steps=1)) as ckpt:
        ckpt.restore()
        assert right(one, 3)
        steps(ckpt, one, 3)
        assert slots_of(root) == ["0-0", "0-1", "0-2"]
    assert right(tenuto.load(where).state, 6)


@linux
def test_a_flush_writes_the_newest_of_all_slots(where: Path, root: Path) -> None:
    options: dict[str, Any] = {"save": every(steps=1), "memory": every(steps=1)}
    assert killed_with_all_in_flight(held(where, 1), 1, in_flight=3, **options) == -signal.SIGKILL
    repo = Repo.open(open_store(where))
    plan = plan_flush(repo, "main")
    assert sorted(one.found.footer.id.step for one in plan.images if one.found.footer is not None) == [1, 2, 3]
    flushed = execute(repo, plan)
    assert flushed is not None and flushed.id.step == 3
    assert right(tenuto.load(where).state, 3)


@linux
def test_states_between_saves_are_kept_while_two_saves_are_in_flight(where: Path, root: Path) -> None:
    store, one = held(where, 2, 4), state()
    with tenuto.Checkpointer(
        store, one, in_flight=2, save=every(steps=2), memory=every(steps=1), keep=keep.latest(100)
    ) as ckpt:
        for step in range(1, 6):
            steps(ckpt, one, 1)
            if step == 2:
                store.await_pack(2)
        assert ckpt.stats.in_flight == 2
        assert (ckpt.stats.skipped_in_memory, ckpt.stats.delayed) == (0, 0)
        await_sealed(ckpt)
        sealed = sorted(found.footer.id.step for found in images() if found.footer is not None)
        assert sealed[:2] == [2, 4], "what is being written stays whole in memory"
        store.let_go()
    assert store.committed == [2, 4]
