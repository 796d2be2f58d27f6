"""What the supervisor makes of beats, of statuses, and of what a command leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tenuto
from support.supervised import lives
from tenuto.errors import KeyMissing
from tenuto.supervisor import supervise
from tenuto.supervisor.decide import Ending, Limits
from tenuto.supervisor.detectors.contract import Finding, Name
from tenuto.supervisor.journal import Journal
from tenuto.supervisor.nodes import Nodes
from tenuto.supervisor.process_tree import ProcessTree
from tenuto.supervisor.steps import Steps
from tenuto.supervisor.supervise import Account, Supervisor, TrainingEnd, Watch, summary
from tenuto.supervisor.watching import Demand
from tenuto.telemetry import heartbeat
from tenuto.telemetry.heartbeat import ENDED, ENDING, STARTING, TRAINING, Beat, Heartbeat
from tenuto.telemetry.last_words import LastWords


def supervisor(*command: str, **more: Any) -> Supervisor:
    said: list[str] = []
    return Supervisor(command, Limits(), Watch(), Journal(None, said.append), said.append, **more)


def beat(step: int, at_s: float, *, rank: int = 0, phase: str = TRAINING, pid: int = 1) -> Beat:
    return Beat(pid, rank, step, phase, at_s)


def test_a_launcher_that_goes_back_to_an_older_checkpoint_makes_steps_all_the_same() -> None:
    steps = Steps()
    for step in range(990, 1001):
        steps.take([beat(step, float(step))], float(step))
    for number, step in enumerate(range(500, 900)):
        steps.take([beat(step, 1001.0 + number)], 1001.0 + number)
    assert (steps.newest, steps.last_s) == (1000, 1400.0)


def test_the_slowest_rank_counts() -> None:
    steps = Steps()
    steps.take([beat(0, 10.0, phase=STARTING)], 10.0)
    steps.take([beat(700, 200.0), beat(700, 201.0, rank=1)], 201.0)
    steps.take([beat(703, 210.0), beat(701, 205.0, rank=1)], 210.0)
    assert (steps.newest, steps.last_s) == (701, 205.0)
    steps.take([beat(710, 230.0), beat(701, 205.0, rank=1)], 230.0)
    assert (steps.newest, steps.last_s) == (701, 205.0)


def test_who_saves_at_the_end_is_not_silent() -> None:
    steps = Steps()
    steps.take([beat(7, 10.0, phase=ENDING)], 10.0)
    steps.take([beat(7, 10.0, phase=ENDING)], 500.0)
    assert steps.last_s == 500.0


HOUR_S = 3600.0


def hung(watch: Watch, *beats: tuple[float, Beat], at_s: float) -> str | None:
    """What is hung at a time, in seconds since the start, after these beats at theirs."""
    found, steps = supervisor("true"), Steps()
    found.watch = watch
    began_s = steps.started_s
    for taken_s, one in beats:
        steps.take([replace(one, at_s=began_s + one.at_s)], began_s + taken_s)
    return found._hung(steps, began_s + at_s)


def test_silence_soon_after_a_restart_is_judged_by_what_earlier_starts_have_learnt() -> None:
    usual = {"known": 30, "first_s": 5.0, "longest_s": 0.2, "usual_s": 0.05}
    found = supervisor("true")
    earlier, here = Steps(), Steps()
    earlier.take([replace(beat(40, 10.0), of=7, **usual)], 10.0)
    found._note_reached(earlier, None)
    began_s = here.started_s
    resumed = replace(beat(40, began_s + 1), of=7, began=40)
    here.take([resumed], began_s + 1)
    assert found._hung(here, began_s + 50) is None
    assert found._hung(here, began_s + 62) == "no step after step 40 for 1 min 01 s, where 1 min 00 s are usual at most"
    other = Steps()
    other.take([replace(resumed, of=8)], began_s + 1)
    assert found._hung(other, began_s + 62) is None, "of another run nothing is known"


def test_steps_after_values_went_wrong_are_no_progress() -> None:
    found, steps = supervisor("true"), Steps()
    steps.take([replace(beat(14, 1.0), of=7)], 1.0)
    assert found._note_reached(steps, 9) and found._course.reached == {7: 9}
    steps.take([replace(beat(16, 2.0), of=7)], 2.0)
    assert not found._note_reached(steps, 9)
    assert found._note_reached(steps, None) and found._course.reached == {7: 16}


def test_a_start_that_never_comes_to_its_first_step_counts_as_hung() -> None:
    restoring = (1.0, beat(0, 1.0, phase=STARTING)), (7000.0, beat(0, 1.0, phase=STARTING))
    assert hung(Watch(), *restoring, at_s=7100.0) is None
    assert hung(Watch(), *restoring, at_s=7300.0) == "no first step within 2 h 00 min"
    assert hung(Watch(start_s=600.0), *restoring, at_s=601.0) == "no first step within 10 min 00 s"
    assert (
        hung(Watch(start_s=0.0), *restoring, at_s=1e6) is None and hung(Watch(hang_s=0.0), *restoring, at_s=1e6) is None
    )
    claimed = (5.0, replace(beat(700, 5.0), began=700)), (6.0, replace(beat(700, 5.0), began=700))
    assert hung(Watch(start_s=600.0), *claimed, at_s=601.0) == "no first step within 10 min 00 s", "at 700 it resumed"
    stepped = (*claimed, (500.0, replace(beat(701, 500.0), began=700)))
    assert hung(Watch(start_s=600.0), *stepped, at_s=601.0) is None


def test_a_program_without_a_checkpointer_has_no_limit_unless_it_is_given_one() -> None:
    assert hung(Watch(), at_s=1e6) is None
    assert hung(Watch(start_s=600.0), at_s=601.0) == "no first step within 10 min 00 s"


def test_an_end_that_never_comes_counts_as_hung_and_what_the_script_does_later_does_not() -> None:
    saving = (1.0, beat(0, 1.0)), (9.0, beat(7, 9.0)), (10.0, beat(7, 10.0, phase=ENDING))
    assert hung(Watch(), *saving, at_s=HOUR_S) is None
    assert hung(Watch(), *saving, at_s=HOUR_S + 10) == "it has not ended within 1 h 00 min after step 7"
    assert hung(Watch(end_s=60.0), *saving, at_s=70.0) == "it has not ended within 1 min 00 s after step 7"
    assert hung(Watch(hang_s=0.0), *saving, at_s=1e6) is None and hung(Watch(end_s=0.0), *saving, at_s=1e6) is None
    evaluating = (*saving, (20.0, beat(7, 20.0, phase=ENDED)))
    assert hung(Watch(), *evaluating, at_s=1e6) is None
    assert hung(Watch(end_s=60.0), *evaluating, at_s=70.0) is not None
    again = (*evaluating, (30.0, beat(0, 30.0, phase=STARTING)))
    assert hung(Watch(end_s=60.0), *again, at_s=70.0) is None, "another training of the same script"
    nothing_to_do = ((1.0, beat(100, 1.0, phase=ENDING)),)
    assert hung(Watch(start_s=600.0), *nothing_to_do, at_s=700.0) is None


@pytest.mark.parametrize(("name", "kind"), [("gpu-lost", "device"), ("memory", "out of memory"), ("straggler", "hung")])
def test_what_was_ended_for_a_finding_has_its_cause(name: Name, kind: str) -> None:
    found = supervisor("true")
    found._demand = Demand("restart", Finding(name, "why"))
    assert found._kind(-9, "why", False) == (kind, "why")


def test_what_left_for_a_notice_says_so_and_not_the_signal_alone() -> None:
    found = supervisor("true")
    found._asked, found._demand = [signal.SIGTERM], Demand("leave", Finding("preemption", "AWS takes it", "", 90.0))
    assert found._kind(143, None, False) == ("asked to leave", "preemption: AWS takes it")
    assert found._grace_s() == 88.0 and supervisor("true")._grace_s() == Watch().grace_s


@pytest.mark.parametrize(
    ("code", "memory", "asked", "kind"),
    [
        (0, False, [], "finished"),
        (0, False, [signal.SIGTERM], "asked to leave"),
        (143, False, [], "asked to leave"),
        (-signal.SIGTERM, False, [signal.SIGTERM], "asked to leave"),
        (-signal.SIGTERM, False, [], "killed"),
        (-signal.SIGKILL, False, [], "killed"),
        (137, False, [], "killed"),
        (-signal.SIGKILL, True, [], "out of memory"),
        (1, True, [], "out of memory"),  # a launcher, whose worker was killed
        (1, False, [], "failed"),
    ],
)
def test_how_it_ended_by_its_status(code: int, memory: bool, asked: list[int], kind: str) -> None:
    found = supervisor("true")
    found._asked = asked
    assert found._kind(code, None, memory)[0] == kind


@pytest.mark.parametrize(("said_s", "kind"), [(40.0, "out of memory"), (60.0, "another node")])
def test_one_that_was_ending_by_itself_when_another_node_ended_has_a_cause_of_its_own(said_s: float, kind: str) -> None:
    found = supervisor("true")
    found._ended_by, found._ended_by_s = "node 1: killed (SIGKILL)", 50.0
    words = LastWords(1, 0, 7, said_s, "MemoryError: no room", errors=("MemoryError",))
    assert found._kind(143, "node 1: killed (SIGKILL)", False, TrainingEnd(words))[0] == kind


def test_a_program_without_steps_is_not_said_to_have_come_as_far_again() -> None:
    endings = (Ending("failed", 1, 0, 100), Ending("finished", 0, 100, 200))
    words = summary(Account(0, "the training is done", endings, 0.0, 200.0, None, None))
    assert words == "the training is done; status 0; 1 restart (1 x failed)"


def test_what_was_asked_already_is_not_asked_again_but_killed(tmp_path: Path) -> None:
    script = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(tmp_path / "asked")!r}).touch())
print("ready", flush=True)
while True:
    time.sleep(1)
"""
    with open(tmp_path / "out", "w") as out:
        tree = ProcessTree([sys.executable, "-c", script], {}, out)
        while "ready" not in (tmp_path / "out").read_text():
            pass
        tree.end(0.0)
    assert tree.wait(0) == -signal.SIGKILL
    assert not (tmp_path / "asked").exists() and not tree.descendants()


def test_a_repository_whose_key_is_missing_changes_neither_status_nor_account() -> None:
    script = """
import sys
sys.path[:0] = [sys.argv[1]]
from tenuto.errors import KeyMissing
from tenuto.supervisor.decide import Limits
from tenuto.supervisor.journal import Journal
from tenuto.supervisor.supervise import Supervisor, Watch

def without_key(places, emergency):
    raise KeyMissing("no key was given", subject="x", hint="give one")

told = []
journal = Journal(None, told.append)
found = Supervisor(["false"], Limits(in_vain=1), Watch(), journal, told.append, at_end=without_key).run()
print(found.status, len(told), "no key was given" in told[-1], "numpy" in sys.modules)
"""
    src = str(Path(__file__).parents[3] / "src")
    done = subprocess.run([sys.executable, "-c", script, src], capture_output=True, text=True, check=True)
    assert KeyMissing.__name__ in script and done.stdout == "1 1 True False\n"


@pytest.mark.parametrize(("nodes", "looked_at"), [(None, 9), (Nodes(1, 2, Path("/meet")), 3)])
def test_where_processes_stand_keeps_other_nodes_waiting_for_seconds_only(
    monkeypatch: pytest.MonkeyPatch, nodes: Nodes | None, looked_at: int
) -> None:
    asked: list[Any] = []
    clock = SimpleNamespace(monotonic=lambda: 4.0 * len(asked))
    done = subprocess.CompletedProcess([], 1, "", "")
    monkeypatch.setattr(supervise, "time", clock)
    monkeypatch.setattr(supervise, "shutil", SimpleNamespace(which=lambda name: name))
    monkeypatch.setattr(supervise.subprocess, "run", lambda words, **more: asked.append(words) or done)
    tree: Any = SimpleNamespace(descendants=lambda: range(9))
    supervisor("true", nodes=nodes)._note_stacks(tree, "no step")
    assert len(asked) == looked_at


def test_a_fault_of_the_supervisors_own_leaves_no_training_behind(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import os, pathlib, time, numpy as np, tenuto
with tenuto.Checkpointer("ckpts", {"w": np.zeros(100)}) as ckpt:
    for step in ckpt.steps(10**6):
        pathlib.Path("pid.new").write_text(str(os.getpid()))
        os.replace("pid.new", "pid")  # whoever reads it finds a whole one
        time.sleep(0.01)
""")
    script = """
import os, pathlib, sys
sys.path[:0] = [os.environ["PYTHONPATH"]]
from types import SimpleNamespace
from tenuto.supervisor.decide import Limits
from tenuto.supervisor.journal import Journal
from tenuto.supervisor.supervise import Supervisor, Watch

def observe(*arguments, **more):
    if pathlib.Path("pid").exists():
        raise ZeroDivisionError("a fault")

command = ["sh", "-c", '"$@"; exit', "sh", sys.executable, "train.py"]
watching = SimpleNamespace(observe=observe)
Supervisor(command, Limits(), Watch(), Journal(None, print), print, watching=watching).run()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(tenuto.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "ZeroDivisionError: a fault" in done.stderr
    assert not lives(int((tmp_path / "pid").read_text()))
    assert tenuto.Repository(tmp_path / "ckpts").latest_step() is not None


def test_what_trainings_say_of_their_end_counts_before_a_status_that_hides_it() -> None:
    found, error = supervisor("true"), LastWords(1, 0, 7, 1.0, "ValueError: no", errors=("ValueError",), uncaught=True)
    assert found._kind(0, None, False, TrainingEnd(error, hidden=True)) == ("failed", "ValueError: no")
    assert found._kind(0, None, False, TrainingEnd(replace(error, uncaught=False), hidden=True))[0] == "finished"
    assert found._kind(0, None, False, TrainingEnd(error))[0] == "finished", "its own status"
    assert found._kind(1, None, False, TrainingEnd(hidden=True, left=15)) == ("asked to leave", "SIGTERM")
    assert found._kind(1, None, False, TrainingEnd(left=15))[0] == "failed", "it says 1 itself"
    assert found._kind(0, None, False, TrainingEnd(hidden=True, broken_off=7))[0] == "killed"


def test_a_job_has_left_where_all_its_ranks_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Heartbeat(tmp_path, 0)
    first.beat(7)
    monkeypatch.setattr(heartbeat.os, "getpid", lambda: 1)
    second = Heartbeat(tmp_path, 1)
    second.beat(7)
    second.left(signal.SIGTERM, 7)
    assert (TrainingEnd.of(tmp_path, 0).left, TrainingEnd.of(tmp_path, 1).hidden) == (0, False)
    monkeypatch.undo()
    first.beat(7, ENDED)
    found = TrainingEnd.of(tmp_path, 0)
    assert (found.left, found.hidden, found.words) == (signal.SIGTERM, True, None)
