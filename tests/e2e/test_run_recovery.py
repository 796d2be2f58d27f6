"""What `tenuto run` does before it starts a training again, by the cause of its end; with real processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import tenuto
from support.supervised import await_that, events, finished, lives, started


def test_a_loss_that_is_nan_takes_the_run_back_and_the_script_skips_the_batch(tmp_path: Path) -> None:
    script = """
import numpy as np, tenuto
from tenuto import every, on
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
from tenuto import every, on
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
from tenuto import every, on
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
    assert "out of memory (MemoryError: no room for 1/1): started again and asked for 1/2 of the batch" in done.stderr


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


RANKS = """
import os, pathlib, signal, sys, time, numpy as np, tenuto, torch, torch.distributed as dist
from tenuto import every, on
from tenuto.telemetry.heartbeat import VARIABLE, read_beats
dist.init_process_group("gloo")
rank, start, total = dist.get_rank(), os.environ["TENUTO_RESTART"], torch.zeros(1000)
with tenuto.Checkpointer("ckpts", {"total": total}, save=every(steps=1000), memory=every(steps=1)) as ckpt:
    for step in ckpt.steps(20):
        part = torch.full((1000,), float(step * (rank + 1)))
        dist.all_reduce(part)
        total += part
        if rank == 1 and (start, step) == ("0", 7):
            while ckpt.stats.kept_in_memory < 6:
                time.sleep(0.01)
            beats = read_beats(pathlib.Path(os.environ[VARIABLE]))
            print("parts sealed", *(beat.sealed for beat in beats if beat.rank == rank))
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and (start, step) == ("1", 12):
            time.sleep(1000)
if rank == 0:
    print(start, ckpt.step, total[0].item())
"""


@pytest.mark.long
def test_of_a_job_under_torchrun_one_rank_is_killed_and_one_hangs(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = finished(tmp_path, RANKS, "--hang", "6s", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert "parts sealed 2" in done.stdout
    assert done.stdout.splitlines()[-1] == f"2 20 {3.0 * sum(range(20))}"
    assert done.stderr.count("tenuto: resumed run main at step") == 2 and "from memory" in done.stderr
    assert "no step after step 12 for" in done.stderr
    assert [one["kind"] for one in events(tmp_path) if one["event"] == "died"] == ["failed", "hung"]


ENDLESS = """
import os, numpy as np, tenuto, pathlib, time
from tenuto import every, on
state, save = {"w": np.zeros(100)}, every(steps=10) | on.signal()
new = f"new-{os.getpid()}"  # a file of its own: two may write at once
with tenuto.Checkpointer("ckpts", state, save=save, memory=MEMORY, takeover=True, wait_for_owner=0.5) as ckpt:
    for step in ckpt.steps(10**6 if not pathlib.Path("enough").exists() else ckpt.step + 25):
        state["w"] += 1
        pathlib.Path(new).write_text(f"{os.getpid()} {ckpt.stats.committed} {ckpt.stats.kept_in_memory}")
        os.replace(new, "now")
        time.sleep(0.005)
"""


def now(directory: Path) -> list[int]:
    return list(map(int, (directory / "now").read_text().split())) if (directory / "now").exists() else [0, 0, 0]


def test_a_zombie_of_a_killed_supervisor_commits_nothing_once_its_run_is_taken(tmp_path: Path) -> None:
    first = started(tmp_path, ENDLESS.replace("MEMORY", "None"))
    await_that(lambda: now(tmp_path)[1] > 0)
    zombie = now(tmp_path)[0]
    os.kill(zombie, signal.SIGSTOP)
    first.kill()  # its child is asked to leave, and cannot hear that yet
    (tmp_path / "enough").touch()
    done = finished(tmp_path, ENDLESS.replace("MEMORY", "None"))
    assert done.returncode == 0, done.stderr
    repository = tenuto.Repository(tmp_path / "ckpts")
    newest = repository.latest()
    os.kill(zombie, signal.SIGCONT)  # it hears now, and wants to save
    _, err = first.communicate(timeout=60)
    # What it was doing decides which: asked again before a save begins, or refused at the manifest of one in flight.
    assert "can no longer save" in err or "was claimed since, and the save closed" in err, err
    await_that(lambda: not lives(zombie))
    assert repository.latest() == newest
    assert repository.log().points[0].id == newest


def test_what_a_killed_supervisor_and_its_training_left_in_memory_is_saved_by_the_next_one(tmp_path: Path) -> None:
    first = started(
        tmp_path,
        ENDLESS.replace("MEMORY", "every(steps=1)").replace("every(steps=10) | on.signal()", "every(steps=10**6)"),
    )
    await_that(lambda: now(tmp_path)[2] > 5)
    training = now(tmp_path)[0]
    os.kill(training, signal.SIGSTOP)
    first.kill()
    os.kill(training, signal.SIGKILL)
    first.communicate(timeout=60)
    done = finished(tmp_path, "raise SystemExit(3)", "--in-vain", "1", "--where", "ckpts")
    assert done.returncode == 3 and "saved from memory: main/" in done.stderr, done.stderr
    assert tenuto.load(tmp_path / "ckpts").state["w"][0] >= 5


def test_the_settings_file_says_what_is_done_where_no_option_does(tmp_path: Path) -> None:
    (tmp_path / "tenuto.toml").write_text('[supervise]\non = ["failed=stop"]\n')
    done = finished(tmp_path, "raise SystemExit(3)")
    assert done.returncode == 3 and "failed (status 3), after which it is not to be started again" in done.stderr
    done = finished(tmp_path, "raise SystemExit(3)", "--on", "failed=restart", "--in-vain", "2")
    assert "2 starts in a row ended" in done.stderr
