"""Gc frees what nothing reaches, after its grace, and nothing else (I6)."""

from __future__ import annotations

import pytest

from tenuto.crashpoints import armed
from tenuto.errors import CheckpointNotFound, RepositoryError, StoreFull, Superseded
from tenuto.maintenance import remove, retention, undelete
from tenuto.maintenance.gc import execute, plan_gc
from tenuto.maintenance.verify import assert_whole
from tenuto.model.records import Manifest
from tenuto.policy import keep
from tenuto.repo import tombstones
from tenuto.repo.commit import commit
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import Aborted
from tenuto.repo.format.objects import checkpoint_json
from tenuto.repo.notes import add_note
from tenuto.repo.ownership.claim import claim
from tenuto.repo.refs import put_ref
from tenuto.repo.unfinished import abort

HOUR = 3600.0


def visit(world, **options):
    return execute(world.repo, plan_gc(world.repo, **options))


def rm(world, id):
    remove.execute(world.repo, remove.plan_remove(world.repo, [id]))


def test_two_visits_free_an_unfinished_save_of_a_dead_attempt(world):
    attempt = world.claim()
    kept = world.save(attempt, 1)
    before = world.names()
    open_save = world.save(attempt, 2, until="index")
    world.put(f"{open_save.directory}/rank-00000.safetensors.tmp-{'0' * 32}")
    world.die(attempt)
    first = visit(world)
    assert (first.marked, first.deleted) == ((open_save,), ())
    world.store.advance(23 * HOUR)
    second = visit(world)
    assert (second.marked, second.deleted) == ((), ())
    world.store.advance(2 * HOUR)
    plan = plan_gc(world.repo)
    assert plan.bytes > 4396
    assert f"{open_save}  delete: a save that its process never finished" in str(plan)
    third = execute(world.repo, plan)
    assert third.deleted == (open_save,)
    assert third.bytes == plan.bytes
    # The aborted mark stays: nobody can commit what is gone.
    assert world.names() == sorted([*before, open_save.manifest])
    assert isinstance(world.repo.mark(open_save), Aborted)
    assert world.repo.committed("main", 1) == [kept.step]
    assert visit(world).marked == ()
    assert_whole(world.repo)


def test_what_an_aborted_save_left_without_its_begin_json_is_freed_by_its_form(world):
    """A power loss after a failed flush can bring back what was freed, and not what listed it."""
    attempt = world.claim()
    saved = world.save(attempt, 1, until="index")
    world.die(attempt)
    abort(world.repo, saved, "0" * 32)
    world.store.delete([object_names.begin_name(saved)])
    for file in ("boxes.index", "rank-00001.01.safetensors", "my-notes.txt", "rank-1.index"):
        world.put(f"{saved.directory}/{file}")
    visit(world)
    world.store.advance(25 * HOUR)
    assert visit(world).deleted == (saved,)
    assert [name.rpartition("/")[2] for name in world.names() if name.startswith(saved.directory)] == [
        "manifest.json",
        "my-notes.txt",
        "rank-1.index",
    ]
    assert visit(world).marked == ()


@pytest.mark.parametrize("until", ["begin", "pack", "index"])
def test_i6_a_live_save_is_never_touched(world, until):
    attempt = world.claim()
    world.save(attempt, 1, until=until)
    before = world.names()
    for _ in range(3):
        report = visit(world)
        assert report.marked == report.deleted == ()
        world.store.advance(100 * HOUR)
    assert world.names() == before
    assert "still be saving" in str(plan_gc(world.repo))


def test_i6_a_save_that_comes_to_life_after_the_mark_is_spared(world):
    attempt = world.claim()
    open_save = world.save(attempt, 1, until="index")
    world.die(attempt)
    visit(world)
    world.store.advance(30 * HOUR)
    plan = plan_gc(world.repo)
    name = "refs/hold/late/1.json"
    body = {"created": "", "id": "0" * 32, "to": checkpoint_json(open_save)}
    world.put(name, objects.encode("ref", name, body, world.repo.id))
    report = execute(world.repo, plan)
    assert report.deleted == ()
    assert report.spared == ((open_save, "a ref names it"),)
    assert world.names(open_save.directory)


def test_a_removed_checkpoint_goes_after_its_grace_and_not_before(world):
    attempt = world.claim()
    old, new = world.save(attempt, 1), world.save(attempt, 2)
    add_note(world.repo, old, "metric", {"loss": 1.0})
    rm(world, old)
    world.store.advance(24.9 * HOUR)
    assert visit(world).deleted == ()
    world.store.advance(0.2 * HOUR)
    report = visit(world)
    assert report.deleted == (old,)
    assert world.names(old.directory) == [old.manifest]
    assert world.names("trash") == world.names("tombstones") == []
    with pytest.raises(CheckpointNotFound):
        undelete.plan_undelete(world.repo, old)
    assert world.repo.committed("main", 1) == [new.step]
    assert_whole(world.repo)


def test_i6_an_undelete_between_the_plan_and_the_deletion_wins(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    before = undelete.plan_undelete(world.repo, old)
    plan = plan_gc(world.repo, grace_s=0.0)
    assert plan.garbage[0].due
    undelete.execute(world.repo, before)
    report = execute(world.repo, plan)
    assert report.spared == ((old, "it has a manifest"),)
    assert world.repo.exists(old)
    assert_whole(world.repo)


def test_i6_an_undelete_that_comes_at_the_last_moment_wins_or_loses_whole(world):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    data = world.store.get(world.names("trash")[0], limit=10**6)
    with armed("tombstone put, manifest still there", lambda: world.put(old.manifest, data)):
        visit(world, grace_s=0.0)
    assert world.repo.exists(old)
    assert_whole(world.repo)


def test_what_gc_frees_while_an_undelete_reads_it_is_gone_and_not_damaged(world, monkeypatch):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    plan, inspect = undelete.plan_undelete(world.repo, old), undelete.inspect

    def freed_first(*arguments):
        assert visit(world, now=True).deleted == (old,)
        return inspect(*arguments)

    monkeypatch.setattr(undelete, "inspect", freed_first)
    with pytest.raises(CheckpointNotFound, match="cannot be brought back: its space has been freed"):
        undelete.execute(world.repo, plan)
    assert_whole(world.repo)


@pytest.mark.parametrize("jump_s", [-HOUR, 24 * HOUR])
def test_a_stores_clock_that_jumps_costs_no_more_than_the_grace(world, jump_s):
    """An hour back: what lies in the trash waits longer. A day forward: it can be brought back no more, and stays for
    the hour after its grace; what is removed from then on has a grace of its own."""
    attempt = world.claim()
    before, after, _ = (world.save(attempt, step) for step in (1, 2, 3))
    rm(world, before)
    world.store.advance(jump_s)
    rm(world, after)
    assert visit(world).deleted == (), "nothing goes by the jump alone"
    if jump_s < 0:
        undelete.execute(world.repo, undelete.plan_undelete(world.repo, before))
    else:
        with pytest.raises(RepositoryError, match="more than 24 h 00 min ago"):
            undelete.plan_undelete(world.repo, before)
    undelete.execute(world.repo, undelete.plan_undelete(world.repo, after))
    world.store.advance(-jump_s)
    rm(world, after)
    assert visit(world).deleted == () and world.repo.exists(before) == (jump_s < 0)
    undelete.execute(world.repo, undelete.plan_undelete(world.repo, after))
    assert_whole(world.repo)


def test_a_late_commit_of_a_collected_save_fails(world):
    attempt = world.claim()
    open_save = world.save(attempt, 1, until="index")
    world.die(attempt)
    visit(world, grace_s=0.0)
    visit(world, grace_s=0.0)
    manifest = Manifest(open_save, "0" * 32, None, (), "0" * 64, 0, 0, 64)
    with pytest.raises(Superseded):
        commit(world.repo, manifest, [])


def test_i6_foreign_copied_and_damaged_things_stay(world):
    attempt = world.claim()
    id = world.save(attempt, 1)
    open_save = world.save(attempt, 2, until="pack")
    damaged_begin = world.save(attempt, 3, until="pack")
    damaged_manifest = world.save(attempt, 4)
    world.flip(object_names.begin_name(damaged_begin), 30)
    world.flip(damaged_manifest.manifest, 30)
    world.die(attempt)
    for foreign in ("README", "runs/notes.txt", "runs/main/plot.png", f"{open_save.directory}/mine.bin", "trash/x.json",
                    "trash/main/a0001/step-00000001/mine.json", "tombstones/main/a0001/step-00000002/mine.json",
                    f"{open_save.directory}/notes/one.json", "runs/main/a0001/step-00000002x/rank-00000.safetensors",
                    f"{open_save.directory}/mine.bin.tmp-abc", f"{id.directory}/mine.bin.tmp-abc",
                    "runs/Main/a0001/step-00000001/begin.json"):  # fmt: skip
        world.put(foreign)
    world.copy(open_save.directory, "runs/main/a0001/step-00000077")
    world.copy("runs/main/a0001", "runs/main/a0009")
    world.copy("runs/main", "runs/copied")
    before = world.names()
    visit(world, finished={"main": 1})
    world.store.advance(50 * HOUR)
    report = visit(world, finished={"main": 1})
    assert report.deleted == (open_save,)
    gone = set(before) - set(world.names())
    assert gone == {object_names.begin_name(open_save), f"{open_save.directory}/rank-00000.safetensors"}


def test_temporaries_that_outlived_their_puts_go(world):
    attempt = world.claim()
    id = world.save(attempt, 1)
    names = [
        f"{id.directory}/rank-00000.safetensors.tmp-{'1' * 32}",
        f"{id.manifest}.tmp-{'1' * 32}",
        f"runs/main/a0002/attempt.json.tmp-{'2' * 32}",
        f"runs/main/a0001/lease/5.json.tmp-{'2' * 32}",
        f"refs/pin/x/1.json.tmp-{'3' * 32}",
    ]
    before = world.names()
    for name in names:
        world.put(name)
    visit(world)
    assert set(names) <= set(world.names())
    world.store.advance(25 * HOUR)
    fresh = f"refs/pin/x/2.json.tmp-{'3' * 32}"
    world.put(fresh)
    visit(world)
    assert world.names() == sorted([*before, fresh])


def test_an_aborted_save_of_a_process_that_may_still_put_is_visited_again(world):
    attempt = world.claim()
    open_save = world.save(attempt, 1, until="pack")
    abort(world.repo, open_save, "0" * 32)
    visit(world)
    world.store.advance(25 * HOUR)
    assert visit(world).deleted == (open_save,)
    assert world.names(open_save.directory) == [object_names.begin_name(open_save), open_save.manifest]
    world.put(f"{open_save.directory}/rank-00000.index", b"late")
    world.die(attempt)
    visit(world)
    world.store.advance(25 * HOUR)
    visit(world)
    assert world.names(open_save.directory) == [open_save.manifest]


@pytest.mark.parametrize("stage", ["tombstone put, manifest still there", "objects swept, copy in trash still there"])
def test_i6_a_gc_that_dies_is_finished_by_the_next(world, crash, stage):
    gone, abandon = crash
    attempt = world.claim()
    old, new = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    visit(world)
    world.store.advance(25 * HOUR)
    with armed(stage, abandon), pytest.raises(gone):
        visit(world)
    assert_whole(world.reopened())
    for _ in range(2):
        visit(world)
        world.store.advance(25 * HOUR)
    assert world.names(old.directory) == [old.manifest]
    assert world.names("trash") == []
    assert world.names("tombstones/gc") == []
    assert world.repo.committed("main", 1) == [new.step]
    assert_whole(world.repo)


def test_planning_leaves_nothing_behind(world):
    attempt = world.claim()
    world.save(attempt, 1)
    world.save(attempt, 2, until="pack")
    world.die(attempt)
    before = world.names()
    plan_gc(world.repo)
    assert world.names() == before


def test_a_pinned_checkpoint_in_the_trash_is_kept(world):
    # rm refuses a pinned one; a person may have moved the manifest by hand, or an old version been less careful.
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    put_ref(world.repo, "pin", "keep", old)
    data = world.store.place.objects.pop(old.manifest)[0]
    world.put(f"{object_names.trash_directory(old)}/{'0' * 32}.json", data)
    visit(world, grace_s=0.0)
    assert visit(world, grace_s=0.0).deleted == ()
    assert undelete.execute(world.repo, undelete.plan_undelete(world.repo, old)).id == old


def test_the_tombstone_of_a_dead_remover_holds_nobody_up_after_gc(world, crash, monkeypatch):
    gone, abandon = crash
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    with armed("tombstone put, manifest still there", abandon), pytest.raises(gone):
        rm(world, old)
    with pytest.raises(CheckpointNotFound):
        put_ref(world.repo, "pin", "keep", old)
    visit(world)
    assert world.names("tombstones"), "its remover may live"
    monkeypatch.setattr(tombstones, "judge", lambda owner: "dead")
    visit(world)
    assert world.names("tombstones") == []
    put_ref(world.repo, "pin", "keep", old)


def test_a_fork_is_not_held_up_by_a_removal_that_died_in_the_other_run(world, crash, monkeypatch):
    gone, abandon = crash
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    with armed("tombstone put, manifest still there", abandon), pytest.raises(gone):
        rm(world, old)
    monkeypatch.setattr(tombstones, "judge", lambda owner: "dead")
    claim(world.repo, "fork", old).release()
    assert world.names("tombstones") == []


def test_i6_a_tombstone_taken_back_spares_the_save(world):
    attempt = world.claim()
    open_save = world.save(attempt, 1, until="index")
    world.die(attempt)
    visit(world)
    world.store.advance(25 * HOUR)

    def take_back() -> None:
        for name in world.names("tombstones/main"):
            world.lose(name)

    with armed("tombstone put, manifest still there", take_back):
        assert visit(world).deleted == ()
    assert world.names(f"{open_save.directory}/rank")


def test_an_unfinished_save_of_a_superseded_attempt_goes_while_the_run_lives(world):
    first = world.claim()
    open_save = world.save(first, 1, until="index")
    world.die(first)
    world.claim()
    visit(world)
    world.store.advance(25 * HOUR)
    assert visit(world).deleted == (open_save,)


def test_a_tombstone_that_tells_where_to_go_on_stays_until_nothing_is_left(world, crash, monkeypatch):
    gone, abandon = crash
    attempt = world.claim()
    for step in (1, 2):
        world.save(attempt, step)
    with armed("manifest removed, packs still there", abandon), pytest.raises(gone):
        retention.execute(world.repo, attempt, retention.plan_retention(world.repo, attempt, keep.latest(1)))
    world.die(attempt)
    monkeypatch.setattr(tombstones, "judge", lambda owner: "dead")
    visit(world)
    assert world.names("tombstones/main")
    world.store.advance(25 * HOUR)
    visit(world)
    visit(world)
    assert world.names("tombstones") == []
    assert world.names("runs/main/a0001/step-00000001/") == ["runs/main/a0001/step-00000001/manifest.json"]


def test_now_frees_in_one_visit_what_nothing_reaches(world):
    dead = world.claim(alive=False)
    unfinished = world.save(dead, 1, until="pack")
    attempt = world.claim()
    removed, kept = world.save(attempt, 2), world.save(attempt, 3)
    rm(world, removed)
    live = world.save(attempt, 4, until="pack")
    before = world.names(live.directory)
    report = visit(world, now=True)
    assert report.deleted == (unfinished, removed)
    assert report.bytes > 0
    assert world.names("trash") == world.names("tombstones") == []
    assert [name for name in world.names(removed.directory) if name != removed.manifest] == []
    assert world.names(live.directory) == before  # its process may still be saving it
    assert world.repo.committed("main", attempt.number) == [kept.step]
    assert_whole(world.repo)


@pytest.mark.parametrize("trouble", ["suspect", "pack lost", "manifest damaged", "removed"])
def test_i3_now_leaves_the_last_that_can_be_restored(world, trouble):
    attempt = world.claim()
    older, old, new = (world.save(attempt, step) for step in (1, 2, 3))
    rm(world, older)
    rm(world, old)
    if trouble == "suspect":
        add_note(world.repo, new, "suspect", {})
    elif trouble == "pack lost":
        world.lose(next(name for name in world.names(new.directory) if name.endswith(".safetensors")))
    elif trouble == "manifest damaged":
        world.flip(new.manifest, 5)
    else:
        world.die(attempt)
        remove.execute(world.repo, remove.plan_remove(world.repo, [new], force=True, finished={"main": 1}))
    last = new if trouble == "removed" else old
    plan = plan_gc(world.repo, now=True)
    (reason,) = [why for id, why in plan.kept if id == last]
    assert (
        reason.startswith("the last of run main that can be restored") and f"tenuto undelete {world.repo.url}" in reason
    )
    report = execute(world.repo, plan)
    assert set(report.deleted) == {older, old} - {last}
    assert undelete.execute(world.repo, undelete.plan_undelete(world.repo, last)).id == last
    rm_again = remove.plan_remove(world.repo, [last], force=True, finished={"main": 1})
    world.die(attempt)
    remove.execute(world.repo, rm_again)
    assert visit(world, now=True, force=True).deleted == (last,)


class FullStore:
    """Refuses every put, as a disk without a byte does, until something was deleted."""

    def __init__(self, world, room=0):
        self.world, self.room, self.put = world, room, world.store.put_if_absent

    def put_if_absent(self, name, content, *, token):
        if self.room < 1:
            raise StoreFull(f"no space for {name}", subject=name)
        self.room -= 1
        return self.put(name, content, token=token)

    def delete(self, names):
        there = [name for name in names if name in self.world.store.place.objects]
        self.room += len(there)
        for name in there:
            self.world.lose(name)


@pytest.fixture
def full(world, monkeypatch):
    def fill():
        store = FullStore(world)
        monkeypatch.setattr(world.store, "put_if_absent", store.put_if_absent)
        monkeypatch.setattr(world.store, "delete", store.delete)
        return store

    return fill


def test_now_frees_the_trash_on_a_disk_without_a_byte(world, full):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    rm(world, ids[0])
    rm(world, ids[1])
    full()
    report = visit(world, now=True)
    assert report.deleted == (ids[0], ids[1]) and report.spared == ()
    assert world.names("trash") == world.names("tombstones") == []
    assert world.repo.committed("main", 1) == [3]
    assert_whole(world.repo)
    with pytest.raises(CheckpointNotFound):
        undelete.plan_undelete(world.repo, ids[0])


def test_i6_an_undelete_that_has_begun_wins_over_now_on_a_disk_without_a_byte(world, full, monkeypatch):
    attempt = world.claim()
    old, _ = world.save(attempt, 1), world.save(attempt, 2)
    rm(world, old)
    data = world.store.get(world.names("trash")[0], limit=10**6)
    plan = plan_gc(world.repo, now=True)
    store = full()
    delete = store.delete

    def brought_back(names):
        delete(names)
        if any(name.startswith("trash/") for name in names):
            world.put(old.manifest, data)  # an undelete had read the copy already

    monkeypatch.setattr(world.store, "delete", brought_back)
    assert execute(world.repo, plan).spared == ((old, "it has a manifest"),)
    assert world.repo.exists(old)
    assert_whole(world.repo)
