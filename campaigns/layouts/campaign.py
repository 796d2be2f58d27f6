"""Pairs of layouts, A and B, drawn at random: saved as A, restored as B and saved, restored as A again and saved.

After each restore every rank's tensors are compared, bit for bit, with what torch cuts out of the whole tensors that
the seed means; after each save one process reads the checkpoint as a whole and compares that. What A has saved last is
in every box and digest what it has saved first.
"""

from __future__ import annotations

import gc
import random
import shutil
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from campaigns.layouts import simulated
from campaigns.layouts.bugs import BUGS, Bug, seeded
from campaigns.layouts.judge import judge, same_line
from campaigns.layouts.processes import PROCESSES, Processes, Task
from campaigns.layouts.states import Pair, pairs
from tenuto.model.ids import CheckpointId
from tenuto.repo.lineage import walk
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

PHASES: Final = 3
CHUNKS: Final = (64, 96, 256, 1000, 256 << 10)
"""Bytes of a chunk: with small ones also these small tensors are shared out among their replicas."""
WORLDS: Final = tuple(range(1, PROCESSES + 1))


@dataclass
class Tally:
    """`restores`: of one rank's state each. `tensors`: parts compared on ranks, and whole tensors compared by one
    process."""

    pairs: int = 0
    restores: int = 0
    read_alone: int = 0
    round_trips: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    by_worlds: Counter[str] = field(default_factory=Counter)
    by_dtype: Counter[str] = field(default_factory=Counter)
    by_optimizer: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def counted(self, pair: Pair) -> None:
        self.pairs += 1
        self.by_worlds[" to ".join(map(str, pair.worlds))] += 1
        for side in (0, 1):
            self.by_kind.update(pair.kinds(side))
        if pair.trained is not None:
            self.by_optimizer[pair.trained.optimizer] += 1
            self.by_dtype[pair.trained.dtype] += 1
        else:
            self.by_dtype.update({leaf.dtype for leaf in pair.leaves})

    def summary(self) -> dict[str, Any]:
        return {
            "pairs": self.pairs,
            "restores_of_one_rank": self.restores,
            "checkpoints_read_by_one_process": self.read_alone,
            "round_trips_with_equal_boxes_and_digests": self.round_trips,
            "layouts_by_kind": dict(sorted(self.by_kind.items())),
            "pairs_by_optimizer": dict(sorted(self.by_optimizer.items())),
            "pairs_by_dtype": dict(sorted(self.by_dtype.items())),
            "pairs_by_ranks": dict(sorted(self.by_worlds.items())),
            "faults": self.faults,
        }


def over_processes(count: int, seed: int, place: Path, *, first: int = 0) -> Iterator[Tally]:
    """The tally after each of so many pairs, over four processes that live throughout."""
    tally = Tally()
    with Processes(place / "processes") as processes:
        for pair in islice(pairs(seed, processes=True, worlds=WORLDS), first, first + count):
            found = process_pair(processes, pair, place, tally)
            if found:
                tally.faults += [f"pair {pair.number} of seed {seed}, {pair.worlds}: {one}" for one in found]
                processes.restart()
            yield tally


def process_pair(processes: Processes, pair: Pair, place: Path, tally: Tally, bug: str = "") -> list[str]:
    """What was wrong with one pair; nothing more is tried of it then."""
    here = place / "pair"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    where = here / "checkpoints"
    _repository(where, pair)

    def phase(number: int) -> list[str]:
        return processes.do(Task(pair, number, str(here), bug))

    found = _phases(pair, where, phase, tally)
    shutil.rmtree(here, ignore_errors=True)
    return found


def over_threads(count: int, seed: int, *, worlds: tuple[int, ...] = simulated.WORLDS) -> Iterator[Tally]:
    """The same with simulated ranks."""
    tally = Tally()
    for pair in islice(pairs(seed, processes=False, worlds=worlds), count):
        found = thread_pair(pair, tally)
        tally.faults += [f"simulated pair {pair.number} of seed {seed}, {pair.worlds}: {one}" for one in found]
        yield tally


def thread_pair(pair: Pair, tally: Tally, bug: str = "") -> list[str]:
    store = simulated.store_of(pair)
    repo = _repository(store.url, pair)

    def phase(number: int) -> list[str]:
        with seeded(bug):
            return simulated.run_phase(pair, number, repo)

    found = _phases(pair, store.url, phase, tally)
    store.place.objects.clear()
    return found


def _repository(where: Any, pair: Pair) -> Repo:
    chunk = random.Random(f"{pair.truth} chunk").choice(CHUNKS)
    return Repo.create_or_open(open_store(where), chunk_bytes=chunk)


def _phases(pair: Pair, where: Any, run: Any, tally: Tally) -> list[str]:
    for number in range(PHASES):
        try:
            found = [f"phase {number}: {one}" for one in [*run(number), *judge(pair, where, number + 1)]]
        except Exception:  # noqa: BLE001 - a fault, whatever it is
            found = [f"phase {number}: {traceback.format_exc()}"]
        if found:
            return found
        tally.restores += pair.worlds[number % 2] if number else 0
        tally.read_alone += 1
    tally.counted(pair)
    repo = Repo.open(open_store(where))
    if not same_line(repo, _of_step(repo, 1), _of_step(repo, PHASES)):
        return ["what was saved last lies in other boxes, or has other digests, than what was saved first"]
    tally.round_trips += 1
    return []


def _of_step(repo: Repo, step: int) -> CheckpointId:
    return next(id for id in walk(repo, "main") if id.step == step)


# -- seeded bugs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hunted:
    """How many pairs it took until one came back wrong or was refused, and what was said of it."""

    name: str
    breaks: str
    caught: bool
    pairs: int
    how: str


def hunt_in_threads(bug: Bug, seed: int, limit: int = 40) -> Hunted:
    source = pairs(seed, processes=False, worlds=(2, 3, 4, 6))
    for number, pair in enumerate(islice(source, limit), 1):
        found = thread_pair(pair, Tally(), bug.name)
        if found:
            return Hunted(bug.name, bug.breaks, True, number, _last_line(found[0]))
    return Hunted(bug.name, bug.breaks, False, limit, "")


def hunt_in_processes(processes: Processes, bug: Bug, seed: int, place: Path, limit: int = 40) -> Hunted:
    source = (pair for pair in pairs(seed, processes=True, worlds=(4,)))
    for number, pair in enumerate(islice(source, limit), 1):
        found = process_pair(processes, pair, place, Tally(), bug.name)
        if found:
            processes.restart()
            return Hunted(bug.name, bug.breaks, True, number, _last_line(found[0]))
    return Hunted(bug.name, bug.breaks, False, limit, "")


def simulate(count: int, seed: int) -> Tally:
    """For a process of its own."""
    found = Tally()
    for found in over_threads(count, seed):  # noqa: B007 - the last one counts
        gc.collect()
    return found


def hunt_simulated(seed: int) -> list[Hunted]:
    """For a process of its own."""
    return [hunt_in_threads(bug, seed) for bug in BUGS if not bug.processes]


def hunt(seed: int, place: Path) -> Iterator[Hunted]:
    """Those that only processes show."""
    with Processes(place / "hunting") as processes:
        for bug in BUGS:
            if bug.processes:
                yield hunt_in_processes(processes, bug, seed, place)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if not line.startswith("  hint:")]
    return f"{lines[0].split(':')[0]}: {lines[-1]}"[:300] if len(lines) > 1 else lines[0][:300]
