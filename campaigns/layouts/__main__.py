"""`python -m campaigns.layouts --pairs 400 --simulated 200 --seed 1 --json result.json`"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Final

from campaigns.layouts.campaign import Tally, hunt, hunt_simulated, over_processes, simulate
from campaigns.result_file import Progress, ResultHeader, deliver, options

MODULE: Final = "campaigns.layouts"


def main() -> None:
    parser = options(MODULE, "Saves in one layout, restores in another, and back, and compares every bit.", bugs=True)
    parser.add_argument("--pairs", type=int, default=400, help="over processes")
    parser.add_argument("--simulated", type=int, default=200, help="over simulated ranks")
    given = parser.parse_args()
    result_header, progress = ResultHeader(MODULE, None, seed=given.seed, packages=["numpy", "torch"]), Progress()
    real, bugs = Tally(), []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tenuto-layouts-") as name, ProcessPoolExecutor(2, context) as pool:
        place = Path(name)
        simulated = pool.submit(simulate, given.simulated, given.seed)
        hunted = None if given.no_bugs else pool.submit(hunt_simulated, given.seed)
        told = 0
        for real in over_processes(given.pairs, given.seed, place):
            for fault in real.faults[told:]:
                sys.stderr.write(f"\n{fault}\n")  # what breaks the campaign off does not lose it
            told = len(real.faults)
            progress(f"{real.pairs} of {given.pairs} pairs over processes, {len(real.faults)} faults")
        for found in () if given.no_bugs else hunt(given.seed, place):
            bugs.append(found)
            progress(f"{len(bugs)} bugs seeded over processes, {sum(one.caught for one in bugs)} caught")
        threads = simulated.result()
        bugs += hunted.result() if hunted is not None else []
    progress.end()
    caught = sum(one.caught for one in bugs)
    counts = {
        "pairs": real.pairs + threads.pairs,
        "over_processes": real.summary(),
        "over_simulated_ranks": threads.summary(),
        "bugs_seeded": len(bugs),
        "bugs_caught": caught,
        "bugs": [asdict(one) for one in bugs],
    }
    deliver(result_header.result(counts), given.json)
    sys.exit(0 if not real.faults and not threads.faults and caught == len(bugs) else 12)


if __name__ == "__main__":
    main()
