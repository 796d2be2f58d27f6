"""One case of the faulty-disk campaign: a place, a call, a way to fail; the training, and what is found wrong."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

from campaigns.faulty_disk.faults import FLUSHES, WAYS, FailingDisk, Site, lost
from campaigns.faulty_disk.judge import judge_disk, judge_observed, judge_restart, judge_wait
from campaigns.faulty_disk.training import ELEMENTS, OWN_CALLS, Observed, State, Training
from campaigns.recorded_jobs import RUN, quiet, save_stages, state_at
from campaigns.scenarios import NOTHING, Seeded, silent_threads
from campaigns.simulated_processes import Processes
from tenuto.concurrency.worker_threads import IDLE, BackgroundWork, WorkerThreads
from tenuto.engine.save import handle
from tenuto.engine.save import saver as engine_save
from tenuto.model.ids import CheckpointId
from tenuto.repo.lineage import latest
from tenuto.repo.ownership import lease
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store
from tenuto.store.local import store, writer
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import FileSystem
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.testing.checker import PLACE
from tenuto.testing.simulated_disk import DiskImage, SimulatedDisk
from tenuto.training import exit_status, run_registry, save_admission, saves, training_session

PATIENCE_S = 1.5
"""How long each phase of a training may take with a call that hangs; its own deadlines are a small part of that."""
END_S = 60.0
"""How long what hung may take to end once it is let go."""
DEADLINE_S = 0.05
"""What deadlines of minutes are made to be, so that thousands of cases can be waited for."""
DEADLINES = (
    (save_admission, "BUSY_DEADLINE_S"),
    (saves, "NOTE_DEADLINE_S"),
    (training_session, "CLOSE_DEADLINE_S"),
    (handle, "STANDSTILL_S"),
    (engine_save, "CHECK_S"),
    (lease, "_RELEASE_S"),
)
OWN_PATIENCE_S = 0.3
"""How long a call of the caller's own is looked at before it counts as hung: nothing bounds it but the store."""
PLACES = ("empty", "used")
_WAYS = {way.name: way for way in WAYS}
_processes = Processes(first=5000)


@dataclass(frozen=True, slots=True)
class Case:
    """Call `number` of the training at `place` fails in the way called `way`. `comes_back`: what hangs returns when the
    training is over, instead of ending with its process."""

    place: str
    number: int
    way: str
    on_error: str = "warn"
    comes_back: bool = True


@dataclass(frozen=True)
class Base:
    """A disk to begin with, and what it holds."""

    image: DiskImage
    states: dict[CheckpointId, State]
    newest: CheckpointId | None


@dataclass
class Outcome:
    """`kind`: what came of it, in a word or two."""

    case: Case
    kind: str
    site: Site | None = None
    violations: list[str] = field(default_factory=list)


@contextmanager
def surroundings() -> Iterator[None]:
    """Simulated processes, no waiting between tries, small objects written past the page cache too."""
    logging.getLogger("stamina").setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.enter_context(quiet(_processes, 1))
        stack.enter_context(silent_threads())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of what still runs when a training is over; its own are written down
        for module in (store, writer):
            stack.enter_context(mock.patch.object(module, "WORTH_DIRECT", 8192))
        yield


@contextmanager
def _short_deadlines() -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in DEADLINES:
            stack.enter_context(mock.patch.object(module, name, DEADLINE_S))
        yield


def place_on(filesystem: FileSystem, seeded: Seeded = NOTHING) -> Store:
    return seeded.around(RetryingStore(LocalStore(PLACE, filesystem=seeded.above(filesystem)), Patience(wait_s=0.0)))


@cache
def base_of(place: str) -> Base:
    """Within `surroundings`."""
    disk = SimulatedDisk()
    disk.mkdir("/data")
    if place == "empty":
        return Base(disk.image(), {}, None)
    _processes.start()
    told = Training(place_on(disk), 1, "raise", with_upkeep=False).run()
    assert not told.raised and told.exit_failure is None, told.raised
    _cut_off(disk)
    repo = Repo.open(LocalStore(PLACE, filesystem=disk))
    states = {id: state for id, state in told.begun.items() if repo.exists(id)}
    return Base(disk.image(), states, latest(repo, RUN))


def _cut_off(disk: SimulatedDisk) -> None:
    """A process that claimed the run and died with its pack durable and its index not."""
    number = _processes.start()
    repo = Repo.open(place_on(disk))
    attempt = claim(repo, RUN, latest(repo, RUN))
    id = CheckpointId(RUN, attempt.number, 5)
    stages = save_stages(repo, attempt, id, state_at(2, 0, 5, elements=ELEMENTS), "5" * 32)
    next(stages)
    next(stages)
    _processes.end(number)


def run_case(case: Case, seeded: Seeded = NOTHING) -> Outcome:
    """Runs and judges one case. Within `surroundings`."""
    base = base_of(case.place)
    way = _WAYS[case.way] if case.number else None
    disk = SimulatedDisk.holding(base.image, direct_io=True)
    job = Training(place_on(disk), 3, case.on_error)
    failing = FailingDisk(disk, way, case.number, lambda: _phase(job))
    job.store = place_on(failing, seeded)
    process = _processes.start()
    stuck = None
    if way is not None and way.blocks:
        job.patience_s = 2 * DEADLINE_S
        with _short_deadlines():
            stuck = _run_apart(job, failing, case)
    else:
        job.run()
    told = job.told
    failing.healed = True
    _end(process)
    violations = [*judge_wait(told, failing, stuck)]
    if stuck is None or case.comes_back:
        violations += judge_observed(told, failing)
    image = lost(disk.image(), failing.losses)
    violations += judge_disk(SimulatedDisk.holding(image), base.states, base.newest, told)
    _processes.start()
    # What a failed flush left in doubt, and what is noted while a removal hangs, is gc's to free.
    in_doubt = failing.struck is not None and (failing.struck.call in FLUSHES or (way is not None and way.blocks))
    violations += judge_restart(SimulatedDisk.holding(image), 4, collect=in_doubt)
    _processes.end_all()
    return Outcome(case, _kind(told, failing, stuck), failing.struck, violations)


def sites(place: str) -> list[Site]:
    """Every call of the undisturbed training, in order. Within `surroundings`."""
    base = base_of(place)
    disk = SimulatedDisk.holding(base.image, direct_io=True)
    job = Training(place_on(disk), 3, "warn")
    failing = FailingDisk(disk, None, 0, lambda: _phase(job), listing=True)
    job.store = place_on(failing)
    process = _processes.start()
    told = job.run()
    assert not told.raised and told.exit_failure is None, told.raised
    _end(process)
    assert failing.sites is not None
    return failing.sites


def _phase(job: Training) -> str:
    return "retention" if threading.current_thread().name == "tenuto-retention" else job.phase


def _run_apart(job: Training, failing: FailingDisk, case: Case) -> str | None:
    """Runs the training in a thread. Returns the phase in which it is stuck in a call that hangs, or None. Afterwards
    what hangs comes back, or ends as its process does."""
    before = set(threading.enumerate())
    thread = threading.Thread(target=job.run, name="training", daemon=True)
    with _handed_out() as handed:
        thread.start()
        stuck = _stuck(job, failing, thread)
        failing.ended = not case.comes_back
        failing.healed = True
        failing.released.set()
        until = time.monotonic() + END_S
        thread.join(END_S)
        for work in handed:
            work.join(max(0.0, until - time.monotonic()))
        for left in set(threading.enumerate()) - before:
            _join(left, until)
    if thread.is_alive() or any(work.is_alive() for work in handed):
        raise AssertionError(f"{case}: what hung was let go, and something still runs")
    return stuck


@contextmanager
def _handed_out() -> Iterator[list[BackgroundWork]]:
    """What threads that are kept are given meanwhile: such a thread does not end with its work."""
    handed: list[BackgroundWork] = []
    hand = WorkerThreads.run

    def noted(self: WorkerThreads, given: BackgroundWork) -> None:
        handed.append(given)
        hand(self, given)

    with mock.patch.object(WorkerThreads, "run", noted):
        yield handed


def _join(left: threading.Thread, until: float) -> None:
    """Waits for a thread to end, or to be one that is kept without work."""
    while time.monotonic() < until and left.name != IDLE and (left.ident is None or left.is_alive()):
        if left.ident is None:
            time.sleep(0.001)  # another thread is just starting it
        else:
            left.join(0.005)


def _stuck(job: Training, failing: FailingDisk, thread: threading.Thread) -> str | None:
    """The phase in which the training does not get on, or None once it is over."""
    until, phases = time.monotonic() + PATIENCE_S, job.phases
    while time.monotonic() < until:
        thread.join(OWN_PATIENCE_S)
        if not thread.is_alive():
            return None
        if not failing.blocked or job.phases != phases:
            until, phases = time.monotonic() + PATIENCE_S, job.phases  # only slow, so far: the machine is busy
        elif job.phase in OWN_CALLS:
            return job.phase
    return job.phase


def _end(process: int) -> None:
    """The process is gone, with what it held."""
    _processes.end(process)
    run_registry._live.clear()
    exit_status._ending.failures.clear()
    exit_status._ending.closers.clear()


def _kind(told: Observed, disk: FailingDisk, stuck: str | None) -> str:
    """In words: what came of the fault."""
    if disk.struck is None:
        return "not reached"
    if stuck is not None:
        return "the caller waited for the store's own answer"
    if told.raised_in("construct", "restore", "claim"):
        return "refused before training, loudly"
    if told.exit_failure is not None:
        return "training went on, the exit status told"
    if told.raised_in("close"):
        return "training went on, close raised"
    if any(id not in told.committed for id in told.taken):
        return "one save failed, the next made it good"
    if told.raised:
        return "an operator's command failed, loudly"
    if told.warned:
        return "warned, nothing lost"
    return "borne, nothing to see"
