"""A training whose policy has a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tenuto
from tenuto import every, keep
from tenuto.events import Warned
from tenuto.maintenance.verify import assert_whole

SIZE = 10_000
EACH = SIZE * 8 + 4096


def train(where: Path, steps: int, policy: Any, **more: Any) -> list[str]:
    """Returns the warnings."""
    events: list[Any] = []
    state = {"w": np.arange(SIZE, dtype=np.float64), "n": np.zeros(SIZE)}
    with tenuto.Checkpointer(where, state, save=every(steps=1), keep=policy, sinks=[events.append], **more) as ckpt:
        for step in ckpt.steps(steps):
            state["n"] += 1
            ckpt.log(loss=abs(step - 2))
    assert_whole(tenuto.Repository(where).repo)
    return [event.message for event in events if isinstance(event, Warned)]


def steps(where: Path) -> list[int]:
    return sorted(id.step for id in tenuto.Repository(where).checkpoints())


def test_as_much_is_kept_as_fits_and_the_best_stays(tmp_path: Path) -> None:
    where = tmp_path / "plain"
    policy = keep.limit(keep.best(1, "loss") | keep.every(steps=2) | keep.latest(2), bytes=9 * EACH)
    assert train(where, 12, policy) == []
    assert steps(where) == [3, 10, 11, 12], "the best, the newest milestone that fits, the newest"


def test_a_budget_below_what_may_not_go_is_one_warning(tmp_path: Path) -> None:
    where = tmp_path / "small"
    warned = train(where, 6, keep.limit(keep.latest(3), bytes="1kB"))
    assert steps(where) == [6]
    assert len(warned) == 1 and "the budget of 1000 B is not met" in warned[0] and "what latest means" in warned[0]


def test_what_rests_on_others_counts_what_it_rests_on(tmp_path: Path) -> None:
    """Half of each state is that of the first, and is stored once: as many more fit."""
    plain, encoded = tmp_path / "plain", tmp_path / "encoded"
    policy = keep.limit(keep.all(), bytes=9 * EACH)
    train(plain, 10, policy)
    train(encoded, 10, policy, encoding="dedupe")
    assert steps(plain) == [7, 8, 9, 10]
    found = steps(encoded)
    assert len(found) > 6 and found[-1] == 10
    taken = sum(path.stat().st_size for path in encoded.rglob("rank-*") if path.suffix != ".index")
    assert taken <= 9 * EACH
