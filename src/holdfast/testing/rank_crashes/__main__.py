"""`python -m holdfast.testing.rank_crashes --states 50000 --seed 1 --json result.json`: crash states of jobs of several
ranks. Exit status 1 if a rule was broken, or if more than one seeded bug passed unseen."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from holdfast.testing.campaigns import Progress, Sitting, deliver, options
from holdfast.testing.crash_states import BugResult, summary, text
from holdfast.testing.rank_crashes.bugs import BUGS
from holdfast.testing.rank_crashes.campaign import hunt_by_name, run

MODULE: Final = "holdfast.testing.rank_crashes"


def run_bugs(seed: int, *, workers: int, say: Callable[[str], None]) -> list[BugResult]:
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(hunt_by_name, bug.name, seed) for bug in BUGS]
        results = []
        for number, future in enumerate(futures, 1):
            results.append(future.result())
            say(f"bugs: {number} of {len(BUGS)} seeded, {sum(found.caught for found in results)} caught")
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__, workers=2, bugs=True)
    parser.add_argument("--states", type=int, default=50_000, help="distinct disks to judge")
    parser.add_argument("--each", type=int, default=48, help="states for one prefix of one recording, about")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no recording is begun later")
    chosen = parser.parse_args(arguments)
    sitting, say = Sitting(MODULE, arguments, seed=chosen.seed, packages=["numpy"]), Progress()
    bugs = [] if chosen.no_bugs else run_bugs(chosen.seed, workers=chosen.workers, say=say)
    limits = {"each": chosen.each, "workers": chosen.workers, "seconds": chosen.seconds}
    campaign = run(chosen.states, chosen.seed, **limits, say=say)
    say.end()
    report = sitting.result(summary(campaign, bugs))
    deliver(report, chosen.json, text(report))
    missed = sum(not found.caught for found in bugs)
    return 1 if campaign.violations or missed > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
