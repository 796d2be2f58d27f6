"""`tenuto run`, with real processes: what dies or hangs is started again, and what should end ends, all of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

import tenuto
from support.supervised import SRC, TENUTO, await_that, events, finished, lives, started


def test_a_training_that_is_killed_and_one_that_hangs_come_to_the_same_end(tmp_path: Path) -> None:
    script = """
import os, time, numpy as np, tenuto
from tenuto import every
state, start = {"w": np.zeros(100)}, os.environ["TENUTO_RESTART"]
with tenuto.Checkpointer("ckpts", state, save=every(steps=5), memory=every(steps=1)) as ckpt:
    for step in ckpt.steps(20):
        state["w"] += step
        if (start, step) == ("0", 7):
            while ckpt.stats.kept_in_memory < 6:  # it is sealed in the background
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        if (start, step) == ("1", 12):
            time.sleep(1000)
        time.sleep(0.01)
print(start, ckpt.step, state["w"][0])
"""
    done = finished(tmp_path, script, "--hang", "6s", "--where", "ckpts")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"2 20 {float(sum(range(20)))}\n"
    assert "tenuto: killed (SIGKILL): started again (restart 1)" in done.stderr
    assert "tenuto: resumed run main at step 7 from memory" in done.stderr
    assert "no step after step 12 for" in done.stderr
    assert "2 restarts (1 x killed, 1 x hung)" in done.stderr
    found = events(tmp_path)
    assert [one["event"] for one in found if one["event"] != "stack"] == [
        "supervising", "started", "training", "died", "restarting", "started", "resumed", "recovered", "died",
        "restarting", "started", "resumed", "recovered", "left", "ended",
    ]  # fmt: skip
    assert [one["step"] for one in found if one["event"] == "died"] == [7, 12]
    assert [one["where"] for one in found if one["event"] == "training"] == [str(tmp_path / "ckpts")]


def test_one_that_dies_at_once_again_and_again_is_given_up_with_its_status(tmp_path: Path) -> None:
    done = finished(tmp_path, "import sys; sys.exit(3)", "--in-vain", "2", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert (found["status"], found["restarts"], found["reason"]) == (
        3, 1, "2 starts in a row ended without a new step (status 3)",
    )  # fmt: skip


def test_what_a_killed_supervisor_has_left_in_memory_the_next_one_removes(tmp_path: Path) -> None:
    script = "import os, sys, time; print(os.environ['TENUTO_HEARTBEAT'], flush=True); time.sleep(float(sys.argv[1]))"
    running = started(tmp_path, script, arguments=("1000",))
    killed = started(tmp_path, script, arguments=("1000",))
    assert running.stdout is not None and killed.stdout is not None
    stays, left = Path(running.stdout.readline().strip()), Path(killed.stdout.readline().strip())
    assert left.is_dir() and stays.is_dir() and left != stays
    killed.kill()
    killed.wait(60)
    try:  # from here on any supervisor on this machine may be the next one
        (nameless := left.with_name(f"{left.name}-nameless")).mkdir()
        (strange := left.with_name(f"{left.name}-strange")).mkdir()
        (strange / "owner").write_text("{}")
        (link := left.with_name(f"{left.name}-link")).symlink_to(left)
        try:
            assert finished(tmp_path, script, arguments=("0",)).returncode == 0
            assert not left.exists() and all(one.is_dir() for one in (stays, nameless, strange)) and link.is_symlink()
        finally:
            nameless.rmdir()
            shutil.rmtree(strange)
            link.unlink()
    finally:
        running.terminate()
        running.wait(60)
    assert not stays.exists()


def test_what_it_left_in_memory_is_saved_when_it_is_given_up(tmp_path: Path) -> None:
    script = """
import os, time, numpy as np, tenuto
from tenuto import every
state = {"w": np.zeros(100)}
with tenuto.Checkpointer("ckpts", state, save=every(steps=1000), memory=every(steps=1)) as ckpt:
    for step in ckpt.steps(20):
        state["w"] += 1
        if step == 7:
            while os.environ["TENUTO_RESTART"] == "0" and ckpt.stats.kept_in_memory < 7:
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
"""
    done = finished(tmp_path, script, "--in-vain", "1", "--where", "ckpts")
    assert done.returncode == 137
    saved = re.search(r"tenuto: saved from memory: main/a000\d/7\n", done.stderr)
    assert saved, done.stderr
    assert tenuto.load(tmp_path / "ckpts").state["w"][0] == 7


def test_a_signal_is_passed_on_and_who_leaves_is_not_started_again(tmp_path: Path) -> None:
    script = """
import numpy as np, tenuto, pathlib, time
state = {"w": np.zeros(100)}
with tenuto.Checkpointer("ckpts", state) as ckpt:
    for step in ckpt.steps(10**6):
        pathlib.Path("at").write_text(str(step))
        time.sleep(0.01)
"""
    process = started(tmp_path, script)
    await_that(lambda: (tmp_path / "at").exists())
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "it was asked to leave (SIGTERM) and has left" in err
    assert tenuto.Repository(tmp_path / "ckpts").latest_step() is not None
    assert sum(one["event"] == "started" for one in events(tmp_path)) == 1


def test_one_that_ignores_the_signal_is_killed_after_its_grace(tmp_path: Path) -> None:
    script = """
import signal, pathlib, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("ready").touch()
time.sleep(1000)
"""
    process = started(tmp_path, script, "--grace", "1s")
    await_that(lambda: (tmp_path / "ready").exists())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 137
    assert sum(one["event"] == "started" for one in events(tmp_path)) == 1


def test_a_daemon_that_it_left_behind_is_ended_before_the_next_start(tmp_path: Path) -> None:
    script = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    with open("daemons", "a") as file:
        print(os.getpid(), file=file)
    time.sleep(1000)
while not pathlib.Path("daemons").exists() or len(open("daemons").readlines()) <= int(os.environ["TENUTO_RESTART"]):
    time.sleep(0.01)
sys.exit(1 if os.environ["TENUTO_RESTART"] == "0" else 0)
"""
    done = finished(tmp_path, script, "--grace", "1s")
    assert done.returncode == 0, done.stderr
    daemons = list(map(int, (tmp_path / "daemons").read_text().split()))
    assert len(daemons) == 2 and not any(map(lives, daemons))


def test_when_the_supervisor_is_killed_the_training_saves_and_leaves(tmp_path: Path) -> None:
    script = """
import os, numpy as np, tenuto, pathlib, time
state = {"w": np.zeros(100)}
with tenuto.Checkpointer("ckpts", state) as ckpt:
    for step in ckpt.steps(10**6):
        pathlib.Path("pid.new").write_text(str(os.getpid()))
        os.replace("pid.new", "pid")  # whoever reads it finds a whole one
        time.sleep(0.01)
"""
    process = started(tmp_path, script)
    await_that((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.communicate(timeout=60)
    await_that(lambda: not lives(pid))
    assert tenuto.Repository(tmp_path / "ckpts").latest_step() is not None


def test_a_deadline_asks_it_to_leave(tmp_path: Path) -> None:
    done = finished(tmp_path, "import time; time.sleep(1000)", "--deadline", "1s")
    assert done.returncode == 143
    assert "the deadline of 1.00 s has come" in done.stderr


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--hang", "often"], 2, "--hang='often' is not a time"),
        (["--in-vain", "0"], 2, "--in-vain 0 makes no sense"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: list[str], status: int, message: str) -> None:
    done = finished(tmp_path, "", *options)
    assert done.returncode == status and message in done.stderr


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [*TENUTO, "run", "--", "no-such-program"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "no-such-program cannot be run: no such file or directory" in done.stderr


def test_a_rehearsal_kills_and_stops_and_comes_to_the_same_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import os, numpy as np, tenuto, time
from tenuto import every
state = {"w": np.zeros(100)}
with tenuto.Checkpointer("ckpts", state, save=every(steps=20), memory=every(steps=1)) as ckpt:
    # Both faults find it in training, however late they come; then it has enough to do for a step of its own.
    for step in ckpt.steps(ckpt.step + 50 if os.environ["TENUTO_RESTART"] == "2" else 10**6):
        state["w"] += step
        time.sleep(0.01)
print("the same end:", ckpt.step > 50, state["w"][0] == sum(range(ckpt.step)))
""")
    options = ["--at", "1s:kill,4s:stop", "--hang", "4s", "--journal", "journal.jsonl", "--json"]
    done = subprocess.run(
        [*TENUTO, "chaos", *options, "--", sys.executable, "train.py"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SRC}, capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert "the same end: True True\n" in done.stderr
    assert [one["kind"] for one in found["injected"]] == ["kill", "stop"]
    assert [one["kind"] for one in found["starts"]] == ["killed", "hung", "finished"], done.stderr
    assert 0 < found["lost_s"] < found["elapsed_s"]


def test_a_rank_that_its_launcher_has_replaced_is_not_waited_for(tmp_path: Path) -> None:
    """Its last beat is an hour old, and would be waited for no longer."""
    script = """
import os, time
from tenuto.telemetry.heartbeat import Heartbeat
beats = Heartbeat.from_environment(0)
if (pid := os.fork()) == 0:
    os._exit(0)
os.waitpid(pid, 0)
now_ns, own = time.monotonic_ns, os.getpid
time.monotonic_ns, os.getpid = lambda: now_ns() - 3600 * 10**9, lambda: pid
Heartbeat.from_environment(1).beat(1)
time.monotonic_ns, os.getpid = now_ns, own
for step in range(1, 60):
    beats.beat(step)
    time.sleep(0.1)
"""
    done = finished(tmp_path, script, "--hang", "60s", "--json")
    assert json.loads(done.stdout)["restarts"] == 0, done.stderr


def test_one_that_hangs_and_leaves_with_status_zero_has_still_failed(tmp_path: Path) -> None:
    script = """
import signal, sys, time
from tenuto.telemetry.heartbeat import Heartbeat
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
Heartbeat.from_environment(0).beat(1)
time.sleep(1000)
"""
    done = finished(tmp_path, script, "--hang", "1s", "--in-vain", "1", "--restarts", "0", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["starts"][0]["kind"]) == (124, "hung")


COUNTING = """
import os, numpy as np, tenuto, pathlib, time
from tenuto import every, on
state, new = {"w": np.zeros(100)}, f"new-{os.getpid()}"  # a file of its own: two may write at once
with tenuto.Checkpointer("ckpts", state, save=every(steps=10) | on.end() | on.signal(), memory=every(steps=1)) as ckpt:
    for step in ckpt.steps(80):
        state["w"] += step
        pathlib.Path(new).write_text(f"{os.getpid()} {step}")
        os.replace(new, "now")
        time.sleep(0.02)
print("w", state["w"][0])
"""
END = f"w {float(sum(range(80)))}\n"


def now(directory: Path) -> tuple[int, int]:
    """Returns the process that trains, and its step."""
    if not (directory / "now").exists():
        return 0, -1
    pid, step = map(int, (directory / "now").read_text().split())
    return pid, step


def test_of_two_supervisors_of_one_run_one_trains_and_the_other_gives_up_and_names_it(tmp_path: Path) -> None:
    wait = "        while step == 40 and not pathlib.Path('go').exists():\n            time.sleep(0.01)\n"
    script = COUNTING.replace("        pathlib", f"{wait}        pathlib", 1)
    first = started(tmp_path, script)
    await_that(lambda: now(tmp_path)[1] > 2)
    second = finished(tmp_path, script.replace("memory=", "wait_for_owner=0.5, memory="), "--in-vain", "2")
    assert second.returncode == 1 and "2 starts in a row ended without a new step (RunInUse: " in second.stderr
    (tmp_path / "go").touch()
    out, err = first.communicate(timeout=100)
    assert (first.returncode, out) == (0, END), err
    assert tenuto.load(tmp_path / "ckpts").state["w"][0] == sum(range(80))


@pytest.mark.parametrize("when", ["before a step", "in training", "between two starts"])
def test_a_supervisor_that_is_killed_and_started_again_comes_to_the_same_end(tmp_path: Path, when: str) -> None:
    script = COUNTING
    if when == "between two starts":  # it waits before the second start, and nothing of it is left
        script = "raise SystemExit(1)"
    first = started(tmp_path, script)
    if when == "before a step":
        await_that(lambda: any(one["event"] == "started" for one in journal(tmp_path)))
    elif when == "in training":
        await_that(lambda: now(tmp_path)[1] > 5)
    else:
        await_that(lambda: any(one["event"] == "restarting" for one in journal(tmp_path)))
    first.kill()
    done = finished(tmp_path, COUNTING)
    first.communicate(timeout=60)
    assert (done.returncode, done.stdout) == (0, END), done.stderr
    pids = [one["pid"] for one in journal(tmp_path) if one["event"] == "started"]
    assert len(pids) >= 2 and not any(map(lives, pids))


def journal(directory: Path) -> list[dict[str, object]]:
    return events(directory) if (directory / "journal.jsonl").exists() else []


def test_one_that_prints_gigabytes_is_neither_held_up_nor_kept_in_memory(tmp_path: Path) -> None:
    script = """
import os, sys
block = b"x" * (1 << 20)
for _ in range(2048):
    os.write(1, block)
"""
    process = started(tmp_path, script)
    assert process.stdout is not None
    taken, most = 0, 0
    while data := process.stdout.buffer.read(1 << 20):
        taken += len(data)
        if taken % (256 << 20) == 0:
            most = max(most, psutil.Process(process.pid).memory_info().rss)
    process.communicate(timeout=60)
    assert (process.returncode, taken) == (0, 2 << 30) and most < 256 << 20


def test_one_that_dies_within_a_second_is_waited_for_ever_longer_and_given_up(tmp_path: Path) -> None:
    done = finished(tmp_path, "raise SystemExit(5)", "--in-vain", "3", "--json")
    assert done.returncode == 5
    waits = [one["after_s"] for one in events(tmp_path) if one["event"] == "restarting"]
    assert waits == [1.0, 2.0]


def test_one_that_leaves_before_its_last_step_with_status_zero_is_done_and_its_step_is_told(tmp_path: Path) -> None:
    script = COUNTING.replace("        state", "        if step == 7:\n            break\n        state", 1)
    done = finished(tmp_path, script, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["restarts"], found["step"]) == (0, 0, 7)
    assert "is not saved" in done.stderr or "was left before" in done.stderr
