"""Sets up a repository in several places for ranks, and checks what an operator finds of it after a crash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from tenuto.errors import NotARepository, TenutoError
from tenuto.model.ids import CheckpointId
from tenuto.repo.replicated.places import Mirror, PerNode
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.store.contract import Store
from tenuto.testing.checker import PLACE, Checker, open_without
from tenuto.testing.expectations import Expected, Presence
from tenuto.testing.simulated_disk import SimulatedDisk


@dataclass(frozen=True)
class Replicated:
    """`others`: places beside the home, the directories of so many nodes (`per_node`), or as many further copies."""

    others: int
    copies: int
    per_node: bool = False

    @property
    def places(self) -> list[str]:
        return [f"/data/{'node' if self.per_node else 'copy'}-{number}" for number in range(1, self.others + 1)]

    def node(self, rank: int, world: int) -> int:
        """Ranks that follow each other share a node."""
        return rank * self.others // world

    def leads(self, rank: int, world: int) -> bool:
        """Whether it sees to the places that it puts packs into."""
        return rank == 0 or (self.per_node and self.node(rank, world) != self.node(rank - 1, world))

    def store(self, at: Callable[[str], Store], node: int) -> ReplicatedStore:
        """As a training has it on that node."""
        if self.per_node:
            return PerNode(at(self.places[node]), home=at(PLACE), copies=self.copies, node=f"node-{node}")
        return Mirror(at(PLACE), *map(at, self.places), copies=self.copies)

    def reaches(self, node: int, place: str) -> bool:
        """Whether a process on that node finds the place."""
        return not self.per_node or place in (PLACE, self.places[node])

    @property
    def alike(self) -> bool:
        """Whether each place has what the home has."""
        return not self.per_node and self.copies == 1 + self.others


class ReplicatedChecker(Checker):
    """As any, and that checkpoints are found where so many places are lost as there are further copies: never the home,
    without which nothing is. Where all have everything, each is a repository of its own."""

    def __init__(self, replicated: Replicated) -> None:
        super().__init__()
        self._kept = replicated

    def __call__(self, disk: SimulatedDisk, expected: Expected) -> list[str]:
        return [*super().__call__(disk, expected), *self._elsewhere(disk, expected)]

    def _elsewhere(self, disk: SimulatedDisk, expected: Expected) -> Iterator[str]:
        must = [id for id, presence in expected.presence.items() if presence is Presence.MUST]
        for lost in combinations(self._kept.places, self._kept.copies - 1) if must else ():
            yield from self._without(disk, lost, must, expected)
        if self._kept.alike and expected.opened:
            for place in self._kept.places:
                yield from self._by_itself(disk, place, expected)

    def _without(
        self, disk: SimulatedDisk, lost: tuple[str, ...], must: list[CheckpointId], expected: Expected
    ) -> Iterator[str]:
        if not lost:
            return  # seen already
        try:
            repo = open_without(disk, without=lost)
            for id in must:
                found = (
                    self.check_checkpoint(disk, repo, id, expected.saved[id]) if repo.exists(id) else ["I3: it is lost"]
                )
                yield from (f"without {', '.join(lost)}: {id}: {problem}" for problem in found)
        except TenutoError as error:
            yield f"I3: without {', '.join(lost)}: {type(error).__name__}: {error}"

    def _by_itself(self, disk: SimulatedDisk, place: str, expected: Expected) -> Iterator[str]:
        """What is shown there is whole, and committed in the home. Not of one that is being removed: its manifest may
        be gone from the home, and not yet from there."""
        try:
            repo, home = open_without(disk, place), open_without(disk)
        except NotARepository:
            return  # not yet
        acknowledged = {id for line in expected.line.values() for id in line}
        for id, presence in expected.presence.items():
            if (presence is Presence.MAY and id in acknowledged) or not repo.exists(id):
                continue
            if presence is Presence.GONE:
                yield f"I2: in {place}: {id} was closed or removed, and is there"
            elif not home.exists(id):
                yield f"I1: in {place}: {id} is there, and not committed"
            else:
                found = self.check_checkpoint(disk, repo, id, expected.saved[id])
                yield from (f"in {place}: {problem}" for problem in found)
