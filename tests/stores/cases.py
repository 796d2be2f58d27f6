"""What every object store has to hold in front of a real server, also under faults of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.errors import AlreadyExists, CorruptionError, NothingRestorable, StoreDenied, StoreError, StoreUnavailable
from tenuto.maintenance.verify import assert_whole
from tenuto.store.contract import Bytes, Store, leftovers_of
from tenuto.store.registry import open_store
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.testing.fault_proxy import Fault, FaultProxy
from tenuto.testing.store_suite import StoreSuite

SMALL = b"a manifest, say; " * 100
LARGE = np.random.default_rng(1).bytes(17 << 20)
"""Longer than a part: a multipart upload of two."""


class OnServer:
    """Tests of one server: `server_name` is its fixture, `place` the URL of a new bucket, which is reached directly."""

    server_name: str

    @pytest.fixture
    def server(self, request: pytest.FixtureRequest) -> Any:
        return request.getfixturevalue(self.server_name)

    @pytest.fixture
    def place(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        found: str = server.new_place()
        return found


class Suite(OnServer, StoreSuite):
    """The shipped suite. What bypasses the store is a client of another make, where there is one."""

    @pytest.fixture
    def store(self, place: str, server: Any) -> Store:
        self.raw = server
        return open_store(f"{place}/some/prefix")

    def raw_put(self, store: Store, name: str, data: bytes) -> None:
        self.raw.put(store.url, name, data)

    def raw_get(self, store: Store, name: str) -> bytes | None:
        found: bytes | None = self.raw.get(store.url, name)
        return found

    def raw_delete(self, store: Store, name: str) -> None:
        self.raw.delete(store.url, name)


class Access(OnServer):
    def test_wrong_credentials(self, server: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in server.wrong_credentials.items():
            monkeypatch.setenv(name, value)
        store = open_store(place)
        for call in (
            lambda: store.put_if_absent("x", Bytes(b"1"), token="t0"),
            lambda: store.get("x", limit=9),
            lambda: list(store.walk("")),
        ):
            with pytest.raises(StoreDenied) as caught:
                call()
            said = f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"
            assert caught.value.hint and place in said
            assert not any(value in said for value in server.wrong_credentials.values())

    def test_a_missing_bucket(self, place: str) -> None:
        store = open_store(f"{place}-absent")
        for call in (lambda: store.put_if_absent("x", Bytes(b"1"), token="t0"), lambda: list(store.walk(""))):
            with pytest.raises(StoreError, match="there is no") as caught:
                call()
            assert caught.value.hint and f"{place}-absent".partition("://")[2] in caught.value.hint

    def test_two_repositories_in_one_bucket(self, place: str) -> None:
        for name, value in (("one", 1.0), ("two", 2.0)):
            tenuto.save({"w": np.full(1000, value)}, f"{place}/{name}")
        for name, value in (("one", 1.0), ("two", 2.0)):
            assert (tenuto.load(f"{place}/{name}").state["w"] == value).all()
            assert_whole(tenuto.Repository(f"{place}/{name}").repo)


class BehindProxy(OnServer):
    @pytest.fixture
    def proxy(self, place: str, server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
        """In front of the server for all that is opened from now on. A client gives up a silent connection soon."""
        from tenuto.store.objects import store as objects

        monkeypatch.setitem(objects._ONE, "read_timeout", timedelta(seconds=1))
        with FaultProxy(server.endpoint, seed=7) as proxy:
            for name, value in server.environment(proxy.url).items():
                monkeypatch.setenv(name, value)
            yield proxy


ONE_REQUEST = [
    Fault("status", status=500, code="InternalError"),
    Fault("status", status=503, code="SlowDown"),
    Fault("cut request"),
    Fault("cut request", after=20),
    Fault("cut reply", after=20),
    Fault("truncate", after=20),
    Fault("lose reply"),
    Fault("hang"),
    Fault("hang reply"),
]
KINDS = [f"{fault.kind} {fault.status if fault.kind == 'status' else fault.after}" for fault in ONE_REQUEST]


def read_range(store: Store, name: str, offset: int, length: int) -> bytes:
    data = bytearray(length)
    with store.open(name) as reader:
        reader.read_into(offset, memoryview(data))
    return bytes(data)


class Faults(BehindProxy):
    """Each fault, at each request of each call: the call succeeds exactly, or raises an error of the tree."""

    @pytest.mark.parametrize("fault", ONE_REQUEST, ids=KINDS)
    def test_one_fault_is_passed_over(self, server: Any, place: str, proxy: FaultProxy, fault: Fault) -> None:
        store = RetryingStore(open_store(place).inner, Patience(wait_s=0.0))  # type: ignore[attr-defined]
        server.put(place, "a/there", SMALL)
        server.put(place, "a/more/there", b"1")
        server.put(place, "long", LARGE)

        def under(fault: Fault, call: Callable[[], Any]) -> Any:
            proxy.clear()
            proxy.add(fault)
            return call()

        assert under(fault, lambda: store.put_if_absent("a/new", Bytes(SMALL), token="t0")).length == len(SMALL)
        assert server.get(place, "a/new") == SMALL
        with pytest.raises(AlreadyExists):
            under(fault, lambda: store.put_if_absent("a/there", Bytes(b"other"), token="t0"))
        assert server.get(place, "a/there") == SMALL
        found = under(fault, lambda: store.get("a/there", limit=9999))
        assert found == SMALL or (fault.kind == "truncate" and found == SMALL[:20])  # small objects are sealed
        for nth in (1, 2):  # it opens the object, and then reads
            later = replace(fault, nth=nth)
            assert under(later, lambda: read_range(store, "long", 3 << 20, 500)) == LARGE[3 << 20 :][:500]
        assert under(fault, lambda: store.stat("a/there")).length == len(SMALL)
        names = ["a/more/there", "a/new", "a/there", "long"]
        assert under(fault, lambda: [entry.name for entry in store.walk("")]) == names
        assert under(fault, lambda: store.children("a")) == store.children("a")
        under(fault, lambda: store.delete(["a/new", "a/there"]))
        proxy.clear()
        assert [entry.name for entry in store.walk("")] == ["a/more/there", "long"]

    @pytest.mark.parametrize("fault", ONE_REQUEST, ids=KINDS)
    def test_a_fault_that_lasts_is_one_error(self, server: Any, place: str, proxy: FaultProxy, fault: Fault) -> None:
        store = RetryingStore(open_store(place).inner, Patience(attempts=2, wait_s=0.0))  # type: ignore[attr-defined]
        server.put(place, "there", SMALL)
        proxy.add(replace(fault, times=None))
        refused = 0
        calls: list[Callable[[], Any]] = [
            lambda: store.put_if_absent("new", Bytes(SMALL), token="t0"),
            lambda: store.get("there", limit=9999),
        ]
        if not fault.kind.startswith("hang"):  # each of these takes the client's patience
            calls += [
                lambda: store.stat("there"),
                lambda: list(store.walk("")),
                lambda: store.delete(["there"]),
            ]
        for call in calls:
            try:
                call()
            except StoreUnavailable as error:
                refused += 1
                assert error.message
        assert refused == len(calls) or fault.after  # requests and replies without a body pass
        proxy.clear()
        assert server.get(place, "new") in (None, SMALL)
        assert server.get(place, "there") in (None, SMALL)

    @pytest.mark.parametrize("kind", ["status", "cut request", "lose reply"])
    @pytest.mark.parametrize("nth", range(1, 7))
    def test_a_large_put_at_each_of_its_requests(
        self, server: Any, place: str, proxy: FaultProxy, kind: Any, nth: int
    ) -> None:
        store = open_store(place)
        proxy.add(Fault(kind, nth=nth, after=20, status=500, code="InternalError"))
        assert store.put_if_absent("a/pack", Bytes(LARGE), token="t0").length == len(LARGE)
        assert server.get(place, "a/pack") == LARGE
        left = [entry.name for entry in leftovers_of(store, "")]  # an upload that was begun, and nobody heard of it
        assert len(left) <= 1
        store.delete(left)
        assert [entry.name for entry in open_store(place).walk("", leftovers=True)] == ["a/pack"]

    def test_a_lost_reply_of_a_put_is_ones_own_and_not_anothers(
        self, server: Any, place: str, proxy: FaultProxy
    ) -> None:
        store = open_store(place)
        proxy.add(Fault("lose reply", method="PUT"))
        store.put_if_absent("claim", Bytes(SMALL), token="t0")
        assert proxy.counts()["PUT"] == 2
        proxy.clear()
        proxy.add(Fault("cut request", method="PUT", after=20))
        server.put(place, "other", SMALL[:-1] + b"!")
        with pytest.raises(AlreadyExists):
            store.put_if_absent("other", Bytes(SMALL), token="t0")
        assert server.get(place, "other") == SMALL[:-1] + b"!"

    def test_what_is_not_whole_is_never_accepted(self, server: Any, place: str, proxy: FaultProxy) -> None:
        store = RetryingStore(open_store(place).inner, Patience(attempts=1))  # type: ignore[attr-defined]
        for after in (0, 20, len(SMALL) - 1):
            proxy.add(Fault("cut request", method="PUT", after=after))
            with pytest.raises(StoreUnavailable):
                store.put_if_absent("x", Bytes(SMALL), token="t0")
            proxy.clear()
            assert server.get(place, "x") is None
        for after in (20, len(LARGE) // 3):
            proxy.add(Fault("cut request", method="PUT", after=after, times=None))
            with pytest.raises(StoreError):
                store.put_if_absent("pack", Bytes(LARGE), token="t0")
            proxy.clear()
            assert server.get(place, "pack") is None

    @pytest.mark.parametrize("name", ["attempt.json", "manifest", "begin.json", ".safetensors", "index"])
    @pytest.mark.parametrize("kind", ["lose reply", "cut request", "status"])
    def test_a_training_whose_put_of_each_kind_meets_a_fault(
        self, place: str, proxy: FaultProxy, kind: Any, name: str
    ) -> None:
        proxy.add(Fault(kind, method="PUT", path=name, after=20))
        state = {"w": np.arange(1000.0), "step": 0}
        with tenuto.Checkpointer(place, state, save=tenuto.every(steps=1), keep=tenuto.keep.all()) as ckpt:
            for step in ckpt.steps(3):
                state["w"] += step
        assert sum(request.fault is not None for request in proxy.requests) == 1
        repository = tenuto.Repository(place)
        assert sorted((one.attempt, one.step) for one in repository.checkpoints("main")) == [(1, 1), (1, 2), (1, 3)]
        assert_whole(repository.repo)

    def test_a_training_under_random_faults_is_exact(self, place: str, proxy: FaultProxy) -> None:
        kinds: tuple[Any, ...] = ("status", "cut request", "cut reply", "truncate", "lose reply")
        proxy.add(*(Fault(kind, chance=0.02, times=None, after=20) for kind in kinds))
        expected = np.arange(1000.0)
        for last in (4, 8):
            state = {"w": np.arange(1000.0), "step": 0}
            with tenuto.Checkpointer(place, state, save=tenuto.every(steps=1)) as ckpt:
                for step in ckpt.steps(last):
                    state["w"] *= 1 + 1 / (step + 1)
        for step in range(8):
            expected *= 1 + 1 / (step + 1)
        assert np.array_equal(state["w"], expected)
        assert any(request.fault for request in proxy.requests)
        proxy.clear()
        assert_whole(tenuto.Repository(place).repo)
        assert np.array_equal(tenuto.load(place).state["w"], expected)

    def test_a_bit_that_flips_on_the_way_is_found(self, place: str, proxy: FaultProxy) -> None:
        data = np.arange(100_000.0)
        tenuto.save({"w": data}, place)
        for after in (0, 100, 50_000, 700_000):
            proxy.forget()
            proxy.add(Fault("flip", method="GET", path=r"\.safetensors", after=after, times=None))
            try:
                found = tenuto.load(place).state["w"]
            except (CorruptionError, NothingRestorable):
                pass
            else:
                assert np.array_equal(found, data)
            proxy.clear()
        assert np.array_equal(tenuto.load(place).state["w"], data)
