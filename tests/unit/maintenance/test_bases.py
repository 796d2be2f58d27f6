"""What others rest on stays as long as somebody may need it, and goes when nobody does (I6, I7)."""

from __future__ import annotations

import pytest

from tenuto.crashpoints import armed
from tenuto.errors import CorruptionError
from tenuto.maintenance import copy_elsewhere, copy_plan, remove, retention, undelete
from tenuto.maintenance.census import census_of
from tenuto.maintenance.gc import execute, free_expired, plan_gc
from tenuto.maintenance.marks import valid_marks
from tenuto.maintenance.usage import usage_of
from tenuto.maintenance.verify import assert_whole, plan_verify
from tenuto.maintenance.verify import execute as verify
from tenuto.policy import keep
from tenuto.repo.bases import usable_bases
from tenuto.repo.catalog import Catalog
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import put_tombstone, take_back
from tenuto.store.memory import MemoryStore

HOUR = 3600.0


def visit(world, **options):
    return execute(world.repo, plan_gc(world.repo, **options))


def rm(world, *ids, force=True):
    return remove.execute(world.repo, remove.plan_remove(world.repo, ids, force=force))


def packs(world, id):
    return [name for name in world.names(id.directory) if name.endswith(".safetensors")]


class Training:
    def __init__(self, world, policy=None, parent=None):
        self.world = world
        self.catalog = world.repo.observer = Catalog()
        self.attempt = world.claim(parent=parent)
        self.policy = policy or keep.latest(1)

    def retain(self):
        removed = []
        for _ in range(2):
            plan = retention.plan_retention(self.world.repo, self.attempt, self.policy, self.catalog)
            removed += retention.execute(self.world.repo, self.attempt, plan, catalog=self.catalog)
            if not self.catalog.plan_again:
                break
        return [id.step for id in removed]


def test_i7_retention_leaves_the_packs_that_a_kept_one_rests_on_and_frees_them_with_it(world):
    training = Training(world)
    first = world.save(training.attempt, 1)
    second = world.save_on(training.attempt, 2, first)
    assert training.retain() == [1]
    assert not world.repo.exists(first)
    assert packs(world, first)
    assert [mark.by for mark in valid_marks(world.repo, census_of(world.repo, first))] == ["needed"]
    assert_whole(world.repo)
    assert training.retain() == []
    world.save(training.attempt, 3)
    assert training.retain() == [2]
    assert not packs(world, first)
    assert world.names("trash") == []
    assert world.names("tombstones") == []
    assert second.directory not in " ".join(world.names())
    assert_whole(world.repo)


def test_a_later_training_frees_what_was_only_needed_without_a_grace(world):
    training = Training(world)
    first = world.save(training.attempt, 1)
    second = world.save_on(training.attempt, 2, first)
    training.retain()
    world.die(training.attempt)
    later = Training(world, parent=second)
    world.save(later.attempt, 3)
    assert free_expired(world.repo, "main", by="retention", catalog=later.catalog) == ()
    assert later.retain() == [2]
    assert not packs(world, first)


def test_i7_what_another_run_rests_on_stays(world):
    training = Training(world)
    first = world.save(training.attempt, 1)
    world.save(training.attempt, 2)
    other = world.claim("fork", parent=first)
    forked = world.save_on(other, 5, first)
    world.save(other, 6)
    assert training.retain() == [1]
    assert packs(world, first)
    assert training.retain() == []
    assert training.catalog.waiting == {first: forked}
    rm(world, forked)
    visit(world, now=True)
    free_expired(world.repo, "main", by="retention", catalog=training.catalog)
    assert training.retain() == []
    assert not packs(world, first)
    assert_whole(world.repo)


@pytest.mark.parametrize("until", ["begin", "commit"])
def test_i7_a_save_that_begins_while_retention_looks_is_seen(world, until):
    training = Training(world)
    first = world.save(training.attempt, 1)
    world.save(training.attempt, 2)
    begun = []

    def save():
        if begun:
            return
        begun.append(world.save_on(training.attempt, 3, first, until=until))
        assert usable_bases(world.repo, begun[0], [first]) == ()  # the tombstone is there

    with armed("tombstone put, manifest still there", save):
        training.retain()
    assert not world.repo.exists(first)
    assert packs(world, first)


@pytest.mark.parametrize("remote", [False, True])
def test_i6_gc_leaves_what_a_checkpoint_rests_on_and_frees_it_in_the_same_visit_as_that(world, remote):
    attempt = world.claim()
    first = world.save(attempt, 1)
    second, _ = world.save_on(attempt, 2, first), world.save(attempt, 3)
    rm(world, first)
    for _ in range(2):
        world.store.advance(26 * HOUR)
        plan = plan_gc(world.repo)
        assert plan.kept == ((first, f"its data files are needed by {second}"),)
        assert f"{first}  left alone: its data files are needed by {second}" in str(plan)
        assert execute(world.repo, plan).deleted == ()
        assert visit(world, now=True).deleted == ()
    assert_whole(world.repo)
    rm(world, second)
    assert visit(world).deleted == ()  # it could still be brought back
    world.store.advance(26 * HOUR)
    assert visit(world).deleted == (second, first)
    assert not packs(world, first)


def test_i6_a_save_under_way_keeps_what_it_may_rest_on(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    world.save(attempt, 2)
    begun = world.save_on(attempt, 3, first, until="begin")
    assert usable_bases(world.repo, begun, [first]) == (first,)
    rm(world, first)
    assert visit(world, now=True).deleted == ()
    assert packs(world, first)
    world.die(attempt)
    world.claim()
    visit(world, now=True)
    assert not packs(world, first)


def test_i6_a_save_that_begins_after_the_plan_keeps_what_it_rests_on(world):
    """Removed, brought back, and removed again while gc is between its plan and the deletion."""
    attempt = world.claim()
    first = world.save(attempt, 1)
    world.save(attempt, 2)
    rm(world, first)
    plan = plan_gc(world.repo, now=True)
    undelete.execute(world.repo, undelete.plan_undelete(world.repo, first))
    world.save_on(attempt, 3, first)
    rm(world, first)
    report = execute(world.repo, plan)
    assert report.spared == ((first, "it was brought back meanwhile"),)
    assert_whole(world.repo)


def test_i6_what_is_freed_goes_after_what_rests_on_it_and_not_where_that_stays(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    second, _ = world.save_on(attempt, 2, first), world.save(attempt, 3)
    rm(world, second, first)
    plan = plan_gc(world.repo, now=True)
    assert [found.id for found in plan.garbage] == [second, first]
    undelete.execute(world.repo, undelete.plan_undelete(world.repo, second))
    assert [id for id, _ in execute(world.repo, plan).spared] == [second, first]
    assert_whole(world.repo)


def test_i6_a_damaged_checkpoint_still_keeps_what_it_rests_on(world):
    training = Training(world)
    first = world.save(training.attempt, 1)
    second, _ = world.save_on(training.attempt, 2, first), world.save(training.attempt, 3)
    world.flip(second.manifest)
    training.catalog = Catalog()
    plan = retention.plan_retention(world.repo, training.attempt, keep.latest(2), training.catalog)
    retention.execute(world.repo, training.attempt, plan, catalog=training.catalog)
    assert packs(world, first)
    visit(world, now=True)
    assert packs(world, first)


def test_undelete_brings_back_a_base_and_what_rests_on_it(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    second, _ = world.save_on(attempt, 2, first), world.save(attempt, 3)
    before = world.names()
    rm(world, second, first)
    for id in (second, first):
        undelete.execute(world.repo, undelete.plan_undelete(world.repo, id))
    assert world.names() == before
    assert_whole(world.repo)


def test_undelete_refuses_what_would_come_back_without_the_packs_of_its_base(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    second, _ = world.save_on(attempt, 2, first), world.save(attempt, 3)
    rm(world, second)
    world.lose(packs(world, first)[0])
    with pytest.raises(CorruptionError, match=str(first.directory)):
        undelete.execute(world.repo, undelete.plan_undelete(world.repo, second))
    assert not world.repo.exists(second)


def test_verify_names_everything_that_a_lost_base_takes_down(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    others = (world.save_on(attempt, 2, first), world.save_on(attempt, 3, first))
    whole = world.save(attempt, 4)
    world.lose(packs(world, first)[0])
    report = verify(world.repo, plan_verify(world.repo))
    assert report.damaged() == (first, *others)
    assert report.of(whole) == ()
    assert all(
        f"is missing (a data file of {first}, on which it rests)" in str(finding)
        for id in others
        for finding in report.of(id)
    )


def test_a_save_relies_only_on_what_nobody_removes(world):
    attempt = world.claim()
    first, second = world.save(attempt, 1), world.save(attempt, 2)
    begun = world.save_on(attempt, 3, first, until="begin")
    assert usable_bases(world.repo, begun, [first, second]) == (first, second)
    stone = put_tombstone(world.repo, first, reason="rm")
    assert usable_bases(world.repo, begun, [first, second]) == (second,)
    take_back(world.repo, stone)
    rm(world, first)
    assert usable_bases(world.repo, begun, [first, second]) == (second,)
    foreign = world.save(world.claim("other"), 1)
    assert usable_bases(world.repo, begun, [second, foreign]) == (second,)


def test_a_save_goes_on_from_packs_in_the_trash_through_the_one_that_rests_on_them(world):
    training = Training(world)
    first = world.save(training.attempt, 1)
    second = world.save_on(training.attempt, 2, first)
    training.retain()
    begun = world.save_on(training.attempt, 3, second, until="begin")
    assert usable_bases(world.repo, begun, [first], through=second) == (first,)
    assert usable_bases(world.repo, begun, [first]) == ()
    stone = put_tombstone(world.repo, second, reason="rm")
    assert usable_bases(world.repo, begun, [first], through=second) == ()
    take_back(world.repo, stone)


@pytest.mark.parametrize(
    "point",
    [
        "tombstone put, manifest still there",
        "copy in trash, manifest still there",
        "manifest removed, packs still there",
    ],
)
def test_i7_retention_that_dies_loses_no_base(world, point, crash):
    error, abandon = crash
    training = Training(world)
    first = world.save(training.attempt, 1)
    second = world.save_on(training.attempt, 2, first)
    with armed(point, abandon), pytest.raises(error):
        training.retain()
    world.die(training.attempt)
    other = world.claim(parent=second)
    visit(world, now=True)
    assert packs(world, first)
    assert world.repo.exists(second)
    world.save(other, 3)
    rm(world, second)
    assert_whole(world.repo)


def test_i6_a_full_disk_frees_no_base(world, monkeypatch):
    from tenuto.errors import StoreFull
    from tenuto.maintenance import gc

    attempt = world.claim()
    first = world.save(attempt, 1)
    world.save_on(attempt, 2, first)
    rm(world, first)

    def full(*_, **__):
        raise StoreFull("no room", subject="x")

    monkeypatch.setattr(gc, "put_tombstone", full)
    assert visit(world, now=True).deleted == ()
    assert packs(world, first)


def test_usage_says_what_removing_some_would_free(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    second, third = world.save_on(attempt, 2, first), world.save_on(attempt, 3, first)
    plain = world.save(attempt, 4)
    usage = {one.id: one for one in usage_of(world.repo).checkpoints}
    assert usage[plain].unique == usage[plain].stored > usage[plain].logical - 4096
    assert usage[first].unique == 0
    assert usage[first].shared == 0
    assert usage[second].shared == 200 + 100
    found = usage_of(world.repo)
    assert found.freed_by([second]) == usage[second].stored == usage[second].unique
    assert found.freed_by([first]) == 0
    assert found.freed_by([first, second, third]) == sum(usage[id].stored for id in (first, second, third))
    rm(world, first, second)
    after = usage_of(world.repo)
    assert (after.needed, after.removed) == (usage[first].stored, usage[second].stored)
    assert after.stored == found.stored
    assert {one.id: one.unique for one in after.checkpoints}[third] == usage[first].stored + usage[third].stored
    visit(world, now=True)
    assert usage_of(world.repo).stored == found.stored - usage[second].stored
    rm(world, third)
    visit(world, now=True)
    assert usage_of(world.repo).stored == usage[plain].stored


def test_rm_says_what_stays_and_what_is_really_freed(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    second, _ = world.save_on(attempt, 2, first), world.save(attempt, 3)
    plan = remove.plan_remove(world.repo, [first])
    assert plan.bytes == 0
    assert f"removed; its data files are needed by {second}" in str(plan)
    both = remove.plan_remove(world.repo, [first, second])
    assert both.bytes == world.repo.manifest(first).bytes
    assert "needed" not in str(both)


def test_a_copy_elsewhere_takes_what_rests_on_others_with_those(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    second, third = world.save_on(attempt, 2, first), world.save(attempt, 3)
    target = MemoryStore("elsewhere")
    report = copy_elsewhere.execute(world.repo, target, copy_plan.plan_copy(world.repo, target))
    assert report.copied == (third, second, first)
    assert not report.failed
    assert_whole(Repo(target, world.repo.id, world.repo.chunk_bytes))
    rm(world, first)
    alone = MemoryStore("elsewhere, the second alone")
    plan = copy_plan.plan_copy(world.repo, alone, ids=[second])
    assert copy_elsewhere.execute(world.repo, alone, plan).copied == (second,)
    copy = Repo(alone, world.repo.id, world.repo.chunk_bytes)
    assert copy.checkpoints() == [second]
    assert_whole(copy)


def test_what_is_removed_while_it_is_copied_stays_where_something_rests_on_it(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    second = world.save_on(attempt, 2, first)
    target = MemoryStore("elsewhere, while retention works")
    plan = copy_plan.plan_copy(world.repo, target)
    rm(world, first)
    report = copy_elsewhere.execute(world.repo, target, plan)
    assert (report.copied, report.gone, report.failed) == ((second,), (first,), ())
    assert_whole(Repo(target, world.repo.id, world.repo.chunk_bytes))


def test_pruning_spares_what_has_become_a_checkpoint_of_the_copy(world):
    """What lay in the trash there, for another one rested on it, is copied itself as that other one goes."""
    attempt = world.claim()
    first = world.save(attempt, 1)
    second = world.save_on(attempt, 2, first)
    target = MemoryStore("elsewhere, pruned")
    copy_elsewhere.execute(world.repo, target, copy_plan.plan_copy(world.repo, target, ids=[second]))
    third = world.save(attempt, 3)
    rm(world, second)
    visit(world, now=True)
    report = copy_elsewhere.execute(world.repo, target, copy_plan.plan_copy(world.repo, target), prune=True)
    assert (report.copied, report.pruned, report.failed) == ((third, first), (second,), ())
    copy = Repo(target, world.repo.id, world.repo.chunk_bytes)
    assert copy.checkpoints() == [first, third]
    assert_whole(copy)
