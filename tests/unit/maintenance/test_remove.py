"""rm and undelete: refused where somebody needs the checkpoint, and taken back whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenuto.crashpoints import armed
from tenuto.engine.memory_tier.eligibility import EligibleImage, judge_line
from tenuto.engine.memory_tier.seal import SealHolder
from tenuto.errors import CheckpointNotFound, CorruptionError, RemovalRefused, RepositoryError, StoreFull
from tenuto.maintenance import gc, remove, trash, undelete
from tenuto.maintenance.census import census_of
from tenuto.maintenance.verify import assert_whole
from tenuto.repo import tombstones
from tenuto.repo.lineage import latest
from tenuto.repo.notes import add_note
from tenuto.repo.ownership import claim
from tenuto.repo.refs import clear_ref, put_ref


def rm(world, *ids, force=False):
    return remove.execute(world.repo, remove.plan_remove(world.repo, ids, force=force))


def bring_back(world, id, **options):
    return undelete.execute(world.repo, undelete.plan_undelete(world.repo, id, **options)).id


def test_i2_removing_takes_the_manifest_and_leaves_the_packs(world):
    attempt = world.claim()
    old, new = world.save(attempt, 1), world.save(attempt, 2)
    manifest = world.repo.manifest_bytes(old)
    before = set(world.names())
    assert rm(world, old) == (old,)
    assert not world.repo.exists(old)
    gone, come = before - set(world.names()), set(world.names()) - before
    assert gone == {old.manifest}
    mark, trash = sorted(come)
    assert mark.startswith("tombstones/gc/main/a0001/step-00000001/")
    assert trash.startswith("trash/main/a0001/step-00000001/")
    assert world.store.get(trash, limit=10**6) == manifest
    assert latest(world.repo, "main") == new
    assert_whole(world.repo)


def test_undelete_brings_back_every_byte(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    before = world.names()
    manifest = world.repo.manifest_bytes(old)
    rm(world, old)
    assert bring_back(world, old) == old
    assert world.names() == before
    assert world.repo.manifest_bytes(old) == manifest
    assert_whole(world.repo)


def test_removed_twice_and_brought_back_twice(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    before = world.names()
    for _ in range(2):
        rm(world, old)
        bring_back(world, old)
    assert world.names() == before


@pytest.mark.parametrize("kind", ["pin", "hold", "tag"])
def test_a_ref_keeps_its_checkpoint_even_from_force(world, kind):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    put_ref(world.repo, kind, "paper", old)
    world.die(attempt)
    with pytest.raises(RemovalRefused, match=f"{kind} 'paper'"):
        rm(world, old, force=True)
    clear_ref(world.repo, kind, "paper")
    assert rm(world, old) == (old,)


def test_what_a_live_run_goes_on_from_is_kept_even_from_force(world):
    first = world.claim()
    id = world.save(first, 1)
    world.die(first)
    world.claim(parent=id)
    with pytest.raises(RemovalRefused, match="training now"):
        rm(world, id, force=True)
    assert world.repo.exists(id)
    assert not world.names("tombstones")


def test_latest_of_a_finished_run_needs_force(world):
    attempt = world.claim()
    old, new = world.save(attempt, 1), world.save(attempt, 2)
    world.die(attempt)
    with pytest.raises(RemovalRefused) as refused:
        rm(world, new)
    assert "--force" in (refused.value.hint or "")
    rm(world, new, force=True)
    assert latest(world.repo, "main") == old
    rm(world, old, force=True)
    assert latest(world.repo, "main") is None
    assert_whole(world.repo)


def test_training_goes_on_from_memory_behind_what_was_removed_only_once_it_is_back(world):
    attempt = world.claim()
    _, new = world.save(attempt, 1), world.save(attempt, 2)
    world.die(attempt)

    def later():
        return judge_line(world.repo, "main", replace(new, step=9), "ef" * 16, SealHolder(attempt.number, attempt.id))

    assert later() == EligibleImage(new, durable=False)
    for _ in range(2):
        rm(world, new, force=True)
        assert later() == "step 2 of attempt 1, at or before it, was removed by hand"
        bring_back(world, new)
        assert later() == EligibleImage(new, durable=False)


def test_a_fork_without_a_commit_needs_its_parent(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    fork = world.claim("other", parent=old)
    with pytest.raises(RemovalRefused, match="other"):
        rm(world, old, force=True)
    world.save(fork, 2)
    assert rm(world, old) == (old,)


def test_the_newest_not_known_to_be_damaged_is_kept(world):
    attempt = world.claim()
    first, good, bad = (world.save(attempt, step) for step in (1, 2, 3))
    add_note(world.repo, bad, "suspect", {})
    with pytest.raises(RemovalRefused, match="not known to be damaged"):
        rm(world, good)
    assert rm(world, first) == (first,)


def test_a_refusal_in_the_plan_removes_nothing(world):
    attempt = world.claim()
    old, new = world.save(attempt, 1), world.save(attempt, 2)
    plan = remove.plan_remove(world.repo, [old, new])
    assert [removal.id for removal in plan.refused] == [new]
    assert "refused" in str(plan)
    with pytest.raises(RemovalRefused):
        remove.execute(world.repo, plan)
    assert world.repo.exists(old)


def test_who_comes_to_need_it_after_the_plan_is_seen(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    plan = remove.plan_remove(world.repo, [old])
    put_ref(world.repo, "pin", "late", old)
    with pytest.raises(RemovalRefused):
        remove.execute(world.repo, plan)
    assert world.repo.exists(old)
    assert not world.names("tombstones")
    assert not world.names("trash")


def test_who_comes_to_need_it_during_the_removal_gives_way(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    refused = []

    def pin() -> None:
        try:
            put_ref(world.repo, "pin", "late", old)
        except CheckpointNotFound as error:
            refused.append(error)

    # Before the look, the pin is put first and withdrawn: the remover may see it and give way too, and then both retry.
    with armed("copy in trash, manifest still there", pin):
        rm(world, old)
    assert refused
    assert not world.repo.exists(old)
    assert_whole(world.repo)


def test_a_removal_whose_tombstone_was_taken_back_stops(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)

    def take_back() -> None:
        for name in world.names("tombstones"):
            world.lose(name)

    with (
        armed("copy in trash, manifest still there", take_back),
        pytest.raises(RemovalRefused, match="taken back") as refused,
    ):
        rm(world, old)
    assert refused.value.hint == f"tenuto rm {world.repo.url} {old}"
    assert world.repo.exists(old)


def test_a_damaged_checkpoint_can_be_removed(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    world.flip(old.manifest, 40)
    rm(world, old)
    assert census_of(world.repo, old).state == "removed"
    with pytest.raises(CheckpointNotFound, match="damaged"):
        bring_back(world, old)


def test_what_is_not_there_cannot_be_removed(world):
    attempt = world.claim()
    id = world.save(attempt, 1)
    world.save(attempt, 2)
    rm(world, id)
    with pytest.raises(CheckpointNotFound):
        rm(world, id)


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00000.index"])
@pytest.mark.parametrize("how", ["flip", "truncate", "lose"])
def test_undelete_refuses_what_would_come_back_damaged(world, file, how):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    name = f"{old.directory}/{file}"
    {
        "flip": lambda: world.flip(name, -1),
        "truncate": lambda: world.truncate(name, 900),
        "lose": lambda: world.lose(name),
    }[how]()
    with pytest.raises(CorruptionError, match="would not come back whole"):
        bring_back(world, old)
    assert not world.repo.exists(old)
    assert world.names("trash")


def test_undelete_checks_again_and_withdraws(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    with armed(
        "manifest put back from trash, not yet checked", lambda: world.lose(f"{old.directory}/rank-00000.index")
    ):
        with pytest.raises(CorruptionError):
            bring_back(world, old)
    assert not world.repo.exists(old)
    assert census_of(world.repo, old).state == "removed"


def test_undelete_of_what_is_not_removed(world):
    attempt = world.claim()
    id = world.save(attempt, 1)
    with pytest.raises(RepositoryError, match="not removed"):
        undelete.plan_undelete(world.repo, id)
    open_save = world.save(attempt, 2, until="pack")
    with pytest.raises(CheckpointNotFound):
        undelete.plan_undelete(world.repo, open_save)


def test_undelete_works_for_the_whole_grace_and_gc_waits_an_hour_longer(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    world.store.advance(23.9 * 3600)
    plan = undelete.plan_undelete(world.repo, old)
    assert plan.left_s == pytest.approx(0.1 * 3600, abs=60)
    world.store.advance(0.2 * 3600)
    with pytest.raises(RepositoryError, match="removed more than 24 h 00 min ago"):
        undelete.plan_undelete(world.repo, old)
    with pytest.raises(RepositoryError):
        undelete.execute(world.repo, plan)
    assert not world.repo.exists(old)
    (waiting,) = gc.plan_gc(world.repo).garbage
    assert not waiting.due and waiting.left_s == pytest.approx(0.9 * 3600, abs=60)
    world.store.advance(0.9 * 3600)
    assert gc.plan_gc(world.repo).garbage[0].due


def test_a_second_removal_has_a_grace_of_its_own(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    mark = {name: world.store.place.objects[name] for name in world.names("tombstones/gc")}
    world.store.advance(20 * 3600)
    bring_back(world, old)
    # As if the undelete had died before it took the mark back.
    world.store.place.objects.update(mark)
    rm(world, old)
    world.store.advance(10 * 3600)
    assert undelete.plan_undelete(world.repo, old).left_s == pytest.approx(14 * 3600, abs=60)
    plan = gc.plan_gc(world.repo)
    assert [found.left_s for found in plan.garbage] == [pytest.approx(15 * 3600, abs=60)]
    assert plan.void == tuple(mark)


def test_a_removal_that_a_full_disk_keeps_from_marking_is_marked_by_the_first_visit_of_gc(world, monkeypatch):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)

    def full(*args, **options):
        raise StoreFull("no space")

    with monkeypatch.context() as patched:
        patched.setattr(trash, "put_mark", full)
        assert rm(world, old) == (old,)
    assert undelete.plan_undelete(world.repo, old).left_s is None
    assert [found.marked for found in gc.plan_gc(world.repo).garbage] == [False]
    assert gc.execute(world.repo, gc.plan_gc(world.repo)).marked == (old,)
    assert undelete.plan_undelete(world.repo, old).left_s == pytest.approx(24 * 3600, abs=60)


STAGES = [
    "tombstone put, manifest still there",
    "copy in trash, manifest still there",
    "manifest removed, packs still there",
]


@pytest.mark.parametrize("stage", STAGES)
def test_i2_a_removal_that_dies_anywhere_leaves_a_whole_repository(world, crash, monkeypatch, stage):
    gone, abandon = crash
    attempt = world.claim()
    old, new = world.save(attempt, 1), world.save(attempt, 2)
    before = world.names()
    with armed(stage, abandon), pytest.raises(gone):
        rm(world, old)
    assert_whole(world.reopened())
    assert latest(world.repo, "main") == new
    # The remover's process is gone, and the run's too; the next claim takes the tombstone back.
    world.die(attempt)
    monkeypatch.setattr(tombstones, "judge", lambda owner: "dead")
    if stage == STAGES[2]:
        assert not world.repo.exists(old)
        bring_back(world, old)
    claim.claim(world.repo, "main", new).release()
    assert world.repo.exists(old)
    assert not world.names("tombstones")
    world.store.advance(25 * 3600)
    gc.execute(world.repo, gc.plan_gc(world.repo))
    assert set(before) == {name for name in world.names() if not name.startswith("runs/main/a0002")}
    assert_whole(world.repo)


def test_an_undelete_that_dies_leaves_the_checkpoint(world, crash):
    gone, abandon = crash
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    before = world.names()
    rm(world, old)
    gc.execute(world.repo, gc.plan_gc(world.repo))
    with armed("manifest put back from trash, not yet checked", abandon), pytest.raises(gone):
        bring_back(world, old)
    assert world.repo.exists(old)
    assert_whole(world.repo)
    world.store.advance(30 * 3600)
    gc.execute(world.repo, gc.plan_gc(world.repo))
    assert world.names() == before
    put_ref(world.repo, "pin", "again", old)
    assert_whole(world.repo)


def test_undelete_gives_way_to_a_removal_that_is_at_work(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    tombstones.put_tombstone(world.repo, old, reason="rm")
    with pytest.raises(RepositoryError, match="being removed by another process"):
        bring_back(world, old)
    assert census_of(world.repo, old).state == "removed"


def test_undelete_takes_back_the_mark(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    before = world.names()
    rm(world, old)
    assert world.names("tombstones/gc")
    bring_back(world, old)
    assert world.names() == before
