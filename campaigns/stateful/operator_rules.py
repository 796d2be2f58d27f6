"""Does to checkpoints what an operator does: removes, undeletes, tags, collects garbage, copies directories.

Everything is verified after every step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from campaigns.stateful.checks import GRACE_S, check_world
from campaigns.stateful.model import Model
from campaigns.stateful.world import simulated_world
from tenuto.errors import CorruptionError, RemovalRefused, RepositoryError
from tenuto.maintenance import gc, remove, undelete
from tenuto.maintenance.census import census_of, mark_directory
from tenuto.maintenance.marks import valid_marks
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names
from tenuto.repo.refs import KINDS, Kind, clear_ref, put_ref

counted: Counter[str] = Counter()
"""How often each rule has been at work, and how often a crash struck where: for the campaign's account."""


class OperatorRules(RuleBasedStateMachine):
    """One history; a subclass says who trains, and owns which run."""

    runs: tuple[str, ...] = ("main",)

    def __init__(self) -> None:
        super().__init__()
        counted["histories"] += 1
        self._world = simulated_world(counted["histories"])
        self.world = self._world.__enter__()
        self.model = self.new_model()

    def new_model(self) -> Model:
        return Model()

    def teardown(self) -> None:
        self._world.__exit__(None, None, None)

    def _owner(self, run: str) -> Any:
        """The living owner of the run's highest attempt, if it lives."""
        raise NotImplementedError

    def _rot(self, data: st.DataObject, id: CheckpointId) -> None:
        """Flips one bit of one of the checkpoint's files, and tells the model; does nothing where nobody can judge."""

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data(), force=st.booleans())
    def rm(self, data: st.DataObject, force: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.committed)))
        if id.manifest in self.model.damaged.get(id, ()):
            return
        counted["rm"] += 1
        self.world.operator()
        refused = id in self.model.pins.values()
        for run in self.runs:
            line = list(self.model.walk(run))
            if line[:1] == [id]:
                refused = refused or not force or self._owner(run) is not None
        try:
            remove.execute(self.world.repo, remove.plan_remove(self.world.repo, [id], force=force))
        except RemovalRefused as error:
            assert refused, error
            return
        assert not refused, "something needs what was removed"
        self._removed(id)

    def _removed(self, id: CheckpointId) -> None:
        """It is gone, or lies in the trash, and is marked unless its remover died before that."""
        if not self.world.names(object_names.trash_directory(id)):
            assert not self.model.needers(id, lambda one: False), f"{id} was freed, and others rest on it"
            self.model.forget(id)
            return
        self.model.remove(id)
        if id.manifest in self.model.flips:  # what has rotted lies in the trash as it is
            (name,) = self.world.names(object_names.trash_directory(id))
            self.model.flips[name] = self.model.flips.pop(id.manifest)
            self.model.damaged[id] = self.model.damaged[id] - {id.manifest} | {name}
        if self.world.names(mark_directory(id)):
            self.model.marked[id] = self.world.now_s
            if any(mark.by == "needed" for mark in valid_marks(self.world.repo, census_of(self.world.repo, id))):
                counted["removed, and needed"] += 1
                self.model.waiting.add(id)

    def _commit(self, id: CheckpointId, state: Any, created_s: float) -> None:
        self.model.commit(id, state)
        self.model.created[id] = created_s
        self.model.bases[id] = frozenset(self.world.repo.manifest(id).bases)
        self.world.needs(id)
        for name, (at, _) in self.model.flips.items():
            if self.world.uses(id, name, at):  # what it has named instead of writing it had rotted by then
                self.model.damaged.setdefault(id, set()).add(name)

    def _begun(self, id: CheckpointId) -> None:
        """Its process died in the save."""
        self.model.unfinished[id] = None
        self.model.bases[id] = self.world.begun_bases(id)

    def _whole_again(self, name: str) -> None:
        self.model.flips.pop(name, None)
        for id, names in list(self.model.damaged.items()):
            names.discard(name)
            if not names:
                del self.model.damaged[id]
                if name == id.manifest and id in self.model.committed:
                    self.model.bases[id] = frozenset(self.world.repo.manifest(id).bases)

    @precondition(lambda self: self.model.trash)
    @rule(data=st.data(), hours=st.sampled_from((0, 0, 5, 11)), rotten=st.booleans())
    def undelete(self, data: st.DataObject, hours: int, rotten: bool) -> None:
        """Before that, time may pass in which nobody collects, and bits may rot in the trash."""
        id = data.draw(st.sampled_from(sorted(self.model.trash)))
        counted["undelete"] += 1
        if rotten and id not in self.model.damaged:
            counted["rot in the trash"] += 1
            self._rot(data, id)
        self.world.operator()
        self.world.advance(hours)
        left = self.model.grace_left_s(id, self.world.now_s, GRACE_S)
        may = left > 0 and id not in self.model.damaged
        try:
            undelete.execute(self.world.repo, undelete.plan_undelete(self.world.repo, id, grace_s=GRACE_S))
        except (RepositoryError, CorruptionError) as error:
            assert not may, error
            return
        assert may, "it came back damaged, or too late"
        self.model.bring_back(id)

    @precondition(lambda self: self.model.committed or self.model.trash or self.model.unfinished)
    @rule(hours=st.sampled_from([0, 1, 4, 11]))
    def collect(self, hours: int) -> None:
        counted["gc"] += 1
        self.world.operator()
        self.world.advance(hours)
        gc.execute(self.world.repo, gc.plan_gc(self.world.repo, grace_s=GRACE_S))
        dead = {run for run in self.runs if self._owner(run) is None}
        self.model.collect(self.world.now_s, GRACE_S, dead)

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def point_at(self, data: st.DataObject, kind: Kind) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.committed)))
        counted[kind] += 1
        self._point(id, kind)

    def _point(self, id: CheckpointId, kind: Kind) -> None:
        self.world.operator()
        put_ref(self.world.repo, kind, "one", id)
        self.model.pins[kind] = id

    @precondition(lambda self: self.model.pins)
    @rule(kind=st.sampled_from(KINDS))
    def let_go(self, kind: Kind) -> None:
        clear_ref(self.world.repo, kind, "one")
        self.model.pins.pop(kind, None)

    @precondition(lambda self: self.model.committed and len(self.model.copies) < 3)
    @rule(data=st.data(), depth=st.integers(2, 4))
    def copy_a_directory(self, data: st.DataObject, depth: int) -> None:
        """A person copies a step, an attempt or a run to a place that looks like Tenuto's own."""
        id = data.draw(st.sampled_from(sorted(self.model.committed)))
        parts = id.directory.split("/")[:depth]
        number = 900 + len(self.model.copies)
        last = (f"copy{number}", f"a{number:04d}", f"step-{number:08d}")[depth - 2]
        target = "/".join([*parts[:-1], last])
        if self.world.names(target) or any("copy" in part or "9" in part for part in parts) or self.model.flips:
            return
        counted["copy of a directory"] += 1
        names = self.world.copy("/".join(parts), target)
        self.model.copies[target] = {name: self.world.store.place.objects[name][0] for name in names}

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def everything_matches_the_model(self) -> None:
        counted["steps"] += 1
        self.world.operator()
        check_world(self.world, self.model, self.runs)
