"""The operator's view of a repository: what it holds, whether that is complete, and how to remove some of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from tenuto.api.care import Care
from tenuto.engine.read.choose import Checkpoint
from tenuto.errors import CheckpointNotFound, UsageError, did_you_mean, typed
from tenuto.events import AnySink, Emitter
from tenuto.model.canonical_json import tag_number
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Json, Manifest, Note
from tenuto.policy.numbers import metric_name, min_or_max
from tenuto.repo.best import BestSelector, Mode
from tenuto.repo.keys import KeySource, unlock
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
    from tenuto.history.bisect import Bisection
    from tenuto.history.compare import Comparison
    from tenuto.history.fork import ForkPlan
    from tenuto.history.rollback import RollbackPlan
    from tenuto.history.rows import Row
    from tenuto.history.timeline import Timeline
    from tenuto.maintenance.status import Status
    from tenuto.report.facts import Report


LONGEST: Final = 10_000
"""Characters of a note."""


class Repository(Care):
    """A repository, opened for inspection; a sealed one by `key`, as in `load`, or by what the environment has. Without
    the key it can be looked at, and what would put a note, a tag, a pin or a claim raises KeyMissing. Raises
    NotARepository (naming the nearest one), FormatTooNew, StoreError, KeyMissing, WrongKey."""

    def __init__(self, where: Where, *, key: KeySource | None = None, sinks: Iterable[AnySink] = ()) -> None:
        self.repo = Repo.open(open_store(redirected(where)))
        unlock(self.repo, key)
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
        return self.repo.checkpoints(run)[::-1]

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
