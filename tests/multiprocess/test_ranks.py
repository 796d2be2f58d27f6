"""A rank that is killed or stopped, in each phase, the coordinator and the store's own process included.

Every other rank raises within its deadline and names rank and phase; one that is let go on afterwards raises too.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.rank_processes import DEADLINE_S, SLACK_S, Job, Process

FACTS = {"run": "main"}
BACKENDS = ["files", "tcp"]
PHASES = ["handshake", "gather", "vote"]
TOLD = {"handshake": "handshake", "gather": "save 1", "vote": "restore 1", "propose": "proposal 1 (save at step"}


@pytest.fixture(params=BACKENDS)
def job(request: pytest.FixtureRequest, tmp_path: Path):
    with Job.start(request.param, 3, tmp_path) as job:
        yield job


OVER_TCP = {
    "killed": {("handshake", 0), ("gather", 0), ("gather", 1)},
    "stopped": {("handshake", 1), ("gather", 0), ("vote", 0)},
    "promised": {(signal.SIGKILL, 0), (signal.SIGSTOP, 1)},
}
"""Over a TCP store those are tried that differ by the store: it dies and stops with rank 0. torch starts slowly."""


def cases(name: str, firsts: list) -> list:
    all_cases = [(first, victim) for first in firsts for victim in (0, 1)]
    return [("files", *case) for case in all_cases] + [("tcp", *case) for case in sorted(OVER_TCP[name])]


def command(phase: str, rank: int) -> tuple:
    return {"handshake": ("handshake", FACTS), "gather": ("gather", b"%d" % rank), "vote": ("vote", True)}[phase]


def lead_up_to(job: Job, phase: str) -> None:
    if phase != "handshake":
        assert len(set(job.all("handshake", FACTS, SLACK_S))) == 1
        assert job.all("gather", b"x", SLACK_S) == [[b"x"] * 3] * 3
        assert job.all("vote", True, SLACK_S) == [{}] * 3


def raised(process: Process, phase: str, victim: int) -> None:
    kind, message, ranks, told, seconds = process.heard()
    assert kind in ("RanksMissing", "RankFailed", "RankStoreLost"), message
    assert victim in ranks, message
    assert f"rank {victim}" in message and TOLD[phase] in message
    assert told.startswith(TOLD[phase])
    assert seconds < DEADLINE_S + SLACK_S


@pytest.mark.parametrize(("job", "phase", "victim"), cases("killed", ["handshake", "gather"]), indirect=["job"])
def test_a_rank_that_is_killed(job: Job, phase: str, victim: int) -> None:
    lead_up_to(job, phase)
    job.processes[victim].signal(signal.SIGKILL)
    for process in job.others(victim):
        process.tell(*command(phase, process.rank))
    for process in job.others(victim):
        raised(process, phase, victim)


@pytest.mark.parametrize(("job", "phase", "victim"), cases("stopped", PHASES), indirect=["job"])
def test_a_rank_that_is_stopped_and_goes_on(job: Job, phase: str, victim: int) -> None:
    lead_up_to(job, phase)
    job.processes[victim].signal(signal.SIGSTOP)
    job.processes[victim].leave_word(*command(phase, victim))
    for process in job.others(victim):
        process.tell(*command(phase, process.rank))
    for process in job.others(victim):
        raised(process, phase, victim)
    job.processes[victim].signal(signal.SIGCONT)
    assert job.processes[victim].heard() == "begun"
    kind, message, *_ = job.processes[victim].heard()
    assert kind in ("RanksMissing", "RankFailed", "RankStoreLost"), message


@pytest.mark.parametrize(
    ("job", "number", "victim"), cases("promised", [signal.SIGKILL, signal.SIGSTOP]), indirect=["job"]
)
def test_a_rank_that_never_reaches_the_step_it_promised(job: Job, victim: int, number: signal.Signals) -> None:
    lead_up_to(job, "propose")
    job.all("handshake", FACTS, SLACK_S)
    if victim:
        job.processes[victim].signal(number)  # before it can promise
    job.processes[0].tell("want")
    assert job.processes[0].heard()[0] == "ok"
    for process in job.others(victim):
        process.tell("promise")
        assert process.heard()[0] == "ok"
    if not victim:
        job.processes[0].signal(number)  # it may have announced the verdict, or not
    for process in job.others(victim):
        process.tell("arrive")
    answers = {process.rank: process.heard() for process in job.others(victim)}
    if {answer[0] for answer in answers.values()} == {"ok"}:
        assert not victim and len({answer[1] for answer in answers.values()}) == 1
        return
    for kind, message, ranks, phase, seconds in answers.values():
        assert kind in ("RanksMissing", "RankFailed", "RankStoreLost") and victim in ranks, message
        assert phase.startswith(TOLD["propose"]) and seconds < DEADLINE_S + SLACK_S


def test_all_ranks_promise_and_save_at_one_step(job: Job) -> None:
    lead_up_to(job, "propose")
    job.processes[2].tell("want")
    assert job.processes[2].heard()[0] == "ok"
    assert len(set(job.all("promise"))) == 1
    (answer,) = set(job.all("arrive", SLACK_S))
    assert answer == (answer[0], "a signal")


@pytest.mark.parametrize(("job", "victim"), [("files", 0), ("files", 2)], indirect=["job"])
def test_a_rank_that_leaves_says_so(job: Job, victim: int) -> None:
    lead_up_to(job, "gather")
    job.processes[victim].tell("leave")
    assert job.processes[victim].heard()[0] == "ok"
    for process in job.others(victim):
        process.tell("gather", b"", 60.0)
    for process in job.others(victim):
        kind, message, ranks, phase, seconds = process.heard()
        assert (kind, ranks, phase) == ("RankFailed", (victim,), "save 1")
        assert "its own trouble" in message and seconds < 30


def test_an_incarnation_that_was_killed_is_not_met_again(tmp_path: Path) -> None:
    """The keys that it left are there, in the midst of a save; and one of its ranks comes back later."""
    with Job.start("files", 3, tmp_path) as first:
        lead_up_to(first, "gather")
        first.processes[1].signal(signal.SIGSTOP)
        first.processes[1].leave_word("gather", b"stale")
        first.processes[2].tell("gather", b"stale", 60.0)
        for rank in (0, 2):
            first.processes[rank].signal(signal.SIGKILL)
        with first.restarted() as second:
            (session,) = set(second.all("handshake", FACTS, SLACK_S))
            assert second.all("gather", b"new", SLACK_S) == [[b"new"] * 3] * 3
            first.processes[1].signal(signal.SIGCONT)
            assert first.processes[1].heard() == "begun"
            kind, message, *_ = first.processes[1].heard()
            assert kind in ("RanksMissing", "RankFailed"), message
            assert second.all("gather", b"newer", SLACK_S) == [[b"newer"] * 3] * 3
            sessions = tmp_path / "ranks" / "tenuto" / "sessions"
            until = time.monotonic() + SLACK_S  # a heartbeat removes what the killed ones have left
            while len(left := {path.name for path in sessions.iterdir()}) > 2 and time.monotonic() < until:
                second.all("gather", b"newest", SLACK_S)
            assert session in left and len(left) <= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_that_claim_one_rank(tmp_path: Path, rank: int) -> None:
    with Job.start("files", 3, tmp_path) as job:
        job.processes.append(job.process(rank))
        assert job.processes[3].heard() == "ready"
        claimants = [job.processes[rank], job.processes[3]]
        for process in claimants:
            process.tell("handshake", FACTS, SLACK_S)
        answers = [process.heard() for process in claimants]
        assert "RanksDisagree" in {answer[0] for answer in answers}
        assert "ok" not in {answer[0] for answer in answers}
        assert any(f"two processes say that they are rank {rank}" in answer[1] for answer in answers)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)], ids=str)
def test_ranks_that_take_the_job_for_another_size(tmp_path: Path, sizes: tuple[int, int]) -> None:
    with Job("files", max(sizes), str(tmp_path / "ranks")) as job:
        job.processes = [job.process(0, sizes[0]), *(job.process(rank, sizes[1]) for rank in range(1, sizes[1]))]
        for process in job.processes:
            assert process.heard() == "ready"
        for process in job.processes:
            process.tell("handshake", FACTS, SLACK_S)
        for process in job.processes:
            kind, message, *_ = process.heard()
            assert kind == "RanksDisagree", message
            assert f"world size is '{sizes[0]}' on rank 0" in message and f"'{sizes[1]}' on rank" in message


def test_a_rank_of_a_larger_job_that_comes_late_is_told_at_its_deadline(tmp_path: Path) -> None:
    with Job("files", 3, str(tmp_path / "ranks")) as job:
        job.processes = [job.process(0, 2), job.process(1, 3), job.process(2, 3)]
        for process in job.processes:
            assert process.heard() == "ready"
        first, second, late = job.processes
        for process in (first, second):
            process.tell("handshake", FACTS, SLACK_S)
        for process in (first, second):
            assert process.heard()[0] == "RanksDisagree"
        late.tell("handshake", FACTS)
        kind, message, *_ = late.heard()
        assert kind == "RanksDisagree", message
        assert "world size is '2' on rank 0" in message and "'3' on rank 1" in message
