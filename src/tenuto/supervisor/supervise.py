"""The supervisor: starts a command, watches its steps, and starts it again as long as `decide` says so."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Final

from tenuto.concurrency.memory_headroom import memory_kills
from tenuto.concurrency.process_trees import lives
from tenuto.errors import RanksError, TenutoError, UsageError
from tenuto.record import record
from tenuto.supervisor.actions import CAUSES_OF
from tenuto.supervisor.beats_directory import beats_directory
from tenuto.supervisor.chaos import Injector
from tenuto.supervisor.decide import (
    CAUSES,
    KNOWN,
    Decision,
    Ending,
    Kind,
    Limits,
    Pace,
    decide,
    silence_allowed,
    silence_words,
)
from tenuto.supervisor.journal import Journal
from tenuto.supervisor.meeting import Outcome
from tenuto.supervisor.nodes import OTHERS_GRACE_S, Course, Nodes
from tenuto.supervisor.process_tree import ProcessTree, adopt_orphans
from tenuto.supervisor.steps import Steps, of_the_living
from tenuto.supervisor.strategies import Recovery, cause_of, decisive, evidence_of
from tenuto.supervisor.watching import Demand, Watching
from tenuto.telemetry import last_words
from tenuto.telemetry.heartbeat import (
    ENDED,
    ENDING,
    STARTING,
    TRAINING,
    VARIABLE,
    Beat,
    newest,
    read_beats,
    read_emergency,
    read_run,
)
from tenuto.telemetry.last_words import LastWords
from tenuto.units import count, seconds

POLL_S: Final = 0.1
WATCH_S: Final = 0.5
"""How often beats are read."""
PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LEAVING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})
"""Signals after which the training is expected to end."""
HUNG_GRACE_S: Final = 10.0
"""For what hangs, or was left behind: most that can still leave do so at once."""
STATUS_HUNG: Final = 124
"""The status of one that was ended because it hung, and left with status 0."""
STATUS_UNFINISHED: Final = 1
"""The status of one that has not finished, where its command says 0, or does not end by itself."""
START_S: Final = 2 * 3600.0
"""A start that has not come to its first step by then hangs: what is restored is read by then."""
END_S: Final = 3600.0
"""An end that is still saving then hangs: a Checkpointer itself waits for minutes at most."""
STACKS_S: Final = 10.0


@record
class Watch:
    """What is watched for. hang_s: how long no step is too long; None: learnt from its own steps, at least `least_s`
    and `unknown_s` before its first ones; 0: never. grace_s: to leave in, when it is asked to. deadline_s: after which
    it is asked to, None without. start_s: from its start to its first step; None: START_S, of what has a Checkpointer.
    end_s: from its last step to its end; None: END_S, of what is being saved, and without a limit for what follows."""

    hang_s: float | None = None
    least_s: float = 60.0
    unknown_s: float = 1800.0
    grace_s: float = 60.0
    deadline_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None


@record
class Account:
    """What became of a supervised training. `status`: its own, as a shell has it. `lost_s`: from each death to the
    first step that was new again, or to the end."""

    status: int
    reason: str
    endings: tuple[Ending, ...]
    lost_s: float
    elapsed_s: float
    step: int | None
    journal: str | None
    sampling_cpu_s: float = 0.0
    """Processor time that sampling the machine has taken."""

    @property
    def restarts(self) -> int:
        return len(self.endings) - 1


@record
class TrainingEnd:
    """What the trainings of a start have said of its end. words: those that say most of a failure. hidden: whether they
    are other processes than the command, whose status may be that of a shell, of `tee` or of a launcher. left: the
    signal on which all have left, 0 where not all have. broken_off: the last step of one that was gone in training."""

    words: LastWords | None = None
    hidden: bool = False
    left: int = 0
    broken_off: int | None = None

    @classmethod
    def of(cls, beats: Path, command: int) -> TrainingEnd:
        said, last = last_words.read(beats), newest(read_beats(beats)).values()
        words = decisive([one for one in said if not one.left])
        leaving = {one.pid: one.left for one in said if one.left}
        newest_of_all = max(last, key=lambda one: one.at_s, default=None)
        left = words is None and bool(leaving) and all(one.pid in leaving or one.phase == ENDED for one in last)
        return cls(
            words,
            bool(last) and command not in {one.pid for one in last},
            next(iter(leaving.values())) if left else 0,
            newest_of_all.step if newest_of_all is not None and newest_of_all.phase == TRAINING else None,
        )


@dataclass
class Supervisor:
    """Runs one command to its end. `report` gets each line for people."""

    command: Sequence[str]
    limits: Limits
    watch: Watch
    journal: Journal
    report: Callable[[str], None]
    at_end: Callable[[Sequence[str], Sequence[str]], str | None] = lambda places, emergency: None
    """Called when the training has failed for good, with the places of the runs that it trained, and the URLs of their
    emergency places; returns what was saved of it, in words."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    recovery: Recovery = field(default_factory=Recovery)
    injector: Injector | None = None
    nodes: Nodes | None = None
    """The supervisors of the job's other nodes; None without any."""
    watching: Watching | None = None
    """What watches the machine; None: nothing but the training's steps."""
    quiet_stdout: bool = False
    """Whether the command's stdout goes to stderr."""
    _asked: list[int] = field(default_factory=list)
    _demand: Demand | None = None
    """What it was ended or asked to leave for, of what was found on the machine."""
    _to_pass_on: deque[int] = field(default_factory=deque)
    _trained: dict[tuple[str, str], None] = field(default_factory=dict)
    """Places and runs that it trains, in order."""
    _emergency: dict[str, None] = field(default_factory=dict)
    """Emergency places of what it trains, in order."""
    _course: Course = field(init=False)
    _ended_by: str = ""
    """Why another node ends this start; `_ended_by_s`: since when that is known."""
    _ended_by_s: float = 0.0
    _asked_by: str = ""
    """Which other node has asked it to leave, and why."""
    _ended: LastWords | None = None
    """What one of its processes has said of its end, which has not ended for a long time since then."""
    _died_s: float | None = None
    _lost_s: float = 0.0
    _of: int = 0
    """What was trained last, as its beats name it."""
    _learnt: dict[int, Pace] = field(default_factory=dict)
    """What steps took in earlier starts, by what is trained."""

    def __post_init__(self) -> None:
        self._course = Course(self.recovery)

    def run(self) -> Account:
        if threaded():
            raise UsageError("a supervisor has a process of its own, with one thread", subject="tenuto run")
        began_s = time.monotonic()
        adopt_orphans()
        endings = self._course.endings
        self.journal.write("supervising", command=list(self.command), pid=os.getpid())
        with self._passing_signals_on():
            own: Ending | None = None
            while True:
                decision, how = self._what_follows(own)
                if not decision.restart:
                    reason = decision.reason
                    break
                if decision.reason:
                    self._report_restart(decision, how)
                    if self._asked_within(decision.after_s):
                        reason = f"{self._why_asked()} came while it was down ({decision.reason})"
                        break
                own = self._one_start(began_s, len(endings) + 1)
        if self._died_s is not None and endings[-1].failed:
            self._lost_s += time.monotonic() - self._died_s
        saved = None if endings[-1].kind == "finished" else self._save_what_is_left()
        status = endings[-1].status
        step = self._course.reached.get(self._of) or None
        self.journal.write(
            "ended", status=status, reason=reason, lost_s=round(self._lost_s, 3), step=step, saved=saved,
            failed=endings[-1].failed,
        )  # fmt: skip
        path = None if self.journal.path is None else str(self.journal.path)
        cpu_s = 0.0 if self.watching is None else self.watching.close()
        return Account(status, reason, tuple(endings), self._lost_s, time.monotonic() - began_s, step, path, cpu_s)

    def _report_restart(self, decision: Decision, how: str) -> None:
        number = len(self._course.endings)
        wait = f" in {seconds(decision.after_s)}" if decision.after_s else ""
        more = f" {how}" if how else ""
        self.report(f"{decision.reason}: started again{more}{wait} (restart {number})")
        self.journal.write("restarting", reason=decision.reason, how=how, after_s=decision.after_s, restart=number)

    def _what_follows(self, own: Ending | None) -> tuple[Decision, str]:
        """Returns what follows the end of a start, and in words what was done for the next one. own: how it has ended
        here; None before the first."""
        if self.nodes is not None:
            return self._what_follows_for_all(self.nodes, own)
        if own is None:
            return Decision(True, ""), ""
        self._course.endings.append(own)
        return self._decided()

    def _decided(self) -> tuple[Decision, str]:
        """Decides after the last ending of the course, and does what the next start needs."""
        endings = self._course.endings
        decision = decide(endings, self.limits)
        if not decision.restart:
            return decision, ""
        if self._asked:
            return Decision(False, f"{self._why_asked()} came, and it ended by {endings[-1].evidence}"), ""
        return decision, self.recovery.prepare(endings, self.report)

    def _save_what_is_left(self) -> str | None:
        try:
            saved = self.at_end(list(dict.fromkeys(where for where, _ in self._trained)), list(self._emergency))
        except TenutoError as error:
            self.report(f"what lies in memory could not be saved: {error}")
            return None
        if saved is not None:
            self.report(saved)
        return saved

    # -- one start -----------------------------------------------------------------------------------------------------

    def _one_start(self, began_s: float, number: int) -> Ending:
        with beats_directory(self.report) as beats:
            kills = memory_kills()
            self._demand = self._ended = None
            started_s = time.monotonic()
            out = sys.stderr if self.quiet_stdout else None
            environment = {**self.environment, VARIABLE: str(beats), **self.recovery.next.variables()}
            tree = ProcessTree(self.recovery.command(self.command), environment, out)
            try:
                self.journal.write("started", start=number, pid=tree.pid)
                steps = Steps()
                hung = self._watched(tree, beats, steps, began_s, number)
                status = tree.wait(0)
                if hung is None and status is None:
                    raise AssertionError("it is neither hung nor has it ended")
                self._take(steps, beats, list(read_beats(beats)), time.monotonic(), number)
            except BaseException:  # whatever the fault is: nobody would watch it any more
                tree.end(self.watch.grace_s, _pids(beats))
                raise
            # What was asked to leave has had its time. What hangs leaves at once, if it can.
            most_s = OTHERS_GRACE_S if self._ended_by else HUNG_GRACE_S
            out_of_time = bool(self._asked) and hung is not None
            tree.end(0.0 if out_of_time else min(self.watch.grace_s, most_s), _pids(beats))
            code = tree.wait(0)
            if hung is not None and not code:
                code = STATUS_HUNG
            ended_s = time.monotonic()
            end = TrainingEnd.of(beats, tree.pid)
        if code is None or (out_of_time and end.hidden):  # a shell may have ended long before what was killed
            code = -signal.SIGKILL
        kind, evidence = self._kind(code, hung, memory_kills() > kills, end, steps.ranks)
        if kind == "asked to leave" and end.left and (end.hidden or self._ended):
            code = 128 + end.left
        elif kind in CAUSES and (self._ended or not code):
            code = STATUS_UNFINISHED
        new = self._note_reached(steps, None if kind != "unhealthy" or end.words is None else end.words.step - 1)
        shell = _shell_status(code)
        if self.watching is not None:
            self.watching.ended(kind)
        ending = Ending(kind, shell, started_s, ended_s, steps.newest, new, evidence, end.words)
        if ending.failed and self._died_s is None:
            self._died_s = ended_s
        self.journal.write(
            "died" if ending.failed else "left",
            start=number, kind=kind, status=shell, evidence=evidence, step=steps.newest, new=new,
            ran_s=round(ended_s - started_s, 3),
        )  # fmt: skip
        return ending

    def _note_reached(self, steps: Steps, healthy: int | None) -> bool:
        """Notes how far a start came, and what its steps took; returns whether it came further in any run than all
        before it. healthy: its last healthy step, where values went wrong then: those after it are no progress."""
        new = False
        for run, step in steps.reached.items():
            came_to = step if healthy is None or run != steps.of else min(step, healthy)
            new |= came_to > self._course.reached.get(run, 0)
            self._course.reached[run] = max(self._course.reached.get(run, 0), came_to)
        if steps.of:
            self._of = steps.of
        before, pace = self._learnt.get(steps.of, Pace()), steps.pace
        if pace.known >= KNOWN:
            self._learnt[steps.of] = replace(pace, first_s=max(pace.first_s, before.first_s))
        return new

    def _watched(self, tree: ProcessTree, beats: Path, steps: Steps, began_s: float, number: int) -> str | None:
        """Watches until the command ends (None), or is to be ended: the evidence."""
        looked_s = time.monotonic()
        left_s: float | None = None
        grace_s = 0.0
        while self._lasts(tree, beats):
            now_s = time.monotonic()
            while self._to_pass_on:
                tree.signal(self._to_pass_on.popleft(), _pids(beats))
            if self.nodes is not None and (evidence := self._follow(self.nodes.outcome_elsewhere())) is not None:
                return evidence
            if self._asked and left_s is None:
                left_s, grace_s = now_s + self._grace_s(), self._grace_s()
                if self.nodes is not None:
                    self.nodes.leave(self._why_asked())
            if left_s is not None:
                tree.ask_the_rest()
                if now_s > left_s:
                    return f"it was asked to leave and had not within {seconds(grace_s)}"
            deadline_s = self.watch.deadline_s
            if deadline_s is not None and now_s - began_s > deadline_s and not self._asked:
                self.report(f"the deadline of {seconds(deadline_s)} has come: it is asked to leave")
                self._ask(signal.SIGTERM)
            if self.injector is not None:
                self._strike(tree, beats, now_s - began_s)
            if now_s - looked_s < WATCH_S:
                continue
            looked_s = now_s
            tree.reap()
            living = of_the_living(read_beats(beats))
            self._take(steps, beats, living, now_s, number)
            if (evidence := self._met_demand(beats, living, now_s)) is not None:
                return evidence
            if left_s is None and (evidence := self._not_ended(beats, living, now_s)) is not None:
                return evidence
            if left_s is None and (evidence := self._hung(steps, now_s)) is not None:
                self._note_stacks(tree, evidence)
                return evidence
        return None

    def _lasts(self, tree: ProcessTree, beats: Path) -> bool:
        """Returns whether the start goes on: as long as its command, and as its trainings where that is done, or was
        ended by whoever asks all to leave."""
        status = tree.wait(POLL_S)
        if status is None:
            return True
        if (status and not self._asked) or not tree.has({one.pid for one in read_beats(beats) if one.phase != ENDED}):
            return False
        time.sleep(POLL_S)
        return True

    def _not_ended(self, beats: Path, living: Sequence[Beat], now_s: float) -> str | None:
        """Returns why the command is to be ended, where one of its processes has said that it ends, and does not: a
        thread that it has left, or a hook, keeps it. What still saves has its time."""
        for words in last_words.read(beats):
            beat = next((one for one in living if one.pid == words.pid and lives(one.pid)), None)
            if not (words.uncaught or words.left) or beat is None or beat.phase == ENDING:
                continue
            if now_s - max(words.at_s, beat.at_s) > self.watch.grace_s:
                self._ended = words
                why = f"its process has not ended within {seconds(self.watch.grace_s)}"
                self.report(f"{words.message}, and {why}: it is ended")
                return why
        return None

    def _met_demand(self, beats: Path, living: Sequence[Beat], now_s: float) -> str | None:
        """Does what is found on the machine asks for; returns why the command is to be ended, if it is."""
        leaving = bool(self._asked)
        demand = None if self.watching is None else self.watching.observe(beats, living, now_s, leaving=leaving)
        if demand is None or self._asked:  # perhaps only now
            return None
        self._demand = demand
        if demand.action == "restart":
            return demand.finding.evidence
        if demand.at_once:
            self._asked.append(signal.SIGTERM)
            self.report("that is too soon for a step and a save: what is sealed in memory is saved instead")
            return demand.words
        self._ask(signal.SIGTERM)
        return None

    def _grace_s(self) -> float:
        """How long it has to leave: what a notice gives it, else what it is given in any case."""
        given_s = None if self._demand is None else self._demand.grace_s
        return self.watch.grace_s if given_s is None else given_s

    def _strike(self, tree: ProcessTree, beats: Path, since_s: float) -> None:
        assert self.injector is not None
        if not self.injector.due(since_s):
            return
        training = [beat for beat in read_beats(beats) if beat.phase == TRAINING]
        struck = self.injector.strike(tree, beats, training)
        if struck is not None:
            self.journal.write("injected", **struck)

    def _take(self, steps: Steps, beats: Path, latest: Sequence[Beat], now_s: float, number: int) -> None:
        """Takes what ranks last did, and notes what is new: what is trained, where it resumed, how far it came."""
        began = steps.began
        steps.take(latest, now_s)
        trained = read_run(beats)
        if trained is not None and trained not in self._trained:
            self._trained[trained] = None
            self.journal.write("training", where=trained[0], run=trained[1])
        self._emergency |= dict.fromkeys(read_emergency(beats))
        if began is None and steps.began is not None and number > 1:
            self.journal.write("resumed", start=number, step=steps.began)
        self._note_progress(steps)

    def _note_progress(self, steps: Steps) -> None:
        """Counts the time since the last death as lost once there is a step that nobody had come to before."""
        before = self._course.reached.get(steps.of, 0)
        if self._died_s is not None and steps.newest is not None and steps.newest > before:
            lost_s = time.monotonic() - self._died_s
            self._lost_s, self._died_s = self._lost_s + lost_s, None
            self.journal.write("recovered", step=steps.newest, lost_s=round(lost_s, 3))

    def _hung(self, steps: Steps, now_s: float) -> str | None:
        watch, off = self.watch, self.watch.hang_s == 0
        start_s = watch.start_s if watch.start_s is not None else START_S if steps.ranks and not off else 0.0
        if start_s and not steps.stepped and now_s - steps.started_s > start_s:
            return f"no first step within {seconds(start_s)}"
        if steps.phase in (ENDING, ENDED):
            end_s = watch.end_s if watch.end_s is not None else END_S if steps.phase == ENDING and not off else 0.0
            late = end_s and now_s - steps.trained_s > end_s
            return f"it has not ended within {seconds(end_s)} after step {steps.newest}" if late else None
        if off or steps.newest is None or steps.phase == STARTING:
            return None
        learnt = self._learnt.get(steps.of, Pace())
        times = {"least_s": watch.least_s, "unknown_s": watch.unknown_s}
        allowed_s = watch.hang_s or silence_allowed(steps.pace, learnt, **times)
        silent_s = now_s - steps.last_s
        return silence_words(silent_s, allowed_s, steps.newest) if silent_s > allowed_s else None

    def _note_stacks(self, tree: ProcessTree, evidence: str) -> None:
        """Notes where each process stands, if py-spy is there to say it."""
        self.report(f"it hangs: {evidence}")
        program = shutil.which("py-spy")
        until_s = float("inf") if self.nodes is None else time.monotonic() + STACKS_S  # others wait for this end
        for pid in tree.descendants() if program else ():
            if time.monotonic() >= until_s:
                break
            try:
                done = subprocess.run(
                    [str(program), "dump", "--pid", str(pid)],
                    capture_output=True,
                    text=True,
                    timeout=STACKS_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            if not done.returncode:
                self.journal.write("stack", pid=pid, stack=done.stdout.splitlines())

    def _kind(
        self, code: int, hung: str | None, memory: bool, end: TrainingEnd | None = None, ranks: int = 1
    ) -> tuple[Kind, str]:
        end = end or TrainingEnd()
        words = end.words
        if self._ended_by and words is not None and words.at_s < self._ended_by_s:
            return cause_of(words), evidence_of(words, ranks)  # it was ending by itself
        if self._ended_by:
            return "another node", self._ended_by
        if hung is not None and not self._asked and self._ended is None:
            return "hung" if self._demand is None else CAUSES_OF.get(self._demand.finding.name, "hung"), hung
        if words is not None and words.unhealthy and not self._asked:
            return "unhealthy", words.message
        if self._ended is not None and self._ended.uncaught:
            words = words or self._ended
            return cause_of(words), f"{evidence_of(words, ranks)}, whose process did not end"
        if end.hidden and not code and words is not None and words.uncaught:
            return cause_of(words), evidence_of(words, ranks)
        if end.left and (end.hidden or self._ended):
            return "asked to leave", self._why_asked(end.left)
        if end.hidden and not code and end.broken_off is not None and not self._asked:
            return "killed", f"its process was gone after step {end.broken_off}, though the command's status is 0"
        if code == 0:
            return ("asked to leave", self._why_asked()) if self._asked else ("finished", "status 0")
        number = -code if code < 0 else code - 128
        if number in LEAVING and (self._asked or code > 0):
            return "asked to leave", self._why_asked(number)
        if memory:  # a launcher whose worker was killed ends by itself
            return "out of memory", "the kernel killed a process for want of memory"
        if code < 0 or (number == signal.SIGKILL and code > 128):
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return "killed", name
        if words is not None:
            return cause_of(words), evidence_of(words, ranks)
        return "failed", f"status {code}"

    # -- other nodes ---------------------------------------------------------------------------------------------------

    def _what_follows_for_all(self, nodes: Nodes, own: Ending | None) -> tuple[Decision, str]:
        """As `_what_follows`, agreed with the other nodes. Raises RanksError where they never meet."""
        asked = lambda: self._why_asked() if self._asked else ""  # noqa: E731
        endings, number = self._course.endings, len(self._course.endings)
        outcome = None if own is None else nodes.settle(own, asked)
        if outcome is not None and outcome.what == "leave":
            self._follow(outcome)
        if own is not None and own.kind == "finished" and outcome is not None and outcome.what in ("ended", "lost"):
            own = replace(own, kind="another node", evidence=nodes.words(outcome))
        try:
            over = self._asked or (outcome is not None and outcome.what == "finished")
            met = None if over else nodes.meet(own, self._course, self._decided, asked)
        except RanksError as error:
            if own is None:
                facts = {"status": error.exit_code, "lost_s": 0.0, "step": None, "saved": None, "failed": True}
                self.journal.write("ended", reason=error.message, **facts)
                raise
            endings[number:] = [replace(own, status=error.exit_code)]
            return Decision(False, f"{own.evidence}; {error.message}; {error.hint}"), ""
        if met is not None:
            self._ended_by = ""
            return met
        if own is None:
            why, now_s = self._why_asked(), time.monotonic()
            own = Ending("asked to leave", 128 + self._asked[0], now_s, now_s, evidence=why)
        endings[number:] = [own]  # the first node may have decided already
        return self._decided()

    def _follow(self, outcome: Outcome | None) -> str | None:
        """Does what another node asks for, if one does; returns why the command is to be ended."""
        if self.nodes is None or outcome is None or self._asked:
            return None
        words = self.nodes.words(outcome)
        if outcome.what == "leave":
            self.report(f"{words}: the training here is asked to leave too")
            self._asked_by = words
            self._ask(signal.SIGTERM)
            return None
        if not self._ended_by:
            self._ended_by_s = time.monotonic()
            self.report(f"{words}: the training here is ended too")
        self._ended_by = words
        return words

    # -- signals -------------------------------------------------------------------------------------------------------

    def _ask(self, number: int) -> None:
        """Has a signal passed on, to a command that is just being started too."""
        if number in LEAVING:
            self._asked.append(number)
        self._to_pass_on.append(number)

    def _why_asked(self, number: int | None = None) -> str:
        """Returns what has asked it to leave: a finding, or a signal. `number`: the signal, where none came here."""
        if self._asked_by:
            return self._asked_by
        if self._demand is not None and self._demand.action == "leave":
            return self._demand.words
        return signal.Signals(self._asked[0] if self._asked or number is None else number).name

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self._ask(number)

        passed_on = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]  # as under nohup
        before = {number: signal.signal(number, handle) for number in passed_on}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked_within(self, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while not self._asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))
            if self.nodes is not None and self._follow(self.nodes.outcome_elsewhere()) is not None:
                break
        if self._asked and self.nodes is not None:
            self.nodes.leave(self._why_asked())
        return bool(self._asked)


def summary(account: Account) -> str:
    """Returns the account in a line."""
    kinds = Counter(one.kind for one in account.endings[:-1])
    parts = [f"{account.reason}; status {account.status}"]
    if account.step is not None:
        parts.append(f"step {account.step}")
    if account.restarts:
        what = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
        parts.append(f"{count(account.restarts, 'restart')} ({what})")
        if account.step is not None:
            parts.append(f"{seconds(account.lost_s)} until it was as far again")
    return "; ".join(parts)


def _pids(beats: Path) -> set[int]:
    """Returns the processes that train."""
    return {one.pid for one in read_beats(beats)}


def threaded() -> bool:
    import threading

    return threading.active_count() > 1 or threading.current_thread() is not threading.main_thread()


def _shell_status(code: int | None) -> int:
    return 137 if code is None else 128 - code if code < 0 else code
