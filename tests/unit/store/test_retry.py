from __future__ import annotations

import random

import pytest

from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    ObjectNotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnreliable,
)
from tenuto.store.contract import Bytes, Store
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.retry import Patience, RetryingStore

QUICK = Patience(attempts=4, wait_s=0)


class Flaky:
    """A store whose calls fail as told: `fail("get", error, ...)` gives the errors of the next calls of `get`, and None
    lets one pass. With `after`, the call is done first, and its reply lost."""

    def __init__(self, inner):
        self.inner, self.plan, self.calls, self.after = inner, {}, [], False

    def fail(self, method, *errors, after=False):
        self.plan[method] = list(errors)
        self.after = after

    def __getattr__(self, name):
        attribute = getattr(self.inner, name)
        if not callable(attribute):
            return attribute

        def call(*arguments, **options):
            self.calls.append(name)
            waiting = self.plan.get(name)
            error = waiting.pop(0) if waiting else None
            if error is None:
                return attribute(*arguments, **options)
            if self.after:
                attribute(*arguments, **options)
            raise error

        return call


def passing():
    return StoreUnavailable("for now")


@pytest.fixture
def flaky(request):
    return Flaky(MemoryStore(request.node.nodeid))


@pytest.fixture
def store(flaky):
    return RetryingStore(flaky, QUICK)


ACTS = {
    "get": lambda store: store.get("x", limit=9),
    "open": lambda store: store.open("x"),
    "stat": lambda store: store.stat("x"),
    "children": lambda store: store.children(""),
    "walk": lambda store: list(store.walk("")),
    "delete": lambda store: store.delete(name for name in ["x"]),
    "settle": lambda store: store.settle("x"),
    "free_bytes": lambda store: store.free_bytes(),
    "probe": lambda store: store.probe(),
    "put_if_absent": lambda store: store.put_if_absent("y", Bytes(b"2"), token="t0"),
}


def filled(flaky):
    flaky.inner.put_if_absent("x", Bytes(b"1"), token="t0")
    return flaky


@pytest.mark.parametrize("method", sorted(ACTS))
def test_passing_faults_are_borne(flaky, store, method):
    filled(flaky).fail(method, passing(), passing(), passing())
    ACTS[method](store)
    assert flaky.calls.count(method) == 4


@pytest.mark.parametrize("method", sorted(ACTS))
def test_patience_ends(flaky, store, method):
    filled(flaky).fail(method, *(passing() for _ in range(10)))
    with pytest.raises(StoreUnavailable):
        ACTS[method](store)
    assert flaky.calls.count(method) == 4


@pytest.mark.parametrize("method", sorted(ACTS))
@pytest.mark.parametrize("kind", [StoreUnreliable, StoreFull, StoreDenied, StoreError, CorruptionError, ObjectNotFound])
def test_nothing_else_is_tried_again(flaky, store, method, kind):
    filled(flaky).fail(method, kind("as it is"))
    with pytest.raises(kind):
        ACTS[method](store)
    assert flaky.calls.count(method) == 1


def test_a_walk_that_fails_halfway_is_walked_again(flaky, store):
    filled(flaky)
    turns = iter([True, False])
    walk = flaky.inner.walk

    def halfway(prefix, **named):
        yield from walk(prefix, **named)
        if next(turns):
            raise passing()

    flaky.inner.walk = halfway
    assert [entry.name for entry in store.walk("")] == ["x"]


def test_time_is_bounded_too(flaky):
    filled(flaky).fail("get", *(passing() for _ in range(100)))
    impatient = RetryingStore(flaky, Patience(attempts=100, timeout_s=1e-9, wait_s=0))
    with pytest.raises(StoreUnavailable):
        impatient.get("x", limit=9)
    assert flaky.calls.count("get") < 3


def test_a_put_whose_reply_was_lost_is_a_success_once_it_is_settled(flaky, store):
    flaky.fail("put_if_absent", passing(), after=True)
    receipt = store.put_if_absent("x", Bytes(b"mine"), token="t0")
    assert (receipt.name, receipt.length, receipt.store) == ("x", 4, flaky.url)
    assert flaky.calls == ["put_if_absent", "put_if_absent", "open", "settle"]


@pytest.mark.parametrize("theirs", [b"longer than mine", b"1234567x", b"", b"x2345678"])
def test_a_name_that_another_took_meanwhile_is_taken(flaky, store, theirs):
    flaky.inner.put_if_absent("x", Bytes(theirs), token="t1")
    flaky.fail("put_if_absent", passing())
    with pytest.raises(AlreadyExists):
        store.put_if_absent("x", Bytes(b"12345678"), token="t0")
    assert "settle" not in flaky.calls


def test_large_objects_that_differ_in_their_last_byte_are_not_ours(flaky, store):
    data = bytes(3 * 2**20)
    flaky.inner.put_if_absent("x", Bytes(data[:-1] + b"1"), token="t1")
    flaky.fail("put_if_absent", passing())
    with pytest.raises(AlreadyExists):
        store.put_if_absent("x", Bytes(data), token="t0")


def test_a_large_lost_reply_in_many_pieces(flaky, store):
    data = random.Random(1).randbytes(3 * 2**20 + 5)

    class Cut:
        length = len(data)

        def pieces(self):
            for start in range(0, len(data), 700_001):
                yield memoryview(data)[start : start + 700_001]

    flaky.fail("put_if_absent", passing(), after=True)
    assert store.put_if_absent("x", Cut(), token="t0").length == len(data)


def test_equal_bytes_at_the_first_try_are_somebody_elses(flaky, store):
    flaky.inner.put_if_absent("x", Bytes(b"same"), token="t1")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("x", Bytes(b"same"), token="t0")
    assert flaky.calls == ["put_if_absent"]


def test_a_lost_reply_that_cannot_be_settled_is_no_success(flaky, store):
    flaky.fail("put_if_absent", passing(), after=True)
    flaky.fail("settle", StoreUnreliable("no"), after=False)
    flaky.inner.put_if_absent("x", Bytes(b"mine"), token="t0")
    with pytest.raises(StoreUnreliable):
        store.put_if_absent("x", Bytes(b"mine"), token="t0")


def test_reading_back_may_fail_in_passing_too(flaky, store):
    flaky.fail("put_if_absent", passing(), after=True)
    flaky.plan["open"] = [passing()]
    flaky.after = True
    assert store.put_if_absent("x", Bytes(b"mine"), token="t0").length == 4


def test_a_stale_reader_is_opened_again(flaky, store):
    filled(flaky)

    class Stale:
        length, alignment, closed = 1, 1, False

        def read_into(self, offset, buffer):
            raise passing()

        def close(self):
            self.closed = True

    stale = Stale()
    opened = iter([stale])
    real = flaky.inner.open
    flaky.inner.open = lambda name: next(opened, None) or real(name)
    with store.open("x") as reader:
        buffer = bytearray(1)
        reader.read_into(0, memoryview(buffer))
        assert buffer == b"1"
        assert not stale.closed, "another thread may be reading through it"
    assert stale.closed


def test_an_object_of_another_length_is_not_read_on(flaky, store):
    filled(flaky)
    with store.open("x") as reader:
        flaky.inner.delete(["x"])
        flaky.inner.put_if_absent("x", Bytes(b"other"), token="t1")
        fails = iter([passing()])
        real = reader._reader.read_into

        def read_into(offset, buffer):
            for error in fails:
                raise error
            real(offset, buffer)

        reader._reader.read_into = read_into
        with pytest.raises(CorruptionError):
            reader.read_into(0, memoryview(bytearray(1)))


def test_a_padded_read_is_still_one_after_the_object_was_opened_anew(flaky, store):
    filled(flaky)

    class Direct:
        length, alignment = 1, 4096

        def read_into(self, offset, buffer):
            raise passing()

        def close(self):
            pass

    opened = iter([Direct()])
    real = flaky.inner.open
    flaky.inner.open = lambda name: next(opened, None) or real(name)
    with store.open("x") as reader:
        assert reader.alignment == 4096
        buffer = bytearray(4096)
        reader.read_into(0, memoryview(buffer))
        assert buffer[:1] == b"1"
        with pytest.raises(CorruptionError):
            reader.read_into(4096, memoryview(bytearray(4096)))
        assert reader.alignment == 4096


def test_waiting_leaves_the_trainings_random_numbers_alone(flaky):
    store = RetryingStore(filled(flaky), Patience(attempts=3, wait_s=1e-6))
    flaky.fail("get", passing(), passing())
    random.seed(3)
    before = random.getstate()
    store.get("x", limit=9)
    assert random.getstate() == before


def test_it_is_a_store(store):
    assert isinstance(store, Store)
    assert store.capabilities.commits
    store.close()
