"""What is recorded: each scenario is a short program over a repository, from a first save to a take-over.

A scenario is a function of a `Program`; `record` runs it and gives the log. Families (`killed`, `crashed twice`) make
many recordings out of one program: it is broken off at one of its calls, and a successor goes on from there.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.errors import HoldfastError
from holdfast.store.backends.filesystem import FileSystem
from holdfast.store.contract import Store
from holdfast.testing.disk_image import DiskImage
from holdfast.testing.jobs import Job, Program
from holdfast.testing.layers import Fault, Faulty, Layer
from holdfast.testing.recorder import Call, Mark, Step

R = TypeVar("R")


class Killed(BaseException):
    """The process is gone; nothing it would still do reaches the disk."""


class Mortal(Layer):
    """Lets `calls` changing calls through; the next one and everything after it kills the process."""

    CHANGING = frozenset(
        {"create", "pwrite", "reserve", "truncate", "fsync", "fsync_directory", "link", "rename_noreplace", "unlink"}
        | {"mkdir", "rmdir"}
    )

    def __init__(self, inner: FileSystem, calls: int) -> None:
        super().__init__(inner)
        self.left = calls

    def around(self, call: str, path: str, act: Callable[[], R]) -> R:
        if call in self.CHANGING:
            self.left -= 1
        if self.left < 0:
            raise Killed
        return act()


@dataclass(frozen=True)
class Seeded:
    """Where a bug is put in; nothing by default."""

    above: Callable[[FileSystem], FileSystem] = field(default=lambda inner: inner)
    around: Callable[[Store], Store] = field(default=lambda inner: inner)


@dataclass(frozen=True)
class Recording:
    """A finished recording: its name, the disk it started from (None: empty), and the log."""

    name: str
    base: DiskImage | None
    log: list[Step]
    opening: tuple[Mark, ...] = ()
    """What was known before the log begins."""

    @property
    def calls(self) -> int:
        return sum(isinstance(step, Call) for step in self.log)


def first_save(program: Program) -> None:
    job = program.start()
    job.claim()
    job.save(10)


def several_saves(program: Program) -> None:
    job = program.start()
    job.claim()
    for step in (10, 20, 30):
        job.save(step)
    job.release()


def successor(program: Program) -> None:
    """An attempt after one that left a save at each stage: begun, packs there, index there."""
    for stages in (1, 2, 3):
        job = program.start()
        job.claim()
        if stages > 1:
            job.mark("closed", id)
        job.save(10 * stages)
        unfinished = job.saving(10 * stages + 5)
        for _ in range(stages):
            id = next(unfinished)
        job.die()
    last = program.start()
    last.claim()
    last.mark("closed", id)
    last.save(40)


def take_over(program: Program) -> None:
    """The run is claimed over while its owner is in the middle of a save; the owner goes on, and must not commit."""
    for stage in (1, 2, 3):
        old = program.start()
        old.claim()
        old.save(10 * stage)
        unfinished = old.saving(10 * stage + 5)
        for _ in range(stage):
            id = next(unfinished)
        new = program.start()
        new.claim(takeover=True)
        new.mark("closed", id)
        old.act()
        try:
            for _ in unfinished:
                pass
        except HoldfastError:
            pass  # Superseded, or one of the objects that the new owner has freed
        old.die()
        new.act()
        new.save(10 * stage + 6)
        new.release()
        new.die()


def failed_save(program: Program) -> None:
    """Flushes fail while saves are written; each such save is given up, and the next one goes on."""
    job = program.start()
    job.claim()
    job.save(10)
    for step in (20, 30, 40, 50):
        try:
            job.save(step)
        except HoldfastError:
            job.give_up()
    job.release()


def lost_reply(program: Program) -> None:
    """The link that gives an object its name is made, and reported as failed; the retry finds it."""
    several_saves(program)


@dataclass(frozen=True)
class Scenario:
    """`faults`: strike beneath the recorder (the disk itself) or above it (a lost reply)."""

    name: str
    play: Callable[[Program], None]
    faults: Callable[[], list[Fault]] = field(default=list)
    replies: Callable[[], list[Fault]] = field(default=list)
    elements: int = 900
    direct_above: int | None = None

    def program(self, seed: int, seeded: Seeded, base: DiskImage | None = None) -> Program:
        def above(inner: FileSystem) -> FileSystem:
            return seeded.above(Faulty(inner, *replies) if replies else inner)

        faults, replies = self.faults(), self.replies()
        return Program(
            seed,
            base=base,
            beneath=lambda disk: Faulty(disk, *faults) if faults else disk,
            above=above,
            around=seeded.around,
            elements=self.elements,
            direct_above=self.direct_above,
        )

    def record(self, seed: int, seeded: Seeded = Seeded()) -> Recording:
        program = self.program(seed, seeded)
        with program.running():
            self.play(program)
        return Recording(self.name, None, program.recorder.log)


def killed(scenario: Scenario, seed: int, after: int, seeded: Seeded = Seeded()) -> Recording | None:
    """`scenario` killed after `after` changing calls of its first process; a successor over the same running machine
    claims and saves. None if the program ends before."""
    program = scenario.program(seed, seeded)
    with program.running():
        before = program.recorder.log
        inner = program.above
        mortal: list[Mortal] = []

        def above(recorder: FileSystem) -> FileSystem:
            mortal.append(Mortal(recorder, after))
            return inner(mortal[0])

        program.above = above
        try:
            scenario.play(program)
        except Killed:
            pass
        else:
            return None
        program.above = inner
        program.processes.end(program.processes.current)
        _goes_on(program)
    return Recording(f"{scenario.name}, killed after {after} calls", None, before)


def crashed(recording: Recording, image: DiskImage, opening: tuple[Mark, ...], seed: int, name: str) -> Recording:
    """A successor on the disk that a crash of `recording` left: what it does is recorded in turn."""
    program = Program(seed, base=image)
    with program.running():
        _goes_on(program)
    return Recording(f"{recording.name}, {name}", image, program.recorder.log, opening)


def _goes_on(program: Program) -> None:
    job: Job = program.start()
    job.claim()
    job.save(1000)
    job.release()


def _flushes_fail() -> list[Fault]:
    return [
        Fault("fsync", errno.EIO, "step-00000020/rank-00000.safetensors"),
        Fault("fsync", errno.EIO, "step-00000030/manifest"),
        Fault("fsync_directory", errno.EIO, "step-00000040", nth=4),
    ]


def _naming_replies() -> list[Fault]:
    return [Fault("link", errno.ESTALE, "step-00000020/", nth=nth, when="after") for nth in (1, 2, 3, 4)]


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("first save", first_save),
        Scenario("several saves", several_saves, elements=2500),
        Scenario("direct writes", several_saves, elements=3000, direct_above=4096),
        Scenario("successor of unfinished saves", successor),
        Scenario("take-over during a save", take_over),
        Scenario("failed flush", failed_save, faults=_flushes_fail),
        Scenario("lost replies", lost_reply, replies=_naming_replies),
    )
}


def recordings(seed: int, seeded: Seeded = Seeded()) -> Iterator[Recording]:
    """Each scenario's own recording."""
    for scenario in SCENARIOS.values():
        yield scenario.record(seed, seeded)
