"""One-off saves of a run that somebody else commits to, or claims, at the same time."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support import loaded_interpreter
from support.held_store import PATIENCE_S, held
from support.rank_threads import together
from tenuto.api import save_load
from tenuto.errors import RunInUse, StoreUnavailable
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import objects
from tenuto.repo.lineage import walk
from tenuto.repo.ownership import claim as claims
from tenuto.repo.ownership.claim import claim
from tenuto.repo.ownership.lease import read_last
from tenuto.repo.ownership.owner_watch import OwnerWatch
from tenuto.repo.repository import Repo
from tenuto.store.local.store import LocalStore

STATE = {"w": np.arange(4.0)}


@pytest.mark.parametrize("when", ["before the claim is put", "after it"])
def test_a_save_goes_on_from_what_the_owner_it_waited_for_has_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    place, hidden = tmp_path / "place", tmp_path / "hidden"
    saved = [tenuto.save(STATE, place) for _ in range(2)]
    save_load._attempts.clear()  # as another process would have it
    manifest = place / saved[1].id.manifest
    manifest.rename(hidden)
    claimed: list[int] = []

    claim = claims.claim

    def meanwhile(*arguments: Any, before_put: Any, **options: Any) -> Any:
        def committing() -> None:
            if when == "after it":
                before_put()
            if hidden.exists():
                hidden.rename(manifest)
            if when != "after it":
                before_put()

        attempt = claim(*arguments, before_put=committing, **options)
        claimed.append(attempt.number)
        return attempt

    monkeypatch.setattr(claims, "claim", meanwhile)
    third = tenuto.save(STATE, place)
    repo = Repo.open(LocalStore(place))
    assert third.id.step == saved[1].id.step + 1
    assert list(walk(repo, "main")) == [third.id, saved[1].id, saved[0].id]
    assert repo.manifest(third.id).parent == saved[1].id
    assert claimed == ([2] if when == "before the claim is put" else [2, 3])


def while_it_writes(place: Path, save: Callable[[Any], Any], step: int, look: Callable[[], None]) -> Any:
    """What `save` into the place returns; `look` is called while it is about to put the pack of `step`."""
    store = held(place, step)
    with ThreadPoolExecutor(1) as pool:
        saving: Future[Any] = pool.submit(save, store)
        try:
            store.await_pack(step)
            look()
        finally:
            store.let_go()
        return saving.result(60)


def leases() -> set[threading.Thread]:
    """The threads that renew leases of the run, those of trainings that other tests have left among them."""
    return {one for one in threading.enumerate() if one.name.startswith("tenuto-lease-main-")}


def found(place: Path) -> str:
    return OwnerWatch(Repo.open(LocalStore(place)), "main").inspect().verdict


@pytest.mark.parametrize("count", [1, 2])
def test_every_save_holds_the_run_while_it_writes_not_the_first_alone(tmp_path: Path, count: int) -> None:
    def save(store: Any) -> Any:
        if count == 1:
            return tenuto.save(STATE, store)
        for one in (told := together(count, lambda ranks: tenuto.save(STATE, store, ranks=ranks))):
            assert not isinstance(one, BaseException), one
        return told[0]

    seen, before = list[str](), leases()
    for step in range(4):
        saved = while_it_writes(tmp_path, save, step, lambda: seen.append(found(tmp_path)))
        assert (saved.attempt, saved.step) == (1, step)
        assert found(tmp_path) == "dead", "who has saved holds nothing"
    assert seen == ["here"] * 4
    assert leases() <= before


def test_another_process_frees_nothing_in_the_middle_of_a_later_save(tmp_path: Path) -> None:
    for _ in range(2):
        tenuto.save(STATE, tmp_path)
    words = ["tenuto", "keep", str(tmp_path), "--latest", "1", "--yes"]
    script = f"import sys; from tenuto.cli import main; sys.argv = {words!r}; main()"
    ended: list[int] = []

    def retain() -> None:
        ended.append(loaded_interpreter.run(["-c", script]).returncode)

    saved = while_it_writes(tmp_path, lambda store: tenuto.save(STATE, store), 2, retain)
    assert ended == [RunInUse.exit_code]
    assert (saved.attempt, saved.step) == (1, 2)
    repo = Repo.open(LocalStore(tmp_path))
    assert [id.step for id in walk(repo, "main")] == [2, 1, 0]
    retain()
    assert ended[1:] == [0], "between two saves it may"
    assert tenuto.save(STATE, tmp_path).attempt == 3


def test_an_attempt_that_somebody_has_claimed_over_is_given_back_again(tmp_path: Path) -> None:
    before = leases()
    tenuto.save(STATE, tmp_path)
    repo = Repo.open(LocalStore(tmp_path))
    claim(repo, "main", CheckpointId("main", 1, 0)).release()
    assert tenuto.save(STATE, tmp_path).attempt == 3
    last = read_last(repo, "main", 1)[1]
    assert last is not None and last.released
    assert leases() <= before


def test_a_save_that_cannot_take_its_attempt_up_again_fails_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: Any, name: str, data: bytes, *, token: str) -> Any:
        raise StoreUnavailable("away", subject=name)

    tenuto.save(STATE, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable, match="away"):
        patch.setattr(objects, "put", refuse)
        tenuto.save(STATE, tmp_path)
    assert found(tmp_path) == "dead"
    assert tenuto.save(STATE, tmp_path).attempt == 1


def test_no_load_and_no_save_of_another_run_waits_for_a_save(tmp_path: Path) -> None:
    other = tmp_path / "other"
    tenuto.save(STATE, other)

    def elsewhere() -> list[int]:
        return [tenuto.load(other).step, tenuto.save(STATE, other).step, tenuto.load(other).step]

    with ThreadPoolExecutor(1) as pool:  # not left before what is held goes on
        beside: list[Future[list[int]]] = []

        def look() -> None:
            beside.append(pool.submit(elsewhere))
            assert beside[0].result(PATIENCE_S) == [0, 1, 1]

        while_it_writes(tmp_path / "place", lambda store: tenuto.save(STATE, store), 0, look)


def test_saves_of_one_run_come_one_after_the_other(tmp_path: Path) -> None:
    store = held(tmp_path, 0)
    with ThreadPoolExecutor(2) as pool:
        saving = [pool.submit(tenuto.save, STATE, store) for _ in range(2)]
        store.await_pack(0)
        store.let_go()
        assert sorted(one.result(60).step for one in saving) == [0, 1]
    assert [step for step, _ in store.put] == sorted(step for step, _ in store.put)


def test_a_child_that_is_forked_during_a_save_loads_and_saves(tmp_path: Path) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    tenuto.save(STATE, other)
    left: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                tenuto.load(other)
                status = tenuto.save(STATE, other).step - 1
            finally:
                os._exit(status)
        watched = os.pidfd_open(child)
        if not select.select([watched], [], [], PATIENCE_S)[0]:
            os.kill(child, signal.SIGKILL)
        os.close(watched)
        left.append(os.waitpid(child, 0)[1])

    while_it_writes(place, lambda store: tenuto.save(STATE, store), 0, fork)
    assert left == [0]


def test_a_forked_child_saves_under_no_attempt_of_its_parent(tmp_path: Path) -> None:
    tenuto.save(STATE, tmp_path)
    assert save_load._attempts and save_load._saving
    child = os.fork()
    if child == 0:
        os._exit(len(save_load._attempts) + len(save_load._saving))
    assert os.waitpid(child, 0)[1] == 0
