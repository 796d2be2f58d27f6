"""Does to runs what an operator does: goes back, forks, copies, renames, retains by hand, repairs, notes and restores.

What an operation claims, commits and removes is stated here in the design's words; that everything else is as before
is verified after every step.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from campaigns.stateful.checks import GRACE_S
from campaigns.stateful.operator_rules import OperatorRules, counted
from campaigns.stateful.world import Gone, MortalStore, crashing
from tenuto.api.repository import Repository
from tenuto.api.save_load import load
from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    RemovalRefused,
    RunInUse,
    UsageError,
)
from tenuto.history import fork, rollback
from tenuto.maintenance import checkpoint_copy, gc, rename_run, repair, repair_plan, retention
from tenuto.maintenance.repair_sources import Sources
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.repo.lineage import resolve
from tenuto.repo.repository import Repo
from tenuto.store.memory import MemoryStore

MADE = ("fork1", "fork2", "copied", "moved")
"""Runs that operations may make."""
KEEP_RULES = ("latest", "within", "hourly", "attempt", "rollback")
ENDED = st.sampled_from((True, True, False))
"""Whether who trains the run has ended before."""
COPY_POINTS = (None, None, "attempt claimed", "copies put, none visible", "a copy is visible")


class HistoryRules(OperatorRules):
    """Operations on lines of training, beside those on single checkpoints."""

    def _claimed(self, run: str, parent: CheckpointId | None) -> int:
        """Exactly one attempt of the run is new, and continues from `parent`; its number."""
        new = [n for n in self.world.repo.attempts(run) if (run, n) not in self.model.parents]
        new = [n for n in new if self.world.repo.find_attempt(run, n) is not None]
        assert len(new) == 1, f"attempts {new} of {run} are new"
        record = self.world.repo.find_attempt(run, new[0])
        assert record is not None and record.parent == parent, f"{run} was claimed from {record}, not {parent}"
        assert new[0] > self.model.highest(run), "an attempt's number is used again"
        self.model.claim(run, new[0], parent)
        return new[0]

    def _let_end(self, run: str) -> None:
        """The living owner of a run ends."""
        raise NotImplementedError

    def _any_run(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted({*self.runs, *MADE})))

    def _run_with_checkpoints(self, data: st.DataObject, ended: bool) -> str:
        run = data.draw(st.sampled_from(sorted({id.run for id in self.model.committed})))
        if ended:
            self._let_end(run)
        return run

    # -- lines of training ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data(), force=st.booleans(), ended=ENDED)
    def roll_back(self, data: st.DataObject, force: bool, ended: bool) -> None:
        run = self._run_with_checkpoints(data, ended)
        to = data.draw(st.sampled_from(sorted(self.model.committed)))
        self.world.operator()
        reachable = to.run == run or to in self.model.walk(run)
        try:
            plan = rollback.plan_rollback(self.world.repo, run, to, force=force)
            rollback.execute(self.world.repo, plan)
        except CheckpointNotFound:
            assert not reachable, f"{run} cannot go back to {to}"
        except CorruptionError:
            assert to in self.model.damaged and not force, f"{to} is whole"
        except RunInUse:
            assert self._owner(run) is not None, f"nobody trains {run}"
        else:
            assert reachable and self._owner(run) is None, f"{run} went back to {to}"
            counted["rollback"] += 1
            self.model.rollbacks.add((run, self._claimed(run, to)))
            assert next(self.model.walk(run)) == to

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data())
    def fork_by_hand(self, data: st.DataObject) -> None:
        run, parent = self._any_run(data), data.draw(st.sampled_from(sorted(self.model.committed)))
        self.world.operator()
        used = bool(self.model.highest(run))
        try:
            fork.execute(self.world.repo, fork.plan_fork(self.world.repo, parent, run))
        except UsageError:
            assert used, f"there is no run {run}"
        except CorruptionError:
            assert parent in self.model.damaged, f"{parent} is whole"
        else:
            assert not used, f"run {run} was there, and was forked again"
            counted["fork"] += 1
            self._claimed(run, parent)

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data(), stand_alone=st.booleans(), point=st.sampled_from(COPY_POINTS))
    def copy_under_another_name(self, data: st.DataObject, stand_alone: bool, point: str | None) -> None:
        """`tenuto cp`; the process may die at a crash point."""
        run = self._any_run(data)
        first = data.draw(st.sampled_from(sorted(self.model.committed)))
        same = [id for id in self.model.of_run(first.run) if id.step > first.step]
        ids = [first, *data.draw(st.lists(st.sampled_from(same), max_size=1))] if same else [first]
        if any(id in self.model.damaged for id in ids):
            return
        own = next(iter(self.model.walk(run)), None)
        own = own if own is not None and own.run == run else None
        meets = run == first.run or (own is not None and first.step <= own.step)
        store = MortalStore(self.world.store.name)
        actor = self.world.processes.start()
        try:
            with crashing(store, point):
                plan = checkpoint_copy.plan_copies(Repo.open(store), ids, run=run, stand_alone=stand_alone)
                checkpoint_copy.execute(Repo.open(store), plan)
        except UsageError as error:
            assert meets, error
            return
        except RunInUse:
            assert self._owner(run) is not None, f"nobody trains {run}"
            return
        except Gone:
            counted[f"crash: {point}"] += 1
        finally:
            store.dead = True
            self.world.processes.end(actor)
        assert not meets and self._owner(run) is None, f"{ids} were copied into {run}"
        counted["cp"] += 1
        self.world.operator()
        number = self._claimed(run, own or first)
        made = {CheckpointId(run, number, id.step): id for id in ids}
        visible = {None: len(ids), "a copy is visible": 1}.get(point, 0)
        for place, (id, source) in enumerate(sorted(made.items())):
            if place < visible:
                self._commit(id, self.model.committed[source], self.world.wall_s)
                assert self.model.bases[id] <= {source} | self.model.bases[source]
            elif point != "attempt claimed":
                self._begun(id)

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data(), ended=ENDED)
    def rename(self, data: st.DataObject, ended: bool) -> None:
        """`tenuto mv` to a name that nothing has."""
        run = self._run_with_checkpoints(data, ended)
        new = next((name for name in (*MADE, *self.runs[:2]) if not self.model.highest(name)), None)
        ids = self.model.of_run(run)
        if new is None or any(id in self.model.damaged for id in ids):
            return
        self.world.operator()
        before = list(self.model.walk(run))
        others = [other for other in self.runs if other != run]
        needed = any(next(iter(self.model.walk(other)), None) in ids for other in others)
        pinned = any(id in ids for kind, id in self.model.pins.items() if kind != "tag")
        try:
            renamed = rename_run.execute(self.world.repo, rename_run.plan_rename(self.world.repo, run, new))
        except RemovalRefused as error:
            assert needed or pinned, error
            return
        except RunInUse:
            assert self._owner(run) is not None, f"nobody trains {run}"
            return
        assert not needed and not pinned and self._owner(run) is None, f"{run} was renamed"
        counted["mv"] += 1
        new_of = dict(renamed.checkpoints)
        assert sorted(new_of) == ids, f"{sorted(new_of)} of {ids} were renamed"
        self._claimed(run, before[0])
        for number in self.world.repo.attempts(new):
            record = self.world.repo.find_attempt(new, number)
            assert record is not None
            self.model.claim(new, number, record.parent)
        for old, id in new_of.items():
            self._commit(id, self.model.committed[old], self.model.created[old])
            self._removed(old)
        self.model.pins = {kind: new_of.get(id, id) for kind, id in self.model.pins.items()}
        line = [new_of[id] for id in before if id in new_of]
        found = [id for id in self.model.walk(new) if id.run == new]
        assert found == line, f"the line of {run} is another one in {new}: {found}, not {line}; {self.model.parents}"

    # -- removal -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data(), which=st.sampled_from(KEEP_RULES), n=st.integers(1, 3), ended=ENDED)
    def keep_by_hand(self, data: st.DataObject, which: str, n: int, ended: bool) -> None:
        """`tenuto keep`: what a rule keeps, and only that and what is protected, stays."""
        run = self._run_with_checkpoints(data, ended)
        policies = {
            "latest": keep.latest(n),
            "hourly": keep.hourly(n),
            "within": keep.within(hours=n),
            "attempt": keep.after("attempt"),
            "rollback": keep.after("rollback"),
        }
        policy = policies[which]
        now = data.draw(st.booleans())
        self.world.operator()
        # Before, since they go by what is there: what the rule keeps, what is protected, and what others rest on.
        kept, protected = self.model.kept(run, which, n), self.model.protected()
        newest = next(iter(self.model.walk(run)), None)
        try:
            plan, removed = retention.retain(self.world.repo, run, policy, grace="none" if now else "all")
        except RunInUse:
            assert self._owner(run) is not None, f"nobody trains {run}"
            return
        if not plan.dropped:
            assert not removed
        else:
            counted[f"keep {which}"] += 1
            self._claimed(run, newest)
        assert not (kept | protected) & set(removed), f"{which}({n}) or I7 keeps of {removed}: {kept | protected}"
        stays = {id for id in self.model.of_run(run) if id not in removed}
        if not self.model.damaged:
            assert stays <= kept | protected, f"{which}({n}) keeps {stays - kept - protected} of {run} as well"
        for id in removed:
            self._removed(id)
            if not now:
                assert id in self.model.trash, f"{id} cannot be brought back"

    @precondition(lambda self: self.model.trash and not self.model.damaged)
    @rule()
    def collect_now(self) -> None:
        """`tenuto gc --now`: all that nothing reaches, but the last of a run that could be restored."""
        counted["gc now"] += 1
        self.world.operator()
        gc.execute(self.world.repo, gc.plan_gc(self.world.repo, grace_s=GRACE_S, now=True))
        dead = {run for run in self.runs if self._owner(run) is None}
        self.model.collect(self.world.now_s, GRACE_S, dead, now=True)

    # -- damage, notes, restores ---------------------------------------------------------------------------------------

    @precondition(lambda self: not self.model.damaged.keys().isdisjoint(self.model.committed))
    @rule()
    def repair(self) -> None:
        """From a backup that has what rotted."""
        counted["repair"] += 1
        self.world.operator()
        backup = MemoryStore(f"{self.world.store.name}-backup-{counted['repair']}")
        for name, (bytes_, when) in self.world.store.place.objects.items():
            whole = bytearray(bytes_)
            if name in self.model.flips:
                at, bit = self.model.flips[name]
                whole[at % len(whole)] ^= 1 << bit
            backup.place.objects[name] = bytes(whole), when
        with Sources.of(self.world.repo, [backup]) as sources:
            report = repair.execute(sources, repair_plan.plan_repair(sources))
        backup.place.objects.clear()
        assert report.ok, f"not repaired: {report.quarantined}, {report.failed}, {report.plan}"
        harmed = set(self.model.damaged) & set(self.model.committed)
        assert report.verification is not None and harmed <= set(report.verification.checked)
        self.model.verified |= set(report.verification.checked)
        for name in {name for id in harmed for name in self.model.damaged[id]}:
            self._whole_again(name)

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data(), text=st.sampled_from(("before the rate was raised", "looks odd")))
    def note(self, data: st.DataObject, text: str) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.committed)))
        counted["note"] += 1
        self.world.operator()
        Repository(self.world.store).note(id, text)
        self.model.texts.setdefault(id, []).append(text)

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data(), tagged=st.booleans())
    def restore(self, data: st.DataObject, tagged: bool) -> None:
        """By a step, as a person types it, or by the tag."""
        id = data.draw(st.sampled_from(sorted(self.model.committed)))
        wanted: Any = id.step
        meant = self.model.step_means(id.run, id.step)
        if tagged and "tag" in self.model.pins:
            wanted, meant = "one", self.model.pins["tag"]
        assert meant is not None
        counted["restore"] += 1
        self.world.operator()
        assert resolve(self.world.repo, id.run, wanted) == meant, f"{id.run}'s {wanted} is not {meant}"
        if meant not in self.model.damaged:
            self.model.check_state(meant, load(self.world.store, run=id.run, step=wanted).state)
