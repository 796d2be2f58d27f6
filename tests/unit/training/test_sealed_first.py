"""What goes to the store is whole in memory before the store is asked for anything, so it may be full, or hang."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.memory_training import shared_memory
from tenuto import every, keep
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.save import handle as handles
from tenuto.errors import DeadlineExceeded, SaveFailed
from tenuto.model.records import Receipt
from tenuto.policy.save import Moment
from tenuto.store.contract import Content
from tenuto.store.registry import open_store

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only"),
    pytest.mark.filterwarnings("ignore:the save of:tenuto.TenutoWarning"),
]


class Trouble:
    """A store that says it is full, or takes no `begin.json` until it is let go."""

    def __init__(self, where: Path) -> None:
        self._inner = open_store(where)
        self.full = False
        self.hangs = False
        self.reached = threading.Event()
        self._go = threading.Event()

    def let_go(self) -> None:
        self._go.set()

    def free_bytes(self) -> int | None:
        return 0 if self.full else self._inner.free_bytes()

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        if self.hangs and name.endswith("begin.json"):
            self.reached.set()
            assert self._go.wait(60)
        return self._inner.put_if_absent(name, content, token=token)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Trouble]:
    with shared_memory():
        yield Trouble(tmp_path / "ckpts")


def training(store: Any, state: dict[str, Any], **more: Any) -> tenuto.Checkpointer:
    options = {"save": every(steps=1), "memory": every(minutes=60), "keep": keep.all(), **more}
    return tenuto.Checkpointer(store, state, **options)


def tier_of(ckpt: tenuto.Checkpointer) -> MemoryTier:
    memory = ckpt._armed(needed=True).saving.memory
    assert memory is not None
    return memory.tier


def sealed(ckpt: tenuto.Checkpointer) -> int:
    """The newest step that is whole in memory, once what was taken last is sealed."""
    tier = tier_of(ckpt)
    assert tier._pool is not None
    tier._pool.await_sealed(10)
    assert tier.sealed is not None
    return tier.sealed.id.step


def test_on_a_full_store_the_newest_step_is_whole_in_memory(store: Trouble, tmp_path: Path) -> None:
    state = {"w": np.zeros(1000)}
    with training(store, state) as ckpt:
        for step in ckpt.steps(6):
            if step:
                full: Any = pytest.raises(SaveFailed, match="MiB free") if store.full else nullcontext()
                with full:
                    ckpt.wait()
                assert sealed(ckpt) == step
            state["w"] += 1
            store.full = step >= 2
    again = {"w": np.zeros(1000)}
    with training(tmp_path / "ckpts", again) as ckpt:
        found = ckpt.restore()
        assert found is not None and found.source.startswith("from memory, step 6")
    assert set(again["w"].tolist()) == {6.0}


def test_a_store_that_hangs_holds_no_step_from_memory(store: Trouble) -> None:
    state = {"w": np.zeros(1000)}
    with training(store, state, save=every(steps=2), memory=every(steps=1), on_busy="skip") as ckpt:
        ckpt.step_done()
        assert sealed(ckpt) == 1
        store.hangs = True
        ckpt.step_done()
        assert store.reached.wait(60)
        assert sealed(ckpt) == 2
        for step in (3, 4, 5):
            ckpt.step_done()
            assert sealed(ckpt) == step
        store.hangs = False
        store.let_go()


def test_a_save_that_failed_while_it_was_waited_for_is_none_in_memory(store: Trouble) -> None:
    """Nothing of it was sealed: memory is due as if it had not been taken."""
    with training(store, {"w": np.zeros(1000)}, save=every(steps=100)) as ckpt:
        ckpt.step_done()
        store.full = True
        with pytest.raises(SaveFailed, match="MiB free"):
            ckpt.save(wait=True)
        store.full = False
        memory = ckpt._armed(needed=True).saving.memory
        assert memory is not None and memory.tier.sealed is None
        assert memory.decide(Moment(step=1, now_s=time.monotonic() + 3600.0)).save


def test_a_save_that_hangs_while_it_is_waited_for_is_none_in_memory(
    store: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(store, {"w": np.zeros(1000)}, save=every(steps=100)) as ckpt:
        ckpt.step_done()
        store.hangs = True
        with monkeypatch.context() as patched, pytest.raises(DeadlineExceeded, match="has not got on"):
            patched.setattr(handles, "STANDSTILL_S", 0.2)
            ckpt.save(wait=True)
        memory = ckpt._armed(needed=True).saving.memory
        assert memory is not None and memory.tier.sealed is None
        assert memory.decide(Moment(step=1, now_s=time.monotonic() + 3600.0)).save
        store.hangs = False
        store.let_go()
