"""fsspec's own client of WebHDFS, a file system whose renames refuse a name that is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tenuto
from stores.cases import Suite
from stores.hdfs_server import HdfsServer
from tenuto.store.contract import Store
from tenuto.store.registry import open_store


class TestWebHdfs(Suite):
    server_name = "hdfs"

    @pytest.fixture
    def store(self, place: str, server: HdfsServer) -> Store:
        self.raw: Any = server
        store = open_store(server.web_place(place))
        store.probe()
        return store

    def test_a_repository_lives_there(self, store: Store) -> None:
        tenuto.save({"w": np.arange(9.0)}, store)
        found: Any = tenuto.load(store).state["w"]
        assert np.array_equal(found, np.arange(9.0))
