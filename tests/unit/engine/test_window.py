"""Saves through a window: a state larger than the memory that saving may use."""

from __future__ import annotations

import errno
import re
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto import every
from tenuto.engine.staging import pool
from tenuto.engine.staging.arena import can_move
from tenuto.errors import SaveFailed, StoreFull
from tenuto.events import Event, Warned
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.registry import open_store

MIB = 1 << 20


def state() -> dict[str, Any]:
    generator = np.random.default_rng(3)
    return {"w": generator.random(3 * MIB // 8), "many": {str(n): generator.random(n) for n in range(300)}, "step": 7}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        bool(np.array_equal(one["w"], other["w"]))
        and all(np.array_equal(one["many"][name], other["many"][name]) for name in one["many"])
        and one["step"] == other["step"]
    )


@pytest.mark.parametrize("wait", [True, False])
def test_i9_a_state_beyond_the_budget_goes_out_piece_by_piece(tmp_path: Path, wait: bool) -> None:
    one = state()
    said: list[str] = []

    class Listening:
        def emit(self, event: Event) -> None:
            if isinstance(event, Warned):
                said.append(event.message)

    with tenuto.Checkpointer(tmp_path, one, save=every(steps=1), memory_budget=MIB, sinks=[Listening()]) as ckpt:
        for _ in ckpt.steps(3):
            one["w"][:] += 1
            ckpt.save(wait=wait)
    assert any("through 1.0 MiB" in text for text in said), said
    assert same(tenuto.load(tmp_path).state, one)
    assert_whole(Repo.open(open_store(tmp_path)))


@pytest.fixture(params=["moving", "ring"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The windows of 1 MiB or more that single saves take: memory that moves, or a ring where the system moves none."""
    taken: list[int] = []
    moves = request.param == "moving"
    if moves and not can_move():
        pytest.skip("this system moves no memory")
    name = "acquire_moving_window" if moves else "acquire_window"
    acquire = getattr(pool, name)

    def watched(nbytes: int, window: int) -> Any:
        taken.append(window)
        return acquire(nbytes, window)

    monkeypatch.setattr(pool, name, watched)
    monkeypatch.setattr(pool, "can_move", lambda: moves)
    monkeypatch.setattr(pool, "WINDOW_BYTES", MIB)
    monkeypatch.setattr(pool, "MOVING_WINDOW_BYTES", (MIB, MIB))
    return taken


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_single_save_takes_a_window(tmp_path: Path, windows: list[int], kind: str) -> None:
    where = str(tmp_path) if kind == "local" else f"memory://{uuid.uuid4()}"
    one = state()
    tenuto.save(one, where)
    assert windows == [MIB]
    assert same(tenuto.load(where).state, one)
    assert_whole(Repo.open(open_store(where)))


def test_a_leaf_that_cannot_be_cut_asks_for_a_larger_window(tmp_path: Path, windows: list[int]) -> None:
    turned = np.arange(MIB // 8, dtype=np.float64).reshape(512, -1).T
    one = {"turned": turned, "w": np.ones(2 * MIB)}
    tenuto.save(one, tmp_path)
    assert len(windows) == 2 and windows[1] > 4 * MIB
    assert np.array_equal(tenuto.load(tmp_path).state["turned"], turned)
    with pytest.raises(SaveFailed, match=re.compile(r"piece by piece.*budget is 1\.0 MiB", re.S)):
        tenuto.Checkpointer(tmp_path, one, run="tight", memory_budget=MIB)


class FullAt(OperatingSystem):
    """A disk that takes no more from one offset on."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def pwrite(self, descriptor: int, buffers: Any, offset: int) -> int:
        if offset >= self.offset:
            raise OSError(errno.ENOSPC, "full")
        return super().pwrite(descriptor, buffers, offset)


def test_a_disk_that_fills_up_behind_the_window_fails_the_save_and_not_the_next(tmp_path: Path) -> None:
    disk = FullAt(2 * MIB)
    store = LocalStore(str(tmp_path), filesystem=disk)
    one = state()
    with tenuto.Checkpointer(store, one, save=every(steps=1), memory_budget=MIB, on_error="warn") as ckpt:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in ckpt.steps(2):
                if step == 1:
                    disk.offset = 1 << 40
                one["w"][:] += 1
                handle = ckpt.save(wait=False)
        assert handle is not None
    assert_whole(Repo.open(open_store(tmp_path)))
    loaded = tenuto.load(tmp_path)
    assert loaded.step == 2
    assert same(loaded.state, one)


def test_a_single_save_on_a_disk_that_fills_up_says_so(tmp_path: Path, windows: list[int]) -> None:
    with pytest.raises((SaveFailed, StoreFull), match=r"full|space"):
        tenuto.save(state(), LocalStore(str(tmp_path), filesystem=FullAt(MIB + MIB // 2)))
    assert list(tmp_path.rglob("*.safetensors")) == [] and windows == [MIB]
