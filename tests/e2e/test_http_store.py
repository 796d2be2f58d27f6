"""Checkpoints that a web server gives out: read from, and never written to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.webdav import serving
from tenuto.errors import CorruptionError, NotARepository, ObjectNotFound, RepositoryError, StoreDenied, StoreError
from tenuto.store.contract import Bytes
from tenuto.store.registry import open_store

pytest.importorskip("obstore")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tenuto.save({"w": np.arange(200_000.0)}, tmp_path / "team a" / "ckpts")
    return tmp_path


def test_checkpoints_are_read_over_http(saved: Path) -> None:
    with serving(saved) as url:
        where = f"{url}/team%20a/ckpts"
        assert np.array_equal(tenuto.load(where).state["w"], np.arange(200_000.0))
        with tenuto.open(where) as checkpoint:
            assert checkpoint["w"][777] == 777.0
        for command in (["ls", "--json"], ["verify"], ["show"]):
            done = subprocess.run(
                [sys.executable, "-m", "tenuto", *command, where], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            assert command != ["ls", "--json"] or len(json.loads(done.stdout)["runs"][0]["checkpoints"]) == 1


def test_every_way_of_reading_finds_what_lies_below_a_directory(saved: Path) -> None:
    with serving(saved) as url:
        store = open_store(f"{url}/team%20a/ckpts")
        names = [entry.name for entry in store.walk("")]
        assert "tenuto.json" in names and "tenuto.json" in store.children("").objects
        for name in names:
            data = (saved / "team a" / "ckpts" / name).read_bytes()
            assert store.get(name, limit=len(data)) == data
            assert store.stat(name).length == len(data)
            with store.open(name) as reader:
                read = bytearray(len(data))
                reader.read_into(0, memoryview(read))
                assert read == data


def test_nothing_is_written_over_http(saved: Path) -> None:
    with serving(saved) as url:
        store = open_store(f"{url}/team%20a/ckpts")
        assert not store.capabilities.commits and store.probe() == store.capabilities
        with pytest.raises(StoreDenied, match="is read-only"):
            store.put_if_absent("x", Bytes(b"1"), token="t")
        with pytest.raises(StoreDenied, match="is read-only"):
            store.delete(["tenuto.json"])
        with pytest.raises((RepositoryError, StoreDenied)):
            tenuto.save({"w": np.zeros(3)}, f"{url}/new")


def test_what_is_not_there_and_what_cannot_be_listed(saved: Path) -> None:
    with serving(saved) as url:
        with pytest.raises(NotARepository):
            tenuto.load(f"{url}/elsewhere")
        with pytest.raises(ObjectNotFound):
            open_store(url).get("x", limit=9)
    with serving(saved, lists=False) as url:
        with pytest.raises(StoreError, match="cannot list") as caught:
            tenuto.load(f"{url}/team%20a/ckpts")
        assert "rclone serve webdav" in str(caught.value.hint)


def test_damage_is_found_over_http(saved: Path) -> None:
    pack = next(saved.rglob("*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-100] ^= 1
    pack.write_bytes(data)
    with serving(saved) as url, pytest.raises((CorruptionError, RepositoryError)):
        tenuto.load(f"{url}/team%20a/ckpts")
