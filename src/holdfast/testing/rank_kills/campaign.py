"""Many kills of single ranks, in rounds: each round is one training, killed again and again, begun anew on three ranks
or two, and compared bit for bit with the training that nothing disturbed."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.api.oneoff import load
from holdfast.errors import HoldfastError
from holdfast.repo.repository import Repo
from holdfast.store.registry import open_store
from holdfast.testing.rank_kills.processes import Death, Job, Plan, train
from holdfast.testing.rank_kills.training import untouched

LIFE_S: Final = 120.0
TIMEOUT_S: Final = 5.0
POINTS: Final = (
    "ranks met, repository not yet opened",
    "part restored, not yet voted for",
    "restore voted for, run not yet claimed",
    "claim heard, nothing saved yet",
    "attempt claimed",
    "structure told, plan not yet heard",
    "image captured",
    "ready told, not yet begun",
    "save begun",
    "begun, nothing written",
    "pack durable, index not yet",
    "packs and indexes durable, manifest not yet",
    "parts put and told, manifest not yet",
    "manifest durable, not yet announced",
    "commit heard, not yet reported",
    "manifest durable, not yet reported",
)
OWN: Final = {0: {"claim heard, nothing saved yet"}, 1: {"attempt claimed", "save begun", POINTS[13]}}
"""Points that the coordinator never comes by, and those that nobody else does."""


@dataclass
class Tally:
    """`phases`: kills by the place where the rank was. `found_out`: jobs whose other ranks were left alone, and ended
    by themselves, each naming the one that was killed; `faults`: whatever was not as it has to be."""

    kills: int = 0
    lives: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    ranks: Counter[str] = field(default_factory=Counter)
    worlds: Counter[str] = field(default_factory=Counter)
    found_out: int = 0
    slowest_s: float = 0.0
    rounds: int = 0
    equal: int = 0
    faults: list[str] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "lives": self.lives,
            "rounds": self.rounds,
            "rounds_equal_to_the_untouched_training": self.equal,
            "jobs_whose_other_ranks_found_out_by_themselves": self.found_out,
            "slowest_to_find_out_s": round(self.slowest_s, 2),
            "kills_by_rank": dict(sorted(self.ranks.items())),
            "kills_by_phase": dict(sorted(self.phases.items())),
            "jobs_by_number_of_ranks": dict(sorted(self.worlds.items())),
            "faults": self.faults,
        }


def campaign(kills: int, seed: int, place: Path, *, steps: int = 40, alone_every: int = 4) -> Iterator[Tally]:
    """The tally after each round, until so many ranks were killed. In each `alone_every`th life nobody ends the others
    when one is killed: they have to find out."""
    chance, tally = random.Random(seed), Tally()
    wanted = untouched(steps)
    while tally.kills < kills and tally.rounds < 4 * kills + 4:
        tally.rounds += 1
        here = place / str(tally.rounds)
        before = tally.kills
        while tally.kills < min(kills, before + 6):
            if not _life(_drawn(here, steps, chance), chance, tally, alone_every):
                shutil.rmtree(here)  # it came to its end: the next begins from nothing
        _finish(Plan(here, chance.choice((2, 3)), steps, timeout_s=60.0), wanted, tally)
        shutil.rmtree(here)
        yield tally


def _drawn(place: Path, steps: int, chance: random.Random) -> Plan:
    world = chance.choice((2, 3, 3))
    rank = chance.randrange(world)
    if chance.random() < 0.5:
        point = chance.choice([point for point in POINTS if point not in OWN[min(rank, 1)]])
        death = Death(rank, point, chance.choice((1, 1, 2, 3)))
    else:
        death = Death(rank, after_s=chance.uniform(0.0, 0.8))
    more = {"capture": chance.choice(("eager", "fenced"))}
    in_flight = chance.choice((1, 2))
    return Plan(place, world, steps, 2, TIMEOUT_S, 0.01, death, in_flight, more)


def _life(plan: Plan, chance: random.Random, tally: Tally, alone_every: int) -> bool:
    """Whether a rank was killed."""
    death, before = plan.death, _committed(plan)
    assert death is not None
    tally.lives += 1
    tally.worlds[str(plan.world)] += 1
    alone = tally.lives % alone_every == 0
    with Job(plan) as job:
        until = time.monotonic() + LIFE_S
        while not job.look() and death.rank not in job.ended and time.monotonic() < until:
            time.sleep(0.002)
        killed = death.rank in job.ended and job.ended[death.rank].status == -signal.SIGKILL
        if killed:
            tally.kills += 1
            tally.ranks["the coordinator" if death.rank == 0 else "another"] += 1
            tally.phases[death.point or f"at a moment: {_words(job.doing(death.rank))}"] += 1
        if killed and alone:
            _left_alone(job, tally)
        elif not killed and not job.wait(LIFE_S):
            tally.faults.append(f"{plan}: hangs, and nobody was killed")
    if not killed and {one.status for one in job.ended.values()} != {0}:
        tally.faults.append(f"{plan}: {job.ended}")
    lost = [each for each in before if each > max(_committed(plan), default=(0, 0))]
    if lost:
        tally.faults.append(f"{plan}: {lost} were committed and are gone")
    return killed


def _left_alone(job: Job, tally: Tally) -> None:
    death, since = job.plan.death, time.monotonic()
    assert death is not None
    if not job.wait(TIMEOUT_S + LIFE_S):
        tally.faults.append(f"{job.plan}: a rank hangs")
        return
    tally.found_out += 1
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - since)
    for rank, ended in job.ended.items():
        done = ended.status == 0 and ended.told.get("step") == job.plan.steps
        if rank != death.rank and not done and (ended.status <= 0 or death.rank not in ended.told.get("ranks", ())):
            tally.faults.append(f"{job.plan}: rank {rank} ended with {ended}")


def _finish(plan: Plan, wanted: dict[str, Any], tally: Tally) -> None:
    with Job(replace(plan, death=None), train) as job:
        if not job.wait(LIFE_S) or {one.status for one in job.ended.values()} != {0}:
            tally.faults.append(f"{plan}: did not come to its end: {job.ended}")
            return
    found = load(plan.where)
    if found.step == plan.steps and all(np.array_equal(found.state[name], wanted[name]) for name in wanted):
        tally.equal += 1
    else:
        tally.faults.append(f"{plan}: step {found.step} is not what the untouched training comes to")


def _committed(plan: Plan) -> list[tuple[int, int]]:
    try:
        repo = Repo.open(open_store(plan.where))
    except HoldfastError:
        return []
    return [(attempt, step) for attempt in repo.attempts("main") for step in repo.committed("main", attempt)]


def _words(phase: str) -> str:
    """Without numbers, so that they can be counted."""
    words = "".join(sign for sign in phase if not sign.isdigit())
    return " ".join(words.replace("main/a/", "a checkpoint").replace("(step )", "").split()) or "nothing reported"
