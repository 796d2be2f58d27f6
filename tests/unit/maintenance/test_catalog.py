"""Retention by a process that trains: what it has committed or read is not read again; what others do is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tenuto.crashpoints import armed
from tenuto.engine.save.rank_group import SoloGroup
from tenuto.errors import CheckpointNotFound, StoreDenied
from tenuto.events import Emitter
from tenuto.maintenance import remove
from tenuto.maintenance.retention import execute, plan_retention
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.policy.keep import KeepPolicy
from tenuto.repo.catalog import SCAN_OBJECTS, Catalog
from tenuto.repo.format import object_names
from tenuto.repo.notes import add_note
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.refs import clear_ref, put_ref
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort, free
from tenuto.store.contract import Entry
from tenuto.training.retention_worker import RetentionWorker
from tenuto.training.tier_worker import TierWorker

READS = ("get", "open")
LISTINGS = ("children", "walk")
TOMBSTONES_PUT = "tombstone put, manifest still there"


class Counting:
    """A store that notes each call, with the name that it is about."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in (*READS, *LISTINGS):
            return found

        def call(target: str, **named: Any) -> Any:
            self.calls.append((name, target))
            result = found(target, **named)
            return iter(list(result)) if name == "walk" else result

        return call

    def take(self, *kinds: str) -> list[str]:
        """The names of such calls so far; all calls are forgotten."""
        found = [name for kind, name in self.calls if kind in kinds]
        self.calls.clear()
        return found


class Training:
    """A run that is trained in this process, and its retention, by a catalog that is kept."""

    def __init__(self, world: Any, policy: KeepPolicy) -> None:
        self.world = world
        self.store = Counting(world.store)
        world.repo = self.repo = Repo.open(self.store)
        self.catalog = self.repo.observer = Catalog()
        self.attempt: Attempt = world.claim()
        self.policy = policy
        self.step = 0

    def save(self) -> CheckpointId:
        self.step += 1
        return self.world.save(self.attempt, self.step)

    def retain(self) -> list[int]:
        removed: list[CheckpointId] = []
        for _ in range(2):
            plan = plan_retention(self.repo, self.attempt, self.policy, self.catalog)
            removed += execute(self.repo, self.attempt, plan, catalog=self.catalog)
            if not self.catalog.plan_again:
                break
        return [id.step for id in removed]

    def saves(self, number: int) -> list[CheckpointId]:
        """So many saves, each with its retention."""
        found = []
        for _ in range(number):
            found.append(self.save())
            self.retain()
        self.store.calls.clear()
        return found

    @property
    def there(self) -> list[int]:
        return sorted(self.world.repo.committed("main", 1))


@pytest.fixture(params=["listed in one go", "by directories"])
def train(world: Any, request: Any, monkeypatch: Any) -> Iterator[Any]:
    """In a small run every directory is listed each time; of a large one only some."""
    if request.param == "by directories":
        monkeypatch.setattr("tenuto.repo.catalog.SCAN_OBJECTS", 1)
        monkeypatch.setattr("tenuto.repo.catalog.RELISTED", 1)
    yield lambda policy: Training(world, policy)


def test_a_steady_run_lists_and_reads_nothing(world: Any) -> None:
    store = Counting(world.store)
    world.repo = Repo.open(store)
    group, policy = SoloGroup(), keep.latest(30)
    tiers = TierWorker(world.repo, "main", policy, emitter=Emitter(), report=pytest.fail, group=group)
    worker = RetentionWorker(world.repo, emitter=Emitter(), warn=pytest.fail, group=group, tiers=tiers)
    attempt = world.claim()
    for step in range(1, 45):
        world.save(attempt, step)
        store.calls.clear()
        assert worker.now(attempt) == (step > 30)
        if step > 32:
            counts = Counter(kind for kind, _ in store.calls)
            assert [call for call in store.calls if call[0] in READS] == []
            # The refs and the run; of what goes, its own directory, for notes and temporaries.
            assert (counts["walk"], counts["children"]) == (3, 0)
    assert_whole(world.repo)


def test_what_earlier_processes_saved_is_read_once(train: Any) -> None:
    training = train(keep.latest(5))
    training.saves(5)
    training.catalog = training.repo.observer = Catalog()
    training.save()
    training.store.calls.clear()
    assert training.retain() == [1]
    manifests = [name for name in training.store.take(*READS) if name.endswith(object_names.MANIFEST)]
    assert len(manifests) == 5 + 2, "each of five; the newest, which has to be whole; and that of the one that goes"
    training.saves(5)
    training.save()
    training.store.calls.clear()
    assert training.retain() == [7] and training.store.take(*READS) == []


def test_a_run_of_many_objects_is_listed_without_those_of_packs(train: Any, monkeypatch: Any) -> None:
    training = train(keep.latest(4))
    gone = training.saves(6)[2]
    monkeypatch.setattr("tenuto.repo.catalog.SCAN_OBJECTS", 1)
    assert SCAN_OBJECTS > 1
    training.save()
    training.store.calls.clear()
    assert training.retain() == [3]
    assert [call for call in training.store.calls if call[0] in ("walk", *READS)] == [("walk", gone.directory)]
    assert training.there == [4, 5, 6, 7]


@pytest.mark.parametrize("when", ["before the round", "after the tombstones"])
@pytest.mark.parametrize("how", ["pin", "verified", "fork"])
def test_i7_who_comes_to_need_one_is_seen(train: Any, how: str, when: str) -> None:
    training = train(keep.latest(3))
    first = training.saves(3)[0]
    training.save()
    other = Repo.open(training.world.store)

    def need() -> None:
        if how == "pin":
            put_ref(other, "pin", "late", first)
        elif how == "verified":
            add_note(other, first, "verified", {})
        else:
            training.world.claim("other", parent=first)

    if when == "before the round":
        need()
        assert training.retain() == []
    elif how == "verified":
        with armed(TOMBSTONES_PUT, need):
            assert training.retain() == []
    else:
        with armed(TOMBSTONES_PUT, need), pytest.raises(CheckpointNotFound) if how == "pin" else nullcontext():
            assert training.retain() == []
    assert training.world.names("tombstones") == []


def test_a_pin_that_is_cleared_lets_it_go_at_once(train: Any) -> None:
    training = train(keep.latest(2))
    first = training.saves(1)[0]
    put_ref(Repo.open(training.world.store), "pin", "one", first)
    training.saves(4)
    assert training.there == [1, 4, 5]
    clear_ref(Repo.open(training.world.store), "pin", "one")
    training.save()
    assert training.retain() == [4, 1] and training.there == [5, 6]


def test_i11_a_later_attempt_is_seen(train: Any) -> None:
    training = train(keep.latest(2))
    training.saves(3)
    last = training.save()
    with armed(TOMBSTONES_PUT, lambda: training.world.claim(parent=last)):
        assert training.retain() == []
    assert training.retain() == []
    assert training.world.names("tombstones") == []


def test_i7_the_fallback_is_read_again_where_it_was_not_just_put(train: Any) -> None:
    """The newest is damaged after a round has read it: the one before is what a restore falls back to."""
    training = train(keep.latest(2))
    saves = training.saves(3)
    training.policy = keep.latest(1)
    training.world.flip(saves[2].manifest)
    assert training.retain() == []
    assert [name for name in training.store.take(*READS) if name.endswith(object_names.MANIFEST)]
    training.save()
    assert training.retain() == [2], "what cannot be read is not judged"


def test_i7_the_last_verified_is_read_again_before_one_that_was_verified_goes(train: Any) -> None:
    training = train(keep.latest(3))
    saves = training.saves(2)
    for id in saves:
        add_note(training.repo, id, "verified", {})
    training.saves(2)
    assert training.there == [2, 3, 4]
    add_note(training.repo, CheckpointId("main", 1, 3), "verified", {})
    training.save()
    training.world.flip(CheckpointId("main", 1, 3).manifest)
    assert training.retain() == [], "step 2 is the last verified one by now"
    assert training.there == [2, 3, 4, 5]


def test_a_manifest_that_was_cut_short_is_noticed(world: Any) -> None:
    training = Training(world, keep.latest(3))
    saves = training.saves(3)
    training.world.truncate(saves[1].manifest, 100)
    training.save()
    assert training.retain() == [], "the damaged one takes no place"


def test_what_somebody_removed_takes_no_place(train: Any) -> None:
    training = train(keep.latest(3))
    saves = training.saves(4)
    for name in training.world.names(saves[2].directory):
        training.world.lose(name)
    training.save()
    assert training.retain() == [] and training.there == [2, 4, 5]


def test_only_new_notes_are_read(train: Any) -> None:
    training = train(keep.best(2, "loss"))
    for loss in (5.0, 4.0, 3.0, 2.0):
        add_note(training.repo, training.save(), "metric", {"loss": loss})
        training.retain()
    assert training.there == [3, 4]
    late = training.save()
    add_note(Repo.open(training.world.store), late, "metric", {"loss": 9.0})
    training.store.calls.clear()
    training.retain()
    assert training.store.take(*READS) == [f"{object_names.notes_directory(late)}/1.json"]
    training.save()
    training.retain()
    assert training.there == [3, 4, 6]


def test_a_failed_save_is_read_once(train: Any) -> None:
    training = train(keep.latest(2))
    training.saves(2)
    training.step += 1
    failed = training.world.save(training.attempt, training.step, until="pack")
    abort(training.repo, failed, "0" * 32)
    free(training.repo, failed)
    training.saves(2)
    training.save()
    training.store.calls.clear()
    assert len(training.retain()) == 1
    assert training.store.take(*READS) == []


def test_temporaries_and_late_notes_of_what_goes_go_with_it(train: Any) -> None:
    training = train(keep.latest(2))
    first = training.saves(2)[0]
    training.save()
    training.world.put(f"{first.directory}/rank-00000.index.tmp-{'0' * 32}")
    with armed(TOMBSTONES_PUT, lambda: add_note(training.repo, first, "metric", {"loss": 1.0})):
        assert training.retain() == [1]
    assert [name for name in training.store._inner.place.objects if name.startswith(first.directory)] == []


class Denying(Counting):
    """A store with a directory below `runs`, beside the saves, that may not be listed."""

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        self.calls.append(("walk", prefix))
        if object_names.is_step(prefix):
            return iter(self._inner.walk(prefix, leftovers=leftovers))
        raise StoreDenied("permission denied", subject=prefix)


def test_a_directory_that_may_not_be_listed_in_one_go_is_listed_by_its_parts(world: Any) -> None:
    training = Training(world, keep.latest(3))
    training.saves(3)
    training.store = Denying(world.store)
    world.repo = training.repo = Repo(training.store, training.repo.id, training.repo.chunk_bytes)
    training.repo.observer = training.catalog
    training.save()
    assert training.retain() == [1]


# -- large runs: of most checkpoints the directories are not listed again ----------------------------------------------


@pytest.fixture
def large(world: Any, monkeypatch: Any) -> Any:
    """A run that keeps each second checkpoint and the newest two; a round lists the directories of few."""
    monkeypatch.setattr("tenuto.repo.catalog.SCAN_OBJECTS", 1)
    monkeypatch.setattr("tenuto.repo.catalog.RELISTED", 1)
    training = Training(world, keep.latest(2) | keep.every(steps=2))
    training.saves(21)
    return training


def test_a_large_run_lists_the_same_few_directories_each_time(large: Any) -> None:
    costs = []
    for _ in range(6):
        large.save()
        large.store.calls.clear()
        large.retain()
        costs.append(len(large.store.take(*LISTINGS, *READS)))
    assert max(costs) <= 14 and costs[-2:] == costs[:2], "a round that removes one, and a round that does not"


def test_what_rm_takes_from_a_large_run_is_seen_at_once(large: Any) -> None:
    other = Repo.open(large.world.store)
    remove.execute(other, remove.plan_remove(other, [CheckpointId("main", 1, 18)]))
    large.policy = keep.latest(4)
    large.retain()
    assert large.there == [14, 16, 20, 21], "the one in the trash takes no place"


def test_a_note_of_this_process_is_seen_at_once_in_a_large_run(large: Any) -> None:
    large.policy = keep.best(1, "loss") | keep.latest(1)
    for step, loss in ((4, 3.0), (6, 1.0), (8, 2.0), (21, 9.0)):
        add_note(large.repo, CheckpointId("main", 1, step), "metric", {"loss": loss})
    large.retain()
    assert large.there == [6, 21]


def test_every_directory_of_a_large_run_is_listed_again_in_its_turn(large: Any) -> None:
    """Another process notes a metric on an old checkpoint: nothing says so, but it is found after a while."""
    add_note(Repo.open(large.world.store), CheckpointId("main", 1, 8), "suspect", {})
    for _ in range(20):
        large.save()
        large.retain()
    noted = large.catalog.last_snapshot("main").notes(CheckpointId("main", 1, 8))
    assert [note.kind for note in noted] == ["suspect"]
