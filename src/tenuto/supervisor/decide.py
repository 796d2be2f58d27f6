"""Whether a training that has ended is started again, when, and why: decided from facts, without I/O or clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Final, Literal

from tenuto.record import record
from tenuto.telemetry.last_words import LastWords
from tenuto.units import count, seconds

Kind = Literal[
    "finished", "asked to leave", "another node",
    "failed", "killed", "hung", "out of memory", "unhealthy", "device", "disk full", "damaged",
]  # fmt: skip
"""How a start ended: with status 0; by a signal that asks to leave, after which a training has saved; stopped here,
because another node's has ended; with another status; by a signal; stopped here, because it made no step; for want of
memory of the host or of a device; because values or loss went wrong; by an error of a device; on a full disk; or
because no checkpoint can be restored."""
CAUSES: Final[tuple[Kind, ...]] = (
    "failed", "killed", "hung", "out of memory", "unhealthy", "device", "disk full", "damaged",
)  # fmt: skip
"""Those that nobody has asked for."""

LASTING_S: Final = 60.0
"""A start of a program that reports no steps counts as progress if it lasted so long."""
HOUR_S: Final = 3600.0


@record
class Ending:
    """How one start of the training ended. Times are seconds of one clock. `step`: the last completed step, None where
    the program reports none. `new`: whether it came further than every start before it. `words`: the last words that
    say most."""

    kind: Kind
    status: int
    began_s: float
    ended_s: float
    step: int | None = None
    new: bool = False
    evidence: str = ""
    words: LastWords | None = None

    @property
    def failed(self) -> bool:
        """Whether it is an end that nobody has asked for."""
        return self.kind in CAUSES or self.kind == "another node"

    @property
    def progress(self) -> bool:
        return self.new if self.step is not None else self.ended_s - self.began_s >= LASTING_S


@record
class Limits:
    """How often a training is started again.

    restarts: in all. per_hour: within any hour; per_cause: of one cause. in_vain: ends in a row without progress, after
    which another start would hardly help. first_wait_s, longest_wait_s: before a restart after an end without progress,
    doubled each time. final: causes after which it is not started again.
    """

    restarts: int = 100
    per_hour: int = 12
    in_vain: int = 3
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    per_cause: Mapping[Kind, int] = field(default_factory=dict)
    final: Collection[Kind] = ()


@record
class Decision:
    """`after_s`: how long to wait before the start. `reason`: in words that follow "started again: " or "ended: "."""

    restart: bool
    reason: str
    after_s: float = 0.0


def decide(endings: Sequence[Ending], limits: Limits) -> Decision:
    """Decides after the last of `endings`, which are all ends so far, oldest first."""
    last = endings[-1]
    if last.kind == "finished":
        return Decision(False, "the training is done")
    if last.kind == "asked to leave":
        return Decision(False, f"it was asked to leave ({last.evidence}) and has left")
    if last.kind in limits.final:
        return Decision(False, f"{last.kind} ({last.evidence}), after which it is not to be started again")
    in_vain = _in_vain(endings)
    if in_vain >= limits.in_vain:
        return Decision(False, f"{count(in_vain, 'start')} in a row ended without a new step ({last.evidence})")
    if len(endings) > limits.restarts:
        return Decision(False, f"it was restarted {count(limits.restarts, 'time')}, as often as allowed")
    recent = sum(last.ended_s - one.ended_s < HOUR_S for one in endings)
    if recent > limits.per_hour:
        return Decision(False, f"it ended {count(recent, 'time')} within an hour, more often than allowed")
    alike = sum(last.ended_s - one.ended_s < HOUR_S and one.kind == last.kind for one in endings)
    if alike > limits.per_cause.get(last.kind, alike):
        return Decision(False, f"{last.kind} ({last.evidence}), {count(alike, 'time')} within an hour")
    wait_s = min(limits.first_wait_s * 2 ** (in_vain - 1), limits.longest_wait_s) if in_vain else 0.0
    return Decision(True, f"{last.kind} ({last.evidence})", wait_s)


def _in_vain(endings: Sequence[Ending]) -> int:
    number = 0
    for one in reversed(endings):
        if one.progress:
            break
        number += 1
    return number


SLOWEST: Final = 4.0
USUAL: Final = 20.0
KNOWN: Final = 3
"""Steps that have to be known before silence is judged by them."""


@record
class Pace:
    """What steps take. known: of how many steps the time is known, but for the first one of a start, which may compile
    or fill caches. first_s: of that one. longest_s, usual_s: of the last ones, pauses for saves and evaluations
    included."""

    known: int = 0
    first_s: float = 0.0
    longest_s: float = 0.0
    usual_s: float = 0.0


def silence_allowed(pace: Pace, earlier: Pace, *, least_s: float, unknown_s: float) -> float:
    """Returns how long a training may make no step before it counts as hung: four times the longest of its last steps
    or twenty times the usual one, and at least `least_s`. Until three steps of this start are known, by those of the
    `earlier` ones, and four times what their first steps took; `unknown_s` where no start has come so far."""
    if pace.known >= KNOWN:
        return max(least_s, SLOWEST * pace.longest_s, USUAL * pace.usual_s)
    if earlier.known < KNOWN:
        return unknown_s
    longest_s = max(earlier.longest_s, earlier.first_s, pace.longest_s, pace.first_s)
    return max(least_s, SLOWEST * longest_s, USUAL * earlier.usual_s)


def silence_words(silent_s: float, allowed_s: float, step: int) -> str:
    return f"no step after step {step} for {seconds(silent_s)}, where {seconds(allowed_s)} are usual at most"
