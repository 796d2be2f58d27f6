"""What a predictor of failures is worth: when to save because of an alarm, and how much work to put between saves.

A predictor raises alarms. Its *precision* is the share of alarms that a failure follows, its *recall* the share of
failures that an alarm came before, its *lead* the time between the two. Because of an alarm training saves at once, if
what it would lose is worth that, and then more often until the lead is over.

Sources: Aupy, Robert, Vivien and Zaidouni 2013 (the threshold and the optimum); the rate within a window is Young's
formula with the failures that are expected there.
"""

from __future__ import annotations

import math
from typing import Final

from tenuto.errors import UsageError
from tenuto.policy.interval import SaveCosts, interval, optimum
from tenuto.record import record

MOST_RECALL: Final = 0.99
"""However good a predictor was: without regular saves one failure that it missed would lose everything."""


@record
class Predictor:
    """precision: above 0 to 1. recall: 0 to 1. lead_s: seconds from an alarm to the failure."""

    precision: float
    recall: float
    lead_s: float

    def check(self) -> None:
        """Raises UsageError for numbers that make no sense."""
        if not (0 < self.precision <= 1 and 0 <= self.recall <= 1):
            raise UsageError(
                f"precision is above 0 and recall at least 0, both at most 1, not {self.precision:g}, {self.recall:g}"
            )
        if not (self.lead_s >= 0 and math.isfinite(self.lead_s)):
            raise UsageError(f"a lead is a finite time, not {self.lead_s:g} s")


@record
class Plan:
    """How to save with a predictor, in seconds of work.

    work_s: between regular saves. stake_s: since the last save, from which on an alarm is worth a save. window_s:
    between saves while an alarm lasts. trusted: whether alarms are worth anything; else they are to be ignored.
    """

    work_s: float
    stake_s: float
    window_s: float
    trusted: bool


def least_stake(costs: SaveCosts, precision: float) -> float:
    """Returns how much work since the last save makes an alarm worth another one: what a save costs over the precision,
    and at least what a save takes to be written."""
    return max(costs.cost_s / precision, costs.persist_s - costs.stall_s)


def window_interval(costs: SaveCosts, predictor: Predictor) -> float:
    """Returns the work between saves while an alarm lasts, sqrt(2 C I / p): Young's formula, where a failure comes
    within the window I with the probability p."""
    best = math.sqrt(2 * costs.cost_s * predictor.lead_s / predictor.precision)
    return max(best, costs.persist_s - costs.stall_s, least_stake(costs, predictor.precision))


def predicted_optimum(
    costs: SaveCosts, mtbf_s: float, predictor: Predictor, alarm_cost_s: float | None = None
) -> float:
    """Returns the work between regular saves that loses least: they are for the failures that nobody predicts, so
    recall makes them rarer, and precision hardly matters.

    alarm_cost_s: what a save because of an alarm costs; as any other by default.
    """
    predictor.check()
    recall = min(predictor.recall, MOST_RECALL)
    stake_s = (costs.cost_s if alarm_cost_s is None else alarm_cost_s) / predictor.precision
    # max(b, sqrt((2MC - r b^2) / (1 - r))) with b the stake, by the exact optimum in place of Young's square root.
    left_s = max(costs.cost_s - recall * stake_s**2 / (2 * mtbf_s), 0.0)
    return max(optimum(left_s, mtbf_s / (1 - recall)), stake_s)


def predicted_waste(
    work_s: float, costs: SaveCosts, mtbf_s: float, predictor: Predictor, *, restart_s: float = 0.0,
    alarm_cost_s: float | None = None,
) -> float:  # fmt: skip
    """Returns the share of time that does not bring training forward, to the first order, with `work_s` of work between
    regular saves and every alarm heeded that is worth it. recall 0: as without a predictor."""
    alarm_s = costs.cost_s if alarm_cost_s is None else alarm_cost_s
    recall, precision, persist_s = predictor.recall, predictor.precision, costs.persist_s
    each_s = window_interval(costs, predictor) + alarm_s
    more = predictor.lead_s // each_s
    durable = max((predictor.lead_s - persist_s - alarm_s) // each_s, 0)
    lost_s = max(predictor.lead_s - alarm_s - durable * each_s, 0.0)
    alarms_s = recall / precision * (alarm_s - alarm_s**2 / (2 * precision * work_s) + more * alarm_s)
    per_failure_s = (1 - recall) * (work_s / 2 + persist_s) + alarms_s + recall * lost_s + restart_s
    return min(costs.cost_s / work_s + per_failure_s / mtbf_s, 1.0)


def plan(costs: SaveCosts, mtbf_s: float, predictor: Predictor, work_s: float | None = None) -> Plan:
    """Returns how to save with this predictor; not trusted where alarms come too late for a save, or cost more than
    they keep.

    work_s: between regular saves, where that is fixed; the optimum by default.
    """
    predictor.check()
    without_s = work_s or interval(costs, mtbf_s)
    if not costs.cost_s:  # saves are free: as many as can be written need no alarm
        return Plan(without_s, 0.0, 0.0, False)
    with_s = work_s or max(predicted_optimum(costs, mtbf_s, predictor), without_s)
    nobody = Predictor(1.0, 0.0, 0.0)
    saved = predicted_waste(without_s, costs, mtbf_s, nobody) - predicted_waste(with_s, costs, mtbf_s, predictor)
    trusted = predictor.lead_s >= costs.stall_s + costs.persist_s and saved > 0
    stake_s, window_s = least_stake(costs, predictor.precision), window_interval(costs, predictor)
    return Plan(with_s if trusted else without_s, stake_s, window_s, trusted)
