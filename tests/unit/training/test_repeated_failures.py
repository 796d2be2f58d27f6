"""A failure that differs from the one before in numbers alone is warned of once, until a save commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.said import said
from tenuto.engine.save.handle import Save
from tenuto.engine.save.save_writer import SaveWriter
from tenuto.errors import DeadlineExceeded, StoreError
from tenuto.events import Event, SaveFailedEvent
from tenuto.model.ids import CheckpointId


def test_a_failure_is_warned_of_once_until_a_save_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, failed = SaveWriter._write, list[int]()

    def fail(self: SaveWriter, job: Any, attempt: Any) -> None:
        if job.save.step != 4:
            raise StoreError(f"no answer for {job.save.step}.5 s")
        write(self, job, attempt)

    class Seen:
        def emit(self, event: Event) -> None:
            if isinstance(event, SaveFailedEvent):
                failed.append(event.id.step)

    monkeypatch.setattr(SaveWriter, "_write", fail)
    with said("no answer") as lines:
        ckpt = tenuto.Checkpointer(tmp_path, {"w": np.ones(3)}, save=tenuto.every(steps=1), sinks=[Seen()])
        for _ in ckpt.steps(7):
            ckpt.wait(60) if ckpt.step == 4 else ckpt._training.saving.saver.join(60)  # type: ignore[union-attr]
        ckpt._training.saving.exit_status.clear()  # type: ignore[union-attr]  # this process goes on
        ckpt.close()
        ckpt._training.saving.exit_status.clear()  # type: ignore[union-attr]
    assert failed == [1, 2, 3, 5, 6, 7], "events tell of each"
    assert len(lines) == 2 and "no answer for 1.5 s" in lines[0] and "no answer for 5.5 s" in lines[1]


def test_who_waits_for_a_save_hears_for_whom_the_save_waits() -> None:
    save = Save(CheckpointId("main", 1, 12), "")
    save.phase = "committing"
    save.waits_for = lambda: "put 3 (step 12): rank 2 (last reported 'writing', 9.0 s ago)"
    with pytest.raises(DeadlineExceeded, match=r"it is committing, and waits for put 3 \(step 12\): rank 2 \(last"):
        save.wait(0.0)
