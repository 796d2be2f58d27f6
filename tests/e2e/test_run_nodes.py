"""`tenuto run` on several nodes of one job, with real processes on this machine: they start, end and leave together."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

import tenuto
from support.supervised import SRC, await_that, ends, happened, lives, on_node, on_nodes, started

WAITING = """
import os, pathlib, sys, time, tenuto
from tenuto.telemetry.heartbeat import Heartbeat
node, again = int(sys.argv[1]), tenuto.restart()
Heartbeat.from_environment(0).beat(1 + again.number)
pathlib.Path(f"pid-{node}-{again.number}").write_text(str(os.getpid()))
def wait():  # as for a collective whose other rank is gone
    time.sleep(1000)
"""

ONE_AFTER_ZERO = """
if node == 1 and not again.number:
    while '"left"' not in pathlib.Path("node-0.jsonl").read_text():
        time.sleep(0.01)
"""


def pid_of(directory: Path, node: int, start: int = 0) -> int:
    """Returns the process that trains, once it does."""
    path = directory / f"pid-{node}-{start}"
    await_that(lambda: path.exists() and bool(path.read_text()))
    return int(path.read_text())


def meeting_of(supervisor: int) -> int:
    """Returns the process through which a supervisor meets the others."""
    (found,) = (one for one in psutil.Process(supervisor).children() if "tenuto.supervisor.meeting" in one.cmdline())
    return int(found.pid)


def test_what_is_killed_on_one_node_is_started_again_on_all_and_counts_as_one_end(tmp_path: Path) -> None:
    script = f"""{WAITING}
if not again.number:
    os.kill(os.getpid(), 9) if node == 1 else wait()
print(again.number, again.cause)
"""
    done = ends(on_nodes(tmp_path, script, 3))
    assert [one[:2] for one in done] == [(0, "1 killed\n")] * 3, done
    host = os.uname().nodename
    for node, (_, _, err) in enumerate(done):
        assert "tenuto: node 1: killed (SIGKILL): started again (restart 1)" in err
        ended = f"tenuto: node 1 ({host}): killed (SIGKILL): the training here is ended too\n"
        assert (ended in err) == (node != 1)
    died = [[(one["kind"], one["evidence"]) for one in happened(tmp_path, node, "died")] for node in range(3)]
    elsewhere = ("another node", f"node 1 ({host}): killed (SIGKILL)")
    assert died == [[elsewhere], [("killed", "SIGKILL")], [elsewhere]]


def test_what_the_cause_asks_for_is_asked_of_the_script_on_all_nodes(tmp_path: Path) -> None:
    script = f"""{WAITING}
if not again.number:
    if node == 0:
        wait()
    raise MemoryError("no room")
print(again.number, again.cause, again.accumulation)
"""
    done = ends(on_nodes(tmp_path, script, 2))
    assert [one[:2] for one in done] == [(0, "1 out of memory 2\n")] * 2, done
    decided = "node 1: out of memory (MemoryError: no room): started again and asked for 1/2 of the batch"
    assert all(decided in one[2] for one in done)


def test_nan_on_one_node_takes_the_run_back_once_and_all_skip_the_same_steps(tmp_path: Path) -> None:
    script = """
import sys, numpy as np, tenuto
from tenuto import every
from tenuto.ranks.kv.shared_files import SharedFiles
node, again, state = int(sys.argv[1]), tenuto.restart(), {"w": np.zeros(4)}
ranks = SharedFiles("ranks", node, 2)
with tenuto.Checkpointer("ckpts", state, save=every(steps=5), on_unhealthy="stop", ranks=ranks) as ckpt:
    for step in ckpt.steps(12):
        bad = step + 1 == 7
        if not again.skips(step + 1):
            state["w"] += np.nan if bad else 1
        ckpt.log(loss=float(state["w"][0]))
print(again.number, again.cause, [(one.start, one.stop) for one in again.skip], ckpt.step, state["w"][0])
"""
    done = ends(on_nodes(tmp_path, script, 2))
    skipped = re.findall(r"1 unhealthy (\[.*\]) 12", "".join(one[1] for one in done))
    assert [one[0] for one in done] == [0, 0] and len(skipped) == 2 and skipped[0] == skipped[1] != "[]", done
    assert len(tenuto.Repository(tmp_path / "ckpts").log().turns) == 1
    assert all(": started again from step 5, before what went wrong (restart 1)" in one[2] for one in done)


def test_who_has_finished_waits_for_the_others_and_starts_again_with_them(tmp_path: Path) -> None:
    script = f"{WAITING}{ONE_AFTER_ZERO}    raise SystemExit(3)\nprint(again.number, again.cause)"
    done = ends(on_nodes(tmp_path, script, 2))
    assert [one[:2] for one in done] == [(0, "0 \n1 failed\n"), (0, "1 failed\n")], done


def test_a_job_that_is_given_up_is_so_on_all_nodes_and_ends_well_on_none(tmp_path: Path) -> None:
    script = f"{WAITING}{ONE_AFTER_ZERO}\nraise SystemExit(0 if node == 0 else 5)"
    done = ends(on_nodes(tmp_path, script, 2, "--restarts", "0"))
    assert [one[0] for one in done] == [5, 5], done
    assert all("tenuto: node 1: it was restarted 0 times, as often as allowed; status" in one[2] for one in done)


def test_one_node_is_asked_to_leave_and_all_leave_with_time_to_save(tmp_path: Path) -> None:
    script = f"""{WAITING}
import signal
def leave(*_):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
pathlib.Path(f"ready-{{node}}").touch()
wait()
"""
    programs = on_nodes(tmp_path, script, 2)
    await_that(lambda: all((tmp_path / f"ready-{node}").exists() for node in range(2)))
    programs[1].send_signal(signal.SIGTERM)
    done = ends(programs)
    assert [one[:2] for one in done] == [(143, "saved\n")] * 2, done
    why = f"node 1 ({os.uname().nodename}): asked to leave (SIGTERM)"
    assert f"tenuto: {why}: the training here is asked to leave too" in done[0][2]
    assert f"it was asked to leave ({why}) and has left" in done[0][2]
    assert [len(happened(tmp_path, node, "started")) for node in range(2)] == [1, 1]


def test_one_that_is_asked_to_leave_between_two_starts_takes_the_others_along(tmp_path: Path) -> None:
    script = WAITING.replace("beat(1 + again.number)", "beat(0)")  # no new step: it waits before it starts again
    script = f"{script}\nif node or again.number:\n    raise SystemExit(3)\nwait()"
    programs = on_nodes(tmp_path, script, 2, "--in-vain", "50")
    await_that(lambda: bool(happened(tmp_path, 1, "restarting")))
    programs[1].send_signal(signal.SIGTERM)
    done = ends(programs)
    assert "SIGTERM" in happened(tmp_path, 1, "ended")[0]["reason"], done
    assert "asked to leave (SIGTERM)" in happened(tmp_path, 0, "ended")[0]["reason"], done


def test_one_that_is_asked_to_leave_before_the_others_have_come_leaves_at_once(tmp_path: Path) -> None:
    program = on_node(tmp_path, WAITING, 0, 2)
    await_that(lambda: (tmp_path / "meet/supervisors/tenuto/door/hello/0").exists())
    program.send_signal(signal.SIGTERM)
    ((status, _, err),) = ends([program])
    assert status == 143 and "it was asked to leave (SIGTERM) and has left" in err
    assert not happened(tmp_path, 0, "started")


def test_one_that_has_finished_and_waits_for_the_others_takes_them_along_when_it_is_asked_to_leave(
    tmp_path: Path,
) -> None:
    programs = on_nodes(tmp_path, f"{WAITING}\nif node == 1:\n    wait()", 2)
    pid_of(tmp_path, 1)
    await_that(lambda: bool(happened(tmp_path, 0, "left")))
    programs[0].send_signal(signal.SIGTERM)
    done = ends(programs)
    assert [one[0] for one in done] == [0, 143], done
    assert "it was asked to leave (node 0 (" in done[1][2]


@pytest.mark.parametrize("node", [0, 1])
def test_a_supervisor_that_is_killed_and_started_again_joins_the_next_start(tmp_path: Path, node: int) -> None:
    """Of the first node too, which decides: what was decided before it learns from the others."""
    script = f"""{WAITING}
if not again.number:
    os.kill(os.getpid(), 9) if node == 1 else wait()
if again.number == 1:
    wait()
print(again.number, again.cause)
"""
    programs = on_nodes(tmp_path, script, 2)
    left = pid_of(tmp_path, node, 1)
    pid_of(tmp_path, 1 - node, 1)
    programs[node].kill()
    programs[node].communicate()
    programs[node] = on_node(tmp_path, script, node, 2)
    done = ends(programs)
    assert [one[:2] for one in done] == [(0, "2 killed\n")] * 2 and not lives(left), done
    assert "is lost: its supervisor has ended: the training here is ended too" in done[1 - node][2]


def test_a_node_that_is_silent_is_lost_and_the_others_say_so_and_leave_and_the_next_job_meets(tmp_path: Path) -> None:
    """Each node has its own name here, so that none sees the processes of the other: it has to go by its silence."""
    (tmp_path / "site").mkdir()
    named = "import os, socket\nsocket.gethostname = lambda: os.environ['HOST']\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(named)
    script = f"{WAITING}\nif not pathlib.Path('lost').exists():\n    wait()"

    def node(number: int) -> subprocess.Popen[str]:
        variables = {"HOST": f"host-{number}", "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), SRC])}
        options = ["--nodes", "2", "--node-rank", str(number), "--meet", "meet", "--patience", "2s"]
        return started(tmp_path, script, *options, arguments=[str(number)], variables=variables)

    programs = [node(0), node(1)]
    trains = [pid_of(tmp_path, number) for number in range(2)]
    os.kill(meeting_of(programs[1].pid), signal.SIGKILL)
    programs[1].kill()
    _, err = programs[0].communicate(timeout=100)
    assert programs[0].returncode == 17 and programs[1].wait(60), err
    assert "tenuto: node 1 (host-1) is lost: no sign of life for 2 s: the training here is ended too" in err
    assert "node 1 (host-1): its `tenuto run` has not come to " in err and "start the job again on all 2 nodes" in err
    await_that(lambda: not any(map(lives, trains)))
    (tmp_path / "lost").touch()
    assert [one.wait(60) for one in [node(0), node(1)]] == [0, 0]


FAILING = f"""{WAITING}
while not pathlib.Path("fail").exists():
    with open(f"steps-{{node}}", "a") as steps:
        steps.write(".")
    time.sleep(0.01)
if not again.number:
    raise SystemExit(3)
"""


def trained(directory: Path, node: int) -> int:
    """Returns how many steps it has made: one in 10 ms."""
    path = directory / f"steps-{node}"
    return path.stat().st_size if path.exists() else 0


def fail(directory: Path) -> None:
    """From now on nothing can be read or written where the nodes meet."""
    (directory / "meet/supervisors").rename(directory / "away")
    (directory / "meet/supervisors").touch()


def test_a_directory_that_fails_for_less_than_the_patience_ends_nothing(tmp_path: Path) -> None:
    programs = on_nodes(tmp_path, FAILING, 2, "--patience", "60s")
    for node in range(2):
        pid_of(tmp_path, node)
    fail(tmp_path)
    least = [trained(tmp_path, node) + 200 for node in range(2)]
    await_that(lambda: all(trained(tmp_path, node) > least[node] for node in range(2)))
    (tmp_path / "fail").touch()
    await_that(lambda: all(happened(tmp_path, node, "died") for node in range(2)))
    (tmp_path / "meet/supervisors").unlink()
    (tmp_path / "away").rename(tmp_path / "meet/supervisors")
    for status, _, err in ends(programs):
        assert status == 0 and err.count("started again") == 1 and " is lost" not in err, err


def test_a_directory_that_stays_away_ends_the_training_and_is_named(tmp_path: Path) -> None:
    programs = on_nodes(tmp_path, FAILING, 2, "--patience", "1s")
    for node in range(2):
        pid_of(tmp_path, node)
    fail(tmp_path)
    for node, (status, _, err) in enumerate(ends(programs)):
        lost = f"{tmp_path}/meet, where the nodes meet, fails: .*Not a directory.*"
        assert status and re.search(f"tenuto: {lost}: the training here is ended too", err), err
        assert re.search(f"node {node} cannot meet the others: {lost}; look at {tmp_path}/meet on this node", err), err


def test_nodes_that_see_different_directories_say_so(tmp_path: Path) -> None:
    programs = [on_node(tmp_path, "", node, 2, "--meet", f"meet-{node}", "--join", "1s") for node in range(2)]
    for node, (status, _, err) in enumerate(ends(programs)):
        assert status == 17, err
        other = f"node {1 - node}: its `tenuto run` has not come to {tmp_path}/meet-{node} within 1.00 s"
        assert f"{other}; node {node} is alone there" in err
        assert "start the job again on all 2 nodes, with a --meet that is one directory" in err
        assert not happened(tmp_path, node, "started")


def test_a_node_that_does_not_come_is_named_on_all_others(tmp_path: Path) -> None:
    programs = [on_node(tmp_path, "", 2, 3, "--join", "60s")]
    await_that((tmp_path / "meet/supervisors/tenuto/door/hello/2").exists)  # else the first one would name it as well
    programs.append(on_node(tmp_path, "", 0, 3, "--join", "4s"))
    for status, _, err in ends(programs):
        assert status == 17 and "error: node 1: its `tenuto run` has not come to " in err, err


def test_nodes_whose_numbers_of_ranks_differ_are_refused(tmp_path: Path) -> None:
    sizes, options = ["4,2", "4"], ["--join", "60s"]
    programs = [
        on_node(tmp_path, "", node, 2, *options, "--ranks", sizes[node], launcher=["echo", "{ranks}"])
        for node in range(2)
    ]
    for _, _, err in ends(programs):
        assert "the nodes cannot start together: the nodes disagree: --ranks is '4,2' on node 0" in err, err


def test_two_supervisors_with_one_number_are_refused(tmp_path: Path) -> None:
    programs = [on_node(tmp_path, "", 1, 2, "--join", "20s") for _ in range(2)]
    done = ends(programs)
    assert any("two processes say that they are node 1" in err and "its own --node-rank" in err for _, _, err in done)


def test_a_process_that_meets_and_cannot_end_keeps_nobody_from_reading_to_the_end(tmp_path: Path) -> None:
    program = on_node(tmp_path, "", 0, 2)
    await_that(lambda: (tmp_path / "meet/supervisors/tenuto/door/hello/0").exists())
    meets = meeting_of(program.pid)
    os.kill(meets, signal.SIGSTOP)
    try:
        program.kill()
        assert ends([program]) == [(-signal.SIGKILL, "", "")] and lives(meets)
    finally:
        os.kill(meets, signal.SIGKILL)


def test_what_the_process_that_meets_has_left_unsaid_ends_the_start_and_no_supervisor(tmp_path: Path) -> None:
    script = f"{WAITING}\nif not again.number:\n    wait()\nprint(again.number)"
    programs = on_nodes(tmp_path, script, 2)
    for node in range(2):
        pid_of(tmp_path, node)
    os.kill(meeting_of(programs[1].pid), signal.SIGKILL)
    assert [one[:2] for one in ends(programs)] == [(0, "1\n")] * 2
    shutil.rmtree(tmp_path / "meet")
