"""Checks that a job can restart after a crash: it opens the place, claims the run, closes what was left, and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from campaigns.exploration import CrashState
from campaigns.recorded_jobs import quiet
from campaigns.scenarios import Recording, Seeded, crashed
from campaigns.simulated_processes import Processes
from tenuto.errors import TenutoError
from tenuto.maintenance import gc
from tenuto.model.ids import CheckpointId, parse_attempt, parse_step
from tenuto.repo.format.object_names import begin_name, is_pack, run_directory, trash_directory
from tenuto.repo.replicated.places import all_places
from tenuto.repo.replicated.replica import exists
from tenuto.repo.repository import Repo
from tenuto.store.contract import Entry
from tenuto.testing.checker import open_without
from tenuto.testing.expectations import CLAIMED, Expected
from tenuto.testing.recorder import Call, Mark
from tenuto.testing.simulated_disk import DiskImage, SimulatedDisk

Check = Callable[[SimulatedDisk, Expected], list[str]]
Restarted = Callable[[DiskImage, tuple[Mark, ...], int, str, Seeded], Recording]


def check_restart(
    recording: Recording, state: CrashState, check: Check, seed: int, seeded: Seeded, *, crashed: Restarted = crashed
) -> list[str]:
    """What is wrong after a restarted job, as `crashed` records it, has done its work on this disk."""
    try:
        successor = after_crash(recording, state, seed, seeded, crashed=crashed)
    except TenutoError as error:
        return [f"work cannot go on: {type(error).__name__}: {error}"]
    marks = [step for step in successor.log if isinstance(step, Mark)]
    expected = Expected.after((*successor.opening, *marks))
    problems = list(_reused(state.expected, marks))
    all_there, only_durable = ends(successor)
    for what, image in (("all on the disk", all_there), ("only what was flushed", only_durable)):
        problems += [
            f"after a restart ({what}): {problem}" for problem in check(SimulatedDisk.holding(image), expected)
        ]
    disk = SimulatedDisk.holding(all_there)
    if _relied_on_air(recording):
        collect(disk)
    problems += unfreed(disk, expected)
    return problems


def _relied_on_air(recording: Recording) -> bool:
    """Whether some process went by what a killed one had done and not flushed, or by what a failed flush left in doubt.

    It may then have taken a save for committed, or for freed, that the crash undid; as it has said that everything
    below it is closed, no claim looks there again. Space is lost until gc, and nothing else.
    """
    return recording.start > 0 or any(isinstance(step, Call) and step.failed for step in recording.log)


def collect(disk: SimulatedDisk) -> None:
    """Both visits of gc, without a grace."""
    with quiet(Processes(first=2000), seed=2000):
        repo = open_without(disk)
        for _ in range(2):
            gc.execute(repo, gc.plan_gc(repo, grace_s=0.0))


def after_crash(
    recording: Recording, state: CrashState, seed: int, seeded: Seeded, *, crashed: Restarted = crashed
) -> Recording:
    """The recording of a restarted job on that disk."""
    before = [step for step in recording.log[: state.prefix] if isinstance(step, Mark)]
    name = f"{recording.name}, crash after call {state.prefix - 1}, restarted"
    return crashed(state.image, (*recording.opening, *before), seed, name, seeded)


def ends(recording: Recording) -> tuple[DiskImage, DiskImage]:
    """The disk at the end if nothing is lost, and if everything is that can be."""
    persistence = recording.replaying(recording.base)
    for number, step in enumerate(recording.log):
        if isinstance(step, Call):
            persistence.replay(step, number)
    now = persistence.now()
    return now.image([variable.count - 1 for variable in now.variables]), now.image([0] * len(now.variables))


def _reused(before: Expected, marks: list[Mark]) -> Iterator[str]:
    for mark in marks:
        if mark.label == CLAIMED:
            assert isinstance(mark.subject, tuple)
            run, number = mark.subject
            if number <= before.attempts.get(run, 0):
                yield f"I4: attempt {number} of {run} was claimed twice"


def unfreed(disk: SimulatedDisk, expected: Expected) -> list[str]:
    """Objects of dead attempts' unfinished saves that nobody freed; and what lies in other places than the home, which
    knows nothing of it."""
    repo = open_without(disk)
    nobodys = [line for run in expected.runs for line in nobodys_in(repo, run)]
    return nobodys + [
        f"{entry.name} of an unfinished save was not freed"
        for run in expected.runs
        for attempt in repo.attempts(run)[:-1]
        for step in repo.steps(run, attempt)
        for entry in left_of(repo, CheckpointId(run, attempt, step))
    ]


def left_of(repo: Repo, id: CheckpointId) -> list[Entry]:
    """Everything but the mark, if the save has not committed and nobody can bring it back."""
    if repo.exists(id) or repo.store.children(trash_directory(id)).objects:
        return []
    return [entry for entry in repo.store.walk(id.directory) if entry.name != id.manifest]


def nobodys_in(repo: Repo, run: str) -> Iterator[str]:
    """Packs in a place, of a save that the home neither has nor has begun."""
    home, *others = all_places(repo.store)
    for place in others:
        for entry in place.walk(run_directory(run)):
            if not is_pack(entry.name):
                continue
            _, _, attempt, step, file = entry.name.split("/")
            id = CheckpointId(run, parse_attempt(attempt) or 0, parse_step(step) or 0)
            if not exists(home, begin_name(id)) and not repo.exists(id):
                yield f"{file} of {id} in {place.url}, of which the home knows nothing, was not freed"
