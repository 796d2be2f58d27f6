"""How supervisors of several nodes meet: a process that gives no sign of life, and one that is to leave meanwhile."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tenuto.ranks.agreement import Agreement
from tenuto.supervisor import meeting
from tenuto.supervisor.helper_process import HelperProcess
from tenuto.supervisor.meeting import LEFT, Meeting, MeetingProcess, Outcome


class Silent:
    """In place of the process: it says what it is told to."""

    def __init__(self, *arguments: str, stderr: int) -> None:
        self.said: list[bytes] = []
        self.ended = False

    def lines(self) -> list[bytes]:
        said, self.said = self.said, []
        return said

    def close(self, within_s: float) -> list[bytes]:
        self.ended = True
        return []

    def put(self, value: object) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(meeting, "HelperProcess", Silent)
    monkeypatch.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def looked_at(clock: SimpleNamespace, one: Meeting, for_s: float) -> Outcome | None:
    """Looks once a second for so long."""
    until_s = clock.now_s + for_s
    while clock.now_s < until_s:
        clock.now_s += 1.0
        one.outcome()
    return one.outcome()


def test_a_process_that_gives_no_sign_of_life_is_ended_and_the_start_is_lost(clock: SimpleNamespace) -> None:
    one = Meeting(Path("/meet"), 0, 2, 30.0, {})
    assert looked_at(clock, one, 89.0) is None, "an interpreter starts"
    one._process.said.append(b'["alive", {}]')  # type: ignore[attr-defined]
    assert looked_at(clock, one, 35.0) is None and not one._process.ended
    silent = "the process that meets the other nodes has not answered for 35.0 s"
    assert looked_at(clock, one, 2.0) == Outcome("lost", (), silent) and one._process.ended
    answer = one.answer()
    assert answer is not None and answer.error == silent
    one.begin({}, 43.0)
    assert looked_at(clock, one, 1.0) is None, "another process does it"


def test_nothing_is_concluded_from_a_time_in_which_the_supervisor_itself_was_stopped(clock: SimpleNamespace) -> None:
    one = Meeting(Path("/meet"), 0, 2, 30.0, {})
    clock.now_s = 3600.0
    assert one.outcome() is None


def test_what_it_prints_at_its_end_is_said(clock: SimpleNamespace) -> None:
    one = Meeting(Path("/meet"), 0, 2, 30.0, {})
    one._process.said += [b"Traceback (most recent call last):", b"ModuleNotFoundError: x"]  # type: ignore[attr-defined]
    one._process.ended = True
    why = "the process that meets the other nodes has ended (ModuleNotFoundError: x)"
    assert one.outcome() == Outcome("lost", (), why)


def test_a_process_that_reads_nothing_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "idle.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    process = HelperProcess("idle")
    process.put("x" * (1 << 20))
    process.put("y")
    assert len(process._unsent) > 1 << 19
    process.close(0.0)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[tuple[MeetingProcess, IO[str]]]]:
    """Two nodes that meet, and what each tells its supervisor."""
    made = []
    for node in range(2):
        ours, theirs = os.pipe()
        process = MeetingProcess(tmp_path, node, 2, patience_s=30.0, facts={}, out=theirs)
        made.append((process, os.fdopen(ours)))
    yield made
    for process, told in made:
        process._leave()
        os.close(process._out)
        told.close()


def said(told: IO[str]) -> tuple[str, dict[str, Any]]:
    name, values = json.loads(told.readline())
    return name, values


def test_one_that_is_to_leave_while_the_first_node_decides_takes_the_others_along(
    two: list[tuple[MeetingProcess, IO[str]]],
) -> None:
    meetings = [
        threading.Thread(target=process._met, args=({"host": node}, 60.0), daemon=True)
        for node, (process, _) in enumerate(two)
    ]
    for meeting_of_one in meetings:
        meeting_of_one.start()
    (first, told), (second, _) = two
    assert said(told)[1]["brought"] == [{"host": 0}, {"host": 1}]
    second._announce({"kind": LEFT, "evidence": "SIGTERM"})
    second._leave()
    first._verdicts.put({"restart": True})
    assert said(told)[1]["verdict"] == {"restart": True}
    assert said(told) == ("outcome", {"what": "leave", "nodes": [1], "evidence": f"{LEFT} (SIGTERM)"})
    for meeting_of_one in meetings:  # each writes to a pipe, whose number is somebody else's once it is closed
        meeting_of_one.join(60)
        assert not meeting_of_one.is_alive()


def test_what_nobody_expects_is_said_too(
    two: list[tuple[MeetingProcess, IO[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Agreement, "open", fails)
    process, told = two[0]
    process._met({}, 1.0)
    words = "RuntimeError: can't start new thread"
    assert said(told)[1]["error"] == words
    assert said(told)[1] == {"what": "lost", "nodes": [], "evidence": words}
