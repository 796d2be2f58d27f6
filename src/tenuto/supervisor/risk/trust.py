"""How good a predictor has been for this job, and whether its alarm is worth a save now.

The precision is that of a Beta posterior: the probability that is stated counts as two alarms that were seen, and every
alarm of this job's own history as one. A save because of an alarm is taken only if what a fault would lose is worth it
(policy.prediction), and all of them together take at most a hundredth of the time, whatever the predictor says: it can
be wrong, but it cannot be expensive. A save that takes longer than the one before is paid for by those that follow.
Alarms never make regular saves rarer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from tenuto.policy.interval import SaveCosts
from tenuto.policy.prediction import Predictor, least_stake, window_interval
from tenuto.record import record
from tenuto.supervisor.detectors.contract import END, STEPS, Sample
from tenuto.supervisor.risk.model import Risk
from tenuto.supervisor.risk.windows import is_fault

STATED: Final = 2.0
"""Alarms of history that the stated probability counts as."""
BUDGET: Final = 0.01
"""The share of time that saves because of alarms may take."""
UNKNOWN_SAVE_S: Final = 30.0
"""What a save is believed to take before the first one."""
KNOWN_LEADS: Final = 3


@record
class Alarm:
    """A risk that was high enough, from `at` (seconds since 1970) on."""

    at: float
    risk: Risk

    @property
    def until(self) -> float:
        return self.at + self.risk.horizon_s


@dataclass(slots=True)
class Ledger:
    """Counts the alarms of a predictor, one at a time: an alarm is right if a fault comes within its horizon."""

    right: int = 0
    wrong: int = 0
    faults: int = 0
    leads_s: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    open: Alarm | None = None

    def take(self, sample: Sample) -> None:
        """Counts an end of the training. One that somebody asked for says nothing about an alarm."""
        if sample.source != END:
            return
        self.expire(sample.at)
        if is_fault(sample):
            self.faults += 1
            if self.open is not None:
                self.right += 1
                self.leads_s.append(sample.at - self.open.at)
        self.open = None

    def expire(self, now: float) -> None:
        if self.open is not None and now > self.open.until:
            self.wrong += 1
            self.open = None

    def raised(self, risk: Risk, threshold: float, now: float) -> Alarm | None:
        """Returns the alarm that is open now, perhaps a new one."""
        self.expire(now)
        if self.open is None and risk.probability >= threshold:
            self.open = Alarm(now, risk)
        return self.open

    def precision(self, stated: float) -> float:
        """Returns the mean of the posterior; `stated`: the probability that the predictor gives itself."""
        return (STATED * stated + self.right) / (STATED + self.right + self.wrong)

    @property
    def recall(self) -> float:
        """The mean of the posterior, which knows nothing at first."""
        return (1 + self.right) / (2 + self.faults)

    def lead(self, horizon_s: float) -> float:
        """Returns how early alarms usually come: by those that were right, or else the horizon."""
        return median(self.leads_s) if len(self.leads_s) >= KNOWN_LEADS else horizon_s


@dataclass(slots=True)
class Stake:
    """What a fault would lose now, and what a save takes, by the samples of the supervisor."""

    since: float | None = None
    """When the training began or last saved; None before it trains."""
    save_s: float = UNKNOWN_SAVE_S
    _saves: float = 0.0

    def take(self, sample: Sample) -> bool:
        """Returns whether a save has been committed since the sample before."""
        if sample.source == END:
            self.since, self._saves = None, 0.0
        if sample.source != STEPS:
            return False
        before, self._saves = self._saves, sample.values.get("saves", 0.0)
        saved = self._saves > before
        if self.since is None or saved:
            self.since = sample.at
        if self._saves and sample.values.get("save_s", 0.0) > 0:
            self.save_s = sample.values["save_s"]
        return saved

    def work_s(self, now: float) -> float:
        return 0.0 if self.since is None else max(now - self.since, 0.0)


@dataclass(slots=True)
class Trust:
    """Decides which alarms a save is taken for."""

    ledger: Ledger = field(default_factory=Ledger)
    stake: Stake = field(default_factory=Stake)
    spent_s: float = 0.0
    """What such saves have taken, at most; of the newest one what it is believed to, until it has been committed."""
    _began: float | None = None
    _heeded: Alarm | None = None
    _believed_s: float | None = None
    """What the newest such save is believed to take; None once that is known, or nobody will know."""

    def take(self, sample: Sample) -> None:
        self._began = sample.at if self._began is None else self._began
        self.ledger.take(sample)
        saved = self.stake.take(sample)
        if saved and self._believed_s is not None:
            self.spent_s += max(self.stake.save_s - self._believed_s, 0.0)
        if saved or sample.source == END:
            self._believed_s = None

    def heed(self, alarm: Alarm, now: float) -> bool:
        """Returns whether to save now, and counts that as done. While the alarm lasts, further saves follow at the
        rate that suits the window."""
        precision = self.ledger.precision(alarm.risk.probability)
        costs = SaveCosts(self.stake.save_s)
        lead_s = self.ledger.lead(alarm.risk.horizon_s)
        least_s = least_stake(costs, precision)
        if alarm is self._heeded:
            least_s = max(least_s, window_interval(costs, Predictor(precision, 1.0, lead_s)))
        elapsed_s = 0.0 if self._began is None else now - self._began
        if self.stake.work_s(now) < least_s or lead_s < costs.cost_s:
            return False
        if self.spent_s + costs.cost_s > BUDGET * elapsed_s:
            return False
        self.spent_s += costs.cost_s
        self._believed_s = costs.cost_s
        self._heeded = alarm
        self.stake.since = now  # asked for: what is saved shows a little later
        return True
