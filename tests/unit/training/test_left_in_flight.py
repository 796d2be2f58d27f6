"""A training that is interrupted while its last save is in flight, and begun again in the same process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.engine.save.save_writer import SaveWriter
from tenuto.training.saves import RunSaver


def test_the_next_one_goes_on_from_the_save_that_was_left_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, go_on = SaveWriter._write, threading.Event()

    def slow(self: SaveWriter, job: Any, attempt: Any) -> None:
        assert go_on.wait(60)
        write(self, job, attempt)

    def interrupted(self: RunSaver, timeout: float | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SaveWriter, "_write", slow)
    ckpt = tenuto.Checkpointer(tmp_path, {"w": np.ones(3)}, save=tenuto.on.end())
    ckpt.restore()
    ckpt.step_done()
    handle = ckpt.save()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RunSaver, "wait", interrupted)
        ckpt.close()
    assert not handle.done
    threading.Timer(0.2, go_on.set).start()
    with tenuto.Checkpointer(tmp_path, {"w": np.zeros(3)}) as again:
        restored = again.restore()
        assert handle.committed and restored is not None and restored.step == 1
