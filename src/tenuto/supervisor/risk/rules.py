"""Rules of risk that need no training: what detectors find, each with the probability that a fault follows, and faults
that come one after the other.

The probabilities are stated, not measured; what a job's own history shows corrects them (`trust`), and
`tenuto risk eval rules` says how good they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tenuto.record import record
from tenuto.supervisor.decide import HOUR_S
from tenuto.supervisor.detectors.contract import END, Detector, Finding, Name, Sample
from tenuto.supervisor.risk.model import REASONS, Risk
from tenuto.supervisor.risk.windows import is_fault
from tenuto.units import count, seconds

MINUTE_S: Final = 60.0


@record
class Rule:
    """The probability that a fault follows a finding within `horizon_s`, or within the finding's own grace."""

    probability: float
    horizon_s: float


RULES: Final[Mapping[Name, Rule]] = {
    "memory": Rule(0.8, 10 * MINUTE_S),
    "gpu-memory": Rule(0.5, 10 * MINUTE_S),
    "disk-filling": Rule(0.5, 30 * MINUTE_S),
    "disk-failing": Rule(0.3, HOUR_S),
    "disk-slow": Rule(0.1, 30 * MINUTE_S),
    "gpu-lost": Rule(0.9, 5 * MINUTE_S),
    "gpu-xid": Rule(0.5, 10 * MINUTE_S),
    "gpu-ecc": Rule(0.3, HOUR_S),
    "gpu-error": Rule(0.5, 10 * MINUTE_S),
    "gpu-hot": Rule(0.2, 30 * MINUTE_S),
    "gpu-throttled": Rule(0.05, 30 * MINUTE_S),
    "network": Rule(0.2, 10 * MINUTE_S),
    "preemption": Rule(0.95, 2 * MINUTE_S),
    "preemption-risk": Rule(0.3, 10 * MINUTE_S),
    "straggler": Rule(0.05, 30 * MINUTE_S),
}
"""What is believed to follow what. A finding that is not here foretells nothing."""
REPEATED: Final = 2
"""Faults within an hour from which on another one is to be expected."""
REPEATED_S: Final = 10 * MINUTE_S
THRESHOLD: Final = 0.3


@dataclass(slots=True)
class Rules:
    """Risk by the findings of detectors that hold, as if they were independent of each other."""

    detectors: Sequence[Detector]
    threshold: float = THRESHOLD
    _holds: dict[int, Sequence[Finding]] = field(default_factory=dict)
    _faults: list[float] = field(default_factory=list)

    def take(self, sample: Sample) -> None:
        for number, detector in enumerate(self.detectors):
            found = detector.judge(sample)
            if found or sample.source == detector.source:
                self._holds[number] = found
        if sample.source == END:
            self._holds.clear()
            self._faults = [at for at in self._faults if sample.at - at < HOUR_S]
            if is_fault(sample):
                self._faults.append(sample.at)

    def risk(self, now: float) -> Risk:
        parts = [*self._by_findings(), *self._by_faults(now)]
        parts.sort(key=lambda one: -one.probability)
        safe = math.prod(1 - one.probability for one in parts)
        reasons = tuple(reason for one in parts[:REASONS] for reason in one.reasons)
        return Risk(1 - safe, parts[0].horizon_s if parts else REPEATED_S, reasons)

    def _by_findings(self) -> list[Risk]:
        found = []
        for finding in (one for holds in self._holds.values() for one in holds):
            rule = RULES.get(finding.name)
            if rule is not None:
                horizon_s = rule.horizon_s if finding.grace_s is None else max(finding.grace_s, 1.0)
                subject = f" {finding.subject}" if finding.subject else ""
                reason = f"{finding.name}{subject}: {finding.evidence}"
                found.append(Risk(rule.probability, horizon_s, (reason,)))
        return found

    def _by_faults(self, now: float) -> list[Risk]:
        """Faults come at the rate of the last hour, once there were several."""
        recent = sum(now - at < HOUR_S for at in self._faults)
        if recent < REPEATED:
            return []
        probability = -math.expm1(-recent * REPEATED_S / HOUR_S)
        return [Risk(probability, REPEATED_S, (f"{count(recent, 'fault')} within {seconds(HOUR_S)}",))]
