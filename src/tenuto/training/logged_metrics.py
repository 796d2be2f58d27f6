"""What is logged beside a save: metrics that policies read, and metrics and tags noted once it is committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tenuto.engine.save.handle import Save
from tenuto.errors import MetricNotLogged, TenutoError, did_you_mean
from tenuto.model.canonical_json import tag_number
from tenuto.model.ids import CheckpointId
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.save import Moment, SavePolicy
from tenuto.repo.lineage import walk
from tenuto.repo.notes import add_note, known_metrics
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.refs import find_tag, is_damaged, put_ref
from tenuto.repo.repository import Repo


class SavedMetrics:
    """The saves of the line of training, oldest first, with the metrics that the policy reads."""

    def __init__(self, policy: SavePolicy) -> None:
        self._wanted = policy.metrics()
        self._saves: list[tuple[Save, dict[str, float]]] = []

    def begin(self, repo: Repo, run: str, attempt: Attempt) -> None:
        """Reads the metrics of the saves that lead to the restored checkpoint."""
        if self._wanted:
            for id in walk(repo, run, below=attempt.number + 1):
                save = Save(id, "", reason="restored")
                save.end()
                self._saves.insert(0, (save, known_metrics(repo, id)))

    def add(self, save: Save, metrics: Mapping[str, float]) -> None:
        """Adds metrics of a save, also those that come late: the next decision compares with them."""
        wanted = {name: value for name, value in metrics.items() if name in self._wanted}
        for known, before in reversed(self._saves):
            if known.id == save.id:
                before.update(wanted)
                return
        if wanted:
            self._saves.append((save, wanted))

    def metrics(self) -> list[dict[str, float]]:
        """Returns those of each save that has not failed."""
        return [metrics for save, metrics in self._saves if save.state != "failed"]


class CarriedMetrics:
    """Metrics of steps that have no checkpoint: the next checkpoint has them, of each name the newest value."""

    def __init__(self) -> None:
        self._waiting: dict[str, float] = {}
        self._taken: list[tuple[Save, dict[str, float]]] = []
        """Saves that have not ended yet, with all their metrics: where one fails, they wait again."""

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds those of a step that is left without a save."""
        self._waiting.update(metrics)

    def with_those_of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns what a checkpoint of the step that has logged `metrics` would have."""
        return {**self.waiting, **metrics}

    def taken(self, save: Save, metrics: Mapping[str, float]) -> None:
        """Says that a save has them: none of those before waits any more, unless it fails."""
        self._taken.append((save, dict(metrics)))
        self._waiting = {}

    def noted(self, save: Save, metrics: Mapping[str, float]) -> None:
        """Adds what came after its save was taken."""
        for taken, known in self._taken:
            if taken is save:
                known.update(metrics)

    @property
    def waiting(self) -> dict[str, float]:
        """Those that are in no checkpoint, nor in a save that may still become one."""
        under_way = []
        for save, metrics in self._taken:
            if not save.done:
                under_way.append((save, metrics))
            elif not save.committed:
                self._waiting = {**metrics, **self._waiting}
        self._taken = under_way
        return self._waiting


PATIENCE_STEPS = 1000
"""Steps after which a metric that nothing has logged is reported, in a loop without epochs."""
PATIENCE_EPOCHS = 2
"""Ends of epochs after which it is reported: a validation may belong to each second one."""


class UnloggedMetrics:
    """Warns of metrics that policies read and nothing has logged: a misspelt name saves nothing, or keeps
    everything."""

    def __init__(self, policy: SavePolicy, warn: Callable[[str], None]) -> None:
        self._policy = policy
        self._asks_by = policy.metrics()
        self._warn = warn
        self._logged: set[str] = set()
        self._asked_step: int | None = None
        self._epochs_ended = 0
        self._warned = False
        self._complete_for: KeepPolicy | Literal["nothing"] | None = "nothing"
        """With which `keep` nothing was missing when it was last looked: what is logged only grows."""
        self._warned_of: set[str] = set()

    @property
    def logged(self) -> frozenset[str]:
        return frozenset(self._logged)

    def seen(self, metrics: Mapping[str, float]) -> None:
        self._logged.update(metrics)

    def asked(self, moment: Moment, first_step: int, keep: KeepPolicy | None) -> None:
        """Records that the policy is asked. Warns once that has happened for long enough, since a job that is killed
        never comes to its end. `keep`: None while nothing has been saved that it could judge."""
        self._asked_step = moment.step
        if moment.metrics:
            self.seen(moment.metrics)
        self._epochs_ended += moment.epoch_ended
        steps = moment.step - first_step if moment.epoch is None else 0
        if self._warned or keep is self._complete_for:
            return
        if steps >= PATIENCE_STEPS or self._epochs_ended >= PATIENCE_EPOCHS:
            self._warned = self.warn_of_missing(keep)
            self._complete_for = keep

    def warn_of_missing(self, keep: KeepPolicy | None) -> bool:
        """Warns of the metrics that are missing, once of each policy; returns whether there are any."""
        unasked = sorted(self._asks_by - self._logged) if self._asked_step is not None else []
        if unasked:
            self._warn_of(unasked, f"{self._policy!r} asks by", "that part of it saves nothing")
        missing = sorted(keep.metrics() - self._logged) if keep is not None else []
        if missing:
            self._warn_of(missing, f"{keep!r} uses", "until then all are kept")
        return bool(unasked or missing)

    def _warn_of(self, missing: Sequence[str], who: str, so: str) -> None:
        if who in self._warned_of:
            return
        self._warned_of.add(who)
        names, there = ", ".join(map(repr, missing)), ", ".join(map(repr, sorted(self._logged))) or "none"
        message = (
            f"{who} {names}, which nothing has logged up to step {self._asked_step or 0} (metrics logged: {there}); "
            f"{so}"
        )
        hint = did_you_mean(missing[0], self._logged) or f"ckpt.log({missing[0]}=...)"
        self._warn(str(MetricNotLogged(message, hint=hint)))


@dataclass(slots=True)
class _Notes:
    save: Save
    metrics: dict[str, float] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)


class DeferredNotes:
    """Metrics that came late, and tags, which wait for their saves to be committed. From any thread; warns of what
    fails."""

    def __init__(self, repo: Repo, *, warn: Callable[[str], None]) -> None:
        self._repo = repo
        self._warn = warn
        self._lock = threading.Lock()
        self._pending: dict[CheckpointId, _Notes] = {}

    def note(self, save: Save, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._pending.setdefault(save.id, _Notes(save)).metrics.update(metrics)

    def tag(self, save: Save, names: Iterable[str]) -> None:
        with self._lock:
            tags = self._pending.setdefault(save.id, _Notes(save)).tags
            tags.extend(name for name in names if name not in tags)

    @property
    def waits(self) -> bool:
        """Whether something of a save that has ended is still to be written."""
        with self._lock:
            return any(notes.save.done for notes in self._pending.values())

    def write(self) -> None:
        """Writes what belongs to saves that have ended; drops the metrics of one that failed, which is reported
        elsewhere."""
        with self._lock:
            ready = [notes for notes in self._pending.values() if notes.save.done]
            for notes in ready:
                del self._pending[notes.save.id]
        for notes in ready:
            if notes.save.committed:
                self._note(notes)
                self._tag(notes)
            elif notes.tags:
                self._warn(f"{notes.save.id} was not saved, and so not tagged {', '.join(notes.tags)}")

    def _note(self, notes: _Notes) -> None:
        if not notes.metrics:
            return
        body = {name: tag_number(value) for name, value in notes.metrics.items()}
        try:
            add_note(self._repo, notes.save.id, "metric", body)
        except TenutoError as error:
            self._warn(f"the metrics {sorted(body)} of {notes.save.id} could not be noted: {error.message}")

    def _tag(self, notes: _Notes) -> None:
        for name in notes.tags:
            try:
                before = None if is_damaged(self._repo, "tag", name) else find_tag(self._repo, name)
                put_ref(self._repo, "tag", name, notes.save.id)
                if before is not None and before.run != notes.save.id.run:
                    self._warn(f"the tag {name!r} has moved from {before} of another run to {notes.save.id}")
            except TenutoError as error:
                self._warn(f"{notes.save.id} could not be tagged {name!r}: {error.message}")
