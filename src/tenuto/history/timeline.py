"""The history of a run: its checkpoints newest first, what each continues, and who went back or branched off where.

The line that leads to `latest` is one thread through it; others end where training left them behind. What a checkpoint
continues is the one saved before it in its attempt, or what its attempt came from, or, where that was removed, what is
left of the line before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from itertools import islice
from typing import Any, Literal

from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.chunk_reader import threads_for
from tenuto.errors import CorruptionError
from tenuto.model.health import Health
from tenuto.model.ids import CheckpointId, run_key
from tenuto.model.records import FORK, ROLLBACK, AttemptRecord, Note
from tenuto.record import record
from tenuto.repo.best import Measured, Mode, best_of_each, modes_of, outline
from tenuto.repo.lineage import Stretch, parent_of, resolve, stretches
from tenuto.repo.notes import notes, texts_of, unread, verification_of, with_notes
from tenuto.repo.refs import Ref, list_refs
from tenuto.repo.repository import Repo


@record
class Point:
    """One checkpoint in a history.

    after: the checkpoint that it continues, None for the first of its line.
    on_line: whether it leads to `latest`.
    bytes, created: of its save; None and empty where its manifest cannot be read (`damaged`).
    metrics: logged with the step, or noted later.
    refs: its tags, pins and holds. texts: what people have noted. checked: verified, suspect or, unchecked, empty.
    health: of its values; None where its save has not looked.
    forks: runs that were forked from it.
    """

    id: CheckpointId
    after: CheckpointId | None
    on_line: bool
    latest: bool = False
    bytes: int | None = None
    created: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    modes: Mapping[str, Mode] = field(default_factory=dict)
    damaged: bool = False
    checked: str = ""
    health: Health | None = None
    refs: tuple[Ref, ...] = ()
    texts: tuple[str, ...] = ()
    forks: tuple[str, ...] = ()
    unread: str = ""
    """Which note cannot be read, in words: its metrics are not all known."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Its tags."""
        return tuple(ref.name for ref in self.refs if ref.kind == "tag")

    @property
    def healthy(self) -> bool:
        return self.health is None or self.health.healthy


@record
class Turn:
    """An attempt that a person made: a rollback, or the fork that a run began with. `to`: the checkpoint that `latest`
    meant from then on."""

    kind: Literal["rollback", "fork"]
    run: str
    attempt: int
    to: CheckpointId
    reason: str
    created: str
    user: str


@record
class Timeline:
    """A run's history, newest first.

    points: its checkpoints, by attempt and step, and behind them those of other runs that its line goes through.
    turns: its rollbacks, and the fork that it began with, newest first.
    best: the best checkpoint shown by each metric whose direction training has recorded.
    more: whether older ones were left out.
    """

    where: str
    run: str
    latest: CheckpointId | None
    points: tuple[Point, ...]
    turns: tuple[Turn, ...]
    best: Mapping[str, CheckpointId]
    more: bool

    def series(self, metric: str) -> list[tuple[CheckpointId, float]]:
        """Returns the values of a metric along the line that leads to `latest`, oldest first."""
        line = (point for point in reversed(self.points) if point.on_line and metric in point.metrics)
        return [(point.id, point.metrics[metric]) for point in line]

    def metrics(self) -> list[str]:
        """Returns the metrics there are: those that training's policies go by first, then by name."""
        there = {name for point in self.points for name in point.metrics}
        decided = {name for point in self.points for name in point.modes} & there
        return [*sorted(decided), *sorted(there - decided)]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a flat dictionary for each checkpoint, for `pandas.DataFrame(…)`: metrics are `metrics.<name>`."""
        return [
            {
                "run": point.id.run,
                "attempt": point.id.attempt,
                "step": point.id.step,
                "on_line": point.on_line,
                "created": point.created,
                "bytes": point.bytes,
                "tags": ",".join(point.tags),
                **{f"metrics.{name}": value for name, value in point.metrics.items()},
            }
            for point in self.points
        ]


def timeline(repo: Repo, run: str, *, limit: int | None = None) -> Timeline:
    """Reads the history of a run, or its `limit` newest checkpoints: their manifests, without trees, and notes.

    Raises RunNotFound or CheckpointNotFound where there is none.
    """
    latest = resolve(repo, run)
    run = run_key(run)
    line = list(stretches(repo, run))
    there = _ids(repo, run, line)
    ids = list(there if limit is None else islice(there, limit))
    more = next(there, None) is not None
    records = _records(repo, run, min((id.attempt for id in ids if id.run == run), default=1) if more else 1)
    forks = _forks(repo, run)
    refs: dict[CheckpointId, list[Ref]] = {}
    with suppress(CorruptionError):  # of a damaged one nobody knows what it is on; `verify` reports it
        for ref in list_refs(repo):
            refs.setdefault(ref.id, []).append(ref)
    before = _Before(repo, ids)
    read = _read(repo, ids)
    points = []
    for id in ids:
        manifest, noted = read[id]
        points.append(
            Point(
                id,
                before.of(id),
                on_line=any(stretch.covers(id) for stretch in line),
                latest=id == latest,
                bytes=None if manifest is None else manifest.bytes,
                created="" if manifest is None else manifest.created,
                metrics=with_notes({} if manifest is None else manifest.metrics, noted),
                modes={} if manifest is None else modes_of(manifest),
                damaged=manifest is None,
                checked=verification_of(noted),
                health=None if manifest is None else manifest.health,
                refs=tuple(refs.get(id, ())),
                texts=texts_of(noted),
                unread=unread(id, noted),
                forks=tuple(forks.get(id, ())),
            )
        )
    whole = [one for one in points if not one.damaged]
    measured = [
        Measured(one.id, one.metrics, one.checked == "suspect", one.healthy, one.modes, one.unread) for one in whole
    ]
    turns = tuple(turn for record in records if (turn := _turn(record)) is not None)
    return Timeline(repo.url, run, latest, tuple(points), turns, best_of_each(measured, run), more)


def _ids(repo: Repo, run: str, line: Sequence[Stretch]) -> Iterator[CheckpointId]:
    """Yields the run's checkpoints, newest first, then those of other runs on its line."""
    for attempt in reversed(repo.attempts(run)):
        for step in repo.newest_steps(run, attempt):
            id = CheckpointId(run, attempt, step)
            if repo.exists(id):
                yield id
    for stretch in line:
        if stretch.run != run:
            yield from stretch.committed(repo)


def _read(repo: Repo, ids: Sequence[CheckpointId]) -> dict[CheckpointId, tuple[Any, list[Note]]]:
    """Returns the manifest, None for one that cannot be read, and the notes of each."""
    found: dict[CheckpointId, tuple[Any, list[Note]]] = {}

    def read(id: CheckpointId) -> None:
        found[id] = outline(repo, id), notes(repo, id)

    parallel_for(read, ids, threads_for(repo).read)
    return found


def _records(repo: Repo, run: str, lowest: int) -> list[AttemptRecord]:
    """Returns the records of the run's attempts from `lowest` on, newest first; `verify` reports damaged ones."""
    found = []
    for number in reversed([number for number in repo.attempts(run) if number >= lowest]):
        with suppress(CorruptionError):
            record = repo.find_attempt(run, number)
            if record is not None:
                found.append(record)
    return found


def _turn(record: AttemptRecord) -> Turn | None:
    if record.parent is None or record.by not in (ROLLBACK, FORK):
        return None
    kind: Literal["rollback", "fork"] = "rollback" if record.by == ROLLBACK else "fork"
    who = record.owner.user
    return Turn(kind, record.run, record.number, record.parent, record.reason, record.created, who)


def _forks(repo: Repo, run: str) -> dict[CheckpointId, list[str]]:
    """Returns the runs that came from each checkpoint of `run`."""
    others = [other for other in repo.runs() if other != run]
    records: dict[str, list[AttemptRecord]] = {}

    def read_one(other: str) -> None:
        records[other] = _records(repo, other, 1)

    parallel_for(read_one, others, threads_for(repo).read)
    found: dict[CheckpointId, list[str]] = {}
    for other in others:
        for parent in {one.parent for one in records[other]}:
            if parent is not None and parent.run == run:
                found.setdefault(parent, []).append(other)
    return found


class _Before:
    """Finds what a checkpoint continues, of what is still there. `known`: checkpoints that exist."""

    def __init__(self, repo: Repo, known: Sequence[CheckpointId]) -> None:
        self._repo = repo
        self._known = frozenset(known)
        self._steps: dict[tuple[str, int], list[int]] = {}
        self._parents: dict[tuple[str, int], CheckpointId | None] = {}

    def of(self, id: CheckpointId) -> CheckpointId | None:
        run, attempt, below = id.run, id.attempt, id.step
        visited = set()
        while (run, attempt) not in visited:
            visited.add((run, attempt))
            found = self._newest(run, attempt, below)
            if found is not None:
                return found
            parent = self._parent(run, attempt)
            if parent is None:
                return None
            run, attempt, below = parent.run, parent.attempt, parent.step + 1
        return None

    def _newest(self, run: str, attempt: int, below: int) -> CheckpointId | None:
        if (run, attempt) not in self._steps:
            self._steps[run, attempt] = self._repo.steps(run, attempt)[::-1]
        steps = self._steps[run, attempt]
        lower = range(bisect_left(steps, below) - 1, -1, -1)
        candidates = (CheckpointId(run, attempt, steps[place]) for place in lower)
        return next((id for id in candidates if id in self._known or self._repo.exists(id)), None)

    def _parent(self, run: str, attempt: int) -> CheckpointId | None:
        if (run, attempt) not in self._parents:
            self._parents[run, attempt] = parent_of(self._repo, run, attempt)
        return self._parents[run, attempt]
