"""What was saved before on the line of training that a process goes on with."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.engine.handle import Save
from holdfast.policy.saving import SavePolicy
from holdfast.repo.attempts import Attempt
from holdfast.repo.lineage import walk
from holdfast.repo.repository import Repo
from holdfast.upkeep.facts import known_metrics


class Line:
    """The saves of the line, oldest first, with the metrics that the policy asks by."""

    def __init__(self, policy: SavePolicy) -> None:
        self._wanted = policy.metrics()
        self._saves: list[tuple[Save, dict[str, float]]] = []

    def begin(self, repo: Repo, run: str, attempt: Attempt) -> None:
        """What the restored checkpoint ends is part of it."""
        if self._wanted:
            for id in walk(repo, run, below=attempt.number + 1):
                save = Save(id, "", reason="restored")
                save.end()
                self._saves.insert(0, (save, known_metrics(repo, id)))

    def add(self, save: Save, metrics: Mapping[str, float]) -> None:
        """Metrics of a save, also those that come late: the next decision compares with them."""
        wanted = {name: value for name, value in metrics.items() if name in self._wanted}
        for known, before in reversed(self._saves):
            if known.id == save.id:
                before.update(wanted)
                return
        if wanted:
            self._saves.append((save, wanted))

    def metrics(self) -> list[dict[str, float]]:
        """Of each save that has not failed."""
        return [metrics for save, metrics in self._saves if save.state != "failed"]
