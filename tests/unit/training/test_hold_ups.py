"""What saves cost training, as `every(stall=)` learns it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import tenuto
from tenuto import every
from tenuto.engine.save.handle import Save
from tenuto.model.ids import CheckpointId
from tenuto.training.stats import RECENT_STALLS, SaveTotals


def save(step: int, fence_s: float = 0.0) -> Save:
    found = Save(CheckpointId("main", 1, step), "0" * 32)
    found.fence_s = fence_s
    return found


def test_all_saves_count_and_the_last_few_are_told_one_by_one() -> None:
    spent = SaveTotals()
    for step in range(1, 11):
        spent.hold(save(step, fence_s=0.5), float(step))
    assert spent.stalls_s == [step + 0.5 for step in range(11 - RECENT_STALLS, 11)]
    assert spent.stalled_s == sum(range(1, 11)) + 10 * 0.5


def test_a_fence_that_is_waited_for_later_counts_all_the_same() -> None:
    spent, handle = SaveTotals(), save(1)
    spent.hold(handle, 1.0)
    handle.fence_s = 0.25
    assert spent.stalled_s == 1.25


def test_the_time_to_persist_is_that_of_the_last_save_that_committed() -> None:
    spent, done = SaveTotals(), save(1)
    done.seconds = 3.0
    done.end()
    spent.hold(done, 0.1)
    spent.hold(save(2), 0.1)
    assert spent.persist_s == 3.0
    for step in range(3, 3 + RECENT_STALLS):
        spent.hold(save(step), 0.1)
    assert spent.persist_s == 3.0


def test_a_training_that_is_told_a_share_saves_once_and_learns_from_it(tmp_path: Path) -> None:
    with tenuto.Checkpointer(tmp_path, {"w": np.ones(1000)}, save=every(stall="0.001%")) as checkpointer:
        for _ in checkpointer.steps(20):
            checkpointer.wait()
    steps = [one.step for one in tenuto.Repository(tmp_path).checkpoints()]
    assert steps == [1], "whatever a save took, twenty steps of nothing do not bear another at this share"
