"""Runs a training script under an order: keeps its output, follows its steps, leaves nothing of it behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import psutil  # type: ignore[import-untyped]

from tenuto.certify.probe import CertifyOrder, order_of
from tenuto.certify.proof import CertifiedScript
from tenuto.certify.verdict import ExactnessVerdict, Row, Trail, Trails, differs, judge, not_seen, worst
from tenuto.concurrency.process_trees import below, end
from tenuto.engine.staging.arena import free_shared_memory
from tenuto.errors import DeadlineExceeded, ScriptFailed
from tenuto.model.canonical_json import untag_number
from tenuto.record import record
from tenuto.sharding.holdings import rank_names


class JsonTail:
    """Reads complete lines of JSON from a file that another process is still writing.

    Ignores a last line without its end: the writer may be in the middle of it, or was killed there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        """Returns the lines added since the last call; none while the file does not exist."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


class TrailFollower:
    """Reads the records of one rank's trail. `ranks`: the number of ranks it reported; 0 until then."""

    def __init__(self, order: CertifyOrder, rank: int) -> None:
        self._lines = JsonTail(order.trail_of(rank))
        self.ranks = 0
        self.refused: dict[str, Any] | None = None
        self.saved: int | None = None
        self.done: dict[str, Any] | None = None
        self.rows: list[Row] = []
        self.metrics: dict[int, dict[str, float]] = {}

    @property
    def step(self) -> int:
        return self.rows[-1].step if self.rows else 0

    def poll_trail(self) -> bool:
        """Reads new records; returns whether there were any."""
        news = self._lines.new()
        for row in news:
            self._add(row)
        return bool(news)

    def trail(self) -> Trail:
        found = self.done or {}
        uncovered, logged = (tuple(found.get(name, ())) for name in ("uncovered", "logged"))
        memory, script = bool(found.get("memory")), found.get("script")
        return Trail(tuple(self.rows), found.get("certificate", {}), uncovered, logged, memory, script)

    def _add(self, record: dict[str, Any]) -> None:
        kind = record.pop("record")
        if kind == "built":
            self.ranks = int(record["ranks"])
        elif kind == "row":
            row = Row.of(record)
            if row.start:
                self.rows = [earlier for earlier in self.rows if not earlier.start]
            self.rows.append(row)
        elif kind == "metrics":
            found = {name: float(untag_number(value)) for name, value in record["metrics"].items()}
            self.metrics.setdefault(int(record["step"]), {}).update(found)
        elif kind == "saved":
            self.saved = int(record["step"])
        elif kind == "done":
            self.done = record
        elif kind == "refused":
            self.refused = record


POLL_S: Final = 0.02
EXIT_S: Final = 30.0
"""How long a script may take to exit after its last step; then it is killed, and nothing is lost."""
TAIL_LINES: Final = 20

ReportStep = Callable[[int], None]
"""Called with the number of completed steps."""


class Process(Protocol):
    """A running process, as `subprocess.Popen` provides it."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


Launch = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""Starts a command as a session leader, with extra environment variables and its output in a file."""


def launch(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Starts the command without terminal and input, so that prompts fail instead of waiting."""
    with log.open("ab") as output:
        try:
            return subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise ScriptFailed(
                f"{command[0]} could not be started: {error.strerror}",
                subject=command[0],
                hint="give the command as in a shell: tenuto certify WHERE -- python train.py",
            ) from error


@dataclass
class Script:
    """One run of the script. Records of its trail are read as they arrive."""

    name: str
    command: Sequence[str]
    order: CertifyOrder
    log: Path
    patience_s: float
    on_step: ReportStep = lambda step: None
    launch: Launch = launch
    purpose: str = "certified"
    """What an error says that it cannot be."""
    status: int | None = None
    seconds: float = 0.0
    _ranks: list[TrailFollower] = field(default_factory=list)
    _below: tuple[psutil.Process, ...] = ()

    def run(self) -> tuple[Trail, ...]:
        """Returns the trail of each rank.

        Raises ScriptFailed with the end of the script's output, and DeadlineExceeded if no step arrives.
        """
        began = time.monotonic()
        self._ranks = [TrailFollower(self.order, 0)]
        process = self.launch(self.command, self.order.environment(), self.log)
        try:
            self._follow(process)
        finally:
            # Also on Ctrl-C, which does not reach it: it has a session of its own.
            end(process, self._below)
        self.status, self.seconds = process.returncode, time.monotonic() - began
        self._check()
        return tuple(one.trail() for one in self._ranks)

    @property
    def metrics(self) -> Mapping[int, Mapping[str, float]]:
        """What rank 0 has logged, by step, where the order asks for that."""
        return self._ranks[0].metrics

    @property
    def saved(self) -> int | None:
        """The step that all ranks have saved."""
        found = {one.saved for one in self._ranks}
        return found.pop() if len(found) == 1 else None

    @property
    def done(self) -> bool:
        """Whether every rank has done its steps."""
        return all(one.done is not None for one in self._ranks)

    @property
    def _exiting(self) -> bool:
        """Whether some rank has done its steps: no rank exits before all have."""
        return any(one.done is not None for one in self._ranks)

    @property
    def _refused(self) -> dict[str, Any] | None:
        return next((one.refused for one in self._ranks if one.refused is not None), None)

    @property
    def _step(self) -> int:
        """The step that all ranks have completed."""
        return min(one.step for one in self._ranks)

    def _poll_trails(self) -> bool:
        """Reads new records of all ranks; returns whether there were any. Rank 0 reports the number of ranks."""
        before = self._step
        news = [one.poll_trail() for one in self._ranks]
        for rank in range(len(self._ranks), self._ranks[0].ranks):
            self._ranks.append(TrailFollower(self.order, rank))
            news.append(self._ranks[-1].poll_trail())
        if self._step > before:
            self.on_step(self._step)
        return any(news)

    def _follow(self, process: Process) -> None:
        """Follows the script until it ends, has saved as ordered, or has done all steps and had time to exit."""
        last_news = time.monotonic()
        while True:
            ended = process.poll() is not None
            news = self._poll_trails()
            if self._exiting and not self._below:
                self._below = below(
                    process.pid
                )  # taken before it exits: afterwards nobody knows whose children they were
            if news:
                last_news = time.monotonic()
            waited = time.monotonic() - last_news
            # The process that launched the other ranks may exit first, without waiting for them.
            to_come = self._exiting and not self.done and waited <= EXIT_S
            if (ended and not to_come) or self.saved is not None or self._refused is not None:
                return
            if self.done and waited > EXIT_S:
                return
            if waited > self.patience_s:
                raise DeadlineExceeded(
                    f"the script ({self.name}) reported nothing for {self.patience_s:g} s, after {self._so_far()}"
                    + self._tail(),
                    subject=self.name,
                    hint="--patience SECONDS waits longer for a step; a script that asks on a terminal cannot be run",
                )
            time.sleep(POLL_S)

    def _check(self) -> None:
        """Raises ScriptFailed unless the script did what was ordered."""
        refused = self._refused
        if refused is not None:
            raise ScriptFailed(
                f"the script cannot be {self.purpose}: {refused['reason']}",
                subject=self.name,
                hint=str(refused["hint"]),
            )
        if self.done and self.order.save_at is not None and self.saved is None:
            raise ScriptFailed(
                f"the script ({self.name}) skips steps: it completed none between {self.order.save_at} and "
                f"{self.order.last}, so there was nothing to resume",
                subject=self.name,
                hint="a larger --more leaves room for a step in between",
            )
        if self.done or self.saved is not None:
            return
        if not self._ranks[0].ranks:
            raise self._failed(
                "without building a Checkpointer",
                "the command must train with tenuto.Checkpointer, in a Python that has this version of Tenuto"
                if self.status == 0
                else "see that the command runs by itself",
            )
        if self.status == 0:
            reached = self._step
            raise self._failed(
                f"after {self._so_far()}, and {self.order.last} were wanted",
                f"let it train longer, or certify fewer: --steps and --more with a sum of at most {reached}"
                if reached > 1
                else "see that it trains with ckpt.steps, ckpt.epochs or ckpt.step_done",
            )
        raise self._failed(f"after {self._so_far()}", "see that the command runs by itself")

    def _failed(self, how: str, hint: str) -> ScriptFailed:
        status = self.status or 0
        ended = f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status}"
        return ScriptFailed(f"the script ({self.name}) {ended} {how}{self._tail()}", subject=self.name, hint=hint)

    def _so_far(self) -> str:
        said = f"{self._step} step{'' if self._step == 1 else 's'}"
        behind = [rank for rank, one in enumerate(self._ranks) if one.step == self._step]
        ahead = len(self._ranks) - len(behind)
        return f"{said} on {rank_names(behind)}, more on the others" if ahead else said

    def _tail(self) -> str:
        lines = self.log.read_text("utf-8", "replace").splitlines()[-TAIL_LINES:]
        return "; its output ends:\n" + "\n".join(f"  | {line}" for line in lines) if lines else "; it printed nothing"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The certification: an uninterrupted run, a killed and a resumed one, and only if they differ one more uninterrupted.

UNINTERRUPTED: Final = "uninterrupted"
INTERRUPTED: Final = "to be killed"
RESUMED: Final = "resumed"
REPEATED: Final = "uninterrupted again"

ReportProgress = Callable[[str, int, int], None]
"""Called with the name of the run, the steps completed and the steps wanted."""


@record
class ScriptRun:
    """One run of the script: the steps that its processes began and ended at."""

    name: str
    began: int
    reached: int
    seconds: float
    killed: bool


@record
class Certification:
    """The result of a certification.

    saved: the step that was resumed from.
    ranks: the number of ranks; everything is compared on all of them.
    certificate: that of rank 0 of the resumed process.
    uncovered: state found outside `state`, on any rank.
    not_seen: what was not tried, or did not occur.
    script: what ran; None where it is no file.
    unlogged: metrics that the script's policies read and the uninterrupted run did not log, with those policies.
    """

    verdict: ExactnessVerdict
    saved: int
    last: int
    ranks: int
    leaves: int
    runs: tuple[ScriptRun, ...]
    certificate: Mapping[str, Any]
    uncovered: tuple[str, ...]
    not_seen: tuple[str, ...]
    script: CertifiedScript | None
    unlogged: Mapping[str, str]
    seconds: float


@dataclass
class Certifier:
    """Certifies `command` in the empty directory `place`, where everything meant for `where` goes."""

    where: str
    command: Sequence[str]
    place: Path
    steps: int
    more: int
    patience_s: float
    on_progress: ReportProgress = lambda what, done, total: None
    launch: Launch = launch

    def run(self) -> Certification:
        """Runs the certification. Raises ScriptFailed or DeadlineExceeded with the end of the script's output."""
        try:
            return self._run()
        finally:
            free_shared_memory()  # images of the killed processes

    def _run(self) -> Certification:
        began = time.monotonic()
        last = self.steps + self.more
        self._runs_done: list[ScriptRun] = []
        self._ranks = 0
        uninterrupted = self._run_script(UNINTERRUPTED, "whole", last)
        interrupted = self._run_script(INTERRUPTED, "resumed", last, save_at=self.steps)
        resumed = self._run_script(RESUMED, "resumed", last)
        trails = [Trails(*runs) for runs in zip(uninterrupted, interrupted, resumed, strict=True)]
        if any(map(differs, trails)):
            repeated = self._run_script(REPEATED, "repeated", last)
            trails = [replace(one, repeated=again) for one, again in zip(trails, repeated, strict=True)]
        return Certification(
            verdict=worst([judge(one) for one in trails]),
            saved=self._saved,
            last=min(one.reached for one in resumed),
            ranks=len(resumed),
            leaves=sum(len(one.rows[-1].entries) for one in resumed if one.rows),
            runs=tuple(self._runs_done),
            certificate=resumed[0].certificate,
            uncovered=tuple(dict.fromkeys(found for one in resumed for found in one.uncovered)),
            not_seen=not_seen(resumed[0], len(resumed)),
            script=None if resumed[0].script is None else CertifiedScript(**resumed[0].script),
            unlogged={
                metric: by
                for metric, by in uninterrupted[0].certificate.get("watches", {}).items()
                if metric not in uninterrupted[0].logged
            },
            seconds=time.monotonic() - began,
        )

    def _run_script(self, name: str, repository: str, last: int, *, save_at: int | None = None) -> tuple[Trail, ...]:
        number = len(self._runs_done) + 1
        order = order_of(
            self.where,
            str(self.place / f"checkpoints-{repository}"),
            str(self.place / f"trail-{number}.jsonl"),
            last=last,
            save_at=save_at,
        )
        script = Script(
            name,
            self.command,
            order,
            self.place / f"output-{number}.txt",
            self.patience_s,
            lambda step: self.on_progress(name, step, last),
            self.launch,
        )
        self.on_progress(name, 0, last)
        trails = script.run()
        self._ranks = self._ranks or len(trails)
        if len(trails) != self._ranks:
            raise ScriptFailed(
                f"the script ({name}) ran as {len(trails)} ranks, and as {self._ranks} before",
                subject=name,
                hint="what is compared step by step are the same ranks: let the command start as many each time",
            )
        if script.saved is not None:
            self._saved = script.saved
        began, reached = (min(one) for one in zip(*((one.began or 0, one.reached) for one in trails), strict=True))
        self._runs_done.append(ScriptRun(name, began, reached, script.seconds, script.saved is not None))
        return trails
