"""What a person sees on stderr of a plain script, whole: numbers are masked, everything else is compared."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import forked_processes, loaded_interpreter

HEAD = """
import os, signal, sys
import numpy as np
import tenuto
from tenuto import every, keep, on
where, ALL = "ckpts", keep.latest(100)
state = {"w": np.full(1000, 3, np.float32), "n": 0}
def train(steps, at=None, **options):
    options = {"save": every(steps=1) | on.end() | on.signal(), "keep": ALL} | options
    with tenuto.Checkpointer(where, state, **options) as ckpt:
        for step in ckpt.steps(steps):
            state["n"] += 1
            if at is not None:
                at(step + 1)
"""
RESUMED = "tenuto: resumed run main at step {} from PLACE/ckpts (SIZE in TIME, verified; no known gap)\n"


def written(place: Path, body: str, name: str = "train.py") -> str:
    path = place / name
    path.write_text(HEAD + textwrap.dedent(body))
    return str(path)


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TENUTO_LOG"} | more


def masked(text: str, place: Path) -> str:
    text = text.replace("\r\n", "\n").replace(str(place), "PLACE")
    text = re.sub(r"\b[\d,.]+ (B|[KMG]iB)", "SIZE", text)
    text = re.sub(r"\b[\d.]+ (us|ms|s)\b", "TIME", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)", "DATE", text)
    return re.sub(r"process \d+ of \S+ on [^\s,]+", "process PID of USER on HOST", text)


def said(place: Path, body: str, *, status: int = 0, more: Mapping[str, str] | None = None) -> str:
    """Runs a script in `place`; returns its stderr, masked."""
    done = loaded_interpreter.run([written(place, body)], cwd=place, env=environment(**(more or {})), timeout=120)
    assert done.returncode == status, done.stderr
    return masked(done.stderr, place)


def damage(place: Path, step: int) -> None:
    (pack,) = place.glob(f"ckpts/runs/main/a*/step-{step:08d}/rank-00000.safetensors")
    data = bytearray(pack.read_bytes())
    data[data.index(np.full(1000, 3, np.float32).tobytes())] ^= 1
    pack.write_bytes(data)


DAMAGED = (
    "tenuto: step 3 of run main is damaged and was passed over for step 2 (w is damaged: "
    "runs/main/a0001/step-00000003/rank-00000.safetensors, 4000 bytes from offset OFFSET, are not what was saved); "
    "run `tenuto verify PLACE/ckpts --run main`\n"
)


def without_offset(text: str) -> str:
    return re.sub(r"offset \d+", "offset OFFSET", text)


def test_a_run_that_begins_resumes_and_has_nothing_left_to_do(tmp_path: Path) -> None:
    assert said(tmp_path, "train(3)") == ""
    assert said(tmp_path, "train(5)") == RESUMED.format(3)
    assert said(tmp_path, "train(5)") == RESUMED.format(5) + (
        "tenuto: run main is at step 5, so steps(5) has nothing left to do; ask for more, or begin another run with "
        "run=...\n"
    )
    assert said(tmp_path, 'train(6, log="saves")') == RESUMED.format(5) + (
        "tenuto: saved step 6 of run main (SIZE in TIME)\n"
    )
    assert said(tmp_path, 'train(7, log="silent")') == ""
    assert said(tmp_path, "train(8)", more={"TENUTO_LOG": "silent"}) == ""
    assert said(tmp_path, 'train(8, log="default")', more={"TENUTO_LOG": "silent"}).startswith(RESUMED.format(8))


def test_a_damaged_checkpoint_is_passed_over_loudly(tmp_path: Path) -> None:
    assert said(tmp_path, "train(3)") == ""
    assert said(tmp_path, "tenuto.load(where)") == "", "a load where all goes well is routine"
    damage(tmp_path, 3)
    assert without_offset(said(tmp_path, "assert tenuto.load(where).step == 2")) == DAMAGED
    assert said(tmp_path, 'assert tenuto.load(where, log="silent").step == 2') == ""
    assert said(tmp_path, "tenuto.open(where)") == "", "it reads no leaf, and so finds nothing"
    assert without_offset(said(tmp_path, "train(4)")) == DAMAGED + RESUMED.format(2)


@pytest.mark.parametrize(
    ("name", "status", "again"), [("SIGTERM", 143, ""), ("SIGINT", 130, "; Ctrl-C again stops at once")]
)
def test_a_signal_is_answered_at_once_and_said_again_when_all_is_saved(
    tmp_path: Path, name: str, status: int, again: str
) -> None:
    body = f"train(9, lambda step: step == 2 and os.kill(os.getpid(), signal.{name}), save=on.signal())"
    assert said(tmp_path, body, status=status) == (
        f"tenuto: {name}: finishing step 2, then saving run main and leaving{again}\n"
        f"tenuto: {name}: leaving with status {status}; step 2 of run main is saved in PLACE/ckpts\n"
    )


def test_a_signal_outside_a_step_while_a_line_is_being_logged(tmp_path: Path) -> None:
    """The handler runs with the lock of a logging handler held, and waits for a thread that logs as well."""
    body = """
    import logging
    class Signalling(logging.StreamHandler):
        def emit(self, record):
            super().emit(record)
            if record.name == "root" and record.msg == "evaluating":
                os.kill(os.getpid(), signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, handlers=[Signalling()], format="%(levelname)s %(name)s: %(message)s")
    with tenuto.Checkpointer(where, state, data=[1, 2], save=on.signal(), log="saves") as ckpt:
        for epoch in ckpt.epochs(2):
            for batch in ckpt.batches:
                state["n"] += 1
            logging.info("evaluating")
    """
    assert said(tmp_path, body, status=143) == (
        "INFO root: evaluating\n"
        "INFO tenuto: SIGTERM: finishing step 2, then saving run main and leaving\n"
        "INFO tenuto: saved step 2 of run main (SIZE in TIME)\n"
        "INFO tenuto: SIGTERM: leaving with status 143; step 2 of run main is saved in PLACE/ckpts\n"
    )


def test_a_failed_save_is_said_once_until_a_save_commits(tmp_path: Path) -> None:
    body = """
    import resource
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    def limit(step):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if step in (2, 3, 5) else hard, hard))
    state["w"] = np.zeros(100_000, np.float32)
    with tenuto.Checkpointer(where, state, save=every(steps=1)) as ckpt:
        for step in ckpt.steps(6):
            ckpt._training.saving.saver.join(60)
            limit(step + 1)
    limit(0)
    """
    text = said(tmp_path, body)
    assert re.sub(r"while writing [^;]*", "while WRITING", text) == (
        "tenuto: the save of main/a0001/2 failed while WRITING; tenuto ls PLACE/ckpts\n"
        "tenuto: the save of main/a0001/5 failed while WRITING; tenuto ls PLACE/ckpts\n"
    )


def test_a_cell_run_twice_and_memory_that_is_not_shared(tmp_path: Path) -> None:
    body = """
    from tenuto.engine.staging import slots
    first = tenuto.Checkpointer(where, state)
    for step in first.steps(2):
        state["n"] += 1
    for step in tenuto.Checkpointer(where, state).steps(3):
        state["n"] += 1
    slots.SHARED_MEMORY = "/nonexistent"
    for step in tenuto.Checkpointer(where, state).steps(4):
        state["n"] += 1
    """
    closing = "tenuto: closing the Checkpointer that this process has on run main: this one takes its place\n"
    assert said(tmp_path, body) == (
        closing
        + RESUMED.format(2)
        + "tenuto: saves are staged in memory of this process, since shared memory is not available (No such file or "
        "directory)\n" + closing + RESUMED.format(3)
    )


def test_where_logging_is_configured_it_decides(tmp_path: Path) -> None:
    assert said(tmp_path, "train(3)") == ""
    damage(tmp_path, 3)
    body = """
    import logging
    logging.basicConfig(level=logging.{level}, format="%(levelname)s %(name)s %(message)s")
    tenuto.load(where)
    train(4)
    """
    warning = "WARNING tenuto " + DAMAGED.removeprefix("tenuto: ")
    assert without_offset(said(tmp_path, body.format(level="WARNING"))) == warning * 2
    damage(tmp_path, 4)
    text = without_offset(said(tmp_path, body.format(level="INFO")))
    assert text.count("WARNING tenuto step 4 of run main is damaged") == 2
    assert text.endswith("INFO tenuto " + RESUMED.format(3).removeprefix("tenuto: "))
    assert len(text.splitlines()) == 3
    quiet = 'import logging; logging.getLogger("tenuto").addHandler(logging.NullHandler())\ntrain(4)'
    assert said(tmp_path, quiet) == ""
    only_errors = 'import logging; logging.getLogger("tenuto").setLevel(logging.ERROR)\ntrain(4)'
    assert said(tmp_path, only_errors) == ""


def test_a_log_sink_takes_its_place_and_a_function_is_a_sink(tmp_path: Path) -> None:
    body = """
    import logging
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(2)
    train(3, sinks=[tenuto.telemetry.LogSink(), lambda event: print(type(event).__name__, file=sys.stderr)])
    """
    lines = said(tmp_path, body).splitlines()
    resumed = RESUMED.format(2).removeprefix("tenuto: ").strip()
    assert lines.count(resumed) == 1 and "Resumed" in lines and "Committed" in lines
    wrong = said(tmp_path, "train(4, sinks=[3])", status=1).splitlines()
    assert wrong[-2].startswith("tenuto.errors.UsageError: sinks=[3] is not a list of sinks")
    wrong = said(tmp_path, 'train(4, log="loud")', status=1).splitlines()
    assert wrong[-2:] == [
        "tenuto.errors.UsageError: log='loud' is not one of 'default', 'saves', 'silent'",
        '  hint: log="silent"',
    ]


def test_on_a_terminal_it_has_colours_and_no_line_is_broken(tmp_path: Path) -> None:
    assert said(tmp_path, "train(3)") == ""
    damage(tmp_path, 3)
    ours, theirs = pty.openpty()
    words = [written(tmp_path, "train(4)")]
    loaded_interpreter.run(words, stderr=theirs, cwd=tmp_path, env=environment(TERM="xterm"))
    os.close(theirs)
    found = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        found += piece
    os.close(ours)
    text = without_offset(masked(found.decode(), tmp_path))
    prefix = "\x1b[2mtenuto:\x1b[0m "
    warning = DAMAGED.strip().removeprefix("tenuto: ")
    assert text == f"{prefix}\x1b[33m{warning}\x1b[0m\n" + RESUMED.format(2).replace("tenuto: ", prefix)


def test_where_warnings_of_tenuto_are_errors_lines_are_none(tmp_path: Path) -> None:
    errors = """
    import warnings
    warnings.simplefilter("error", tenuto.TenutoWarning)
    """  # not -W: Python reads that before it knows where packages are installed
    assert said(tmp_path, errors + "train(3)") == ""
    damage(tmp_path, 3)
    told = without_offset(said(tmp_path, errors + "train(4)"))
    assert told == DAMAGED + RESUMED.format(2)
    again = """
    with tenuto.Checkpointer(where, state) as ckpt:
        for step in ckpt.steps(5):
            pass
        ckpt.save()
    """
    wrong = said(tmp_path, errors + again, status=1)
    assert "tenuto.errors.TenutoWarning: no step was completed since the save of step 5" in wrong
    told = said(tmp_path, again).splitlines()
    assert told[-2].startswith("PLACE/train.py:") and told[-1] == "  ckpt.save()", "it points at the user's line"


def test_a_forked_child_says_nothing_twice(tmp_path: Path) -> None:
    body = """
    def fork(step):
        if step == 2 and not os.fork():
            raise SystemExit
    train(2, fork)
    train(3, fork)
    """
    assert said(tmp_path, body).count("resumed run main at step 2") == 1


# -- owners --------------------------------------------------------------------------------------------------------


def start(place: Path, body: str, name: str) -> loaded_interpreter.Program:
    return loaded_interpreter.Program([written(place, body, name)], cwd=place, env=environment())


HOLDS = """
def hold(step):
    if step == 2:
        print("there", flush=True)
        sys.stdin.readline()
train(3, hold)
"""


def test_a_run_that_a_process_of_this_host_trains_is_refused_within_seconds(tmp_path: Path) -> None:
    owner = start(tmp_path, HOLDS, "owner.py")
    assert owner.stdout.readline() == "there\n"
    began = time.monotonic()
    lines = said(tmp_path, "train(4)", status=1).splitlines()
    assert time.monotonic() - began < 40, "not the minute that an owner elsewhere gets"
    assert lines[:2] == [
        "tenuto: waiting up to TIME for process PID of USER on HOST, which owns run main: its process is running",
        "Traceback (most recent call last):",
    ], "it resumes nothing"
    assert lines[-2] == (
        "tenuto.errors.RunInUse: run 'main' at PLACE/ckpts is in use: attempt 1 belongs to process PID of USER on HOST "
        "(its process is running, since DATE)"
    )
    assert "wait_for_owner=600" in lines[-1]
    owner.communicate("\n", timeout=60)
    assert owner.returncode == 0


def test_a_process_that_is_leaving_is_waited_for(tmp_path: Path) -> None:
    """As where a supervisor starts the next process while the one before finishes its step and saves."""
    owner = start(tmp_path, HOLDS, "owner.py")
    assert owner.stdout.readline() == "there\n"
    owner.send_signal(signal.SIGTERM)
    await_leaving(tmp_path)
    following = start(tmp_path, "train(4)", "next.py")
    assert masked(following.stderr.readline(), tmp_path) == (
        "tenuto: waiting up to TIME for process PID of USER on HOST, which owns run main: it is leaving\n"
    )
    owner.communicate("\n", timeout=60)
    assert owner.returncode == 143
    rest = masked(following.communicate(timeout=60)[1], tmp_path)
    assert (following.returncode, rest) == (0, RESUMED.format(2))


SAVES_ONCE = """
def hold(event):
    if type(event).__name__ == "SaveStarted":
        print("there", flush=True)
        sys.stdin.readline()
tenuto.save(state, where, sinks=[hold])
"""


def test_a_process_that_saves_once_is_waited_for(tmp_path: Path) -> None:
    owner = start(tmp_path, SAVES_ONCE, "owner.py")
    assert owner.stdout.readline() == "there\n"
    await_leaving(tmp_path)
    following = start(tmp_path, "train(4)", "next.py")
    lines = [following.stderr.readline()]
    while not lines[-1].startswith("tenuto: waiting"):
        lines.append(following.stderr.readline())
        assert lines[-1], lines
    assert lines[-1].endswith("which owns run main: it is leaving\n")
    owner.communicate("\n", timeout=60)
    rest = masked(following.communicate(timeout=60)[1], tmp_path)
    assert (owner.returncode, following.returncode) == (0, 0), rest
    assert rest == RESUMED.format(0).replace("; no known gap", "")


def await_leaving(place: Path) -> None:
    """Returns once a lease says that the owner is leaving."""
    until = time.monotonic() + 60
    while not any(lease.get("leaving") for lease in leases(place)):
        assert time.monotonic() < until
        time.sleep(0.05)


def leases(place: Path) -> Iterator[dict[str, Any]]:
    for path in place.glob("ckpts/runs/main/a0001/lease/*.json"):
        with contextlib.suppress(FileNotFoundError):  # the owner removes those that it has renewed
            if data := path.read_bytes():
                yield json.loads(data.split(b"\n")[0])


def test_of_two_ranks_one_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    train(2)
    first = tenuto.Checkpointer(where, state, save=every(steps=1), keep=ALL)
    for step in first.steps(3):
        state["n"] += 1
    train(4)
    """
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    assert forked_processes.job(Path(written(tmp_path, body)), 2, log=log, timeout=240) == [0, 0]
    lines = [line for rank in (0, 1) for line in Path(f"{log}.{rank}").read_text().splitlines(True) if "tenuto" in line]
    assert masked("".join(lines), tmp_path) == (
        RESUMED.format(2)
        + "tenuto: closing the Checkpointer that this process has on run main: this one takes its place\n"
        + RESUMED.format(3)
    )


def test_a_line_is_not_lost_and_training_not_ended_by_what_stands_for_stderr(tmp_path: Path) -> None:
    """Each stand-in gets one line, of a run that resumes: its own, or the process's stderr where it fails."""
    body = r"""
    import io, logging
    class Bare:
        def __init__(self): self.text = ""
        def write(self, text): self.text += text
    class Broken:
        def write(self, text): raise RuntimeError("the widget is gone")
    class Failing(logging.Handler):
        def emit(self, record): raise RuntimeError("no\nconnection")
    where = "ckpts/\u00e9"
    bare, buffer = Bare(), io.BytesIO()
    own, ascii = sys.stderr, io.TextIOWrapper(buffer, "ascii")
    train(1)
    for number, stream in enumerate([bare, ascii, Broken()], 2):
        sys.stderr = stream
        train(number)
    sys.stderr = own
    ascii.flush()
    print(bare.text, buffer.getvalue().decode(), sep="", end="", file=own, flush=True)
    logging.getLogger("tenuto").addHandler(Failing())
    logging.getLogger("tenuto").setLevel(logging.INFO)
    train(6, log="saves", save=on.end())
    """
    failed = " (a logging handler failed: RuntimeError('no\\nconnection'))\n"
    resumed = [RESUMED.format(step).replace("ckpts", "ckpts/\u00e9") for step in (1, 2, 3, 4)]
    assert said(tmp_path, body) == (
        resumed[2]
        + resumed[0]
        + resumed[1].replace("\u00e9", "\\xe9")
        + resumed[3].replace("\n", failed)
        + f"tenuto: saved step 6 of run main (SIZE in TIME){failed}"
    )
