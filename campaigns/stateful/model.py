"""What must be true, in a few dictionaries: written from the design's words, without looking at the product."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from campaigns.corruption.judge import same
from tenuto.maintenance.marks import MARGIN_S
from tenuto.model.ids import CheckpointId


@dataclass
class Model:
    parents: dict[tuple[str, int], CheckpointId | None] = field(default_factory=dict)
    """Claimed attempts, and what each goes on from."""
    committed: dict[CheckpointId, Any] = field(default_factory=dict)
    trash: dict[CheckpointId, Any] = field(default_factory=dict)
    unfinished: dict[CheckpointId, None] = field(default_factory=dict)
    """Saves whose process died in them, and that nobody has closed yet."""
    marked: dict[CheckpointId, float] = field(default_factory=dict)
    """Since when it is in the trash, or gc has known it as unfinished, by the store's clock."""
    rollbacks: set[tuple[str, int]] = field(default_factory=set)
    """Attempts that a rollback has claimed."""
    pins: dict[str, CheckpointId] = field(default_factory=dict)
    damaged: dict[CheckpointId, set[str]] = field(default_factory=dict)
    flips: dict[str, tuple[int, int]] = field(default_factory=dict)
    copies: dict[str, dict[str, bytes]] = field(default_factory=dict)
    removing: set[CheckpointId] = field(default_factory=set)
    """Whose removal a process has begun that died then: its tombstone may still be there."""
    bases: dict[CheckpointId, frozenset[CheckpointId]] = field(default_factory=dict)
    """In whose data files a save's bytes lie beside its own, as it says itself."""
    waiting: set[CheckpointId] = field(default_factory=set)
    """What retention has removed without a grace, and lies in the trash because others rest on it."""
    created: dict[CheckpointId, float] = field(default_factory=dict)
    """By the clock of who saved it, in seconds."""
    verified: set[CheckpointId] = field(default_factory=set)
    texts: dict[CheckpointId, list[str]] = field(default_factory=dict)

    def highest(self, run: str) -> int:
        return max((number for name, number in self.parents if name == run), default=0)

    def of_run(self, run: str) -> list[CheckpointId]:
        return sorted(id for id in self.committed if id.run == run)

    def walk(self, run: str) -> Iterator[CheckpointId]:
        """I4: the committed steps of the highest attempt, descending; then its parent attempt's, from the parent step
        down; and so on. An attempt with no commit and no parent is passed over."""
        for number in sorted((number for name, number in self.parents if name == run), reverse=True):
            if self.parents[run, number] is not None or any(
                (id.run, id.attempt) == (run, number) for id in self.committed
            ):
                yield from self._line(run, number, None)
                return

    def _line(self, run: str, number: int, top: int | None) -> Iterator[CheckpointId]:
        own = [id for id in self.committed if (id.run, id.attempt) == (run, number)]
        yield from sorted((id for id in own if top is None or id.step <= top), reverse=True)
        parent = self.parents.get((run, number))
        if parent is not None:
            yield from self._line(parent.run, parent.attempt, parent.step)

    def step_means(self, run: str, step: int) -> CheckpointId | None:
        """A step that several attempts have is the first on the walk, else the highest attempt's."""
        there = [id for id in self.walk(run) if id.step == step]
        there += [id for id in reversed(self.of_run(run)) if id.step == step]
        return there[0] if there else None

    def protected(self) -> set[CheckpointId]:
        """I7: of the line of each run the first, the first of its own, and the first of either that was verified; and
        what is pinned."""
        found = set(self.pins.values())
        for run in {run for run, _ in self.parents}:
            line = list(self.walk(run))
            own = [id for id in line if id.run == run]
            for some in (line, own):
                found.update([*some[:1], *[id for id in some if id in self.verified][:1]])
        return found

    def needers(self, id: CheckpointId, living: Callable[[CheckpointId], bool]) -> set[CheckpointId]:
        """Who rests on its data files: checkpoints, also in the trash, and saves that may still be under way."""
        there = {*self.committed, *self.trash, *(one for one in self.unfinished if living(one))}
        return {one for one in there if id in self.bases.get(one, ())}

    def kept(self, run: str, rule: str, n: int) -> set[CheckpointId]:
        """What a rule of retention keeps, as far as nothing is damaged; of what is, nothing is said."""
        newest_first = sorted(self.of_run(run), reverse=True)
        line = [id for id in self.walk(run) if id.run == run]
        if rule == "latest":
            found = [*line, *(id for id in newest_first if id not in line)][:n]
        elif rule == "attempt":
            found = list({id.attempt: id for id in newest_first}.values())
        elif rule == "rollback":
            firsts = {id.attempt: id for id in newest_first}
            found = [id for attempt, id in firsts.items() if self._follows_rollback(run, attempt, firsts)]
        else:
            # Ages count from the older one of the two newest; of each hour the first that was saved, the line's before
            # what was left behind.
            now_s = min(self.created[id] for id in newest_first[:2])
            if rule == "within":
                found = [id for id in newest_first if self.created[id] >= now_s - n * 3600]
            else:
                left = sorted((id for id in newest_first if id not in line), key=lambda id: (id.attempt, -id.step))
                hours = {self.created[id] // 3600: id for id in [*left, *line]}
                found = [id for hour, id in hours.items() if hour > now_s // 3600 - n]
        return set(found) - self.damaged.keys()

    def _follows_rollback(self, run: str, attempt: int, saved: Container[int]) -> bool:
        """Whether the attempt is the first that has saved since a rollback, all in between from the same place."""
        parent = self.parents.get((run, attempt))
        for number in range(attempt - 1, 0, -1):
            if number in saved or (run, number) in self.rollbacks:
                return number not in saved
            if self.parents.get((run, number), parent) != parent:
                return False
        return False

    def check_state(self, id: CheckpointId, state: Any) -> None:
        assert same(state, self.committed[id]), f"I5: {id} came back with other values than were saved"

    def claim(self, run: str, number: int, parent: CheckpointId | None) -> None:
        """A claim closes the unfinished saves of earlier attempts, and their objects go."""
        assert (run, number) not in self.parents
        self.parents[run, number] = parent
        for id in [id for id in self.unfinished if id.run == run]:
            self._drop(id)

    def commit(self, id: CheckpointId, state: Any) -> None:
        assert id not in self.committed, f"{id} was saved twice; claimed are {sorted(self.parents)}"
        self.committed[id] = state

    def remove(self, id: CheckpointId) -> None:
        self.trash[id] = self.committed.pop(id)

    def bring_back(self, id: CheckpointId) -> None:
        self.committed[id] = self.trash.pop(id)
        self.marked.pop(id, None)
        self.waiting.discard(id)

    def grace_left_s(self, id: CheckpointId, now_s: float, grace_s: float) -> float:
        return grace_s - (now_s - self.marked[id]) if id in self.marked else grace_s

    def collect(self, now_s: float, grace_s: float, dead: set[str], *, now: bool = False) -> None:
        """Gc marks what has no mark, and deletes once the grace is over; an hour later what can be brought back. What a
        living owner's attempt may still be writing is left alone, and so is what others rest on that stay.

        `now`: it waits for nothing, but leaves the newest of each run that has nothing else."""

        def living(id: CheckpointId) -> bool:
            return id.run not in dead and id.attempt == self.highest(id.run)

        def is_due(id: CheckpointId) -> bool:
            margin_s = MARGIN_S if id in self.trash else 0
            aged = id in self.marked and now_s - self.marked[id] >= grace_s + margin_s
            return now or aged or (id in self.waiting and id in self.marked)

        lost = {id.run for id in self.trash} - {id.run for id in self.committed}
        last = {max(id for id in self.trash if id.run == run) for run in lost} if now else set()
        going = {id for id in self.unfinished if not living(id)} | self.trash.keys() - last
        while stays := {id for id in going if self.needers(id, living) - {one for one in going if is_due(one)}}:
            going -= stays
        for id in going:
            if is_due(id):
                self._drop(id)
            elif id not in self.marked:
                self.marked[id] = now_s

    def forget(self, id: CheckpointId) -> None:
        """Retention has freed it."""
        del self.committed[id]
        self._drop(id)

    def _drop(self, id: CheckpointId) -> None:
        self.trash.pop(id, None)
        self.unfinished.pop(id, None)
        self.marked.pop(id, None)
        self.bases.pop(id, None)
        self.waiting.discard(id)
        self.verified.discard(id)
        for name in self.damaged.pop(id, set()):
            if name.startswith(f"{id.directory}/"):
                self.flips.pop(name, None)
