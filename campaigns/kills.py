"""Many kills, in rounds that are compared one by one: `python -m campaigns.kills --kills 1000`.

With `--memory` every step is kept in memory too, processes kill themselves in every place of its protocol, others flush
what is there meanwhile and are killed as well, and what each process went on from is compared with what that step was
in the untouched run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from campaigns import kill_totals
from campaigns.result_file import Sitting, deliver, options
from tenuto.demo.children import Life
from tenuto.demo.outcome import Account
from tenuto.demo.plan import SMALL, Plan, draw_everywhere, draw_plan
from tenuto.demo.runner import Runner, load_framework
from tenuto.demo.sharing import own_shared_memory

MODULE: Final = "campaigns.kills"
FENCED_EVERY: Final = 3
"""Of a campaign with memory every such round captures behind a fence."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What all rounds have in common. `per_round`: kills of the training in each."""

    per_round: int
    steps: int
    save_every: int
    seed: int
    memory: bool

    @property
    def expected(self) -> int:
        """Kills in a round, those of flushes among them."""
        return self.per_round + self.per_round // 5 if self.memory else self.per_round

    def untouched(self) -> Plan:
        # With memory the untouched run keeps every step there, so that the content of each is told.
        every = self.steps + 1 if self.memory else self.save_every
        seed = self.seed
        return draw_plan(kills=0, steps=self.steps, save_every=every, seed=seed, sizes=SMALL, memory=self.memory)

    def round(self, number: int) -> Plan:
        steps, save_every, seed = self.steps, self.save_every, self.seed + number
        if not self.memory:
            kills = self.per_round
            return draw_plan(kills=kills, steps=steps, save_every=save_every, seed=seed, starts=True, sizes=SMALL)
        return draw_everywhere(
            kills=self.per_round,
            steps=steps,
            save_every=save_every,
            seed=seed,
            sizes=SMALL,
            capture="fenced" if number % FENCED_EVERY == FENCED_EVERY - 1 else "eager",
        )


def campaign(*, kills: int, shape: Shape, place: Path, workers: int = 1) -> dict[str, Any]:
    """Rounds until `kills` are done. Every round trains the same and is compared with one untouched run in every bit;
    with memory, so is what each process of it went on from."""
    load_framework()
    runner = Runner(place)
    untouched = runner.untouched(shape.untouched())
    accounts: list[Account] = []
    done = 0
    while done < kills:
        more = -(-(kills - done) // shape.expected)
        numbers = range(len(accounts), len(accounts) + more)
        before = done
        for account in _rounds(partial(_round, runner, shape, untouched), numbers, workers):
            accounts.append(account)
            done += _kills(account)
            verdict = account.comparison.difference or "equal"
            print(f"round {len(accounts)}: {done} of {kills} kills, {verdict}", file=sys.stderr, flush=True)
        if done == before:
            break
    rows = [_row(account) for account in accounts]
    return {
        "kills": done,
        "kills_while_saving": sum(one["kills_while_saving"] for one in rows),
        "kills_while_starting": sum(one["kills_while_starting"] for one in rows),
        **(_with_memory(accounts) if shape.memory else {}),
        "equal": done >= kills and all(one["equal"] and not one.get("restarts_different") for one in rows),
        "rounds": rows,
    }


def _rounds(one: Any, numbers: Iterable[int], workers: int) -> Iterator[Account]:
    """Their accounts, in order. Workers are forked, as the children are, from a process that has run no framework."""
    if workers == 1:
        yield from map(one, numbers)
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(one, numbers)  # to its end: workers that are stopped would leave their children behind


def _round(runner: Runner, shape: Shape, untouched: Life, number: int) -> Account:
    return runner.killed(shape.round(number), untouched, run=f"killed-{number}")


def _kills(account: Account) -> int:
    return account.kills + sum(flush.killed for flush in account.flushes)


def _row(account: Account) -> dict[str, Any]:
    memory = account.plan.memory
    return {
        "seed": account.plan.seed,
        **({"capture": account.plan.capture} if memory else {}),
        "kills": _kills(account),
        "kills_while_saving": account.kills_while_saving,
        "kills_while_starting": sum(life.killed and life.reached == 0 for life in account.lives),
        "steps_done_again": sum(account.lost),
        "equal": account.comparison.equal,
        "difference": account.comparison.difference,
        **(kill_totals.restarts(account) if memory else {}),
    }


def _with_memory(accounts: list[Account]) -> dict[str, Any]:
    restarts = [kill_totals.restarts(account) for account in accounts]
    return {
        **{name: sum(one[name] for one in restarts) for name in restarts[0]},
        "steps_done_again": sum(sum(account.lost) for account in accounts),
        "steps_done_again_from_the_store_alone": sum(sum(account.lost_from_disk) for account in accounts),
        **kill_totals.counts(accounts),
        "not_kept_in_memory": next((account.memory_off for account in accounts if account.memory_off), None),
        "fenced": _fenced([account for account in accounts if account.plan.capture == "fenced"]),
    }


def _fenced(accounts: list[Account]) -> dict[str, int]:
    """Those of the rounds whose training captures behind a fence; they are counted above as well."""
    restarts = [kill_totals.restarts(account) for account in accounts]
    equal, different = (sum(one[name] for one in restarts) for name in ("restarts_equal", "restarts_different"))
    kills = sum(map(_kills, accounts))
    return {"rounds": len(accounts), "kills": kills, "restarts_equal": equal, "restarts_different": different}


def parser() -> argparse.ArgumentParser:
    found = options(
        MODULE, "Kills a training again and again; every round must end bit for bit as the untouched one.", seed=0
    )
    found.add_argument("--kills", type=int, default=1000)
    found.add_argument("--per-round", type=int, default=20, help="kills of the training in each round")
    found.add_argument("--steps", type=int, default=200)
    found.add_argument("--save-every", type=int, default=7)
    found.add_argument("--memory", action="store_true", help="keep every step in memory too, and kill there as well")
    found.add_argument("--workers", type=int, default=1, help="rounds at a time")
    found.add_argument("--keep", type=Path, help="leave the checkpoints there")
    return found


def main() -> None:
    given = parser().parse_args()
    sitting = Sitting(MODULE, None, seed=given.seed, packages=["torch", "numpy"])
    shape = Shape(given.per_round, given.steps, given.save_every, given.seed, given.memory)
    with tempfile.TemporaryDirectory(prefix="tenuto-campaign-") as place, own_shared_memory():
        account = campaign(kills=given.kills, shape=shape, place=given.keep or Path(place), workers=given.workers)
    deliver(sitting.result(account), given.json)
    unexplained = account["not_from_the_newest_sealed_state"]["otherwise"] if given.memory else []
    sys.exit(0 if account["equal"] and not unexplained else 12)


if __name__ == "__main__":
    main()
