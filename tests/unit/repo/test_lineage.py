"""I4: which checkpoint a run means."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import CheckpointNotFound, CorruptionError, RunNotFound, UsageError
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names
from tenuto.repo.lineage import latest, resolve, walk
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort
from tenuto.store.contract import Bytes

History = dict[tuple[str, int], tuple[CheckpointId | None, set[int]]]


def model(history: History, run: str, below: int | None = None) -> list[CheckpointId]:
    """I4 in the words of the design."""
    attempts = sorted((n for r, n in history if r == run and (below is None or n < below)), reverse=True)
    while attempts and history[run, attempts[0]] == (None, set()):
        attempts.pop(0)
    found: list[CheckpointId] = []
    if attempts:
        place, top = (run, attempts[0]), None
        while True:
            parent, steps = history[place]
            found += [CheckpointId(*place, step) for step in sorted(steps, reverse=True) if top is None or step <= top]
            if parent is None:
                break
            place, top = (parent.run, parent.attempt), parent.step
    return found


def at(attempt: int, step: int, run: str = "gpt") -> CheckpointId:
    return CheckpointId(run, attempt, step)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_i4_the_walk_over_random_histories_is_the_models(new_maker: Callable[[], Any], seed: int) -> None:
    draw, make = random.Random(seed), new_maker()
    history: History = {}
    committed: list[CheckpointId] = []
    for _ in range(draw.randint(1, 7)):
        run = draw.choice(["gpt", "gpt", "fork"])
        number = max((n for r, n in history if r == run), default=0) + draw.choice([1, 1, 3])
        parent = draw.choice([None, *committed]) if committed else None
        make.attempt(number, parent, run=run)
        steps = set(draw.sample(range(0, 60, 5), draw.choice([0, 0, 1, 3])))
        history[run, number] = (parent, steps)
        for step in range(0, 60, 5):
            if step in steps:
                committed.append(make.checkpoint(number, step, run=run))
            elif draw.random() < 0.1:
                id, save_id = make.begin(number, step, run=run)
                if draw.random() < 0.5:
                    abort(make.repo, id, save_id)
    for run in ("gpt", "fork"):
        assert list(walk(make.repo, run)) == model(history, run)
        assert latest(make.repo, run) == next(iter(model(history, run)), None)
        assert list(walk(make.repo, run, below=2)) == model(history, run, below=2)
    # Removal of any checkpoint takes it out of the walk, and changes nothing else of it.
    if committed:
        gone = draw.choice(committed)
        make.repo.store.delete([gone.manifest])
        history[gone.run, gone.attempt][1].discard(gone.step)
        for run in ("gpt", "fork"):
            assert list(walk(make.repo, run)) == model(history, run)


def test_i4_a_rollback_hides_what_came_after_the_parent_step(repo: Repo, make: Any) -> None:
    make.attempt(1)
    for step in (10, 20, 30):
        make.checkpoint(1, step)
    make.attempt(2, at(1, 20))
    make.attempt(3)
    assert list(walk(repo, "gpt")) == [at(1, 20), at(1, 10)]
    make.checkpoint(2, 25)
    make.checkpoint(1, 40)
    assert list(walk(repo, "gpt")) == [at(2, 25), at(1, 20), at(1, 10)]


def test_i4_an_attempt_from_nothing_with_a_commit_ends_the_walk(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 10)
    make.attempt(2)
    assert latest(repo, "gpt") == at(1, 10)
    make.checkpoint(2, 5)
    assert list(walk(repo, "gpt")) == [at(2, 5)]


def test_i4_steps_are_numbers_whatever_their_width(repo: Repo, make: Any) -> None:
    make.attempt(1)
    for step in (99_999_999, 100_000_000, 5):
        make.checkpoint(1, step)
    assert [id.step for id in walk(repo, "gpt")] == [100_000_000, 99_999_999, 5]


def test_i4_directories_without_a_claim_and_copies_take_no_part(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 10)
    make.copy("runs/gpt/a0001", "runs/gpt/a0009")
    repo.store.put_if_absent("runs/gpt/a0010/lease/1.json", Bytes(b"x"), token="x")
    assert list(walk(repo, "gpt")) == [at(1, 10)]


def test_i4_an_aborted_save_is_no_checkpoint(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 10)
    id, save_id = make.begin(1, 20)
    assert abort(repo, id, save_id)
    assert list(walk(repo, "gpt")) == [at(1, 10)]


def test_i3_a_damaged_manifest_does_not_hide_what_is_older(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 10)
    make.attempt(2, at(1, 10))
    make.damage(make.checkpoint(2, 20).manifest)
    assert list(walk(repo, "gpt")) == [at(2, 20), at(1, 10)]


@pytest.mark.parametrize("loss", ["damaged", "removed"])
def test_i3_a_lost_attempt_record_does_not_hide_what_is_older(repo: Repo, make: Any, loss: str) -> None:
    make.attempt(1)
    make.checkpoint(1, 10)
    make.checkpoint(1, 20)
    make.attempt(2, at(1, 10))
    make.checkpoint(2, 15)
    name = object_names.attempt_name("gpt", 2)
    repo.store.delete([f"{at(2, 15).directory}/begin.json"])
    make.damage(name) if loss == "damaged" else repo.store.delete([name])
    told: list[str] = []
    # Nothing says where attempt 2 came from: everything lower is a candidate, after its own checkpoints.
    assert list(walk(repo, "gpt", report=told.append)) == [at(2, 15), at(1, 20), at(1, 10)]
    assert len(told) == 1
    assert "not known" in told[0]


def test_i3_the_parent_is_told_by_a_save_where_the_record_is_damaged(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 10)
    make.checkpoint(1, 20)
    make.attempt(2, at(1, 10))
    make.begin(2, 15, parent=at(1, 10))
    make.damage(object_names.attempt_name("gpt", 2))
    told: list[str] = []
    assert list(walk(repo, "gpt", report=told.append)) == [at(1, 10)]
    assert "its other objects" in told[0]


def test_i3_a_parent_attempt_that_vanished_does_not_hide_what_is_older(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 10)
    make.attempt(2, at(1, 10))
    make.checkpoint(2, 20)
    make.attempt(3, at(2, 20))
    repo.store.delete([entry.name for entry in repo.store.walk("runs/gpt/a0002")])
    assert list(walk(repo, "gpt")) == [at(1, 10)]


def test_what_is_known_to_be_there_is_not_read_again(repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make.attempt(1)
    known = {make.checkpoint(1, step) for step in (5, 7)}
    other = make.checkpoint(1, 9)
    looked: list[CheckpointId] = []
    exists = Repo.exists
    monkeypatch.setattr(Repo, "exists", lambda self, id: looked.append(id) or exists(self, id))
    assert list(walk(repo, "gpt", known=known)) == [at(1, 9), at(1, 7), at(1, 5)]
    assert looked == [other]


def test_hostile_parents_end(repo: Repo, make: Any) -> None:
    make.attempt(1, at(1, 5, "fork"))
    make.attempt(1, at(1, 5, "gpt"), run="fork")
    make.checkpoint(1, 3)
    assert list(walk(repo, "gpt")) == [at(1, 3)]
    make.attempt(2, at(7, 9, "nowhere"))
    assert list(walk(repo, "gpt")) == []


def test_resolve_finds_what_a_person_means(repo: Repo, make: Any) -> None:
    make.attempt(1)
    for step in (10, 20, 30):
        make.checkpoint(1, step)
    make.attempt(2, at(1, 20))
    make.checkpoint(2, 30)
    assert resolve(repo, "GPT") == resolve(repo, "gpt", "latest") == resolve(repo, "gpt", 30) == at(2, 30)
    assert resolve(repo, "gpt", 20) == resolve(repo, "gpt", "20") == at(1, 20)
    for text in ("a0001/30", "a1/step-00000030", "gpt/a0001/30"):
        assert resolve(repo, "gpt", text) == at(1, 30)
    assert resolve(repo, "gpt", at(1, 30)) == at(1, 30)
    make.repo.store.delete([at(2, 30).manifest])
    assert resolve(repo, "gpt", 30) == at(1, 30)


def test_resolve_says_what_there_is(repo: Repo, make: Any) -> None:
    with pytest.raises(RunNotFound, match="no runs yet"):
        resolve(repo, "gpt")
    make.attempt(1)
    with pytest.raises(CheckpointNotFound, match="no checkpoint yet"):
        resolve(repo, "gpt")
    make.checkpoint(1, 10)
    with pytest.raises(CheckpointNotFound, match="the nearest is 10"):
        resolve(repo, "gpt", 21)
    for step in (20, 30):
        make.checkpoint(1, step)
    with pytest.raises(CheckpointNotFound, match="the nearest are 10, 20, 30"):
        resolve(repo, "gpt", 21)
    with pytest.raises(CheckpointNotFound, match="steps of that attempt: 30, 20, 10"):
        resolve(repo, "gpt", "a0001/21")
    with pytest.raises(RunNotFound) as caught:
        resolve(repo, "gtp", 5)
    assert "there are: gpt" in str(caught.value)
    assert "did you mean 'gpt'" in str(caught.value)
    with pytest.raises(CheckpointNotFound, match="neither a step nor a tag"):
        resolve(repo, "gpt", "newest")
    with pytest.raises(UsageError):
        resolve(repo, "gpt", "Newest One")


def test_a_store_that_fails_is_no_damage(repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A passing fault must not look like a lost record: the walk would then go elsewhere."""
    from tenuto.errors import StoreUnavailable

    make.attempt(1)
    make.checkpoint(1, 10)

    def fail(name: str, *, limit: int) -> bytes:
        raise StoreUnavailable("away", subject=name)

    monkeypatch.setattr(repo.store, "get", fail)
    monkeypatch.setattr(repo.store, "open", lambda name: fail(name, limit=0))
    with pytest.raises(StoreUnavailable):
        latest(repo, "gpt")
    with pytest.raises(StoreUnavailable):
        repo.exists(at(1, 10))


def test_a_record_of_a_newer_format_is_no_damage_either(repo: Repo, make: Any) -> None:
    from tenuto.errors import FormatTooNew
    from tenuto.model import canonical_json

    name = object_names.attempt_name("gpt", 1)
    newer = canonical_json.seal({"format": 2, "path": name, "repository": repo.id})
    repo.store.put_if_absent(name, Bytes(newer), token="x")
    with pytest.raises(FormatTooNew):
        latest(repo, "gpt")


def test_i4_damage_to_every_bit_of_a_record_is_noticed(new_maker: Callable[[], Any]) -> None:
    make = new_maker()
    make.attempt(1)
    name = object_names.attempt_name("gpt", 1)
    good = make.repo.store.get(name, limit=10_000)
    for at_bit in range(0, len(good) * 8, 7):
        make.damage(name)
        make.repo.store.delete([name])
        bad = bytearray(good)
        bad[at_bit // 8] ^= 1 << at_bit % 8
        make.repo.store.put_if_absent(name, Bytes(bytes(bad)), token="x")
        with pytest.raises(CorruptionError):
            make.repo.attempt("gpt", 1)


@pytest.mark.parametrize("removal", ["at once", "into the trash"])
def test_i4_what_commits_and_goes_during_the_look_hides_nothing(
    repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch, removal: str
) -> None:
    """Between a listing and the look at what it names, training commits the next step and retention frees that one."""
    make.attempt(1)
    before = make.checkpoint(1, 100)
    listed = Repo.steps
    went = False

    def then_the_training_goes_on(self: Repo, run: str, attempt: int) -> list[int]:
        nonlocal went
        found = listed(self, run, attempt)
        if not went:
            went = True
            make.checkpoint(1, 200)
            names = [before.manifest] if removal == "into the trash" else make.names(before.directory)
            repo.store.delete(names if removal == "into the trash" else [f"{before.directory}/{n}" for n in names])
        return found

    monkeypatch.setattr(Repo, "steps", then_the_training_goes_on)
    assert latest(repo, "gpt") == at(1, 200)


def test_i4_the_first_commit_after_a_resume_and_the_removal_of_its_parent_hide_nothing(
    repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.attempt(1)
    parent = make.checkpoint(1, 100)
    make.attempt(2, parent)
    listed = Repo.steps

    def then_the_training_goes_on(self: Repo, run: str, attempt: int) -> list[int]:
        found = listed(self, run, attempt)
        if attempt == 2 and repo.exists(parent):
            make.checkpoint(2, 150)
            repo.store.delete([f"{parent.directory}/{name}" for name in make.names(parent.directory)])
        return found

    monkeypatch.setattr(Repo, "steps", then_the_training_goes_on)
    assert latest(repo, "gpt") == at(2, 150)
