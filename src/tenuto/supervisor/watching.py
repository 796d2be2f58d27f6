"""Watches the machine beside a training: samples go to detectors, to a recording and to a predictor; what they find is
noted, said, and acted upon."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal

from tenuto.record import record
from tenuto.supervisor.actions import TABLE, Action
from tenuto.supervisor.detectors.contract import END, STEPS, Detector, Finding, Name, Predictor, Sample
from tenuto.supervisor.detectors.disk import directory_of
from tenuto.supervisor.detectors.sampling import SamplingProcess
from tenuto.supervisor.journal import Journal
from tenuto.telemetry.heartbeat import TRAINING, Beat, newest, read_places, request_save

STEPS_S: Final = 5.0
"""How often a sample of the training's steps is taken."""
QUIET_S: Final = 600.0
"""What has not been found for so long is another episode when it is found again."""
AGAIN_S: Final = 600.0
"""As long as a finding holds, a save is asked for so often."""
SETTLE_S: Final = 15.0
"""So long after a training was started again nothing ends it: what was read by then may be what its end came from."""
RESERVE_S: Final = 2.0
"""What the end of processes takes of a notice's time."""
_ACTED: Final[Mapping[Action, str]] = {
    "warn": "", "save": ": the training is asked for a save", "leave": ": it is asked to leave",
    "restart": ": it is ended",
}  # fmt: skip


class Recorder:
    """Appends samples to a file, as `Sample.line` has them, on a line of their own. A file that cannot be written stops
    nothing: it is said once."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        """Raises OSError where the file cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] | None = open(path, "a")  # noqa: SIM115 - as long as the supervisor runs
        if _ends_in_a_line(path):
            self._file.write("\n")
        self._report = report

    def write(self, samples: Iterable[Sample]) -> None:
        lines = "".join(f"{sample.line()}\n" for sample in samples)
        if self._file is None or not lines:
            return
        try:
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            self._report(f"samples are not recorded any more: {error}")
            self._file = None


def _ends_in_a_line(path: Path) -> bool:
    """Returns whether a file's last line has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Paces:
    """What the beats of one start say of its steps and saves, as a sample every few seconds."""

    def __init__(self) -> None:
        self.sealed = False
        """Whether all ranks of the job run here, and have a state in memory that outlives them: one whose parts lie on
        several nodes cannot be written from memory."""
        self.to_save_s = 0.0
        """About how long it takes from now until a step is done and saved; 0 before both are known."""
        self._before: Mapping[int, Beat] = {}
        self._sampled_s: float | None = None

    def sample(self, beats: Mapping[int, Beat], now_s: float) -> Sample | None:
        """Returns a sample where one is due. beats: the newest one of each rank."""
        if not beats or (self._sampled_s is not None and now_s - self._sampled_s < STEPS_S):
            return None
        self._sampled_s = now_s
        before, self._before = self._before, beats
        saves = min(beat.saves for beat in beats.values())
        values: dict[str, float] = {"ranks": len(beats), "step": min(beat.step for beat in beats.values())}
        values["saves"] = saves
        if saves:
            values["save_s"] = max(beat.save_s for beat in beats.values())
            values["save_bytes"] = sum(beat.save_bytes for beat in beats.values())
        paces = {rank: pace for rank, beat in beats.items() if (pace := _pace(before.get(rank), beat)) is not None}
        values |= {f"{rank}.step_s": pace for rank, pace in paces.items()}
        if paces:
            values["step_s"] = max(paces.values())
        self.sealed = all(beat.sealed == len(beats) for beat in beats.values())
        if saves:
            self.to_save_s = values.get("step_s", 0.0) + values["save_s"]
        return Sample(time.time(), STEPS, values)


def _pace(before: Beat | None, beat: Beat) -> float | None:
    """Returns how many seconds a step has taken between two beats of a rank; None without a step."""
    if before is None or before.pid != beat.pid or beat.step <= before.step:
        return None
    if before.phase != TRAINING or beat.phase != TRAINING:
        return None
    return (beat.at_s - before.at_s) / (beat.step - before.step)


@record
class Demand:
    """What the supervisor has to do because of a finding. at_once: the time that is left does not suffice for a step
    and a save, and what is sealed in memory can be written instead, once the processes have ended."""

    action: Literal["leave", "restart"]
    finding: Finding
    at_once: bool = False

    @property
    def grace_s(self) -> float | None:
        """How long the training has to leave in; None where nobody sets a limit."""
        return None if self.finding.grace_s is None else max(self.finding.grace_s - RESERVE_S, 1.0)

    @property
    def words(self) -> str:
        return f"{self.finding.name}: {self.finding.evidence}"


@dataclass
class Watching:
    """`sampling`: None to judge nothing but steps. `predictor`: hears of every sample, and may find `risk`."""

    watched: Sequence[Detector]
    journal: Journal
    report: Callable[[str], None]
    actions: Mapping[Name, Action] = field(default_factory=lambda: TABLE)
    sampling: SamplingProcess | None = None
    recorder: Recorder | None = None
    predictor: Predictor | None = None
    _paces: Paces = field(default_factory=Paces)
    _episodes: dict[tuple[Name, str], tuple[float, float]] = field(default_factory=dict)
    """When each finding was found and acted upon last."""
    _has_ended: bool = False
    """Whether a start has ended, and the next one was not looked at yet."""
    _leaving: bool = False
    _settled_s: float = 0.0
    """From when on a finding may end this start."""
    _step: int = 0
    """The step that the training has come to."""
    _asked_at: int | None = None
    """The step at which a risk asked for a save last: training that has made none since is not asked again."""

    def observe(self, directory: Path, beats: Sequence[Beat], now_s: float, *, leaving: bool = False) -> Demand | None:
        """Takes what is new, and acts upon it. Returns what is left to the supervisor.

        directory: of the heartbeats. beats: of the processes that live. now_s: by the monotonic clock. leaving: whether
        the training was asked to leave already: no finding asks more of it.
        """
        self._leaving = leaving
        if self._has_ended:
            self._has_ended, self._settled_s = False, now_s + SETTLE_S
        samples = [] if self.sampling is None else self.sampling.take()
        if self.sampling is not None:
            self.sampling.watch([place for url in read_places(directory) if (place := directory_of(url)) is not None])
        latest = newest(beats)
        self._step = min((beat.step for beat in latest.values()), default=self._step)
        steps = self._paces.sample(latest, now_s)
        found = self._findings(samples if steps is None else [*samples, steps])
        demands = [
            self._demand(action, one) for one in found if (action := self._acted(one, directory, now_s)) is not None
        ]
        return min(demands, key=lambda demand: demand.action != "leave", default=None)

    def ended(self, kind: str) -> None:
        """Notes that a start of the training has ended. What was found of it after its last look is passed over."""
        samples = [] if self.sampling is None else self.sampling.take()
        self._findings([*samples, Sample(time.time(), END, kind=kind)])
        self._paces = Paces()
        self._has_ended = True

    def close(self) -> float:
        """Ends sampling, and returns the processor time that it has taken, in seconds."""
        if self.sampling is None:
            return 0.0
        self.sampling.close()
        return self.sampling.cpu_s

    def _findings(self, samples: Sequence[Sample]) -> list[Finding]:
        if self.recorder is not None:
            self.recorder.write(samples)
        found = [one for sample in samples for detector in self.watched for one in detector.judge(sample)]
        risk = None if self.predictor is None else self.predictor.observe(samples, time.time())
        return found if risk is None else [*found, risk]

    def _acted(self, finding: Finding, directory: Path, now_s: float) -> Literal["leave", "restart"] | None:
        """Acts once an episode; on a risk, whose predictor says how often, again once training has made a step since.
        Returns what the supervisor has to do."""
        key, action = (finding.name, finding.subject), self.actions[finding.name]
        found_s, acted_s = self._episodes.get(key, (-QUIET_S, -AGAIN_S))
        first = now_s - found_s >= QUIET_S
        due = first or (action == "save" and now_s - acted_s >= AGAIN_S)
        if finding.name == "risk" and not due:
            due = self._asked_at is not None and self._step != self._asked_at
        self._episodes[key] = now_s, now_s if due else acted_s
        if not due:
            return None
        if finding.name == "risk":
            self._asked_at = self._step
        if (self._leaving and action != "note") or (action == "restart" and now_s < self._settled_s):
            action = "warn"
        self.journal.write(
            "finding", finding=finding.name, subject=finding.subject, evidence=finding.evidence, action=action,
            severity="routine" if action == "note" else "severe",
        )  # fmt: skip
        if action == "note":
            return None
        if first or finding.name != "risk":  # the line of a risk that lasts has been said
            self.report(f"{finding.name}: {finding.evidence}{_ACTED[action]}")
        if action == "save":
            request_save(directory, f"{finding.name}: {finding.evidence}")
        return action if action in ("leave", "restart") else None

    def _demand(self, action: Literal["leave", "restart"], finding: Finding) -> Demand:
        demand = Demand(action, finding)
        grace_s = demand.grace_s
        at_once = grace_s is not None and self._paces.sealed and self._paces.to_save_s > grace_s
        return Demand(action, finding, at_once)
