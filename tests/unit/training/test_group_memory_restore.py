"""Which state in memory several ranks go on from: told by each, chosen by one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto import every
from tenuto.engine.memory_tier import memory_restore
from tenuto.engine.memory_tier.eligibility import EligibleImage
from tenuto.engine.memory_tier.memory_restore import CommonImage, choose
from tenuto.engine.memory_tier.seal import SealHolder
from tenuto.errors import RanksDisagree, StoreUnavailable
from tenuto.model.ids import CheckpointId
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks

BASE = EligibleImage(CheckpointId("main", 1, 10), durable=False)


def image(step: int, *, attempt: int = 1, save_id: str = "") -> dict[str, Any]:
    id = {"run": "main", "attempt": 1, "step": step}
    return {"attempt": attempt, "claim": f"{attempt:032x}", "id": id, "save_id": save_id or f"s{step}"}


def told(*steps: int, words: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {"images": [image(step, **more) for step in steps], "words": list(words)}


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """What the repository says of an image: by its step, or by step and holder."""
    verdicts: dict[Any, Any] = {}

    def judge(repo: Any, run: str, id: CheckpointId, save_id: str, holder: SealHolder) -> EligibleImage | str:
        found = verdicts.get((id.step, holder.attempt), verdicts.get(id.step, BASE))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(memory_restore, "judge_line", judge)
    return verdicts


def chosen(*all_told: dict[str, Any]) -> tuple[list[int], list[str]]:
    found, words = choose(None, "main", all_told)  # type: ignore[arg-type]
    assert all(isinstance(one, CommonImage) for one in found)
    return [one.id.step for one in found], words


def test_the_newest_that_all_have_comes_first() -> None:
    assert chosen(told(16, 17), told(17, 16)) == ([17, 16], [])


def test_what_one_rank_does_not_have_is_passed_over_by_name() -> None:
    steps, words = chosen(told(16, 17), told(15, 16), told(15, 16))
    assert steps == [16]
    assert words == [
        "step 17 in memory is passed over: rank 1 and 1 more have no image of it",
        "step 15 in memory is passed over: rank 0 has no image of it",
    ]


def test_the_same_step_of_another_job_is_another_state() -> None:
    assert chosen(told(17, save_id="a"), told(17, save_id="b"))[0] == []


def test_images_that_two_attempts_hold_after_a_kill_are_one_state(judged: dict[Any, Any]) -> None:
    assert chosen(told(17, attempt=2), told(17, attempt=1))[0] == [17]
    judged[17, 2] = EligibleImage(CheckpointId("main", 1, 9), durable=False)
    steps, words = chosen(told(17, attempt=2), told(17, attempt=1))
    assert (steps, words) == (
        [],
        ["step 17 in memory is passed over: its images belong to different lines of training"],
    )


def test_what_the_repository_says_against_it_is_told(judged: dict[Any, Any]) -> None:
    judged[17] = "step 20 of attempt 1 is durable"
    judged[16] = StoreUnavailable("it is away", subject="x")
    steps, words = chosen(told(16, 17, words=("one",)), told(16, 17, words=("one", "two")))
    assert steps == []
    assert words == [
        "one",
        "two",
        "step 17 in memory is passed over: step 20 of attempt 1 is durable",
        "step 16 in memory is passed over: the repository does not answer: it is away",
    ]


def test_ranks_that_keep_states_at_different_steps_are_told_so_before_anything(tmp_path: Path) -> None:
    kv_store, found = InProcessKVStore(), {}

    def build(rank: int) -> None:
        try:
            tenuto.Checkpointer(
                tmp_path,
                {"w": np.ones(3)},
                ranks=ThreadRanks(rank, 2, kv_store),
                ranks_timeout=30.0,
                memory=every(steps=1) if rank else None,
            )
        except BaseException as error:  # noqa: BLE001 - told to the test
            found[rank] = error

    threads = [threading.Thread(target=build, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(isinstance(found[rank], RanksDisagree) and "memory" in str(found[rank]) for rank in (0, 1))
