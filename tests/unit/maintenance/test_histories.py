"""Random histories of runs, forks, failed saves, copies, pins and removals, some of them cut short anywhere.

After every step the whole store is verified byte for byte and compared with a small model of what should be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tenuto.crashpoints import armed
from tenuto.errors import CheckpointNotFound, RemovalRefused, RepositoryError
from tenuto.maintenance import gc, remove, retention, undelete
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.repo import tombstones
from tenuto.repo.format import object_names
from tenuto.repo.lineage import walk
from tenuto.repo.notes import add_note
from tenuto.repo.ownership import claim as claims
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.ownership.owner_watch import release_ownership
from tenuto.repo.refs import clear_ref, put_ref
from tenuto.repo.unfinished import abort, free

RUNS = ("main", "fork")
GRACE_S = 10 * 3600.0
REMOVAL = (
    None,
    None,
    "tombstone put, manifest still there",
    "copy in trash, manifest still there",
    "manifest removed, packs still there",
    "packs removed, notes still there",
    "manifest put back from trash, not yet checked",
    "objects swept, copy in trash still there",
)
CLAIM = (None, None, "attempt claimed", "unfinished save marked aborted, objects still there")


@dataclass
class Model:
    """What a person would say is there."""

    parents: dict[tuple[str, int], CheckpointId | None] = field(default_factory=dict)
    manifests: dict[CheckpointId, bytes] = field(default_factory=dict)
    standing: dict[CheckpointId, str] = field(default_factory=dict)
    pins: dict[str, CheckpointId] = field(default_factory=dict)
    removed_at: dict[CheckpointId, int] = field(default_factory=dict)

    def walk(self, run: str) -> Iterator[CheckpointId]:
        """I4, word by word."""
        for number in sorted((n for name, n in self.parents if name == run), reverse=True):
            here = list(self.line(run, number))
            if any(id.attempt == number and id.run == run for id in here) or self.parents[run, number] is not None:
                yield from here
                return

    def line(self, run: str, number: int, top: int | None = None) -> Iterator[CheckpointId]:
        steps = [
            id for id in self.manifests if (id.run, id.attempt) == (run, number) and (top is None or id.step <= top)
        ]
        yield from sorted(steps, reverse=True)
        parent = self.parents.get((run, number))
        if parent is not None:
            yield from self.line(parent.run, parent.attempt, parent.step)

    def protected(self) -> set[CheckpointId]:
        """I7, over all runs."""
        out = set(self.pins.values())
        for run in RUNS:
            line = list(self.walk(run))
            out.update(line[:1])
            out.update([id for id in line if self.standing.get(id) == "verified"][:1])
        return out


class Histories(RuleBasedStateMachine):
    make_world: type
    gone: type[BaseException]
    abandon: Callable[[], None]
    begun = 0
    """Histories of this class."""

    def __init__(self) -> None:
        super().__init__()
        type(self).begun += 1
        self.world: Any = self.make_world()
        self.model = Model()
        self.live: dict[str, Attempt] = {}
        self.open: dict[CheckpointId, list[str]] = {}
        """Saves under way, with the names that they have put."""
        self.foreign: dict[str, bytes] = {}
        self.step = 0

    # -- what a process does -----------------------------------------------------------------------------------------

    @rule(run=st.sampled_from(RUNS), back=st.integers(0, 3), cut=st.sampled_from(CLAIM), elsewhere=st.booleans())
    def claim(self, run: str, back: int, cut: str | None, elsewhere: bool) -> None:
        source = next((name for name in RUNS if name != run), run) if elsewhere else run
        line = list(self.model.walk(source))
        parent = line[min(back, len(line) - 1)] if line else None
        self.die(run)
        before = set(self.world.repo.attempts(run))

        def claiming() -> None:
            self.live[run] = claims.claim(self.world.repo, run, parent, beat_s=3600.0)

        done = self.cut_short(cut, claiming)
        (number,) = set(self.world.repo.attempts(run)) - before
        self.model.parents[run, number] = parent
        if not done:
            self.live.pop(run, None)

    def die(self, run: str) -> None:
        attempt = self.live.pop(run, None)
        if attempt is not None:
            attempt._lease._stop.set()
            release_ownership(self.world.repo, run, attempt.number)
            self.open = {id: names for id, names in self.open.items() if id.run != run}

    def cut_short(self, stage: str | None, act: Callable[[], None]) -> bool:
        """Acts, and dies at `stage` if that is reached; every process is gone then."""
        if stage is None:
            act()
            return True
        try:
            with armed(stage, type(self).abandon):
                act()
        except self.gone:
            for run in list(self.live):
                self.die(run)
            return False
        return True

    @precondition(lambda self: self.live)
    @rule(data=st.data(), until=st.sampled_from(["commit", "commit", "commit", "begin", "pack", "index"]))
    def save(self, data: st.DataObject, until: str) -> None:
        run = data.draw(st.sampled_from(sorted(self.live)))
        self.step += 1
        for before in [id for id in self.open if (id.run, id.attempt) == (run, self.live[run].number)]:
            abort(self.world.repo, before, "0" * 32)  # an attempt begins no save before the last one has ended
            del self.open[before]
        id = self.world.save(self.live[run], self.step, until=until)
        if until == "commit":
            self.model.manifests[id] = self.world.repo.manifest_bytes(id)
        else:
            self.open[id] = self.world.names(id.directory)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), freed=st.booleans())
    def fail(self, data: st.DataObject, freed: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.open)))
        abort(self.world.repo, id, "0" * 32)
        if freed:
            free(self.world.repo, id)
        del self.open[id]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 3), cut=st.sampled_from(REMOVAL))
    def retain(self, data: st.DataObject, n: int, cut: str | None) -> None:
        attempt = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        protected = self.model.protected()
        whole = [id for id in self.model.walk(attempt.run) if self.model.standing.get(id) != "suspect"]
        kept = {id for id in whole if id.run == attempt.run}
        kept &= set([id for id in whole if id.run == attempt.run][:n])

        def acting() -> None:
            plan = retention.plan_retention(self.world.repo, attempt, keep.latest(n))
            retention.execute(self.world.repo, attempt, plan)

        self.cut_short(cut, acting)
        for id in self.vanished():
            assert id.run == attempt.run, "another run's"
            assert id not in protected, "I7"
            assert id not in kept, "the policy keeps it"
            self.forget(id)

    # -- what a person does ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.manifests)
    @rule(data=st.data(), force=st.booleans(), cut=st.sampled_from(REMOVAL))
    def rm(self, data: st.DataObject, force: bool, cut: str | None) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.manifests)))
        pinned = set(self.model.pins.values())
        latest = {run: next(self.model.walk(run), None) for run in RUNS}
        alive = set(self.live)

        def acting() -> None:
            try:
                remove.execute(self.world.repo, remove.plan_remove(self.world.repo, [id], force=force))
            except RemovalRefused:
                pass

        self.cut_short(cut, acting)
        for gone in self.vanished():
            assert gone == id
            assert id not in pinned
            for run, newest in latest.items():
                assert newest != id or (force and run not in alive)
            self.forget(id)
            self.model.removed_at[id] = self.world.store.place.clock_ns

    @precondition(lambda self: self.model.removed_at)
    @rule(data=st.data(), cut=st.sampled_from(REMOVAL))
    def undelete(self, data: st.DataObject, cut: str | None) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.removed_at)))
        before = self.world.repo.exists(id)
        try:
            plan = undelete.plan_undelete(self.world.repo, id, grace_s=GRACE_S)
        except RepositoryError:
            age_s = (self.world.store.place.clock_ns - self.model.removed_at[id]) / 1e9
            assert age_s > GRACE_S - undelete.MARGIN_S - 1, "nothing keeps it from coming back"
            return
        self.cut_short(cut, lambda: void(undelete.execute(self.world.repo, plan)))
        assert not before
        assert self.world.repo.exists(id)
        self.model.manifests[id] = self.world.repo.manifest_bytes(id)
        del self.model.removed_at[id]

    @rule(hours=st.sampled_from([0, 1, 4, 11]), cut=st.sampled_from(REMOVAL))
    def collect(self, hours: int, cut: str | None) -> None:
        self.world.store.advance(hours * 3600)
        self.cut_short(cut, lambda: void(gc.execute(self.world.repo, gc.plan_gc(self.world.repo, grace_s=GRACE_S))))
        for id in list(self.model.removed_at):
            if not self.world.names(f"{id.directory}/rank"):
                age_s = (self.world.store.place.clock_ns - self.model.removed_at[id]) / 1e9
                assert age_s >= GRACE_S
                del self.model.removed_at[id]

    @precondition(lambda self: self.model.manifests)
    @rule(data=st.data(), name=st.sampled_from(["one", "two"]))
    def pin(self, data: st.DataObject, name: str) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.manifests)))
        try:
            put_ref(self.world.repo, "pin", name, id)
        except CheckpointNotFound:
            assert self.world.names(object_names.tombstone_directory(id)), "only one that is being removed is refused"
        else:
            self.model.pins[name] = id

    @rule(name=st.sampled_from(["one", "two"]))
    def unpin(self, name: str) -> None:
        clear_ref(self.world.repo, "pin", name)
        self.model.pins.pop(name, None)

    @precondition(lambda self: self.model.manifests)
    @rule(data=st.data(), kind=st.sampled_from(["verified", "suspect"]))
    def note(self, data: st.DataObject, kind: str) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.manifests)))
        add_note(self.world.repo, id, kind, {})
        self.model.standing[id] = kind

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """A person copies a directory to a place that looks like Tenuto's own."""
        sources = sorted({name.rpartition("/")[0] for name in self.world.names("runs") if name.endswith("begin.json")})
        if not sources or len(self.foreign) > 60:
            return
        source = data.draw(st.sampled_from(sources))
        target = data.draw(st.sampled_from(["step-00000900", "step-00000901 (copy)", "mine"]))
        target = f"{source.rpartition('/')[0]}/{target}"
        if not self.world.names(target):
            self.world.copy(source, target)
            self.foreign.update({name: self.world.store.place.objects[name][0] for name in self.world.names(target)})

    # -- what must hold ----------------------------------------------------------------------------------------------

    def vanished(self) -> list[CheckpointId]:
        return [id for id in self.model.manifests if not self.world.repo.exists(id)]

    def forget(self, id: CheckpointId) -> None:
        del self.model.manifests[id]
        self.model.standing.pop(id, None)

    @invariant()
    def every_byte_is_whole(self) -> None:
        assert set(assert_whole(self.world.reopened()).checked) == set(self.model.manifests)

    @invariant()
    def i2_nothing_committed_was_rewritten(self) -> None:
        for id, data in self.model.manifests.items():
            assert self.world.store.get(id.manifest, limit=10**6) == data

    @invariant()
    def i4_the_walk_is_the_models(self) -> None:
        for run in RUNS:
            assert list(walk(self.world.repo, run)) == list(self.model.walk(run))

    @invariant()
    def i6_live_saves_and_strangers_are_untouched(self) -> None:
        for id, names in self.open.items():
            assert self.world.names(id.directory) == names
        for name, data in self.foreign.items():
            assert self.world.store.place.objects[name][0] == data

    def teardown(self) -> None:
        """In the end every process has ended, and two visits of gc leave only what is wanted."""
        for run in RUNS:
            self.die(run)
        for run in RUNS:
            parent = next(self.model.walk(run), None)
            attempt = claims.claim(self.world.repo, run, parent, beat_s=3600.0)
            self.model.parents[run, attempt.number] = parent
            attempt.release()
        for _ in range(3):
            gc.execute(self.world.repo, gc.plan_gc(self.world.repo, grace_s=GRACE_S))
            self.world.store.advance(GRACE_S + 1)
        assert set(assert_whole(self.world.repo).checked) == set(self.model.manifests)
        assert not self.world.names("tombstones")
        assert not self.world.names("trash")
        for name in self.world.names("runs"):
            directory, _, file = name.rpartition("/")
            if name in self.foreign or "step-" not in name:
                continue
            committed = any(directory.startswith(id.directory) for id in self.model.manifests)
            assert committed or file == "manifest.json", f"{name} is left over"


def void(value: object) -> None:
    """Takes a result that is looked at in the store instead."""


@pytest.fixture
def machine(make_world, crash, monkeypatch):
    """The histories, in worlds of the test's; running it raises what contradicts the model."""
    # Removals never overlap here, so one that is found at a claim died: its process is this one, which lives.
    monkeypatch.setattr(tombstones, "judge", lambda owner: "dead")
    return type(
        "Machine", (Histories,), {"make_world": make_world, "gone": crash[0], "abandon": staticmethod(crash[1])}
    )


def test_i2_i4_i6_i7_i11_random_histories(machine):
    chosen = settings(
        max_examples=25,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)
    assert machine.begun >= 25


@pytest.mark.campaign
@pytest.mark.skipif("not config.getoption('-m')", reason="a campaign: run with -m campaign")
def test_i2_i4_i6_i7_i11_many_random_histories(machine):
    chosen = settings(max_examples=750, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=chosen)
    assert machine.begun >= 1500
