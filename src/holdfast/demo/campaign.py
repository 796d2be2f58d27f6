"""Many kills, in rounds that are compared one by one: `python -m holdfast.demo.campaign --kills 1000`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from holdfast.demo.plan import SMALL, draw_plan
from holdfast.demo.runner import Runner, load_framework
from holdfast.testing.campaigns import Sitting, deliver, options

MODULE: Final = "holdfast.demo.campaign"


def campaign(*, kills: int, per_round: int, steps: int, save_every: int, seed: int, place: Path) -> dict[str, Any]:
    """Kills until `kills` are done (a round whose training ends early counts what it had). Every round trains the same
    and is compared with one untouched run in every bit."""
    load_framework()
    runner = Runner(place)
    untouched = runner.untouched(draw_plan(kills=0, steps=steps, save_every=save_every, seed=seed, sizes=SMALL))
    rounds: list[dict[str, Any]] = []
    done = 0
    while done < kills:
        number = min(per_round, kills - done)
        plan = draw_plan(
            kills=number, steps=steps, save_every=save_every, seed=seed + len(rounds), starts=True, sizes=SMALL
        )
        account = runner.killed(plan, untouched, run=f"killed-{len(rounds)}")
        done += account.kills
        rounds.append(
            {
                "seed": plan.seed,
                "kills": account.kills,
                "kills_while_saving": account.kills_while_saving,
                "kills_while_starting": sum(life.killed and life.reached == 0 for life in account.lives),
                "steps_done_again": sum(account.lost),
                "equal": account.comparison.equal,
                "difference": account.comparison.difference,
            }
        )
        verdict = account.comparison.difference or "equal"
        print(f"round {len(rounds)}: {done} of {kills} kills, {verdict}", file=sys.stderr, flush=True)
        if not account.kills:
            break
    return {
        "kills": done,
        "kills_while_saving": sum(one["kills_while_saving"] for one in rounds),
        "kills_while_starting": sum(one["kills_while_starting"] for one in rounds),
        "equal": done >= kills and all(one["equal"] for one in rounds),
        "rounds": rounds,
    }


def main() -> None:
    parser = options(
        MODULE, "Kills a training again and again; every round must end bit for bit as the untouched one.", seed=0
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--per-round", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=7)
    parser.add_argument("--keep", type=Path, help="leave the checkpoints there")
    given = parser.parse_args()
    sitting = Sitting(MODULE, None, seed=given.seed, packages=["torch", "numpy"])
    with tempfile.TemporaryDirectory(prefix="holdfast-campaign-") as place:
        account = campaign(
            kills=given.kills,
            per_round=given.per_round,
            steps=given.steps,
            save_every=given.save_every,
            seed=given.seed,
            place=given.keep or Path(place),
        )
    deliver(sitting.result(account), given.json)
    sys.exit(0 if account["equal"] else 12)


if __name__ == "__main__":
    main()
