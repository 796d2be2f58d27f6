"""How much work to put between two saves: the optimum for what saves cost and how often training fails.

Every function is exact arithmetic on its arguments, in seconds. Failures come without memory (exponentially) unless it
is said otherwise. A save blocks training for a *stall*, and while it is written beside training it slows that down;
both together are its *cost*. Until it is durable a failure loses what it holds, too.

Sources: Young 1974; Daly 2006 (the higher order and the exact optimum of the exponential model); Bosilca et al. 2013
(overlapped saves); Aupy, Robert, Vivien and Zaidouni 2013 (predictions); Benoit et al. 2017 (several levels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tenuto.errors import UsageError

PRIOR_FAILURES: Final = 1.0
PRIOR_S: Final = 86_400.0
"""What is believed before a run has shown anything: a failure a day, as if one had been seen."""


@dataclass(frozen=True, slots=True)
class SaveCosts:
    """What a save costs. `slowdown`: by which share training is slower while a save is written, 0 to 1."""

    stall_s: float
    persist_s: float = 0.0
    slowdown: float = 0.0

    @property
    def cost_s(self) -> float:
        """Training time that a save takes in all."""
        return self.stall_s + self.slowdown * self.persist_s


@dataclass(frozen=True, slots=True)
class Level:
    """One of several kinds of save. `mtbf_s`: between failures that need this kind: no cheaper one survives them."""

    cost_s: float
    mtbf_s: float


def young(cost_s: float, mtbf_s: float) -> float:
    """Returns the work between saves by Young: the first order, for a cost far below the time between failures."""
    _check(cost_s, mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Returns the work between saves by Daly's higher order; the time between failures where a cost is above twice
    that."""
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def optimum(cost_s: float, mtbf_s: float) -> float:
    """Returns the work between saves that loses least, exactly: (1 + W(-exp(-c - 1))) times the time between failures,
    with c the cost in those and W the principal branch of Lambert's function. What a restart takes does not matter."""
    _check(cost_s, mtbf_s)
    cost = cost_s / mtbf_s
    if cost < 1e-9:
        return math.sqrt(2 * cost_s * mtbf_s)  # the next term is below a part in 10,000
    # u = 1 + W solves log(1 - u) + u + cost = 0: concave and falling in u, so Newton from the right only comes closer.
    u = -math.expm1(-cost - 1) if cost > 1 else min(math.sqrt(2 * cost), 0.9)
    for _ in range(100):
        step = (math.log1p(-u) + u + cost) * (1 - u) / u
        u = min(max(u + step, u / 2), (1 + u) / 2)
        if abs(step) < 1e-13 * u:
            break
    return u * mtbf_s


def waste(work_s: float, costs: SaveCosts, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Returns the share of time that does not bring training forward, 0 to 1, with `work_s` of work between saves.

    restart_s: from a failure to where training continues. A failure also loses what was being written.
    """
    _check(costs.cost_s, mtbf_s)
    if work_s <= 0:
        raise UsageError(f"there must be work between two saves, not {work_s:g} s")
    per_segment = (work_s + costs.cost_s) / mtbf_s
    if per_segment + (restart_s + costs.persist_s) / mtbf_s > 700:
        return 1.0
    elapsed = mtbf_s * math.exp((restart_s + costs.persist_s) / mtbf_s) * math.expm1(per_segment)
    return 1 - work_s / elapsed


def interval(costs: SaveCosts, mtbf_s: float, *, budget: float = 1.0, in_flight: int = 1) -> float:
    """Returns the work between saves: the optimum, but never so little that saves stall training for more than the
    share `budget` of time, or come faster than `in_flight` of them at once can be written.

    Raises UsageError for a budget outside of 0 to 1.
    """
    if not 0 < budget <= 1:
        raise UsageError(f"a budget for stalls is a share of time above 0 and at most 1, not {budget:g}")
    best = optimum(costs.cost_s, mtbf_s)
    within = costs.stall_s / budget - costs.stall_s
    return max(best, within, costs.persist_s / max(in_flight, 1) - costs.stall_s)


def levels(kinds: Sequence[Level]) -> list[float]:
    """Returns the work between saves of each kind, the cheapest first: each answers for the failures that need it."""
    return [optimum(kind.cost_s, kind.mtbf_s) for kind in kinds]


def predicted(
    cost_s: float, mtbf_s: float, *, precision: float, recall: float, proactive_s: float | None = None
) -> tuple[float, float]:
    """Returns the work between saves where failures are predicted, and the least work since the last save for which a
    prediction is worth a save of its own.

    precision: the share of predictions that come true. recall: the share of failures that are predicted.
    proactive_s: what such a save costs; as any other unless it is given.

    A prediction that is not worth its save is to be ignored, so a bad predictor costs nothing.
    """
    _check(cost_s, mtbf_s)
    if not 0 < precision <= 1 or not 0 <= recall <= 1:
        raise UsageError(
            f"precision lies above 0 and at most at 1, recall from 0 to 1: not {precision:g} and {recall:g}"
        )
    proactive = cost_s if proactive_s is None else proactive_s
    worth = proactive / precision
    if recall == 0:
        return optimum(cost_s, mtbf_s), worth
    left = max(2 * mtbf_s * cost_s - recall * worth * worth, 0.0)
    unpredicted = max(1 - recall, cost_s / mtbf_s)  # with a recall of 1 only what no model knows is left
    return max(worth, math.sqrt(left / unpredicted)), worth


def weibull_due(unsaved_s: float, cost_s: float, *, scale_s: float, shape: float, since_failure_s: float) -> bool:
    """Returns whether the unsaved work is worth a save now, where failures follow a Weibull distribution: with a
    shape below 1 they come soon after each other, and saves are to be closer there.

    scale_s: of the distribution. since_failure_s: since the last failure or start.
    """
    _check(cost_s, scale_s)
    if shape <= 0:
        raise UsageError(f"the shape of a Weibull distribution is above 0, not {shape:g}")
    at = max(since_failure_s, unsaved_s, 1e-9)  # at the start itself the hazard of a shape below 1 has no bound
    hazard = shape / scale_s * (at / scale_s) ** (shape - 1)
    return unsaved_s >= math.sqrt(2 * cost_s / hazard) if hazard > 0 else False


def time_between_failures(failures: int, exposed_s: float) -> float:
    """Returns the expected seconds between failures: the mean of a Gamma posterior, which begins at one a day and
    comes to what the run itself shows."""
    if failures < 0 or exposed_s < 0:
        raise UsageError(f"there are no {failures} failures in {exposed_s:g} s")
    return (PRIOR_S + exposed_s) / (PRIOR_FAILURES + failures)


def _check(cost_s: float, mtbf_s: float) -> None:
    if not (cost_s >= 0 and math.isfinite(cost_s)):
        raise UsageError(f"a save costs a finite time, not {cost_s:g} s")
    if not (mtbf_s > 0 and math.isfinite(mtbf_s)):
        raise UsageError(f"the time between failures is finite and above 0, not {mtbf_s:g} s")
