"""Once nothing can be saved any more the run is given back, for good, and not while this process still writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.said import said
from tenuto.engine.save.save_writer import SaveWriter
from tenuto.errors import RanksMissing
from tenuto.events import Event, Warned
from tenuto.repo.ownership.lease import Lease
from tenuto.training import saves
from tenuto.training.saves import RunSaver


def test_a_run_is_not_given_back_while_a_save_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, go_on, told, released = SaveWriter._write, threading.Event(), threading.Event(), threading.Event()
    release: Callable[..., None] = Lease.release

    def slow(self: SaveWriter, job: Any, attempt: Any) -> None:
        assert go_on.wait(60)
        write(self, job, attempt)

    def noted(self: Lease, timeout: float | None = None) -> None:
        release(self, timeout)
        released.set()

    class Seen:
        def emit(self, event: Event) -> None:
            if isinstance(event, Warned) and "not released yet" in event.message:
                told.set()

    monkeypatch.setattr(SaveWriter, "_write", slow)
    monkeypatch.setattr(Lease, "release", noted)
    monkeypatch.setattr(saves, "LOSS_S", 0.05)
    ckpt = tenuto.Checkpointer(tmp_path, {"w": np.ones(3)}, save=tenuto.on.end(), sinks=[Seen()])
    ckpt.restore()
    ckpt.step_done()
    handle = ckpt.save()
    saving: RunSaver = ckpt._training.saving  # type: ignore[union-attr]
    error = RanksMissing("rank 1 is dead", ranks=(1,))
    with said("rank 1 is dead"):
        saving._lost(error)
        assert told.wait(60)
    assert not released.is_set(), "a save is still being written"
    go_on.set()
    assert released.wait(60) and handle.committed
    assert saving.group.loss is None, "the ranks of this test are not lost"
    with pytest.raises(RanksMissing, match="rank 1 is dead"):
        ckpt.step_done()
    with pytest.raises(RanksMissing, match="rank 1 is dead"):
        ckpt.save()
    ckpt.close(60, failed=RanksMissing("rank 1 is dead"))
    saving.exit_status.clear()  # this process goes on
