"""How much work to put between two saves: the optimum for what saves cost and how often training fails.

Every function is exact arithmetic on its arguments, in seconds. Failures come without memory (exponentially) unless it
is said otherwise. A save blocks training for a *stall*, and while it is written beside training it slows that down;
both together are its *cost*. Until it is durable a failure loses what it holds, too.

Sources: Daly 2006 (the exact optimum of the exponential model); Bosilca et al. 2013 (overlapped saves).
"""

from __future__ import annotations

import math
from typing import Final

from tenuto.errors import UsageError
from tenuto.record import record

PRIOR_FAILURES: Final = 1.0
PRIOR_S: Final = 86_400.0
"""What is believed before a run has shown anything: a failure a day, as if one had been seen."""


@record
class SaveCosts:
    """What a save costs. `slowdown`: by which share training is slower while a save is written, 0 to 1."""

    stall_s: float
    persist_s: float = 0.0
    slowdown: float = 0.0

    @property
    def cost_s(self) -> float:
        """Training time that a save takes in all."""
        return self.stall_s + self.slowdown * self.persist_s


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
