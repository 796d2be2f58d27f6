"""Trainings under torch, of a model that is replicated or cut over the ranks, killed: after every restore and every
step each rank notes what it holds, and all of it has to be what the training that nobody disturbs holds there."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from campaigns.rank_kills.kinds import Judged
from campaigns.rank_kills.processes import Job, Plan, Work
from campaigns.resume_ranks import cases, training
from campaigns.resume_ranks.cases import Case, Wrapper
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.policy import keep
from tenuto.repo.format.manifest import rank_digest
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

Line = Mapping[str, Any]
PATIENCE_S: Final = 120.0
GROUP_S: Final = 30.0
"""So long torch's own group waits for a rank that was killed before it came."""
WORLDS: Final = (2, 3)
CONTROLS: Final = (cases.BIT, cases.OPTIMIZER, cases.RANDOM, cases.DATA)
COMPARED: Final = {
    "digests": "parameters and optimizer",
    "marks": "random generators",
    "indices": "samples",
    "loss": "loss",
}


def work(plan: Plan, rank: int) -> Mapping[str, Any]:
    """What one rank does: `plan.more` has the case, the number of the life, and what is wrong in it."""
    more = dict(plan.more)
    case, life, wrong = more.pop("case"), more.pop("life"), more.pop("wrong")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{plan.place}/group-{life}",
        rank=rank,
        world_size=plan.world,
        timeout=timedelta(seconds=GROUP_S),
    )
    trail = plan.place / f"trail-{life:04}-{rank}.jsonl"
    more |= {"ranks_timeout": plan.timeout_s, "in_flight": plan.in_flight}
    step = training.train(plan, rank, case, trail, wrong=wrong, **more)
    dist.destroy_process_group()
    return {"step": step}


@dataclass(frozen=True)
class Untouched:
    """What each rank of the training that nobody disturbs has noted, by step; the digests of what it has saved."""

    steps: Sequence[Mapping[int, Line]]
    contents: Mapping[int, str]
    seconds: float


class OfTorch:
    """A model under DDP or FSDP2 over gloo: sums over ranks add up in another order where there are more or fewer, so
    all jobs of a training have as many."""

    save_every = cases.SAVE_EVERY
    step_s = 0.0
    timeout_s = 20.0
    points: tuple[str, ...] = ()
    own_errors = frozenset({"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError"})

    def __init__(self, wrapper: Wrapper, steps: int, place: Path, controls: Sequence[str] = CONTROLS) -> None:
        """`place`: where the untouched trainings are. `controls`: those of all that are tried with it."""
        self.name: str = wrapper
        self.steps = steps
        self.controls: tuple[str, ...] = tuple(controls)
        self.work: Work = work
        self._case = Case((), (), wrapper)
        self._place = place
        self._untouched: dict[int, Untouched] = {}

    def worlds(self, chance: random.Random) -> tuple[int, ...]:
        return (chance.choice(WORLDS),)

    def lasts_s(self, world: int) -> float:
        return self.untouched(world).seconds

    def more(self, life: int, wrong: str = "") -> dict[str, Any]:
        return {"case": self._case, "life": life, "wrong": wrong, "keep": keep.latest(2)}

    def untouched(self, world: int) -> Untouched:
        """Trained when it is asked for first."""
        if world not in self._untouched:
            more = self.more(0) | {"keep": keep.latest(self.steps)}
            plan = Plan(self._place / f"{self.name}-{world}", world, self.steps, timeout_s=PATIENCE_S, more=more)
            with Job(plan, self.work) as job:
                if not job.wait(PATIENCE_S) or {one.status for one in job.ended.values()} != {0}:
                    raise AssertionError(f"the training that nobody disturbs did not come to its end: {job.ended}")
            trails = [lines(path) for path in sorted(plan.place.glob("trail-*.jsonl"))]
            contents = {step: content for _, step, content in saved(plan.where, plan.world)}
            seconds = max(one.seconds for one in job.ended.values())
            steps = [{line["step"]: line for line in trail} for trail in trails]
            self._untouched[world] = Untouched(steps, contents, seconds)
        return self._untouched[world]

    def judge(self, plan: Plan) -> Judged:
        whole, faults, compared = self.untouched(plan.world), list[str](), Counter[str]()
        last: dict[int, Sequence[Line]] = {}
        for path in sorted(plan.place.glob("trail-*.jsonl")):
            life, rank = map(int, path.stem.split("-")[1:])
            last[rank] = trail = lines(path)
            faults += [f"life {life}, rank {rank}: {fault}" for fault in differences(trail, whole.steps[rank])]
            compared["restores of a rank"] += sum("life" in line for line in trail)
            compared["steps of a rank"] += sum("life" not in line for line in trail)
        ends = {rank: trail[-1]["step"] if trail else 0 for rank, trail in last.items()}
        if ends != dict.fromkeys(range(plan.world), self.steps):
            faults.append(f"the ranks have come to steps {ends}")
        for attempt, step, content in saved(plan.where, plan.world):
            compared["checkpoints"] += 1
            if content != whole.contents.get(step):
                faults.append(f"the checkpoint of step {step}, attempt {attempt}, has another content")
        return Judged(tuple(faults), compared)


def differences(trail: Sequence[Line], wanted: Mapping[int, Line]) -> Iterator[str]:
    """Where what a rank noted in one life is not what it noted in the training that nobody disturbed."""
    at = 0
    for line in trail:
        step = line["step"]
        if "life" not in line and step != at + 1:
            yield f"went on from step {at} with step {step}"
        at = step
        for name, words in COMPARED.items():
            if name in line and line[name] != wanted[step][name]:
                yield f"{'restored' if 'life' in line else 'after'} step {step} with other {words}"


def lines(path: Path) -> list[Line]:
    """What was noted whole: who is killed may leave half of a line."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def saved(where: Path, world: int) -> list[tuple[int, int, str]]:
    """Attempt and step of every committed checkpoint, and a digest of all that each rank has saved in it: tensors,
    plain values, and what is its own, its random generators and its place in the data."""
    repo = Repo.open(open_store(where))
    ids = [
        CheckpointId("main", attempt, step)
        for attempt in repo.attempts("main")
        for step in repo.committed("main", attempt)
    ]
    return [(id.attempt, id.step, _content(repo, repo.manifest(id), world)) for id in ids]


def _content(repo: Repo, manifest: Manifest, world: int) -> str:
    """Alike for any save of this state: the manifest's own content digest covers the table of parts, which names its
    save."""
    digest = hashlib.sha256(canonical_json.dumps(manifest.tree))
    for rank in range(world):
        digest.update(rank_digest(repo.index(manifest, rank)).encode("ascii"))
    return digest.hexdigest()
