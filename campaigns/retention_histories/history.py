"""One random history of retention: each step is drawn, done in a small world, and told to the oracle."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

from campaigns.retention_histories import oracle as oracles
from campaigns.retention_histories.oracle import Judge, Known, Oracle
from campaigns.retention_histories.world import INDEX, PACK, World
from tenuto.crashpoints import armed
from tenuto.errors import CheckpointNotFound
from tenuto.maintenance import retention
from tenuto.maintenance.census import mark_directory
from tenuto.model.canonical_json import tag_number
from tenuto.model.ids import CheckpointId
from tenuto.model.records import ROLLBACK
from tenuto.policy import keep
from tenuto.policy.keep import CheckpointFacts, KeepPolicy, Opinion
from tenuto.repo.catalog import Catalog
from tenuto.repo.format import object_names
from tenuto.repo.lineage import walk
from tenuto.repo.notes import add_note
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.refs import Kind, clear_ref, put_ref
from tenuto.repo.unfinished import abort, free

RUNS = ("main", "fork")
HOUR_S = 3600.0
TOMBSTONES_PUT = "tombstone put, manifest still there"


class KeepNothing(KeepPolicy):
    """What stays is what I7 keeps."""

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        return [Opinion(False, "nothing is kept") for _ in history]

    def __repr__(self) -> str:
        return "nothing"


class Broken(Exception):
    """A rule was broken; says which, and in what history."""


@dataclass(slots=True)
class Counts:
    histories: int = 0
    retentions: int = 0
    judged: int = 0
    removed: int = 0
    protected: int = 0
    """Checkpoints that the policy let go of and I7 kept."""
    trashed: int = 0
    """Checkpoints of lines left behind that went into the trash."""
    superseded: int = 0
    raced: int = 0
    doings: dict[str, int] = field(default_factory=dict)

    def add(self, other: Counts) -> None:
        for one in fields(self):
            if one.name != "doings":
                setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        for name, number in other.doings.items():
            self.doings[name] = self.doings.get(name, 0) + number


class History:
    """One random history."""

    def __init__(self, seed: str, counts: Counts) -> None:
        self.random = random.Random(seed)
        self.counts = counts
        self.world = World(self.random)
        self.oracle = Oracle()
        self.attempts: dict[str, list[Attempt]] = {run: [] for run in RUNS}
        """Those that could claim, lowest first; the highest is live if nothing was claimed above it."""
        self.open: list[CheckpointId] = []
        self.clock_s = 1.9e9
        self.step = 0
        self.copies = 0
        self.catalog: Catalog | None = None
        self.processes = random.Random(f"{seed}/processes")
        self.rollbacks = random.Random(f"{seed}/rollbacks")
        self.remembers = self.processes.random() < 0.7
        self.begin_process()

    def begin_process(self) -> None:
        """Most histories keep one catalog over its rounds of retention, as a process that trains does."""
        self.catalog = self.world.repo.observer = Catalog() if self.remembers else None
        self.oracle.unnoticed = False

    def run(self) -> None:
        try:
            self.claim()
            self.save()
            for _ in range(self.random.randint(4, 11)):
                self.do(self.random.choices(DOINGS, WEIGHTS)[0])
            self.do(History.retain)
        finally:
            self.world.end()

    def choose_run(self) -> str:
        return RUNS[self.random.random() < 0.25]

    def do(self, doing: Callable[[History], None]) -> None:
        name = doing.__name__
        self.counts.doings[name] = self.counts.doings.get(name, 0) + 1
        doing(self)

    # -- processes ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """A second attempt, which takes over: from latest, from further back, from another run, or from nothing."""
        run = self.choose_run()
        source = run if self.random.random() < 0.7 else RUNS[run == RUNS[0]]
        line = self.oracle.walk(source)
        back = self.random.choice((0, 0, 1, 2, 4))
        parent = line[min(back, len(line) - 1)] if line and self.random.random() < 0.9 else None
        if parent is not None and self.rollbacks.random() < 0.3:
            number, _ = self.world.claim(run, parent, by=ROLLBACK)
            self.oracle.parents[run, number] = parent
            self.oracle.rollbacks.add((run, number))
        number, attempt = self.world.claim(run, parent)
        self.oracle.parents[run, number] = parent
        if attempt is not None:
            self.attempts[run].append(attempt)

    def live(self, run: str) -> Attempt | None:
        found = self.attempts[run][-1:]
        return found[0] if found and found[0].number == self.oracle.highest(run) else None

    def save(self) -> None:
        """One to four saves of a live attempt. Clocks jump, and some do not know the time."""
        attempt = self.live(self.choose_run())
        for _ in range(self.random.randint(1, 4) if attempt is not None else 0):
            assert attempt is not None
            self.step += self.random.randint(1, 4)
            self.clock_s += self.random.choice((1, 1, 1, 2, 5, 30, -3, -40, 9000, -9000)) * HOUR_S
            created_s = None if self.random.random() < 0.05 else self.clock_s
            metrics = self.metrics()
            id = self.world.save(attempt, self.step, metrics=metrics, created_s=created_s)
            self.oracle.there[id] = Known(id, metrics, created_s)

    def metrics(self) -> dict[str, float]:
        loss = self.random.choice((None, math.nan, math.inf, -math.inf, 0.5, 0.5, *(self.random.random(),) * 4))
        return {} if loss is None else {"loss": loss, "other": 1.0}

    def fail(self) -> None:
        """A save that does not commit: left as it is, closed, or closed and freed."""
        attempt = self.live(self.choose_run())
        if attempt is None:
            return
        self.step += 1
        id = self.world.save(attempt, self.step, until=self.random.choice(("begin", "pack", "index")))
        how = self.random.choice(("left", "closed", "freed"))
        if how != "left":
            abort(self.world.repo, id, "0" * 32)
        if how == "freed":
            free(self.world.repo, id)

    # -- people ------------------------------------------------------------------------------------------------------

    def any(self) -> Known | None:
        there = sorted(self.oracle.there)
        return self.oracle.there[self.random.choice(there)] if there else None

    def verify(self) -> None:
        known = self.any()
        if known is not None:
            known.verdict = self.verify_one(known)

    def verify_one(self, known: Known) -> str:
        kind = self.random.choice(("verified", "verified", "suspect"))
        self.note(known.id, kind, {})
        return kind

    def log_late(self) -> None:
        known = self.any()
        if known is not None:
            known.noted.update(self.log_late_of(known))

    def log_late_of(self, known: Known) -> dict[str, float]:
        noted = self.metrics()
        self.note(known.id, "metric", {name: tag_number(value) for name, value in noted.items()})
        return noted

    def note(self, id: CheckpointId, kind: str, body: dict[str, Any]) -> None:
        add_note(self.world.repo, id, kind, body)

    def damage(self) -> None:
        self.damage_one(self.any())

    def damage_note(self) -> None:
        """Damages the last note of a checkpoint, which retention has not read yet. It had said anything: what a person
        measured, or that the checkpoint was found whole, or damaged."""
        known = self.any()
        if known is None or known.damaged or known.unread:
            return
        self.random.choice((self.log_late_of, self.verify_one))(known)
        directory = object_names.notes_directory(known.id)
        self.world.damage(max((name for name in self.world.objects if name.startswith(f"{directory}/")), key=_number))
        known.unread = True

    def damage_relied_on(self) -> None:
        """Damages what retention relies on after it has read it, and lets retention run: the newest checkpoint of a
        run, or the one that was verified last."""
        self.retain()
        run = self.choose_run()
        whole = [known for id, known in sorted(self.oracle.there.items()) if id.run == run and not known.damaged]
        if self.random.random() < 0.5:
            whole = [known for known in whole if known.verdict == "verified"]
        self.damage_one(whole[-1] if whole else None)
        self.retain()

    def damage_one(self, known: Known | None) -> None:
        if known is not None and not known.damaged:
            self.world.damage(known.id.manifest)
            known.damaged = True
            if self.catalog is not None:
                # A new process reads everything, and so does one whose own commit is damaged at once.
                if self.processes.random() < 0.2 or known.id in self.catalog._unseen:
                    self.begin_process()
                else:
                    self.oracle.unnoticed = True

    def refer(self) -> None:
        """Pins, tags or holds; a tag moves. Refused is only what is being removed."""
        known = self.any()
        if known is None:
            return
        kind: Kind = self.random.choice(("pin", "tag", "tag", "hold"))
        name = self.random.choice(("one", "two"))
        try:
            put_ref(self.world.repo, kind, name, known.id)
        except CheckpointNotFound:
            if not any(known.id in self.stoned(run) for run in RUNS):
                raise Broken(f"{kind} {name} on {known.id} was refused") from None
        else:
            self.oracle.refs[kind, name] = known.id

    def stoned(self, run: str) -> set[CheckpointId]:
        names = [name for name in self.world.objects if name.startswith(f"tombstones/{run}/")]
        return {
            id for id in self.oracle.there if any(n.startswith(object_names.tombstone_directory(id)) for n in names)
        }

    def unrefer(self) -> None:
        if self.oracle.refs:
            key = self.random.choice(sorted(self.oracle.refs))
            clear_ref(self.world.repo, key[0], key[1])  # type: ignore[arg-type]
            del self.oracle.refs[key]

    def copy(self) -> None:
        """A person copies a checkpoint or an attempt to a place that looks like Tenuto's own. What is damaged is not
        copied: nothing then says that it is a copy."""
        known = self.any()
        if known is None or any(other.damaged for other in self.oracle.there.values() if other.id.run == known.id.run):
            return
        self.copies += 1
        directory = known.id.directory
        attempt = directory.rpartition("/")[0]
        choice = self.random.choice(("step", "attempt", "run"))
        if choice == "step":
            self.world.copy(directory, f"{attempt}/step-{90000000 + self.copies:08d}")
        elif choice == "attempt":
            highest = max(self.world.repo.attempts(known.id.run))
            self.world.copy(attempt, f"runs/{known.id.run}/a{highest + 1:04d}")
        else:
            self.world.copy(f"runs/{known.id.run}", f"runs/copy{self.copies}")

    def leave(self) -> None:
        """Foreign files, also inside checkpoints."""
        known = self.any()
        self.copies += 1
        below = known.id.directory if known is not None else "runs"
        place = self.random.choice((below, below, "runs/main", "mine", "refs"))
        self.world.put(
            f"{place}/{self.random.choice(('rank-00009.safetensors', 'x.txt', 'a/b'))}.{self.copies}", b"mine"
        )

    # -- retention ---------------------------------------------------------------------------------------------------

    def retain(self) -> None:
        """One round, by the live attempt or by one that was claimed over, perhaps with somebody in between."""
        run = self.choose_run()
        if not self.attempts[run]:
            return
        attempt = self.attempts[run][-1] if self.random.random() < 0.8 else self.random.choice(self.attempts[run])
        policy, judge, bests = draw_policy(self.random)
        between = self.random.choice((None, None, None, "plan", "tombstones"))
        self.counts.retentions += 1
        before, line = self.world.objects, {name: self.oracle.walk(name) for name in RUNS}
        superseded = attempt.number < self.oracle.highest(run)
        goes, may_stay = self.let_go(run, judge)
        worth = self.oracle.worth_a_day(run, bests)
        if superseded:
            goes, self.counts.superseded = set(), self.counts.superseded + 1
        plan = retention.plan_retention(self.world.repo, attempt, policy, self.catalog)
        if between == "plan":
            self.interfere()
        with armed(TOMBSTONES_PUT, self.interfere) if between == "tombstones" else nullcontext():
            retention.execute(self.world.repo, attempt, plan, catalog=self.catalog)
        rounds = 1
        if between is None and self.catalog is not None and self.catalog.plan_again:
            rounds = 2
            plan = retention.plan_retention(self.world.repo, attempt, policy, self.catalog)
            retention.execute(self.world.repo, attempt, plan, catalog=self.catalog)
        what = f"{policy!r} of {attempt}{' (superseded: I11)' if superseded else ''}"
        if self.oracle.unnoticed:
            if not superseded:
                goes = {id for id in self.oracle.there if id.run == run} - self.oracle.protected().keys()
            vanished = self.after_a_race(goes, attempt, run)
        elif between is not None:
            self.counts.raced += 1
            if attempt.number >= self.oracle.highest(run):
                # A pin that was moved away meanwhile protects nothing any more.
                own = {id for id in self.oracle.there if id.run == run}
                goes |= own - judge(self.oracle, run) - self.oracle.protected().keys()
            vanished = self.after_a_race(goes, attempt, run)
        else:
            vanished = self.after(goes, may_stay, what)
            for name in RUNS:
                expected = [id for id in line[name] if id in self.oracle.there]
                self.check(self.oracle.walk(name) == expected, f"{what} has changed what leads to latest in {name}")
        trashed = {id for id in vanished if any(is_copy_in_trash(id, name) for name in self.world.objects)}
        self.counts.trashed += len(trashed)
        if between is None and not self.oracle.unnoticed:
            # A second round finds the lines without what the first one has taken: then more may be the newest.
            missing, more = (worth & vanished) - trashed, trashed - worth
            self.check(not missing, f"{what} has freed {sorted(map(str, missing))} of a line left behind at once")
            self.check(rounds > 1 or not more, f"{what} has put {sorted(map(str, more))} into the trash")
        self.check_the_rest(before, vanished, what, trashed=trashed, quiet=between is None)

    def let_go(self, run: str, judge: Judge) -> tuple[set[CheckpointId], set[CheckpointId]]:
        """What goes, and what of it may stay: where `latest` means another run's checkpoint, what would be protected of
        the run's own."""
        own = {id for id in self.oracle.there if id.run == run}
        unwanted = own - judge(self.oracle, run)
        protected = self.oracle.protected()
        self.counts.judged += len(own)
        self.counts.protected += len(unwanted & protected.keys())
        goes = unwanted - protected.keys()
        line = [self.oracle.there[id] for id in self.oracle.walk(run) if id.run == run]
        firsts = (line, [k for k in line if k.whole], [k for k in line if k.whole and k.verdict == "verified"])
        may_stay = {known.id for found in firsts for known in found[:1]}
        return goes, may_stay

    def interfere(self) -> None:
        """Somebody comes to need a checkpoint, or claims the run."""
        self.random.choice((self.refer, self.refer, self.verify, self.claim))()

    def after(self, goes: set[CheckpointId], may_stay: set[CheckpointId], what: str) -> set[CheckpointId]:
        """Exactly what goes is gone."""
        vanished = self.forget()
        for id in sorted(vanished - goes):
            self.check(False, f"{what} removed {id}: it had to stay (I7)")
        self.check(not goes - vanished - may_stay, f"{what} left {sorted(map(str, goes - vanished - may_stay))}")
        return vanished

    def check_the_rest(
        self,
        before: dict[str, bytes],
        vanished: set[CheckpointId],
        what: str,
        *,
        trashed: set[CheckpointId],
        quiet: bool,
    ) -> None:
        """What went has left no trace, or only its manifest has gone, which lies in the trash, with a mark; nothing
        else has changed by a byte, and the walks are the oracle's. `quiet`: nobody else has put anything."""
        now = self.world.objects
        own = {name for id in vanished - trashed for name in before if is_own(id, name)}
        own |= {id.manifest for id in trashed}
        come = now.keys() - before.keys()
        copies = {
            name for id in trashed for name in come if is_copy_in_trash(id, name) and now[name] == before[id.manifest]
        }
        marks = {name for id in trashed for name in come if name.startswith(f"{mark_directory(id)}/")}
        self.check(len(copies) == len(marks) == len(trashed), f"{what} has put {sorted(copies | marks)} into the trash")
        gone = before.keys() - now.keys()
        self.check(gone == own, f"{what} removed {sorted(gone - own)} and left {sorted(own - gone)}")
        self.check(all(before[name] == now[name] for name in before.keys() & now.keys()), f"{what} changed what stays")
        new = [name for name in come - copies - marks if quiet or name.startswith(("tombstones/", "trash/"))]
        self.check(not new, f"{what} left {sorted(new)}")
        for run in RUNS:
            real = list(walk(self.world.repo, run))
            self.check(real == self.oracle.walk(run), f"I4: after {what} the walk of {run} is {[*map(str, real)]}")

    def after_a_race(self, goes: set[CheckpointId], attempt: Attempt, run: str) -> set[CheckpointId]:
        """What went was let go of before, and is not protected by what has happened meanwhile."""
        protected = self.oracle.protected()
        there = {id for id in self.oracle.there if self.world.repo.exists(id)}
        vanished = self.oracle.there.keys() - there
        self.check(vanished <= goes, f"{attempt} removed {vanished - goes}, which it should not")
        for id in vanished & protected.keys():
            self.check(False, f"{attempt} removed {id}, {protected[id]}")
        if attempt.number < self.oracle.highest(run):
            self.check(not vanished, f"I11: {attempt}, claimed over, removed {vanished}")
        return self.forget()

    def forget(self) -> set[CheckpointId]:
        vanished = {id for id in self.oracle.there if not self.world.repo.exists(id)}
        for id in vanished:
            del self.oracle.there[id]
        self.counts.removed += len(vanished)
        return vanished

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise Broken(problem)


DOINGS: tuple[Callable[[History], None], ...] = (
    History.save,
    History.claim,
    History.retain,
    History.verify,
    History.refer,
    History.unrefer,
    History.log_late,
    History.fail,
    History.damage,
    History.copy,
    History.leave,
    History.damage_relied_on,
    History.damage_note,
)
WEIGHTS = (8, 4, 4, 3, 2, 1, 2, 1, 1, 1, 1, 1, 2)


def _number(name: str) -> int:
    return int(name.rpartition("/")[2].removesuffix(".json"))


def is_own(id: CheckpointId, name: str) -> bool:
    """Whether the object is one that this checkpoint's save, or a note, has put."""
    prefix = f"{id.directory}/"
    file = name[len(prefix) :] if name.startswith(prefix) else ""
    return file in (PACK, INDEX, object_names.BEGIN, object_names.MANIFEST) or (
        file.startswith("notes/") and file[6:-5].isdigit() and file.endswith(".json")
    )


def is_copy_in_trash(id: CheckpointId, name: str) -> bool:
    return name.startswith(f"{object_names.trash_directory(id)}/")


def draw_policy(source: random.Random) -> tuple[KeepPolicy, Judge, list[tuple[str, str]]]:
    """A policy, what the oracle makes of it, and what it keeps the best by."""
    n = source.randint(1, 3)
    mode = source.choice(("min", "max"))
    hours = source.choice((1.0, 6.0, 24.0))
    singles: list[tuple[KeepPolicy, Judge]] = [
        (KeepNothing(), oracles.nothing),
        (keep.latest(n), oracles.latest(n)),
        (keep.best(n, "loss", mode="min" if mode == "min" else "max"), oracles.best(n, "loss", mode)),
        (keep.every(steps=4 * n), oracles.every_steps(4 * n)),
        (keep.every(hours=hours), oracles.every_hours(hours)),
    ]
    unit, last = source.choice(("hour", "day", "week", "month", "year")), source.choice((None, n))
    made = {"hour": keep.hourly, "day": keep.daily, "week": keep.weekly, "month": keep.monthly, "year": keep.yearly}
    by_time: list[tuple[KeepPolicy, Judge]] = [
        (made[unit](last), oracles.calendar(unit, last)),
        (keep.within(hours=hours), oracles.within(hours)),
        (keep.after("attempt"), oracles.after_attempts()),
        (keep.after("rollback"), oracles.after_rollbacks()),
    ]
    first, second = source.sample(singles, 2)
    if source.random() < 0.2:
        second = source.choice(by_time)
    bests = {id(singles[2]): [("loss", mode)]}
    if source.random() < 0.6:
        return (*first, bests.get(id(first), []))
    both = [*bests.get(id(first), []), *bests.get(id(second), [])]
    return first[0] | second[0], oracles.either(first[1], second[1]), both
