"""A job of several ranks that is recorded: each a thread with a store of its own, over one disk and one board.

Ranks save through the engine as a training does; what a process does beside its training (signs of life, leases) is
left out, so that a recording is the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

from campaigns.rank_crashes.replicated import Replicated
from campaigns.rank_crashes.scheduler import KINDS, Background, Scheduler
from campaigns.rank_crashes.seats import Life, ScheduledKVStore, Seat
from campaigns.rank_crashes.state import rank_state, saved, whole_at
from campaigns.rank_crashes.threads import Lock, scheduled_copies
from campaigns.recorded_jobs import RUN, Faster, Program
from campaigns.simulated_processes import Processes, replacing
from tenuto.concurrency.deadlines import begun_within
from tenuto.engine.group.group_save import GroupCommit
from tenuto.engine.save import saver as saving
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.errors import CorruptionError, RanksError, StoreError, TenutoError
from tenuto.maintenance import replica_tidy, retention
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.ranks import agreement
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.background import Heartbeat
from tenuto.ranks.cleanup import ConvenedSessions, StaleSession
from tenuto.ranks.contract import KVStore as BoardContract
from tenuto.ranks.contract import Settings
from tenuto.ranks.heartbeats import StallGuard
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.ranks.session import Session
from tenuto.repo.format.manifest import Aborted
from tenuto.repo.format.small_records import decode_attempt, encode_attempt
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import Attempt, claim, joined
from tenuto.repo.ownership.owner_watch import OwnerWatch
from tenuto.repo.replicated import members
from tenuto.repo.replicated.places import places_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import Store
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import FileSystem
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.testing.checker import PLACE
from tenuto.testing.expectations import CLAIMED, CLAIMING, OPENED
from tenuto.testing.layers import Killed

DEADLINE_S: Final = 60.0
DEAD_AFTER_S: Final = 5.0
CLAIMS: Final = 4


@dataclass(frozen=True)
class Seeded:
    """Where a bug is put in, by rank; nothing by default."""

    above: Callable[[int, FileSystem], FileSystem] = field(default=lambda rank, inner: inner)
    around: Callable[[int, Store], Store] = field(default=lambda rank, inner: inner)


NOTHING: Final = Seeded()


class RankProgram(Program):
    """A recording of jobs of several ranks."""

    def __init__(
        self, seed: int, schedule: int, *, seeded: Seeded = NOTHING, replicated: Replicated | None = None, **more: Any
    ) -> None:
        """`kept`: where the repository lies in several places."""
        super().__init__(seed, **more)
        self.replicated = replicated
        self._nodes: dict[int, int] = {}
        """By process, where several are on one."""
        self._reached: dict[int, Callable[[str], Store]] = {}
        self.running_scheduler = Scheduler(0, "even", lambda actor: None)
        self.seeded = seeded
        self.schedule = schedule
        self.acknowledged: set[CheckpointId] = set()
        self.wholes: dict[CheckpointId, dict[str, Any]] = {}
        """What was to be saved, all of it."""
        self.died_at: int | None = None
        """How long the log was when the first rank died."""

    @contextmanager
    def running(self) -> Iterator[None]:
        with super().running(), self.scheduled():
            yield

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """Nothing of a process happens beside its training."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(agreement, "_SESSIONS", _PastOfEach(self.processes)))
            stack.enter_context(mock.patch.object(Heartbeat, "_run", lambda self: None))
            stack.enter_context(mock.patch.object(StallGuard, "_detect_gap", lambda self: None))
            stack.enter_context(mock.patch.object(Saver, "_start", _at_once))
            stack.enter_context(mock.patch.object(saving, "lower_priority", lambda: None))
            stack.enter_context(mock.patch.object(members, "open_store", self._found))
            stack.enter_context(scheduled_copies(lambda: self.running_scheduler))
            stack.enter_context(replacing(begun_within, self._begun_beside))
            yield

    def _begun_beside(self, seconds: float, what: str, work: Callable[[], Any], *, subject: str) -> Callable[[], Any]:
        """As `begun_within`, in turns."""
        scheduler = self.running_scheduler
        held = scheduler.in_background(work)
        return lambda: scheduler.done(held)

    def scheduler(self) -> Scheduler:
        def acts(actor: int) -> None:
            self.processes.current = actor
            self.recorder.node = self._nodes.get(actor, actor)

        self.running_scheduler = Scheduler(f"{self.seed} {self.schedule}", KINDS[self.schedule % len(KINDS)], acts)
        return self.running_scheduler

    def store(self, rank: int, seat: Seat, world: int) -> Store:
        """The store as this rank has it."""
        filesystem, replicated = self.seeded.above(rank, self.above(seat)), self.replicated

        def at(path: str) -> Store:
            local = LocalStore(path, filesystem=filesystem)
            local._directories._lock = Lock(self.running_scheduler)  # type: ignore[assignment]
            return self.seeded.around(rank, RetryingStore(local, Patience(wait_s=0.0)))

        if replicated is None:
            return at(PLACE)
        node = replicated.node(rank, world)

        def reached(path: str) -> Store:
            if not replicated.reaches(node, path):
                raise StoreError(f"{path} is on another node", subject=path)
            return at(path)

        self._reached[seat.actor] = reached
        if replicated.per_node:
            self._nodes[seat.actor] = self.recorder.node = 1 + node
        store = replicated.store(at, node)
        store.report = lambda message: None
        return store

    def _found(self, where: str) -> Store:
        """Another place of the repository, as whoever acts now reaches it."""
        return self._reached[self.processes.current](where)

    def acknowledge(self, id: CheckpointId) -> None:
        """Some rank was told that it is committed."""
        if id not in self.acknowledged:
            self.acknowledged.add(id)
            self.recorder.mark("acknowledged", id)


class _PastOfEach:
    """What each simulated process remembers of the sessions that it has convened: they all are this process."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._each: dict[int, ConvenedSessions] = {}

    @property
    def _own(self) -> ConvenedSessions:
        return self._each.setdefault(self._processes.current, ConvenedSessions())

    def stale(self, kv_store: BoardContract) -> list[StaleSession]:
        return self._own.stale(kv_store)

    def opened(self, session: Session) -> None:
        self._own.opened(session)

    def closed(self, session: Session) -> None:
        self._own.closed(session)


def _at_once(self: Saver, job: Any) -> None:
    """A save is written before its `save` returns; how it ended is in its handle."""
    try:
        self._run(job, None)
    except BaseException as error:
        if not job.save.done:
            raise AssertionError("a writer ended without telling") from error


@dataclass
class RankJob:
    """The processes of one job. `life`: of all of them; `lives`: of some. `board`: where they meet."""

    program: RankProgram
    world: int
    kv_store: InProcessKVStore = field(default_factory=InProcessKVStore)
    life: Life = field(default_factory=Life)
    lives: Mapping[int, Life] = field(default_factory=dict)
    stays: bool = False
    """Whether its processes live on when they have played."""

    def works(self, scheduler: Scheduler, play: Callable[[Member], None]) -> dict[int, Callable[[], None]]:
        """What each rank does, by the number of its process."""
        members = [Member(self, rank, scheduler) for rank in range(self.world)]
        return {member.actor: lambda member=member: member.live(play) for member in members}  # type: ignore[misc]

    def run(self, play: Callable[[Member], None]) -> None:
        """This job alone. Raises what a rank raised that no rank may."""
        scheduler = self.program.scheduler()
        scheduler.run(self.works(scheduler, play))
        raised(scheduler)


def raised(scheduler: Scheduler) -> None:
    for error in scheduler.raised.values():
        raise error


class Member:
    """One rank of a job."""

    def __init__(self, job: RankJob, rank: int, scheduler: Scheduler) -> None:
        program = job.program
        self.job, self.program, self.rank, self.world = job, program, rank, job.world
        self.actor = program.processes.start()
        self.seat = Seat(program.recorder, scheduler, self.actor, [job.life, job.lives.get(rank, Life())])
        self._settings = Settings(
            dead_after_s=DEAD_AFTER_S, answer_s=10.0, clock=scheduler.clock(self.actor, self.seat.living)
        )
        self.saver: Saver | None = None
        self._tidying: Background[int] | None = None

    @property
    def coordinates(self) -> bool:
        return self.rank == 0

    def live(self, play: Callable[[Member], None]) -> None:
        """Meets the others, opens the repository, plays. A rank that finds another one missing ends."""
        ranks = ThreadRanks(self.rank, self.world, ScheduledKVStore(self.job.kv_store, self.seat))
        try:
            with Agreement.open(ranks, {"run": RUN}, DEADLINE_S, self._settings) as met:
                self.agreement = met
                self.repo = self._opened(self.program.store(self.rank, self.seat, self.world))
                play(self)
        except Killed:
            self.job.stays = False
            if self.program.died_at is None:
                self.program.died_at = len(self.program.recorder.log)
            raise
        except RanksError:
            if self.program.died_at is None:
                raise
            # some other rank is gone, and with it this job
        finally:
            with suppress(Killed):
                self.tidied()
            if not self.job.stays:
                self.program.processes.end(self.actor)
            if self.saver is not None:
                self.saver.close()

    def _opened(self, store: Store) -> Repo:
        """The coordinator makes the repository, the others find it."""
        with self.agreement.round("place") as round:
            if self.coordinates:
                repo = Repo.create_or_open(store)
                self.program.recorder.mark(OPENED)
                round.broadcast(repo.id.encode())
                return repo
            round.receive(DEADLINE_S)
            repo = Repo.open(store)
            places = places_of(repo.store)
            if places is not None and places.declared.per_node:
                members.join(repo.store, repo.id)
            return repo

    def claim(self, *, takeover: bool = False, parent: CheckpointId | None = None) -> None:
        """As a Checkpointer does: where `latest` means another one by then, the run is claimed anew; not where `parent`
        says what to go on from."""
        round = self.agreement.round("claim")
        if self.coordinates:
            with round:
                self.attempt = self._claimed(takeover, parent)
                round.broadcast(encode_attempt(self.attempt.record, self.repo.id))
        else:
            with round:
                record = round.receive(DEADLINE_S)
            number = int(canonical_json.loads(record)["attempt"])
            self.attempt = joined(self.repo, decode_attempt(record, RUN, number, self.repo.id))
        together = GroupCommit(self.repo, self.agreement, deadline_s=DEADLINE_S)
        self.saver = Saver(self.repo, RUN, lasting=False, protocol=together)
        self.saver.attempt = self.attempt

    def _claimed(self, takeover: bool, chosen: CheckpointId | None) -> Attempt:
        mark = self.program.recorder.mark
        for _ in range(CLAIMS):
            parent = chosen or latest(self.repo, RUN)
            mark(CLAIMING, RUN, parent)
            watch = OwnerWatch(self.repo, RUN, clock=Faster().clock())
            attempt = claim(self.repo, RUN, parent, takeover=takeover, wait_s=0.0, observe=watch)
            mark(CLAIMED, (RUN, attempt.number), parent)
            if chosen or latest(self.repo, RUN, below=attempt.number) == parent:
                self.mark_closed()
                return attempt
            attempt.release()
        raise AssertionError("the run does not come to rest")

    def save(self, step: int) -> None:
        """Raises what the save failed with."""
        assert self.saver is not None
        id = CheckpointId(RUN, self.attempt.number, step)
        whole = whole_at(self.program.seed, self.attempt.number, step)
        if self.coordinates:
            self.program.wholes[id] = whole
            self.program.recorder.mark("begun", id, saved(whole, self.world))
        flattened = rank_state(whole, self.rank, self.world)
        handle = self.saver.save(flattened, step, wait=False, about=ManifestDetails(progress={"step": step}))
        self.seat.living()
        try:
            handle.wait()
        except TenutoError:
            if self.coordinates and isinstance(self.repo.mark(id), Aborted):
                self.program.recorder.mark("closed", id)
            raise
        self.program.acknowledge(id)

    def mark_closed(self) -> None:
        """Saves of earlier attempts that had not committed by now never will."""
        for number in self.repo.attempts(RUN):
            for step in self.repo.steps(RUN, number):
                id = CheckpointId(RUN, number, step)
                if self._is_closed(id):
                    self.program.recorder.mark("closed", id)

    def _is_closed(self, id: CheckpointId) -> bool:
        try:
            return isinstance(self.repo.mark(id), Aborted)
        except CorruptionError:
            return False  # a directory that somebody has copied

    def retain(self, newest: int) -> None:
        """Retention by the coordinator, while others go on, when what it has tidied is done."""
        if not self.coordinates:
            return
        self.tidied()
        mark = self.program.recorder.mark
        plan = retention.plan_retention(self.repo, self.attempt, keep.latest(newest))
        going = [id for id in plan.dropped if id != latest(self.repo, RUN)]
        for id in going:
            mark("removal begun", id)
        removed = retention.execute(self.repo, self.attempt, plan)
        for id in going:
            mark("removed" if id in removed else "kept", id)

    def tidy(self, step: int) -> None:
        """After a commit, beside what follows: each node's first rank sees to the places that it puts packs into."""
        self.tidied()
        if self.program.replicated is not None and self.program.replicated.leads(self.rank, self.world):
            newest = CheckpointId(RUN, self.attempt.number, step)
            self._tidying = self.program.running_scheduler.in_background(
                lambda: replica_tidy.tidy_replicas(self.repo, newest)
            )

    def tidied(self) -> None:
        """What was begun has ended. Where a disk fails that is a warning, and the next one tries again."""
        tidying, self._tidying = self._tidying, None
        try:
            if tidying is not None:
                self.program.running_scheduler.done(tidying)
        except Killed:
            self.seat.living()
        except StoreError:
            if not self.program.faults:
                raise

    def release(self) -> None:
        """On every rank: the end of training."""
        self.tidied()
        with self.agreement.round("end") as round:
            round.all_gather(b"", DEADLINE_S)
        self.attempt.release()
