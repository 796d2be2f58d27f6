"""Facts are gathered while training goes on: what commits meanwhile is never taken for left behind."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.errors import CheckpointNotFound
from tenuto.maintenance.facts import gather_facts
from tenuto.policy import keep
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
