"""Metrics that policies go by and nothing has logged: a misspelt name saves nothing, or keeps everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tenuto.engine.save.handle import Save
from tenuto.errors import MetricNotLogged
from tenuto.maintenance.facts import known_metrics
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.save import Moment, SavePolicy
from tenuto.repo.lineage import walk
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo

# --------------------------------------------------------------------------------------------------
# What was saved before on the line of training that a process goes on with.


class SavedMetrics:
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


PATIENCE_STEPS = 1000
"""Steps after which such a metric is told of, if no epoch has ended before."""


class UnloggedMetrics:
    """What the trainings of one Checkpointer have logged, against what its policies ask by."""

    def __init__(self, policy: SavePolicy, warn: Callable[[str], None]) -> None:
        self._policy = policy
        self._warn = warn
        self._seen: set[str] = set()
        self._asked_step: int | None = None
        self._told = False

    @property
    def logged(self) -> frozenset[str]:
        return frozenset(self._seen)

    def seen(self, metrics: Mapping[str, float]) -> None:
        self._seen.update(metrics)

    def asked(self, moment: Moment, first_step: int, keep: KeepPolicy | None) -> None:
        """The policy is asked. A job that is killed never comes to its end: once it has waited long enough, it is told.
        `keep`: None while nothing has been saved that it could judge."""
        self._asked_step = moment.step
        self.seen(moment.metrics)
        if not self._told and (moment.epoch_ended or moment.step >= first_step + PATIENCE_STEPS):
            self._told = self.warn_of_missing(keep)

    def warn_of_missing(self, keep: KeepPolicy | None) -> bool:
        """Says which metrics are missing; whether there was anything to say."""
        unasked = sorted(self._policy.metrics() - self._seen) if self._asked_step is not None else []
        if unasked:
            self._warn_of(unasked, f"{self._policy!r} asks by", "that part of it saves nothing")
        missing = sorted(keep.metrics() - self._seen) if keep is not None else []
        if missing:
            self._warn_of(missing, f"{keep!r} judges by", "until then all are kept")
        return bool(unasked or missing)

    def _warn_of(self, missing: Sequence[str], who: str, so: str) -> None:
        names, there = ", ".join(map(repr, missing)), ", ".join(map(repr, sorted(self._seen))) or "none"
        message = (
            f"{who} {names}, which nothing has logged up to step {self._asked_step or 0} (metrics logged: {there}); "
            f"{so}"
        )
        self._warn(str(MetricNotLogged(message, hint=f"ckpt.log({missing[0]}=...)")))
