"""Which places a repository lies in: who is listed, who is found, and who is refused."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tenuto.errors import CorruptionError, RepositoryError, StoreDenied, StoreError, TenutoWarning
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.format import object_names, objects
from tenuto.repo.replicated.members import Member, join, member_in
from tenuto.repo.replicated.places import Mirror, PerNode, unreachable
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store
from tenuto.store.local.store import LocalStore
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.delegating import DelegatingStore


def fresh() -> MemoryStore:
    return MemoryStore(f"member-{secrets.token_hex(8)}")


@pytest.fixture
def home() -> MemoryStore:
    return fresh()


@pytest.fixture
def place() -> MemoryStore:
    return fresh()


def listed(home: MemoryStore) -> list[str]:
    return sorted(name for name in home.place.objects if name.startswith("places/"))


def data_of(store: MemoryStore, name: str) -> bytes:
    return store.place.objects[name][0]


def flip(store: MemoryStore, name: str) -> None:
    data, when = store.place.objects[name]
    store.place.objects[name] = data.replace(b'"kind"', b'"kinb"'), when


def beside(store: Store) -> list[str]:
    """The further places that whoever opens the repository there finds."""
    found = Repo.open(store).store
    return sorted(one.url for one in found.found_members) if isinstance(found, ReplicatedStore) else []


class Unreachable(DelegatingStore):
    def __init__(self, inner: Store, error: StoreError) -> None:
        super().__init__(inner)
        self.error = error

    def get(self, name: str, *, limit: int) -> bytes:
        raise self.error


# -- joining ---------------------------------------------------------------------------------------------------------


def test_joining_marks_the_place_and_lists_it_in_the_home(home: MemoryStore, place: MemoryStore) -> None:
    repo = Repo.create_or_open(Mirror(home, place))
    member = member_in(place)
    assert member is not None
    assert (member.repository, member.home, member.node) == (repo.id, home.url, "")
    (name,) = listed(home)
    found = objects.decode("place", name, data_of(home, name), repo.id)
    assert (found.text("url"), found.text("member"), found.text("repository")) == (place.url, member.id, repo.id)
    assert data_of(place, object_names.REPOSITORY) == data_of(home, object_names.REPOSITORY)
    assert member_in(home) is None


def test_a_repository_in_one_place_lists_none(home: MemoryStore) -> None:
    repo = Repo.create_or_open(home)
    assert join(home, repo.id) == ()
    assert set(home.place.objects) == {object_names.REPOSITORY, object_names.REPOSITORY_COPY}


def test_a_place_of_a_node_says_whose_it_is(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(PerNode(place, home=home, node="n7"))
    member = member_in(place)
    assert member is not None and member.node == "n7"


def test_a_node_without_a_name_is_called_as_its_host(
    home: MemoryStore, place: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "machine-3")
    Repo.create_or_open(PerNode(place, home=home))
    member = member_in(place)
    assert member is not None and member.node == "machine-3"


def test_joining_again_changes_nothing(home: MemoryStore, place: MemoryStore) -> None:
    first = join(Mirror(home, place), Repo.create_or_open(Mirror(home, place)).id)
    before = dict(home.place.objects), dict(place.place.objects)
    repo = Repo.create_or_open(Mirror(home, place))
    assert join(repo.store, repo.id) == first
    assert (home.place.objects, place.place.objects) == before


def test_the_members_are_told_in_the_order_of_the_places(home: MemoryStore) -> None:
    places = [fresh() for _ in range(3)]
    repo = Repo.create_or_open(Mirror(home, *places))
    found: list[Member | None] = [member_in(one) for one in places]
    assert join(repo.store, repo.id) == tuple(one.id for one in found if one is not None)
    assert len(listed(home)) == len({one.id for one in found if one is not None}) == 3


def test_threads_that_join_at_once_end_with_one_member(home: MemoryStore, place: MemoryStore) -> None:
    repo = Repo.create_or_open(home)
    ids: list[tuple[str, ...]] = []
    barrier = threading.Barrier(8)

    def enter() -> None:
        barrier.wait()
        ids.append(join(Mirror(home, place), repo.id))

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 8 and len(set(ids)) == 1
    assert len(listed(home)) == 1


def test_processes_that_join_at_once_end_with_one_member(tmp_path: Path) -> None:
    children = []
    for _ in range(4):
        inward, outward = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                repo = Repo.create_or_open(Mirror(tmp_path / "home", tmp_path / "place"))
                os.write(outward, join(repo.store, repo.id)[0].encode())
            except BaseException as error:  # noqa: BLE001 - a child that went on would run the other tests
                os.write(outward, repr(error).encode()[:4000])
            os._exit(0)
        os.close(outward)
        children.append((pid, inward))
    ids = set()
    for pid, inward in children:
        ids.add(os.read(inward, 4000))
        os.close(inward)
        assert os.waitpid(pid, 0)[1] == 0
    assert len(ids) == 1 and len(ids.pop()) == 32
    assert len(list((tmp_path / "home" / "places").iterdir())) == 1


def test_nodes_whose_directories_are_called_alike_are_members_of_their_own(
    home: MemoryStore, place: MemoryStore
) -> None:
    """On each node another disk lies behind one path."""
    Repo.create_or_open(PerNode(place, home=home, node="n1"))
    disk_of_n1 = dict(place.place.objects)
    place.place.objects.clear()
    Repo.create_or_open(PerNode(place, home=home, node="n2"))
    names = listed(home)
    assert len(names) == 2 and len({name[:19] for name in names}) == 1
    assert beside(home) == [place.url]
    place.place.objects.clear()
    place.place.objects.update(disk_of_n1)
    assert beside(home) == [place.url]


def test_a_mirrors_place_that_is_another_disk_now_is_told(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(Mirror(home, place))
    place.place.objects.clear()
    with pytest.warns(TenutoWarning, match=f"{place.url} is not the location that it was"):
        Repo.create_or_open(Mirror(home, place))
    assert len(listed(home)) == 2


# -- who is refused --------------------------------------------------------------------------------------------------


def test_a_place_in_which_another_repository_lies_is_refused_and_left_as_it_is(
    home: MemoryStore, place: MemoryStore
) -> None:
    Repo.create_or_open(place)
    before = dict(place.place.objects)
    with pytest.raises(RepositoryError, match="another repository") as caught:
        Repo.create_or_open(Mirror(home, place))
    assert caught.value.subject == place.url and caught.value.hint is not None
    assert place.place.objects == before
    assert listed(home) == []


def test_a_place_of_another_repository_is_refused(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(Mirror(fresh(), place))
    with pytest.raises(RepositoryError, match="another repository"):
        Repo.create_or_open(Mirror(home, place))
    assert listed(home) == []


def test_a_place_that_holds_a_copy_of_this_very_repository_is_taken(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(home)
    place.place.objects.update(home.place.objects)
    Repo.create_or_open(Mirror(home, place))
    assert member_in(place) is not None


def test_foreign_files_in_a_place_are_left_alone(home: MemoryStore, place: MemoryStore) -> None:
    place.place.objects["notes.txt"] = b"mine", 1
    Repo.create_or_open(Mirror(home, place))
    assert data_of(place, "notes.txt") == b"mine"


@pytest.mark.parametrize("open_it", ["alone", "as a home"])
def test_nobody_trains_in_a_place_that_is_not_the_home(home: MemoryStore, place: MemoryStore, open_it: str) -> None:
    Repo.create_or_open(Mirror(home, place))
    before = dict(place.place.objects)
    with pytest.raises(RepositoryError, match=home.url) as caught:
        Repo.create_or_open(place if open_it == "alone" else Mirror(place, fresh()))
    assert caught.value.hint is not None and home.url in caught.value.hint
    assert f"tenuto promote {place.url}" in caught.value.hint
    assert place.place.objects == before


def test_a_place_is_read_by_whoever_opens_it(
    home: MemoryStore, place: MemoryStore, new_maker: Callable[[], Any]
) -> None:
    make = type(new_maker())(Repo.create_or_open(Mirror(home, place)))
    make.attempt(1)
    id = make.checkpoint(1, 1)
    repo = Repo.open(place)
    assert (repo.url, repo.committed("gpt", 1)) == (place.url, [1])
    assert repo.index(repo.manifest(id)).save_id == make.written[id].save_id
    with pytest.raises(StoreDenied):
        repo.store.delete([id.manifest])


def test_what_is_no_member_any_more_is_a_home(home: MemoryStore, place: MemoryStore) -> None:
    """As the hint says, where the home is lost for good."""
    id = Repo.create_or_open(Mirror(home, place)).id
    del place.place.objects[object_names.MEMBER]
    assert Repo.create_or_open(place).id == id


# -- who is found ----------------------------------------------------------------------------------------------------


def test_whoever_opens_the_home_finds_the_places_that_are_there(home: MemoryStore) -> None:
    one, two = fresh(), fresh()
    Repo.create_or_open(PerNode(one, home=home, node="n1"))
    Repo.create_or_open(PerNode(two, home=home, node="n2"))
    assert beside(home) == sorted([one.url, two.url])


def test_a_place_that_packs_are_put_into_is_not_found_once_more(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(Mirror(home, place))
    assert beside(Mirror(home, place)) == []
    assert beside(Mirror(home, fresh())) == [place.url]


def test_opening_makes_nothing(home: MemoryStore, place: MemoryStore, tmp_path: Path) -> None:
    Repo.create_or_open(Mirror(home, place, tmp_path / "x"))
    os.rename(tmp_path / "x", tmp_path / "y")
    before = dict(home.place.objects), dict(place.place.objects)
    assert beside(home) == [place.url]
    assert (home.place.objects, place.place.objects) == before
    assert os.listdir(tmp_path) == ["y"]


def test_a_place_whose_member_is_another_is_not_found(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(Mirror(home, place))
    other = fresh()
    Repo.create_or_open(Mirror(home, other))
    place.place.objects[object_names.MEMBER] = other.place.objects[object_names.MEMBER]
    assert beside(home) == [other.url]


def test_a_place_that_belongs_to_another_repository_now_is_not_found(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(Mirror(home, place))
    place.place.objects.clear()
    Repo.create_or_open(Mirror(fresh(), place))
    assert beside(home) == []


def test_a_member_that_says_it_is_another_repositorys_is_not_found(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(Mirror(home, place))
    member = member_in(place)
    assert member is not None
    body: dict[str, Any] = {"home": member.home, "id": member.id, "node": "", "repository": "0" * 32}
    body |= {"copy": False, "follows": False}
    place.place.objects[object_names.MEMBER] = objects.encode("member", object_names.MEMBER, body, None), 1
    assert beside(home) == []


def test_a_place_that_is_empty_now_is_not_found(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(Mirror(home, place))
    place.place.objects.clear()
    assert beside(home) == []


@pytest.mark.parametrize(("node", "found"), [("n1", []), ("n2", [1]), ("", [1])])
def test_another_nodes_place_is_not_found_where_the_node_is_named(
    home: MemoryStore, node: str, found: list[int]
) -> None:
    """A directory that both nodes see under one path, and that is one node's own."""
    one, two = fresh(), fresh()
    Repo.create_or_open(PerNode(one, home=home, node="n1"))
    Repo.create_or_open(PerNode(two, home=home, node="n2"))
    assert beside(PerNode(one, home=home, node=node)) == [(one, two)[number].url for number in found]


def test_a_mirrors_place_is_found_from_every_node(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(Mirror(home, place))
    assert beside(PerNode(fresh(), home=home, node="n1")) == [place.url]


def test_a_place_whose_listing_is_damaged_is_not_found_and_the_others_are(home: MemoryStore) -> None:
    places = [fresh() for _ in range(3)]
    for one in places:
        Repo.create_or_open(Mirror(home, one))
    (name,) = (one for one in listed(home) if places[1].url.encode() in data_of(home, one))
    flip(home, name)
    assert beside(home) == sorted([places[0].url, places[2].url])


def test_a_place_whose_listing_is_damaged_can_still_be_given(home: MemoryStore, place: MemoryStore) -> None:
    Repo.create_or_open(Mirror(home, place))
    flip(home, listed(home)[0])
    repo = Repo.create_or_open(Mirror(home, place))
    assert isinstance(repo.store, ReplicatedStore) and [one.url for one in repo.store.members] == [place.url]


@pytest.mark.parametrize("file", ["README", "0123-x.json", f"{'0' * 12}-{'1' * 32}.json"])
def test_what_else_lies_among_the_places_names_none(home: MemoryStore, place: MemoryStore, file: str) -> None:
    Repo.create_or_open(Mirror(home, place))
    home.place.objects[f"places/{file}"] = b"somebody else's", 1
    assert beside(home) == [place.url]


@pytest.mark.parametrize("url", ["nowhere://x", "nosuch://bucket/x", "memory://", "", "\0"])
def test_a_listing_that_names_no_place_is_passed_over(home: MemoryStore, place: MemoryStore, url: str) -> None:
    repo = Repo.create_or_open(Mirror(home, place))
    name = f"places/{'0' * 12}-{'1' * 32}.json"
    body = {"member": "1" * 32, "node": "", "repository": repo.id, "url": url}
    home.place.objects[name] = objects.encode("place", name, body, None), 1  # type: ignore[arg-type]
    assert beside(home) == [place.url]


def test_a_place_whose_own_mark_is_damaged_is_not_found_and_cannot_be_given(
    home: MemoryStore, place: MemoryStore
) -> None:
    Repo.create_or_open(Mirror(home, place))
    flip(place, object_names.MEMBER)
    assert beside(home) == []
    for act in (lambda: Repo.create_or_open(Mirror(home, place)), lambda: Repo.open(place)):
        with pytest.raises(CorruptionError) as caught:
            act()
        assert caught.value.subject == object_names.MEMBER


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", "x" * 32), ("id", "12"), ("repository", 7), ("home", None), ("node", 1), ("follows", "")],
)
def test_a_mark_that_says_something_else_than_it_may_is_damaged(place: MemoryStore, field: str, value: Any) -> None:
    body: dict[str, Any] = {
        "copy": False,
        "follows": False,
        "id": "1" * 32,
        "repository": "2" * 32,
        "home": "/h",
        "node": "",
    }
    name = object_names.MEMBER
    place.place.objects[name] = objects.encode("member", name, body, None), 1
    assert member_in(place) == Member("1" * 32, "2" * 32, "/h", "")
    place.place.objects[name] = objects.encode("member", name, {**body, field: value}, None), 1
    with pytest.raises(CorruptionError, match=field):
        member_in(place)


# -- places that cannot be reached -----------------------------------------------------------------------------------


def broken() -> StoreError:
    error = StoreError("the disk gives nothing")
    error.errno = errno.EIO
    return error


@pytest.mark.parametrize("error", [broken(), StoreDenied("not yours")])
def test_a_place_too_many_may_be_out_of_reach_and_is_told(home: MemoryStore, error: StoreError) -> None:
    good, bad = fresh(), fresh()
    mirror = Mirror(home, Unreachable(bad, error), good, copies=2)
    told: list[str] = []
    mirror.report = told.append
    repo = Repo.create_or_open(mirror)
    members = join(repo.store, repo.id)
    member = member_in(good)
    assert member is not None and members == ("", member.id)
    assert len(listed(home)) == 1
    assert told and all(bad.url in one and error.message in one for one in told)


def test_a_place_that_is_needed_has_to_be_within_reach(home: MemoryStore, place: MemoryStore) -> None:
    with pytest.raises(StoreDenied, match="not yours"):
        Repo.create_or_open(Mirror(home, Unreachable(place, StoreDenied("not yours"))))


def test_a_listed_directory_that_is_gone_harms_nobody_who_opens_the_home(tmp_path: Path) -> None:
    Repo.create_or_open(Mirror(tmp_path / "home", tmp_path / "place"))
    os.rename(tmp_path / "place", tmp_path / "elsewhere")
    assert beside(LocalStore(tmp_path / "home")) == []
    os.rename(tmp_path / "elsewhere", tmp_path / "place")
    assert beside(LocalStore(tmp_path / "home")) == [LocalStore(tmp_path / "place").url]


def test_somebody_elses_places_that_may_not_be_listed_hide_no_repository() -> None:
    class Private(DelegatingStore):
        def children(self, prefix: str, *, after: str = "") -> Any:
            if prefix == "places":
                raise StoreDenied("not yours")
            return super().children(prefix, after=after)

    store = fresh()
    made = Repo.create_or_open(store)
    assert Repo.open(Private(store)).id == made.id
    assert assert_whole(Repo.open(Private(store))).ok


def test_the_list_of_places_is_read_once_however_many_packs_are_missed() -> None:
    home = fresh()
    for node in range(5):
        place = fresh()
        Repo.create_or_open(PerNode(place, home=home, node=f"n{node}"))
        del place.place.objects[object_names.MEMBER]

    class Counting(DelegatingStore):
        read = 0

        def get(self, name: str, *, limit: int) -> bytes:
            Counting.read += name.startswith("places/")
            return super().get(name, limit=limit)

    store = Repo.open(Counting(home)).store
    opened, Counting.read = Counting.read, 0
    assert {len(unreachable(store)) for _ in range(50)} == {5}
    assert Counting.read <= 5 and opened <= 5
