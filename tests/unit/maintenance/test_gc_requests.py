"""How many requests a visit of gc takes: what a listing tells is not asked again for each object."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tenuto
from tenuto.concurrency.process import this_process
from tenuto.maintenance import remove
from tenuto.maintenance.gc import execute, plan_gc
from tenuto.model.ids import CheckpointId
from tenuto.repo import tombstones
from tenuto.repo.lineage import walk
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import put_tombstone
from tenuto.testing.object_store import Bucket, SimulatedObjectStore

DAY_NS = 24 * 3600 * 10**9


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def with_removed(bucket: Bucket, saves: int) -> Repo:
    """Returns a repository in which each save of a step but the last was removed a day and two hours ago."""
    store = SimulatedObjectStore(bucket)
    for step in range(1, saves + 1):
        tenuto.save({"w": np.zeros(100)}, store, step=step)
    repo = Repo.open(store)
    ids = [id for id in walk(repo, "main") if id.step < saves]
    remove.execute(repo, remove.plan_remove(repo, ids))
    bucket.clock_ns += DAY_NS + 2 * 3600 * 10**9
    bucket.forget()
    return repo


def test_a_visit_asks_for_one_time_that_of_its_own_probe(bucket: Bucket) -> None:
    repo = with_removed(bucket, 9)
    plan = plan_gc(repo)
    assert sum(found.due for found in plan.garbage) == 8
    assert bucket.counts()["head"] == 1
    # A removal looks for its own tombstone again before it deletes anything.
    bucket.forget()
    assert len(execute(repo, plan).deleted) == 8
    assert bucket.counts()["head"] <= 8


def test_tombstones_of_others_are_judged_by_the_times_of_their_listing(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = with_removed(bucket, 2)
    elsewhere = replace(this_process(), host="another", boot="another")
    with monkeypatch.context() as patch:
        patch.setattr(tombstones, "this_process", lambda: elsewhere)
        stones = [put_tombstone(repo, CheckpointId("main", 1, step), reason="rm") for step in range(10, 20)]
    bucket.clock_ns += DAY_NS
    bucket.forget()
    assert set(plan_gc(repo).void) >= {stone.name for stone in stones}
    # One for the probe, and one for the clock that the tombstones are compared with.
    assert bucket.counts()["head"] <= 2
