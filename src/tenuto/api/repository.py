"""The operator's view of a repository: what it holds, whether that is complete, and how to remove some of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tenuto.engine.read.choose import Checkpoint
from tenuto.errors import CheckpointNotFound, did_you_mean, typed
from tenuto.events import AnySink, Emitter
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Manifest, Note
from tenuto.policy.numbers import metric_name, min_or_max
from tenuto.repo.best import BestSelector, Mode
from tenuto.repo.lineage import latest, resolve, walk
from tenuto.repo.notes import notes, with_notes
from tenuto.repo.refs import check_tag, clear_ref, find_tag, is_damaged, is_name, list_tags, put_ref
from tenuto.repo.repository import Repo
from tenuto.store.contract import Where
from tenuto.store.registry import open_store, redirected


class Repository:
    """A repository, opened for inspection. Raises NotARepository (naming the nearest one), FormatTooNew, StoreError."""

    def __init__(self, where: Where, *, sinks: Iterable[AnySink] = ()) -> None:
        self.repo = Repo.open(open_store(redirected(where)))
        self._emitter = Emitter.of(sinks)

    @property
    def url(self) -> str:
        """Where it lies."""
        return self.repo.url

    @property
    def id(self) -> str:
        """Its identity, drawn when it was created; a copy has the same one."""
        return self.repo.id

    def runs(self) -> list[str]:
        """Returns the names of its runs."""
        return self.repo.runs()

    def latest(self, run: str = "main") -> CheckpointId | None:
        """Returns the checkpoint that `latest` means now, or None."""
        return latest(self.repo, run)

    def walk(self, run: str = "main") -> Iterator[CheckpointId]:
        """Yields the line of training that leads to `latest`, newest first."""
        return walk(self.repo, run)

    def checkpoints(self, run: str = "main") -> list[CheckpointId]:
        """Returns every committed checkpoint of the run, on the line of training or left behind, newest first."""
        return [
            CheckpointId(run, attempt, step)
            for attempt in reversed(self.repo.attempts(run))
            for step in self.repo.committed(run, attempt)
        ]

    def find(self, run: str = "main", step: int | str = "latest") -> CheckpointId:
        """Returns the checkpoint of a step or a tag. RunNotFound and CheckpointNotFound name what there is instead."""
        return resolve(self.repo, run, step)

    def best(self, metric: str, *, mode: Mode | None = None, run: str = "main") -> CheckpointId:
        """Returns the checkpoint with the lowest (`mode="min"`) or highest ("max") `metric`, logged with its step or
        noted later, as `load(step="best:…")` takes it.

        `mode=None`: as a `keep.best` or an `on.improve` of the training has recorded it. Of equals it is the newest;
        NaN is never best, nor is a checkpoint that is known to be damaged; lines of training that were left behind
        count too. Raises RunNotFound, CheckpointNotFound, MetricNotLogged (naming those that exist), and UsageError
        where no mode is given and none is recorded.
        """
        name = metric_name(metric, 'best("val_loss")')
        return resolve(self.repo, run, BestSelector(name, None if mode is None else min_or_max(mode, name)))

    def latest_step(self, run: str = "main") -> int | None:
        """Returns the step that `latest` means now, None if there is none. `latest` has the complete identity."""
        newest = latest(self.repo, run)
        return newest.step if newest is not None else None

    def tags(self) -> dict[str, CheckpointId]:
        """Returns the tags of all runs, and the checkpoint of each. Raises CorruptionError if one is damaged."""
        return list_tags(self.repo)

    def tag(self, name: str, step: int | str | CheckpointId = "latest", run: str = "main") -> CheckpointId:
        """Tags a checkpoint, which retention keeps from now on; moves a tag that was on another one.

        Raises UsageError for what cannot be a tag, CheckpointNotFound if the checkpoint is not there or being removed.
        """
        check_tag(name)
        return put_ref(self.repo, "tag", name, resolve(self.repo, run, step)).id

    def untag(self, name: str) -> CheckpointId | None:
        """Removes the tag, and returns the checkpoint that it was on; None if the tag is damaged. Raises
        CheckpointNotFound if there is no such tag."""
        damaged = is_name(name) and is_damaged(self.repo, "tag", name)
        found = None if damaged else find_tag(self.repo, name)
        if found is None and not damaged:
            tags = self.tags()
            raise CheckpointNotFound(
                f"there is no tag {name!r}; there are: {', '.join(tags) or 'none'}",
                subject=name,
                hint=did_you_mean(name, tags) or typed("tenuto", "ls", self.url),
            )
        clear_ref(self.repo, "tag", name)
        return found

    def checkpoint(self, id: CheckpointId) -> Checkpoint:
        """Returns the size, the number of leaves and the logged metrics of a checkpoint."""
        manifest = self.repo.manifest(id)
        return Checkpoint(self.url, id, manifest.bytes, manifest.leaves, manifest.content, manifest.metrics)

    def manifest(self, id: CheckpointId) -> Manifest:
        return self.repo.manifest(id)

    def certificate(self, id: CheckpointId) -> Mapping[str, Json]:
        """Returns the record of what a resume from it covers, and of what could make it inexact."""
        return self.repo.manifest(id).certificate

    def notes(self, id: CheckpointId) -> list[Note]:
        return notes(self.repo, id)

    def metrics(self, id: CheckpointId) -> dict[str, float]:
        """Returns the metrics logged with the step and noted later; the later value counts."""
        return with_notes(self.repo.manifest(id).metrics, self.notes(id))

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"
