"""`save="auto"`: what saves cost here and how earlier processes of the run ended decide when it saves."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

import tenuto
from tenuto import every
from tenuto.errors import UsageError
from tenuto.model.ids import CheckpointId
from tenuto.policy import interval
from tenuto.repo.ownership.claim import claim
from tenuto.repo.ownership.lease import BEAT_S
from tenuto.repo.ownership.past_failures import PastFailures, past_failures
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store
from tenuto.training.save_costs import StepPace


def attempt_of(where: Path, *, beats: int, killed: bool) -> None:
    """Has a process claim the run, beat so often as if time had passed, and end."""
    pid = os.fork()
    if pid == 0:
        try:
            repo = Repo.create_or_open(open_store(where))
            attempt = claim(repo, "main", None, beat_s=3600.0)
            for _ in range(beats):
                attempt._lease.beat()  # type: ignore[union-attr]
            if not killed:
                attempt.release()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_how_earlier_processes_ended_is_known_from_the_claims_after_them(tmp_path: Path) -> None:
    for beats, killed in ((200, False), (100, True), (0, True), (50, True), (10, False)):
        attempt_of(tmp_path, beats=beats, killed=killed)
    repo = Repo.open(open_store(tmp_path))
    beat_of_release = 1
    trained_s = (200 + beat_of_release + 100 + 50) * BEAT_S
    assert past_failures(repo, "main", until=5) == PastFailures(failures=2, trained_s=trained_s)
    assert past_failures(repo, "main", until=3) == PastFailures(failures=1, trained_s=(201 + 100) * BEAT_S)


def test_a_training_saves_by_the_failures_of_its_run_and_what_its_saves_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interval, "PRIOR_S", 0.4)  # so that the optimum is a part of a second
    for _ in range(2):
        attempt_of(tmp_path, beats=1, killed=True)
    repo = Repo.open(open_store(tmp_path))
    state = {"w": np.ones(10)}
    policy, began_s = every(auto="50%"), time.monotonic()
    with tenuto.Checkpointer(tmp_path, state, save=policy, keep=tenuto.keep.all(), log="silent") as ckpt:
        for _ in ckpt.steps(400_000):
            if len(repo.committed("main", 3)) >= 2:
                ckpt.stop()
    trained_s = time.monotonic() - began_s
    repository = tenuto.Repository(tmp_path)
    reasons = [str(repository.manifest(id).environment["why"]) for id in sorted(repository.checkpoints())]
    assert reasons[0] == "the first save shows what a save costs (every auto)"
    told = re.search(r"a failure every ([0-9.]+) s \(2 failures so far\)", reasons[1])
    assert told is not None, reasons
    before_s = interval.PRIOR_S + 2 * BEAT_S
    assert before_s / 3 - 0.05 <= float(told[1]) <= (before_s + trained_s) / 3 + 0.05, "this training's own time counts"


def test_auto_is_the_optimum_with_the_end_and_signals(tmp_path: Path) -> None:
    state = {"w": np.ones(10)}
    with tenuto.Checkpointer(tmp_path, state, save="auto", log="silent") as ckpt:
        for _ in ckpt.steps(3):
            pass
    repository = tenuto.Repository(tmp_path)
    assert repository.manifest(CheckpointId("main", 1, 3)).environment["why"] == "training ends"


@pytest.mark.parametrize("wrong", ["automatic", 3])
def test_another_word_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(UsageError, match="does not say when to save"):
        tenuto.Checkpointer(tmp_path, {"w": np.ones(1)}, save=wrong)  # type: ignore[arg-type]


def test_states_in_memory_and_tiers_have_no_costs_to_go_by(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="memory="):
        tenuto.Checkpointer(tmp_path, {"w": np.ones(1)}, memory=every(auto=True))
    with pytest.raises(UsageError, match="of a tier"):
        tenuto.Tier(tmp_path, save=every(auto=True))


def test_a_step_beside_a_save_is_compared_with_the_others() -> None:
    pace = StepPace()
    for _ in range(10):
        pace.add(0.1, beside_a_save=False)
    assert pace.slowdown == 0
    for _ in range(10):
        pace.add(0.13, beside_a_save=True)
    assert pace.slowdown == pytest.approx(0.3)
    for _ in range(64):
        pace.add(0.09, beside_a_save=True)
    assert pace.slowdown == 0
