"""Many kills, in rounds that are compared one by one: `python -m holdfast.demo.campaign --kills 1000`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from holdfast.demo.children import Life
from holdfast.demo.plan import SMALL, draw_plan
from holdfast.demo.runner import Runner, load_framework
from holdfast.image import slots
from holdfast.testing.campaigns import Sitting, deliver, options

MODULE: Final = "holdfast.demo.campaign"


def campaign(
    *, kills: int, per_round: int, steps: int, save_every: int, seed: int, place: Path, memory: bool = False
) -> dict[str, Any]:
    """Kills until `kills` are done (a round whose training ends early counts what it had). Every round trains the same
    and is compared with one untouched run in every bit; with `memory`, so is what each process of it went on from."""
    load_framework()
    runner = Runner(place)
    # With memory the untouched run keeps every step there, so that the content of each is told.
    own = steps + 1 if memory else save_every
    untouched = runner.untouched(draw_plan(kills=0, steps=steps, save_every=own, seed=seed, sizes=SMALL, memory=memory))
    rounds: list[dict[str, Any]] = []
    done = 0
    while done < kills:
        number = min(per_round, kills - done)
        plan = draw_plan(
            kills=number,
            steps=steps,
            save_every=save_every,
            seed=seed + len(rounds),
            starts=True,
            sizes=SMALL,
            memory=memory,
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
                **(_restarts(account.lives, untouched) if memory else {}),
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
        **({name: sum(one[name] for one in rounds) for name in RESTARTS} if memory else {}),
        "equal": done >= kills and all(one["equal"] and not one.get("restarts_different") for one in rounds),
        "rounds": rounds,
    }


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """Images lie in a directory of their own, so that nobody else on this machine clears them away meanwhile."""
    if not os.access(slots.SHARED_MEMORY, os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-campaign-", dir=slots.SHARED_MEMORY) as root:
        with mock.patch.object(slots, "SHARED_MEMORY", root):
            yield


RESTARTS: Final = ("restarts_from_memory", "restarts_from_store", "restarts_equal", "restarts_different")


def _restarts(lives: Sequence[Life], untouched: Life) -> dict[str, int]:
    """What the processes of a round went on from, compared with what its step was in the untouched run, by the digest
    of all that the state holds. The last step is not kept in memory, and is compared as a whole anyway."""
    began = [(life.adopted, *life.restored) for life in lives if life.restored is not None]
    known = [
        (adopted, content == untouched.remembered[step])
        for adopted, step, content in began
        if step in untouched.remembered
    ]
    memory, equal = sum(adopted for adopted, _ in known), sum(same for _, same in known)
    found = (memory, len(known) - memory, equal, len(known) - equal)
    return dict(zip(RESTARTS, found, strict=True))


def main() -> None:
    parser = options(
        MODULE, "Kills a training again and again; every round must end bit for bit as the untouched one.", seed=0
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--per-round", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="keep every step in memory too, and kill there as well")
    parser.add_argument("--keep", type=Path, help="leave the checkpoints there")
    given = parser.parse_args()
    sitting = Sitting(MODULE, None, seed=given.seed, packages=["torch", "numpy"])
    with tempfile.TemporaryDirectory(prefix="holdfast-campaign-") as place, own_shared_memory():
        account = campaign(
            kills=given.kills,
            per_round=given.per_round,
            steps=given.steps,
            save_every=given.save_every,
            seed=given.seed,
            place=given.keep or Path(place),
            memory=given.memory,
        )
    deliver(sitting.result(account), given.json)
    sys.exit(0 if account["equal"] else 12)


if __name__ == "__main__":
    main()
