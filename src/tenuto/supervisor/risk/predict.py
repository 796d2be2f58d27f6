"""The predictor that `tenuto run` asks: scores the risk, counts how good it was, and finds `risk` where a save is worth
it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from tenuto.supervisor.detectors.contract import Finding, Sample
from tenuto.supervisor.detectors.registry import detectors
from tenuto.supervisor.risk.model import Model, Risk
from tenuto.supervisor.risk.rules import Rules
from tenuto.supervisor.risk.trust import Trust
from tenuto.supervisor.risk.windows import Windows
from tenuto.units import count, seconds

EVERY_S: Final = 5.0
"""How often the risk is scored."""


class Scorer(Protocol):
    """Rules or a model. `threshold`: the probability that raises an alarm."""

    @property
    def threshold(self) -> float: ...

    def take(self, sample: Sample) -> None: ...

    def risk(self, now: float) -> Risk: ...


class ModelScorer:
    """Scores the last minutes by a learnt model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._windows = Windows(model.window_s)
        self.threshold = model.threshold

    def take(self, sample: Sample) -> None:
        self._windows.take(sample)

    def risk(self, now: float) -> Risk:
        return self._model.score(self._windows.features(now))


def rules() -> Scorer:
    """Returns the rules, by detectors of their own: what those have seen is not what others have."""
    return Rules(detectors("off"))


@dataclass(slots=True)
class RiskPredictor:
    """Foresees faults by all samples together. It asks no clock: the same samples give the same findings."""

    scorer: Scorer
    trust: Trust = field(default_factory=Trust)
    _scored: float = float("-inf")

    def observe(self, samples: Iterable[Sample], now: float) -> Finding | None:
        """Takes what is new, and returns the finding `risk` each time that a save is worth it."""
        for sample in samples:
            self.scorer.take(sample)
            self.trust.take(sample)
        if now - self._scored < EVERY_S:
            return None
        self._scored = now
        alarm = self.trust.ledger.raised(self.scorer.risk(now), self.scorer.threshold, now)
        return self._found(alarm.risk) if alarm is not None and self.trust.heed(alarm, now) else None

    def replay(self, samples: Iterable[Sample]) -> None:
        """Takes an earlier recording of this job, to know how good its alarms were then. Nothing that was done about
        them counts for the time to come."""
        for sample in samples:
            self.observe([sample], sample.at)
        self.trust = Trust(self.trust.ledger)

    def _found(self, risk: Risk) -> Finding:
        ledger = self.trust.ledger
        alarms = ledger.right + ledger.wrong
        known = f"; {ledger.right} of {count(alarms, 'alarm')} so far were right" if alarms else ""
        reasons = f": {'; '.join(risk.reasons)}" if risk.reasons else ""
        evidence = f"a fault within {seconds(risk.horizon_s)} with a probability of {risk.probability:.2f}"
        return Finding("risk", f"{evidence}{reasons}{known}", grace_s=risk.horizon_s)
