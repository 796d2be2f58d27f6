"""Real processes: what a scheduler sees of a failure in the background."""

import os
import textwrap

import pytest

import tenuto
from support import loaded_interpreter

HEAD = """
import atexit, os, sys, threading
from tenuto.training.exit_status import ExitStatus, before_exit, leaving_with
from tenuto.training.preemption import Preempted
"""


def run(body, head=HEAD):
    """Runs a script; returns its exit status, stdout lines and stderr."""
    script = head + textwrap.dedent(body)
    done = loaded_interpreter.run(["-c", script])
    return done.returncode, done.stdout.split(), done.stderr


def test_without_a_failure_nothing_changes():
    assert run("ExitStatus('run gpt'); atexit.register(print, 'other')") == (0, ["other"], "")
    assert run("ExitStatus('run gpt'); sys.exit(7)")[0] == 7


def test_a_standing_failure_is_told_by_the_status_and_on_stderr():
    status, _, err = run("ExitStatus('run gpt').fail('the save of step 500 failed: no space')")
    assert status == 1
    assert err == "tenuto: leaving with status 1: run gpt: the save of step 500 failed: no space\n"


def test_a_later_commit_makes_it_good():
    assert run("s = ExitStatus('a'); s.fail('x'); assert s.failure == 'x'; s.clear(); assert not s.failure")[0] == 0


def test_the_commit_of_another_run_does_not():
    assert run("a, b = ExitStatus('a'), ExitStatus('b'); a.fail('x'); b.clear()")[0] == 1


def test_it_stands_though_nobody_holds_it():
    assert run("import gc; ExitStatus('a').fail('x'); gc.collect()")[0] == 1


def test_all_other_hooks_run_once_and_output_is_flushed():
    """Registered before, between and after; what is written without a newline arrives too."""
    status, out, _ = run("""
        import logging
        atexit.register(print, "first")
        status = ExitStatus("a")
        atexit.register(print, "second")
        status.fail("x")
        atexit.register(print, "third")
        sys.stdout.write("unflushed ")
        """)
    assert (status, out) == (1, ["unflushed", "third", "second", "first"])


def test_a_hook_that_raises_hides_nothing():
    status, out, err = run("""
        atexit.register(print, "still run")
        atexit.register(lambda: 1 / 0)
        ExitStatus("a").fail("x")
        """)
    assert (status, out) == (1, ["still", "run"])
    assert "ZeroDivisionError" in err


def test_threads_are_waited_for_and_may_fail_then():
    status, out, _ = run("""
        status, go = ExitStatus("a"), threading.Event()
        def background():
            threading.main_thread().join()
            print("background")
            status.fail("x")
        threading.Thread(target=background).start()
        """)
    assert (status, out) == (1, ["background"])


def test_closers_run_before_the_count_the_last_first():
    status, out, _ = run("""
        status = ExitStatus("a")
        before_exit(lambda: (print("one"), status.fail("the last save failed")))
        before_exit(lambda: print("two"))
        before_exit(lambda: print("withdrawn"))()
        atexit.register(print, "hook")
        """)
    assert (status, out) == (1, ["two", "one", "hook"])


def test_a_closer_that_clears_leaves_zero_and_one_that_raises_does_not():
    assert run("s = ExitStatus('a'); s.fail('x'); before_exit(s.clear)")[0] == 0
    status, out, err = run("before_exit(lambda: print('next')); before_exit(lambda: 1 / 0)")
    assert (status, out) == (1, ["next"])
    assert "ZeroDivisionError" in err.splitlines()[-2]
    assert err.endswith("tenuto: leaving with status 1: at exit: ZeroDivisionError: division by zero\n")


def test_the_status_of_a_preemption_stays():
    body = "ExitStatus('a').fail('x'); leaving_with(143); raise Preempted(15)"
    assert run(body)[0] == 143
    assert run("raise Preempted(10)") == (138, [], "")


def test_the_status_of_an_exit_out_of_a_checkpointers_block_stays(tmp_path):
    body = f"""
        import tenuto
        with tenuto.Checkpointer({str(tmp_path / "ckpts")!r}, {{"n": 1}}, data=None, log="silent"):
            ExitStatus("a").fail("x")
            sys.exit(7)
    """
    assert run(body)[0] == 7


def test_a_traceback_stays_visible_and_non_zero():
    status, _, err = run("ExitStatus('a').fail('x'); raise ValueError('mine')")
    assert status == 1
    assert "ValueError: mine" in err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_as_if_nothing_stood():
    status, out, err = run("""
        status = ExitStatus("a")
        status.fail("x")
        before_exit(lambda: print("closer of", "parent" if os.getpid() == parent else "child"))
        parent = os.getpid()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """)
    assert (status, out) == (1, ["child", "0", "closer", "of", "parent"])
    assert err.count("leaving with") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_can_fail_by_itself():
    _, out, _ = run("""
        ExitStatus("a")
        pid = os.fork()
        if pid == 0:
            ExitStatus("b").fail("y")
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """)
    assert out == ["1"]


def test_closed_streams_do_not_hide_the_status():
    assert run("ExitStatus('a').fail('x'); sys.stdout.close(); sys.stderr = None")[0] == 1


def test_without_the_late_registration_it_still_works():
    assert run("del threading._register_atexit; ExitStatus('a').fail('x'); atexit.register(print, 'o')")[0] == 1


TRAINED = """
import atexit, os, signal, sys, threading, time
import numpy as np, tenuto
def ask():
    os.kill(os.getpid(), signal.SIGTERM)
def trained():
    ckpt = tenuto.Checkpointer("ckpts", {"w": np.zeros(100)})
    assert list(ckpt.steps(3)) == [0, 1, 2]
    return ckpt
"""


@pytest.mark.parametrize(
    "end",
    [
        "with trained(): pass\nask(); print('not here')",
        "with trained(): pass\natexit.register(ask)",
        "atexit.register(ask)\nwith trained(): pass",
        "with trained(): pass\nthreading.Thread(target=lambda: (time.sleep(0.1), ask(), time.sleep(100))).start()",
        "ckpt = trained()\nthreading.Thread(target=lambda: (time.sleep(0.1), ask(), time.sleep(100))).start()",
        "ckpt = trained()\natexit.register(ask)",
        "trained().close()\natexit.register(ask)",
    ],
    ids=["script", "late hook", "early hook", "thread", "not closed, thread", "not closed, hook", "closed, hook"],
)
def test_a_signal_after_the_last_step_leaves_with_128_plus_n_and_all_is_saved(tmp_path, monkeypatch, end):
    monkeypatch.chdir(tmp_path)
    assert run(end, TRAINED)[:2] == (143, [])
    assert tenuto.Repository("ckpts").latest_step() == 3


def test_a_signal_when_python_is_gone_already_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = """
class Last:
    def __del__(self):
        ask()
with trained(): pass
sys.last = Last()
"""
    assert run(end, TRAINED)[0] == 0


def test_handlers_of_the_users_own_and_what_close_gives_back_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = """
def own(number, frame):
    print("own")
signal.signal(signal.SIGTERM, own)
with trained(): pass
assert signal.getsignal(signal.SIGTERM) is own
atexit.register(ask)
assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL
ckpt = tenuto.Checkpointer("ckpts", {"w": np.zeros(100)}, run="b")
list(ckpt.steps(1))
ckpt.close()
assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
"""
    assert run(end, TRAINED) == (0, ["own"], "")


def test_a_process_of_multiprocessing_closes_its_checkpointers_at_its_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = """
import multiprocessing
from tenuto.telemetry.heartbeat import ENDED, read_beats
os.environ["TENUTO_HEARTBEAT"] = os.getcwd()
def work():
    global ckpt
    ckpt = tenuto.Checkpointer("ckpts", {"w": np.zeros(100)}, save=tenuto.every(steps=1))
    ckpt.step_done(1)
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join()
print(process.exitcode, *(one.phase for one in read_beats(__import__("pathlib").Path())))
"""
    assert run(end, TRAINED)[:2] == (0, ["0", "ended"])
    assert tenuto.Repository("ckpts").latest_step() == 1
