"""Facts are gathered while training goes on: what commits meanwhile is never taken for left behind."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.errors import CheckpointNotFound
from tenuto.history import rollback
from tenuto.maintenance.facts import gather_facts
from tenuto.maintenance.retention import retain
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.repo.catalog import Catalog
from tenuto.repo.format import object_names
from tenuto.repo.notes import add_note
from tenuto.repo.repository import Repo


class Busy:
    """A store in which something happens just before its `nth` listing."""

    def __init__(self, inner: Any, nth: int, happens: Any) -> None:
        self._inner = inner
        self._left = nth
        self._happens = happens

    def children(self, prefix: str, *, after: str = "") -> Any:
        self._left -= 1
        if self._left == 0:
            self._happens()
        return self._inner.children(prefix, after=after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("nth", range(1, 12))
def test_i7_saves_that_commit_while_facts_are_gathered_are_not_left_behind(world: Any, nth: int) -> None:
    old = world.claim(alive=False)
    kept = world.save(old, 10)
    attempt = world.claim(parent=kept)
    world.save(attempt, 20)

    def commit_two() -> None:
        world.save(attempt, 30)
        world.save(attempt, 40)

    busy = Repo(Busy(world.store, nth, commit_two), world.repo.id, world.repo.chunk_bytes)
    facts = gather_facts(busy, "main")
    assert all(one.walk is not None for one in facts)
    dropped = {verdict.id.step for verdict in keep.latest(2).decide(facts) if not verdict.keep}
    assert dropped <= {10, 20}


def test_a_checkpoint_that_is_removed_while_facts_are_gathered_is_passed_over(world: Any) -> None:
    attempt = world.claim()
    gone = world.save(attempt, 10)
    world.save(attempt, 20)
    busy = Repo(
        Busy(world.store, 4, lambda: world.store.delete([gone.manifest])), world.repo.id, world.repo.chunk_bytes
    )
    assert [one.id.step for one in gather_facts(busy, "main")][-1] == 20


def test_a_note_on_a_checkpoint_that_is_removed_meanwhile_is_withdrawn(world: Any, monkeypatch: Any) -> None:
    id = world.save(world.claim(), 10)
    put = world.store.put_if_absent

    def removed_first(name: str, content: Any, *, token: str) -> Any:
        world.store.delete([id.manifest])
        return put(name, content, token=token)

    monkeypatch.setattr(world.store, "put_if_absent", removed_first)
    with pytest.raises(CheckpointNotFound):
        add_note(world.repo, id, "metric", {"loss": 1.0})
    assert not [entry for entry in world.store.walk(id.directory) if "/notes/" in entry.name]


class Reads:
    """A store that counts how often each attempt's record is read."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.read: list[str] = []

    def get(self, name: str, *, limit: int) -> bytes:
        if name.endswith(object_names.ATTEMPT):
            self.read.append(name)
        return self._inner.get(name, limit=limit)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def roll_back(world: Any, to: CheckpointId, *, force: bool = False) -> None:
    rollback.execute(world.repo, rollback.plan_rollback(world.repo, to.run, to, force=force))


def rolled_back(repo: Repo) -> set[int]:
    return {one.id.attempt for one in gather_facts(repo, "main") if one.rolled_back}


def train(world: Any, parent: CheckpointId | None, *steps: int) -> list[CheckpointId]:
    """A training that dies after these saves."""
    attempt = world.claim(parent=parent, alive=False)
    return [world.save(attempt, step) for step in steps]


def test_what_is_saved_first_after_a_rollback_is_told_from_what_follows_a_restart(world: Any) -> None:
    first = train(world, None, 10, 20, 30)
    later = train(world, first[-1], 40)
    roll_back(world, first[0])
    again = train(world, first[0], 11, 12)
    train(world, again[-1], 13)
    assert rolled_back(world.repo) == {again[0].attempt}
    plan, removed = retain(world.repo, "main", keep.after("rollback"), grace="none")
    assert [id.step for id in removed] == [10, 20, 30, later[0].step, 12]
    assert {verdict.id: verdict.reason for verdict in plan.verdicts}[
        again[0]
    ] == "the first of attempt 4 after a rollback"
    assert rolled_back(world.repo) == {again[0].attempt}, "what was removed around it changes nothing"


def test_what_was_claimed_since_the_rollback_and_saved_nothing_is_passed_over(world: Any) -> None:
    first = train(world, None, 10, 20, 30)
    roll_back(world, first[1])
    roll_back(world, first[0])
    train(world, first[0])
    retain(world.repo, "main", keep.latest(1), grace="none")
    saved = train(world, first[0], 11)
    assert rolled_back(world.repo) == {saved[0].attempt}
    unsaved = world.claim(parent=saved[0], alive=False)
    world.save(unsaved, 12, until="pack")
    train(world, saved[0], 12)
    assert rolled_back(world.repo) == {saved[0].attempt}, "nothing was saved in between, and nobody went back"


def test_a_training_that_passes_over_the_damaged_one_it_was_rolled_back_to_follows_the_rollback(world: Any) -> None:
    first = train(world, None, 10, 20, 30)
    world.flip(first[1].manifest)
    roll_back(world, first[1], force=True)
    saved = train(world, first[0], 11)
    assert rolled_back(world.repo) == {saved[0].attempt}
    world.flip(object_names.attempt_name("main", 2))
    assert rolled_back(world.repo) == {saved[0].attempt}, "what cannot be read may say that it was one"


def test_rollbacks_cost_no_reads_of_a_run_that_was_only_restarted(world: Any) -> None:
    newest = None
    for step in range(1, 6):
        newest = train(world, newest, step)[0]
    store = Reads(world.store)
    repo, catalog = Repo(store, world.repo.id, world.repo.chunk_bytes), Catalog()
    with_snapshot = catalog.snapshot(repo, "main")
    gather_facts(with_snapshot, "main")
    assert sorted(store.read) == [object_names.attempt_name("main", number) for number in range(1, 6)], "the walk's"


def test_a_rollbacks_record_is_read_once_by_a_process(world: Any) -> None:
    first = train(world, None, 10, 20)
    for _ in range(2):
        roll_back(world, first[0])
        train(world, first[0], 11)
    store, catalog = Reads(world.store), Catalog()
    repo = Repo(store, world.repo.id, world.repo.chunk_bytes)
    for _ in range(3):
        snapshot = catalog.snapshot(repo, "main")
        assert {one.id.attempt for one in gather_facts(snapshot, "main") if one.rolled_back} == {3, 5}
        snapshot.close()
    assert len(store.read) == len(set(store.read))
