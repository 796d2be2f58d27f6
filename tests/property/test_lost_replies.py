"""An object store that fails: requests that are refused, or done and answered by an error, at random; and processes
that lose their store altogether, in the middle of whatever they did.

Trainings claim, save, apply retention, remove and collect garbage on it. Whatever was reported as committed, and not as
removed, is there afterwards, bit for bit; nothing that was removed is; `latest` is no older than the last commit that
was reported; and gc brings everything to rest.
"""

from __future__ import annotations

import random
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

import tenuto
from tenuto import every, keep
from tenuto.concurrency.process import this_process
from tenuto.errors import DeadlineExceeded, OwnershipError, RepositoryError, SaveFailed, StoreError, TenutoError
from tenuto.events import Committed, Event, Removed
from tenuto.maintenance import gc
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId, attempt_key, step_key
from tenuto.repo import tombstones
from tenuto.repo.lineage import latest
from tenuto.repo.ownership import claim
from tenuto.repo.repository import Repo
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.testing.object_store import Bucket, Fate, Request, SimulatedObjectStore

SEEDS = 6
MOST_STEPS = 24


@dataclass
class Failing:
    """Decides what becomes of each request. `gone_at`: from this one on, nothing is answered any more."""

    seed: int
    refused: float = 0.0
    lost: float = 0.0
    gone_at: int | None = None
    drawn: random.Random = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.drawn = random.Random(self.seed)

    def __call__(self, request: Request) -> Fate:
        self.count += 1
        if self.gone_at is not None and self.count >= self.gone_at:
            # Its last request may still have been done.
            return "reply lost" if self.count == self.gone_at else "refused"
        chance = self.drawn.random()
        return "refused" if chance < self.refused else "reply lost" if chance < self.refused + self.lost else "done"


@dataclass
class Reported:
    """What trainings were told."""

    there: set[CheckpointId] = field(default_factory=set)
    removed: set[CheckpointId] = field(default_factory=set)
    last: CheckpointId | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, Committed):
            self.there.add(event.id)
            self.last = event.id
        elif isinstance(event, Removed):
            self.removed.add(event.id)
            self.there.discard(event.id)


def store(bucket: Bucket) -> RetryingStore:
    return RetryingStore(SimulatedObjectStore(bucket, part_bytes=1 << 12), Patience(attempts=3, wait_s=0.0))


def expected(step: int) -> np.ndarray:
    return np.arange(2000.0) * step


def train(bucket: Bucket, told: Reported, steps: int) -> None:
    """Trains on, until it is done or its store is gone."""
    state = {"w": expected(0)}
    policy = keep.latest(3) | keep.every(steps=10)
    try:
        with tenuto.Checkpointer(
            store(bucket), state, save=every(steps=1), keep=policy, sinks=[told], log="silent"
        ) as ckpt:
            for step in ckpt.steps(steps):
                assert np.array_equal(state["w"], expected(step)), "what was resumed is not what was saved"
                state["w"][:] = expected(step + 1)
    except (StoreError, OwnershipError, RepositoryError, SaveFailed, DeadlineExceeded):
        pass  # its store is gone, or it could not tell what lies there


def check(bucket: Bucket, told: Reported) -> None:
    """The invariants, with a store that answers again."""
    bucket.fate = lambda request: "done"
    repo = Repo.open(store(bucket))
    assert_whole(repo)
    announced = {
        "/".join(one.name.split("/")[2:4]) for one in bucket.requests if one.name.startswith("tombstones/main/")
    }
    for id in sorted(told.there):
        if not repo.exists(id):
            # Its removal broke off, before anybody could say that it was removed.
            assert f"{attempt_key(id.attempt)}/{step_key(id.step)}" in announced, f"I3: {id} was reported as committed"
            told.there.discard(id)
            continue
        assert np.array_equal(tenuto.load(store(bucket), step=str(id)).state["w"], expected(id.step)), f"I5: {id}"
    for id in told.removed:
        assert not repo.exists(id), f"I2: {id} was reported as removed and is there"
    newest = latest(repo, "main")
    if told.last is not None:
        assert newest is not None and (newest.attempt, newest.step) >= (told.last.attempt, told.last.step), "I4"


@pytest.fixture(autouse=True)
def _each_training_is_a_process_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else this process, which lives, would be taken for the one that left something unfinished."""
    ended = replace(this_process(), started="0")
    for module in (tombstones, claim):
        monkeypatch.setattr(module, "this_process", lambda: ended)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_i1_to_i5_hold_whatever_requests_and_replies_are_lost(seed: int) -> None:
    drawn = random.Random(1000 + seed)
    bucket, told, steps = Bucket(), Reported(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for life in range(4):
            steps += drawn.randrange(2, MOST_STEPS // 3)
            worst = drawn.choice([0.0, 0.02, 0.1, 0.3])
            gone = drawn.choice([None, drawn.randrange(1, 200)])
            bucket.fate = Failing(seed * 10 + life, refused=worst / 2, lost=worst / 2, gone_at=gone)
            train(bucket, told, steps)
            if "tenuto.json" not in bucket.objects:
                continue
            check(bucket, told)
            bucket.fate = Failing(seed * 10 + life + 5, refused=worst / 2, lost=worst / 2, gone_at=gone)
            with suppress(TenutoError):
                repo = Repo.open(store(bucket))
                gc.execute(repo, gc.plan_gc(repo, now=drawn.random() < 0.5))
            check(bucket, told)
        bucket.fate = lambda request: "done"
        train(bucket, told, steps + 5)
        check(bucket, told)
    repo = Repo.open(store(bucket))
    for _ in range(2):
        gc.execute(repo, gc.plan_gc(repo, now=True))
    left = [name for name in bucket.objects if name.startswith("tombstones/main/")]
    assert not left, "what broke off was not brought to an end"
    check(bucket, told)
