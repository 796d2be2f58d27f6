"""How good a predictor is on recordings: alarm by alarm as `tenuto run` would raise them, and how well its
probabilities fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from tenuto.record import record
from tenuto.supervisor.detectors.contract import END, Sample
from tenuto.supervisor.risk.model import Risk
from tenuto.supervisor.risk.predict import EVERY_S, Scorer
from tenuto.supervisor.risk.trust import Ledger
from tenuto.supervisor.risk.windows import is_fault

BINS: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)
"""Where the bins of stated probabilities end."""


@record
class Bin:
    """Of the moments at which a probability of `low` to `high` was stated: how many, the mean that was stated, and the
    share after which a fault came."""

    low: float
    high: float
    moments: int
    stated: float
    observed: float


@record
class Report:
    """faults, alarms, right: how many; an alarm is right if a fault comes within its horizon. leads_s: of those, the
    seconds to the fault. brier: the mean squared error of the probabilities; brier_base: of the share of moments before
    a fault, which knows nothing but that. since, until: what was looked at, in seconds since 1970."""

    faults: int
    alarms: int
    right: int
    leads_s: tuple[float, ...]
    brier: float | None
    brier_base: float | None
    calibration: tuple[Bin, ...]
    since: float
    until: float

    @property
    def precision(self) -> float | None:
        return self.right / self.alarms if self.alarms else None

    @property
    def recall(self) -> float | None:
        return self.right / self.faults if self.faults else None

    @property
    def lead_s(self) -> float | None:
        """The median."""
        return median(self.leads_s) if self.leads_s else None


@record
class Moment:
    """A probability that was stated, and whether a fault came within its horizon; None where the recording ends before
    that is known."""

    at: float
    risk: Risk
    came: bool | None


def evaluate(
    recordings: Sequence[Sequence[Sample]], scorer_of: Callable[[], Scorer], since: float = float("-inf")
) -> Report:
    """Evaluates on each recording from `since` on; what lies before is taken in, and not counted.

    scorer_of: makes a scorer that has seen nothing.
    """
    moments: list[Moment] = []
    ledgers = []
    for samples in recordings:
        scorer, ledger = scorer_of(), Ledger()
        for moment in moments_of(samples, scorer, ledger, since):
            ledger.raised(moment.risk, scorer.threshold, moment.at)
            moments.append(moment)
        ledgers.append(ledger)
    known = [(one.risk.probability, one.came) for one in moments if one.came is not None]
    share = fmean(came for _, came in known) if known else 0.0
    times = [one.at for one in moments]
    return Report(
        faults=sum(ledger.faults for ledger in ledgers),
        alarms=sum(ledger.right + ledger.wrong for ledger in ledgers),
        right=sum(ledger.right for ledger in ledgers),
        leads_s=tuple(lead for ledger in ledgers for lead in ledger.leads_s),
        brier=fmean((stated - came) ** 2 for stated, came in known) if known else None,
        brier_base=fmean((share - came) ** 2 for _, came in known) if known else None,
        calibration=tuple(_bins(known)),
        since=min(times, default=0.0),
        until=max(times, default=0.0),
    )


def moments_of(
    samples: Sequence[Sample], scorer: Scorer, ledger: Ledger | None = None, since: float = float("-inf")
) -> Iterator[Moment]:
    """Yields what the scorer states after samples, every EVERY_S at most, from `since` on. The ledger takes the ends as
    they come."""
    faults = [sample.at for sample in samples if is_fault(sample)]
    last = samples[-1].at if samples else 0.0
    scored = float("-inf")
    for sample in samples:
        scorer.take(sample)
        if sample.at < since:
            continue
        if ledger is not None:
            ledger.take(sample)
        if sample.source == END or sample.at - scored < EVERY_S:
            continue
        scored = sample.at
        risk = scorer.risk(sample.at)
        place = bisect_right(faults, sample.at)
        came = place < len(faults) and faults[place] <= sample.at + risk.horizon_s
        yield Moment(sample.at, risk, True if came else False if sample.at + risk.horizon_s <= last else None)


def _bins(known: Sequence[tuple[float, bool]]) -> Iterator[Bin]:
    for low, high in pairwise(BINS):
        inside = [one for one in known if low <= one[0] < high or (one[0] == high == 1)]
        if inside:
            stated, observed = fmean(one[0] for one in inside), fmean(one[1] for one in inside)
            yield Bin(low, high, len(inside), stated, observed)
