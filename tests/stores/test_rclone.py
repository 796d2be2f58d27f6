"""A server that ignores the conditions of puts: it holds data, and never decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tenuto
from stores.cases import OnServer
from tenuto.errors import StoreError, StoreUnavailable, TenutoError
from tenuto.store.contract import Bytes, Entry
from tenuto.store.registry import open_store


class TestWithoutConditions(OnServer):
    server_name = "rclone"

    def test_the_probe_finds_it_out_and_leaves_nothing(self, place: str) -> None:
        store = open_store(place)
        assert not store.probe().commits
        assert not store.capabilities.commits
        assert not list(store.walk("", leftovers=True))

    def test_it_holds_data(self, place: str, server: Any) -> None:
        store = open_store(f"{place}/some/prefix")
        large = np.random.default_rng(1).bytes(17 << 20)
        for name, data in (("a/small", b"1234"), ("a/b/pack", large), ("empty", b"")):
            store.put_if_absent(name, Bytes(data), token="t0")
            assert server.get(store.url, name) == data
            assert store.get(name, limit=len(data)) == data
        assert list(store.walk("")) == [Entry("a/b/pack", len(large)), Entry("a/small", 4), Entry("empty", 0)]
        assert store.children("a").directories == ("b",)
        store.delete(["a/small", "absent"])
        assert [entry.name for entry in store.walk("")] == ["a/b/pack", "empty"]

    def test_it_reads_no_ranges_and_one_error_says_so(self, place: str, server: Any) -> None:
        """It sends the range with the status of a whole object."""
        server.put(place, "pack", bytes(10_000))
        with open_store(place).open("pack") as reader, pytest.raises(StoreError, match="range") as caught:
            reader.read_into(100, memoryview(bytearray(100)))
        assert not isinstance(caught.value, StoreUnavailable)

    def test_no_repository_is_made_there(self, place: str) -> None:
        with pytest.raises(TenutoError) as caught:
            tenuto.save({"w": np.zeros(3)}, place)
        assert place in str(caught.value) and caught.value.hint
        assert not list(open_store(place).walk("", leftovers=True))
