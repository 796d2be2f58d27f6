"""The operator's view of a repository: what it holds, whether that is complete, and how to remove some of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from tenuto.api.export import Exported
    from tenuto.api.migrate import Check, MigrationReport
    from tenuto.history.rows import Row
    from tenuto.maintenance.compare_copy import CopyCheck
    from tenuto.maintenance.copy_elsewhere import CopyReport
    from tenuto.maintenance.status import Status


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

    def query(
        self, where: str | None = None, *, sort: str | None = None, limit: int | None = None, refresh: bool = False
    ) -> list[Row]:
        """Returns the checkpoints of all runs that match, such as `query("val_loss < 2 and step > 1000",
        sort="val_loss", limit=10)`.

        where: comparisons of fields (step, size, age, tag, verified, …: `tenuto.history.query.FIELDS`) and of metrics,
            with `and`, `or`, `not`, `in [...]`, `is None`; sizes and ages as text: `size > "2 GiB"`, `age < "3d"`.
        sort: a field or a metric; a minus before it puts the highest first. What lacks it comes last. By default those
            of each run stand together, newest first.
        refresh: looks at every checkpoint first.

        What manifests and notes say is kept in the user's cache directory. Each row that is returned is as the
        repository has it now; but with a `limit`, which of them match goes for notes of the last hour, such as a metric
        that another process noted late, by what was known before, unless `refresh` is given. Raises UsageError, which
        names the column of a mistake, and names that no checkpoint has.
        """
        from tenuto.history.catalog_cache import query
        from tenuto.history.query import Order, Query

        found = None if where is None else Query.parse(where)
        order = None if sort is None else Order.parse(sort)
        return query(self.repo, found, order, limit, refresh=refresh)

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

    def replicate(
        self,
        to: Where,
        *,
        run: str | None = None,
        steps: Iterable[int | str | CheckpointId] | None = None,
        prune: bool = False,
        read: bool = False,
    ) -> CopyReport:
        """Copies checkpoints to another store, every byte verified on the way, and returns what it has copied.

        `to` becomes a copy of this repository, from which everything can be read and in which nobody can train. What it
        has already is skipped; a copy that was cut off is continued. Without `run` and `steps` all is copied. `prune`
        removes there what this repository has removed; `read` reads every byte of the copy first, and replaces what is
        damaged.

        Raises RepositoryError where something else lies in `to`; what goes wrong with one checkpoint is in `failed` of
        the report.
        """
        from tenuto.maintenance.compare_copy import check_copy
        from tenuto.maintenance.copy_elsewhere import execute, plan_copy
        from tenuto.maintenance.copy_record import is_copy

        target = open_store(to)
        ids = None if steps is None else [resolve(self.repo, run or "main", step) for step in steps]
        damaged = check_copy(self.repo, target, run=run, every_byte=True).damaged if read and is_copy(target) else ()
        plan = plan_copy(self.repo, target, run=run, ids=ids, damaged=damaged)
        return execute(self.repo, target, plan, prune=prune, emitter=self._emitter)

    def check_copy(self, of: Where, *, run: str | None = None, read: bool = False) -> CopyCheck:
        """Compares a copy that `replicate` has made with this repository: whether it lags behind, has something else
        under the same names, or is damaged; with `read` every byte of its data files. Writes nothing. Raises
        NotARepository and RepositoryError where no copy of this repository is."""
        from tenuto.maintenance.compare_copy import check_copy

        return check_copy(self.repo, open_store(of), run=run, every_byte=read, emitter=self._emitter)

    @staticmethod
    def migrate(
        source: str | Path,
        where: Where,
        *,
        run: str = "main",
        step: int | None = None,
        format: str | None = None,
        entry: str | None = None,
        rename: Sequence[str] = (),
        strip: str = "",
        dtype: str | None = None,
        check: Check = "samples",
        skip_damaged: bool = False,
    ) -> MigrationReport:
        """Makes the checkpoint of another tool at `source`, or all of those in it, checkpoints of `run` in `where`, a
        repository that is made where there is none.

        Each is read without running code from it and without memory for its tensors, written, and compared with its
        source, in samples or (`check="all"`) in every byte. Only when all of them are, they become visible, in the
        order of their steps.

        - `step`: of a single one that tells none; None: the one after `latest`.
        - `format`: of `tenuto.formats.formats()`, where the content alone does not tell.
        - `entry`: of the state, below which it is put; bare weights go below "model".
        - `rename`, `strip`: rules for names such as `"^old=new"`, regular expressions; a prefix to take off first.
        - `dtype`: what floating-point tensors are rounded to.
        - `skip_damaged`: leaves out what cannot be read.

        Raises StoreError and UsageError where there is nothing of a known format or a rule meets nothing, MissingExtra,
        CorruptionError, Unserialisable, RunInUse, and SaveFailed where something else came back than was read.
        """
        from tenuto.api.migrate import Rules, execute, plan_migration
        from tenuto.formats.convert import Renaming, float_type

        rules = Rules(Renaming(rename, strip), None if dtype is None else float_type(dtype), entry)
        plan = plan_migration(Path(source), where, run=run, step=step, format=format, rules=rules)
        return execute(plan, where, check=check, skip_damaged=skip_damaged)

    @staticmethod
    def adopt(
        source: str | Path,
        where: Where | None = None,
        *,
        run: str = "main",
        step: int | None = None,
        format: str | None = None,
    ) -> list[Checkpoint]:
        """Makes the checkpoints of another tool at `source` checkpoints of `run` in place: DCP directories, safetensors
        files, files of `torch.save`. No byte of them is copied or changed: the files get a second name (a hard link) in
        the repository `where`, and an index with digests of every byte. None: `source` itself becomes the repository.

        Both lie in one file system of this machine. Removing the checkpoint leaves the files. Values that are not
        tensors are read, without running code, and kept beside them. Each file is adopted by itself, in the order of
        steps; `step` is of a single one that tells none.

        Raises UsageError and StoreError where a file cannot have a second name or the run has come further,
        Unserialisable for tensors that do not lie in one piece, and what `tenuto.formats.read` raises.
        """
        from tenuto.api.adopt import adopt

        return adopt(source, where, run=run, step=step, format=format)

    def export(
        self,
        out: str | Path,
        *,
        to: str | None = None,
        run: str = "main",
        step: int | str | CheckpointId = "latest",
        entry: str | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        rename: Sequence[str] = (),
        strip: str = "",
        dtype: str | None = None,
        force: bool = False,
    ) -> Exported:
        """Writes tensors of a checkpoint to `out` in the format `to`, or that of its suffix, every byte verified.

        Without `entry`, `include`, `exclude` and `strip` they are those of the state's one model (all, where it has
        none), under their names in it. The rest is as in `migrate`; `force` replaces what is there. Raises UsageError
        for what makes no sense, and what reading a checkpoint raises.
        """
        from tenuto.api.export import Choice, export
        from tenuto.formats.convert import float_type

        rounded = None if dtype is None else float_type(dtype)
        choice = Choice(entry, include, exclude, strip, rename, rounded)
        return export(self.repo, Path(out), lambda: run, step, to=to, choice=choice, force=force, emitter=self._emitter)

    def status(self, run: str | None = None, *, newest: int = 4) -> Status:
        """Returns which of the newest checkpoints is whole in which place, how far each place is behind, who trains,
        and what training resumes from when a process, this node or the site is lost. Looks at names and lengths only.
        """
        from tenuto.maintenance.status import status

        return status(self.repo, run=run, newest=newest)

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"
