"""The operator's view of a repository: what it holds, whether that is complete, and how to remove some of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tenuto.engine.read.choose import Checkpoint
from tenuto.errors import CheckpointNotFound, UsageError, did_you_mean, typed
from tenuto.events import AnySink, Emitter
from tenuto.model.canonical_json import tag_number
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Manifest, Note
from tenuto.policy.numbers import metric_name, min_or_max
from tenuto.repo.best import BestSelector, Mode
from tenuto.repo.lineage import latest, resolve, walk
from tenuto.repo.notes import add_note, notes, with_notes
from tenuto.repo.refs import (
    Kind,
    Ref,
    check_tag,
    clear_ref,
    find_tag,
    is_damaged,
    is_name,
    list_tags,
    pin_name,
    put_ref,
    release,
)
from tenuto.repo.repository import Repo
from tenuto.store.contract import Where
from tenuto.store.registry import open_store, redirected

if TYPE_CHECKING:
    from tenuto.api.export import Exported
    from tenuto.api.health import CheckpointHealth
    from tenuto.api.migrate import Check, MigrationReport
    from tenuto.api.salvage import Salvaged
    from tenuto.drill.drill import DrillResult
    from tenuto.history.bisect import Bisection
    from tenuto.history.compare import Comparison
    from tenuto.history.diff import Diff
    from tenuto.history.fork import ForkPlan
    from tenuto.history.rollback import RollbackPlan
    from tenuto.history.rows import Row
    from tenuto.history.timeline import Timeline
    from tenuto.maintenance.checkpoint_copy import RunCopy
    from tenuto.maintenance.compare_copy import CopyCheck
    from tenuto.maintenance.copy_elsewhere import CopyReport
    from tenuto.maintenance.rename_run import RenamedRun
    from tenuto.maintenance.repair import RepairReport
    from tenuto.maintenance.repair_plan import RepairPlan
    from tenuto.maintenance.scrub import ScrubReport
    from tenuto.maintenance.status import Status
    from tenuto.maintenance.verify import VerifyReport
    from tenuto.policy.spikes import Spike
    from tenuto.report.facts import Report


LONGEST: Final = 10_000
"""Characters of a note."""


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

    # -- the history of a run, and going back in it --------------------------------------------------------------------

    def log(self, run: str = "main", *, limit: int | None = None) -> Timeline:
        """Returns the run's history, newest first: what each checkpoint continues, what was left behind, rollbacks with
        their reasons, forks, metrics, tags, pins. `limit`: of so many checkpoints. Raises RunNotFound,
        CheckpointNotFound."""
        from tenuto.history.timeline import timeline

        return timeline(self.repo, run, limit=limit)

    def compare(
        self,
        steps: Iterable[int | str | CheckpointId] = (),
        *,
        run: str = "main",
        runs: Iterable[str] = (),
        metric: str | None = None,
        mode: Mode | None = None,
    ) -> Comparison:
        """Compares the checkpoints `steps` of `run`, and of each of `runs` its latest, or its best by `metric`; with
        neither, the latest of every run: metrics, sizes, and the settings that differ. `rows()` of the result makes a
        table.

        Raises CheckpointNotFound, CorruptionError, MetricNotLogged, and UsageError where nothing says in which
        direction `metric` improves, by which the best of a run is to be found.
        """
        from tenuto.history.compare import compare, newest_of

        steps, runs = list(steps), list(runs)
        name = None if metric is None else metric_name(metric, 'compare(metric="val_loss")')
        selector = None if name is None else BestSelector(name, None if mode is None else min_or_max(mode, name))
        ids = [resolve(self.repo, run, step) for step in steps]
        ids += newest_of(self.repo, runs if steps or runs else self.runs(), selector)
        return compare(self.repo, ids, selector)

    def rollback(
        self, step: int | str | CheckpointId, *, run: str = "main", reason: str = "", force: bool = False
    ) -> RollbackPlan:
        """Makes an earlier checkpoint, or one that was left behind, what `latest` means and training resumes from.
        Nothing is removed: what came after it is left behind. Returns what was done.

        Raises CheckpointNotFound, RunInUse while a process trains the run, and CorruptionError for a damaged checkpoint
        without `force`.
        """
        from tenuto.history.rollback import execute, plan_rollback

        plan = plan_rollback(self.repo, run, resolve(self.repo, run, step), reason=reason, force=force)
        execute(self.repo, plan)
        return plan

    def fork(
        self,
        step: int | str | CheckpointId,
        new_run: str,
        *,
        run: str = "main",
        reason: str = "",
        force: bool = False,
    ) -> ForkPlan:
        """Begins the run `new_run` with a checkpoint of `run`, whose bytes they share: `Checkpointer(run=new_run)`
        resumes from it. Raises UsageError where there is such a run, CheckpointNotFound, and CorruptionError for a
        damaged checkpoint without `force`."""
        from tenuto.history.fork import execute, plan_fork

        plan = plan_fork(self.repo, resolve(self.repo, run, step), new_run, reason=reason, force=force)
        execute(self.repo, plan)
        return plan

    def bisect(
        self,
        *,
        where: str | None = None,
        nan: bool | str = False,
        test: Callable[[CheckpointId], bool | None] | None = None,
        run: str = "main",
        good: int | str | CheckpointId | None = None,
        bad: int | str | CheckpointId = "latest",
        linear: bool = False,
    ) -> Bisection:
        """Finds the first checkpoint on the line of training to `bad` for which something holds, from `good` or the
        oldest on, assuming that it holds from then on; `linear` asks every checkpoint instead.

        One of: `where`, a condition such as "loss > 3"; `nan`, True or a glob over paths of leaves; `test`, a function
        that returns True where it holds and None where it cannot tell. Raises CheckpointNotFound, and UsageError for a
        condition that makes no sense and for ends that are not on one line.
        """
        from tenuto.history import bisect as history

        given = [what for what in (where is not None, nan is not False, test is not None) if what]
        if len(given) != 1:
            raise UsageError("bisect() takes one of where=, nan= and test=", hint='bisect(where="loss > 3")')
        asked: history.Test
        if where is not None:
            asked = history.by_query(self.repo, where)
        elif test is not None:
            asked = history.by_function(test)
        else:
            asked = history.by_nan(self.repo, nan if isinstance(nan, str) else None)
        ends = [None if step is None else resolve(self.repo, run, step) for step in (good, bad)]
        assert ends[1] is not None
        return history.bisect(history.line_between(self.repo, run, ends[0], ends[1]), asked, linear=linear)

    def pin(self, step: int | str | CheckpointId = "latest", *, run: str = "main", reason: str = "") -> Ref:
        """Pins a checkpoint: retention keeps it until `unpin`. Raises CheckpointNotFound."""
        return self._keep("pin", step, run, reason)

    def unpin(self, step: int | str | CheckpointId, *, run: str = "main") -> list[Ref]:
        """Removes the pins of a checkpoint, and returns them. Raises CheckpointNotFound where it has none."""
        return self._release("pin", step, run)

    def hold(self, step: int | str | CheckpointId = "latest", *, run: str = "main", reason: str = "") -> Ref:
        """Puts a checkpoint on hold: nothing removes it until `release`, whoever asks for that. Raises
        CheckpointNotFound."""
        return self._keep("hold", step, run, reason)

    def release(self, step: int | str | CheckpointId, *, run: str = "main") -> list[Ref]:
        """Ends the hold on a checkpoint, and returns it. Raises CheckpointNotFound where there is none."""
        return self._release("hold", step, run)

    def _keep(self, kind: Kind, step: int | str | CheckpointId, run: str, reason: str) -> Ref:
        from tenuto.history.rollback import check_reason

        id = resolve(self.repo, run, step)
        return put_ref(self.repo, kind, pin_name(id), id, check_reason(reason))

    def _release(self, kind: Kind, step: int | str | CheckpointId, run: str) -> list[Ref]:
        id = resolve(self.repo, run, step)
        found = release(self.repo, kind, id)
        if not found:
            what = "on hold" if kind == "hold" else "pinned"
            raise CheckpointNotFound(
                f"{id} is not {what}", subject=str(id), hint=typed("tenuto", "log", self.url, "--run", id.run)
            )
        return found

    def note(self, step: int | str | CheckpointId, text: str, *, run: str = "main") -> Note:
        """Notes a text on a checkpoint, for people. Raises CheckpointNotFound; UsageError for an empty text."""
        if not isinstance(text, str) or not text.strip():
            raise UsageError("the note has no text", hint='note(500, "before the learning rate was changed")')
        if len(text) > LONGEST:
            raise UsageError(
                f"the note has {len(text):,} characters: {LONGEST:,} at most",
                subject=text[:40],
                hint="put the rest where the note can point to",
            )
        return add_note(self.repo, resolve(self.repo, run, step), "text", {"text": text})

    def add_metrics(
        self, step: int | str | CheckpointId, metrics: Mapping[str, float], *, run: str = "main"
    ) -> dict[str, float]:
        """Adds metrics to a checkpoint, as of an evaluation that ran later, and returns all that it has; of one that it
        had already the later value counts. `keep.best`, `best:METRIC` and listings use them. Raises CheckpointNotFound,
        and UsageError for what is not a number."""
        body: dict[str, Json] = {}
        for name, value in metrics.items():
            metric_name(name, "add_metrics(500, {'val_loss': 2.1})")
            try:
                body[name] = tag_number(float(value))
            except (TypeError, ValueError, OverflowError):
                raise UsageError(
                    f"{name}={value!r} is not a number", subject=name, hint="add_metrics(500, {'val_loss': 2.1})"
                ) from None
        if not body:
            raise UsageError("no metric is given", hint="add_metrics(500, {'val_loss': 2.1})")
        id = resolve(self.repo, run, step)
        add_note(self.repo, id, "metric", body)
        return self.metrics(id)

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

    def copy_to(
        self,
        to: Where | None = None,
        *,
        steps: int | str | CheckpointId | Iterable[int | str | CheckpointId] = "latest",
        run: str = "main",
        to_run: str | None = None,
        to_step: int | None = None,
        stand_alone: bool = False,
    ) -> RunCopy:
        """Copies checkpoints of `run` into run `to_run` of this repository, or of `to`, which is made where there is no
        repository. Within a repository the copies share all data files; into another one every byte is copied and
        verified. A training of that run there resumes from the newest. All appear at once, or none.

        `to_run`: None: the same name. `to_step`: the step of a single copy; None: that of its source. `stand_alone`:
        copies the data within a repository too. What shares data files is in no tier, and `replicate` leaves it out.

        Raises UsageError where names meet, the run has come as far already, or sealed bytes would leave their
        repository; RunInUse, CheckpointNotFound and CorruptionError, and errors of the stores.
        """
        from tenuto.maintenance.checkpoint_copy import execute, plan_copies

        wanted = [steps] if isinstance(steps, int | str | CheckpointId) else steps
        ids = [resolve(self.repo, run, step) for step in wanted]
        plan = plan_copies(self.repo, ids, to=to, run=to_run, step=to_step, stand_alone=stand_alone)
        return execute(self.repo, plan, to, emitter=self._emitter)

    def rename_run(self, run: str, new: str) -> RenamedRun:
        """Gives a run another name: its checkpoints with their lines of training, metrics, times and tags, no data
        copied. The old names go into the trash, where `tenuto undelete` finds them for 24 h. Called again, it continues
        where it was cut off.

        Raises RunNotFound, RunInUse while a process trains the run, RemovalRefused where a pin or a hold names one of
        its checkpoints or another run would resume from one, and UsageError where `new` has checkpoints of its own.
        """
        from tenuto.maintenance.rename_run import execute, plan_rename

        return execute(self.repo, plan_rename(self.repo, run, new), emitter=self._emitter)

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

    def drill(
        self,
        step: int | str | CheckpointId | None = None,
        *,
        run: str = "main",
        place: Where | None = None,
        target_s: float | None = None,
        timeout_s: float = 3600.0,
        command: Sequence[str] = (),
        steps: int | None = None,
        metrics: Sequence[str] = (),
        tolerance: float = 0.0,
        due_s: float | None = None,
        note: bool = True,
    ) -> DrillResult:
        """Proves a restore as a stranger would make it: a new process loads the checkpoint, and every leaf and value
        that it holds is compared with what was saved. With `command`, that script then trains on from a copy, and the
        metrics that it logs are compared with those that later checkpoints of the line have recorded. The proof, or
        the damage, is noted on the checkpoint (`note`).

        - `step`: None: the latest; with a command the newest that has later checkpoints with metrics.
        - `place`: a location of the repository, or a copy of it, to restore from; None: as a restore does it.
        - `target_s`: within how many seconds the state shall be in memory; `timeout_s`: after how many it is given up.
        - `steps`, `metrics`: how far the script trains (None: to the next checkpoint with metrics), and what is
          compared of it (all, where empty), bit for bit or within the relative `tolerance`.
        - `due_s`: nothing is done while the newest proof of the run is younger.

        What is wrong is in the result, which is false then. Raises RunNotFound, CheckpointNotFound, UsageError where
        something cannot be drilled, and errors of the store.
        """
        from tenuto.drill.drill import execute, plan_drill

        plan = plan_drill(
            self.repo,
            step,
            run=run,
            place=place,
            target_s=target_s,
            timeout_s=timeout_s,
            command=command,
            steps=steps,
            metrics=metrics,
            tolerance=tolerance,
            due_s=due_s,
        )
        return execute(self.repo, plan, note=note, emitter=self._emitter)

    def diff(
        self,
        first: int | str | CheckpointId,
        second: int | str | CheckpointId = "latest",
        *,
        run: str = "main",
        where: Where | None = None,
        entry: str | None = None,
    ) -> Diff:
        """Returns how the second checkpoint differs from the first: structure, values of each leaf, plain values,
        environment and certificate.

        where: another repository, in which the second one lies, or a safetensors file, whose names are compared with
            those of the state's model. entry: only what is at or below this path.

        Leaves are read a block at a time, and not at all where the digests of their chunks are equal. Raises
        LeafNotFound where nothing is at `entry`, and what reading a checkpoint raises.
        """
        from tenuto.api.diff import diff

        return diff(self.repo, first, second, run=run, where=where, entry=entry)

    def health(self, step: int | str | CheckpointId = "latest", run: str = "main") -> CheckpointHealth:
        """Returns what the save of a checkpoint has found of its values: its health, and statistics of each leaf."""
        from tenuto.api.health import health

        return health(self.repo, resolve(self.repo, run, step))

    def spikes(self, metric: str, run: str = "main") -> list[Spike]:
        """Returns where a logged metric that falls, such as a loss, jumps up or diverges, of the checkpoints that lead
        to `latest`, oldest first. Raises MetricNotLogged, naming those that exist."""
        from tenuto.api.health import spikes_of

        return spikes_of(self.repo, run, metric)

    def verify(
        self,
        *,
        run: str | None = None,
        steps: Iterable[int | str | CheckpointId] | None = None,
        read: str = "all",
        limit: int | str | None = None,
        resume: bool = False,
        note: bool = False,
    ) -> VerifyReport:
        """Reads every byte and compares it with what was saved; of everything, or of some checkpoints of `run`.

        - `read`: a part, such as "5%" or "20GiB": what was longest not read. Repeated, it reads everything.
        - `limit`: bytes per second at most, such as "100MB/s".
        - `resume`: continues a verification that was interrupted.
        - `note`: notes the result with each checkpoint of which every byte was read.

        What is damaged is in the report, and raises nothing. Raises CheckpointNotFound, UsageError and StoreError.
        """
        from tenuto.maintenance.reading import parse_amount
        from tenuto.maintenance.verify import execute, plan_parts, plan_verify
        from tenuto.model.sizes import parse_rate

        amount, rate = parse_amount(read), None if limit is None else parse_rate(limit, "limit")
        plan = plan_verify(self.repo, self._chosen(run, steps), listed=steps is None)
        # Of single checkpoints nothing is kept for later, unless a part of them is asked for.
        in_parts = steps is None or amount is not None or rate is not None or resume
        parts = plan_parts(self.repo, plan, amount=amount, rate=rate, resume=resume) if in_parts else None
        return execute(self.repo, plan, emitter=self._emitter, note=note, parts=parts)

    def scrub(self, *, every: str = "30d", limit: int | str | None = None, duration: str | None = None) -> ScrubReport:
        """Verifies each checkpoint that was not verified for `every` ("12h", "30d"), the oldest first, and notes the
        results. `limit`: bytes per second at most; `duration`: for how long. What is left then is for the next call."""
        from tenuto.maintenance.reading import parse_duration
        from tenuto.maintenance.scrub import scrub
        from tenuto.model.sizes import parse_rate

        return scrub(
            self.repo,
            every_s=parse_duration(every, "every"),
            rate=None if limit is None else parse_rate(limit, "limit"),
            seconds=None if duration is None else parse_duration(duration, "for"),
            emitter=self._emitter,
        )

    def plan_repair(
        self,
        *,
        run: str | None = None,
        steps: Iterable[int | str | CheckpointId] | None = None,
        sources: Sequence[Where] = (),
    ) -> RepairPlan:
        """Returns what is damaged, and what `repair` would put back from where: every byte is read, and nothing
        written. The arguments are those of `repair`."""
        from tenuto.maintenance.repair_plan import plan_repair
        from tenuto.maintenance.repair_sources import Sources

        with Sources.of(self.repo, sources) as found:
            return plan_repair(found, self._chosen(run, steps), emitter=self._emitter)

    def repair(
        self,
        *,
        run: str | None = None,
        steps: Iterable[int | str | CheckpointId] | None = None,
        sources: Sequence[Where] = (),
    ) -> RepairReport:
        """Puts back what is damaged or missing, of everything or of some checkpoints of `run`, and notes the result.

        Bytes come from the repository's other locations and copies, from `sources` (copies or backups of it), from
        checkpoints with equal chunks, and from what a process has left in this machine's memory. Each is verified
        before it is put. What nobody has stays as it is: the report names the leaves that are lost, and an older
        checkpoint that has them.

        Raises RepositoryError where this is no primary, UsageError where a source is another repository,
        CheckpointNotFound, and the error of a store that fails.
        """
        from tenuto.maintenance.repair import execute
        from tenuto.maintenance.repair_plan import plan_repair
        from tenuto.maintenance.repair_sources import Sources

        with Sources.of(self.repo, sources) as found:
            plan = plan_repair(found, self._chosen(run, steps), emitter=self._emitter)
            return execute(found, plan, emitter=self._emitter)

    def salvage(
        self,
        out: str | Path,
        *,
        run: str = "main",
        step: int | str | CheckpointId = "latest",
        force: bool = False,
    ) -> Salvaged:
        """Writes the tensors of a damaged checkpoint that are whole to `out`, in the format of its suffix; the result
        lists the others. Raises CorruptionError where nothing is whole, and UsageError where `out` is there."""
        from tenuto.api.salvage import salvage

        return salvage(self.repo, resolve(self.repo, run, step), Path(out), force=force)

    def _chosen(self, run: str | None, steps: Iterable[int | str | CheckpointId] | None) -> list[CheckpointId] | None:
        """Returns the checkpoints that are meant; None for everything."""
        if steps is not None:
            return [resolve(self.repo, run or "main", step) for step in steps]
        return None if run is None else sorted(self.checkpoints(run))

    def status(self, run: str | None = None, *, newest: int = 4) -> Status:
        """Returns which of the newest checkpoints is whole in which place, how far each place is behind, who trains,
        and what training resumes from when a process, this node or the site is lost. Looks at names and lengths only.
        """
        from tenuto.maintenance.status import status

        return status(self.repo, run=run, newest=newest)

    def report(self, runs: Sequence[str] | None = None) -> Report:
        """Returns what there is to know of all runs, or of those named: their checkpoints and lines of training,
        metrics and what stands out in them, sizes, the cost of saves, what was verified, and what needs attention.

        `report().write("report.html")` makes a page of it. Reads names, manifests and notes, and no data file. Raises
        RunNotFound.
        """
        from tenuto.report.facts import report

        return report(self.repo, runs)

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"
