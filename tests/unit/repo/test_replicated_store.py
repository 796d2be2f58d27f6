"""A repository in several places: what lies where, which copy is read, and what happens where a place fails."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    ObjectNotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnreliable,
    TenutoWarning,
    UsageError,
)
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names, objects
from tenuto.repo.notes import add_note, notes
from tenuto.repo.refs import put_ref, read_ref
from tenuto.repo.replicated.places import Mirror, PerNode, copies_of, describe_missing_pack, mark_damaged
from tenuto.repo.replicated.replica import exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Content, Entry, Listing, Reader, Stat, Store, leftovers_of
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.testing.store_suite.base import Failing, Interrupted, Refilled, patterned

ID = CheckpointId("gpt", 1, 1)
PACK = f"{ID.directory}/rank-00000.safetensors"
INDEX = f"{ID.directory}/rank-00000.index"
BEGIN = object_names.begin_name(ID)
ATTEMPT = object_names.attempt_name("gpt", 1)
NOTE = object_names.numbered(object_names.notes_directory(ID), 1)
REF = "refs/tag/best/1.json"
OTHERS = ("runs/gpt/a0001/lease/1.json", ATTEMPT, BEGIN, "places/x.json")
"""Records that lie in the home alone, put there one by one."""


class Place(DelegatingStore):
    """One place. `calls` has what was asked of it; `wrong` says by method what it answers instead, `only` for names
    that end so."""

    inner: MemoryStore

    def __init__(self) -> None:
        super().__init__(MemoryStore(f"place-{secrets.token_hex(8)}"))
        self.calls: list[tuple[str, str]] = []
        self.wrong: dict[str, Exception] = {}
        self.only = ""
        self.free: int | None = None
        self.closed = 0

    def fail(self, error: Exception, *methods: str, only: str = "") -> None:
        self.wrong, self.only = dict.fromkeys(methods, error), only

    def _ask(self, method: str, name: str) -> None:
        self.calls.append((method, name))
        if method in self.wrong and name.endswith(self.only):
            raise self.wrong[method]

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Any:
        self._ask("put", name)
        return super().put_if_absent(name, content, token=token)

    def get(self, name: str, *, limit: int) -> bytes:
        self._ask("get", name)
        return super().get(name, limit=limit)

    def open(self, name: str) -> Reader:
        self._ask("open", name)
        return super().open(name)

    def stat(self, name: str) -> Stat:
        self._ask("stat", name)
        return super().stat(name)

    def children(self, prefix: str, *, after: str = "") -> Listing:
        self._ask("children", prefix)
        return super().children(prefix, after=after)

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        self._ask("walk", prefix)
        return super().walk(prefix, leftovers=leftovers)

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        names = list(names)
        self._ask("delete", names[0] if names else "")
        super().delete(names)

    def settle(self, name: str) -> None:
        self._ask("settle", name)
        super().settle(name)

    def free_bytes(self) -> int | None:
        self._ask("free_bytes", "")
        return self.free

    def close(self) -> None:
        self.closed += 1

    # -- past what it answers --------------------------------------------------------------------------------------

    @property
    def objects(self) -> dict[str, bytes]:
        return {name: data for name, (data, _) in self.inner.place.objects.items()}

    def have(self, name: str, data: bytes) -> None:
        self.inner.place.objects[name] = data, self.inner.place.tick()

    def lose(self, name: str) -> None:
        del self.inner.place.objects[name]

    def flip(self, name: str, at: int = 40) -> None:
        data = bytearray(self.objects[name])
        data[at % len(data)] ^= 1
        self.have(name, bytes(data))

    def asked(self, *methods: str) -> list[str]:
        return [name for method, name in self.calls if method in methods]


class Some:
    """So many places, the first of which is the home and holds packs too unless `apart`."""

    def __init__(self, count: int, copies: int = 1, *, apart: bool = False, beside: int = 0) -> None:
        self.all = [Place() for _ in range(count + beside)]
        self.home = self.all[0]
        self.told: list[str] = []
        self.places = ReplicatedStore(
            self.home, self.all[1:count] if apart else self.all[:count], copies, found_members=self.all[count:]
        )
        self.places.report = self.told.append

    def put(self, name: str, data: bytes = b"data") -> Any:
        return self.places.put_if_absent(name, Bytes(data), token="t0")

    def holding(self, name: str) -> list[bool]:
        return [name in place.objects for place in self.all]

    def put_by_itself(self, name: str, data: bytes, *numbers: int) -> None:
        for number in numbers:
            self.all[number].have(name, data)


def unreadable() -> StoreError:
    error = StoreError("the disk gives no byte of it")
    error.errno = errno.EIO
    return error


def sealed(name: str, **body: Any) -> bytes:
    return objects.encode("thing", name, body, "1" * 32)


# -- packs are put ---------------------------------------------------------------------------------------------------


def test_a_pack_is_put_into_every_place_and_has_one_receipt_of_the_home() -> None:
    some = Some(3, copies=3)
    receipt = some.put(PACK)
    assert (receipt.name, receipt.length, receipt.store) == (PACK, 4, some.home.url)
    assert [place.objects[PACK] for place in some.all] == [b"data"] * 3
    assert not some.told


def test_a_pack_of_refilled_memory_is_whole_in_every_place() -> None:
    some, data = Some(4, copies=4), patterned(50_000)
    some.places.put_if_absent(PACK, Refilled(data), token="t0")
    assert [place.objects[PACK] for place in some.all] == [data] * 4


def test_a_pack_lies_in_the_home_only_where_that_is_one_of_its_places() -> None:
    some = Some(2, apart=True)
    some.put(PACK)
    assert some.holding(PACK) == [False, True]


def test_places_beside_are_put_nothing_into() -> None:
    some = Some(2, copies=2, beside=1)
    for name in (BEGIN, PACK, INDEX, ID.manifest, NOTE):
        some.put(name)
    assert not some.all[2].objects


@pytest.mark.parametrize("number", [0, 1, 2])
def test_enough_copies_are_enough_and_the_place_that_lacks_one_is_told(number: int) -> None:
    some = Some(3, copies=2)
    some.all[number].fail(StoreFull("no space"), "put")
    some.put(PACK)
    assert some.holding(PACK) == [one != number for one in range(3)]
    (message,) = [one for one in some.told if "tenuto" not in one]
    assert some.all[number].url in message and PACK in message and "no space" in message


@pytest.mark.parametrize("copies", [2, 3])
def test_too_few_copies_are_none_and_the_error_says_how_many_there_are_and_where_it_failed(copies: int) -> None:
    some = Some(3, copies=copies)
    some.all[1].fail(StoreFull("no space", hint="make room"), "put")
    some.all[2].fail(StoreDenied("not yours"), "put")
    with pytest.raises(StoreFull) as caught:
        some.put(PACK)
    assert f"1 of the {copies} required copies" in caught.value.message
    assert some.all[1].url in caught.value.message and "no space" in caught.value.message
    assert caught.value.hint == "make room"
    assert some.holding(PACK) == [False, False, False]


def test_a_single_place_that_fails_says_what_it_always_says() -> None:
    some, error = Some(2, apart=True), StoreFull("no space")
    some.all[1].fail(error, "put", only=".safetensors")
    with pytest.raises(StoreFull) as caught:
        some.put(PACK)
    assert caught.value is error and error.message == "no space"


def test_what_was_in_none_in_the_end_can_be_put_once_more() -> None:
    some = Some(3, copies=3)
    some.all[2].fail(StoreFull("no space"), "put")
    with pytest.raises(StoreFull):
        some.put(PACK, b"1")
    some.all[2].wrong = {}
    some.put(PACK, b"2")
    assert [place.objects[PACK] for place in some.all] == [b"2"] * 3


def test_a_copy_that_cannot_be_taken_back_is_told_and_hides_no_error() -> None:
    some = Some(2, copies=2)
    some.home.fail(StoreDenied("no removing here"), "delete")
    some.all[1].fail(StoreFull("no space"), "put")
    with pytest.raises(StoreFull):
        some.put(PACK)
    assert any("could not be taken back" in one and some.home.url in one for one in some.told)


def test_an_older_object_in_one_of_the_places_is_not_deleted_with_what_is_taken_back() -> None:
    some = Some(2, copies=2)
    some.put_by_itself(PACK, b"before", 1)
    with pytest.raises(AlreadyExists):
        some.put(PACK)
    assert some.holding(PACK) == [False, True] and some.all[1].objects[PACK] == b"before"


@pytest.mark.parametrize("count", [1, 3])
def test_what_the_packs_own_content_raises_passes_and_the_pack_is_nowhere(count: int) -> None:
    some = Some(count, copies=1)
    with pytest.raises(Interrupted):
        some.places.put_if_absent(PACK, Failing(b"123", 9), token="t0")
    assert some.holding(PACK) == [False] * count
    assert not some.told


# -- records are put -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [INDEX, ID.manifest, NOTE, REF])
def test_what_is_needed_to_read_packs_goes_to_the_home_and_then_to_its_places(name: str) -> None:
    some = Some(3, copies=3)
    order: list[int] = []
    for number, place in enumerate(some.all):

        def ask(method: str, asked: str, number: int = number) -> None:
            if (method, asked) == ("put", name):
                order.append(number)

        place._ask = ask  # type: ignore[method-assign]
    receipt = some.put(name)
    assert receipt.store == some.home.url
    assert order == [0, 1, 2]
    assert [place.objects[name] for place in some.all] == [b"data"] * 3


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_the_homes_alone(name: str) -> None:
    some = Some(3, copies=3)
    some.put(name)
    assert some.holding(name) == [True, False, False]
    assert not some.all[1].calls and not some.all[2].calls


@pytest.mark.parametrize("name", [INDEX, ID.manifest, NOTE, REF])
@pytest.mark.parametrize("error", [StoreDenied("not yours"), StoreUnreliable("flush"), AlreadyExists("taken")])
def test_what_the_home_refuses_has_no_copy(name: str, error: StoreError) -> None:
    some = Some(2, copies=2)
    some.home.fail(error, "put")
    with pytest.raises(type(error)):
        some.put(name)
    assert not some.all[1].objects


@pytest.mark.parametrize("name", [ID.manifest, NOTE, REF])
def test_a_place_that_takes_no_copy_of_a_record_is_told(name: str) -> None:
    some = Some(3, copies=3)
    some.all[1].fail(StoreFull("no space"), "put", only=name)
    some.put(name)
    assert some.holding(name) == [True, False, True]
    (message,) = some.told
    assert some.all[1].url in message and name in message


@pytest.mark.parametrize(("copies", "goes"), [(1, True), (2, True), (3, False)])
def test_an_index_has_to_have_as_many_copies_as_a_pack(copies: int, goes: bool) -> None:
    some = Some(3, copies=copies)
    some.all[1].fail(StoreFull("no space"), "put", only=INDEX)
    if goes:
        some.put(INDEX)
        return
    with pytest.raises(StoreError, match="2 of 3 copies"):
        some.put(INDEX)


def test_a_copy_that_is_there_already_counts() -> None:
    some = Some(3, copies=3)
    some.put_by_itself(INDEX, b"data", 1, 2)
    some.put(INDEX)
    assert not some.told


def test_a_record_of_refilled_memory_is_copied_whole() -> None:
    some, data = Some(3, copies=3), patterned(20_000)
    some.places.put_if_absent(INDEX, Refilled(data), token="t0")
    assert [place.objects[INDEX] for place in some.all] == [data] * 3


def test_a_place_that_lacks_much_of_a_save_is_told_of_once_and_once_more_for_the_next_save() -> None:
    some, later = Some(3, copies=2), f"{CheckpointId('gpt', 1, 2).directory}/rank-00000.safetensors"
    some.all[1].fail(StoreFull("no space"), "put")
    for name in (PACK, PACK.replace("00000.", "00001."), INDEX, later):
        some.put(name)
    assert len(some.told) == 2
    assert PACK in some.told[0] and later in some.told[1]


# -- what stands around a save ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [PACK, INDEX, ID.manifest])
def test_a_place_has_what_a_save_lies_under_before_anything_of_the_save(first: str) -> None:
    some = Some(2, copies=2)
    for name in (object_names.REPOSITORY, ATTEMPT, BEGIN):
        some.put(name, name.encode())
    some.put(first)
    assert some.all[1].asked("put") == [object_names.REPOSITORY, ATTEMPT, BEGIN, first]
    assert some.all[1].objects == some.home.objects


def test_a_save_is_escorted_once_and_the_next_one_anew() -> None:
    some, later = Some(2, copies=2), CheckpointId("gpt", 1, 2)
    for name in (object_names.REPOSITORY, ATTEMPT, BEGIN, object_names.begin_name(later)):
        some.put(name)
    some.put(PACK)
    before = len(some.all[1].asked("stat"))
    some.put(INDEX)
    assert len(some.all[1].asked("stat")) == before
    some.put(f"{later.directory}/rank-00000.safetensors")
    assert object_names.begin_name(later) in some.all[1].objects


def test_a_place_that_could_not_be_given_it_is_told_and_given_it_with_the_next_object() -> None:
    some = Some(2, copies=1)
    for name in (object_names.REPOSITORY, ATTEMPT, BEGIN):
        some.put(name)
    some.all[1].fail(StoreFull("no space"), "put", only="begin.json")
    some.put(PACK)
    assert len(some.told) == 1 and some.all[1].url in some.told[0]
    some.all[1].wrong = {}
    some.put(INDEX)
    assert some.all[1].objects.keys() == some.home.objects.keys() - {PACK}


def test_bringing_names_no_place_that_has_the_copy() -> None:
    some = Some(3, copies=3)
    some.put_by_itself(ID.manifest, b"data", 0, 1)
    some.places.copy_from_home(ID.manifest)
    assert some.holding(ID.manifest) == [True, True, True]
    assert some.all[1].asked("put") == []


def test_bringing_what_the_home_has_not_brings_nothing() -> None:
    some = Some(3, copies=3)
    some.put_by_itself(ID.manifest, b"data", 1)
    some.places.copy_from_home(ID.manifest)
    assert some.holding(ID.manifest) == [False, True, False]


def test_bringing_tells_of_the_place_that_fails_and_goes_on() -> None:
    some = Some(3, copies=3)
    some.put_by_itself(ID.manifest, b"data", 0)
    some.all[1].fail(StoreDenied("not yours"), "put", only="manifest.json")
    some.places.copy_from_home(ID.manifest)
    assert some.holding(ID.manifest) == [True, False, True]
    assert len(some.told) == 1 and some.all[1].url in some.told[0]


# -- which copy is read ----------------------------------------------------------------------------------------------


def read(store: Store, name: str) -> bytes:
    with store.open(name) as reader:
        room = bytearray(reader.length)
        reader.read_into(0, memoryview(room))
        return bytes(room)


READS: dict[str, Callable[[Store, str], object]] = {
    "get": lambda store, name: store.get(name, limit=99),
    "open": read,
    "stat": lambda store, name: store.stat(name).length,
}


@pytest.mark.parametrize("method", READS)
@pytest.mark.parametrize("apart", [False, True])
def test_a_pack_is_looked_for_in_the_places_of_packs_and_then_in_the_home_and_then_beside(
    method: str, apart: bool
) -> None:
    some = Some(3, apart=apart, beside=1)
    some.put_by_itself(PACK, b"data", 3)
    order: list[int] = []
    for number, place in enumerate(some.all):
        ask = place._ask
        place._ask = lambda *what, number=number, ask=ask: (order.append(number), ask(*what))  # type: ignore[method-assign]
    READS[method](some.places, PACK)
    assert order == [1, 2, 0, 3]


@pytest.mark.parametrize("name", [INDEX, ID.manifest, REF, NOTE])
def test_a_record_is_read_from_the_home_and_no_place_is_asked(name: str) -> None:
    some = Some(3)
    some.put_by_itself(name, sealed(name), 0, 1, 2)
    assert some.places.get(name, limit=999) == sealed(name)
    assert not some.all[1].calls and not some.all[2].calls


@pytest.mark.parametrize("method", READS)
@pytest.mark.parametrize("error", [unreadable(), StoreDenied("not yours"), ObjectNotFound("gone")])
def test_a_pack_that_one_place_does_not_give_is_read_from_another(method: str, error: StoreError) -> None:
    some = Some(3)
    some.put_by_itself(PACK, b"data", 1, 2)
    some.all[1].fail(error, method)
    assert READS[method](some.places, PACK) in (b"data", 4)


@pytest.mark.parametrize("error", [unreadable(), StoreDenied("not yours"), ObjectNotFound("gone")])
def test_an_index_that_the_home_does_not_give_is_read_from_another(error: StoreError) -> None:
    some = Some(3)
    some.put_by_itself(INDEX, b"data", 0, 2)
    some.home.fail(error, "get")
    assert some.places.get(INDEX, limit=9) == b"data"


@pytest.mark.parametrize("method", READS)
def test_a_pack_that_is_nowhere_is_not_found(method: str) -> None:
    some = Some(3, beside=1)
    with pytest.raises(ObjectNotFound) as caught:
        READS[method](some.places, PACK)
    assert caught.value.subject == PACK and PACK in caught.value.message


@pytest.mark.parametrize("method", READS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_pack_that_a_place_may_have_is_not_called_missing(method: str, number: int) -> None:
    some, error = Some(3), unreadable()
    some.all[number].fail(error, method)
    with pytest.raises(StoreError) as caught:
        READS[method](some.places, PACK)
    assert caught.value is error


def test_a_copy_that_is_longer_than_it_may_be_is_passed_over() -> None:
    some = Some(2)
    some.put_by_itself(INDEX, b"much too long", 0)
    some.put_by_itself(INDEX, b"data", 1)
    assert some.places.get(INDEX, limit=4) == b"data"


def test_copies_that_are_turned_away_come_last_until_none_is_left() -> None:
    some = Some(3)
    for number in range(3):
        some.put_by_itself(PACK, b"%d" % number, number)
    found = [read(some.places, PACK)]
    while some.places.mark_damaged(PACK):
        found.append(read(some.places, PACK))
    assert found == [b"1", b"2", b"0"]
    assert not some.places.mark_damaged(PACK)
    assert len(some.told) == 2 and some.all[1].url in some.told[0] and some.all[2].url in some.told[0]


def test_a_copy_that_was_turned_away_is_still_read_where_there_is_no_other() -> None:
    some = Some(2)
    some.put_by_itself(PACK, b"0", 0)
    some.put_by_itself(PACK, b"1", 1)
    assert read(some.places, PACK) == b"1" and some.places.mark_damaged(PACK)
    some.home.lose(PACK)
    assert read(some.places, PACK) == b"1"
    assert not some.places.mark_damaged(PACK)


def test_there_is_no_other_copy_in_a_place_that_cannot_be_asked() -> None:
    some = Some(2)
    some.put_by_itself(PACK, b"0", 0)
    some.put_by_itself(PACK, b"1", 1)
    read(some.places, PACK)
    some.home.fail(unreadable(), "stat")
    assert not some.places.mark_damaged(PACK)
    assert not some.told


def test_a_damaged_copy_that_is_read_again_because_the_other_is_not_given_ends_the_search() -> None:
    some = Some(2)
    some.put_by_itself(PACK, b"0", 0)
    some.put_by_itself(PACK, b"1", 1)
    read(some.places, PACK)
    some.home.fail(unreadable(), "open")
    assert some.places.mark_damaged(PACK)
    assert read(some.places, PACK) == b"1"
    assert not some.places.mark_damaged(PACK)


def test_what_was_never_read_and_a_store_that_is_one_place_have_nothing_to_turn_away() -> None:
    some = Some(2)
    some.put_by_itself(PACK, b"data", 0, 1)
    assert not some.places.mark_damaged(PACK)
    assert not mark_damaged(some.places, None)
    assert not mark_damaged(some.home, PACK)


def test_another_object_is_read_from_where_it_always_was() -> None:
    some, other = Some(2), PACK.replace("00000.", "00001.")
    for name in (PACK, other):
        some.put_by_itself(name, b"0", 0)
        some.put_by_itself(name, b"1", 1)
    read(some.places, PACK)
    assert some.places.mark_damaged(PACK)
    assert (read(some.places, PACK), read(some.places, other)) == (b"0", b"1")


def test_what_is_deleted_is_no_longer_turned_away() -> None:
    some = Some(2)
    some.put_by_itself(PACK, b"0", 0)
    some.put_by_itself(PACK, b"1", 1)
    read(some.places, PACK)
    assert some.places.mark_damaged(PACK)
    some.places.delete([PACK])
    some.put_by_itself(PACK, b"0", 0)
    some.put_by_itself(PACK, b"1", 1)
    assert read(some.places, PACK) == b"1"
    assert some.places.mark_damaged(PACK)


# -- records that the home has, and not whole ------------------------------------------------------------------------


DAMAGE: dict[str, Callable[[Place, str], None]] = {
    "flipped": lambda place, name: place.flip(name),
    "cut": lambda place, name: place.have(name, place.objects[name][:-5]),
    "empty": lambda place, name: place.have(name, b""),
    "unreadable": lambda place, name: place.fail(unreadable(), "get"),
}


@pytest.mark.parametrize("name", [ID.manifest, NOTE, REF])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_record_that_the_home_has_not_whole_is_read_from_a_copy(name: str, damage: str) -> None:
    some = Some(3)
    some.put_by_itself(name, sealed(name, what=1), 0, 1, 2)
    DAMAGE[damage](some.home, name)
    some.all[1].flip(name)
    assert some.places.get(name, limit=999) == sealed(name, what=1)
    (message,) = some.told
    assert name in message and some.all[2].url in message


@pytest.mark.parametrize("name", [ID.manifest, NOTE, REF])
def test_what_the_home_has_not_is_not_there_whatever_copies_say(name: str) -> None:
    some = Some(3, beside=1)
    some.put_by_itself(name, sealed(name), 1, 2, 3)
    for look in (lambda: some.places.get(name, limit=999), lambda: some.places.stat(name)):
        with pytest.raises(ObjectNotFound):
            look()


def test_a_home_that_may_not_be_read_is_not_replaced_by_a_copy() -> None:
    some = Some(2)
    some.put_by_itself(ID.manifest, sealed(ID.manifest), 0, 1)
    some.home.fail(StoreDenied("not yours"), "get")
    with pytest.raises(StoreDenied):
        some.places.get(ID.manifest, limit=999)


def test_where_no_copy_is_whole_the_homes_own_bytes_are_given() -> None:
    some = Some(3)
    some.put_by_itself(ID.manifest, sealed(ID.manifest), 0, 1, 2)
    for place, at in zip(some.all, (20, 30, 40), strict=True):
        place.flip(ID.manifest, at)
    assert some.places.get(ID.manifest, limit=999) == some.home.objects[ID.manifest]
    assert not some.told


def test_where_no_copy_is_readable_the_homes_own_error_is_raised() -> None:
    some, error = Some(2), unreadable()
    some.put_by_itself(ID.manifest, sealed(ID.manifest), 0)
    some.home.fail(error, "get")
    with pytest.raises(StoreError) as caught:
        some.places.get(ID.manifest, limit=999)
    assert caught.value is error


@pytest.mark.parametrize("name", OTHERS)
def test_what_decides_who_owns_a_run_is_read_from_the_home_alone(name: str) -> None:
    some = Some(2)
    some.put_by_itself(name, sealed(name, what=1), 0, 1)
    some.home.flip(name)
    assert some.places.get(name, limit=999) == some.home.objects[name]
    some.home.lose(name)
    for act in READS.values():
        with pytest.raises(ObjectNotFound):
            act(some.places, name)


class Mirrored:
    """A checkpoint with a note and a tag in a home and two places that hold all."""

    def __init__(self, maker: Callable[[Repo], Any]) -> None:
        self.some = Some(3, copies=3)
        self.repo = Repo.create_or_open(self.some.places)
        make = maker(self.repo)
        make.attempt(1)
        self.id = make.checkpoint(1, 1)
        add_note(self.repo, self.id, "metric", {"loss": 1.0})
        put_ref(self.repo, "tag", "best", self.id)
        self.manifest = make.written[self.id]

    def change(self, how: str, *numbers: int) -> None:
        for number in numbers:
            place = self.some.all[number]
            if how == "gone":
                place.lose(INDEX)
            elif how == "longer":
                place.have(INDEX, place.objects[INDEX] + b"\0")
            elif how == "unreadable":
                place.fail(unreadable(), "get", only=INDEX)
            else:
                DAMAGE[how](place, INDEX)


@pytest.fixture
def mirrored(new_maker: Callable[[], Any]) -> Mirrored:
    return Mirrored(type(new_maker()))


HOWS = ["flipped", "cut", "empty", "longer", "gone", "unreadable"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("numbers", [(0,), (0, 1), (1, 0), (0, 2)])
def test_an_index_is_read_from_a_copy_where_the_homes_own_is_not_whole(
    mirrored: Mirrored, how: str, numbers: tuple[int, ...]
) -> None:
    whole = mirrored.repo.index(mirrored.manifest)
    mirrored.change(how, *numbers)
    found = mirrored.repo.index(mirrored.manifest)
    assert (found.save_id, found.digests.tobytes()) == (whole.save_id, whole.digests.tobytes())


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "longer", "gone"])
def test_an_index_that_is_nowhere_whole_is_damaged(mirrored: Mirrored, how: str) -> None:
    mirrored.change(how, 0, 1, 2)
    for _ in range(2):
        with pytest.raises(CorruptionError):
            mirrored.repo.index(mirrored.manifest)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_checkpoint_whose_record_in_the_home_is_damaged_is_what_it_was(mirrored: Mirrored, damage: str) -> None:
    home = mirrored.some.home
    names = [mirrored.id.manifest, NOTE, REF]
    for name in names:
        DAMAGE[damage](home, name)
    home.only = ".json"
    assert mirrored.repo.exists(mirrored.id)
    assert mirrored.repo.manifest(mirrored.id).content == mirrored.manifest.content
    assert [note.body for note in notes(mirrored.repo, mirrored.id)] == [{"loss": 1.0}]
    assert read_ref(mirrored.repo, "tag", "best") == mirrored.id


def test_a_checkpoint_whose_manifest_the_home_has_not_is_none(mirrored: Mirrored) -> None:
    mirrored.some.home.lose(mirrored.id.manifest)
    assert not mirrored.repo.exists(mirrored.id)
    assert mirrored.repo.committed("gpt", 1) == []


# -- listing ---------------------------------------------------------------------------------------------------------


def test_packs_are_listed_wherever_they_lie_under_saves_that_the_home_knows() -> None:
    some = Some(2, apart=True, beside=1)
    other = PACK.replace("00000.", "00001.")
    some.put_by_itself(BEGIN, b"1", 0, 1)
    some.put_by_itself(PACK, b"data", 1)
    some.put_by_itself(other, b"more data", 2)
    some.put_by_itself(f"{ID.directory}/foreign.txt", b"1", 1)
    assert some.places.children(ID.directory) == Listing(
        (), ("begin.json", "rank-00000.safetensors", "rank-00001.safetensors")
    )
    assert list(some.places.walk("")) == [Entry(BEGIN, 1), Entry(PACK, 4), Entry(other, 9)]
    assert list(some.places.walk(ID.directory)) == list(some.places.walk(""))


def test_packs_of_saves_that_the_home_does_not_know_are_not_listed() -> None:
    some = Some(2, apart=True, beside=1)
    some.put_by_itself("runs/gpt/a0001/step-00000002/begin.json", b"1", 0)
    for number in (1, 2):
        some.put_by_itself(PACK, b"data", number)
        some.put_by_itself(BEGIN, b"data", number)
        some.put_by_itself(ID.manifest, b"data", number)
    assert some.places.children(ID.directory) == Listing((), ())
    assert some.places.children("runs/gpt/a0001") == Listing(("step-00000002",), ())
    assert [entry.name for entry in some.places.walk("")] == ["runs/gpt/a0001/step-00000002/begin.json"]


def test_a_pack_in_several_places_is_listed_once_and_as_long_as_it_is_in_the_home() -> None:
    some = Some(3)
    some.put_by_itself(PACK, b"data", 0)
    some.put_by_itself(PACK, b"da", 1, 2)
    assert list(some.places.walk("")) == [Entry(PACK, 4)]
    assert some.places.children(ID.directory).objects == ("rank-00000.safetensors",)


@pytest.mark.parametrize("error", [StoreDenied("not yours"), unreadable()])
def test_a_place_that_cannot_be_listed_hides_its_own_packs_alone(error: StoreError) -> None:
    some = Some(3, apart=True)
    other = PACK.replace("00000.", "00001.")
    some.put_by_itself(BEGIN, b"1", 0)
    some.put_by_itself(PACK, b"data", 1)
    some.put_by_itself(other, b"data", 2)
    some.all[1].fail(error, "children", "walk")
    assert some.places.children(ID.directory).objects == ("begin.json", "rank-00001.safetensors")
    assert [entry.name for entry in some.places.walk("")] == [BEGIN, other]
    assert list(leftovers_of(some.places, "")) == []
    assert len(some.told) == 3 and all(some.all[1].url in one for one in some.told)


def test_a_home_that_cannot_be_listed_is_an_error() -> None:
    some = Some(2)
    some.home.fail(StoreDenied("not yours"), "children", "walk")
    for listing in (some.places.children, some.places.walk, lambda prefix: leftovers_of(some.places, prefix)):
        with pytest.raises(StoreDenied):
            list(listing("runs"))


def test_what_unfinished_puts_have_left_is_listed_of_all_places_and_deleted_from_all() -> None:
    some = Some(2, copies=2, beside=1)
    names = [f"{PACK}.tmp-a", f"{INDEX}.tmp-b", f"{BEGIN}.tmp-c"]
    for number, name in enumerate(names):
        some.put_by_itself(name, b"1", number)
    assert [entry.name for entry in leftovers_of(some.places, "")] == sorted(names)
    some.places.delete([entry.name for entry in leftovers_of(some.places, "")])
    assert not any(place.objects for place in some.all)


# -- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [PACK, INDEX, ID.manifest, NOTE, REF, BEGIN])
def test_what_is_deleted_is_gone_from_every_place(name: str) -> None:
    some = Some(2, copies=2, beside=1)
    some.put_by_itself(name, b"1", 0, 1, 2)
    some.places.delete(iter([name]))
    assert some.holding(name) == [False, False, False]


def test_what_is_the_homes_alone_is_not_deleted_elsewhere() -> None:
    some = Some(2, copies=2)
    some.put_by_itself("runs/gpt/a0001/lease/1.json", b"1", 0, 1)
    some.put_by_itself("somebody's.txt", b"1", 0, 1)
    some.places.delete(["runs/gpt/a0001/lease/1.json", "somebody's.txt"])
    assert not some.home.objects
    assert len(some.all[1].objects) == 2


def test_a_place_that_does_not_delete_is_told_and_the_others_do() -> None:
    some = Some(3, copies=3)
    some.put_by_itself(PACK, b"1", 0, 1, 2)
    some.all[1].fail(StoreDenied("read-only"), "delete")
    some.places.delete([PACK])
    assert some.holding(PACK) == [False, True, False]
    assert len(some.told) == 1 and some.all[1].url in some.told[0] and "read-only" in some.told[0]


def test_a_home_that_does_not_delete_leaves_every_copy() -> None:
    some = Some(2, copies=2)
    some.put_by_itself(ID.manifest, b"1", 0, 1)
    some.home.fail(StoreDenied("read-only"), "delete")
    with pytest.raises(StoreDenied):
        some.places.delete([ID.manifest])
    assert some.holding(ID.manifest) == [True, True]


@pytest.mark.parametrize("name", [INDEX, ID.manifest, NOTE, REF])
def test_settling_a_record_brings_the_copies_that_are_lacking(name: str) -> None:
    some = Some(3, copies=3)
    some.put_by_itself(name, b"data", 0)
    some.places.settle(name)
    assert some.holding(name) == [True, True, True]
    assert name in some.home.asked("settle")


def test_settling_what_the_home_alone_has_asks_no_place() -> None:
    some = Some(2, copies=2)
    some.put_by_itself(ATTEMPT, b"data", 0)
    some.places.settle(ATTEMPT)
    assert not some.all[1].calls and some.home.asked("settle") == [ATTEMPT]


def test_settling_a_pack_settles_each_copy_and_makes_none() -> None:
    some = Some(3, copies=2)
    some.put_by_itself(PACK, b"data", 0, 2)
    some.places.settle(PACK)
    assert [PACK in place.asked("settle") for place in some.all] == [True, False, True]
    assert some.holding(PACK) == [True, False, True]


@pytest.mark.parametrize(
    ("free", "copies", "found"),
    [
        ((5, 10, 20), 1, 20), ((5, 10, 20), 2, 10), ((20, 5, 10), 3, 5),
        ((None, 5, 10), 1, None), ((None, 5, 10), 2, 10), ((None, 5, 10), 3, 5),
        ((None, None, 7), 2, None), ((None, None, 7), 3, 7), ((None, None, None), 3, None),
    ],
)  # fmt: skip
def test_free_is_what_the_last_place_has_that_is_needed_for_so_many_copies(
    free: tuple[int | None, ...], copies: int, found: int | None
) -> None:
    some = Some(3, copies=copies)
    for place, nbytes in zip(some.all, free, strict=True):
        place.free = nbytes
    assert some.places.free_bytes() == found


def test_the_free_space_of_a_home_that_holds_no_packs_does_not_count() -> None:
    some = Some(2, apart=True)
    some.home.free, some.all[1].free = 1, 100
    assert some.places.free_bytes() == 100


def test_a_place_whose_free_space_cannot_be_told_stops_no_save() -> None:
    some = Some(3, copies=2)
    for place in some.all:
        place.free = 10
    some.all[1].fail(StoreError("stale handle"), "free_bytes")
    assert some.places.free_bytes() == 10


def test_closing_closes_every_place_once() -> None:
    some = Some(2, copies=2, beside=1)
    some.places.close()
    assert [place.closed for place in some.all] == [1, 1, 1]


def test_a_place_that_is_not_the_home_is_read_and_neither_put_into_nor_deleted_from() -> None:
    place = Place()
    place.have(PACK, b"data")
    alone = ReplicatedStore(place, [place], 1, of="/the/home")
    for name in (PACK, ATTEMPT, ID.manifest):
        for act in (
            lambda name=name: alone.put_if_absent(name, Bytes(b"1"), token="t0"),
            lambda name=name: alone.delete([name]),
        ):
            with pytest.raises(StoreDenied, match="/the/home") as caught:
                act()
            assert caught.value.hint is not None and "/the/home" in caught.value.hint
    assert place.objects == {PACK: b"data"}
    assert alone.get(PACK, limit=9) == b"data"


def test_copies_of_an_object_are_the_places_that_have_it() -> None:
    some = Some(3, beside=1)
    some.put_by_itself(PACK, b"data", 0, 2, 3)
    assert copies_of(some.places, PACK) == [some.all[2], some.home, some.all[3]]
    assert copies_of(some.home, PACK) == [some.home]
    assert copies_of(some.all[1], PACK) == []
    assert some.places.has(PACK) and not some.places.has(INDEX)
    some.home.fail(unreadable(), "stat")
    assert not exists(some.home, PACK)
    assert describe_missing_pack(some.places) and not describe_missing_pack(some.home)


# -- what a user declares --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [0, -1, 3])
def test_no_more_copies_than_places_and_at_least_one(copies: int) -> None:
    with pytest.raises(UsageError, match=f"copies={copies}"):
        Mirror(Place(), Place(), copies=copies)


def test_a_mirror_keeps_a_copy_in_each_place_unless_fewer_are_asked_for() -> None:
    stores = [Place(), Place(), Place()]
    assert (Mirror(*stores).copies, Mirror(*stores, copies=2).copies) == (3, 2)
    mirror = Mirror(*stores)
    assert mirror.home is stores[0] and mirror.packs_in == tuple(stores)
    assert mirror.members == stores[1:]


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b", "a"), ("a", "./a"), ("a", "b/../a"), ()])
def test_a_mirror_is_of_places_that_differ(names: tuple[str, ...], tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        Mirror(*names)
    assert caught.value.hint is not None


@pytest.mark.parametrize("copies", [0, 3, True + 2, None, "2"])
def test_a_pack_is_on_its_node_or_there_and_in_the_home(copies: Any, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="copies="):
        PerNode(tmp_path / "own", home=tmp_path / "home", copies=copies)


def test_a_nodes_directory_is_not_the_home(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="both"):
        PerNode(tmp_path / "x", home=tmp_path / "y" / ".." / "x")


@pytest.mark.parametrize(("copies", "there"), [(1, [False, True]), (2, [True, True])])
def test_a_nodes_packs_are_in_its_directory_and_with_two_copies_in_the_home(copies: int, there: list[bool]) -> None:
    home, own = Place(), Place()
    PerNode(own, home=home, copies=copies).put_if_absent(PACK, Bytes(b"data"), token="t0")
    assert [PACK in home.objects, PACK in own.objects] == there


HOME_PACK = PACK.replace(".safetensors", ".home.safetensors")


@pytest.mark.parametrize("copies", [1, 2])
def test_a_pack_for_several_nodes_is_on_its_node_and_in_the_home(copies: int) -> None:
    home, own = Place(), Place()
    PerNode(own, home=home, copies=copies).put_if_absent(HOME_PACK, Bytes(b"data"), token="t0")
    assert own.objects[HOME_PACK] == home.objects[HOME_PACK] == b"data"


@pytest.mark.parametrize("which", [0, 1])
def test_a_pack_for_several_nodes_that_one_of_both_refuses_is_in_neither(which: int) -> None:
    home, own = places = [Place(), Place()]
    places[which].fail(StoreFull("no space"), "put")
    with pytest.raises(StoreFull, match="1 of the 2 required copies"):
        PerNode(own, home=home).put_if_absent(HOME_PACK, Bytes(b"data"), token="t0")
    assert HOME_PACK not in home.objects and HOME_PACK not in own.objects


def test_what_is_declared_is_equal_on_every_node_and_differs_where_packs_are_kept_otherwise() -> None:
    def declared(copies: int) -> object:
        return PerNode(Place(), home=Place(), copies=copies, node=secrets.token_hex(4)).declared

    assert declared(1) == declared(1) != declared(2)
    assert Mirror(Place(), Place()).declared != declared(2)


def test_nothing_is_opened_or_made_by_declaring(tmp_path: Any) -> None:
    PerNode(tmp_path / "own", home=tmp_path / "home")
    Mirror(tmp_path / "one", tmp_path / "two")
    assert list(tmp_path.iterdir()) == []


def test_where_nobody_listens_what_goes_wrong_is_a_warning() -> None:
    home, other = Place(), Place()
    other.fail(StoreFull("no space"), "put")
    with pytest.warns(TenutoWarning, match="no space"):
        Mirror(home, other, copies=1).put_if_absent(PACK, Bytes(b"data"), token="t0")
    assert (home.get(PACK, limit=10), PACK in other.objects) == (b"data", False)


@pytest.mark.filterwarnings("error::tenuto.TenutoWarning")  # not of what garbage of other tests left open
def test_where_warnings_are_errors_nothing_that_was_done_fails_by_one() -> None:
    home, other = Place(), Place()
    other.fail(StoreFull("no space"), "put")
    Mirror(home, other, copies=1).put_if_absent(PACK, Bytes(b"data"), token="t0")
    assert home.get(PACK, limit=10) == b"data"


def test_a_mirror_is_asked_only_when_the_home_has_the_object() -> None:
    home, mirror, manifest = MemoryStore("asked-home"), MemoryStore("asked-mirror"), f"{ID.directory}/manifest.json"
    in_home: list[bool] = []

    class Asked(DelegatingStore):
        def stat(self, name: str) -> Stat:
            in_home.append(exists(home, manifest))
            return self.inner.stat(name)

    asked = Asked(mirror)
    places = ReplicatedStore(home, [home], 1, found_members=[asked])
    places.mirrors = (asked,)
    places.put_if_absent(manifest, Bytes(b"1"), token="t")
    assert in_home == [True]
