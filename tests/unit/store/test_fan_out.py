"""One content for several stores: asked for once, given to each whole, and nobody waits for one that has failed."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.errors import AlreadyExists, CorruptionError, StoreDenied, StoreError, StoreFull, StoreUnavailable
from tenuto.model.records import Receipt
from tenuto.store.contract import Bytes, Content, Store
from tenuto.store.local.store import LocalStore
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.store.wrappers.fan_out import put_into_all
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.testing.store_suite.base import LARGE, Failing, Interrupted, Pieces, Refilled, patterned

NAME = "runs/main/pack"
QUICK = Patience(attempts=4, wait_s=0)


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Callable[[int], list[MemoryStore]]:
    return lambda count: [MemoryStore(f"{request.node.nodeid}-{number}") for number in range(count)]


class InOneRoom:
    """Pieces of given lengths, all in one memory, which holds nothing of the content before and after."""

    def __init__(self, data: bytes, cuts: Sequence[int]) -> None:
        self.data, self.cuts = data, cuts
        self.length = len(data)
        self.begun = 0
        self.given = 0

    def pieces(self) -> Iterator[memoryview]:
        self.begun += 1
        room = bytearray(max(self.cuts, default=0))
        start = 0
        for nbytes in self.cuts:
            part = self.data[start : start + nbytes]
            room[: len(part)] = part
            self.given += 1
            yield memoryview(room)[: len(part)]
            room[:] = b"\xff" * len(room)
            start += nbytes


def cut(data: bytes, sizes: Sequence[int]) -> InOneRoom:
    """The data in pieces of these lengths, and what they leave in one more."""
    cuts: list[int] = []
    for size in sizes:
        cuts.append(min(size, len(data) - sum(cuts)))
    return InOneRoom(data, [*cuts, len(data) - sum(cuts)])


class Breaking(DelegatingStore):
    """Fails each put with the errors it is given, after it has taken `after` pieces; None lets one pass."""

    def __init__(self, inner: Store, *errors: Exception | None, after: int = 1) -> None:
        super().__init__(inner)
        self.errors, self.after = list(errors), after
        self.kept: list[Iterator[memoryview]] = []
        """What it had asked for pieces stays unfinished, as where an error's trace holds it."""

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        error = self.errors.pop(0) if self.errors else None
        if error is None:
            return super().put_if_absent(name, content, token=token)
        pieces = content.pieces()
        self.kept.append(pieces)
        for _ in range(self.after):
            next(pieces, None)
        raise error


def whole(stores: Sequence[Store], data: bytes) -> bool:
    return all(store.get(NAME, limit=len(data)) == data for store in stores)


def nothing_in(store: Store) -> bool:
    return not list(store.walk("", leftovers=True))


def test_each_piece_is_asked_for_once_for_all_stores(memory: Callable[[int], list[MemoryStore]]) -> None:
    content, stores = InOneRoom(b"onetwothree", (3, 3, 5)), memory(3)
    put_into_all(stores, NAME, content, token="t0")
    assert whole(stores, b"onetwothree")
    assert (content.begun, content.given) == (1, 3)


def test_each_store_gives_its_own_receipt_in_the_order_of_the_stores(
    memory: Callable[[int], list[MemoryStore]],
) -> None:
    stores = memory(4)
    found = put_into_all(stores, NAME, Bytes(b"data"), token="t0")
    assert found == [Receipt(NAME, 4, store.url) for store in stores]


@pytest.mark.parametrize("parts", [(), (b"",), (b"", b"", b"x", b"")])
def test_content_of_few_bytes_reaches_all(memory: Callable[[int], list[MemoryStore]], parts: tuple[bytes, ...]) -> None:
    stores = memory(3)
    put_into_all(stores, NAME, Pieces(parts), token="t0")
    assert whole(stores, b"".join(parts))


def test_a_large_object_reaches_directories_and_memory_alike(
    tmp_path: Path, memory: Callable[[int], list[MemoryStore]]
) -> None:
    stores = [LocalStore(tmp_path / "a"), *memory(1), LocalStore(tmp_path / "b")]
    data = patterned(LARGE + 77)
    put_into_all(stores, NAME, Refilled(data, 2**18), token="t0")
    assert whole(stores, data)


@given(
    data=st.binary(max_size=300),
    sizes=st.lists(st.integers(0, 60), max_size=12),
    takers=st.integers(1, 9),
    failing=st.sets(st.integers(0, 8)),
    after=st.integers(0, 14),
)
def test_memory_that_is_refilled_between_pieces_reaches_every_store_that_lasts(
    data: bytes, sizes: list[int], takers: int, failing: set[int], after: int
) -> None:
    wrong = StoreError("broken")
    stores = [
        Breaking(FreshMemory(), wrong, after=after) if number in failing else FreshMemory() for number in range(takers)
    ]
    content = cut(data, sizes)
    found = put_into_all(stores, NAME, content, token="t0")
    for number, (store, one) in enumerate(zip(stores, found, strict=True)):
        if number in failing:
            assert one is wrong and nothing_in(store)
        else:
            assert store.get(NAME, limit=len(data)) == data
    assert content.begun <= 1
    assert content.given <= len(content.cuts)


class FreshMemory(DelegatingStore):
    """A store in memory that nothing else has."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(f"tee-{secrets.token_hex(8)}"))


@dataclass
class Watched:
    """Content that is asked for a piece only when every taker that lasts has done with the one before."""

    count: int
    takers: list[Counting] = field(default_factory=list)
    early: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.count

    def pieces(self) -> Iterator[memoryview]:
        for number in range(self.count):
            if any(taker.done < number for taker in self.takers):
                self.early.append(number)
            yield memoryview(b"%d" % (number % 10))


class Counting(DelegatingStore):
    """Counts the pieces that it has done with, of which each takes it a while of its own."""

    def __init__(self, inner: Store, turns: int) -> None:
        super().__init__(inner)
        self.done, self.turns = 0, turns

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        parts = []
        for piece in content.pieces():
            for _ in range(self.turns):
                bytes(2**12)
            parts.append(bytes(piece))
            self.done += 1
        return self.inner.put_if_absent(name, Bytes(b"".join(parts)), token=token)


def test_the_next_piece_is_asked_for_when_all_have_done_with_the_last(
    memory: Callable[[int], list[MemoryStore]],
) -> None:
    content = Watched(200)
    content.takers = [Counting(store, 50 * number) for number, store in enumerate(memory(5))]
    put_into_all(content.takers, NAME, content, token="t0")
    assert not content.early
    assert whole(content.takers, bytes(48 + number % 10 for number in range(200)))


@pytest.mark.parametrize("after", [0, 1, 2, 9])
def test_a_store_that_fails_holds_nobody_up(memory: Callable[[int], list[MemoryStore]], after: int) -> None:
    good, other, bad = memory(3)
    wrong = StoreFull("no space")
    stores = [good, Breaking(bad, wrong, after=after), other]
    found = put_into_all(stores, NAME, InOneRoom(b"onetwothree", (3, 3, 5)), token="t0")
    assert found == [Receipt(NAME, 11, good.url), wrong, Receipt(NAME, 11, other.url)]
    assert whole([good, other], b"onetwothree") and nothing_in(bad)


def test_where_every_store_fails_each_says_why(memory: Callable[[int], list[MemoryStore]]) -> None:
    errors = [StoreFull("no space"), StoreDenied("not yours"), ValueError("what is this")]
    stores = [Breaking(store, error) for store, error in zip(memory(3), errors, strict=True)]
    assert put_into_all(stores, NAME, InOneRoom(b"12", (1, 1)), token="t0") == errors


def test_a_store_that_has_the_name_refuses_alone(memory: Callable[[int], list[MemoryStore]]) -> None:
    first, second = memory(2)
    second.put_if_absent(NAME, Bytes(b"before"), token="t0")
    found = put_into_all([first, second], NAME, Bytes(b"data"), token="t0")
    assert isinstance(found[1], AlreadyExists)
    assert (first.get(NAME, limit=9), second.get(NAME, limit=9)) == (b"data", b"before")


@pytest.mark.parametrize("given", [b"", b"some", bytes(2**20)])
def test_what_the_content_raises_is_raised_and_is_nowhere(
    tmp_path: Path, memory: Callable[[int], list[MemoryStore]], given: bytes
) -> None:
    stores = [*memory(2), LocalStore(tmp_path / "x")]
    with pytest.raises(Interrupted):
        put_into_all(stores, NAME, Failing(given, 2**21), token="t0")
    assert all(map(nothing_in, stores))


class Raising:
    """Content that ends in an error of any kind."""

    length = 9

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(b"1234")
        raise self.error


@pytest.mark.parametrize(
    "error", [StoreFull("of the source"), CorruptionError("damaged"), KeyboardInterrupt(), SystemExit(3)], ids=repr
)
def test_an_error_of_the_content_is_not_taken_for_one_of_a_store(
    memory: Callable[[int], list[MemoryStore]], error: BaseException
) -> None:
    stores = memory(3)
    with pytest.raises(type(error)) as caught:
        put_into_all(stores, NAME, Raising(error), token="t0")
    assert caught.value is error
    assert all(map(nothing_in, stores))


def test_content_that_raises_is_raised_also_where_a_store_has_failed_before(
    memory: Callable[[int], list[MemoryStore]],
) -> None:
    good, bad = memory(2)
    with pytest.raises(Interrupted):
        put_into_all([good, Breaking(bad, StoreFull("no space"), after=0)], NAME, Failing(b"1", 9), token="t0")
    assert nothing_in(good) and nothing_in(bad)


def test_a_store_that_begins_anew_is_given_the_content_anew_when_the_others_are_done(
    memory: Callable[[int], list[MemoryStore]],
) -> None:
    first, second, third = memory(3)
    seen: list[bool] = []

    class Seen(InOneRoom):
        def pieces(self) -> Iterator[memoryview]:
            seen.append(NAME in first.place.objects and NAME in third.place.objects)
            return super().pieces()

    content = Seen(b"onetwothree", (3, 3, 5))
    retrying = RetryingStore(Breaking(second, StoreUnavailable("for now"), after=2), QUICK)
    found = put_into_all([first, retrying, third], NAME, content, token="t0")
    assert all(isinstance(one, Receipt) for one in found)
    assert whole([first, second, third], b"onetwothree")
    assert seen == [False, True]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_every_store_may_begin_anew_more_than_once(memory: Callable[[int], list[MemoryStore]], after: int) -> None:
    inner = memory(3)
    stores = [
        RetryingStore(Breaking(store, *[StoreUnavailable("for now")] * (1 + number), after=after), QUICK)
        for number, store in enumerate(inner)
    ]
    found = put_into_all(stores, NAME, InOneRoom(b"onetwothree", (3, 3, 5)), token="t0")
    assert all(isinstance(one, Receipt) for one in found)
    assert whole(inner, b"onetwothree")


def test_a_store_that_fails_again_when_it_begins_anew_fails_alone(
    memory: Callable[[int], list[MemoryStore]],
) -> None:
    good, bad = memory(2)
    error = StoreDenied("not any more")
    stores = [good, RetryingStore(Breaking(bad, StoreUnavailable("for now"), error), QUICK)]
    assert put_into_all(stores, NAME, Refilled(b"data", 1), token="t0") == [Receipt(NAME, 4, good.url), error]
    assert whole([good], b"data") and nothing_in(bad)


def test_content_that_cannot_begin_anew_fails_the_store_that_asks_for_it_alone(
    memory: Callable[[int], list[MemoryStore]],
) -> None:
    good, bad = memory(2)

    class Once(InOneRoom):
        def pieces(self) -> Iterator[memoryview]:
            if self.begun:
                raise Interrupted
            return super().pieces()

    stores = [good, RetryingStore(Breaking(bad, StoreUnavailable("for now"), after=1), QUICK)]
    found = put_into_all(stores, NAME, Once(b"12", (1, 1)), token="t0")
    assert isinstance(found[1], Interrupted)
    assert whole([good], b"12") and nothing_in(bad)


def test_a_put_whose_reply_was_lost_is_found_to_be_there(memory: Callable[[int], list[MemoryStore]]) -> None:
    class Lost(Breaking):
        def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
            receipt = self.inner.put_if_absent(name, content, token=token)
            if self.errors and (error := self.errors.pop(0)) is not None:
                raise error
            return receipt

    first, second = memory(2)
    found = put_into_all(
        [RetryingStore(Lost(first, StoreUnavailable("for now")), QUICK), second],
        NAME,
        InOneRoom(b"onetwo", (3, 3)),
        token="t0",
    )
    assert all(isinstance(one, Receipt) for one in found)
    assert whole([first, second], b"onetwo")


def test_a_store_alone_puts_in_the_thread_that_asks(memory: Callable[[int], list[MemoryStore]]) -> None:
    threads: list[int] = []

    class Here(InOneRoom):
        def pieces(self) -> Iterator[memoryview]:
            threads.append(threading.get_ident())
            return super().pieces()

    put_into_all(memory(1), NAME, Here(b"1", (1,)), token="t0")
    assert threads == [threading.get_ident()]


def test_no_thread_stays_behind(memory: Callable[[int], list[MemoryStore]]) -> None:
    good, bad = memory(2)
    put_into_all([good, Breaking(bad, StoreFull("no space"))], NAME, Bytes(b"data"), token="t0")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tenuto-copies")]


def test_where_no_more_threads_can_be_started_all_places_get_it_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As at the end of an interpreter, or at a limit of threads: the second of two cannot be started."""
    stores = [MemoryStore(f"few-threads-{number}") for number in range(3)]
    start, begun = threading.Thread.start, []

    def few(self: threading.Thread) -> None:
        if self.name == "tenuto-copies":
            begun.append(self)
            if len(begun) > 1:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", few)
    found = put_into_all(stores, "a/pack", Bytes(b"data" * 5000), token="t0")
    assert all(isinstance(one, Receipt) for one in found)
    assert [store.get("a/pack", limit=1 << 20) for store in stores] == [b"data" * 5000] * 3
    assert not begun[0].is_alive()
