"""Other places kept in step with the home, and what verify says of copies."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.errors import StoreDenied, TenutoError
from tenuto.maintenance.findings import Finding
from tenuto.maintenance.replica_tidy import tidy_replicas
from tenuto.maintenance.verify import assert_whole, execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import Aborted, encode_aborted
from tenuto.repo.notes import add_note
from tenuto.repo.replicated.places import Mirror, PerNode
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort, free
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.delegating import DelegatingStore

FILE = "rank-00000.safetensors"


def fresh() -> MemoryStore:
    return MemoryStore(f"places-{secrets.token_hex(8)}")


class Spread:
    """A world whose repository lies in a home and another place: of one node, or of a mirror."""

    def __init__(self, make_world: type[Any], kind: str) -> None:
        self.home, self.place = fresh(), fresh()
        self.world = make_world.__new__(make_world)
        declared = Mirror(self.home, self.place) if kind == "mirror" else PerNode(self.place, home=self.home)
        self.world.repo = Repo.create_or_open(declared, chunk_bytes=64)
        self.world.store = self.repo.store
        self.attempt = self.world.claim()

    @property
    def repo(self) -> Repo:
        repo: Repo = self.world.repo
        return repo

    def save(self, step: int, **more: Any) -> CheckpointId:
        id: CheckpointId = self.world.save(self.attempt, step, **more)
        return id

    def forget(self, id: CheckpointId) -> None:
        """Removed by another process, which did not reach the place: nothing of it is in the home."""
        for name in below(self.home, id.directory):
            del self.home.place.objects[name]

    def in_place(self, id: CheckpointId) -> list[str]:
        return [name[len(id.directory) + 1 :] for name in below(self.place, id.directory)]


def below(store: MemoryStore, prefix: str) -> list[str]:
    return sorted(name for name in store.place.objects if name.startswith(f"{prefix}/"))


def flip(store: MemoryStore, name: str, at: int = -1) -> None:
    data, when = store.place.objects[name]
    changed = bytearray(data)
    changed[at] ^= 1
    store.place.objects[name] = bytes(changed), when


@pytest.fixture(params=["node", "mirror"])
def spread(request: pytest.FixtureRequest, make_world: type[Any]) -> Spread:
    return Spread(make_world, request.param)


@pytest.fixture
def mirror(make_world: type[Any]) -> Spread:
    return Spread(make_world, "mirror")


# -- tidying ---------------------------------------------------------------------------------------------------------


def test_what_the_home_has_forgotten_is_freed_and_counted(spread: Spread) -> None:
    old, newest = spread.save(1), spread.save(3)
    spread.forget(old)
    assert FILE in spread.in_place(old)
    assert tidy_replicas(spread.repo, newest) == 1
    assert spread.in_place(old) == []
    assert tidy_replicas(spread.repo, newest) == 0


def test_no_checkpoint_is_touched(spread: Spread) -> None:
    ids = [spread.save(step) for step in (1, 2, 3)]
    before = dict(spread.home.place.objects), dict(spread.place.place.objects)
    assert tidy_replicas(spread.repo, ids[-1]) == 0
    assert (spread.home.place.objects, spread.place.place.objects) == before


@pytest.mark.parametrize("until", ["begin", "pack", "index"])
def test_a_save_that_is_under_way_is_not_touched(spread: Spread, until: str) -> None:
    committed = spread.save(2)
    for step in (1, 3):
        id = spread.save(step, until=until)
        before = spread.in_place(id)
        assert tidy_replicas(spread.repo, committed) == 0
        assert spread.in_place(id) == before


def test_a_step_behind_the_newest_is_not_looked_at_whatever_the_home_says(spread: Spread) -> None:
    committed, later = spread.save(2), spread.save(3, until="index")
    spread.forget(later)
    before = spread.in_place(later)
    assert tidy_replicas(spread.repo, committed) == 0
    assert spread.in_place(later) == before != []


def test_what_an_older_attempt_never_committed_is_freed_whatever_its_step(spread: Spread) -> None:
    old = spread.save(900, until="index")
    spread.attempt = spread.world.claim()
    newest = spread.save(1)
    spread.forget(old)
    assert tidy_replicas(spread.repo, newest) == 1
    assert spread.in_place(old) == [] and FILE in spread.in_place(newest)


def test_another_runs_saves_are_its_own(spread: Spread, make_world: type[Any]) -> None:
    other = spread.world.save(spread.world.claim("other"), 1)
    newest = spread.save(5)
    spread.forget(other)
    assert tidy_replicas(spread.repo, newest) == 0
    assert FILE in spread.in_place(other)


@pytest.mark.parametrize("lacks", ["begin.json", "manifest.json"])
def test_a_checkpoint_is_one_with_either_of_what_tells_it(spread: Spread, lacks: str) -> None:
    """The one that is lacking may have been lost, and its packs not."""
    old, newest = spread.save(1), spread.save(2)
    del spread.home.place.objects[f"{old.directory}/{lacks}"]
    assert tidy_replicas(spread.repo, newest) == 0
    assert FILE in spread.in_place(old)


def test_a_damaged_manifest_frees_nothing(spread: Spread) -> None:
    old, newest = spread.save(1), spread.save(2)
    flip(spread.home, old.manifest, 40)
    del spread.home.place.objects[object_names.begin_name(old)]
    assert tidy_replicas(spread.repo, newest) == 0
    assert FILE in spread.in_place(old)


def test_what_an_aborted_save_put_is_freed_though_its_begin_stays_in_the_home(spread: Spread) -> None:
    id = spread.save(1, until="index")
    newest = spread.save(2)
    spread.home.place.objects[id.manifest] = encode_aborted(Aborted(id, "", "a test"), spread.repo.id), 1
    assert tidy_replicas(spread.repo, newest) == 1
    assert spread.in_place(id) == []


def test_freeing_an_aborted_save_reaches_every_place_by_itself(spread: Spread) -> None:
    id = spread.save(1, until="index")
    assert FILE in spread.in_place(id)
    abort(spread.repo, id, "0" * 32, by="a test")
    assert free(spread.repo, id)
    assert spread.in_place(id) == ["manifest.json"]


def test_a_manifest_that_the_place_lacks_is_brought(spread: Spread) -> None:
    old, newest = spread.save(1), spread.save(2)
    del spread.place.place.objects[old.manifest]
    del spread.place.place.objects[newest.manifest]
    tidy_replicas(spread.repo, newest)
    for id in (old, newest):
        assert spread.place.place.objects[id.manifest][0] == spread.home.place.objects[id.manifest][0]


def test_the_copy_of_a_manifest_that_the_home_has_removed_goes_and_its_packs_stay(spread: Spread) -> None:
    """As `rm` does, until gc or `undelete`."""
    old, newest = spread.save(1), spread.save(2)
    del spread.home.place.objects[old.manifest]
    assert tidy_replicas(spread.repo, newest) == 0
    assert "manifest.json" not in spread.in_place(old)
    assert FILE in spread.in_place(old)
    assert Repo.open(spread.place).committed("main", 1) == [2]


def test_notes_of_what_is_freed_go_too(spread: Spread) -> None:
    old, newest = spread.save(1), spread.save(2)
    add_note(spread.repo, old, "metric", {"loss": 1.0})
    assert "notes/1.json" in spread.in_place(old)
    spread.forget(old)
    tidy_replicas(spread.repo, newest)
    assert spread.in_place(old) == []


def test_what_unfinished_puts_have_left_goes_too(spread: Spread) -> None:
    old, newest = spread.save(1), spread.save(2)
    for file in (FILE, "begin.json", "manifest.json", "rank-00000.index"):
        spread.place.place.objects[f"{old.directory}/{file}.tmp-{'0' * 32}"] = b"", 1
    spread.forget(old)
    tidy_replicas(spread.repo, newest)
    assert spread.in_place(old) == []


@pytest.mark.parametrize("file", ["readme.txt", "model.safetensors", "notes/mine.txt", "sub/rank-00000.safetensors"])
def test_foreign_files_stay(spread: Spread, file: str) -> None:
    old, newest = spread.save(1), spread.save(2)
    spread.place.place.objects[f"{old.directory}/{file}"] = b"mine", 1
    spread.place.place.objects[f"{old.directory}/{file}.tmp-1"] = b"mine", 1
    spread.forget(old)
    assert tidy_replicas(spread.repo, newest) == 1
    assert spread.in_place(old) == sorted([file, f"{file}.tmp-1"])


@pytest.mark.parametrize("name", ["runs/main/a1/step-00000001/", "runs/main/a0001/step-1/", "runs/main/logs/x/"])
def test_directories_that_are_no_saves_are_passed_over(spread: Spread, name: str) -> None:
    newest = spread.save(2)
    spread.place.place.objects[name + FILE] = b"mine", 1
    assert tidy_replicas(spread.repo, newest) == 0
    assert name + FILE in spread.place.place.objects


def test_indexes_alone_are_freed_and_not_counted(spread: Spread) -> None:
    old, newest = spread.save(1), spread.save(2)
    del spread.place.place.objects[f"{old.directory}/{FILE}"]
    spread.forget(old)
    assert tidy_replicas(spread.repo, newest) == 0
    assert spread.in_place(old) == []


def test_places_that_are_only_found_belong_to_another_node(make_world: type[Any]) -> None:
    spread, other = Spread(make_world, "node"), fresh()
    old = spread.save(1)
    repo = Repo.create_or_open(PerNode(other, home=spread.home, node="n2"))
    assert isinstance(repo.store, ReplicatedStore)
    spread.forget(old)
    assert tidy_replicas(repo, CheckpointId("main", 1, 9)) == 0
    assert FILE in spread.in_place(old)


def test_a_repository_in_one_place_has_nothing_to_tidy(world: Any) -> None:
    assert tidy_replicas(world.repo, world.save(world.claim(), 1)) == 0


class StaleHome(DelegatingStore):
    """Lists what lay there at first, as a network file system may for a while."""

    def children(self, prefix: str, *, after: str = "") -> Any:
        return type(self.inner.children(""))((), ())


def test_a_listing_that_is_older_than_a_save_frees_nothing(spread: Spread) -> None:
    old, newest = spread.save(1), spread.save(2)
    assert isinstance(spread.repo.store, ReplicatedStore)
    spread.repo.store.home = StaleHome(spread.home)
    assert tidy_replicas(spread.repo, newest) == 0
    assert FILE in spread.in_place(old) and FILE in spread.in_place(newest)


class Interrupted(BaseException):
    """The process ends."""


class Ending(DelegatingStore):
    """A place whose process ends after so many objects were removed."""

    left = 0

    def delete(self, names: Any) -> None:
        for name in names:
            if not self.left:
                raise Interrupted
            self.left -= 1
            super().delete([name])


@pytest.mark.parametrize("left", range(6))
def test_a_freeing_that_is_cut_short_is_ended_by_the_next_and_never_looks_like_a_checkpoint(
    make_world: type[Any], left: int
) -> None:
    spread = Spread(make_world, "mirror")
    old, newest = spread.save(1), spread.save(2)
    add_note(spread.repo, old, "metric", {"loss": 1.0})
    spread.forget(old)
    ending = Ending(spread.place)
    ending.left = left
    places = spread.repo.store
    assert isinstance(places, ReplicatedStore)
    whole, places.packs_in = places.packs_in, (spread.home, ending)
    try:
        tidy_replicas(spread.repo, newest)
    except Interrupted:
        if left:
            assert Repo.open(spread.place).committed("main", 1) == [2]
    places.packs_in = whole
    tidy_replicas(spread.repo, newest)
    assert spread.in_place(old) == []


@pytest.mark.parametrize("what", ["home", "place"])
def test_a_store_that_cannot_be_asked_frees_nothing_and_says_so(make_world: type[Any], what: str) -> None:
    spread = Spread(make_world, "mirror")
    old, newest = spread.save(1), spread.save(2)
    spread.forget(old)

    class Denied(DelegatingStore):
        def children(self, prefix: str, *, after: str = "") -> Any:
            raise StoreDenied("not yours")

        def stat(self, name: str) -> Any:
            raise StoreDenied("not yours")

    places = spread.repo.store
    assert isinstance(places, ReplicatedStore)
    if what == "home":
        places.home = Denied(spread.home)
    else:
        places.packs_in = (places.home, Denied(spread.place))
    told: list[str] = []
    places.report = told.append
    assert tidy_replicas(spread.repo, newest) == 0
    assert told and all("not yours" in one for one in told)
    assert FILE in spread.in_place(old)


@pytest.mark.parametrize("spread", ["mirror"], indirect=True)
def test_what_goes_wrong_with_one_save_keeps_no_other_from_being_freed(spread: Spread) -> None:
    first = spread.save(1)
    spread.attempt = spread.world.claim(parent=first)
    old, newest = spread.save(2), spread.save(3)
    flip(spread.place, object_names.attempt_name(first.run, first.attempt), 20)
    del spread.place.place.objects[first.manifest]
    spread.forget(old)
    told: list[str] = []
    repo = Repo.open(Mirror(spread.home, spread.place))  # which has not yet seen that the claims are equal
    assert isinstance(repo.store, ReplicatedStore)
    repo.store.report = told.append
    assert tidy_replicas(repo, newest) == 1
    assert FILE not in spread.in_place(old)
    assert len(told) == 1 and "damaged" in told[0]


# -- verify ----------------------------------------------------------------------------------------------------------


STATE = {"w": np.arange(5000, dtype=np.float32), "b": np.arange(300, dtype=np.uint8)}


class Copies:
    """One checkpoint, every pack of it in two places."""

    def __init__(self) -> None:
        self.home, self.place = fresh(), fresh()
        self.where = Mirror(self.home, self.place)
        self.where.report = [].append
        self.id = tenuto.save(STATE, self.where).id
        (self.pack,) = (name for name in below(self.home, self.id.directory) if name.endswith(".safetensors"))

    @property
    def stores(self) -> list[MemoryStore]:
        return [self.home, self.place]

    def mirror(self) -> Mirror:
        again = Mirror(self.home, self.place)
        again.report = [].append
        return again

    def findings(self, *, every_byte: bool = True) -> tuple[Finding, ...]:
        repo = Repo.open(self.mirror())
        return execute(repo, plan_verify(repo, every_byte=every_byte)).errors

    def restores(self) -> bool:
        try:
            found = tenuto.load(self.mirror()).state
        except TenutoError:
            return False
        assert all(np.array_equal(found[name], STATE[name]) for name in STATE)
        return True


@pytest.fixture
def copies() -> Copies:
    return Copies()


def cut(store: MemoryStore, name: str) -> None:
    data, when = store.place.objects[name]
    store.place.objects[name] = data[:-7], when


def lose(store: MemoryStore, name: str) -> None:
    del store.place.objects[name]


DAMAGE: dict[str, Callable[[MemoryStore, str], None]] = {
    "last byte": flip,
    "first leaf": lambda store, name: flip(store, name, 4096),
    "header": lambda store, name: flip(store, name, 60),
    "cut": cut,
}


def test_two_whole_copies_are_whole_and_each_is_read(copies: Copies) -> None:
    repo = Repo.open(copies.mirror())
    report = assert_whole(repo)
    packs = [len(store.place.objects[copies.pack][0]) for store in copies.stores]
    assert report.findings == () and report.bytes_read > sum(packs)
    assert report.objects == assert_whole(Repo.open(copies.home)).objects


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_one_copy_is_an_error_that_names_the_place_and_harms_no_restore(
    copies: Copies, damage: str, number: int
) -> None:
    DAMAGE[damage](copies.stores[number], copies.pack)
    findings = copies.findings()
    assert findings and not any(finding.harms_restore for finding in findings)
    for finding in findings:
        assert finding.object == copies.pack
        assert finding.message.startswith(f"in {copies.stores[number].url}: ")
    assert copies.restores()


@pytest.mark.parametrize("second", DAMAGE)
@pytest.mark.parametrize("first", DAMAGE)
def test_damage_of_both_copies_harms_and_so_says_the_restore(copies: Copies, first: str, second: str) -> None:
    DAMAGE[first](copies.home, copies.pack)
    DAMAGE[second](copies.place, copies.pack)
    findings = copies.findings()
    assert any(finding.harms_restore for finding in findings)
    assert {store.url for store in copies.stores} == {
        store.url for store in copies.stores for finding in findings if store.url in finding.message
    }
    assert not copies.restores()


@pytest.mark.parametrize("number", [0, 1])
def test_a_copy_that_is_lacking_harms_nobody(copies: Copies, number: int) -> None:
    lose(copies.stores[number], copies.pack)
    assert not any(finding.harms_restore for finding in copies.findings())
    assert copies.restores()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("number", [0, 1])
def test_damage_of_the_only_copy_that_is_left_harms(copies: Copies, number: int, damage: str) -> None:
    lose(copies.stores[number], copies.pack)
    DAMAGE[damage](copies.stores[1 - number], copies.pack)
    assert any(finding.harms_restore for finding in copies.findings())
    assert not copies.restores()


def test_a_pack_that_is_in_no_place_is_missing_once(copies: Copies) -> None:
    for store in copies.stores:
        lose(store, copies.pack)
    (finding,) = copies.findings()
    assert finding.harms_restore and finding.object == copies.pack
    assert "is missing" in finding.message
    assert not copies.restores()


@pytest.mark.parametrize("damage", ["header", "cut"])
def test_what_is_wrong_outside_of_leaves_is_found_without_reading_them(copies: Copies, damage: str) -> None:
    DAMAGE[damage](copies.place, copies.pack)
    (finding,) = copies.findings(every_byte=False)
    assert copies.place.url in finding.message and not finding.harms_restore


@pytest.mark.parametrize("number", [0, 1])
def test_a_place_by_itself_is_verified_like_a_repository(copies: Copies, number: int) -> None:
    assert assert_whole(Repo.open(copies.stores[number])).checked == (copies.id,)
    flip(copies.place, copies.pack)
    repo = Repo.open(copies.place)
    assert [finding.harms_restore for finding in execute(repo, plan_verify(repo)).errors] == [True]


def test_the_place_is_named_also_by_whoever_opens_the_home_alone(copies: Copies) -> None:
    flip(copies.place, copies.pack)
    repo = Repo.open(copies.home)
    (finding,) = execute(repo, plan_verify(repo)).errors
    assert copies.place.url in finding.message and not finding.harms_restore


def test_all_places_copied_into_one_directory_are_the_repository(make_world: type[Any]) -> None:
    spread, other = Spread(make_world, "node"), fresh()
    spread.save(1)
    spread.world.repo = Repo.create_or_open(PerNode(other, home=spread.home, node="n2"))
    spread.world.store = spread.repo.store
    spread.save(2)
    merged = fresh()
    for store in (spread.home, spread.place, other):
        for name, (data, when) in store.place.objects.items():
            if name != object_names.MEMBER:
                assert merged.place.objects.setdefault(name, (data, when))[0] == data
    assert len(assert_whole(Repo.create_or_open(merged)).checked) == 2
