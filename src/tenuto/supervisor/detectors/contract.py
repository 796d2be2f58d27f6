"""The contract of detectors: samples are what was read, findings are what is made of them.

A detector has two halves that share nothing but samples. `sample` reads, in the sampling process, at the detector's own
period; it may take long or never return, and holds up nobody. `judge` runs in the supervisor: it takes samples in their
order, keeps what it needs of earlier ones, and does no I/O and asks no clock, so that a recording judged again gives
the same findings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Final, Literal, Protocol, get_args

from tenuto.record import record

Name = Literal[
    "memory", "gpu-memory",
    "disk-filling", "disk-failing", "disk-slow",
    "gpu-lost", "gpu-xid", "gpu-ecc", "gpu-error", "gpu-hot", "gpu-throttled",
    "network", "clock", "preemption", "preemption-risk", "straggler", "slow-steps", "risk",
]  # fmt: skip
"""What may be found. `docs/guides/leave-it-running.md` says what each means, `actions.TABLE` what is done about it."""
FINDINGS: Final[tuple[Name, ...]] = get_args(Name)

END: Final = "end"
"""The source of the samples that say that a start of the training has ended, and how (`Sample.kind`)."""
STEPS: Final = "steps"
"""The source of the samples that the supervisor takes itself, of the beats of the training's ranks: `step` (completed
by the slowest rank), `ranks`, `step_s` (seconds a step, since the sample before), `RANK.step_s` for each rank, `saves`,
`save_s` and `save_bytes` (of the last save). Values that are not known yet are left out."""


@record
class Sample:
    """What was read at one time from one source.

    at: seconds since 1970. source: a detector's name, STEPS or END. values: by name, finite; those of one of several
    things are named `THING.VALUE` (`0.temperature`, `eth0.rx_errors`). kind: of an END sample, how it ended.
    """

    at: float
    source: str
    values: Mapping[str, float] = field(default_factory=dict)
    kind: str | None = None

    def line(self) -> str:
        """Returns it as a line of a recording: one JSON object, without the line's end."""
        found: dict[str, Any] = {"at": round(self.at, 3), "source": self.source, "values": dict(self.values)}
        if self.kind is not None:
            found["kind"] = self.kind
        return json.dumps(found)

    @classmethod
    def read(cls, line: str) -> Sample:
        """Returns the sample that a line of a recording holds. Raises ValueError for anything else."""
        found = json.loads(line)
        if not isinstance(found, dict) or not isinstance(found.get("values"), dict):
            raise ValueError(f"not a sample: {line[:80]!r}")
        values = {str(name): float(value) for name, value in found["values"].items()}
        kind = found.get("kind")
        try:
            at, source = float(found["at"]), found["source"]
        except (KeyError, TypeError):
            raise ValueError(f"not a sample: {line[:80]!r}") from None
        if not isinstance(source, str) or not all(map(math.isfinite, (at, *values.values()))):
            raise ValueError(f"not a sample: {line[:80]!r}")
        return cls(at, source, values, None if kind is None else str(kind))

    def by_thing(self) -> dict[str, dict[str, float]]:
        """Returns the values of each of several things: those named `THING.VALUE`, by thing and name."""
        found: dict[str, dict[str, float]] = {}
        for name, value in self.values.items():
            thing, divided, what = name.rpartition(".")
            if divided:
                found.setdefault(thing, {})[what] = value
        return found


@record
class Finding:
    """What holds at the time of a sample.

    evidence: in words that follow the name, with the figures. subject: which disk, device, interface or rank, where
    there are several. grace_s: how long until it strikes; None where that is not known.
    """

    name: Name
    evidence: str
    subject: str = ""
    grace_s: float | None = None


class Detector(Protocol):
    """Watches one thing. See the module for where its two halves run."""

    @property
    def source(self) -> str:
        """The source of its samples."""

    @property
    def period_s(self) -> float:
        """How long it waits between two readings."""

    def sample(self) -> Mapping[str, float] | None:
        """Reads once. Returns None where there is nothing to read on this machine, after which it is not asked
        again. Values that cannot be read are left out."""

    def judge(self, sample: Sample) -> Sequence[Finding]:
        """Returns what holds as of this sample: again with each sample as long as it holds. Samples of all sources
        come here, in the order of their times; those that say nothing to it are passed over."""


class Predictor(Protocol):
    """Foresees the end of a training by all samples together."""

    def observe(self, samples: Iterable[Sample], now: float) -> Finding | None:
        """Takes what is new since the last call, twice a second, and returns the finding `risk` each time that it is to
        be acted upon: it alone says how often.

        samples: of all sources, END too, oldest first; often none. now: seconds since 1970. It runs in the supervisor:
        it does no I/O, and takes well under a millisecond on the average.
        """
