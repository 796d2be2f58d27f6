"""What is recorded: each scenario is a short program over a repository, from a first save to a take-over.

A scenario is a function of a `Program`; `record` runs it and gives the log. Two families make many recordings out of
one program: `killed` breaks it off at one of its calls, `crashed` begins on the disk that a crash left; in both a
successor goes on from there.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from campaigns.persistence import Persistence
from campaigns.recorded_jobs import RUN, Job, Program
from campaigns.simulated_processes import Processes
from tenuto.crashpoints import armed
from tenuto.errors import TenutoError
from tenuto.maintenance import gc
from tenuto.model.ids import CheckpointId
from tenuto.store.contract import Store
from tenuto.store.local.syscalls import FileSystem
from tenuto.testing.checker import Checker
from tenuto.testing.layers import Fault, Faulty, Killed, Layer, Mortal
from tenuto.testing.recorder import Call, Mark, Step
from tenuto.testing.simulated_disk import BLOCK, DiskImage


class Short(Layer):
    """Every other write that is longer than a block writes less than it was asked to."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._turn = False

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if buffers[0].nbytes > BLOCK:
            self._turn = not self._turn
            if self._turn:
                return super().pwrite(descriptor, [buffers[0][: BLOCK + 512]], offset)
        return super().pwrite(descriptor, buffers, offset)


@dataclass(frozen=True)
class Seeded:
    """Where a bug is put in; nothing by default."""

    above: Callable[[FileSystem], FileSystem] = field(default=lambda inner: inner)
    around: Callable[[Store], Store] = field(default=lambda inner: inner)


NOTHING = Seeded()


@dataclass(frozen=True)
class Recording:
    """A finished recording: its name, the disk it started from (None: empty), and the log."""

    name: str
    base: DiskImage | None
    log: list[Step]
    opening: tuple[Mark, ...] = ()
    """What was known before the log begins."""
    start: int = 0
    """States of shorter prefixes belong to another recording."""
    replaying: Callable[[DiskImage | None], Persistence] = Persistence
    """What is promised of a crash."""
    checking: Callable[[], Checker] = Checker
    """What is expected of the disk that it leaves."""

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


def two_in_flight(program: Program) -> None:
    """The engine's own saves, the second captured before the first is written."""
    job = program.start()
    job.claim()
    job.save(10)
    job.save_in_flight(20, 30)
    job.release()


def successor(program: Program) -> None:
    """An attempt after one that left a save at each stage: begun, packs there, index there."""
    left: list[CheckpointId] = []
    for stages in (1, 2, 3):
        job = program.start()
        job.claim()
        for id in left:
            job.mark("closed", id)
        job.save(10 * stages)
        unfinished = job.saving(10 * stages + 5)
        left = [next(unfinished) for _ in range(stages)]
        job.die()
    last = program.start()
    last.claim()
    last.mark("closed", left[-1])
    last.save(40)


def take_over(program: Program) -> None:
    """The run is claimed over while its owner is in the middle of a save; the owner goes on, and must not commit."""
    for stage in (1, 2, 3):
        old = program.start()
        old.claim()
        old.save(10 * stage)
        unfinished = old.saving(10 * stage + 5)
        *_, id = (next(unfinished) for _ in range(stage))
        new = program.start()
        new.claim(takeover=True)
        new.mark("closed", id)
        old.act()
        try:
            for _ in unfinished:
                pass
        except TenutoError:
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
        except TenutoError:
            job.give_up()
    job.release()


def saved_by_engine(program: Program) -> None:
    job = program.start()
    job.claim()
    job.save_by_engine(10, 20, 30)
    job.release()


def rolled_back(program: Program) -> None:
    """A job that is restarted from an older step, and one after it that goes on from where that one came to."""
    first = program.start()
    first.claim()
    for step in (10, 20, 30):
        first.save(step)
    first.die()
    second = program.start()
    second.claim(parent=CheckpointId(RUN, 1, 10))
    second.save(15)
    second.die()
    third = program.start()
    third.claim()
    third.save(16)
    third.release()


def removed_by_hand(program: Program) -> None:
    """`rm`, `undelete`, and `rm` of another."""
    job = program.start()
    job.claim()
    ids = [job.save(step) for step in (10, 20, 30)]
    job.release()
    job.die()
    operator = program.start()
    for id in ids[:2]:
        operator.remove(id)
    operator.undelete(ids[0])
    operator.remove(ids[0])
    operator.undelete(ids[1])


def collected(program: Program) -> None:
    """Gc after a removal by hand and a save that a dead process left."""
    job = program.start()
    job.claim()
    ids = [job.save(step) for step in (10, 20)]
    unfinished = job.saving(30)
    next(unfinished)
    left = next(unfinished)
    job.die()
    operator = program.start()
    operator.remove(ids[0])
    operator.mark("closed", left)
    operator.collect(ids[0])


def retained(program: Program) -> None:
    """Retention after each save, also of what an earlier attempt left."""
    job = program.start()
    job.claim()
    for step in (10, 20, 30):
        job.save(step)
        job.retain(2)
    job.die()
    other = program.start()
    other.claim()
    for step in (40, 50):
        other.save(step)
        other.retain(1)
    other.release()


def resting_on_others(program: Program) -> None:
    """Saves that name packs of others, of which those are removed by retention and by hand, and gc in between."""
    job = program.start()
    job.claim()
    operator = program.start()

    def collect(step: int) -> None:
        if step == 30:
            job.retain(1)
        operator.act()
        operator.collect_now()

    _, second, _ = job.save_deduped(10, 20, 30, before=collect)
    job.retain(2)
    job.release()
    job.die()
    operator.act()
    operator.remove(second)
    operator.spare(second)
    operator.undelete(second)
    other = program.start()
    other.claim()
    other.save_deduped(40)
    other.save(50)
    other.retain(1)
    operator.act()
    operator.collect()


def removed_with_its_base(program: Program) -> None:
    """A checkpoint and what it rests on are removed; gc frees the one whose grace is over first, and may not."""
    job = program.start()
    job.claim()
    first, second = job.save_deduped(10, 20)
    job.save(30)
    job.release()
    job.die()
    operator = program.start()
    operator.remove(first)
    operator.remove(second)
    operator.spare(second)
    operator.undelete(second)
    operator.remove(second)


def under_other_names(program: Program) -> None:
    """Copies in another run, whose sources are removed, and another name for that run."""
    job = program.start()
    job.claim()
    ids = [job.save(step) for step in (10, 20)]
    job.release()
    job.die()
    operator = program.start()
    made = operator.copy("fork", *ids)
    operator.remove(ids[0])
    operator.collect_now()
    operator.rename("fork", "final", *made)


def resting_while_gc_runs(program: Program) -> None:
    """A save names the packs of a checkpoint that somebody has removed, while gc frees that."""
    job = program.start()
    job.claim()
    operator = program.start()

    plans: list[gc.GcPlan] = []

    def remove(step: int) -> None:
        if step == 30:
            job.act()
            job.save(20)
            operator.act()
            operator.remove(CheckpointId(RUN, 1, 10))
            plans.append(gc.plan_gc(operator.repo, now=True))

    def free() -> None:
        if plans:
            operator.act()
            operator.mark("gc begun", CheckpointId(RUN, 1, 10))
            gc.execute(operator.repo, plans.pop())
            job.act()

    with armed("pack durable, index not yet", free):
        job.save_deduped(10, 30, before=remove)
    job.release()


@dataclass(frozen=True)
class Scenario:
    """`faults`: strike beneath the recorder (the disk itself) or above it (a lost reply)."""

    name: str
    play: Callable[[Program], None]
    faults: Callable[[], list[Fault]] = field(default=list)
    replies: Callable[[], list[Fault]] = field(default=list)
    beneath: Callable[[FileSystem], FileSystem] = field(default=lambda disk: disk)
    elements: int = 900
    direct_above: int | None = None

    def program(self, seed: int, seeded: Seeded, base: DiskImage | None = None) -> Program:
        def above(inner: FileSystem) -> FileSystem:
            return seeded.above(Faulty(inner, *replies) if replies else inner)

        faults, replies = self.faults(), self.replies()
        return Program(
            seed,
            base=base,
            beneath=lambda disk: self.beneath(Faulty(disk, *faults) if faults else disk),
            above=above,
            around=seeded.around,
            elements=self.elements,
            direct_above=self.direct_above,
            faults=faults,
        )

    def record(self, seed: int, seeded: Seeded = NOTHING) -> Recording:
        program = self.program(seed, seeded)
        with program.running():
            self.play(program)
        return Recording(self.name, None, program.recorder.log)


def killed(scenario: Scenario, seed: int, after: int, seeded: Seeded = NOTHING) -> Recording | None:
    """`scenario` killed after `after` changing calls; a successor over the same running machine claims and saves. None
    if the program ends before."""
    program = scenario.program(seed, seeded)
    with program.running(), silent_threads():  # of the dead process too, which may end late
        before = program.recorder.log
        inner = program.above
        mortal: list[Mortal] = []

        def above(recorder: FileSystem) -> FileSystem:
            if not mortal:
                mortal.append(Mortal(recorder, after))
            return inner(mortal[0])

        program.above = above
        try:
            scenario.play(program)
        except Killed:
            pass
        else:
            return None
        start = len(before)
        program.above = seeded.above  # the faults were the dead process's
        for fault in program.faults:
            fault.times = 0
        program.processes.end_all()
        _goes_on(program)
    return Recording(f"{scenario.name}, killed after {after} calls", None, before, start=start)


@contextmanager
def silent_threads() -> Iterator[None]:
    """A thread that ends because its process is gone has nothing to report."""
    report = threading.excepthook
    hook = lambda told: None if told.exc_type is Killed else report(told)  # noqa: E731
    with mock.patch.object(threading, "excepthook", hook):
        yield


def crashed(base: DiskImage, opening: tuple[Mark, ...], seed: int, name: str, seeded: Seeded = NOTHING) -> Recording:
    """A successor on a disk that a crash left, of which `opening` tells what must be there: what it does is recorded in
    turn. Raises what the successor meets."""
    # A restart after a restart draws other names: a probe that could not be removed is still there.
    number = name.count(", restarted")
    seed += 7919 * number
    program = Program(seed, base=base, above=seeded.above, around=seeded.around, processes=Processes(first=1000))
    with program.running():
        _goes_on(program)
    return Recording(name, base, program.recorder.log, opening)


def _goes_on(program: Program) -> None:
    """A restarted job: it opens the place, restores, claims, closes what others left, saves."""
    job: Job = program.start()
    job.claim()
    job.mark_closed()
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


def _temporaries_stay() -> list[Fault]:
    return [Fault("unlink", errno.EIO, "step-", times=1 << 30)]


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("first save", first_save),
        Scenario("several saves", several_saves, elements=2500),
        Scenario("direct writes", several_saves, elements=3000, direct_above=4096),
        Scenario("saved by the engine", saved_by_engine, elements=3000, direct_above=4096),
        Scenario("two in flight", two_in_flight, elements=1500),
        Scenario("successor of unfinished saves", successor),
        Scenario("take-over during a save", take_over),
        Scenario("failed flush", failed_save, faults=_flushes_fail),
        Scenario("lost replies", several_saves, replies=_naming_replies),
        Scenario("temporaries stay", several_saves, replies=_temporaries_stay),
        Scenario("short writes", several_saves, beneath=Short),
        Scenario("rolled back", rolled_back),
        Scenario("removed by hand", removed_by_hand),
        Scenario("garbage collected", collected),
        Scenario("retention", retained),
        Scenario("resting on others", resting_on_others),
        Scenario("removed with its base", removed_with_its_base),
        Scenario("resting while gc runs", resting_while_gc_runs),
        Scenario("under other names", under_other_names),
    )
}
