"""Verification in parts: repeated runs read everything, and nothing counts as verified before all of it was read."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tenuto
from tenuto.engine.read import chunk_reader
from tenuto.errors import StoreUnavailable
from tenuto.maintenance import inspect as inspect_module
from tenuto.maintenance import scrub as scrub_module
from tenuto.maintenance.reading import Pace, ReadingState, parse_amount
from tenuto.maintenance.scrub import scrub
from tenuto.maintenance.verify import Parts, execute, plan_parts, plan_verify
from tenuto.repo.notes import add_note, notes, verification_of
from tenuto.repo.repository import Repo
from tenuto.testing.object_store import Bucket, SimulatedObjectStore

PACK = "rank-00000.safetensors"


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch):
    # Ranges of one chunk: the packs of these tests are that small.
    monkeypatch.setattr(inspect_module, "chunk_runs", lambda chunks: chunk_reader.chunk_runs(chunks, 64))


def run(world, amount=None, **more):
    repo = world.reopened()
    plan = plan_verify(repo)
    return execute(repo, plan, note=True, threads=1, parts=plan_parts(repo, plan, amount=amount, **more))


def verified(world, id):
    return verification_of(notes(world.reopened(), id))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(amount=st.one_of(st.integers(1, 2000), st.floats(0.01, 1.0)), count=st.integers(1, 4))
def test_repeated_parts_read_every_byte_once_before_any_twice(make_world, amount, count):
    world = make_world()
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in range(1, count + 1)]
    runs = 0
    while any(verified(world, id) != "verified" for id in ids):
        assert run(world, amount).ok
        runs += 1
        assert runs <= 200
    data = len(world.store.place.objects[f"{ids[0].directory}/{PACK}"][0]) - 4096
    for id in ids:
        (note, *again) = notes(world.reopened(), id)
        assert note.body["bytes"] == data  # of this cycle: nothing twice, nothing left out
        assert not again or isinstance(amount, int) or len(again) < runs


def test_a_part_alone_is_not_verified_and_damage_in_it_is_noted_at_once(world):
    attempt = world.claim()
    first, second = world.save(attempt, 1), world.save(attempt, 2)
    report = run(world, 64)
    assert (report.partly, report.due) == ((first,), 1)
    assert verified(world, first) == verified(world, second) == ""
    world.flip(f"{first.directory}/{PACK}", 4096 + 250)
    for _ in range(20):
        run(world, 64)
    assert verified(world, first) == "suspect"
    assert verified(world, second) == "verified"
    assert sum(note.kind == "suspect" for note in notes(world.reopened(), first)) == 1


def test_what_was_read_before_damage_was_noted_counts_no_more(world):
    id = world.save(world.claim(), 1)
    run(world, 192)
    assert ReadingState.load(world.repo.id).under_way[str(id)].read
    add_note(world.repo, id, "suspect", {"count": 1})
    run(world, 192)
    assert verified(world, id) == "suspect"  # all bytes have been read, but not since
    run(world, 192)
    assert verified(world, id) == "verified"


def test_damage_that_another_process_notes_meanwhile_keeps_it_from_being_verified(world, monkeypatch):
    id = world.save(world.claim(), 1)
    real = inspect_module.scan

    def scan(found, **more):
        real(found, **more)
        if not notes(world.repo, id):
            add_note(world.repo, id, "suspect", {"count": 1})

    monkeypatch.setattr("tenuto.maintenance.verify.scan", scan)
    report = run(world, 1.0)
    assert (report.ok, report.partly, verified(world, id)) == (True, (id,), "suspect")
    assert run(world, 1.0).partly == ()
    assert verified(world, id) == "verified"


def test_an_interrupted_verification_continues(world, monkeypatch):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in range(1, 6)]
    inspected, real = [], inspect_module.inspect

    def inspect(repo, id, manifest=None):
        inspected.append(id)
        if len(inspected) == 4:
            raise KeyboardInterrupt
        return real(repo, id, manifest)

    monkeypatch.setattr("tenuto.maintenance.verify.inspect", inspect)
    with pytest.raises(KeyboardInterrupt):
        run(world)
    assert inspected == ids[:4]
    report = run(world, resume=True)
    assert list(report.checked) == ids[3:]
    assert list(run(world, resume=True).checked) == ids  # that one had come to its end


def test_a_verification_of_one_run_leaves_what_is_under_way_elsewhere(world):
    world.save(world.claim("a"), 1)
    other = world.save(world.claim("b"), 1)
    repo = world.reopened()
    for _ in range(7):
        run(world, 64)
    assert str(other) in ReadingState.load(repo.id).under_way
    there = tenuto.Repository(world.store)
    assert there.verify(run="a", note=True).ok
    state = ReadingState.load(repo.id)
    assert (list(state.under_way), state.passes) == ([str(other)], {})


def test_time_that_is_over_ends_it_and_keeps_what_was_read(world):
    world.save(world.claim(), 1)

    class Clock:
        now = 0.0

        def monotonic(self):
            self.now += 1
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    repo = world.repo
    plan = plan_verify(repo)
    parts = Parts(Pace(seconds=8, clock=Clock()), ReadingState.load(repo.id))
    report = execute(repo, plan, note=True, threads=1, parts=parts)
    assert report.partly
    assert report.bytes_read > 0


def test_a_rate_is_kept():
    class Clock:
        now, slept = 0.0, 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.slept += seconds
            self.now += seconds

    clock = Clock()
    pace = Pace(rate=100, clock=clock)
    for _ in range(11):
        pace.wait(50)
    assert clock.slept == pytest.approx(5.0)


def test_a_scrub_reads_the_oldest_first_and_leaves_the_young(world, monkeypatch):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    add_note(world.repo, ids[0], "verified", {"every_byte": True})
    young = scrub(world.reopened(), every_s=3600)
    assert young.ok and not young.overdue
    assert set(young.verification.checked) <= {ids[1], ids[2]}  # without a time of their own they are old
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    report = scrub(world.reopened(), every_s=3600)
    assert set(report.verification.checked) == set(ids)
    assert report.ok


def test_a_store_that_fails_after_a_scrub_takes_nothing_from_its_report(world, monkeypatch):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2)]

    def then_fails(repo, *arguments, **more):
        done = execute(repo, *arguments, **more)
        monkeypatch.setattr(repo.store, "get", unavailable)
        monkeypatch.setattr(repo.store, "walk", unavailable)
        return done

    def unavailable(*arguments, **more):
        raise StoreUnavailable("try again")

    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    monkeypatch.setattr(scrub_module, "execute", then_fails)
    report = scrub(world.reopened(), every_s=3600)
    assert report.ok and set(report.verification.checked) == set(ids)
    assert (report.overdue, report.oldest_s) == (0, 0.0)


def test_what_a_scrub_has_no_time_for_is_overdue(world, monkeypatch):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2)]
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    report = scrub(world.reopened(), every_s=3600, seconds=0)
    assert not report.verification.checked
    assert report.overdue == 2 and report.oldest in ids and report.oldest_s > 3600


def test_a_part_of_everything_is_planned_from_the_plan_of_all(tmp_path):
    bucket = Bucket()
    with tenuto.Checkpointer(
        SimulatedObjectStore(bucket), {"w": np.arange(3000.0)}, save=tenuto.every(steps=1)
    ) as ckpt:
        for _ in ckpt.steps(3):
            pass
    repo = Repo.open(SimulatedObjectStore(bucket))
    plan = plan_verify(repo)
    assert plan.stored_bytes == sum(repo.manifest(id).stored_bytes for id in plan.ids) > 0
    bucket.forget()
    plan_parts(repo, plan, amount=0.5)
    assert not [one.name for one in bucket.requests if one.name.endswith("manifest.json")]


def test_a_lost_or_damaged_state_costs_reading_again(world):
    id = world.save(world.claim(), 1)
    run(world, 64)
    path = ReadingState.path_of(world.repo.id)
    for data in (b"{", b"[]", b'{"under_way": {"x": 3}, "done": {}, "passes": {}}'):
        path.write_bytes(data)
        assert not ReadingState.load(world.repo.id).under_way
        assert run(world, 64).ok
    path.unlink()
    while verified(world, id) != "verified":
        run(world, 128)


@pytest.mark.parametrize(
    ("text", "amount"), [("all", None), ("5%", 0.05), ("100%", 1.0), ("20GiB", 20 << 30), ("1000", 1000)]
)
def test_amounts(text, amount):
    assert parse_amount(text) == amount


@pytest.mark.parametrize("text", ["0%", "101%", "x%", "-5", "many"])
def test_no_amounts(text):
    with pytest.raises(tenuto.errors.UsageError, match="read"):
        parse_amount(text)
