"""Random histories of the whole product, and a model of what must be true of them.

Training processes save (plain or encoded), crash at crash points, resume, roll back, take over and fork. A person
removes, brings back, pins, copies directories and collects garbage (`operator_rules`), and rolls back, forks, copies,
renames, retains, repairs, notes and restores (`history_rules`). Bits rot, and clocks are wrong.

A model of a few dictionaries says what must be true. After every step everything is verified, and the findings are
exactly those that the model expects; `latest` is what an independent statement of I4 says; every checkpoint that the
model holds whole loads bit for bit.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from campaigns.stateful.history_rules import HistoryRules
from campaigns.stateful.operator_rules import counted
from campaigns.stateful.world import Gone, Process, crashing
from tenuto.errors import RunInUse, Superseded, TenutoError
from tenuto.maintenance import retention
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.policy.encoding import Preset

RUNS = ("main", "side")
ENCODINGS: tuple[Preset, ...] = ("plain", "plain", "dedupe", "small")
SAVE_POINTS = (
    "save begun",
    "pack durable, index not yet",
    "packs and indexes durable, manifest not yet",
    "manifest durable, not yet reported",
)


class Product(HistoryRules):
    """One history."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Process] = []

    @property
    def runs(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*RUNS, *sorted({run for run, _ in self.model.parents} - set(RUNS)))

    def teardown(self) -> None:
        for process in self.alive:
            process.die()
        super().teardown()

    def _owner(self, run: str) -> Process | None:
        """The living process of the run's highest attempt, if it lives."""
        top = self.model.highest(run)
        return next((one for one in self.alive if one.run == run and one.attempt == top and top), None)

    def _let_end(self, run: str) -> None:
        owner = self._owner(run)
        if owner is not None:
            counted["close"] += 1
            owner.close()
            self._bury(owner)

    # -- processes -------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        back=st.integers(0, 2),
        fresh=st.booleans(),
        takeover=st.booleans(),
        encoding=st.sampled_from(ENCODINGS),
    )
    def resume(self, data: st.DataObject, back: int, fresh: bool, takeover: bool, encoding: Preset) -> None:
        """A process starts: from `latest`, from an older step, or afresh. It claims at once, by its first save.
        Its clock may be hours wrong."""
        run, ahead = data.draw(st.tuples(st.sampled_from(self.runs), st.sampled_from((0, 0, 0, 2, -2))))
        line = [id for id in self.model.walk(run) if id.run == run]
        whole = [id for id in self.model.walk(run) if id not in self.model.damaged]
        wanted = line[back] if 0 < back < len(line) else None
        if wanted is not None and (wanted in self.model.damaged or self.model.step_means(run, wanted.step) != wanted):
            return
        if wanted is None and list(self.model.walk(run)) and not whole:
            return  # nothing restorable: judged after every step
        copies = any(place.startswith(f"runs/{run}/") for place in self.model.copies)
        if wanted is None and not list(self.model.walk(run)) and (self.model.of_run(run) or copies):
            return  # the line of training lost its beginning: it is never started from scratch silently
        start_afresh = fresh and back == 2 and wanted is None
        counted["resume from a step" if wanted else "resume afresh" if start_afresh else "resume"] += 1
        process = Process(self.world, run, encoding=encoding, ahead_s=ahead * 3600.0)
        choice: Any = wanted.step if wanted else None if start_afresh else "latest"
        parent = process.open(choice, takeover=takeover)
        expected = wanted if wanted else None if start_afresh else (whole[0] if whole else None)
        assert parent == expected, f"{parent} was restored, not {expected}"
        if parent is not None:
            self.model.check_state(parent, process.state)
        owner = self._owner(run)
        self.alive.append(process)
        try:
            self._save(process, None, parent=parent)
        except RunInUse:
            assert owner is not None and not takeover, "the run's owner is dead, or was to be claimed over"
            counted["run in use"] += 1
            self.alive.remove(process)
            process.die()
        else:
            assert owner is None or takeover, "two processes own one run"

    def _save(self, process: Process, point: str | None, *, parent: CheckpointId | None = None) -> None:
        first = process.attempt == 0
        value = process.change(float(self.world.now_s % 97 + 1))
        superseded = not first and process.attempt < self.model.highest(process.run)
        id: CheckpointId | None = None
        before = self.model.highest(process.run)
        crashed = False
        try:
            with crashing(process.store, point):
                id = process.save()
        except Superseded:
            assert superseded, "nobody has claimed over it"
            counted["superseded"] += 1
            self._bury(process)
            return
        except (Gone, TenutoError):
            if not process.store.dead:
                raise
            crashed = True
        assert not superseded, "a superseded process has saved"
        if first:
            process.attempt = process.owned().number
            assert process.attempt > before, "an attempt's number is used again"
            process.disown()
            self.model.claim(process.run, process.attempt, parent)
        id = id or CheckpointId(process.run, process.attempt, process.step)
        if not crashed or point == SAVE_POINTS[-1]:
            self._commit(id, value, self.world.wall_s)
        else:
            self._begun(id)
        if crashed:
            counted[f"crash: {point}"] += 1
            self._bury(process)

    def _bury(self, process: Process) -> None:
        process.die()
        self.alive.remove(process)

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(),
        count=st.integers(1, 4),
        hours=st.sampled_from((0, 0, 1)),
        point=st.sampled_from((None, None, None, *SAVE_POINTS)),
    )
    def save(self, data: st.DataObject, count: int, hours: int, point: str | None) -> None:
        process = data.draw(st.sampled_from(self.alive))
        self.world.advance(hours)
        for _ in range(count - 1):
            if process in self.alive:
                counted["save"] += 1
                self._save(process, None)
        if process in self.alive:
            counted["save"] += 1
            self._save(process, point)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), killed=st.booleans())
    def end(self, data: st.DataObject, killed: bool) -> None:
        process = data.draw(st.sampled_from(self.alive))
        counted["kill" if killed else "close"] += 1
        if not killed:
            process.close()
        self._bury(process)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fork_the_process(self, data: st.DataObject) -> None:
        with_checkpointer = [one for one in self.alive if one.ckpt is not None]
        if with_checkpointer:
            counted["fork of a process"] += 1
            names = self.world.names("runs")
            assert data.draw(st.sampled_from(with_checkpointer)).fork() == 0, "a forked child was not refused"
            assert self.world.names("runs") == names

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data())
    def fork_a_run(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(RUNS))
        parents = [id for id in sorted(self.model.committed) if id.run != run]
        if not parents or self._owner(run) is not None:
            return
        counted["fork of a run"] += 1
        process = Process(self.world, run)
        parent = data.draw(st.sampled_from(parents))
        process.claim_fork(parent)
        self.model.claim(run, process.attempt, parent)
        self.alive.append(process)

    # -- looking after them ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), n=st.integers(1, 3), pinned_between=st.booleans())
    def retain(self, data: st.DataObject, n: int, pinned_between: bool) -> None:
        """What it lets go of may come to be needed between its plan and its work: somebody pins it."""
        process = data.draw(st.sampled_from(self.alive))
        counted["retention"] += 1
        process.act()
        line = [id for id in self.model.walk(process.run) if id.run == process.run]
        attempt = process.owned()
        plan = retention.plan_retention(self.world.repo, attempt, keep.latest(n))
        if plan.dropped and pinned_between:
            counted["pin between plan and removal"] += 1
            self._point(data.draw(st.sampled_from(plan.dropped)), "pin")
            process.act()
        protected = self.model.protected()
        retention.execute(self.world.repo, attempt, plan)
        for id in self._vanished():
            assert id.run == process.run, "another run's"
            assert process.attempt == self.model.highest(process.run), "I11: it is superseded"
            assert id not in protected, "I7"
            assert id not in line[:n], "the policy keeps it"
            self._removed(id)
            at_once = id not in self.model.trash or id in self.model.waiting
            assert id not in line or at_once, "what is on the line of training is freed at once"

    # -- accidents -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.committed and len(self.model.damaged) < 3)
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.model.committed)))
        if id not in self.model.damaged:
            counted["rot"] += 1
            self._rot(data, id)

    def _rot(self, data: st.DataObject, id: CheckpointId) -> None:
        """Flips one bit of one of the checkpoint's files."""
        files = [name for name in self.world.names(id.directory) if "rank-" in name or name == id.manifest]
        name, at, bit = data.draw(st.tuples(st.sampled_from(files), st.integers(0, 10**4), st.integers(0, 7)))
        harmed = [id]
        if name in self.model.flips:
            return
        if name.endswith((".safetensors", ".pack")):
            # `load` leaves out what belonged to one process alone: the bit is the header's, which who rests on the file
            # needs too, or the weights'.
            others = sorted(self.model.needers(id, lambda one: False))
            chunks = (
                [one for one in self.world.places(id, "w", "frozen") if one[0] == name]
                if id not in self.model.trash
                else []
            )
            if not chunks and (others or id in self.model.trash):
                return
            if bit % 2 or not chunks:
                at %= 4096
            else:
                _, start, length = chunks[at % len(chunks)]
                at = start + at % length
            harmed += [one for one in others if self.world.uses(one, name, at)]
        self.world.flip(name, at, bit)
        self.model.flips[name] = (at, bit)
        if name == id.manifest:
            self.model.bases[id] = self.world.begun_bases(id)  # what it rests on is asked there then
        for one in harmed:
            self.model.damaged.setdefault(one, set()).add(name)

    @precondition(lambda self: self.model.flips)
    @rule(data=st.data())
    def mend(self, data: st.DataObject) -> None:
        """A person puts back the right bytes, from elsewhere."""
        name = data.draw(st.sampled_from(sorted(self.model.flips)))
        counted["mend"] += 1
        self.world.flip(name, *self.model.flips[name])
        self._whole_again(name)

    def _vanished(self) -> list[CheckpointId]:
        return [id for id in self.model.committed if not self.world.repo.exists(id)]
