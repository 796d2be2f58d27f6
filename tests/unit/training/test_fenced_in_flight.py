"""capture="fenced" with several saves in flight: one is copied beside training while others are being written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tenuto
from support.fenced_training import Model, Told, assert_images_are_right, snapshot, spying, stepping
from support.held_store import held
from tenuto import every, keep, on
from tenuto.errors import SaveTorn
from tenuto.integrations.torch import device, fence
from tenuto.state import update_barrier

PROBATION = update_barrier.PROBATION

pytestmark = pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert not update_barrier._barriers, "a fence outlived its Checkpointer"
    fence.steps.compiled.ran = False


def options(told: Told, **more: Any) -> dict[str, Any]:
    return {"in_flight": 2, "capture": "fenced", "keep": keep.all(), "sinks": [told], **more}


def test_a_state_is_copied_behind_its_fence_while_the_one_before_is_being_written(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state, told = {"model": model, "optimizer": optimizer}, Told()
    slow = PROBATION + 2
    store, body = held(place, slow), stepping(model, optimizer)
    with spying(told), tenuto.Checkpointer(store, state, save=every(steps=1) | on.end(), **options(told)) as ckpt:
        for step in ckpt.steps(slow + 4):
            body(step)
            told.snapshots[step + 1] = snapshot(state)
            if step == slow:  # the save of this very step is taken behind the one that is held back
                store.await_pack(slow)
                assert ckpt.stats.in_flight == 1
            if step == slow + 1:
                assert ckpt.stats.in_flight == 2
                assert told.late[slow + 1] >= told.late[slow] > set(), "it was fenced"
                store.let_go()
    assert assert_images_are_right(place, state, told) == list(range(1, slow + 5))
    assert not told.failed and not told.demoted
    assert store.committed == list(range(1, slow + 5))


def test_a_torn_save_behind_another_fails_by_itself(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state, told = {"model": model, "optimizer": optimizer}, Told()
    torn = PROBATION + 2
    store, body = held(place, torn - 1), stepping(model, optimizer)
    copies, copy_one = threading.Event(), device.HostCopies.copy
    copies.set()

    def held_copy(self: device.HostCopies, number: int) -> None:
        if threading.current_thread().name.startswith("tenuto-fence"):
            assert copies.wait(60)
        copy_one(self, number)

    monkeypatch.setattr(device.HostCopies, "copy", held_copy)
    with spying(told), tenuto.Checkpointer(store, state, save=on.end(), **options(told)) as ckpt:
        for step in range(1, torn + 2):
            body(step)
            ckpt.step_done()
            if step == torn:
                copies.clear()
            save = ckpt.save()
            told.snapshots[step] = snapshot(state)
            if step < torn - 1:
                ckpt.wait()
            if step == torn:
                assert ckpt.stats.in_flight == 2
                with torch.no_grad():
                    model.first.weight.zero_()
                copies.set()
                store.let_go()
                with pytest.raises(SaveTorn, match=r"model/first\.weight"):
                    save.wait(60)
        ckpt.wait()
    assert assert_images_are_right(place, state, told) == [step for step in range(1, torn + 2) if step != torn]
    assert list(told.failed) == [torn]
