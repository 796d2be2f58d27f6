"""The supervisors of one job, one on each node: they start, end and give up its training together.

Each brings to their meeting how the last start has ended on its node. The first node takes the one that says most,
decides as a supervisor alone would, and does once what the next start needs; all others are told. Every node keeps what
was decided so far, so that one whose supervisor is started again, the first one too, learns it from the others.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tenuto.errors import RankFailed, RanksDisagree, RanksError, RanksMissing, UsageError
from tenuto.supervisor.decide import Decision, Ending
from tenuto.supervisor.meeting import FINISHED, LEFT, Answer, Meeting, Outcome
from tenuto.supervisor.process_tree import KILLED_S
from tenuto.supervisor.strategies import Recovery
from tenuto.telemetry.last_words import LastWords
from tenuto.units import seconds

OTHERS_GRACE_S: Final = 3.0
"""For a training that has lost another node: what it could still save needs that node, and what is sealed in memory
stays there."""
LEAVE_S: Final = 3.0
"""How long one that was asked to leave waits until the others know it."""
POLL_S: Final = 0.1
STATUS_LOST: Final = 128 + signal.SIGKILL
"""Of a start that has ended because a supervisor was lost."""
_LEAST_PATIENCE_S: Final = 1.0
_LOST_ANOTHER: Final = re.compile(r"DistBackendError|connection (was )?(closed|reset|refused)|broken pipe", re.I)
"""What errors say of collectives whose other rank is gone."""
_AUTO: Final = "auto"
_NODES: Final = ("SLURM_NNODES", "PET_NNODES")
_NODE_RANK: Final = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "PET_NODE_RANK")
"""What schedulers tell each task: Slurm, an indexed Job of Kubernetes, and Kubeflow."""


@dataclass
class Course:
    """What has become of a supervised training so far: of all nodes, if it has several. endings: of its starts, the
    oldest first. reached: the highest healthy step of each run. recovery: what the next start is given."""

    recovery: Recovery
    endings: list[Ending] = field(default_factory=list)
    reached: dict[int, int] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """Returns it for other nodes, whose clocks are others: times as ages."""
        endings = [encoded(one) for one in self.endings]
        return {"endings": endings, "reached": list(self.reached.items()), "recovery": self.recovery.state()}

    def adopt(self, values: Mapping[str, Any]) -> None:
        """Takes what another node has encoded, in place of its own."""
        self.endings[:] = map(decoded, values["endings"])
        for run, step in values["reached"]:
            self.reached[run] = max(self.reached.get(run, 0), step)
        self.recovery.adopt(values["recovery"])


def encoded(ending: Ending) -> dict[str, Any]:
    now_s = time.monotonic()
    return {**asdict(ending), "began_s": now_s - ending.began_s, "ended_s": now_s - ending.ended_s}


def decoded(values: Mapping[str, Any]) -> Ending:
    now_s, words = time.monotonic(), values["words"]
    times = {name: now_s - values[name] for name in ("began_s", "ended_s")}
    said = None if words is None else LastWords(**{**words, "errors": tuple(words["errors"])})
    return Ending(**{**values, **times, "words": said})


def decisive_of(endings: Mapping[int, Ending]) -> tuple[int, Ending]:
    """Returns the node whose ending says most about why all have ended, and that ending: one that was asked to leave;
    else one with a cause of its own, before an unknown error, and before one of a rank that has lost another. Of those
    that say as much, the shortest start: they began together, and clocks of nodes are not compared."""

    def order(node: int) -> tuple[int, float, int]:
        one = endings[node]
        words = one.words
        lost = words is not None and ("RanksError" in words.errors or _LOST_ANOTHER.search(words.message) is not None)
        silent = one.kind in (FINISHED, "another node")
        says = 0 if one.kind == LEFT else 4 if silent else 3 if lost else 2 if one.kind == "failed" else 1
        return says, one.ended_s - one.began_s, node

    node = min(endings, key=order)
    return node, endings[node]


@dataclass
class Nodes:
    """This supervisor among those of the other nodes."""

    node: int
    nodes: int
    directory: Path
    first_s: float = 600.0
    """How long the nodes wait for each other at the first start."""
    patience_s: float = 30.0
    """How long a node, or the directory, may give no sign of life, and how long a node that was lost is waited for."""
    sizes: Sequence[int] = ()
    """What `{ranks}` stands for: the same on all nodes."""
    _meeting: Meeting | None = None
    _hosts: dict[int, str] = field(default_factory=dict)
    _outcome: Outcome | None = None
    _announced: bool = False
    """Whether the others were told of this start's end."""

    @property
    def meeting(self) -> Meeting:
        if self._meeting is None:
            facts = {"--ranks": ",".join(map(str, self.sizes))}
            self._meeting = Meeting(self.directory, self.node, self.nodes, self.patience_s, facts)
        return self._meeting

    def name(self, nodes: Sequence[int]) -> str:
        """Returns nodes in words: `node 2 (gpu-17)`."""
        names = [f"node {node}" + (f" ({self._hosts[node]})" if node in self._hosts else "") for node in nodes[:8]]
        return ", ".join([*names, *([f"{len(nodes) - 8} more"] if len(nodes) > 8 else [])])

    # -- while the training runs

    def outcome_elsewhere(self) -> Outcome | None:
        """Returns how this start has ended on another node, or that the others have lost this one; None where neither
        is so."""
        outcome = self._outcome = self._outcome or self.meeting.outcome()
        own = outcome is not None and outcome.what != "lost" and self.node in outcome.nodes
        return None if own else outcome

    def words(self, outcome: Outcome) -> str:
        """Returns why this start is to end."""
        if not outcome.nodes:
            return outcome.evidence
        if outcome.what == "lost" and self.node in outcome.nodes:
            return f"the other nodes have lost this one: {outcome.evidence}"
        return f"{self.name(outcome.nodes)}{' is lost' if outcome.what == 'lost' else ''}: {outcome.evidence}"

    def leave(self, why: str) -> None:
        """Tells the others that the training here is asked to leave: it is to end on all nodes."""
        if not self._announced:
            self.meeting.announce(LEFT, why)
        self._announced = True

    # -- between two starts

    def settle(self, own: Ending, asked: Callable[[], str]) -> Outcome | None:
        """Tells the others how the training here has ended, and returns how this start has for all. Waits for that: for
        long, where it has finished here alone. asked: why this node is to leave, empty where it is not; then None where
        the others do not learn that in time."""
        if not self._announced and own.kind != "another node":
            self.meeting.announce(own.kind, own.evidence)
        self._announced = True
        until_s: float | None = None
        while (outcome := self.meeting.outcome()) is None:
            if until_s is None and (why := asked()):
                self.meeting.announce(LEFT, why)
                until_s = time.monotonic() + LEAVE_S
            if until_s is not None and time.monotonic() > until_s:
                break
            time.sleep(POLL_S)
        self._outcome = outcome
        return outcome

    def meet(
        self,
        own: Ending | None,
        course: Course,
        decided: Callable[[], tuple[Decision, str]],
        asked: Callable[[], str],
    ) -> tuple[Decision, str] | None:
        """Meets the others before a start, and returns what follows, and in words how; None once this node is `asked`
        to leave, with a reason. own: how the last start has ended here; None before the first one. decided: what the
        first node decides and does, once the ending that counts is the last one of the course. Raises RanksError."""
        within_s = self.first_s if own is None else self.patience_s + OTHERS_GRACE_S + KILLED_S
        brought = {
            "host": socket.gethostname(), "start": len(course.endings) + 1, "course": course.encode(),
            "ending": None if own is None else encoded(own),
        }  # fmt: skip
        self.meeting.begin(brought, within_s)
        while not (why := asked()):
            answer = self.meeting.answer()
            if answer is None:
                time.sleep(POLL_S)
            elif answer.verdict is not None:
                return self._take(answer.verdict, course)
            elif answer.brought:
                self.meeting.decide(self._verdict(answer.brought, course, decided))
            else:
                raise self._apart(answer, within_s, first=own is None)
        self.meeting.announce(LEFT, why)  # others may have met already
        return None

    def _verdict(
        self, brought: Sequence[Mapping[str, Any]], course: Course, decided: Callable[[], tuple[Decision, str]]
    ) -> dict[str, Any]:
        course.adopt(max((one["course"] for one in brought), key=lambda one: len(one["endings"])))
        start = len(course.endings) + 1
        ended = {
            node: decoded(one["ending"])
            for node, one in enumerate(brought)
            if one["ending"] is not None and one["start"] == start
        }
        decision, how = Decision(True, ""), ""
        if ended:
            node, decisive = decisive_of(ended)
            # Nobody says more than that another node is lost: its supervisor was started again, and knows of nothing.
            lost = decisive.kind in (FINISHED, "another node")
            course.endings.append(replace(decisive, kind="killed", status=STATUS_LOST) if lost else decisive)
            decision, how = decided()
            decision = decision if lost else replace(decision, reason=f"node {node}: {decision.reason}")
        hosts = [str(one["host"]) for one in brought]
        return {**asdict(decision), "how": how, "hosts": hosts, "course": course.encode()}

    def _take(self, verdict: Mapping[str, Any], course: Course) -> tuple[Decision, str]:
        self._outcome, self._announced = None, False
        self._hosts = dict(enumerate(verdict["hosts"]))
        course.adopt(verdict["course"])
        return Decision(verdict["restart"], verdict["reason"], verdict["after_s"]), verdict["how"]

    def _apart(self, answer: Answer, within_s: float, *, first: bool) -> RanksError:
        """Returns why there is no meeting. first: whether this supervisor has met nobody so far."""
        others, where = [node for node in answer.nodes if node != self.node], self.directory
        if answer.kind == RanksDisagree.__name__:
            hint = "give each node its own --node-rank, all the same --nodes and --ranks, and each job its own --meet"
            return RanksDisagree(f"the nodes cannot start together: {answer.error}", subject="--node-rank", hint=hint)
        if answer.kind not in (RanksMissing.__name__, RankFailed.__name__) or not others:
            look = f"look at {where} on this node: is it mounted, and may `tenuto run` write there?"
            hint = look if answer.kind else f"start the job again on all {self.nodes} nodes"
            return RanksError(f"node {self.node} cannot meet the others: {answer.error}", subject=str(where), hint=hint)
        late = answer.kind == RanksMissing.__name__
        alone = first and late and len(others) == self.nodes - 1
        came = f"has not come to {where} within {seconds(within_s)}" if late else "has left"
        return RanksMissing(
            f"{self.name(others)}: its `tenuto run` {came}" + (f"; node {self.node} is alone there" if alone else ""),
            subject=self.name(others),
            hint=f"start the job again on all {self.nodes} nodes"
            + (", with a --meet that is one directory, which all of them share" if alone else ""),
            ranks=tuple(others),
        )

    def close(self) -> None:
        if self._meeting is not None:
            self._meeting.close()


def nodes_of(
    nodes: str, node_rank: int | None, meet: str, *, first_s: float, patience_s: float, sizes: Sequence[int] = ()
) -> Nodes | None:
    """Returns what `--nodes`, `--node-rank` and `--meet` say; None for one node. Raises UsageError."""
    example = "tenuto run --nodes 4 --node-rank 2 --meet /shared/meet -- torchrun … train.py"
    if not nodes and (node_rank is not None or meet):
        raise UsageError("--node-rank and --meet need --nodes", subject="--nodes", hint=example)
    if not nodes:
        return None
    number = _of_environment(_NODES) if nodes == _AUTO else int(nodes) if nodes.isdecimal() else None
    node = _of_environment(_NODE_RANK) if node_rank is None else node_rank
    if not number:
        what = f"{' and '.join(_NODES)} are not set" if nodes == _AUTO else "a number of nodes is needed"
        raise UsageError(f"--nodes {nodes}: {what}", subject="--nodes", hint=example)
    if number == 1:
        return None
    if node is None or not 0 <= node < number:
        which = "is missing" if node is None else f"{node} makes no sense with {number} nodes"
        raise UsageError(f"--node-rank {which}", subject="--node-rank", hint=example)
    if not meet:
        message = f"{number} nodes need a directory that all of them share"
        raise UsageError(message, subject="--meet", hint=example)
    if patience_s < _LEAST_PATIENCE_S:
        hint = "--patience 30s: a node says once a second that it lives"
        raise UsageError(f"--patience {seconds(patience_s)} is too short", subject="--patience", hint=hint)
    return Nodes(node, number, Path(meet).absolute(), first_s, patience_s, sizes)


def _of_environment(names: Sequence[str]) -> int | None:
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)
