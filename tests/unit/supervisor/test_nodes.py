"""Several supervisors of one job: whose ending counts, what they keep, and which node this is."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.errors import RanksDisagree, RanksError, RanksMissing, RankStoreLost, UsageError
from tenuto.supervisor.decide import Decision, Ending, Kind, Limits
from tenuto.supervisor.journal import Journal
from tenuto.supervisor.meeting import Answer, MeetingProcess, Outcome
from tenuto.supervisor.nodes import Course, Nodes, decisive_of, encoded, nodes_of
from tenuto.supervisor.restart import Restart
from tenuto.supervisor.strategies import Recovery
from tenuto.supervisor.supervise import Supervisor, Watch
from tenuto.telemetry.last_words import LastWords


def ending(kind: Kind, ran_s: float = 10.0, message: str = "", *errors: str) -> Ending:
    words = LastWords(1, 0, 7, 100.0, message, errors=errors) if message else None
    return Ending(kind, 1, 0.0, ran_s, words=words)


@pytest.mark.parametrize(
    ("endings", "node"),
    [
        ([ending("another node", 1.0), ending("killed")], 1),
        ([ending("finished", 1.0), ending("failed")], 1),
        ([ending("failed", 1.0), ending("killed")], 1),
        ([ending("failed", 1.0, "RuntimeError: Connection closed by peer"), ending("failed", 2.0, "KeyError: 3")], 1),
        ([ending("failed", 1.0, "DistBackendError: NCCL error"), ending("failed", 2.0)], 1),
        ([ending("failed", 1.0, "rank 1 is lost", "RanksMissing", "RanksError"), ending("failed", 2.0)], 1),
        ([ending("failed", 2.0), ending("failed", 1.0)], 1),
        ([ending("failed", 1.0), ending("failed", 1.0)], 0),
        ([ending("killed", 1.0), ending("asked to leave")], 1),
    ],
)
def test_the_ending_that_says_most_counts(endings: list[Ending], node: int) -> None:
    assert decisive_of(dict(enumerate(endings))) == (node, endings[node])


def test_what_was_decided_is_told_as_it_is_and_times_as_ages() -> None:
    recovery = Recovery(next=Restart(2, "out of memory", 4, (range(16, 18), range(20, 21))))
    recovery._size, recovery._went_back_to = 1, 15
    told = Course(recovery, [ending("failed", 3.0, "KeyError: 3", "KeyError")], {5: 21})
    heard = Course(Recovery(), [], {5: 3, 6: 4})
    heard.adopt(json.loads(json.dumps(told.encode())))
    assert (heard.recovery.next, heard.recovery._size, heard.recovery._went_back_to) == (recovery.next, 1, 15)
    (one,) = heard.endings
    assert heard.reached == {5: 21, 6: 4} and one.words == told.endings[0].words
    assert one.ended_s - one.began_s == pytest.approx(3.0) and one.began_s == pytest.approx(0.0, abs=1.0)


def test_of_an_end_that_was_decided_already_nothing_is_decided_again() -> None:
    """One that was cut off while the others started again, and one whose supervisor was started again."""
    decided = Course(Recovery(), [ending("failed")], {5: 9})
    fresh: dict[str, Any] = {"host": "a", "start": 1, "ending": None, "course": Course(Recovery()).encode()}
    newest = {**fresh, "start": 2, "ending": encoded(ending("hung")), "course": decided.encode()}
    cut_off = {**fresh, "ending": encoded(ending("killed", 1.0))}
    course = Course(Recovery())
    verdict = Nodes(0, 3, Path("/meet"))._verdict(
        [fresh, newest, cut_off], course, lambda: (Decision(True, course.endings[-1].kind), "how")
    )
    assert (verdict["reason"], verdict["how"], course.reached) == ("node 1: hung", "how", {5: 9})
    assert [one.kind for one in course.endings] == ["failed", "hung"]


def of(nodes: str, node_rank: int | None = None, meet: str = "meet") -> Nodes | None:
    return nodes_of(nodes, node_rank, meet, first_s=600.0, patience_s=30.0)


@pytest.mark.parametrize(
    ("variables", "nodes", "found"),
    [
        ({"SLURM_NNODES": "4", "SLURM_NODEID": "2"}, "auto", (2, 4)),
        ({"PET_NNODES": "4", "PET_NODE_RANK": "3"}, "auto", (3, 4)),
        ({"JOB_COMPLETION_INDEX": "1"}, "4", (1, 4)),
        ({"SLURM_NNODES": "1", "SLURM_NODEID": "0"}, "auto", None),
    ],
)
def test_which_node_this_is_the_scheduler_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], nodes: str, found: tuple[int, int] | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    here = of(nodes)
    assert (here and (here.node, here.nodes)) == found
    assert of("", meet="") is None, "one node unless it is asked for"


@pytest.mark.parametrize(
    ("nodes", "node_rank", "meet", "message"),
    [
        ("auto", 0, "meet", "--nodes auto: SLURM_NNODES and PET_NNODES are not set"),
        ("many", 0, "meet", "--nodes many: a number of nodes is needed"),
        ("4", None, "meet", "--node-rank is missing"),
        ("4", 4, "meet", "--node-rank 4 makes no sense with 4 nodes"),
        ("4", 0, "", "4 nodes need a directory that all of them share"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch, nodes: str, node_rank: int | None, meet: str, message: str
) -> None:
    for name in ("SLURM_NNODES", "PET_NNODES", "SLURM_NODEID", "JOB_COMPLETION_INDEX", "PET_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=message) as raised:
        of(nodes, node_rank, meet)
    assert raised.value.hint and raised.value.hint.startswith("tenuto run --nodes 4")


def test_a_start_has_not_finished_where_a_node_is_about_to_say_that_it_has_failed(tmp_path: Path) -> None:
    """Its word lies there already, and the round has not failed yet."""
    calls: list[str] = []

    class Start:
        def gather(self, deadline: float) -> list[bytes]:
            return [b'{"kind": "finished"}', b'{"kind": "failed"}']

        def broadcast(self, data: bytes) -> None:
            calls.append("finished")

        def receive(self, deadline: float) -> bytes:
            message = "start 0: x, where the ranks meet, fails; waited for rank 1 (last reported 'start 0', 4 s ago)"
            raise RankStoreLost(message, subject="x", hint="wait")

    process = MeetingProcess(tmp_path, 0, 2, patience_s=30.0, facts={}, out=-1)
    found = process._outcome(SimpleNamespace(is_coordinator=True), Start())  # type: ignore[arg-type]
    assert not calls and found == Outcome("lost", (), f"{tmp_path}, where the nodes meet, fails")


def test_why_nodes_have_not_met_is_said_of_nodes() -> None:
    nodes = Nodes(0, 3, Path("/meet"))
    nodes._hosts = {2: "gpu-17"}
    late = nodes._apart(Answer(error="…", kind="RanksMissing", nodes=(2,)), 43.0, first=False)
    assert isinstance(late, RanksMissing) and late.ranks == (2,)
    assert late.message == "node 2 (gpu-17): its `tenuto run` has not come to /meet within 43.0 s"
    differ = nodes._apart(Answer(error="the nodes disagree: 'x' on node 1", kind="RanksDisagree"), 43.0, first=True)
    assert isinstance(differ, RanksDisagree)
    assert differ.message == "the nodes cannot start together: the nodes disagree: 'x' on node 1"
    lost = nodes._apart(Answer(error="the directory fails", kind="RankStoreLost"), 43.0, first=True)
    assert type(lost) is RanksError and lost.hint and "look at /meet on this node" in lost.hint
    ended = nodes._apart(Answer(error="the process that meets the other nodes has ended"), 43.0, first=False)
    assert ended.hint == "start the job again on all 3 nodes"
    two = Nodes(0, 2, Path("/meet"))
    alone = Answer(error="…", kind="RanksMissing", nodes=(1,))
    assert two._apart(alone, 600.0, first=True).message.endswith("; node 0 is alone there")
    assert "alone" not in two._apart(alone, 43.0, first=False).message, "they have met before, in that directory"
    assert nodes.words(Outcome("lost", (2,), "why")) == "node 2 (gpu-17) is lost: why"
    assert nodes.words(Outcome("lost", (0,), "why")) == "the other nodes have lost this one: why"
    assert nodes.words(Outcome("ended", (1,), "killed (SIGKILL)")) == "node 1: killed (SIGKILL)"


@pytest.mark.parametrize(
    ("outcome", "elsewhere"),
    [
        (Outcome("ended", (1,), "why"), False),
        (Outcome("leave", (1,), "why"), False),
        (Outcome("lost", (1,), "why"), True),
        (Outcome("lost", (), "why"), True),
        (Outcome("ended", (0,), "why"), True),
    ],
)
def test_one_that_the_others_have_lost_ends_its_training_too(outcome: Outcome, *, elsewhere: bool) -> None:
    nodes = Nodes(1, 2, Path("/meet"))
    nodes._meeting = SimpleNamespace(outcome=lambda: outcome)  # type: ignore[assignment]
    assert nodes.outcome_elsewhere() == (outcome if elsewhere else None)


@pytest.mark.parametrize(("node_rank", "meet"), [(1, ""), (None, "meet")])
def test_what_says_which_node_this_is_without_their_number_is_refused(node_rank: int | None, meet: str) -> None:
    with pytest.raises(UsageError, match="--node-rank and --meet need --nodes"):
        of("", node_rank, meet)


def test_a_patience_that_no_sign_of_life_could_keep_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--patience 0\.10 s is too short"):
        nodes_of("2", 0, "meet", first_s=600.0, patience_s=0.1)


@pytest.mark.parametrize(("asked", "status"), [([], 17), ([signal.SIGTERM], 1)])
def test_an_end_counts_once_where_the_first_node_has_decided_and_the_others_do_not_learn_it(
    asked: list[int], status: int
) -> None:
    said: list[str] = []
    one = Supervisor(["true"], Limits(), Watch(), Journal(None, said.append), said.append)
    own = ending("failed")

    class Undecided:
        def settle(self, own: Ending, asked: object) -> Outcome:
            return Outcome("ended", (0,), "why")

        def meet(self, own: Ending, course: Course, decided: object, why: object) -> None:
            course.endings.append(own)
            one._asked.extend(asked)
            if not asked:
                raise RanksMissing("node 1: its `tenuto run` has left", subject="node 1", hint="start the job again")

    decision, _ = one._what_follows_for_all(Undecided(), own)  # type: ignore[arg-type]
    assert not decision.restart and [each.status for each in one._course.endings] == [status]
