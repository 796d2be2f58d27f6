"""Rollback and fork: what `latest` means then, what the next training does, and every way in which they refuse."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tenuto
from support.memory_training import fork_off, live, shared_memory
from tenuto.cli import main
from tenuto.crashpoints import armed
from tenuto.errors import CheckpointNotFound, CorruptionError, KeyMissing, RunInUse, Superseded, UsageError
from tenuto.history import fork, rollback
from tenuto.maintenance import flush, retention
from tenuto.model.canonical_json import loads
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.repo.format import objects
from tenuto.repo.lineage import line_of
from tenuto.repo.ownership.claim import claim


def at(attempt, step, run="main"):
    return CheckpointId(run, attempt, step)


def resumed(where, run="main", **options):
    with tenuto.Checkpointer(where, {"x": np.zeros(3, np.float32), "lr": 0.0}, run=run, sinks=[], **options) as ckpt:
        return ckpt.restore().checkpoint.id


def test_latest_means_it_from_then_on_and_training_resumes_there_without_any_argument(where, repository, train):
    train([1, 2, 3])
    plan = repository.rollback(1, reason="diverged")
    assert (plan.to, plan.before, plan.left) == (at(1, 1), at(1, 3), (at(1, 3), at(1, 2)))
    assert repository.latest() == at(1, 1)
    assert tenuto.load(where).checkpoint.id == at(1, 1)
    record = repository.repo.attempt("main", 2)
    assert (record.parent, record.by, record.reason) == (at(1, 1), "rollback", "diverged")
    assert resumed(where) == at(1, 1)
    train([2])
    assert list(repository.walk()) == [at(3, 2), at(1, 1)]
    assert len(repository.checkpoints()) == 4, "nothing is removed"


def test_a_line_that_was_left_behind_can_be_rolled_back_to(repository, train):
    train([1, 2, 3])
    repository.rollback(1)
    train([2])
    plan = repository.rollback("a0001/3")
    assert (plan.left, plan.back) == ((at(3, 2),), (at(1, 3), at(1, 2)))
    assert list(repository.walk()) == [at(1, 3), at(1, 2), at(1, 1)]


def test_what_is_left_behind_is_retentions_by_its_rules_and_a_pin_keeps_it(repository, train):
    train([1, 2, 3, 4])
    repository.rollback(1)
    repository.pin(2)
    repository.hold(3)
    train([5, 6])
    _, removed = retention.retain(repository.repo, "main", keep.latest(1), grace="none")
    assert set(removed) == {at(1, 1), at(1, 4), at(3, 5)}
    assert set(repository.checkpoints()) == {at(3, 6), at(1, 3), at(1, 2)}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99)), min_size=1, max_size=8))
def test_i4_whatever_was_done_before_the_walk_is_the_line_of_what_was_rolled_back_to(another, history):
    repository, train = another()
    train([1, 2])
    for steps, choice in history:
        there = repository.checkpoints()
        to = there[choice % len(there)]
        line, before = list(line_of(repository.repo, "main", to)), list(repository.walk())
        plan = repository.rollback(to)
        assert list(repository.walk()) == line and set(repository.checkpoints()) == set(there)
        assert set(plan.left) == set(before) - set(line) and set(plan.back) == set(line) - set(before)
        if steps:
            train(range(to.step + 1, to.step + 1 + steps))
            assert list(repository.walk())[steps:] == line
    points = repository.log().points
    assert [point.id for point in points if point.on_line] == list(repository.walk())


def test_it_refuses_a_run_that_is_in_use_and_names_the_owner(repository, train):
    train([1, 2])
    held = claim(repository.repo, "main", at(1, 2))
    with pytest.raises(RunInUse, match="in use") as caught:
        repository.rollback(1)
    assert "tenuto rollback" in caught.value.hint
    held.release()
    assert repository.rollback(1).to == at(1, 1)


def test_it_refuses_a_damaged_checkpoint_unless_forced(repository, train):
    train([1, 2])
    store = repository.repo.store
    name = f"{at(1, 1).directory}/rank-00000.index"
    store.delete([name])
    with pytest.raises(CorruptionError, match="a0001/1 is damaged"):
        repository.rollback(1)
    with pytest.raises(CorruptionError):
        repository.fork(1, "warm")
    assert (repository.latest(), repository.runs()) == (at(1, 2), ["main", "unused"])
    assert "forced" in str(repository.rollback(1, force=True))
    assert repository.latest() == at(1, 1)


def test_it_refuses_what_another_process_has_committed_since_the_plan(repository, train):
    train([1, 2])
    plan = rollback.plan_rollback(repository.repo, "main", at(1, 1))
    train([3])
    with pytest.raises(Superseded, match="a0002/3 by now"):
        rollback.execute(repository.repo, plan)
    assert repository.latest() == at(2, 3)


def test_it_refuses_what_is_not_of_the_run(repository, train):
    train([1])
    train([1], "other")
    with pytest.raises(CheckpointNotFound, match="not on its line") as caught:
        repository.rollback(at(1, 1, "other"))
    assert "tenuto fork" in caught.value.hint
    with pytest.raises(CheckpointNotFound, match="nearest"):
        repository.rollback(7)
    with pytest.raises(UsageError, match="1,000"):
        repository.rollback(1, reason="x" * 1001)


class Died(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("what", ["rollback", "fork"])
def test_killed_in_the_middle_it_has_happened_or_not(repository, train, what):
    train([1, 2])

    def die():
        raise Died

    with armed("attempt claimed", die), pytest.raises(Died):
        repository.rollback(1) if what == "rollback" else repository.fork(1, "warm")
    run = "main" if what == "rollback" else "warm"
    assert repository.latest(run) == at(1, 1)
    train([5], run)
    assert list(repository.walk(run))[1] == at(1, 1)


def test_a_fork_shares_its_bytes_and_keeps_what_it_began_with(where, repository, train):
    train([1, 2, 3])
    objects_before = sum(1 for _ in repository.repo.store.walk("runs"))
    repository.fork(2, "warm")
    added = [entry.name for entry in repository.repo.store.walk("runs/warm")]
    assert sum(1 for _ in repository.repo.store.walk("runs")) == objects_before + len(added)
    assert not any("safetensors" in name for name in added)
    retention.retain(repository.repo, "main", keep.latest(1), grace="none")
    assert set(repository.checkpoints()) == {at(1, 2), at(1, 3)}
    assert resumed(where, "warm") == at(1, 2)
    train([4], "warm")
    retention.retain(repository.repo, "main", keep.latest(1), grace="none")
    assert repository.checkpoints() == [at(1, 3)]
    assert tenuto.load(where, run="warm").checkpoint.step == 4


def test_a_fork_needs_a_name_of_its_own(repository, train):
    train([1])
    for name in ("main", "MAIN", "no/name"):
        with pytest.raises(UsageError):
            repository.fork(1, name)
    plan = fork.plan_fork(repository.repo, at(1, 1), "warm")
    repository.fork(1, "warm")
    with pytest.raises(UsageError, match="already"):
        fork.execute(repository.repo, plan)


def test_a_rollback_of_a_fork_to_what_it_began_with(repository, train):
    train([1, 2])
    repository.fork(2, "warm")
    train([3], "warm")
    assert repository.rollback(at(1, 1), run="warm").left == (at(2, 3, "warm"), at(1, 2))
    assert (repository.latest("warm"), repository.latest()) == (at(1, 1), at(1, 2))


def test_an_encoded_run_is_rolled_back_and_saved_to_again(where, repository):
    def go(steps, at):
        state = {"x": np.arange(70_000.0)}
        with tenuto.Checkpointer(where, state, encoding="small", save=tenuto.every(steps=1), sinks=[]) as ckpt:
            for step in ckpt.steps(steps):
                state["x"][at + step] = -1

    go(3, 0)
    repository.rollback(1)
    go(2, 100)
    assert list(np.flatnonzero(tenuto.load(where).state["x"] == -1)) == [0, 101]


def test_a_sealed_repository_needs_its_key_to_look_into_leaves_and_to_go_back(tmp_path, monkeypatch):
    where, key = tmp_path / "ckpts", tmp_path / "tenuto.key"
    tenuto.save({"x": 0}, where, run="other")
    key_command = [str(word) for word in ("key", "add", where, "--key-file", key)]
    with pytest.raises(SystemExit):
        main(key_command)
    options = {"key": key, "save": tenuto.every(steps=1), "keep": tenuto.keep.all(), "sinks": []}
    with tenuto.Checkpointer(where, state := {"x": np.zeros(5)}, **options) as ckpt:
        for step in ckpt.steps(3):
            state["x"][0] = np.nan if step == 2 else step
    repository = tenuto.Repository(where)
    assert [point.id.step for point in repository.log().points] == [3, 2, 1]
    assert len(repository.compare([1, 3]).checkpoints) == 2
    with pytest.raises(KeyMissing):
        repository.bisect(nan=True)
    for change in (lambda: repository.rollback(2, reason="nan"), lambda: repository.fork(1, "warm")):
        with pytest.raises(KeyMissing):
            change()
    repository = tenuto.Repository(where, key=key)
    repository.rollback(2, reason="nan")
    repository.fork(1, "warm")
    assert (repository.latest_step(), repository.latest_step("warm")) == (2, 1)
    monkeypatch.setenv("TENUTO_KEY_FILE", str(key))
    assert repository.bisect(nan=True, bad="a0001/3").first == at(1, 3)
    assert tenuto.load(where).step == 2


def test_records_without_the_new_fields_are_read_and_unknown_ones_passed_over(repository, train):
    train([1])
    name = "runs/main/a0001/attempt.json"
    data = repository.repo.store.get(name, limit=objects.SMALL)
    found = loads(data)
    assert "by" not in found and "reason" not in found, "a training's claim is what it was"
    assert (repository.repo.attempt("main", 1).by, repository.repo.attempt("main", 1).reason) == ("", "")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no shared memory")
def test_an_image_in_memory_is_not_adopted_over_a_rollback(tmp_path):
    where = tmp_path / "ckpts"
    with shared_memory():
        assert live(where, kill=15).killed
        repository = tenuto.Repository(where)
        assert repository.latest() == at(1, 10), "and step 15 lies in memory"
        assert flush.plan_flush(repository.repo, "main") is not None
        repository.rollback(10)
        life = live(where, 20)
        assert (life.began, life.status) == (10, 0)


def saved(where, steps):
    with tenuto.Checkpointer(where, {"x": 0}, save=tenuto.every(steps=1), keep=tenuto.keep.all(), sinks=[]) as ckpt:
        for _ in ckpt.steps(steps):
            pass
    return tenuto.Repository(where)


def test_a_run_that_another_process_trains_is_refused_at_once_with_its_pid(tmp_path):
    repository = saved(tmp_path / "ckpts", 3)
    ready, go = os.pipe(), os.pipe()

    def train():
        attempt = claim(tenuto.Repository(repository.url).repo, "main", at(1, 3))
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        attempt.release()

    pid = fork_off(train)
    os.read(ready[0], 1)
    try:
        with pytest.raises(RunInUse, match=f"process {pid} of"):
            repository.rollback(1)
    finally:
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
    assert repository.latest_step() == 3
    repository.rollback(1)
    assert repository.latest_step() == 1


def test_of_two_at_once_each_has_happened_or_says_that_it_has_not(tmp_path):
    repository = saved(tmp_path / "ckpts", 4)

    def back(step):
        try:
            tenuto.Repository(repository.url).rollback(step)
        except (RunInUse, Superseded):
            os._exit(13)

    for _ in range(3):
        pids = {fork_off(lambda step=step: back(step)): step for step in (1, 2)}
        done = {step: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, step in pids.items()}
        assert set(done.values()) <= {0, 13} and 0 in done.values()
        assert done[repository.latest_step()] == 0
        assert len(repository.checkpoints()) == 4


def test_a_training_of_a_fork_says_which_run_it_begins_with(where, repository, train, caplog):
    caplog.set_level(logging.INFO, logger="tenuto")
    train([1, 2])
    repository.fork(2, "warm")
    with tenuto.Checkpointer(where, {"x": np.zeros(3, np.float32), "lr": 0.0}, run="warm") as ckpt:
        ckpt.restore()
    assert "run warm begins with step 2 of run main, from " in caplog.text
