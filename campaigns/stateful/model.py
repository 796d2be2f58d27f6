"""What must be true, in a few dictionaries: written from the design's words, without looking at the product."""

from __future__ import annotations

from collections.abc import Iterator
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
    pins: dict[str, CheckpointId] = field(default_factory=dict)
    damaged: dict[CheckpointId, set[str]] = field(default_factory=dict)
    flips: dict[str, tuple[int, int]] = field(default_factory=dict)
    copies: dict[str, dict[str, bytes]] = field(default_factory=dict)
    removing: set[CheckpointId] = field(default_factory=set)
    """Whose removal a process has begun that died then: its tombstone may still be there."""

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
        """I7: what `latest` means in any run, and what is pinned."""
        runs = {run for run, _ in self.parents}
        return set(self.pins.values()) | {id for run in runs for id in list(self.walk(run))[:1]}

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

    def grace_left_s(self, id: CheckpointId, now_s: float, grace_s: float) -> float:
        return grace_s - (now_s - self.marked[id]) if id in self.marked else grace_s

    def collect(self, now_s: float, grace_s: float, dead: set[str]) -> None:
        """Gc marks what has no mark, and deletes once the grace is over; an hour later what can be brought back. What a
        living owner's attempt may still be writing is left alone."""
        for id in [*self.trash, *self.unfinished]:
            if id in self.unfinished and id.run not in dead and id.attempt == self.highest(id.run):
                continue
            if id not in self.marked:
                self.marked[id] = now_s
            elif now_s - self.marked[id] >= grace_s + (MARGIN_S if id in self.trash else 0):
                self._drop(id)

    def forget(self, id: CheckpointId) -> None:
        """Retention has freed it."""
        del self.committed[id]
        self._drop(id)

    def _drop(self, id: CheckpointId) -> None:
        self.trash.pop(id, None)
        self.unfinished.pop(id, None)
        self.marked.pop(id, None)
        for name in self.damaged.pop(id, set()):
            self.flips.pop(name, None)
