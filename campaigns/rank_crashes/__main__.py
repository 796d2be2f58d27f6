"""`python -m campaigns.rank_crashes --states 50000 --seed 1 --json result.json`: crash states of jobs of several
ranks, about equally many of each scenario. Exit status 1 if a rule was broken, if a scenario came to no state, or if
more than one seeded bug passed unseen."""

from __future__ import annotations

import sys
from functools import partial
from typing import Final

from campaigns.crash_states import run_bugs, summary, text
from campaigns.rank_crashes.bugs import SOUGHT
from campaigns.rank_crashes.campaign import hunt_by_name, run_unit, units
from campaigns.rank_crashes.scenarios import SCENARIOS
from campaigns.rank_crashes.shares import by_bug, split_by_agreement
from campaigns.result_file import Progress, ResultHeader, deliver, options

MODULE: Final = "campaigns.rank_crashes"


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__, workers=2, bugs=True)
    parser.add_argument("--states", type=int, default=50_000, help="distinct disks to judge, of all scenarios")
    parser.add_argument("--each", type=int, default=48, help="states for one prefix of one recording, about")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all scenarios, without the seeded bugs")
    parser.add_argument("--scenarios", nargs="*", choices=SCENARIOS, metavar="NAME", help="these alone")
    chosen = parser.parse_args(arguments)
    result_header, log = ResultHeader(MODULE, arguments, seed=chosen.seed, packages=["numpy"]), Progress()
    wanted = chosen.scenarios or list(SCENARIOS)
    sought = {name: bug for name, bug in SOUGHT.items() if bug.scenarios[0] in wanted and not chosen.no_bugs}
    found = run_bugs(list(sought), hunt_by_name, chosen.seed, workers=chosen.workers, log=log)
    hunts = [(bug.scenarios[0], one) for bug, one in zip(sought.values(), found, strict=True)]
    bugs = by_bug(hunts)
    of = partial(units, seed=chosen.seed, each=chosen.each)
    shares = split_by_agreement(chosen.states, chosen.seconds, wanted, of, run_unit, workers=chosen.workers, log=log)
    log.end()
    report = result_header.result(summary(shares.whole, bugs) | {"by_scenario": shares.json(hunts)})
    deliver(report, chosen.json, text(report))
    missed = sum(not bug.caught for bug in bugs)
    return 1 if shares.whole.violations or shares.without_states or missed > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
