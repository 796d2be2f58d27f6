"""Retention frees what the policy lets go of, and never what I7 protects."""

from __future__ import annotations

import pytest

from tenuto.crashpoints import armed
from tenuto.errors import StoreFull, StoreUnavailable
from tenuto.events import Emitter, Event, Removed
from tenuto.maintenance import remove, retention, undelete
from tenuto.maintenance.gc import free_expired
from tenuto.maintenance.retention import execute, plan_retention
from tenuto.maintenance.verify import assert_whole
from tenuto.policy import keep
from tenuto.policy.keep import KeepPolicy, Opinion
from tenuto.repo import tombstones
from tenuto.repo.format import object_names
from tenuto.repo.lineage import latest, walk
from tenuto.repo.notes import add_note
from tenuto.repo.ownership import claim
from tenuto.repo.refs import put_ref


class Nothing(KeepPolicy):
    """Keeps nothing: what stays is what I7 keeps."""

    def judge(self, history):
        return [Opinion(False, "nothing is kept") for _ in history]


def retain(world, attempt, policy=None, **options):
    return execute(world.repo, attempt, plan_retention(world.repo, attempt, policy or Nothing()), **options)


def there(world, run="main"):
    return [(n, s) for n in world.repo.attempts(run) for s in sorted(world.repo.committed(run, n))]


def test_what_goes_goes_without_a_trace(world):
    attempt = world.claim()
    attempt_name = object_names.attempt_name("main", 1)
    for step in range(1, 6):
        id = world.save(attempt, step)
        add_note(world.repo, id, "metric", {"loss": float(step)})
    removed = retain(world, attempt, keep.latest(2))
    assert [id.step for id in removed] == [1, 2, 3]
    assert there(world) == [(1, 4), (1, 5)]
    dirs = {name.rpartition("/")[0].removesuffix("/notes") for name in world.names("runs") if name != attempt_name}
    assert dirs == {"runs/main/a0001/step-00000004", "runs/main/a0001/step-00000005"}
    assert world.names("tombstones") == world.names("trash") == []
    assert_whole(world.repo)


def test_a_note_that_comes_while_its_checkpoint_goes_goes_with_it(world, monkeypatch):
    attempt = world.claim()
    for step in (1, 2):
        world.save(attempt, step)
    still_there = retention.still_there

    def noted_meanwhile(repo, stones):
        for stone in stones:
            add_note(repo, stone.id, "metric", {"loss": 1.0})
        return still_there(repo, stones)

    monkeypatch.setattr(retention, "still_there", noted_meanwhile)
    assert [id.step for id in retain(world, attempt, keep.latest(1))] == [1]
    assert not [name for name in world.names("runs") if "step-00000001" in name]
    assert_whole(world.repo)


def test_the_plan_says_why(world):
    attempt = world.claim()
    for step in range(1, 4):
        world.save(attempt, step)
    plan = plan_retention(world.repo, attempt, keep.latest(1))
    text = str(plan)
    assert "main/a0001/3  kept: what latest means" in text
    assert "main/a0001/1  removed: not among the newest" in text
    assert [id.step for id in plan.dropped] == [1, 2]
    assert sum(nbytes for _, nbytes in plan.bytes) == 2 * 4396


def test_removals_are_told(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2)]
    seen: list[Event] = []

    class Sink:
        def emit(self, event: Event) -> None:
            seen.append(event)

    retain(world, attempt, keep.latest(1), emitter=Emitter.of([Sink()]))
    assert seen == [Removed(ids[0], "not among the newest", world.repo.url)]


def test_metrics_logged_and_noted_are_judged(world):
    attempt = world.claim()
    ids = [world.save(attempt, step, metrics={"loss": loss}) for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 9.0))]
    add_note(world.repo, ids[0], "metric", {"loss": 0.5})
    retain(world, attempt, keep.best(1, "loss"))
    assert there(world) == [(1, 1), (1, 4)]


def test_i7_latest_stays_whatever_the_policy_says(world):
    attempt = world.claim()
    for step in (1, 2, 3):
        world.save(attempt, step)
    retain(world, attempt)
    assert there(world) == [(1, 3)]


def test_i7_the_last_verified_on_the_walk_stays(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3, 4)]
    for id in ids[:3]:
        add_note(world.repo, id, "verified", {})
    add_note(world.repo, ids[2], "suspect", {})
    retain(world, attempt)
    assert there(world) == [(1, 2), (1, 4)]


@pytest.mark.parametrize("kind", ["pin", "hold", "tag"])
def test_i7_what_a_ref_names_stays(world, kind):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    put_ref(world.repo, kind, "paper", ids[0])
    retain(world, attempt)
    assert there(world) == [(1, 1), (1, 3)]


def test_i7_what_a_fork_goes_on_from_stays_until_the_fork_has_saved(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3, 4)]
    add_note(world.repo, ids[0], "verified", {})
    add_note(world.repo, ids[3], "verified", {})
    fork = world.claim("other", parent=ids[1])
    retain(world, attempt)
    # Latest of the fork, and the last verified one that the fork has.
    assert there(world) == [(1, 1), (1, 2), (1, 4)]
    world.save(fork, 3)
    retain(world, attempt)
    assert there(world) == [(1, 1), (1, 4)]


def test_i7_who_comes_to_need_it_after_the_plan_is_seen(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    plan = plan_retention(world.repo, attempt, Nothing())
    put_ref(world.repo, "pin", "late", ids[0])
    add_note(world.repo, ids[1], "verified", {})
    assert execute(world.repo, attempt, plan) == ()
    assert there(world) == [(1, 1), (1, 2), (1, 3)]
    assert world.names("tombstones") == []


def test_i11_a_superseded_attempt_removes_nothing(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    plan = plan_retention(world.repo, attempt, Nothing())
    world.claim(parent=ids[0])
    assert execute(world.repo, attempt, plan) == ()
    assert there(world) == [(1, 1), (1, 2), (1, 3)]
    assert world.names("tombstones") == []
    after = plan_retention(world.repo, attempt, Nothing())
    assert after.superseded
    assert after.dropped == ()


def test_i11_an_attempt_claimed_after_the_tombstones_is_seen(world):
    attempt = world.claim()
    for step in (1, 2, 3):
        world.save(attempt, step)
    with armed("tombstone put, manifest still there", lambda: world.claim(parent=None)):
        assert retain(world, attempt) == ()
    assert there(world) == [(1, 1), (1, 2), (1, 3)]


def test_i11_a_copied_directory_supersedes_nobody(world):
    attempt = world.claim()
    for step in (1, 2):
        world.save(attempt, step)
    world.copy("runs/main/a0001", "runs/main/a0005")
    copied = world.names("runs/main/a0005")
    assert len(retain(world, attempt)) == 1
    assert world.names("runs/main/a0005") == copied


def test_another_runs_checkpoints_are_never_touched(world):
    other = world.claim("other")
    first = world.save(other, 1)
    world.save(other, 2)
    attempt = world.claim(parent=first)
    assert retain(world, attempt) == ()
    world.save(attempt, 2)
    world.save(attempt, 3)
    retain(world, attempt)
    assert there(world, "other") == [(1, 1), (1, 2)]
    assert there(world) == [(1, 3)]


def test_lines_left_behind_go_as_the_policy_says(world):
    first = world.claim()
    ids = [world.save(first, step) for step in (1, 2, 3)]
    world.die(first)
    second = world.claim(parent=ids[0])
    world.save(second, 2)
    retain(world, second, keep.latest(2))
    assert there(world) == [(1, 1), (2, 2)]
    assert [id.step for id in walk(world.repo, "main")] == [2, 1]


def in_trash(world):
    return sorted({int(name.split("/")[3][5:]) for name in world.names("trash")})


def left_behind(world, steps=(1, 2, 3), metrics=None):
    """A line of training that was left behind, and the attempt that has started over."""
    first = world.claim()
    ids = [world.save(first, step, metrics=(metrics or {}).get(step)) for step in steps]
    world.die(first)
    return ids, world.claim()


def test_the_newest_of_a_line_left_behind_can_be_brought_back_for_a_day(world):
    ids, second = left_behind(world)
    heard: list[Event] = []
    emitter = Emitter((type("Sink", (), {"emit": lambda self, event: heard.append(event)})(),))
    for step in (1, 2, 3):
        world.save(second, step)
        retain(world, second, keep.latest(3), emitter=emitter)
    assert there(world) == [(2, 1), (2, 2), (2, 3)]
    assert in_trash(world) == [3]
    assert_whole(world.repo)
    told = [event.reason for event in heard if isinstance(event, Removed)]
    assert [f"tenuto undelete {world.repo.url} main/a0001/3 brings it back" in why for why in told] == [0, 0, 1]
    world.store.advance(23.9 * 3600)
    assert free_expired(world.repo, "main", by="retention") == ()
    assert undelete.execute(world.repo, undelete.plan_undelete(world.repo, ids[2])).id == ids[2]
    assert there(world) == [(1, 3), (2, 1), (2, 2), (2, 3)]
    assert_whole(world.repo)


def test_what_retention_put_into_the_trash_is_freed_by_retention_a_day_later(world):
    ids, second = left_behind(world)
    by_hand = world.save(second, 1)
    world.save(second, 2)
    remove.execute(world.repo, remove.plan_remove(world.repo, [by_hand]))
    retain(world, second)
    assert in_trash(world) == [1, 3]
    world.store.advance(25.1 * 3600)
    assert free_expired(world.repo, "main", by="retention") == (ids[2],)
    assert in_trash(world) == [1]  # a person's removal waits for a person's gc
    assert world.names(ids[2].directory) == [ids[2].manifest]
    assert_whole(world.repo)


@pytest.mark.parametrize("at", ["manifest removed, packs still there", "copy in trash, manifest still there"])
def test_what_a_remover_that_died_left_in_the_trash_is_freed_too(world, crash, at):
    gone, abandon = crash
    ids, second = left_behind(world, steps=(3,))
    world.save(second, 1)
    with armed(at, abandon), pytest.raises(gone):
        retain(world, second)
    world.die(second)
    third = world.claim()
    world.save(third, 2)
    retain(world, third, keep.latest(1))
    assert in_trash(world) == [1, 3]  # each the newest of a line that was left behind
    assert free_expired(world.repo, "main", by="retention") == ()
    world.store.advance(23.9 * 3600)
    assert undelete.plan_undelete(world.repo, ids[0]).bytes > 0
    world.store.advance(1.2 * 3600)
    assert set(free_expired(world.repo, "main", by="retention")) >= {ids[0]}
    assert 3 not in in_trash(world)
    assert_whole(world.repo)


def test_what_a_freeing_that_died_left_in_the_trash_is_freed_too(world, crash):
    gone, abandon = crash
    ids, second = left_behind(world, steps=(3,))
    world.save(second, 1)
    retain(world, second)
    world.store.advance(25.1 * 3600)
    with armed("objects swept, copy in trash still there", abandon), pytest.raises(gone):
        free_expired(world.repo, "main", by="retention")
    assert in_trash(world) == [3]
    free_expired(world.repo, "main", by="retention")
    assert in_trash(world) == []
    assert world.names(ids[0].directory) == [ids[0].manifest]
    assert_whole(world.repo)


def test_the_best_and_the_last_verified_of_a_line_left_behind_get_a_day_too(world):
    losses = {1: {"loss": 0.1}, 2: {"loss": float("nan")}, 3: {"loss": 0.3}, 4: {"loss": 0.2}}
    ids, second = left_behind(world, steps=(1, 2, 3, 4), metrics=losses)
    add_note(world.repo, ids[1], "verified", {})
    world.save(second, 5, metrics={"loss": 0.01})
    world.save(second, 6, metrics={"loss": 0.02})
    retain(world, second, keep.best(1, "loss"))
    assert there(world) == [(2, 5), (2, 6)]
    assert in_trash(world) == [1, 2, 4]


def test_of_each_line_left_behind_the_newest_gets_a_day(world):
    first = world.claim()
    ids = [world.save(first, step) for step in (1, 2, 3, 4)]
    world.die(first)
    second = world.claim(parent=ids[1])  # leaves 3 and 4 behind
    middle = [world.save(second, step) for step in (5, 6)]
    world.die(second)
    third = world.claim(parent=ids[0])  # leaves 2, 5 and 6 behind
    world.save(third, 7)
    retain(world, third)
    assert there(world) == [(3, 7)]
    assert in_trash(world) == [4, middle[1].step]


def test_a_damaged_newest_goes_at_once_and_the_one_before_gets_a_day(world):
    ids, second = left_behind(world)
    add_note(world.repo, ids[2], "suspect", {})
    world.save(second, 4)
    retain(world, second)
    assert in_trash(world) == [2]


def test_of_the_current_line_nothing_goes_through_the_trash(world):
    attempt = world.claim()
    for step in (1, 2, 3):
        world.save(attempt, step)
    retain(world, attempt)
    assert there(world) == [(1, 3)] and in_trash(world) == []


@pytest.mark.parametrize(("grace", "expected"), [("all", [1, 2, 3]), ("none", [])])
def test_retain_by_a_person_puts_all_or_nothing_into_the_trash(world, grace, expected):
    ids, second = left_behind(world)
    world.save(second, 4)
    world.die(second)
    plan, removed = retention.retain(world.repo, "main", Nothing(), grace=grace)
    assert removed == plan.dropped == tuple(ids)
    assert in_trash(world) == expected
    assert_whole(world.repo)


def test_a_full_disk_keeps_what_should_go_into_the_trash_and_frees_the_rest(world, monkeypatch):
    ids, second = left_behind(world)
    world.save(second, 4)
    put = world.store.put_if_absent

    def full_for_trash(name, content, *, token):
        if name.startswith("trash/"):
            raise StoreFull("no space", subject=name)
        return put(name, content, token=token)

    monkeypatch.setattr(world.store, "put_if_absent", full_for_trash)
    assert retain(world, second) == (ids[0], ids[1])
    assert there(world) == [(1, 3), (2, 4)]
    assert world.names("tombstones") == []
    monkeypatch.undo()
    assert retain(world, second) == (ids[2],)
    assert in_trash(world) == [3]


@pytest.mark.parametrize(
    "stage",
    [
        "tombstone put, manifest still there",
        "copy in trash, manifest still there",
        "manifest removed, packs still there",
    ],
)
def test_i2_i7_a_move_into_the_trash_that_dies_anywhere_loses_nothing(world, crash, monkeypatch, stage):
    gone, abandon = crash
    ids, second = left_behind(world, steps=(3,))
    new = world.save(second, 4)
    with armed(stage, abandon), pytest.raises(gone):
        retain(world, second)
    assert_whole(world.reopened())
    world.die(second)
    monkeypatch.setattr(tombstones, "judge", lambda owner: "dead")
    claimed = claim.claim(world.repo, "main", new)
    try:
        retain(world, claimed)
    finally:
        claimed.release()
    assert there(world) == [(2, 4)] and in_trash(world) == [3]
    assert undelete.execute(world.repo, undelete.plan_undelete(world.repo, ids[0])).id == ids[0]
    assert_whole(world.repo)


def test_foreign_files_and_open_saves_stay(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    world.save(attempt, 2)
    open_save = world.save(attempt, 3, until="pack")
    world.put(f"{first.directory}/mine.txt")
    before = world.names(open_save.directory)
    retain(world, attempt)
    assert world.names(first.directory) == [f"{first.directory}/mine.txt"]
    assert world.names(open_save.directory) == before


def test_a_tombstone_taken_back_spares_the_checkpoint(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]

    def take_back() -> None:
        for name in world.names(f"tombstones/main/a0001/{ids[0].directory.rpartition('/')[2]}"):
            world.lose(name)

    with armed("tombstone put, manifest still there", take_back):
        retain(world, attempt)
    assert there(world) == [(1, 1), (1, 3)]


def test_a_checkpoint_without_begin_is_freed_by_its_index(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2)]
    world.lose(object_names.begin_name(ids[0]))
    retain(world, attempt)
    assert world.names(ids[0].directory) == []


@pytest.mark.parametrize(
    "stage",
    ["tombstone put, manifest still there", "manifest removed, packs still there", "packs removed, notes still there"],
)
def test_i2_i7_a_retention_that_dies_anywhere_is_finished_by_the_next_claim(world, crash, monkeypatch, stage):
    gone, abandon = crash
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    add_note(world.repo, ids[0], "metric", {"loss": 1.0})
    with armed(stage, abandon), pytest.raises(gone):
        retain(world, attempt, keep.latest(1))
    assert_whole(world.reopened())
    assert latest(world.repo, "main") == ids[2]
    world.die(attempt)
    monkeypatch.setattr(tombstones, "judge", lambda owner: "dead")
    claimed = claim.claim(world.repo, "main", ids[2])
    try:
        assert world.names("tombstones") == []
        retain(world, claimed, keep.latest(1))
    finally:
        claimed.release()
    assert there(world) == [(1, 3)]
    for id in ids[:2]:
        assert world.names(id.directory) in ([], [id.manifest])
    assert_whole(world.repo)


def test_i7_what_a_fork_would_fall_back_to_stays(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3, 4)]
    world.claim("other", parent=ids[2])
    add_note(world.repo, ids[2], "suspect", {})
    retain(world, attempt)
    # Latest of the fork is known to be damaged: a restore of it goes on to the one below.
    assert there(world) == [(1, 2), (1, 3), (1, 4)]


def test_i7_one_verified_before_its_manifest_was_damaged_is_not_the_last_verified(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    for id in ids[:2]:
        add_note(world.repo, id, "verified", {})
    world.flip(ids[1].manifest)
    retain(world, attempt)
    assert (1, 1) in there(world)


def test_retain_by_somebody_who_does_not_train(world):
    from tenuto.errors import RunInUse
    from tenuto.maintenance.retention import preview
    from tenuto.maintenance.retention import retain as apply

    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    assert [id.step for id in preview(world.repo, "MAIN", keep.latest(1)).dropped] == [1, 2]
    with pytest.raises(RunInUse):
        apply(world.repo, "main", keep.latest(1))
    assert there(world) == [(1, 1), (1, 2), (1, 3)]
    world.die(attempt)
    plan, removed = apply(world.repo, "main", keep.latest(1))
    assert (plan.attempt, removed) == (2, tuple(ids[:2]))
    assert there(world) == [(1, 3)] and latest(world.repo, "main") == ids[2]
    assert apply(world.repo, "main", keep.latest(1))[1] == ()
    assert world.repo.attempts("main") == [1, 2]


@pytest.mark.parametrize("when", ["before the claim is put", "after it"])
def test_i4_retain_goes_on_from_what_was_committed_while_it_claimed(world, monkeypatch, when):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    manifest = world.store.place.objects.pop(ids[2].manifest)
    world.die(attempt)

    put_claim = claim.claim

    def meanwhile(repo, run, parent, *, before_put, **options):
        def committing():
            if when == "after it":
                before_put()
            world.store.place.objects.setdefault(ids[2].manifest, manifest)
            if when != "after it":
                before_put()

        return put_claim(repo, run, parent, before_put=committing, **options)

    monkeypatch.setattr(claim, "claim", meanwhile)
    plan, removed = retention.retain(world.repo, "main", keep.latest(1))
    assert removed == tuple(ids[:2]) and there(world) == [(1, 3)]
    assert plan.attempt == (2 if when == "before the claim is put" else 3)
    assert latest(world.repo, "main") == ids[2]


def test_i7_the_second_look_knows_what_is_damaged(world):
    """Between plan and removal the fallback is found damaged too: the next whole one then has to stay."""
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3, 4)]
    world.flip(ids[3].manifest)
    plan = plan_retention(world.repo, attempt, Nothing())
    assert [id.step for id in plan.dropped] == [1, 2]
    add_note(world.repo, ids[2], "suspect", {})
    assert [id.step for id in execute(world.repo, attempt, plan)] == [1]
    assert there(world) == [(1, 2), (1, 3), (1, 4)]


@pytest.mark.parametrize("stage", ["manifest removed, packs still there", "packs removed, notes still there"])
def test_a_removal_that_a_full_disk_breaks_off_is_no_damage_and_the_next_claim_ends_it(world, monkeypatch, stage):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2, 3)]
    for id in ids:
        add_note(world.repo, id, "metric", {"loss": 1.0})

    def full():
        raise StoreFull("no room", subject="the disk")

    with armed(stage, full), pytest.raises(StoreFull):
        retain(world, attempt, keep.latest(1))
    assert there(world) == [(1, 2), (1, 3)]
    (stone,) = world.names("tombstones")
    assert "step-00000001" in stone, "it speaks of the one whose removal had begun, and of no other"
    assert_whole(world.repo)
    world.die(attempt)
    monkeypatch.setattr(tombstones, "judge", lambda owner: "dead")
    claim.claim(world.repo, "main", ids[2]).release()
    assert world.names("tombstones") == []
    assert world.names(ids[0].directory) in ([], [ids[0].manifest])
    assert_whole(world.repo)


def test_a_full_disk_frees_what_could_be_announced(world, monkeypatch):
    attempt = world.claim()
    for step in (1, 2, 3, 4):
        world.save(attempt, step)
    room = iter([True, False])
    put = retention.put_tombstone

    def put_where_there_is_room(*words, **more):
        if not next(room, False):
            raise StoreFull("no room", subject="the disk")
        return put(*words, **more)

    monkeypatch.setattr(retention, "put_tombstone", put_where_there_is_room)
    assert [id.step for id in retain(world, attempt, keep.latest(1))] == [1]
    with pytest.raises(StoreFull):
        retain(world, attempt, keep.latest(1))
    assert there(world) == [(1, 2), (1, 3), (1, 4)]
    assert world.names("tombstones") == []


def test_what_was_announced_when_the_store_fails_is_taken_back(world, monkeypatch):
    attempt = world.claim()
    for step in (1, 2, 3):
        world.save(attempt, step)
    put = retention.put_tombstone

    def put_once(repo, id, **more):
        if id.step == 2:
            raise StoreUnavailable("no answer", subject="the store")
        return put(repo, id, **more)

    monkeypatch.setattr(retention, "put_tombstone", put_once)
    with pytest.raises(StoreUnavailable):
        retain(world, attempt, keep.latest(1))
    assert there(world) == [(1, 1), (1, 2), (1, 3)]
    assert world.names("tombstones") == []


def test_i7_a_save_that_may_not_be_durable_yet_makes_nothing_else_go(world):
    attempt = world.claim()
    first, second = world.save(attempt, 1), world.save(attempt, 2)
    attempt.unsettled.add(second)
    assert retain(world, attempt) == ()
    assert there(world) == [(1, 1), (1, 2)]
    attempt.unsettled.discard(second)
    assert retain(world, attempt) == (first,)


def test_i7_a_save_that_comes_to_be_in_doubt_after_the_plan_is_seen(world):
    attempt = world.claim()
    world.save(attempt, 1)
    second = world.save(attempt, 2)
    plan = plan_retention(world.repo, attempt, Nothing())
    attempt.unsettled.add(second)
    assert execute(world.repo, attempt, plan) == ()
    assert there(world) == [(1, 1), (1, 2)]
