"""Other processes: who owns a run, what a forked child and a worker may do, signals, and the exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.loaded_interpreter import Program
from support.said import said
from support.tiny_training import state, steps_of, train
from tenuto import every, keep, on
from tenuto.errors import ForkedProcess, RanksNotSupported, RunInUse, Superseded, UsageError
from tenuto.policy.save import SavePolicy
from tenuto.repo.ownership.owner_watch import OwnerWatch
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

ALL = keep.latest(100)
HEAD = """
import os, signal, sys, warnings
import numpy as np
import tenuto
from tenuto import every, keep, on
warnings.simplefilter("ignore")
where = sys.argv[1]
state = {"w": np.zeros(1000, np.float32), "n": 0}
def say(word):
    print(word, flush=True)
"""


def spawn(place: Path, body: str, **environment: str) -> Program:
    return Program(["-c", HEAD + textwrap.dedent(body), str(place)], env={**os.environ, **environment})


def read(child: Program) -> str:
    return child.stdout.readline().strip()


def go_on(child: Program) -> None:
    child.stdin.write("\n")
    child.stdin.flush()


TRAINS_UNTIL_TOLD = """
ckpt = tenuto.Checkpointer(where, state, save=every(steps=1), keep=keep.latest(100))
for step in ckpt.steps(3):
    state["n"] += 1
    if step == 1:
        ckpt.wait()
        say("at work")
        sys.stdin.readline()
try:
    ckpt.close()
except tenuto.TenutoError as error:
    say(type(error).__name__)
"""


def test_a_run_that_another_process_trains_is_refused_and_names_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.repo.ownership.claim.DYING_S", 0.05)
    child = spawn(place, TRAINS_UNTIL_TOLD)
    try:
        assert read(child) == "at work"
        with tenuto.Checkpointer(place, state()) as ckpt, pytest.raises(RunInUse, match=str(child.pid)):
            ckpt.steps(9)
        go_on(child)
        assert child.wait(30) == 0
    finally:
        child.kill()
    assert steps_of(place) == [3, 2, 1]


def test_i11_the_one_claimed_over_gets_superseded_and_commits_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.repo.ownership.claim.DYING_S", 0.05)
    child = spawn(place, TRAINS_UNTIL_TOLD)
    try:
        assert read(child) == "at work"
        with tenuto.Checkpointer(place, state(), save=every(steps=1), takeover=True, keep=ALL) as ckpt:
            loop = ckpt.steps(3)
            assert next(loop) == 1
            go_on(child)
            _, said = child.communicate(timeout=60)
            assert "Superseded" in said
            assert child.returncode != 0
            assert list(loop) == [2]
    finally:
        child.kill()
    assert [str(id) for id in tenuto.Repository(place).checkpoints()] == [
        "main/a0002/3",
        "main/a0002/2",
        "main/a0001/1",
    ]


def test_a_killed_owner_is_claimed_over_at_once(place: Path) -> None:
    child = spawn(place, TRAINS_UNTIL_TOLD)
    assert read(child) == "at work"
    child.kill()  # not reaped: a zombie keeps its pid and start time, and is dead all the same
    with tenuto.Checkpointer(place, state(), save=every(steps=1), keep=ALL) as ckpt:
        assert list(ckpt.steps(3)) == [1, 2]
    child.wait(30)


def test_a_cell_that_is_run_twice_closes_its_first_checkpointer(place: Path) -> None:
    first = tenuto.Checkpointer(place, state(), save=every(steps=1), keep=ALL)
    loop = first.steps(10)
    next(loop)
    next(loop)
    with said("left incomplete"):
        second = tenuto.Checkpointer(place, state(), save=every(steps=1), keep=ALL)
        again = second.steps(10)
    assert next(again) == 1
    with pytest.raises(tenuto.TenutoError, match="closed"):
        first.save()
    with said("left incomplete"):
        second.close()


def counted(place: Path, total: int, save: SavePolicy) -> list[int]:
    """A cell that holds its Checkpointer by no name that outlives it, and does not close it."""
    return list(tenuto.Checkpointer(place, state(), save=save, keep=ALL).steps(total))


@pytest.mark.parametrize("save", [every(steps=1), every(steps=1) | on.signal()], ids=str)
def test_a_checkpointer_that_nobody_holds_any_more_gives_its_run_to_the_next(place: Path, save: SavePolicy) -> None:
    handlers = signal.getsignal(signal.SIGUSR1)
    assert counted(place, 2, save) == [0, 1]
    assert counted(place, 4, save) == [2, 3]
    last = tenuto.Checkpointer(place, state(), save=save, keep=ALL)
    assert list(last.steps(5)) == [4]
    last.close()
    assert signal.getsignal(signal.SIGUSR1) == handlers
    assert steps_of(place) == [5, 4, 3, 2, 1]


def own_loop(ckpt: tenuto.Checkpointer, one: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        train(one)
        ckpt.step_done()


def test_what_is_restored_into_the_objects_of_an_earlier_checkpointer_is_not_saved_as_a_step_of_it(place: Path) -> None:
    one = state()
    save = every(steps=2) | on.end()
    first = tenuto.Checkpointer(place, one, save=save, keep=ALL)
    first.restore()
    own_loop(first, one, 3)
    second = tenuto.Checkpointer(place, one, save=save, keep=ALL)
    with said(r"step 3 is not saved \(the last checkpoint is step 2\)"):
        assert second.restore() is not None
    assert second.step == one["n"] == 2
    with pytest.raises(UsageError, match="closed"):
        first.step_done()
    first.close()
    own_loop(second, one, 1)
    second.close()
    assert tenuto.load(place).step == 3
    for step in steps_of(place):
        assert tenuto.load(place, step=step).state["n"] == step


def test_what_other_code_did_to_the_objects_of_an_earlier_checkpointer_is_not_saved_as_a_step_of_it(
    place: Path, tmp_path: Path
) -> None:
    one = state()

    def cell(where: Path, steps: int) -> int:
        ckpt = tenuto.Checkpointer(where, one, save=every(steps=2) | on.end(), keep=ALL)
        restored = ckpt.restore()
        own_loop(ckpt, one, steps)
        return restored.step if restored is not None else 0

    other = tmp_path / "other"
    assert cell(place, 3) == cell(other, 3) == 0
    for where in (place, other):
        with said("step 3 is not saved"):
            assert cell(where, 2) == 2
        tenuto.Checkpointer(where, one).restore()  # ends it
    assert steps_of(place) == [4, 2]
    for step in steps_of(place):
        assert tenuto.load(place, step=step).state["n"] == step


def test_the_loop_of_a_checkpointer_that_another_one_has_closed_goes_on_no_further(place: Path) -> None:
    one = state()
    first = tenuto.Checkpointer(place, one, save=every(steps=1), keep=ALL)
    loop = first.steps(9)
    for _ in range(3):
        next(loop)
        train(one)
    first.wait()
    with said("step 3 was left incomplete"):
        tenuto.Checkpointer(place, one, save=every(steps=1), keep=ALL).restore()
    with pytest.raises(UsageError, match="is closed"):
        next(loop)
    assert steps_of(place) == [2, 1]


def test_a_forked_child_is_refused_and_its_end_changes_nothing(place: Path) -> None:
    ckpt = tenuto.Checkpointer(place, state(), save=every(steps=1), keep=ALL)
    loop = ckpt.steps(2)
    next(loop)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ckpt.save()
        except ForkedProcess:
            ckpt.close()
            status = 0
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert list(loop) == [1]
    ckpt.close()
    assert steps_of(place) == [2, 1]


def test_a_worker_that_imports_the_script_anew_trains_nothing(place: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        HEAD
        + textwrap.dedent("""
        import multiprocessing
        def work(number):
            return number * 2
        if __name__ == "__main__" or multiprocessing.parent_process() is not None:
            with tenuto.Checkpointer(where, state, save=every(steps=1)) as ckpt:
                for step in ckpt.steps(2):
                    if __name__ != "__main__":
                        raise SystemExit("a worker trained")
                    with multiprocessing.get_context("spawn").Pool(1) as pool:
                        state["n"] += pool.apply(work, (1,))
        """)
    )
    done = subprocess.run([sys.executable, str(script), str(place)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert tenuto.load(place).state["n"] == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_it_and_leaves(place: Path, number: signal.Signals) -> None:
    child = spawn(
        place,
        """
        with tenuto.Checkpointer(where, state, save=every(steps=100) | on.signal()) as ckpt:
            for step in ckpt.steps(1000):
                if step == 3:
                    say("in step")
                    sys.stdin.readline()
                state["n"] += 1
                state["w"] += 1
        """,
    )
    assert read(child) == "in step"
    child.send_signal(number)
    go_on(child)
    assert child.wait(60) == 128 + number
    restored = tenuto.load(place)
    assert restored.step == restored.state["n"] == 4
    assert np.all(restored.state["w"] == 4)


@pytest.mark.parametrize(
    ("touch", "more"),
    [("", ""), ("state['n'] += 1", "n"), ("state['w'] += 1", "w")],
    ids=["nothing", "plain", "tensor"],
)
def test_a_signal_in_an_evaluation_saves_the_last_step_where_the_body_ends(place: Path, touch: str, more: str) -> None:
    """What the body changes behind its batches, as by a scheduler's step, belongs to that step."""
    child = spawn(
        place,
        f"""
        with tenuto.Checkpointer(where, state, data=[1, 2, 3], save=every(steps=2) | on.signal()) as ckpt:
            for epoch in ckpt.epochs(5):
                for batch in ckpt.batches:
                    state["n"] += 1
                    state["w"] += 1
                {touch}
                say("evaluating")
                sys.stdin.readline()
                say("evaluated")
        """,
    )
    assert read(child) == "evaluating"
    child.send_signal(signal.SIGTERM)
    rest = child.communicate(timeout=60)[0]
    assert child.returncode == 128 + signal.SIGTERM
    assert rest.split() == ["evaluated"]
    restored = tenuto.load(place)
    assert restored.step == 3
    assert restored.state["n"] == 3 + (more == "n") and np.all(restored.state["w"] == 3 + (more == "w"))


def test_a_failure_that_nobody_saw_is_in_the_exit_status(place: Path) -> None:
    body = """
        from tenuto.store.registry import open_store
        from tenuto.errors import StoreError
        class Failing:
            def __init__(self, inner, failures): self.inner, self.failures = inner, failures
            def put_if_absent(self, name, content, *, token):
                if name.endswith(".safetensors") and self.failures:
                    self.failures -= 1
                    raise StoreError("no such luck")
                return self.inner.put_if_absent(name, content, token=token)
            def __getattr__(self, name): return getattr(self.inner, name)
        store = Failing(open_store(where), int(os.environ["FAILURES"]))
        with tenuto.Checkpointer(store, state, save=every(steps=1)) as ckpt:
            for step in ckpt.steps(2):
                ckpt._training.saving.saver.join(30)
    """
    child = spawn(place, body, FAILURES="-1")
    _, said = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "no such luck" in said
    child = spawn(place, body, FAILURES="1")
    child.communicate(timeout=60)
    assert child.returncode == 0


def test_what_is_in_flight_at_the_end_of_the_process_is_awaited(place: Path) -> None:
    child = spawn(
        place,
        """
        ckpt = tenuto.Checkpointer(where, {"w": np.ones(4 << 20)})
        ckpt.save()
        """,
    )
    assert child.wait(60) == 0
    assert np.all(tenuto.load(place).state["w"] == 1)


def test_it_is_awaited_also_where_nobody_holds_the_checkpointer_any_more(place: Path) -> None:
    child = spawn(
        place,
        """
        import threading, weakref
        from tenuto.training.exit_status import before_exit
        from tenuto.store.registry import open_store
        class Held:
            def __init__(self, inner): self.inner, self.gate = inner, threading.Event()
            def put_if_absent(self, name, content, *, token):
                if name.endswith(".safetensors"):
                    self.gate.wait()
                return self.inner.put_if_absent(name, content, token=token)
            def __getattr__(self, name): return getattr(self.inner, name)
        store = Held(open_store(where))
        def main():
            state = {"w": np.zeros(4 << 20)}
            ckpt = tenuto.Checkpointer(store, state, save=on.end())
            for step in ckpt.steps(3):
                state["w"] += 1
            return weakref.ref(ckpt)
        left = main()
        before_exit(store.gate.set)
        say("gone" if left() is None else "still there")
        """,
    )
    assert read(child) == "gone"
    child.communicate(timeout=60)
    assert child.returncode == 0
    found = tenuto.load(place)
    assert found.step == 3 and np.all(found.state["w"] == 3)
    assert OwnerWatch(Repo.open(open_store(place)), "main").inspect().reason == "it has released its lease"


def test_more_than_one_process_is_refused_by_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RanksNotSupported, match="WORLD_SIZE=2"):
        tenuto.Checkpointer(place, state())
    with pytest.raises(RanksNotSupported, match="WORLD_SIZE=2"):
        tenuto.save(state(), place)
    assert not place.exists()


def test_one_off_saves_while_a_checkpointer_owns_the_run_are_refused(place: Path) -> None:
    with tenuto.Checkpointer(place, state(), save=every(steps=1)) as ckpt:
        list(ckpt.steps(1))
        with pytest.raises(tenuto.TenutoError, match="a Checkpointer of this process"):
            tenuto.save(state(), place)
        tenuto.save(state(), place, run="other")
    assert steps_of(place, "other") == [0]
    assert Superseded is not None
