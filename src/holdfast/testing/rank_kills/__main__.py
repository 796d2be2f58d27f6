"""`python -m holdfast.testing.rank_kills --kills 200 --seed 1 --json result.json`"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from holdfast.testing.campaigns import Progress, Sitting, deliver, options
from holdfast.testing.rank_kills.campaign import Tally, campaign

MODULE: Final = "holdfast.testing.rank_kills"


def main() -> None:
    parser = options(MODULE, "Kills single ranks of a job; every round must end bit for bit as the untouched one.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    sitting, progress, tally = Sitting(MODULE, None, seed=given.seed, packages=["numpy"]), Progress(), Tally()
    with tempfile.TemporaryDirectory(prefix="holdfast-ranks-") as place:
        for tally in campaign(given.kills, given.seed, Path(place), steps=given.steps):
            progress(f"{tally.kills} of {given.kills} kills, {tally.equal} of {tally.rounds} rounds equal")
    progress.end()
    deliver(sitting.result(tally.told()), given.json)
    sys.exit(0 if tally.equal == tally.rounds and not tally.faults else 12)


if __name__ == "__main__":
    main()
