"""Runs many kills, in rounds that are compared one by one: `python -m campaigns.kills --kills 1000`.

With `--memory` every step is kept in memory too. Processes kill themselves in every phase of its protocol, others flush
the memory meanwhile and are killed as well, and the state that each process resumed from is compared with the same step
of the untouched run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from campaigns.kills import supervised, totals
from campaigns.kills.rounds import Capture, Round, RoundPlan, RoundRunner, draw_everywhere, draw_round
from campaigns.result_file import ResultHeader, deliver, options
from tenuto.demo.processes import Life
from tenuto.demo.runner import load_framework, own_shared_memory
from tenuto.policy.encoding import PRESETS, Preset

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
    encodings: tuple[Preset, ...] = ("plain",)
    """Of the rounds, in turn."""

    @property
    def expected(self) -> int:
        """Kills in a round, those of flushes among them."""
        return self.per_round + self.per_round // 5 if self.memory else self.per_round

    def untouched(self) -> RoundPlan:
        # With memory the untouched run keeps every step there, so that events report the content of each.
        save_every = self.steps + 1 if self.memory else self.save_every
        return RoundPlan(self.steps, save_every, (), self.seed, self.memory)

    def round(self, number: int) -> RoundPlan:
        kills, steps, save_every, seed = self.per_round, self.steps, self.save_every, self.seed + number
        encoding = self.encodings[number % len(self.encodings)]
        if not self.memory:
            return replace(draw_round(kills=kills, steps=steps, save_every=save_every, seed=seed), encoding=encoding)
        capture: Capture = "fenced" if number % FENCED_EVERY == FENCED_EVERY - 1 else "eager"
        drawn = draw_everywhere(kills=kills, steps=steps, save_every=save_every, seed=seed, capture=capture)
        return replace(drawn, encoding=encoding)


def campaign(*, kills: int, shape: Shape, place: Path, workers: int = 1) -> dict[str, Any]:
    """Runs rounds until `kills` are done. Every round trains the same, and its last state must equal that of one
    untouched run in every bit; with memory, so must every state that a process of it resumed from."""
    load_framework()
    runner = RoundRunner(place)
    untouched = runner.untouched(shape.untouched())
    rounds: list[Round] = []
    done = 0
    while done < kills:
        more = -(-(kills - done) // shape.expected)
        numbers = range(len(rounds), len(rounds) + more)
        before = done
        for round in _rounds(partial(_round, runner, shape, untouched), numbers, workers):
            rounds.append(round)
            done += round.kills
            verdict = round.outcome.comparison.difference or "equal"
            print(f"round {len(rounds)}: {done} of {kills} kills, {verdict}", file=sys.stderr, flush=True)
        if done == before:
            break
    rows = [_row(round) for round in rounds]
    return {
        "kills": done,
        "kills_while_saving": sum(one["kills_while_saving"] for one in rows),
        "kills_while_starting": sum(one["kills_while_starting"] for one in rows),
        **(_with_memory(rounds) if shape.memory else {}),
        "equal": done >= kills and all(one["equal"] and not one.get("restarts_different") for one in rows),
        "rounds": rows,
    }


def _rounds(one: Callable[[int], Round], numbers: Iterable[int], workers: int) -> Iterator[Round]:
    """Yields the rounds in order. Workers are forked, as the children are, from a process that has run no framework."""
    if workers == 1:
        yield from map(one, numbers)
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(one, numbers)  # to its end: workers that are stopped would leave their children behind


def _round(runner: RoundRunner, shape: Shape, untouched: Life, number: int) -> Round:
    return runner.round(shape.round(number), untouched, run=f"killed-{number}")


def _row(round: Round) -> dict[str, Any]:
    outcome = round.outcome
    memory = outcome.plan.memory
    return {
        "seed": outcome.plan.seed,
        **({"capture": round.capture} if memory else {}),
        **({} if round.encoding == "plain" else {"encoding": round.encoding}),
        "kills": round.kills,
        "kills_while_saving": outcome.kills_while_saving,
        "kills_while_starting": sum(life.killed and life.reached == 0 for life in outcome.lives),
        "steps_done_again": sum(outcome.lost),
        "equal": outcome.comparison.equal,
        "difference": outcome.comparison.difference,
        **(totals.restarts(round) if memory else {}),
    }


def _with_memory(rounds: list[Round]) -> dict[str, Any]:
    restarts = [totals.restarts(round) for round in rounds]
    outcomes = [round.outcome for round in rounds]
    return {
        **{name: sum(one[name] for one in restarts) for name in restarts[0]},
        "steps_done_again": sum(sum(outcome.lost) for outcome in outcomes),
        "steps_done_again_from_the_store_alone": sum(sum(outcome.lost_from_disk) for outcome in outcomes),
        **totals.counts(rounds),
        "not_kept_in_memory": next((outcome.memory_off for outcome in outcomes if outcome.memory_off), None),
        "fenced": _fenced([round for round in rounds if round.capture == "fenced"]),
    }


def _fenced(rounds: list[Round]) -> dict[str, int]:
    """Counts the rounds whose training captures behind a fence; the other figures include them."""
    restarts = [totals.restarts(round) for round in rounds]
    equal, different = (sum(one[name] for one in restarts) for name in ("restarts_equal", "restarts_different"))
    kills = sum(round.kills for round in rounds)
    return {"rounds": len(rounds), "kills": kills, "restarts_equal": equal, "restarts_different": different}


def parser() -> argparse.ArgumentParser:
    found = options(
        MODULE, "Kills a training again and again; every round must end bit for bit as the untouched one.", seed=0
    )
    found.add_argument("--kills", type=int, default=1000)
    found.add_argument("--per-round", type=int, default=20, help="kills of the training in each round")
    found.add_argument("--steps", type=int, default=200)
    found.add_argument("--save-every", type=int, default=7)
    found.add_argument("--memory", action="store_true", help="keep every step in memory too, and kill there as well")
    found.add_argument("--encoding", nargs="+", choices=sorted(PRESETS), default=["plain"], help="of rounds, in turn")
    found.add_argument("--supervised", action="store_true", help="under `tenuto run`, which is killed now and then too")
    found.add_argument("--torch-every", type=int, default=10, help="with --supervised: a round in so many has torch")
    found.add_argument("--seconds", type=float, default=0.0, help="with --supervised: begin no round after so many")
    found.add_argument("--seed-bugs", action="store_true", help="with --supervised: put in bugs, which are to be found")
    found.add_argument("--workers", type=int, default=1, help="rounds at a time")
    found.add_argument("--keep", type=Path, help="leave the checkpoints there")
    return found


def _supervised(given: argparse.Namespace, header: ResultHeader) -> NoReturn:
    shape = supervised.Shape(given.per_round, given.steps, given.seed, given.torch_every)
    with tempfile.TemporaryDirectory(prefix="tenuto-campaign-") as place:
        where = given.keep or Path(place)
        where.mkdir(exist_ok=True)
        found = supervised.campaign(
            kills=given.kills, shape=shape, place=where, workers=given.workers, seconds=given.seconds
        )
        found["bugs"] = supervised.find_bugs(shape, where) if given.seed_bugs else []
    deliver(header.result(found), given.json)
    sys.exit(0 if found["equal"] and all(bug["caught"] for bug in found["bugs"]) else 12)


def main() -> None:
    given = parser().parse_args()
    result_header = ResultHeader(MODULE, None, seed=given.seed, packages=["torch", "numpy"])
    if given.supervised:
        _supervised(given, result_header)
    shape = Shape(given.per_round, given.steps, given.save_every, given.seed, given.memory, tuple(given.encoding))
    with tempfile.TemporaryDirectory(prefix="tenuto-campaign-") as place, own_shared_memory():
        result = campaign(kills=given.kills, shape=shape, place=given.keep or Path(place), workers=given.workers)
    deliver(result_header.result(result), given.json)
    unexplained = result["not_from_the_newest_sealed_state"]["otherwise"] if given.memory else []
    sys.exit(0 if result["equal"] and not unexplained else 12)
