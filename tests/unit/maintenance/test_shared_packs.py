"""Random histories of a repository with a tier and a copy, in which whoever fills them dies at any call: a place that
has a checkpoint has what it rests on, and what nobody rests on goes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from support.thinning import thinned
from tenuto.crashpoints import armed
from tenuto.errors import StoreError
from tenuto.events import Emitter
from tenuto.maintenance import copy_elsewhere, copy_plan, replicate, retention
from tenuto.maintenance.gc import free_expired
from tenuto.maintenance.inspect import inspect
from tenuto.maintenance.replica_tidy import free_in
from tenuto.maintenance.shared_packs import lacking, packs_of
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Receipt
from tenuto.policy import keep
from tenuto.repo.catalog import Catalog
from tenuto.repo.lineage import latest
from tenuto.repo.replicated.tiers import Tier, Tiers
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import close_save, close_unfinished
from tenuto.store.contract import Content, Store
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.training.tier_fill import FollowerFill

from .conftest import CHUNK, Abandoned, World, _names

pytestmark = pytest.mark.filterwarnings("ignore")


class Mortal(DelegatingStore):
    """A store whose caller dies at the call that `left` counts down to: before it has an effect, or after."""

    left = -1
    after = False
    until = -1
    meanwhile: Any = None
    """What another process does at the call that `until` counts down to."""

    def _acts(self, act: Any) -> Any:
        self.left -= 1
        self.until -= 1
        if self.until == 0:
            self.meanwhile()
        if self.left == 0 and not self.after:
            raise Abandoned
        done = act()
        if self.left == 0:
            raise Abandoned
        return done

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        return self._acts(lambda: super(Mortal, self).put_if_absent(name, content, token=token))

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        self._acts(lambda: super(Mortal, self).delete(list(names)))


class History(World):
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = MemoryStore(f"home-{next(_names)}")
        self.slow = Mortal(MemoryStore(f"slow-{next(_names)}"))
        self.elsewhere = Mortal(MemoryStore(f"copy-{next(_names)}"))
        self.tiers = Tiers(Tier(self.store), Tier(self.slow))
        self.repo = Repo.create_or_open(self.tiers, chunk_bytes=CHUNK)
        self.step = 0
        self.attempt = self.claim()
        self.start()

    def start(self) -> None:
        """A process begins: it claims the run, and looks at what lies in the tier."""
        self.die(self.attempt)
        self.attempt = self.claim(parent=latest(self.repo, "main"))
        self.catalog = self.repo.observer = Catalog()
        self.fill = FollowerFill(
            self.repo,
            "main",
            self.tiers,
            self.tiers.tiers[1],
            emitter=Emitter(),
            report=lambda message: None,
            keep=keep.latest(self.random.choice((1, 2, 3))),
            relied_on=dict,
            elsewhere=lambda id: False,
        )
        self.fill.attempt = self.attempt

    def save_some(self) -> None:
        self.step += 1
        there = self.repo.checkpoints()
        if there and self.random.random() < 0.7:
            self.save_on(self.attempt, self.step, self.random.choice(there))
        else:
            self.save(self.attempt, self.step)

    def retain(self) -> None:
        policy = keep.latest(2)
        plan = retention.plan_retention(self.repo, self.attempt, policy, self.catalog, copying=self.fill.copying)
        retention.execute(self.repo, self.attempt, plan, catalog=self.catalog, copying=self.fill.copying)

    def fill_tier(self) -> None:
        newest = latest(self.repo, "main")
        if newest is not None and newest not in self.fill.whole:
            self.fill._add(newest, 1, 0.0)
        self.fill._round()
        assert not self.fill.error, self.fill.error

    def copy_away(self) -> None:
        plan = copy_plan.plan_copy(self.repo, self.elsewhere)
        report = copy_elsewhere.execute(self.repo, self.elsewhere, plan, prune=self.random.random() < 0.5)
        assert not report.failed, report.failed

    def dying(self, place: Mortal, work: Any) -> None:
        """Does something, and dies in it more often than not."""
        place.left, place.after = self.random.randint(1, 30), self.random.random() < 0.5
        try:
            work()
        except Abandoned:
            place.left = -1
            self.start()
        finally:
            place.left = -1

    def meanwhile(self, place: Mortal, work: Any) -> None:
        """Does something, while the training saves and removes, or somebody else fills the same place."""

        def another() -> None:
            if self.random.random() < 0.7:
                for _ in range(self.random.randint(1, 3)):
                    self.save_some()
                self.retain()
            else:
                self.copy_away()

        place.until, place.meanwhile = self.random.randint(1, 40), another
        try:
            work()
        finally:
            place.until = -1

    def check(self) -> None:
        for store in (self.store, self.slow.inner, self.elsewhere.inner):
            assert_whole_by_itself(Repo(store, self.repo.id, CHUNK))


def assert_whole_by_itself(repo: Repo) -> None:
    for id in repo.checkpoints():
        assert not lacking(repo.store, packs_of(repo, repo.manifest(id))), f"{id} at {repo.url}"
        assert not inspect(repo, id).harmed, f"{id} at {repo.url}"


def with_packs(store: Store) -> set[str]:
    names = (entry.name for entry in store.walk("runs"))
    return {name.rpartition("/")[0] for name in names if name.endswith(".safetensors")}


def needed(repo: Repo) -> set[str]:
    ids: set[CheckpointId] = set()
    for id in repo.checkpoints():
        ids.update((id, *repo.manifest(id).bases))
    return {id.directory for id in ids}


@pytest.mark.parametrize("seed", thinned(range(25), 4))
def test_i6_i7_every_place_has_what_its_checkpoints_rest_on_and_no_more_in_the_end(seed: int) -> None:
    world = History(seed)
    for _ in range(25):
        what = world.random.choice(("save", "save", "retain", "fill", "fill", "copy", "restart"))
        if what == "save":
            world.save_some()
        elif what == "retain":
            world.retain()
        elif what == "fill":
            world.random.choice((world.dying, world.meanwhile))(world.slow, world.fill_tier)
        elif what == "copy":
            world.random.choice((world.dying, world.meanwhile))(world.elsewhere, world.copy_away)
        else:
            world.start()
        world.check()
    world.save_some()
    world.start()
    world.fill_tier()
    newest = latest(world.repo, "main")
    there = Repo(world.slow, world.repo.id, CHUNK)
    assert newest in there.checkpoints()
    while free_expired(there, "main", by="needed", grace_s=0.0):
        pass
    assert with_packs(world.slow) <= needed(there)
    world.copy_away()
    world.check()
    copy = Repo(world.elsewhere, world.repo.id, CHUNK)
    assert newest in copy.checkpoints()


def test_a_copy_that_failed_frees_nothing_that_others_rest_on_there() -> None:
    """The tier has what was saved on a checkpoint, as a fork is, before that checkpoint itself."""
    world = History(0)
    world.fill.keep = keep.all()
    first = world.save(world.attempt, 1)
    second = world.save_on(world.attempt, 2, first)
    world.fill_tier()

    def away() -> None:
        raise StoreError("the tier is away", subject=world.slow.url)

    world.fill._add(first, 1, 0.0)
    world.slow.until, world.slow.meanwhile = 1, away
    world.fill._round()
    assert world.fill.error
    world.fill._next_try_s = 0.0
    world.save(world.attempt, 3)
    world.fill_tier()
    assert world.fill.whole >= {second, latest(world.repo, "main")}
    world.check()


def test_replicate_leaves_no_checkpoint_whose_base_is_freed_there_meanwhile() -> None:
    world = History(0)
    first = world.save(world.attempt, 1)
    second = world.save_on(world.attempt, 2, first)

    def free() -> None:
        free_in(world.slow.inner, first)

    with armed("packs copied, checkpoint not looked for again", free):
        report = replicate.execute(world.repo, replicate.plan_replicate(world.repo, [second]))
    assert "was removed from" in report.failed[0].message
    assert not Repo(world.slow, world.repo.id, CHUNK).exists(second)
    assert not replicate.execute(world.repo, replicate.plan_replicate(world.repo, [second])).failed
    assert Repo(world.slow, world.repo.id, CHUNK).exists(second)
    world.check()


def test_what_a_tier_has_freed_and_needs_again_is_not_freed_by_who_claims_there() -> None:
    """Killed in the middle of a copy, it frees the base as it starts again, behind a mark, and brings it once more."""
    world = History(0)
    first = world.save(world.attempt, 1)
    second = world.save_on(world.attempt, 2, first)

    def die() -> None:
        raise Abandoned

    with armed("place has the data files of a checkpoint, not its manifest", die), pytest.raises(Abandoned):
        world.fill_tier()
    free_in(world.slow.inner, second)
    there = Repo(world.slow.inner, world.repo.id, CHUNK)
    assert free_expired(there, "main", by="needed", grace_s=0.0) == (first,)
    world.start()
    world.fill._compare(world.attempt)
    assert not world.fill.whole, "what it has freed is no checkpoint"
    world.fill_tier()
    assert second in there.checkpoints()
    close_unfinished(there, "main", 1, by="a claim", owner_dead=True, report=print)
    close_save(there, first, by="a claim", owner_dead=True, report=print)
    world.check()
