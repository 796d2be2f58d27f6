"""`python -m campaigns.rank_phases --json result.json`: a rank, the coordinator, or the place where ranks meet,
struck in every phase; and old jobs that come back after another has claimed the run. Exit status 1 for any fault."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from campaigns.rank_phases.campaign import everything, play, summary
from campaigns.rank_phases.old_job import cuts
from campaigns.result_file import Progress, ResultHeader, deliver, options

MODULE: Final = "campaigns.rank_phases"


def main() -> None:
    parser = options(MODULE, __doc__, workers=6)
    parser.add_argument("--only-returning", action="store_true", help="only old jobs that come back")
    given = parser.parse_args()
    import torch.distributed  # noqa: F401 - once, before ranks are forked

    what = [*cuts()] if given.only_returning else everything()
    result_header, log = ResultHeader(MODULE, None, seed=None, packages=["numpy", "torch"]), Progress()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="tenuto-phases-") as place:
        for outcome in play(what, Path(place), at_once=given.workers):
            outcomes.append(outcome)
            log(f"{len(outcomes)} of {len(what)} played, {sum(bool(one.faults) for one in outcomes)} with a fault")
    log.end()
    deliver(result_header.result(summary(outcomes)), given.json)
    sys.exit(1 if any(one.faults for one in outcomes) else 0)


if __name__ == "__main__":
    main()
