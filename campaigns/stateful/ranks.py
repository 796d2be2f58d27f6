"""Random histories of jobs of one to four ranks, against the same model.

Jobs save together, lose a rank or all of them at any moment, are begun anew on other numbers of ranks, from `latest` or
from an older step, claim over jobs that live, and race with them; a person does with checkpoints what a person does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from campaigns.rank_crashes.jobs import Member, RankJob, RankProgram
from campaigns.rank_crashes.seats import Life, Seat
from campaigns.recorded_jobs import RUN
from campaigns.stateful.model import Model
from campaigns.stateful.operator_rules import OperatorRules, counted
from campaigns.stateful.world import World
from tenuto.errors import RunInUse, TenutoError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Receipt
from tenuto.repo.format.object_names import BEGIN, MANIFEST
from tenuto.store.contract import Content, Entry, Listing, Reader, Stat, Store
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.testing.expectations import CLAIMED
from tenuto.testing.recorder import Mark

MOST: Final = 400
"""About so much a job of four ranks changes with three saves."""
deaths = st.none() | st.tuples(st.sampled_from((None, 0, 1, 2, 3)), st.integers(4, MOST))
"""Nobody dies; or a rank, or all at once (None), after so much of what it changes."""


class SeatedStore(DelegatingStore):
    """One rank's store: its turn comes before every call, and with its life its calls end."""

    def __init__(self, inner: Store, seat: Seat) -> None:
        super().__init__(inner)
        self._seat = seat

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        self._seat.point(counts=True)
        return super().put_if_absent(name, content, token=token)

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        for name in names:
            self._seat.point(counts=True)
            super().delete([name])

    def get(self, name: str, *, limit: int) -> bytes:
        self._seat.point(counts=False)
        return super().get(name, limit=limit)

    def open(self, name: str) -> Reader:
        self._seat.point(counts=False)
        return super().open(name)

    def stat(self, name: str) -> Stat:
        self._seat.point(counts=False)
        return super().stat(name)

    def children(self, prefix: str, *, after: str = "") -> Listing:
        self._seat.point(counts=False)
        return super().children(prefix, after=after)

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        self._seat.point(counts=False)
        return super().walk(prefix, leftovers=leftovers)


class Histories(RankProgram):
    """Jobs over the store of a world."""

    def __init__(self, world: World, schedule: int) -> None:
        super().__init__(schedule, schedule, processes=world.processes)
        self._name = world.store.name
        self.groups: list[tuple[RankJob, list[int]]] = []
        """Its jobs, and their processes."""

    def store(self, rank: int, seat: Seat, world: int) -> Store:
        return SeatedStore(MemoryStore(self._name), seat)


@dataclass(frozen=True)
class Wanted:
    """What one job is to do."""

    world: int
    saves: int
    takeover: bool
    back: int
    keep: int
    end: str
    dies: tuple[int | None, int] | None


class RankModel(Model):
    """What belongs to one rank alone is compared where crash states are: here only that of all of them."""

    def check_state(self, id: CheckpointId, state: Any) -> None:
        super().check_state(id, {name: value for name, value in state.items() if name != "own"})


jobs = st.builds(
    Wanted,
    world=st.integers(1, 4),
    saves=st.integers(1, 3),
    takeover=st.booleans(),
    back=st.sampled_from((0, 0, 0, 1, 2)),
    keep=st.sampled_from((0, 0, 1, 2)),
    end=st.sampled_from(("close", "close", "stay")),
    dies=deaths,
)


class RankProduct(OperatorRules):
    """One history."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, list[int]] = {}
        """The processes of jobs that live on, by their attempt."""
        self.begun: dict[CheckpointId, dict[str, Any]] = {}

    def teardown(self) -> None:
        for actors in self.alive.values():
            for actor in actors:
                self.world.processes.end(actor)
        super().teardown()

    def _owner(self, run: str) -> int | None:
        top = self.model.highest(run)
        return top if top in self.alive else None

    def new_model(self) -> Model:
        return RankModel()

    # -- jobs --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.model.walk(RUN)) or not self.model.of_run(RUN))
    @rule(wanted=jobs, schedule=st.integers(0, 10**6))
    def train(self, wanted: Wanted, schedule: int) -> None:
        """One job, from its start to its end."""
        counted[f"job of {wanted.world}"] += 1
        owner = self._owner(RUN)
        raised = self._play([wanted], schedule)
        if any(isinstance(error, RunInUse) for error in raised):
            assert owner is not None and not wanted.takeover, "the run's owner is dead, or was to be claimed over"
            counted["run in use"] += 1
        elif raised:
            raise raised[0]

    @precondition(lambda self: any(self.model.walk(RUN)) or not self.model.of_run(RUN))
    @rule(first=jobs, second=jobs, schedule=st.integers(0, 10**6))
    def race(self, first: Wanted, second: Wanted, schedule: int) -> None:
        """Two jobs at once, each of which claims over whoever has the run. What either raises is its own business."""
        counted["race"] += 1
        for error in self._play([first, second], schedule):
            if not isinstance(error, TenutoError):
                raise error

    @precondition(lambda self: self.alive)
    @rule()
    def end(self) -> None:
        """A job that lived on is killed."""
        counted["kill"] += 1
        for actor in self.alive.pop(max(self.alive)):
            self.world.processes.end(actor)

    def _play(self, all_wanted: Sequence[Wanted], schedule: int) -> list[BaseException]:
        program = Histories(self.world, schedule)
        several = len(all_wanted) > 1
        line = [id for id in self.model.walk(RUN)]
        works: dict[int, Callable[[], None]] = {}
        scheduler = program.scheduler()
        for number, wanted in enumerate(all_wanted):
            job = self._job(program, wanted)
            before = set(works)
            works |= job.works(
                scheduler, self._playing(wanted, line, 10 * number, claims_over=wanted.takeover or several)
            )
            program.groups.append((job, sorted(set(works) - before)))
        with program.scheduled():
            scheduler.run(works)
        self._advance_model(program)
        return list(scheduler.raised.values()) if program.died_at is None else []

    def _job(self, program: Histories, wanted: Wanted) -> RankJob:
        job = RankJob(program, wanted.world, stays=wanted.end == "stay")
        if wanted.dies is not None:
            rank, after = wanted.dies
            counted["a rank dies" if rank is not None else "a job dies"] += 1
            if rank is None:
                job.life = Life(after)
            else:
                job.lives = {rank % wanted.world: Life(after // wanted.world)}
        return job

    def _playing(self, wanted: Wanted, line: list[CheckpointId], ahead: int, *, claims_over: bool) -> Any:
        parent = line[wanted.back] if 0 < wanted.back < len(line) else None
        base = (parent or line[0]).step if line else 0

        def play(member: Member) -> None:
            member.claim(takeover=claims_over, parent=parent)
            for count in range(wanted.saves):
                member.save(base + ahead + count + 1)
                if wanted.keep:
                    member.retain(wanted.keep)
            if wanted.end == "close":
                member.release()

        return play

    def _advance_model(self, program: Histories) -> None:
        """What the jobs were told, in its order, and what they could not be told any more."""
        self.world.operator()
        lived, before = bool(self.alive), self.model.highest(RUN)
        self.begun |= program.wholes
        going: set[CheckpointId] = set()
        for mark in [step for step in program.recorder.log if isinstance(step, Mark)]:
            if mark.label == "removal begun":
                assert isinstance(mark.subject, CheckpointId)
                going.add(mark.subject)
            elif mark.label == CLAIMED:
                assert isinstance(mark.subject, tuple) and isinstance(mark.detail, CheckpointId | None)
                assert mark.subject[1] > before, "an attempt's number is used again"
                self.model.claim(RUN, mark.subject[1], mark.detail)
            elif mark.label == "acknowledged":
                assert isinstance(mark.subject, CheckpointId)
                self.model.commit(mark.subject, self.begun[mark.subject])
            elif mark.label == "removed":
                assert isinstance(mark.subject, CheckpointId)
                counted["retention"] += 1
                assert mark.subject not in self.model.pins.values(), "I7"
                self._removed(mark.subject)
        for number in self.world.repo.attempts(RUN):
            record = self.world.repo.find_attempt(RUN, number)
            if record is not None and (RUN, number) not in self.model.parents:
                # Its job died in the claim, or what it was to go on from was gone by then: the attempt stays.
                counted["a claim that nobody was told of"] += 1
                assert number > before, "an attempt's number is used again"
                self.model.claim(RUN, number, record.parent)
        self.model.removing |= going
        for id in [id for id in going & self.model.committed.keys() if not self.world.repo.exists(id)]:
            counted["death in a removal"] += 1
            self._removed(id)
        for id, whole in program.wholes.items():
            if id not in self.model.committed and self.world.repo.exists(id):
                counted["committed, and nobody was told"] += 1
                self.model.commit(id, whole)
        self._left(program, lived, going)

    def _left(self, program: Histories, lived: bool, going: set[CheckpointId]) -> None:
        """Unfinished saves, and whose processes live. `going`: what these jobs began to remove, of which one that was
        cut short looks like an unfinished save."""
        for job, actors in program.groups:
            marks = [step for step in program.recorder.log if isinstance(step, Mark) and step.label == CLAIMED]
            claimed = [mark.subject[1] for mark in marks if isinstance(mark.subject, tuple)]
            if job.stays and claimed and len(program.groups) == 1:
                self.alive[max(claimed)] = actors
            else:
                for actor in actors:
                    self.world.processes.end(actor)
        there = {id: self.world.repo.store.children(id.directory).objects for id in self.begun}
        held = {id for id, objects in there.items() if BEGIN in objects and MANIFEST not in objects}
        held -= self.model.trash.keys()
        for id in [id for id in self.model.unfinished if id not in held]:
            self.model._drop(id)
        self.model.unfinished |= dict.fromkeys(sorted(held))
        if not lived and len(program.groups) == 1 and program.wholes:
            newest = max(id.attempt for id in program.wholes)
            left = [id for id in held - going if id.attempt < newest]
            assert not left, f"{left} of dead jobs were not closed by the claim after them"
