"""`python -m holdfast.testing.rank_crashes --states 50000 --seed 1 --json result.json`: crash states of jobs of several
ranks. Exit status 1 if a rule was broken, or if more than one seeded bug passed unseen."""

from __future__ import annotations

import sys
from typing import Final

from holdfast.testing.campaigns import Progress, Sitting, deliver, options
from holdfast.testing.crash_states import run, run_bugs, summary, text
from holdfast.testing.rank_crashes.bugs import BUGS
from holdfast.testing.rank_crashes.campaign import hunt_by_name, run_unit, units

MODULE: Final = "holdfast.testing.rank_crashes"


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__, workers=2, bugs=True)
    parser.add_argument("--states", type=int, default=50_000, help="distinct disks to judge")
    parser.add_argument("--each", type=int, default=48, help="states for one prefix of one recording, about")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no recording is begun later")
    chosen = parser.parse_args(arguments)
    sitting, say = Sitting(MODULE, arguments, seed=chosen.seed, packages=["numpy"]), Progress()
    names = [] if chosen.no_bugs else [bug.name for bug in BUGS]
    bugs = run_bugs(names, hunt_by_name, chosen.seed, workers=chosen.workers, say=say)
    limits = {"workers": chosen.workers, "seconds": chosen.seconds}
    campaign = run(chosen.states, units(chosen.seed, chosen.each), run_unit, **limits, say=say)
    say.end()
    report = sitting.result(summary(campaign, bugs))
    deliver(report, chosen.json, text(report))
    missed = sum(not found.caught for found in bugs)
    return 1 if campaign.violations or missed > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
