"""What `tenuto run` does before it starts a training again, by the cause of its end; with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import tenuto
from support.supervised import events, finished


def test_a_loss_that_is_nan_takes_the_run_back_and_the_script_skips_the_batch(tmp_path: Path) -> None:
    script = """
import numpy as np, tenuto
from tenuto import every
state, again, trained = {"w": np.zeros(4)}, tenuto.restart(), []
with tenuto.Checkpointer("ckpts", state, save=every(steps=5), memory=every(steps=1), on_unhealthy="stop") as ckpt:
    for step in ckpt.steps(30):
        bad = step + 1 == 17  # a batch that breaks the loss whenever it is trained on
        if not again.skips(step + 1):
            state["w"] += np.nan if bad else 1
        trained.append(step)
        ckpt.log(loss=float(state["w"][0]))
print(again.number, again.cause, [(one.start, one.stop) for one in again.skip], trained[0], ckpt.step, state["w"][0])
"""
    done = finished(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 unhealthy [(16, 18)] 15 30 28.0"
    assert "unhealthy (step 17: loss is nan): started again from step 15, before what went wrong" in done.stderr
    (turn,) = tenuto.Repository(tmp_path / "ckpts").log().turns
    assert turn.reason == "step 17: loss is nan"
    assert any(one["event"] == "restarting" and one["how"].startswith("from step 15") for one in events(tmp_path))


def test_one_that_stops_at_nan_again_and_again_has_not_finished(tmp_path: Path) -> None:
    script = """
import numpy as np, tenuto
from tenuto import every
state = {"w": np.zeros(4)}
with tenuto.Checkpointer("ckpts", state, save=every(steps=2), on_unhealthy="stop") as ckpt:
    for step in ckpt.steps(30):
        ckpt.log(loss=np.nan if step == 5 else 1.0)
"""
    done = finished(tmp_path, script, "--in-vain", "1")
    assert done.returncode == 1
    assert "1 start in a row ended without a new step (step 6: loss is nan)" in done.stderr, done.stderr


@pytest.mark.parametrize("uncaught", ["inside", "before"])
def test_an_error_is_named_and_not_its_status_alone(tmp_path: Path, uncaught: str) -> None:
    script = f"""
import numpy as np, tenuto
ckpt = tenuto.Checkpointer("ckpts", {{"w": np.zeros(4)}})
if {uncaught == "before"}:
    raise ValueError("bad data\\nand a second line")
with ckpt:
    for step in ckpt.steps(3):
        raise ValueError("bad data")
"""
    done = finished(tmp_path, script, "--in-vain", "1")
    assert done.returncode == 1
    assert "1 start in a row ended without a new step (ValueError: bad data); status 1" in done.stderr
    assert [one["evidence"] for one in events(tmp_path) if one["event"] == "died"] == ["ValueError: bad data"]


def test_a_batch_that_does_not_fit_is_halved_and_accumulation_doubled(tmp_path: Path) -> None:
    script = """
import numpy as np, tenuto
from tenuto import every
again, state = tenuto.restart(), {"w": np.zeros(4)}
with tenuto.Checkpointer("ckpts", state, save=every(steps=5)) as ckpt:
    for step in ckpt.steps(10):
        if step == 5 and again.accumulation < 4:
            raise MemoryError(f"no room for 1/{again.accumulation}")
        state["w"] += 1
print(again.number, again.accumulation, ckpt.step)
"""
    done = finished(tmp_path, script, "--in-vain", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 4 10\n"
    assert "out of memory (MemoryError: no room for 1/1): started again with 1/2 of the batch" in done.stderr


def test_a_run_whose_checkpoints_are_damaged_is_repaired_before_the_next_start(tmp_path: Path) -> None:
    script = """
import numpy as np, os, pathlib, tenuto
again, state = tenuto.restart(), {"w": np.zeros(40_000)}
if again.number == 0:
    with tenuto.Checkpointer("ckpts", state) as ckpt:
        for step in ckpt.steps(5):
            state["w"] += 1
    tenuto.Repository("ckpts").replicate("copy")
    (pack,) = pathlib.Path("ckpts").rglob("*.safetensors")
    pack.write_bytes(b"damaged" * 1000)
with tenuto.Checkpointer("ckpts", state) as ckpt:
    for step in ckpt.steps(10):
        state["w"] += 1
print(again.cause, ckpt.step, state["w"][0])
"""
    done = finished(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "damaged 10 10.0\n" and "started again after the repair of 1 object" in done.stderr


def test_a_job_goes_on_with_fewer_ranks_after_a_device_has_failed_twice(tmp_path: Path) -> None:
    script = """
import sys, tenuto
from tenuto.telemetry.heartbeat import Heartbeat
ranks, beats = int(sys.argv[1]), Heartbeat.from_environment(0)
beats.beat(1 + tenuto.restart().number)
if ranks == 4:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
print(ranks)
"""
    done = finished(tmp_path, script, "--ranks", "4,2", arguments=["{ranks}"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2\n" and "started again with 2 ranks" in done.stderr
