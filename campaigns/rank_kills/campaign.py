"""Many kills of single ranks, in rounds: each round is one training, killed again and again, then brought to its end,
and compared bit for bit with the training that nothing disturbed."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from campaigns.rank_kills.kinds import Kind
from campaigns.rank_kills.processes import Death, Ended, Job, Plan
from tenuto.errors import TenutoError
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

LIFE_S: Final = 120.0
ROUND: Final = 6
"""Kills in one round, at most."""
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
    """Of one kind of training. `phases`: kills by the place where the rank was. `found_out`: jobs whose other ranks
    were left alone, and ended by themselves, each naming the one that was killed (or, `by_itself`, one was told by the
    training's own collectives); `compared`: what was, bit for bit; `controls`: whether what was broken in each was
    told; `faults`: whatever was not as it has to be."""

    kills: int = 0
    lives: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    ranks: Counter[str] = field(default_factory=Counter)
    worlds: Counter[str] = field(default_factory=Counter)
    found_out: int = 0
    by_itself: int = 0
    slowest_s: float = 0.0
    rounds: int = 0
    equal: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    controls: dict[str, bool] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def as_it_has_to_be(self) -> bool:
        return self.equal == self.rounds and not self.faults and all(self.controls.values())

    def summary(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "lives": self.lives,
            "rounds": self.rounds,
            "rounds_equal_to_the_untouched_training": self.equal,
            "compared_bit_for_bit": dict(self.compared),
            "controls_told": self.controls,
            "jobs_whose_other_ranks_found_out_by_themselves": self.found_out,
            "of_them_by_the_training_s_own_collectives": self.by_itself,
            "slowest_to_find_out_s": round(self.slowest_s, 2),
            "kills_by_rank": dict(sorted(self.ranks.items())),
            "kills_by_phase": dict(sorted(self.phases.items())),
            "jobs_by_number_of_ranks": dict(sorted(self.worlds.items())),
            "faults": self.faults,
        }


Tallies = Mapping[str, Tally]


def summary(tallies: Tallies) -> dict[str, Any]:
    """The sums over all kinds of training, and each by itself."""
    each = tallies.values()
    return {
        "kills": sum(tally.kills for tally in each),
        "rounds": sum(tally.rounds for tally in each),
        "rounds_equal_to_the_untouched_training": sum(tally.equal for tally in each),
        "controls": sum(len(tally.controls) for tally in each),
        "controls_told": sum(sum(tally.controls.values()) for tally in each),
        "faults": [f"{name}: {fault}" for name, tally in tallies.items() for fault in tally.faults],
        "trainings": {name: tally.summary() for name, tally in tallies.items()},
    }


def campaign(
    kills: int, seed: int, place: Path, kinds: Sequence[Kind], *, alone_every: int = 4, controls: bool = True
) -> Iterator[Tallies]:
    """The tallies after each round, until so many ranks were killed, in trainings of each kind about equally many. In
    each `alone_every`th life nobody ends the others when one is killed: they have to find out."""
    chance = random.Random(seed)
    tallies = {kind.name: Tally() for kind in kinds}
    for kind in kinds if controls else ():
        tallies[kind.name].controls |= controlled(kind, place / f"controls of {kind.name}")
    rounds = 0
    while (done := sum(tally.kills for tally in tallies.values())) < kills and rounds < 4 * kills + 4:
        rounds += 1
        kind = min(kinds, key=lambda kind: tallies[kind.name].kills)
        few = min(ROUND, -(-kills // len(kinds)) - tallies[kind.name].kills, kills - done)
        _round(kind, place / str(rounds), few, chance, tally=tallies[kind.name], alone_every=alone_every)
        yield tallies


def controlled(kind: Kind, place: Path) -> dict[str, bool]:
    """What can be broken in this training, and whether it is told where a job goes on with it, after another that was
    killed."""
    if not kind.controls:
        return {}
    death = Death(1, "commit heard, not yet reported")
    plan = Plan(place / "killed", 2, kind.steps, kind.save_every, LIFE_S, death=death, more=kind.more(0))
    with Job(plan, kind.work) as job:
        assert job.wait(LIFE_S, without=[0]), f"rank 1 of {plan} was to be killed"
    found = {}
    for number, wrong in enumerate(kind.controls):
        here = Path(shutil.copytree(plan.place, place / str(number)))
        with Job(replace(plan, place=here, death=None, more=kind.more(1, wrong)), kind.work) as job:
            ended = job.wait(LIFE_S) and {one.status for one in job.ended.values()} == {0}
        found[wrong] = ended and bool(kind.judge(job.plan).faults)
    shutil.rmtree(place)
    return found


def _round(kind: Kind, place: Path, kills: int, chance: random.Random, *, tally: Tally, alone_every: int) -> None:
    """One training, with so many kills, or fewer, where it comes to its end before."""
    worlds, before = kind.worlds(chance), tally.kills
    while tally.kills < before + kills and _life(kind, _drawn(kind, place, worlds, chance, tally), tally, alone_every):
        pass
    if tally.kills > before:
        tally.rounds += 1
        last = tally.lives + 1
        _finish(kind, Plan(place, chance.choice(worlds), kind.steps, timeout_s=LIFE_S, more=kind.more(last)), tally)
    shutil.rmtree(place, ignore_errors=True)


def _drawn(kind: Kind, place: Path, worlds: Sequence[int], chance: random.Random, tally: Tally) -> Plan:
    world = chance.choice(worlds)
    rank = chance.randrange(world)
    if chance.random() < 0.5:
        point = chance.choice([point for point in (*POINTS, *kind.points) if point not in OWN[min(rank, 1)]])
        death = Death(rank, point, chance.choice((1, 1, 2, 3)))
    else:
        death = Death(rank, after_s=chance.uniform(0.0, kind.lasts_s(world)))
    more = kind.more(tally.lives + 1) | {"capture": chance.choice(("eager", "fenced"))}
    in_flight = chance.choice((1, 2))
    return Plan(place, world, kind.steps, kind.save_every, kind.timeout_s, kind.step_s, death, in_flight, more)


def _life(kind: Kind, plan: Plan, tally: Tally, alone_every: int) -> bool:
    """Whether a rank was killed."""
    death, before = plan.death, _committed(plan)
    assert death is not None
    tally.lives += 1
    tally.worlds[str(plan.world)] += 1
    alone = tally.lives % alone_every == 0
    with Job(plan, kind.work) as job:
        until = time.monotonic() + LIFE_S
        while not job.poll() and death.rank not in job.ended and time.monotonic() < until:
            time.sleep(0.002)
        killed = death.rank in job.ended and job.ended[death.rank].status == -signal.SIGKILL
        if killed:
            tally.kills += 1
            tally.ranks["the coordinator" if death.rank == 0 else "another"] += 1
            tally.phases[death.point or f"at a moment: {_words(job.doing(death.rank))}"] += 1
        if killed and alone:
            _await_survivors(kind, job, tally)
        elif not killed and not job.wait(LIFE_S):
            tally.faults.append(f"{plan}: hangs, and nobody was killed")
    if not killed and {one.status for one in job.ended.values()} != {0}:
        tally.faults.append(f"{plan}: {job.ended}")
    lost = [each for each in before if each > max(_committed(plan), default=(0, 0))]
    if lost:
        tally.faults.append(f"{plan}: {lost} were committed and are gone")
    return killed


def _await_survivors(kind: Kind, job: Job, tally: Tally) -> None:
    death, since = job.plan.death, time.monotonic()
    assert death is not None
    if not job.wait(job.plan.timeout_s + LIFE_S):
        tally.faults.append(f"{job.plan}: a rank hangs")
        return
    tally.found_out += 1
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - since)
    by_itself = {rank for rank, ended in job.ended.items() if ended.told.get("error") in kind.own_errors}
    tally.by_itself += bool(by_itself)
    for rank, ended in job.ended.items():
        if rank != death.rank and not _knew(ended, rank, job.plan, by_itself):
            tally.faults.append(f"{job.plan}: rank {rank} ended with {ended}")


def _knew(ended: Ended, rank: int, plan: Plan, by_itself: set[int]) -> bool:
    """Whether a rank that was left alone had all that it needed, or named who was killed, or one that had found it out
    by itself and left; in the error that it raised, or in why its last save failed."""
    if ended.status == 0:
        return ended.told.get("step") == plan.steps
    assert plan.death is not None
    known = by_itself | {plan.death.rank}
    if ended.told.get("step") == plan.steps:  # it took all its steps; its status says that the last save failed
        return ended.status > 0 and any(
            f"rank {rank}" in why for rank in known for why in ended.told.get("unsaved", ())
        )
    return ended.status > 0 and (rank in by_itself or bool(known & set(ended.told.get("ranks", ()))))


def _finish(kind: Kind, plan: Plan, tally: Tally) -> None:
    with Job(plan, kind.work) as job:
        if not job.wait(LIFE_S) or {one.status for one in job.ended.values()} != {0}:
            tally.faults.append(f"{plan}: did not come to its end: {job.ended}")
            return
    judged = kind.judge(plan)
    tally.compared.update(judged.compared)
    tally.equal += not judged.faults
    tally.faults += [f"{plan}: {fault}" for fault in judged.faults]


def _committed(plan: Plan) -> list[tuple[int, int]]:
    try:
        repo = Repo.open(open_store(plan.where))
    except TenutoError:
        return []
    return [(attempt, step) for attempt in repo.attempts("main") for step in repo.committed("main", attempt)]


def _words(phase: str) -> str:
    """Without numbers, so that they can be counted."""
    words = "".join(sign for sign in phase if not sign.isdigit())
    return " ".join(words.replace("main/a/", "a checkpoint").replace("(step )", "").split()) or "nothing reported"
