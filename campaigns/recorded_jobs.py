"""The program that is recorded: a small training job over a store, telling by marks what it was told.

Drives the repository as the engine does (begin, packs, index, commit), step by step in one thread, so that a
recording is the same each time and can be broken off anywhere.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

from campaigns.simulated_processes import Processes, simulated
from tenuto.codec.chunk_map import chunk_starts
from tenuto.codec.digest import digest
from tenuto.concurrency.deadlines import Clock
from tenuto.engine.save.handle import Save
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.errors import SaveFailed, TenutoError
from tenuto.maintenance import checkpoint_copy, gc, remove, rename_run, retention, undelete
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, Manifest, PackEntry
from tenuto.policy import keep
from tenuto.policy.encoding import PLAIN, Encoding
from tenuto.repo.commit import begin, commit, put_index
from tenuto.repo.format.manifest import Aborted, content_digest
from tenuto.repo.format.object_names import index_file
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import Attempt, claim
from tenuto.repo.ownership.lease import Lease
from tenuto.repo.ownership.owner_watch import OwnerWatch
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort, free
from tenuto.state.encode.flattener import flatten
from tenuto.store.contract import Bytes, Store
from tenuto.store.local import store, writer
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import FileSystem
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.testing.checker import PLACE
from tenuto.testing.expectations import CLAIMED, CLAIMING, OPENED, Saved
from tenuto.testing.layers import Fault, Killed
from tenuto.testing.recorder import Recorder
from tenuto.testing.simulated_disk import DiskImage, SimulatedDisk

RUN = "main"
DEDUPE = Encoding(codec=None, workers=1)


def state_at(seed: int, attempt: int, step: int, *, elements: int) -> dict[str, Any]:
    """Some training state that no other attempt or step has."""
    source = np.random.default_rng([seed, attempt, step])
    return {
        "model": {"weights": source.random(elements, np.float32), "bias": source.random(7)},
        "optimizer": {"moments": source.random((3, elements // 3), np.float32), "rate": float(source.random())},
        "step": step,
    }


def partly_frozen_at(seed: int, attempt: int, step: int, *, elements: int) -> dict[str, Any]:
    """Some training state of which the greater part is the same at every step."""
    return {**state_at(seed, attempt, step, elements=9), "frozen": state_at(seed, 0, 0, elements=elements)["model"]}


def saved(state: dict[str, Any]) -> Saved:
    found = flatten(state)
    leaves = {spec.path: _bytes(value) for spec, value in zip(found.specs, found.sources, strict=True)}
    return Saved(found.tree, leaves)


def _bytes(value: Any) -> bytes:
    return np.ascontiguousarray(value).tobytes()


class Faster:
    """A clock that advances by five seconds at every reading, so that nothing waits."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 5.0
        return self._now

    def clock(self) -> Clock:
        return Clock(self.now, lambda seconds: None)


@dataclass
class Program:
    """One recording. `beneath` lays file systems between recorder and disk (faults of the disk), `above` between the
    store and the recorder (a faulty store), `around` wraps the store; the last two are where bugs are seeded."""

    seed: int
    base: DiskImage | None = None
    beneath: Callable[[FileSystem], FileSystem] = field(default=lambda inner: inner)
    above: Callable[[FileSystem], FileSystem] = field(default=lambda inner: inner)
    around: Callable[[Store], Store] = field(default=lambda inner: inner)
    elements: int = 900
    direct_above: int | None = None
    """Objects from this size on are written past the page cache; None: as the store decides."""
    processes: Processes = field(default_factory=Processes)
    faults: list[Fault] = field(default_factory=list)
    """Those that `beneath` makes strike, so that they can be called off."""

    def __post_init__(self) -> None:
        disk = SimulatedDisk() if self.base is None else SimulatedDisk.holding(self.base, direct_io=True)
        self.recorder = Recorder(self.beneath(disk), base=self.base)
        if self.base is None:
            self.recorder.mkdir("/data")
            self.recorder.fsync_directory("/")
        self.source = random.Random(f"saves {self.seed}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything that a job does happens within this block."""
        with ExitStack() as stack:
            stack.enter_context(quiet(self.processes, self.seed))
            if self.direct_above is not None:
                for module in (store, writer):
                    stack.enter_context(mock.patch.object(module, "WORTH_DIRECT", self.direct_above))
            yield

    def start(self, layer: Callable[[FileSystem], FileSystem] | None = None) -> Job:
        """A new process, with a store of its own; `layer` is a file system of its own, nearest to the store."""
        filesystem = self.above(self.recorder)
        return Job(self, layer(filesystem) if layer else filesystem)


@contextmanager
def quiet(processes: Processes, seed: int) -> Iterator[None]:
    """Simulated processes, and leases that beat only when told."""
    with simulated(processes, seed), mock.patch.object(Lease, "_run", lambda lease, stop: None):
        yield


class Job:
    """One process of the program."""

    def __init__(self, program: Program, filesystem: FileSystem) -> None:
        self.program = program
        self.number = program.processes.start()
        self.mark = program.recorder.mark
        store = RetryingStore(LocalStore(PLACE, filesystem=filesystem), Patience(wait_s=0.0))
        self.repo = Repo.create_or_open(program.around(store))
        self.mark(OPENED)
        self.attempt: Attempt | None = None
        self.id: CheckpointId | None = None
        self.save_id = ""

    def act(self) -> None:
        """This process goes on, after another has acted."""
        self.program.processes.current = self.number

    def claim(self, run: str = RUN, *, takeover: bool = False, parent: CheckpointId | None = None) -> Attempt:
        """`parent`: what was restored; by default what `latest` means."""
        watch = OwnerWatch(self.repo, run, clock=Faster().clock())
        parent = parent or latest(self.repo, run)
        self.mark(CLAIMING, run, parent)
        self.attempt = claim(self.repo, run, parent, takeover=takeover, wait_s=0.0, observe=watch)
        self.mark(CLAIMED, (run, self.attempt.number), parent)
        return self.attempt

    def release(self) -> None:
        assert self.attempt is not None
        self.attempt.release()

    def die(self) -> None:
        """Killed: nothing is released, and from now on others see it."""
        self.program.processes.end(self.number)

    def save_by_engine(
        self,
        *steps: int,
        encoding: Encoding = PLAIN,
        state_of: Callable[..., dict[str, Any]] = state_at,
        before: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Saves as a training does: through the engine, its arena and its writing thread. `before` is called before
        each step's."""
        attempt = self.attempt
        assert attempt is not None
        saver = Saver(self.repo, attempt.run, encoding=encoding)
        saver.attempt = attempt
        try:
            for step in steps:
                before(step)
                self.act()
                id = CheckpointId(attempt.run, attempt.number, step)
                state = state_of(self.program.seed, attempt.number, step, elements=self.program.elements)
                self.mark("begun", id, saved(state))
                handle = Save(id, self.program.source.randbytes(16).hex())
                saver.save(
                    flatten(state), step, wait=False, about=ManifestDetails(progress={"step": step}), handle=handle
                )
                saver.join(None)
                if not handle.done:
                    raise Killed  # the writing thread is gone with its process, and nobody would ever tell
                try:
                    handle.wait()
                except SaveFailed as failure:
                    raise Killed if isinstance(failure.__cause__, Killed) else failure from failure
                self.mark("acknowledged", id)
        finally:
            saver.close()

    def save_deduped(self, *steps: int, before: Callable[[int], None] = lambda step: None) -> list[CheckpointId]:
        """The same of a state that hardly changes; what earlier saves have is named and not written again."""
        self.save_by_engine(*steps, encoding=DEDUPE, state_of=partly_frozen_at, before=before)
        assert self.attempt is not None
        return [CheckpointId(self.attempt.run, self.attempt.number, step) for step in steps]

    def save_in_flight(self, *steps: int) -> None:
        """The same with all of them in flight at once: none is written before all are captured, so that a recording is
        the same each time."""
        attempt = self.attempt
        assert attempt is not None
        captured = threading.Event()
        taken: list[Save] = []

        def report(save: Save) -> None:
            if save.committed:
                self.mark("acknowledged", save.id)

        saver = _Waiting(self.repo, attempt.run, in_flight=len(steps), on_end=report, captured=captured)
        saver.attempt = attempt
        try:
            for step in steps:
                id = CheckpointId(attempt.run, attempt.number, step)
                state = state_at(self.program.seed, attempt.number, step, elements=self.program.elements)
                self.mark("begun", id, saved(state))
                taken.append(Save(id, self.program.source.randbytes(16).hex()))
                saver.save(
                    flatten(state), step, wait=False, about=ManifestDetails(progress={"step": step}), handle=taken[-1]
                )
            captured.set()
            saver.join(None)
            for handle in taken:
                if handle.error is not None:
                    raise Killed if isinstance(handle.error.__cause__, Killed) else handle.error
        finally:
            captured.set()
            saver.close()

    def mark_closed(self) -> None:
        """After a claim over dead owners: saves of earlier attempts that had not committed by now never will."""
        assert self.attempt is not None
        run = self.attempt.run
        for number in self.repo.attempts(run):
            if number < self.attempt.number:
                for step in self.repo.steps(run, number):
                    id = CheckpointId(run, number, step)
                    if isinstance(self.repo.mark(id), Aborted):
                        self.mark("closed", id)

    def save(self, step: int) -> CheckpointId:
        work = self.saving(step)
        *_, id = work
        return id

    def saving(self, step: int) -> Iterator[CheckpointId]:
        """A save in stages: begun, packs put, index put, committed. It goes on when the next one is asked for."""
        attempt = self.attempt
        assert attempt is not None
        id = CheckpointId(attempt.run, attempt.number, step)
        state = state_at(self.program.seed, attempt.number, step, elements=self.program.elements)
        self.id, self.save_id = id, self.program.source.randbytes(16).hex()
        self.mark("begun", id, saved(state))
        yield from save_stages(self.repo, attempt, id, state, self.save_id)
        self.mark("acknowledged", id)

    def retain(self, newest: int) -> None:
        """Retention by this attempt. Whatever it plans, it may never remove what `latest` means (I7)."""
        assert self.attempt is not None
        self.act()
        plan = retention.plan_retention(self.repo, self.attempt, keep.latest(newest))
        going = [id for id in plan.dropped if id != latest(self.repo, self.attempt.run)]
        for id in going:
            self.mark("removal begun", id)
        removed = retention.execute(self.repo, self.attempt, plan)
        for id in going:
            self.mark("removed" if id in removed else "kept", id)

    def collect(self, *removed: CheckpointId) -> None:
        """Two visits of gc: the first marks, the second has no grace and frees `removed`, which lie in the trash."""
        gc.execute(self.repo, gc.plan_gc(self.repo))
        for id in removed:
            self.mark("gc begun", id)
        gc.execute(self.repo, gc.plan_gc(self.repo, grace_s=0.0))

    def spare(self, *spared: CheckpointId) -> None:
        """A visit of gc for which the grace of all but `spared` is over."""
        plan = gc.plan_gc(self.repo)
        going = [replace(found, due=found.id not in spared) for found in plan.garbage]
        gc.execute(self.repo, replace(plan, garbage=tuple(going)))

    def collect_now(self) -> None:
        """A visit of gc that waits for nothing. What it finds in the trash can be needed, or the last that is left."""
        gc.execute(self.repo, gc.plan_gc(self.repo, now=True, force=False))

    def remove(self, id: CheckpointId) -> None:
        """`rm`: while it is under way the checkpoint is in its place or in the trash, afterwards in the trash."""
        self.mark("rm begun", id)
        remove.execute(self.repo, remove.plan_remove(self.repo, [id], force=True))
        self.mark("rm done", id)

    def undelete(self, id: CheckpointId) -> None:
        self.mark("undelete begun", id)
        undelete.execute(self.repo, undelete.plan_undelete(self.repo, id))
        self.mark("undeleted", id)

    def copy(self, run: str, *ids: CheckpointId) -> list[CheckpointId]:
        """Copies of these into a new run of the repository, which share their data files."""
        made = [CheckpointId(run, 1, id.step) for id in ids]
        self.mark(CLAIMING, run, ids[0])
        self._copies_begun(dict(zip(ids, made, strict=True)))
        checkpoint_copy.execute(self.repo, checkpoint_copy.plan_copies(self.repo, ids, run=run))
        self.mark(CLAIMED, (run, 1), ids[0])
        for id in made:
            self.mark("acknowledged", id)
        return made

    def rename(self, run: str, new: str, *ids: CheckpointId) -> list[CheckpointId]:
        """Another name for a run of one attempt that has these checkpoints, the oldest first."""
        made = [CheckpointId(new, 1, id.step) for id in ids]
        self.mark(CLAIMING, new, ids[0])
        self._copies_begun(dict(zip(ids, made, strict=True)))
        for id in ids:
            self.mark("rm begun", id)
        rename_run.execute(self.repo, rename_run.plan_rename(self.repo, run, new))
        self.mark(CLAIMED, (new, 1), ids[0])
        for old, id in zip(ids, made, strict=True):
            self.mark("acknowledged", id)
            self.mark("rm done", old)
        return made

    def _copies_begun(self, made: dict[CheckpointId, CheckpointId]) -> None:
        for source, id in made.items():
            state = state_at(self.program.seed, 1, source.step, elements=self.program.elements)
            self.mark("begun", id, saved(state))

    def give_up(self) -> None:
        """Closes the save that failed, as the engine does."""
        assert self.id is not None
        if abort(self.repo, self.id, self.save_id):
            self.mark("closed", self.id)
            free(self.repo, self.id)


class _Waiting(Saver):
    """Writes nothing before all states are captured."""

    def __init__(self, *given: Any, captured: threading.Event, **named: Any) -> None:
        super().__init__(*given, **named)
        self._captured = captured

    def _write(self, job: Any) -> TenutoError | None:
        self._captured.wait()
        return super()._write(job)


def save_stages(
    repo: Repo, attempt: Attempt, id: CheckpointId, state: dict[str, Any], save_id: str
) -> Iterator[CheckpointId]:
    """Saves `state` as `id` in the engine's order, stopping after each stage."""
    found = flatten(state)
    layout = plan_layout(found.specs)
    image = np.frombuffer(mmap.mmap(-1, layout.nbytes), np.uint8)  # page aligned, as direct writes want it
    for row, source in enumerate(found.sources):
        start = int(layout.start[row])
        image[start : start + int(layout.length[row])] = np.frombuffer(_bytes(source), np.uint8)
    layout.stamp(image, save_id)
    memory: memoryview = image.data
    begin(attempt, id.step, save_id, [*(pack.name for pack in layout.packs), index_file(0)])
    yield id
    receipts = []
    for pack in layout.packs:
        content = Bytes(memory[pack.start : pack.start + pack.length])
        receipts.append(repo.store.put_if_absent(f"{id.directory}/{pack.name}", content, token=save_id))
    yield id
    starts = chunk_starts(layout.length, repo.chunk_bytes)
    rows = (memory[start : start + length] for start, length in zip(layout.start, layout.length, strict=True))
    chunks = (row[at : at + repo.chunk_bytes] for row in rows for at in range(0, len(row), repo.chunk_bytes))
    digests = np.frombuffer(b"".join(map(digest, chunks)), np.uint8).reshape(-1, 16)
    packs = tuple(
        PackEntry(pack.name, pack.length, pack.header_length, layout.header_digest(number, save_id))
        for number, pack in enumerate(layout.packs)
    )
    index = Index(
        0,
        save_id,
        repo.chunk_bytes,
        packs,
        found.specs,
        layout.pack,
        layout.offset,
        layout.length,
        starts,
        digests,
        found.private,
    )
    receipt, entry = put_index(repo, id, index)
    yield id
    manifest = Manifest(
        id=id,
        save_id=save_id,
        tree=found.tree,
        indexes=(entry,),
        content=content_digest(found.tree, found.specs, digests, chunk_bytes=repo.chunk_bytes, private=[found.private]),
        bytes=sum(pack.length for pack in layout.packs),
        leaves=len(found.specs),
        chunk_bytes=repo.chunk_bytes,
        parent=attempt.parent,
        progress={"step": id.step},
    )
    commit(repo, manifest, [*receipts, receipt])
    yield id
