"""`tenuto run` where something stands between it and the training: a shell, `tee`, a launcher; and where nobody reads
what it says."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

import tenuto
from support.supervised import SRC, TENUTO, await_that, events, lives

SCRIPT = """
import os, numpy as np, tenuto, pathlib, time
state = {"w": np.zeros(100)}
with tenuto.Checkpointer("ckpts", state) as ckpt:
    for step in ckpt.steps(10**6):
        pathlib.Path("at.new").write_text(f"{os.getpid()} {step}")
        os.replace("at.new", "at")  # whoever reads it finds a whole one
        print("step", step, flush=True)
        time.sleep(0.01)
"""
LAUNCHER = """
import subprocess, sys
sys.exit(1 if subprocess.call([sys.executable, "train.py"]) else 0)
"""
"""As torchrun: what its workers have ended with is a failure to it, whatever it was."""
LINES = {
    "a script": "bash train.sh",
    "a pipe": "sh -c '{python} train.py | tee log'",
    "a launcher behind a shell": "sh -c '{python} launch.py; exit $?'",
    "a trap": "bash -c 'trap : TERM; {python} train.py; exit 7'",
}


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test(tmp_path: Path) -> Iterator[None]:
    yield
    for one in psutil.process_iter(["cwd"]):
        if one.info["cwd"] == str(tmp_path):
            one.kill()


def between(
    directory: Path, line: str, *options: str, script: str = SCRIPT, closed: str = "", **more: Any
) -> subprocess.Popen[str]:
    """Starts a supervisor of what stands before the training, in a session of its own. closed: streams, for a shell."""
    (directory / "train.py").write_text(script)
    (directory / "launch.py").write_text(LAUNCHER)
    (directory / "train.sh").write_text(f"{sys.executable} train.py\n")
    words = [*TENUTO, "run", "--journal", "journal.jsonl", *options, "--"]
    words += shlex.split(line.format(python=sys.executable))
    if closed:
        words = ["sh", "-c", f'exec "$@" {closed}', "sh", *words]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **more}
    environment = {**os.environ, "PYTHONPATH": SRC}
    return subprocess.Popen(words, cwd=directory, env=environment, text=True, start_new_session=True, **streams)


def at(directory: Path) -> tuple[int, int]:
    """Returns the process that trains, and the step that it is in."""
    if not (directory / "at").exists():
        return 0, -1
    pid, step = map(int, (directory / "at").read_text().split())
    return pid, step


def saved(directory: Path) -> int | None:
    return tenuto.Repository(directory / "ckpts").latest_step()


def last(directory: Path, event: str = "left") -> dict[str, Any]:
    return [one for one in events(directory) if one["event"] == event][-1]


@pytest.mark.parametrize(
    ("between_them", "number"),
    [
        ("a script", signal.SIGTERM),
        ("a script", signal.SIGINT),
        ("a pipe", signal.SIGTERM),
        ("a pipe", signal.SIGHUP),
        ("a launcher behind a shell", signal.SIGUSR1),
        ("a trap", signal.SIGTERM),
    ],
)
def test_a_signal_has_the_training_save_and_leave_whoever_stands_in_between(
    tmp_path: Path, between_them: str, number: signal.Signals
) -> None:
    process = between(tmp_path, LINES[between_them])
    await_that(lambda: at(tmp_path)[1] > 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"it was asked to leave ({number.name}) and has left" in err
    assert last(tmp_path)["kind"] == "asked to leave"
    assert saved(tmp_path) == at(tmp_path)[1] + 1 and not lives(at(tmp_path)[0])


def test_a_shell_that_a_scheduler_has_ended_already_takes_nothing_of_the_grace(tmp_path: Path) -> None:
    """The step takes longer than the shell lives."""
    script = SCRIPT.replace("time.sleep(0.01)", "time.sleep(0.01 if step < 3 else 1)")
    process = between(tmp_path, LINES["a script"], script=script)
    await_that(lambda: at(tmp_path)[1] > 2)
    os.kill(int(last(tmp_path, "started")["pid"]), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, saved(tmp_path)) == (143, at(tmp_path)[1] + 1), err


def test_what_a_script_would_do_next_it_is_asked_to_leave_too(tmp_path: Path) -> None:
    process = between(tmp_path, "sh -c '{python} train.py; touch next; sleep 1000; touch never'")
    await_that(lambda: at(tmp_path)[1] > 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, saved(tmp_path)) == (143, at(tmp_path)[1] + 1), err
    assert (tmp_path / "next").exists() and not (tmp_path / "never").exists()


@pytest.mark.parametrize("between_them", ["a script", "a pipe"])
def test_when_the_supervisor_is_killed_a_training_behind_a_shell_saves_and_leaves(
    tmp_path: Path, between_them: str
) -> None:
    process = between(tmp_path, LINES[between_them])
    await_that(lambda: at(tmp_path)[1] > 2)
    pid, _ = at(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    await_that(lambda: not lives(pid))
    assert saved(tmp_path) == at(tmp_path)[1] + 1


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    wait = "while step == 5 and not os.path.exists('told'): time.sleep(0.01)"
    script = SCRIPT.replace("10**6", "60").replace("time.sleep(0.01)", wait)
    (tmp_path / "train.py").write_text(script)
    words = ["nohup", *TENUTO, "run", "--journal", "journal.jsonl", "--", sys.executable, "train.py"]
    environment = {**os.environ, "PYTHONPATH": SRC}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True, **quiet)  # type: ignore[call-overload]
    await_that(lambda: at(tmp_path)[1] == 5)
    os.killpg(process.pid, signal.SIGHUP)
    os.kill(at(tmp_path)[0], signal.SIGHUP)
    (tmp_path / "told").touch()
    assert process.wait(60) == 0 and saved(tmp_path) == 60


ONCE = """
import os, numpy as np, tenuto
from tenuto import every
state = {"w": np.zeros(100)}
with tenuto.Checkpointer("ckpts", state, save=every(steps=1)) as ckpt:
    for step in ckpt.steps(20):
        if (os.environ["TENUTO_RESTART"], step) == ("0", 7):
            FAULT
"""


@pytest.mark.parametrize(
    ("fault", "kind", "evidence"),
    [
        ("raise RuntimeError('once')", "failed", "RuntimeError: once"),
        ("os.kill(os.getpid(), 9)", "killed", "its process was gone after step 7, though the command's status is 0"),
    ],
)
def test_a_failure_whose_status_a_pipe_hides_is_one_all_the_same(
    tmp_path: Path, fault: str, kind: str, evidence: str
) -> None:
    process = between(tmp_path, LINES["a pipe"], script=ONCE.replace("FAULT", fault))
    _, err = process.communicate(timeout=60)
    assert (process.returncode, saved(tmp_path)) == (0, 20), err
    died = last(tmp_path, "died")
    assert (died["kind"], died["evidence"], died["status"]) == (kind, evidence, 1)


@pytest.mark.parametrize(
    "left",
    [
        "import threading; threading.Thread(target=time.sleep, args=(1000,)).start()",
        "import atexit; atexit.register(time.sleep, 1000)",
    ],
    ids=["a thread", "a hook"],
)
def test_an_error_after_which_the_process_does_not_end_is_a_failure_like_any_other(tmp_path: Path, left: str) -> None:
    fault = f"import time; {left}; raise RuntimeError('once')"
    process = between(tmp_path, "{python} train.py", "--grace", "1s", script=ONCE.replace("FAULT", fault))
    _, err = process.communicate(timeout=60)
    assert (process.returncode, saved(tmp_path)) == (0, 20), err
    assert "RuntimeError: once, and its process has not ended within 1.00 s: it is ended" in err
    assert last(tmp_path, "died")["kind"] == "failed" and last(tmp_path, "died")["status"] == 1


@pytest.mark.parametrize("stderr", ["full", "closed", "no reader"])
def test_where_stderr_takes_nothing_supervision_and_training_go_on(tmp_path: Path, stderr: str) -> None:
    more = "import warnings, tenuto.events; tenuto.events.warn('said in vain')\n"
    script = more + ONCE.replace("FAULT", "os.kill(os.getpid(), 9)")
    closed = "2>&-" if stderr == "closed" else ""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    process = between(
        tmp_path, "{python} train.py", script=script, closed=closed, stderr=full if stderr == "full" else writer
    )
    os.close(full)
    os.close(writer)
    assert process.wait(60) == 0 and saved(tmp_path) == 20
    assert [one["kind"] for one in events(tmp_path) if one["event"] in ("died", "left")] == ["killed", "finished"]


def test_a_journal_is_for_its_user_alone(tmp_path: Path) -> None:
    """It holds the command line, which may hold a password."""
    environment = {**os.environ, "PYTHONPATH": SRC, "XDG_STATE_HOME": str(tmp_path / "state")}
    words = [*TENUTO, "run", "--json", "--", "true"]
    subprocess.run(words, env=environment, umask=0o022, check=True, capture_output=True, timeout=60)
    (journal,) = (tmp_path / "state").rglob("*.jsonl")
    assert (journal.stat().st_mode & 0o777, journal.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_training_that_outlives_its_grace_behind_a_shell_has_not_left(tmp_path: Path) -> None:
    script = SCRIPT.replace("time.sleep(0.01)", "time.sleep(0.01 if step < 3 else 1000)")
    process = between(tmp_path, LINES["a script"], "--grace", "1s", script=script)
    await_that(lambda: at(tmp_path)[1] == 3)
    os.kill(int(last(tmp_path, "started")["pid"]), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137 and "SIGTERM came, and it ended by SIGKILL" in err
