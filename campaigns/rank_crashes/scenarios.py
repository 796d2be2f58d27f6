"""What is recorded: what jobs of two and three ranks do, whoever of them dies when, in an order that a seed draws."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from campaigns.persistence import Persistence
from campaigns.rank_crashes.jobs import NOTHING, Member, RankJob, RankProgram, Seeded, raised
from campaigns.rank_crashes.nodes import NodePersistence
from campaigns.rank_crashes.replicated import Replicated, ReplicatedChecker
from campaigns.rank_crashes.seats import Life
from campaigns.scenarios import Recording, silent_threads
from tenuto.errors import RanksError, SaveFailed, Superseded
from tenuto.ranks.kv.in_process import InProcessKVStore
from tenuto.store.local.syscalls import FileSystem
from tenuto.testing.checker import PLACE, Checker
from tenuto.testing.layers import Fault, Faulty
from tenuto.testing.recorder import Mark
from tenuto.testing.simulated_disk import DiskImage

DIES_AT: Final = 110
"""After so much the coordinator of the first job of `restarted` is in the middle of its second save."""


@dataclass(frozen=True)
class End:
    """Who dies, after so much of what changes disk or board: `rank`, or all of the job at once (None)."""

    after: int
    rank: int | None = None

    def __str__(self) -> str:
        return f"{'the job' if self.rank is None else f'rank {self.rank}'} dies after {self.after}"


@dataclass
class Stage:
    """A program and how its first job ends."""

    program: RankProgram
    world: int
    end: End | None = None
    life: Life = field(default_factory=Life)
    lives: dict[int, Life] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lives = {rank: Life() for rank in range(self.world)}
        if self.end is not None:
            (self.life if self.end.rank is None else self.lives[self.end.rank]).left = self.end.after

    def job(self, kv_store: InProcessKVStore | None = None) -> RankJob:
        """The job that `end` is about."""
        return RankJob(self.program, self.world, kv_store or InProcessKVStore(), self.life, self.lives)


def saves(stage: Stage) -> None:
    """Two saves of one structure: for the second nothing is planned."""

    def play(member: Member) -> None:
        member.claim()
        for step in (10, 20):
            member.save(step)
        member.release()

    stage.job().run(_job_ends(play))


def fails_on_one(stage: Stage) -> None:
    """A rank's disk fails; the save is given up by all of them, and the next one goes on."""

    def play(member: Member) -> None:
        member.claim()
        for step in (10, 20, 30):
            try:
                member.save(step)
            except SaveFailed:
                continue
        member.release()

    stage.job().run(_job_ends(play))


def retained(stage: Stage) -> None:
    """The coordinator removes what is not to be kept while others are ahead."""

    def play(member: Member) -> None:
        member.claim()
        for step in (10, 20, 30):
            member.save(step)
            member.retain(1)
            member.tidy(step)
        member.release()

    stage.job().run(_job_ends(play))


def taken_over(stage: Stage) -> None:
    """Two jobs that claim the run over each other and save on: each may come first wherever they meet."""

    def play(member: Member) -> None:
        member.claim(takeover=True)
        for step in (10, 20) if member.world == stage.world else (31,):
            member.save(step)
            member.tidy(step)
        member.release()

    scheduler = stage.program.scheduler()
    other = RankJob(stage.program, 5 - stage.world)
    scheduler.run(stage.job().works(scheduler, _superseded(play)) | other.works(scheduler, _superseded(play)))
    raised(scheduler)


def restarted(stage: Stage) -> None:
    """A job whose coordinator dies in each stage of a save, begun anew on another number of ranks, at the same board:
    the topics of the new one have the numbers of the old one's."""
    kv_store = InProcessKVStore()

    def play(member: Member) -> None:
        member.claim()
        for step in (10, 20):
            member.save(step)

    if stage.end is None:
        stage.lives[0].left = DIES_AT + stage.program.schedule % 24
    stage.job(kv_store).run(_job_ends(play))
    RankJob(stage.program, stage.world, kv_store).run(play)


def _job_ends(play: Callable[[Member], None]) -> Callable[[Member], None]:
    """A rank whose save fails because another is gone ends, as its training does."""

    def ending(member: Member) -> None:
        try:
            play(member)
        except (SaveFailed, RanksError):
            if member.program.died_at is None:
                raise

    return ending


def _superseded(play: Callable[[Member], None]) -> Callable[[Member], None]:
    def ending(member: Member) -> None:
        try:
            play(member)
        except (Superseded, SaveFailed, RanksError):
            pass  # or one of the objects that the new owner has freed

    return ending


def _second_fails(rank: int) -> list[Fault]:
    return [
        Fault("fsync", errno.EIO, f"step-00000020/rank-0000{rank}.safetensors"),
        Fault("fsync_directory", errno.EIO, "step-00000030", nth=4),
    ]


def _one_node_fails() -> list[Fault]:
    return [
        Fault("fsync", errno.EIO, "/data/node-2/runs/main/a0001/step-00000020/rank-00001.safetensors"),
        Fault("fsync_directory", errno.EIO, "/data/node-1/runs/main/a0001/step-00000030"),
    ]


def _one_of_two_fails() -> list[Fault]:
    """First the home, then the other place."""
    return [
        Fault("fsync", errno.EIO, f"{PLACE}/runs/main/a0001/step-00000010/rank-00000.safetensors"),
        Fault("fsync", errno.EIO, "/data/copy-1/runs/main/a0001/step-00000020/rank-00001.safetensors"),
        Fault("fsync_directory", errno.EIO, "/data/copy-1/runs/main/a0001/step-00000020", nth=3),
    ]


def _some_of_three_fail() -> list[Fault]:
    """One place, at two saves; then two of them at one."""
    return [
        Fault("fsync", errno.EIO, f"{PLACE}/runs/main/a0001/step-00000010/rank-00001.safetensors"),
        Fault("mkdir", errno.ENOSPC, "/data/copy-1/runs/main/a0001/step-00000020", times=1 << 30),
        Fault("fsync", errno.EIO, f"{PLACE}/runs/main/a0001/step-00000030/rank-00000.safetensors"),
        Fault("fsync", errno.EIO, "/data/copy-1/runs/main/a0001/step-00000030/rank-00000.safetensors"),
    ]


NODES: Final = Replicated(2, 1, per_node=True)


@dataclass(frozen=True)
class Scenario:
    name: str
    play: Callable[[Stage], None]
    world: int
    faults: Callable[[], list[Fault]] = list
    replicated: Replicated | None = None
    """How the repository lies in several places."""

    def record(
        self, seed: int, schedule: int = 0, *, end: End | None = None, seeded: Seeded = NOTHING, nodes: bool = False
    ) -> Recording | None:
        """The recording of one interleaving; None if everybody has come to the end alive, and `end` says that somebody
        dies. Jobs that lost somebody are followed by another, on fewer ranks."""
        faults = self.faults()

        def beneath(disk: FileSystem) -> FileSystem:
            return Faulty(disk, *faults) if faults else disk

        program = RankProgram(seed, schedule, seeded=seeded, replicated=self.replicated, beneath=beneath, faults=faults)
        stage = Stage(program, self.world, end)
        with program.running(), silent_threads():
            self.play(stage)
            if end is not None:
                if program.died_at is None:
                    return None
                program.processes.end_all()
                for fault in program.faults:
                    fault.times = 0
                follow(program, self._next_world(seed, self.world))
        name = f"{self.name}, schedule {schedule}{f', {end}' if end else ''}{', nodes' if nodes else ''}"
        replaying: Callable[[DiskImage | None], Persistence] = NodePersistence if nodes else Persistence
        start = (program.died_at or 0) if end is not None else 0
        return Recording(name, None, program.recorder.log, start=start, replaying=replaying, checking=self.checker)

    def checker(self) -> Checker:
        return Checker() if self.replicated is None else ReplicatedChecker(self.replicated)

    def restart(
        self, base: DiskImage, opening: tuple[Mark, ...], seed: int, name: str, seeded: Seeded = NOTHING
    ) -> Recording:
        """A job of one to three ranks on a disk that a crash left."""
        start = zlib.crc32(name.encode())
        program = RankProgram(seed + 7919, start, seeded=seeded, replicated=self.replicated, base=base)
        for _ in range(1000):
            program.processes.end(program.processes.start())  # numbers that no earlier process had
        with program.running():
            follow(program, self._next_world(seed, 3))
        return Recording(name, base, program.recorder.log, opening, checking=self.checker)

    def _next_world(self, seed: int, most: int) -> int:
        """Where nodes have directories of their own, each has a rank again: what lies there is its own to see to."""
        least = self.replicated.others if self.replicated is not None and self.replicated.per_node else 1
        return least + seed % (most + 1 - least)

    def length(self, seed: int, schedule: int = 0) -> tuple[int, list[int]]:
        """How much the job changes in all, and each of its ranks."""
        program = RankProgram(
            seed, schedule, replicated=self.replicated, beneath=lambda disk: Faulty(disk, *self.faults())
        )
        stage = Stage(program, self.world)
        with program.running(), silent_threads():
            self.play(stage)
        return stage.life.spent, [life.spent for life in stage.lives.values()]


def follow(program: RankProgram, world: int) -> None:
    """A restarted job of so many ranks: it opens the place, claims, closes what others left, saves."""

    def play(member: Member) -> None:
        member.claim()
        member.save(1000)
        member.tidy(1000)
        member.release()

    RankJob(program, world).run(play)


SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        Scenario("saves of two ranks", saves, 2),
        Scenario("saves of three ranks", saves, 3),
        Scenario("one rank's disk fails", fails_on_one, 3, lambda: _second_fails(1)),
        Scenario("the coordinator's disk fails", fails_on_one, 2, lambda: _second_fails(0)),
        Scenario("retention beside saves", retained, 2),
        Scenario("taken over by more ranks", taken_over, 2),
        Scenario("taken over by fewer ranks", taken_over, 3),
        Scenario("restarted at the same board", restarted, 2),
        Scenario("packs on their nodes", saves, 3, replicated=NODES),
        Scenario("packs on their nodes, one node's disk fails", fails_on_one, 2, _one_node_fails, NODES),
        Scenario("packs on their nodes, retention and tidying", retained, 3, replicated=NODES),
        Scenario("packs on their nodes, restarted", restarted, 2, replicated=NODES),
        Scenario("packs on their nodes, taken over", taken_over, 2, replicated=NODES),
        Scenario("packs on their nodes and in the home", retained, 2, replicated=Replicated(2, 2, per_node=True)),
        Scenario("each pack in two places", retained, 2, replicated=Replicated(1, 2)),
        Scenario("one of two places fails", fails_on_one, 2, _one_of_two_fails, Replicated(1, 1)),
        Scenario("two of three places", fails_on_one, 2, _some_of_three_fail, Replicated(2, 2)),
    )
}
