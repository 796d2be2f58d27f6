"""Somebody comes in between: before every single store operation of a removal, another process comes to need, bring
back or remove the same checkpoint. Whoever comes second gives way, and nobody is left with something that is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from support.thinning import crossed
from tenuto.errors import CheckpointNotFound, TenutoError
from tenuto.maintenance import gc, remove, retention, undelete
from tenuto.maintenance.verify import assert_whole
from tenuto.policy import keep
from tenuto.repo import tombstones
from tenuto.repo.bases import usable_bases
from tenuto.repo.catalog import Catalog
from tenuto.repo.format import object_names
from tenuto.repo.lineage import walk
from tenuto.repo.ownership import claim as claims
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.refs import put_ref, read_ref
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import is_tombstoned
from tenuto.repo.unfinished import abort


class Interrupted:
    """A store that calls `intrude` once, before its operation number `at`."""

    def __init__(self, store: Any, at: int, intrude: Callable[[], None]) -> None:
        self._store, self._at, self._intrude = store, at, intrude
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("put_if_absent", "get", "open", "stat", "children", "walk", "delete", "settle"):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self._at:
                self._intrude()
            result = found(*arguments, **named)
            return iter(list(result)) if name == "walk" else result

        return call


class Scene:
    """Three checkpoints of a live run, of which the first is fought over."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.attempt: Attempt = world.claim()
        self.old, self.middle, self.new = (world.save(self.attempt, step) for step in (1, 2, 3))
        self.won = False

    def clone(self) -> Scene:
        other = Scene.__new__(Scene)
        other.world, other.attempt, other.won = self.world.clone(), self.attempt, False
        other.old, other.middle, other.new = self.old, self.middle, self.new
        return other

    # -- who removes -------------------------------------------------------------------------------------------------

    def rm(self, repo: Repo) -> None:
        remove.execute(repo, remove.plan_remove(repo, [self.old]))

    def retain(self, repo: Repo) -> None:
        retention.execute(repo, self.attempt, retention.plan_retention(repo, self.attempt, keep.latest(1)))

    def retain_from_memory(self, repo: Repo) -> None:
        """As a process that trains does: by what its last look, before anybody came in between, has found."""
        catalog = Catalog()
        retention.plan_retention(self.world.repo, self.attempt, keep.latest(3), catalog)
        plan = retention.plan_retention(repo, self.attempt, keep.latest(1), catalog)
        retention.execute(repo, self.attempt, plan, catalog=catalog)

    def removed(self) -> None:
        self.rm(self.world.repo)

    def collect(self, repo: Repo) -> None:
        gc.execute(repo, gc.plan_gc(repo, grace_s=0.0))

    def bring_back(self, repo: Repo) -> None:
        undelete.execute(repo, undelete.plan_undelete(repo, self.old, grace_s=1e6))

    # -- who comes in between ----------------------------------------------------------------------------------------

    def pin(self) -> None:
        try:
            put_ref(self.world.repo, "pin", "late", self.old)
        except CheckpointNotFound:
            return
        self.won = True

    def fork(self) -> None:
        """What `claim` does about its parent, without threads."""
        self.world.claim("fork", parent=self.old)
        if self.world.repo.exists(self.old) and not is_tombstoned(self.world.repo, self.old):
            self.won = True

    def supersede(self) -> None:
        self.world.claim("main", parent=self.old)
        if self.world.repo.exists(self.old) and not is_tombstoned(self.world.repo, self.old):
            self.won = True

    def try_bring_back(self) -> None:
        try:
            self.bring_back(self.world.repo)
        except TenutoError:
            return
        self.won = True

    def try_rm(self) -> None:
        try:
            self.rm(self.world.repo)
        except TenutoError:
            return

    def try_collect(self) -> None:
        self.collect(self.world.repo)


def interleave(
    make_world: Any, prepare: str | None, actor: str, intruder: str, check: Callable[[Scene, bool], None]
) -> int:
    """Every place for the intruder, until there is no operation left to come before; returns how many there were."""
    begun = Scene(make_world())
    if prepare is not None:
        getattr(begun, prepare)()
    at = 0
    while True:
        at += 1
        scene = begun.clone()
        store = Interrupted(scene.world.store, at, getattr(scene, intruder))
        repo = Repo.open(store)
        try:
            getattr(scene, actor)(repo)
        except TenutoError:
            pass
        if store.count < at:
            return at - 1
        assert_whole(scene.world.repo)
        assert not scene.world.names("tombstones/main"), "nobody leaves a tombstone behind"
        check(scene, scene.world.repo.exists(scene.old))


@pytest.mark.parametrize("intruder", ["pin", "fork", "supersede"])
@pytest.mark.parametrize("actor", ["rm", "retain", "retain_from_memory"])
def test_i7_who_comes_to_need_it_never_loses_it(make_world, actor, intruder):
    def check(scene: Scene, exists: bool) -> None:
        if scene.won:
            assert exists, "it relies on a checkpoint that is gone"
        elif intruder == "pin":
            assert read_ref(scene.world.repo, "pin", "late") is None
        if intruder != "supersede" or scene.won:
            assert next(walk(scene.world.repo, "main")) == (scene.old if intruder == "supersede" else scene.new)

    assert interleave(make_world, None, actor, intruder, check) > (15 if actor == "retain_from_memory" else 20)


@pytest.mark.parametrize("intruder", ["try_bring_back", "pin"])
def test_i6_gc_and_undelete_meet_and_one_wins(make_world, intruder):
    def check(scene: Scene, exists: bool) -> None:
        if intruder == "try_bring_back":
            assert exists == scene.won
        if not exists:
            # Either all of it is there, to be brought back, or nothing can be brought back any more.
            packs = scene.world.names(f"{scene.old.directory}/rank")
            assert len(packs) == 2 or scene.world.names(scene.old.manifest)

    assert interleave(make_world, "removed", "collect", intruder, check) > 20


@pytest.mark.parametrize("intruder", ["try_collect", "try_rm", "try_bring_back"])
def test_i6_undelete_and_who_comes_in_between(make_world, intruder):
    def check(scene: Scene, exists: bool) -> None:
        if not exists:
            packs = scene.world.names(f"{scene.old.directory}/rank")
            closed = scene.world.names(scene.old.manifest)
            trash = scene.world.names(object_names.trash_directory(scene.old))
            assert closed or (len(packs) == 2 and trash), "it can neither be restored nor brought back"

    assert interleave(make_world, "removed", "bring_back", intruder, check) > 20


@pytest.mark.parametrize("actor", ["rm", "retain", "retain_from_memory"])
@pytest.mark.parametrize("intruder", ["try_rm", "try_collect"])
def test_i2_two_removers_of_one_checkpoint(make_world, actor, intruder):
    def check(scene: Scene, exists: bool) -> None:
        assert scene.world.repo.exists(scene.new)
        if exists:
            assert actor == "rm", "what nobody needs goes"

    interleave(make_world, None, actor, intruder, check)


@pytest.mark.parametrize(
    ("prepare", "actor"),
    [
        (None, "rm"),
        (None, "retain"),
        (None, "retain_from_memory"),
        ("removed", "collect"),
        ("removed", "bring_back"),
    ],
)
def test_i2_i6_dying_before_any_operation_leaves_it_whole_or_going(make_world, crash, monkeypatch, prepare, actor):
    gone, abandon = crash
    begun = Scene(make_world())
    if prepare is not None:
        getattr(begun, prepare)()
    at = 0
    while True:
        at += 1
        scene = begun.clone()
        world = scene.world
        store = Interrupted(world.store, at, abandon)
        try:
            getattr(scene, actor)(Repo.open(store))
        except gone:
            pass
        else:
            break
        assert_whole(world.repo)
        assert next(walk(world.repo, "main")) == scene.new
        there = world.repo.exists(scene.old)
        # The dead process's tombstones are taken back by the next claim, what it had begun is ended by it or by gc.
        with monkeypatch.context() as patched:
            patched.setattr(tombstones, "judge", lambda owner: "dead")
            world.die(scene.attempt)
            claims.claim(world.repo, "main", scene.new, beat_s=3600.0).release()
            assert world.repo.exists(scene.old) == there
            assert not is_tombstoned(world.repo, scene.old) or not there
            for _ in range(2):
                world.store.advance(30 * 3600)
                gc.execute(world.repo, gc.plan_gc(world.repo))
        assert world.names("tombstones") == world.names("trash") == []
        assert world.repo.exists(scene.old) == there
        assert there or world.names(f"{scene.old.directory}/") in ([], [scene.old.manifest])
        assert_whole(world.repo)
    assert at > 10


# -- a save that comes to rest on what is being removed --------------------------------------------------------------


class Resting:
    """A checkpoint, one that rests on it (`through`) or not, and a save that comes to rest on it while a removal of
    both is under way. `gap`: so many operations of the removal lie between its `begin.json` and its look."""

    def __init__(self, world: Any, *, through: bool) -> None:
        self.world = world
        self.attempt: Attempt = world.claim()
        self.base = world.save(self.attempt, 1)
        self.through = world.save_on(self.attempt, 2, self.base) if through else None
        self.new = world.save(self.attempt, 3)
        self.read = (world.repo.manifest(self.base), world.repo.index(world.repo.manifest(self.base)))
        self.used = self.asked = False

    def clone(self) -> Resting:
        other = Resting.__new__(Resting)
        other.__dict__.update(self.__dict__)
        other.world = self.world.clone()
        return other

    def save(self, resting_save: Any, *, fork: bool) -> Iterator[None]:
        """Stops once between `begin.json` and the look."""
        repo = self.world.repo
        attempt = self.world.claim("fork", parent=self.base) if fork else Attempt(repo, self.attempt.record, None)
        save = resting_save(self.world, attempt, 4, self.base, self.read)
        yield
        self.asked = True
        if usable_bases(repo, save.id, save.bases, through=self.through) == save.bases:
            self.used = True
            save.commit()
        else:
            abort(repo, save.id, "0" * 32)

    # -- who removes -------------------------------------------------------------------------------------------------

    def rm(self, repo: Repo) -> None:
        ids = [id for id in (self.base, self.through) if id is not None]
        remove.execute(repo, remove.plan_remove(repo, ids))
        gc.execute(repo, gc.plan_gc(repo, now=True))

    def retain(self, repo: Repo) -> None:
        catalog = Catalog()
        for _ in range(2):
            plan = retention.plan_retention(repo, self.attempt, keep.latest(1), catalog)
            retention.execute(repo, self.attempt, plan, catalog=catalog)

    def remove_again(self, repo: Repo) -> None:
        """Between the plan of gc and its deletion."""
        remove.execute(self.world.repo, remove.plan_remove(self.world.repo, [self.base]))
        plan = gc.plan_gc(repo, now=True)
        undelete.execute(repo, undelete.plan_undelete(repo, self.base))
        remove.execute(repo, remove.plan_remove(repo, [self.base]))
        gc.execute(repo, plan)


@pytest.mark.parametrize(
    ("gap", "fork", "actor", "through"), crossed([0, 7], [False, True], ["rm", "retain", "remove_again"], [False, True])
)
def test_i6_i7_a_save_that_comes_to_rest_on_what_is_removed_loses_nothing(
    make_world, resting_save, through, actor, fork, gap
):
    begun, at, used = Resting(make_world(), through=through), 0, 0
    while True:
        at += 6
        scene = begun.clone()
        save = scene.save(resting_save, fork=fork)
        go_on = partial(next, save, None)
        later = Interrupted(scene.world.store, at + gap, go_on)
        at_once = Interrupted(scene.world.store, at, go_on)
        store = Interrupted(later if gap else at_once, at, go_on)
        try:
            getattr(scene, actor)(Repo.open(store))
        except TenutoError:
            pass
        if store.count < at:
            break
        for _ in range(2):
            go_on()
        for _ in range(2):
            gc.execute(scene.world.repo, gc.plan_gc(scene.world.repo, now=True))
        assert scene.asked
        assert_whole(scene.world.repo)
        used += scene.used
    assert at > 15
    assert used or gap
