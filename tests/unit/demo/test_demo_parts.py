"""The parts of the demo that need no training: the plan, the comparison, the reading of a killed child's events."""

from __future__ import annotations

import io
import json
import mmap
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import tenuto
from tenuto.cli.commands import demo
from tenuto.demo import report, storm
from tenuto.demo.comparison import Comparison, compare, read
from tenuto.demo.processes import Child, Life, start
from tenuto.demo.runner import Outcome, Plan, draw_kills
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

ROOT = Path(__file__).parents[3]


def test_the_script_to_take_home_is_the_one_that_runs_and_is_short() -> None:
    shipped = (ROOT / "src/tenuto/demo/train_gpt.py").read_text()
    assert (ROOT / "examples/train_gpt.py").read_text() == shipped
    assert len(shipped.splitlines()) < 100


def test_a_seed_draws_every_kill() -> None:
    during = ("save", "step", "start")
    kills = draw_kills(20, steps=200, save_every=7, seed=3, during=during)
    assert kills == draw_kills(20, steps=200, save_every=7, seed=3, during=during)
    assert kills != draw_kills(20, steps=200, save_every=7, seed=4, during=during)
    assert [kill.after for kill in kills] == sorted(kill.after for kill in kills)
    assert {kill.during for kill in kills} == {*during}
    assert {kill.during for kill in draw_kills(8, steps=9, save_every=30, seed=0)} == {"save", "step"}


def saved(place: Path, run: str, state: dict[str, Any]) -> Any:
    tenuto.save(state, place, step=5, run=run)
    return read(Repo.open(open_store(place)), run)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weights": np.arange(6.0) + np.eye(6)[4] * 1e-300}, None),
        ({"weights": np.arange(6.0) + np.eye(6)[4] * 1e-12}, "weights: byte 32 of 48 differs"),
        ({"weights": np.arange(6.0, dtype=np.float32)}, "weights: float64[6] and float32[6]"),
        ({"count": 4}, "3 and 4"),
        ({"count": 3.0}, "3 and 3.0"),
        ({"extra": np.zeros(2)}, "extra: only in"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, change: dict[str, Any], named: str | None) -> None:
    state = {"weights": np.arange(6.0), "count": 3}
    found = compare(saved(tmp_path, "one", state), saved(tmp_path, "other", {**state, **change}))
    if named is None:
        assert found.equal and found.leaves == 1 and found.bytes == 48
    else:
        assert found.difference is not None and named in found.difference


def test_a_killed_child_is_read_to_its_last_whole_event(tmp_path: Path) -> None:
    lines = [
        {"event": "Restored", "id": {"step": 4}},
        {"event": "SaveStarted", "id": {"step": 6}, "bytes": 10},
        {"event": "Committed", "id": {"step": 6}, "seconds": 0.5},
        {"event": "SaveStarted", "id": {"step": 8}, "bytes": 12},
    ]
    events = tmp_path / "events"
    text = "\n".join(json.dumps(line) for line in lines)
    events.write_text(text[:-9])
    child = Child(0, events, mmap.mmap(-1, mmap.PAGESIZE), status=-signal.SIGKILL)
    life = child.life()
    assert (life.began, life.killed, life.saving) == (4, True, False)
    events.write_text(text + "\n")
    assert child.life().saving and child.life().bytes == 12


def test_a_child_is_killed_where_it_is(tmp_path: Path) -> None:
    def train(events: Path, on_step: Any) -> None:
        on_step(7, 0.5)
        while True:
            time.sleep(0.01)

    child = start(train, tmp_path / "events", tmp_path / "output")
    assert child.wait_until(lambda: child.step == 7)
    child.kill()
    assert not child.running()
    assert child.life().killed and child.life().reached == 7


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    def train(events: Path, on_step: Any) -> None:
        raise ValueError("no such luck")

    assert start(train, tmp_path / "events", tmp_path / "output").end().status == 1
    assert "no such luck" in (tmp_path / "output").read_text()


def test_a_killed_child_tells_what_it_kept_and_why_not_more(tmp_path: Path) -> None:
    lines = [
        {"event": "Restored", "id": {"step": 4}, "content": "c4"},
        {"event": "RestoredFromMemory", "id": {"step": 4}},
        {"event": "SaveStarted", "id": {"step": 5}, "bytes": 10},
        {"event": "SavedToMemory", "id": {"step": 6}, "content": "c6", "stall_s": 0.25},
        {"event": "Warned", "message": "a metric was never logged"},
        {"event": "Warned", "message": "states are not kept in memory: there is no room"},
    ]
    events = tmp_path / "events"
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    life = Child(0, events, mmap.mmap(-1, mmap.PAGESIZE), status=-signal.SIGKILL).life()
    assert (life.restored, life.from_memory, life.saved, life.at) == ((4, "c4"), True, 5, 4)
    assert life.sealed == {6: "c6"} and life.memory_stalls_s == (0.25,)
    assert life.memory_off == "there is no room"


def made(difference: str | None = None, kills: int = 2) -> Outcome:
    lives = [Life(0, 12, -9, True, 1.0, (0.002,)), Life(None, 0, -9, False, 1.0), Life(10, 30, 0, False, 1.0, (0.004,))]
    return Outcome(
        plan=Plan(30, 10, draw_kills(kills, steps=30, save_every=10, seed=0), seed=0),
        untouched=Life(0, 30, 0, False, 1.0, (0.003,)),
        lives=tuple(lives if kills else lives[2:]),
        comparison=Comparison(5, 1000, difference),
        loss=2.5,
        copy_s=0.001,
        seconds=3.0,
        bytes=1000,
    )


def test_steps_lost_are_those_done_again_by_the_next_life_that_came_so_far() -> None:
    account = made()
    assert account.lost == [2, 0]
    assert (account.kills, account.kills_while_saving) == (2, 1)
    assert report.document(account)["steps_done_again"] == [2, 0]
    assert report.document(account)["stall_median_s"] == 0.003
    json.dumps(report.document(account), allow_nan=False)


def remembering(off: str = "") -> Outcome:
    first = Life(0, 17, -9, False, 1.0, (0.002,), memory_stalls_s=(0.001,), durable=10, memory_off=off)
    second = Life(16, 16, -9, False, 1.0, restored=(16, "c"), from_memory=True, durable=10)
    third = Life(10, 30, 0, False, 1.0, restored=(10, "d"), durable=30)
    return replace(made(), plan=replace(made().plan, memory=True), lives=(first, second, third))


def test_what_memory_saved_is_told_beside_what_the_disk_alone_would_have_lost() -> None:
    account = remembering()
    assert account.lost == [1, 6] and account.lost_from_disk == [7, 6]
    assert [account.restarts(source) for source in ("memory", "disk", "scratch")] == [1, 1, 0]
    told = dict(report.lines(account))
    assert told["came back"] == "1 time from memory, 1 time from disk"
    assert told["steps done again"] == "7 in all, at most 6 per kill"
    assert told["with the disk alone"] == "13 in all, at most 7 per kill"
    assert told["stall per step"] == "1.0 ms, median of 1 step kept in memory"
    assert "not in memory" not in told
    assert report.document(account)["steps_done_again_from_disk_alone"] == [7, 6]


def test_where_memory_has_no_room_the_account_says_why() -> None:
    account = remembering("two images of 7.3 MiB do not fit")
    assert dict(report.lines(account))["not in memory"].startswith("two images of 7.3 MiB do not fit; ")
    assert report.document(account)["not_kept_in_memory"] == "two images of 7.3 MiB do not fit"


@pytest.mark.parametrize("unicode", [True, False])
def test_the_account_says_equal_or_names_the_difference(unicode: bool) -> None:
    def text(account: Outcome) -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(report.rendered(account, "/tmp/kept", unicode=unicode))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    equal = text(made())
    assert "EQUAL" in equal and "bit for bit" in equal and "2 times, 1 of them during a save" in equal
    assert unicode or equal.isascii()
    assert "model/weight" in text(made("model/weight: byte 3 of 4 differs"))
    assert "proves nothing" in text(made(kills=0))


def test_importing_the_command_loads_no_framework() -> None:
    import subprocess

    code = "import sys, tenuto.cli.commands.demo, tenuto.demo.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("account", "status"), [(made(), 0), (made("model: differs"), 12), (made(kills=0), 1)])
def test_the_exit_status_is_the_verdict(account: Outcome, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer
    from typer.testing import CliRunner

    from tenuto.cli.commands.demo import demo
    from tenuto.demo import runner

    monkeypatch.setattr(runner, "load_framework", lambda: None)
    monkeypatch.setattr(runner.Runner, "untouched", lambda self, plan: account.untouched)
    monkeypatch.setattr(runner.Runner, "killed", lambda self, plan, untouched: account)
    app = typer.Typer()
    app.command()(demo)
    for arguments in ([], ["--json"]):
        assert CliRunner().invoke(app, arguments).exit_code == status


def test_a_storm_that_is_asked_to_leave_leaves_no_training_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = [], storm.Storm._start

    def spied(self: storm.Storm, command: Any) -> Any:
        started.append(start(self, [sys.executable, "-c", "import time; time.sleep(1000)"]))
        return started[-1]

    def leaves(*progress: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(storm.Storm, "_start", spied)
    monkeypatch.setattr(demo, "_lines", lambda: leaves)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        demo._storm(100, 10, tmp_path / "kept", json=False)
    assert left.value.code == 143 and signal.getsignal(signal.SIGTERM) == handler
    assert [one.poll() for one in started] == [-signal.SIGTERM]


def test_a_storm_removes_no_shared_memory_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others, own = tmp_path / "others", tmp_path / "own"
    for directory in (others, own):
        (directory / "image").mkdir(parents=True)
    monkeypatch.setattr(storm.slots, "SHARED_MEMORY", str(others))
    monkeypatch.setattr(storm.Storm, "_flip", lambda self: None)
    for memory in (None, own):
        one = storm.Storm(tmp_path, 100, 10, lambda *progress: None, memory=memory)
        (tmp_path / "storm.counter").touch()
        one._strike(one._start([sys.executable, "-c", "import time; time.sleep(1000)"]), "flipped byte", 5)
        assert (others / "image").exists()
    assert not (own / "image").exists()
