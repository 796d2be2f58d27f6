"""On an object store each call is a request, of 20 to 100 ms: how many of them saving and resuming take."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto import every, keep
from tenuto.cli.views.run_listing import listing
from tenuto.errors import RepositoryError
from tenuto.model.ids import CheckpointId, step_key
from tenuto.repo.format.manifest import MAX_ABORTED
from tenuto.repo.format.small_records import decode_lease, encode_lease
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.lease import Lease
from tenuto.repo.repository import Repo
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.testing.object_store import Bucket, SimulatedObjectStore

ATTEMPT = "runs/main/a0001"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture(autouse=True)
def _no_lease_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease has its first beat and its last alone: those between them come by the clock, and would be counted."""
    monkeypatch.setattr(Lease, "_run", lambda lease, stop: None)


def place(bucket: Bucket) -> RetryingStore:
    return RetryingStore(SimulatedObjectStore(bucket), Patience(wait_s=0.0))


def train(bucket: Bucket, steps: int, **options: Any) -> None:
    state = {"w": np.arange(1000.0)}
    with tenuto.Checkpointer(place(bucket), state, data=None, **options) as ckpt:
        for _ in ckpt.steps(steps):
            for save in ckpt._training.saving.saver.in_flight:
                assert save.join(60)
            # A round that ends late would be counted for the saves behind it.
            assert ckpt._training.saving.retention._rounds.join(60)


def asked(bucket: Bucket) -> list[str]:
    """What was requested, but for leases: those are put by the clock."""
    return [f"{one.verb} {one.name}" for one in bucket.requests if "/lease/" not in one.name]


def test_a_repository_that_was_copied_to_where_a_second_put_replaces_is_not_trained_in(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(bucket, 2, save=every(steps=1), keep=keep.all())
    copied = Bucket(objects=dict(bucket.objects))
    before = dict(copied.objects)
    put = SimulatedObjectStore.put_if_absent

    def replacing(store: SimulatedObjectStore, name: str, content: Any, *, token: str) -> Any:
        copied.objects.pop(name, None)
        return put(store, name, content, token=token)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedObjectStore, "put_if_absent", replacing)
        with pytest.raises(RepositoryError, match="second writer") as caught:
            train(copied, 4, save=every(steps=1), keep=keep.all())
    assert caught.value.hint and copied.objects == before
    assert np.array_equal(tenuto.load(place(copied)).state["w"], np.arange(1000.0))  # what it holds can be read
    train(copied, 4, save=every(steps=1), keep=keep.all())  # the same in a place that refuses
    probed = [one for one in asked(copied) if "tenuto-probe" in one and one.startswith("put")]
    train(copied, 5, save=every(steps=1), keep=keep.all())
    assert [one for one in asked(copied) if "tenuto-probe" in one and one.startswith("put")] == probed  # once a process


def steps_of(bucket: Bucket) -> list[int]:
    return [
        int(name[len(ATTEMPT) + 6 :].partition("/")[0]) for name in bucket.objects if name.endswith("/manifest.json")
    ]


def beside_data(bucket: Bucket, after: int) -> float:
    """The requests for each save from the `after`th on, without those of packs."""
    requests = asked(bucket)
    saves = [n for n, one in enumerate(requests) if one.startswith("put") and one.endswith("manifest.json")]
    window = [one for one in requests[saves[after - 1] + 1 :] if not one.endswith(".safetensors")]
    return len(window) / (len(saves) - after)


@pytest.mark.parametrize("kept", [5, 30])
def test_a_steady_save_makes_at_most_eight_requests_beside_its_data_parts(bucket: Bucket, kept: int) -> None:
    train(bucket, kept + 94, save=every(steps=1), keep=keep.latest(kept))
    assert beside_data(bucket, kept + 4) <= 8
    # What waits for more to go is gone at the end.
    assert sorted(steps_of(bucket)) == list(range(95, kept + 95))


def test_few_wait_with_those_that_stay(bucket: Bucket) -> None:
    """No more than two beside five, and none beside two: a checkpoint may be large."""

    def manifests(run: str) -> int:
        return sum(run in name and name.endswith("/manifest.json") for name in list(bucket.objects))

    most = {}
    expected = {1: 1, 2: 2, 5: 7}
    for kept, few in expected.items():
        counts: list[int] = []
        state = {"w": np.arange(1000.0)}
        options: dict[str, Any] = {"save": every(steps=1), "keep": keep.latest(kept), "run": f"keeps-{kept}"}
        with tenuto.Checkpointer(place(bucket), state, data=None, **options) as ckpt:
            for _ in ckpt.steps(20):
                for save in ckpt._training.saving.saver.in_flight:
                    assert save.join(60)
                assert ckpt._training.saving.retention._rounds.join(60)
                # A save may have ended a moment before its retention is asked for.
                deadline = time.monotonic() + 30
                while (there := manifests(f"keeps-{kept}/")) > few and time.monotonic() < deadline:
                    time.sleep(0.01)
                counts.append(there)
        most[kept] = max(counts)
    assert most == expected


def test_a_save_asks_who_owns_the_run_once_and_after_it_has_begun(bucket: Bucket) -> None:
    train(bucket, 3, save=every(steps=1), keep=keep.all())
    step = f"{ATTEMPT}/{step_key(3)}"
    ours = asked(bucket)
    assert ours[ours.index(f"put {step}/begin.json") :] == [
        f"put {step}/begin.json",
        "list runs/main@0",
        f"put {step}/rank-00000.safetensors",
        f"put {step}/rank-00000.index",
        f"put {step}/manifest.json",
    ]


def many(bucket: Bucket, newest: int) -> None:
    """Makes a run whose newest checkpoint is a real one, with a directory for each step before it."""
    train(bucket, newest, save=every(steps=newest), keep=keep.all())
    foreign = bytes(MAX_ABORTED + 1)
    for step in range(1, newest):
        for file in ("begin.json", "manifest.json", "rank-00000.index", "rank-00000.safetensors"):
            bucket.objects[f"{ATTEMPT}/{step_key(step)}/{file}"] = foreign, 1
    bucket.forget()


def test_a_resume_from_10000_checkpoints_makes_at_most_12_requests_before_its_first_data(bucket: Bucket) -> None:
    many(bucket, 10_000)
    state = {"w": np.zeros(1000)}
    with tenuto.Checkpointer(place(bucket), state, save=every(steps=100), keep=keep.all()) as ckpt:
        assert next(iter(ckpt.steps(10_001))) == 10_000
        assert np.array_equal(state["w"], np.arange(1000.0))
        ckpt.stop()
    requests = [f"{one.verb} {one.name}" for one in bucket.requests]
    before = next(n for n, one in enumerate(requests) if ".safetensors" in one)
    assert before <= 12, requests[:before]
    assert len(requests) <= 40, requests[before:]  # the claim that follows lists no 10,000 steps either


def test_the_first_save_after_a_resume_lists_no_directory_of_each_checkpoint_that_is_kept(bucket: Bucket) -> None:
    train(bucket, 30, save=every(steps=1), keep=keep.latest(30))
    bucket.forget()
    train(bucket, 31, save=every(steps=1), keep=keep.latest(30))
    listed = [one for one in asked(bucket) if one.startswith(f"list {ATTEMPT}/step-")]
    # The restored one's notes and state, and those of the one that goes.
    assert len(listed) <= 4, listed


def test_latest_of_10000_checkpoints_takes_less_than_a_second_where_each_request_takes_100_ms(bucket: Bucket) -> None:
    many(bucket, 10_000)
    bucket.latency_s = 0.1
    assert latest(Repo.open(place(bucket)), "main") == CheckpointId("main", 1, 10_000)
    assert bucket.elapsed_s <= 1


def say(bucket: Bucket, newest: int | None) -> None:
    """Has the newest lease say that this step was committed last."""
    name = max(name for name in bucket.objects if "/lease/" in name)
    id = Repo.open(place(bucket)).id
    number = int(name.rpartition("/")[2].removesuffix(".json"))
    beat = decode_lease(bucket.objects[name][0], "main", 1, number, id)
    bucket.objects[name] = encode_lease(replace(beat, newest=newest), "main", 1, id), 1


@pytest.mark.parametrize("hint", [0, 1, 4999, 5000, 5001, 7000, 9_999_999, 10_000_000, 10**12, None])
def test_i4_a_hint_that_is_wrong_changes_nothing(bucket: Bucket, hint: int | None) -> None:
    many(bucket, 5000)
    say(bucket, hint)
    repo = Repo.open(place(bucket))
    assert latest(repo, "main") == CheckpointId("main", 1, 5000)
    assert list(repo.newest_steps("main", 1)) == list(range(5000, 0, -1))


def test_i4_a_hint_whose_checkpoint_was_removed_or_whose_lease_is_damaged_costs_a_listing(bucket: Bucket) -> None:
    many(bucket, 5000)
    for name in [name for name in bucket.objects if name.startswith(f"{ATTEMPT}/{step_key(5000)}/")]:
        del bucket.objects[name]
    repo = Repo.open(place(bucket))
    assert next(repo.newest_steps("main", 1)) == 4999
    name = max(name for name in bucket.objects if "/lease/" in name)
    bucket.objects[name] = b"damaged", 1
    assert next(Repo.open(place(bucket)).newest_steps("main", 1)) == 4999


@pytest.mark.parametrize("seed", range(20))
def test_i4_steps_from_a_hint_on_are_those_of_a_whole_listing(bucket: Bucket, seed: int) -> None:
    drawn = random.Random(seed)
    train(bucket, 1, save=every(steps=1), keep=keep.all())
    top = drawn.choice([20, 10**4, 10**7 + 5, 10**8 + 5, 10**10])
    steps = {drawn.randrange(max(0, top - 30), top) for _ in range(10)} | {drawn.randrange(top) for _ in range(5)}
    for step in steps:
        bucket.objects[f"{ATTEMPT}/{step_key(step)}/begin.json"] = b"", 1
    say(bucket, drawn.choice([*steps, drawn.randrange(top)]))
    repo = Repo.open(place(bucket))
    assert list(repo.newest_steps("main", 1)) == sorted(steps | {1}, reverse=True) == repo.steps("main", 1)


def test_a_claim_after_a_crash_before_the_first_commit_lists_no_steps_to_find_its_parent(bucket: Bucket) -> None:
    many(bucket, 3000)
    for _ in range(2):
        with tenuto.Checkpointer(place(bucket), {"w": np.zeros(1000)}, save=every(steps=100), keep=keep.all()) as ckpt:
            next(iter(ckpt.steps(3100)))
        bucket.forget()
    assert latest(Repo.open(place(bucket)), "main") == CheckpointId("main", 1, 3000)
    assert not [one for one in bucket.requests if one.name.startswith(f"{ATTEMPT}@")]


def test_ls_lists_the_store_once_and_reads_what_it_shows(bucket: Bucket) -> None:
    train(bucket, 20, save=every(steps=1), keep=keep.all())
    repo = Repo.open(place(bucket))
    bucket.forget()
    (run,) = listing(repo, limit=10)
    assert [row.id.step for row in run.rows] == list(range(20, 10, -1)) and run.more == 10
    # Its begin.json and manifest, for each of ten; beside the one listing, tags, `latest` and the owner.
    assert bucket.counts()["get"] <= 2 * 10 + 6
    assert bucket.counts()["list"] <= 10
    bucket.forget()
    (run,) = listing(repo)
    assert len(run.rows) == 20 and bucket.counts()["list"] <= 10


@pytest.fixture(autouse=True)
def _no_steps_are_left(bucket: Bucket) -> Iterator[None]:
    yield
    assert not [name for name in bucket.objects if name.startswith("tombstones/")]


def test_a_one_off_save_into_a_new_place_makes_these_requests_and_no_more(bucket: Bucket) -> None:
    tenuto.save({"w": np.arange(1000.0)}, place(bucket))
    step = f"{ATTEMPT}/step-00000000"
    assert [f"{one.verb} {re.sub('probe-.*', 'probe', one.name)}" for one in bucket.requests] == [
        "get tenuto.json",
        "get tenuto.copy.json",  # there is no repository
        "put tenuto-probe",
        "put tenuto-probe",
        "get tenuto-probe",
        "delete tenuto-probe",  # the place refuses a second put
        "put tenuto.json",
        "list @0",  # it is no place of another repository, has no other places, and no keys
        "list runs/main@0",  # the newest checkpoint
        "list runs/main@0",  # nobody owns the run
        "list runs/main@0",  # nobody has committed since
        f"put {ATTEMPT}/attempt.json",
        f"put {ATTEMPT}/lease/1.json",
        f"put {step}/begin.json",
        "list runs/main@0",  # nobody has claimed the run since
        f"put {step}/rank-00000.safetensors",
        f"put {step}/rank-00000.index",
        f"put {step}/manifest.json",
        f"put {ATTEMPT}/lease/2.json",  # the run is released
    ]
    bucket.forget()
    tenuto.load(place(bucket))
    assert len(bucket.requests) == 11
