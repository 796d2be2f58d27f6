"""The operator's catalog: what queries need of each checkpoint, kept between commands in the user's cache directory.

A manifest, a note and an attempt's record never change once they were put, so each is read once. What can change is
looked at anew, as far as a look is cheap:

- *Always*: which runs, attempts and steps there are, what lies in the trash, all refs, and each checkpoint that is
  returned, until nothing of it has changed. On a local file system the time of an attempt's directory says whether its
  steps have to be listed.
- *In a complete look*, at least once an hour, and where every row is asked for: whether each checkpoint has its
  manifest, and which notes.

So what is returned is as the repository is. What is left out, and in which order the rest comes, goes for notes of
others (a metric noted later, a verification, damage) by the last complete look. Nothing that removes may use it, which
the import linter enforces; `tenuto.repo.catalog` is what retention uses, and lives in the process that trains.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from tenuto.concurrency.worker_threads import gc_paused, parallel_for
from tenuto.errors import CorruptionError, ObjectNotFound, StoreError
from tenuto.history.query import FIELDS, Order, Query
from tenuto.history.rows import Row, row_of
from tenuto.maintenance.census import ids_in_trash
from tenuto.model.ids import CheckpointId, parse_attempt, parse_step
from tenuto.model.records import AttemptRecord, Manifest, Note
from tenuto.model.sizes import seconds_of
from tenuto.repo.best import modes_of
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import MAX_MANIFEST, Summary, decode_manifest, decode_outline, decode_summary
from tenuto.repo.format.small_records import decode_attempt
from tenuto.repo.lineage import stretches, walk
from tenuto.repo.notes import last_of, notes, unread, verification_of, with_notes
from tenuto.repo.refs import is_name as is_run
from tenuto.repo.refs import list_refs
from tenuto.repo.replicated.places import home_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import is_unreadable

VERSION: Final = 2
"""Of the tables below: a file with another one is thrown away."""
COMPLETE_EVERY_S: Final = 3600.0
RACY_NS: Final = 2_000_000_000
"""A directory that changed so recently may change again without another time."""
BATCH: Final = 2_000
WAIT_S: Final = 60.0
"""For another command that writes the catalog."""
_BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_REFUSED: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
"""By the disk or its permissions: another file would fare no better."""
_NOT_DAMAGED: Final = (*_BUSY, *_REFUSED)
_ALL: Final = 1 << 62
"""Above every step."""
_TABLES: Final = """
CREATE TABLE about (version, repository, url, complete_s REAL);
CREATE TABLE attempts (run, number, seen, record BLOB, PRIMARY KEY (run, number)) WITHOUT ROWID;
CREATE TABLE others (run, attempt, step, closed, PRIMARY KEY (run, attempt, step)) WITHOUT ROWID;
CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY, run, attempt, step, seen, size, stored, leaves, ranks, created, created_text, modes,
    verified, proven, damaged, line, latest, best, healthy);
CREATE UNIQUE INDEX newest ON checkpoints (run, attempt DESC, step DESC);
CREATE TABLE metrics (checkpoint INTEGER, name, value, PRIMARY KEY (name, checkpoint)) WITHOUT ROWID;
CREATE INDEX metrics_of ON metrics (checkpoint);
CREATE TABLE refs (kind, name, run, attempt, step);
CREATE INDEX refs_of ON refs (run, attempt, step);
"""
_INSERT: Final = f"INSERT INTO checkpoints VALUES ({', '.join('?' * 19)})"
_OF: Final = "run=? AND attempt=? AND step=?"
_COMMITTED: Final = "DELETE FROM others WHERE (run, attempt, step) IN (SELECT run, attempt, step FROM checkpoints)"

Report = Callable[[str], None]


def path_of(repo: Repo) -> Path:
    """Returns where the catalog of a repository is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(f"{repo.id} {repo.url}".encode()).hexdigest()[:32]
    return Path(cache) / "tenuto" / "catalogs" / f"{name}.sqlite"


class _Known(Repo):
    """A repository whose attempts and checkpoints are those of the catalog: the walk of I4 reads nothing else."""

    def __init__(self, repo: Repo, database: sqlite3.Connection) -> None:
        super().__init__(repo.store, repo.id, repo.chunk_bytes)
        self._database = database

    def attempts(self, run: str) -> list[int]:
        found = self._database.execute("SELECT number FROM attempts WHERE run=? ORDER BY number", (run,))
        return [number for (number,) in found]

    def steps(self, run: str, attempt: int) -> list[int]:
        found = "SELECT step FROM checkpoints WHERE run=? AND attempt=? ORDER BY step DESC"
        return [step for (step,) in self._database.execute(found, (run, attempt))]

    def newest_steps(self, run: str, attempt: int) -> Iterator[int]:
        found = "SELECT step FROM checkpoints WHERE run=? AND attempt=? ORDER BY step DESC LIMIT 1"
        yield from (step for (step,) in self._database.execute(found, (run, attempt)))

    def exists(self, id: CheckpointId) -> bool:
        found = f"SELECT 1 FROM checkpoints WHERE {_OF}"
        return self._database.execute(found, (id.run, id.attempt, id.step)).fetchone() is not None

    def find_attempt(self, run: str, number: int) -> AttemptRecord | None:
        found = "SELECT record FROM attempts WHERE run=? AND number=?"
        (record,) = self._database.execute(found, (run, number)).fetchone() or (None,)
        return super().find_attempt(run, number) if record is None else decode_attempt(record, run, number, self.id)


class CatalogCache:
    """The catalog of one repository. `report` is called with what takes long, or was thrown away. `kept`: False for one
    that is made for this once."""

    def __init__(self, repo: Repo, *, report: Report = lambda message: None, kept: bool = True) -> None:
        self._repo = repo
        self._report = report
        self._changed: set[str] = set()
        """Runs whose lines of training and best checkpoints have to be worked out."""
        self._root, self._signs = _local_directory(repo), dict[CheckpointId, str]()
        self._database = self._open() if kept else _made(_connected(":memory:"), self._about)
        self._known = _Known(repo, self._database)

    def __enter__(self) -> CatalogCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    # -- the file ------------------------------------------------------------------------------------------------------

    @property
    def _about(self) -> tuple[int, str, str]:
        return (VERSION, self._repo.id, self._repo.url)

    def _open(self) -> sqlite3.Connection:
        path, about = path_of(self._repo), self._about
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
            for _ in range(2):
                with _damage_ignored():
                    database = _made(_connected(str(path)), about)
                    if database.execute("SELECT version, repository, url FROM about").fetchall() == [about]:
                        return database
                    database.close()
                self._report(f"the catalog {path} is damaged, or of another version: it is made again")
                _throw_away(path)
            reason = "it cannot be made again"
        except OSError as error:
            reason = str(error)
        self._report(f"no catalog is kept in {path.parent} ({reason}): everything is read")
        return _made(_connected(":memory:"), about)

    # -- looking at the repository -------------------------------------------------------------------------------------

    def refresh(self, *, complete: bool = False) -> None:
        """Looks at the repository. `complete`: at every checkpoint's directory. Raises what the store raises."""
        database = self._database
        (last,) = database.execute("SELECT complete_s FROM about").fetchone()
        complete = complete or not 0 <= time.time() - last < COMPLETE_EVERY_S
        self._signs = self._listed_signs() if complete and self._root is None else {}
        with _transaction(database):
            new = self._list_attempts(complete=complete)
            self._check_trash()
            if complete:
                rows = database.execute("SELECT run, attempt, step, seen FROM checkpoints").fetchall()
                old = [(id, seen) for *key, seen in rows if (id := CheckpointId(*key)) not in new]
                self._read(self._changed_of(old))
                database.execute("UPDATE about SET complete_s=?", (time.time(),))
            self._read_refs()
            self._settle()

    def _read_refs(self) -> None:
        try:
            refs = [(ref.kind, ref.name, ref.id.run, ref.id.attempt, ref.id.step) for ref in list_refs(self._repo)]
        except CorruptionError as error:
            self._report(f"tags, pins and holds are those of an earlier look: {error.message}")
            return
        if self._database.execute("SELECT * FROM refs").fetchall() != refs:
            self._database.execute("DELETE FROM refs")
            self._database.executemany("INSERT INTO refs VALUES (?, ?, ?, ?, ?)", refs)

    def _list_attempts(self, *, complete: bool) -> frozenset[CheckpointId]:
        """Finds new and vanished runs, attempts and steps, and reads what is new: returns that."""
        children, database = self._repo.store.children, self._database
        known = {(run, number): tuple(found) for run, number, *found in database.execute("SELECT * FROM attempts")}
        there, new = set[tuple[str, int]](), list[CheckpointId]()
        for run in filter(is_run, children(object_names.RUNS).directories):
            for key in children(object_names.run_directory(run)).directories:
                number = parse_attempt(key)
                if number is None:
                    continue
                there.add((run, number))
                directory = object_names.attempt_directory(run, number)
                before = known.get((run, number))
                found = (self._time(directory), before[1] if before and before[1] else self._record(run, number))
                if found != before:
                    database.execute("INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?)", (run, number, *found))
                    self._changed.update([run] if before is None or found[1] != before[1] else [])
                if found[0] and before and found[0] == before[0] and not complete:
                    new += self._open_steps(run, number)
                    continue
                steps = {step for key in children(directory).directories if (step := parse_step(key)) is not None}
                new += self._compare(run, number, steps)
        for run, number in known.keys() - there:
            self._forget(run, number, self._known.steps(run, number))
            database.execute("DELETE FROM attempts WHERE run=? AND number=?", (run, number))
            database.execute("DELETE FROM others WHERE run=? AND attempt=?", (run, number))
        self._read(new, new=True)
        return frozenset(new)

    def _compare(self, run: str, number: int, steps: set[int]) -> list[CheckpointId]:
        """Forgets the steps that are gone, and returns those that have to be read."""
        known = set(self._known.steps(run, number))
        found = "SELECT step, closed FROM others WHERE run=? AND attempt=?"
        others = dict(self._database.execute(found, (run, number)).fetchall())
        self._forget(run, number, [*(known - steps), *(others.keys() - steps)])
        closed = {step for step, closed in others.items() if closed}
        return [CheckpointId(run, number, step) for step in sorted(steps - known - closed)]

    def _open_steps(self, run: str, number: int) -> list[CheckpointId]:
        """Returns the steps that had no manifest, and may have one by now."""
        found = "SELECT step FROM others WHERE run=? AND attempt=? AND NOT closed"
        return [CheckpointId(run, number, step) for (step,) in self._database.execute(found, (run, number)).fetchall()]

    def _record(self, run: str, number: int) -> bytes | None:
        """Returns an attempt's record as it was put; None where it is not there, damaged, or a copy."""
        with suppress(ObjectNotFound, CorruptionError):
            data = self._repo.store.get(object_names.attempt_name(run, number), limit=objects.SMALL)
            decode_attempt(data, run, number, self._repo.id)
            return data
        return None

    def _check_trash(self) -> None:
        runs = self._known_runs().intersection(self._repo.store.children("trash").directories)
        self._read([id for run in sorted(runs) for id in ids_in_trash(self._repo, run) if self._known.exists(id)])

    def _known_runs(self) -> set[str]:
        return {run for (run,) in self._database.execute("SELECT DISTINCT run FROM attempts")}

    # -- signs: what a directory looks like from outside ---------------------------------------------------------------

    def _time(self, directory: str) -> str:
        """Returns the time of a directory as text; empty where there is none that can be relied on."""
        if self._root is None:
            return ""
        try:
            changed = os.stat(f"{self._root}/{directory}").st_mtime_ns
        except OSError:
            return ""
        return str(changed) if changed < time.time_ns() - RACY_NS else ""

    def _listed_signs(self) -> dict[CheckpointId, str]:
        """Returns the sign of each checkpoint by one listing of everything."""
        lengths: dict[CheckpointId, int] = {}
        noted: dict[CheckpointId, list[str]] = {}
        for entry in self._repo.store.walk(object_names.RUNS):
            _, run, attempt_key, step_key, *rest = [*entry.name.split("/"), "", "", ""][:7]
            attempt, step = parse_attempt(attempt_key), parse_step(step_key)
            if attempt and step is not None and rest[0] == object_names.MANIFEST:
                lengths[CheckpointId(run, attempt, step)] = entry.length
            elif attempt and step is not None and rest[0] == object_names.NOTES:
                noted.setdefault(CheckpointId(run, attempt, step), []).append(rest[1])
        return {id: f"{length}:{','.join(sorted(noted.get(id, ())))}" for id, length in lengths.items()}

    def _sign(self, id: CheckpointId) -> str:
        """Returns what a checkpoint's directory looks like; empty where that cannot be relied on."""
        if self._root is None:
            return self._signs.get(id) or self._remote_sign(id)
        own = self._time(id.directory)
        try:
            noted = os.stat(f"{self._root}/{id.directory}/{object_names.NOTES}").st_mtime_ns
        except OSError:
            return own
        return f"{own}/{noted}" if own and noted < time.time_ns() - RACY_NS else ""

    def _changed_of(self, found: Sequence[tuple[CheckpointId, str]]) -> list[CheckpointId]:
        """Returns the checkpoints whose directories do not look as they were seen, in this order."""
        now: dict[CheckpointId, str] = {}
        asked = [id for id, seen in found if seen]
        threads = self._repo.store.capabilities.parallel if self._root is None else 1  # a `stat` waits for nothing
        parallel_for(lambda id: now.update({id: self._sign(id)}), asked, threads)
        return [id for id, seen in found if not seen or now[id] != seen]

    def _remote_sign(self, id: CheckpointId) -> str:
        try:
            length = self._repo.store.stat(id.manifest).length
        except ObjectNotFound:
            return ""
        return f"{length}:{','.join(sorted(self._repo.store.children(object_names.notes_directory(id)).objects))}"

    def _may_have_notes(self, sign: str) -> bool:
        return not sign or (not sign.endswith(":") if self._root is None else "/" in sign)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(self, ids: Sequence[CheckpointId], *, new: bool = False) -> None:
        """Reads manifests and notes, and puts what they say into the tables. `new`: none is a checkpoint there yet."""
        threads = self._repo.store.capabilities.parallel  # most of it is waiting, but where all is in the page cache
        for start in range(0, len(ids), BATCH):
            if len(ids) > BATCH and start % (10 * BATCH) == 0:
                self._report(f"reading manifests: {start:,} of {len(ids):,}")
            some = ids[start : start + BATCH]
            found: dict[CheckpointId, tuple[str, bytes | Exception | None, list[Note]]] = {}
            parallel_for(partial(self._fetch, found), some, threads)
            for id in () if new else some:
                self._forget(id.run, id.attempt, [id.step])
            self._put([(id, *found[id]) for id in some])
        self._database.execute(_COMMITTED)

    def _fetch(
        self, found: dict[CheckpointId, tuple[str, bytes | Exception | None, list[Note]]], id: CheckpointId
    ) -> None:
        sign = self._sign(id)  # before the bytes: what changes in between is read again
        data: bytes | Exception | None
        try:
            data = self._repo.store.get(id.manifest, limit=MAX_MANIFEST)
        except ObjectNotFound:
            data = None
        except (CorruptionError, StoreError) as error:
            if isinstance(error, StoreError) and not is_unreadable(error):
                raise
            data = error
        noted = notes(self._repo, id) if self._may_have_notes(sign) else []
        found[id] = (sign, data, noted)

    @gc_paused
    def _put(self, some: Sequence[tuple[CheckpointId, str, bytes | Exception | None, list[Note]]]) -> None:
        rows, metrics, others = [], [], []
        database = self._database
        (last,) = database.execute("SELECT coalesce(max(id), 0) FROM checkpoints").fetchone()
        for id, sign, data, noted in some:
            read = "closed" if data is None else self._decoded(id, data)
            if read == "closed":
                others.append((id.run, id.attempt, id.step, data is not None))
                continue
            last += 1
            self._changed.add(id.run)
            whole = read if isinstance(read, Summary) else None
            said, damaged = verification_of(noted), whole is None or bool(unread(id, noted))
            created = whole.created if whole else ""
            sizes = (whole.bytes, whole.stored, whole.leaves, whole.ranks) if whole else (None,) * 4
            modes = json.dumps(modes_of(whole), sort_keys=True) if whole else "{}"
            rows.append(
                (
                    *(last, id.run, id.attempt, id.step, sign, *sizes, seconds_of(created), created, modes),
                    said == "verified" and whole is not None,
                    last_of(noted, "proven") is not None and said != "suspect",
                    *(damaged or said == "suspect", "left", False, ""),
                    whole is not None and whole.healthy,
                )
            )
            logged = with_notes(whole.metrics if whole else {}, noted)
            metrics += [(last, name, None if math.isnan(value) else value) for name, value in logged.items()]
        database.executemany(_INSERT, rows)
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?)", metrics)
        database.executemany("INSERT OR REPLACE INTO others VALUES (?, ?, ?, ?)", others)

    def _decoded(self, id: CheckpointId, data: bytes | Exception) -> Summary | str:
        """Returns what the manifest says, "closed" for what is no checkpoint, or "damaged"."""
        if isinstance(data, bytes):
            if (summary := decode_summary(data, id, self._repo.id)) is not None:
                return summary
            with suppress(CorruptionError):
                outline = decode_outline(data, id, self._repo.id)
                found = decode_manifest(data, id, self._repo.id) if outline is None else outline[0]
                return Summary.of(found) if isinstance(found, Manifest) else "closed"
        return "damaged" if self._repo.exists(id) else "closed"

    def _forget(self, run: str, attempt: int, steps: Collection[int]) -> None:
        database = self._database
        for key in [(run, attempt, step) for step in steps]:
            gone = database.execute(f"DELETE FROM checkpoints WHERE {_OF} RETURNING id", key).fetchall()
            if gone:
                database.executemany("DELETE FROM metrics WHERE checkpoint=?", gone)
                self._changed.add(run)
            else:
                database.execute(f"DELETE FROM others WHERE {_OF}", key)

    # -- what follows from all checkpoints of a run --------------------------------------------------------------------

    def _settle(self) -> None:
        """Works out the line of training and the best of each run that has changed."""
        database = self._database
        for run in self._changed:
            tops: dict[int, int] = {}
            for stretch in stretches(self._known, run):
                if stretch.run == run:
                    tops[stretch.attempt] = _ALL if stretch.top is None else stretch.top
            for attempt in self._known.attempts(run):
                place = (run, attempt, tops.get(attempt, -1))
                move = "UPDATE checkpoints SET line=? WHERE run=? AND attempt=? AND"
                database.execute(f"{move} step<=? AND line<>'current'", ("current", *place))
                database.execute(f"{move} step>? AND line<>'left'", ("left", *place))
            database.execute("UPDATE checkpoints SET latest=0, best='' WHERE run=? AND (latest OR best<>'')", (run,))
            newest = next(walk(self._known, run), None)
            if newest is not None and newest.run == run:
                place = (run, newest.attempt, newest.step)
                database.execute(f"UPDATE checkpoints SET latest=1 WHERE {_OF}", place)
            for metric, mode in self._modes(run).items():
                order = "ASC" if mode == "min" else "DESC"
                best = (
                    "SELECT c.id FROM checkpoints c JOIN metrics m ON m.checkpoint=c.id AND m.name=?"
                    " WHERE c.run=? AND NOT c.damaged AND c.healthy AND m.value IS NOT NULL"
                    f" ORDER BY m.value {order}, c.attempt DESC, c.step DESC LIMIT 1"
                )
                mark = "UPDATE checkpoints SET best=best || char(10) || ?1 || char(10) WHERE id=?2"
                for (id,) in database.execute(best, (metric, run)).fetchall():
                    database.execute(mark, (metric, id))
        self._changed.clear()

    def _modes(self, run: str) -> dict[str, str]:
        """Returns the direction in which each metric improves, as the newest checkpoint says that has one."""
        found: dict[str, str] = {}
        seen = ["{}"]
        while True:
            marks = ", ".join("?" * len(seen))
            newest = f"run=? AND modes NOT IN ({marks}) ORDER BY attempt DESC, step DESC LIMIT 1"
            row = self._database.execute(f"SELECT modes FROM checkpoints WHERE {newest}", (run, *seen)).fetchone()
            if row is None:
                return dict(sorted(found.items()))
            seen.append(row[0])
            found = {**json.loads(row[0]), **found}

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that any checkpoint has."""
        # One seek in the index for each name, however many checkpoints have it.
        names = (
            "WITH RECURSIVE n(name) AS (SELECT min(name) FROM metrics UNION ALL"
            " SELECT (SELECT min(name) FROM metrics WHERE name > n.name) FROM n WHERE n.name IS NOT NULL)"
            " SELECT name FROM n WHERE name IS NOT NULL"
        )
        return [name for (name,) in self._database.execute(names)]

    def query(self, where: Query | None = None, order: Order | None = None, limit: int | None = None) -> list[Row]:
        """Returns the checkpoints that match, sorted, as the last `refresh` found them, but each that is returned as
        the repository has it now; without an order those of each run together, newest first. Raises UsageError for a
        name that no checkpoint has."""
        if self._known_runs():
            for one in (where, order):
                if one is not None:
                    one.check(self.metrics)
        looked: set[CheckpointId] = set()
        while True:
            rows = self._select(where, order, limit)
            stale = self._changed_of([(row.id, seen) for row, seen in rows if row.id not in looked])
            if not stale:
                return [row for row, _ in rows]
            looked.update(row.id for row, _ in rows)
            with _transaction(self._database):
                self._read(stale)
                self._settle()

    def _select(self, where: Query | None, order: Order | None, limit: int | None) -> list[tuple[Row, str]]:
        now = time.time()
        joined: dict[str, str] = {}

        def column(name: str) -> str:
            if name not in FIELDS:
                return joined.setdefault(name, f"m{len(joined)}") + ".value"
            refs = "FROM refs r WHERE (r.run, r.attempt, r.step) = (c.run, c.attempt, c.step) AND r.kind"
            computed = {
                "age": f"({now!r} - c.created)",
                "healthy": "(c.healthy AND NOT c.damaged)",
                "tag": f"(SELECT group_concat(char(10) || r.name || char(10), '') {refs} = 'tag')",
                "pinned": f"EXISTS(SELECT 1 {refs} = 'pin')",
                "held": f"EXISTS(SELECT 1 {refs} = 'hold')",
            }
            return computed.get(name, f"c.{name}")

        clause, values = ("1", []) if where is None else where.sql(column)
        newest = "c.run, c.attempt DESC, c.step DESC"
        sort = newest
        if order is not None:
            by = column(order.name)
            sort = f"{by} IS NULL, {by} {'DESC' if order.descending else 'ASC'}, {newest}"
        tag, pinned, held = column("tag"), column("pinned"), column("held")
        tables = " ".join(f"LEFT JOIN metrics {m} ON {m}.checkpoint=c.id AND {m}.name=?" for m in joined.values())
        found = self._database.execute(
            f"SELECT c.*, {tag}, {pinned}, {held} FROM checkpoints c {tables} WHERE {clause} ORDER BY {sort} LIMIT ?",
            [*joined, *values, -1 if limit is None else limit],
        ).fetchall()
        metrics = self._metrics_of([row[0] for row in found])
        return [(row_of(row, metrics.get(row[0], {}), now), row[4]) for row in found]

    def _metrics_of(self, ids: Sequence[int]) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for start in range(0, len(ids), BATCH):
            some = ids[start : start + BATCH]
            marks = ", ".join("?" * len(some))
            rows = self._database.execute(f"SELECT * FROM metrics WHERE checkpoint IN ({marks})", some)
            for id, name, value in rows:
                found.setdefault(id, {})[name] = math.nan if value is None else value
        return found


def query(
    repo: Repo,
    where: Query | None = None,
    order: Order | None = None,
    limit: int | None = None,
    *,
    refresh: bool = False,
    report: Report = lambda message: None,
) -> list[Row]:
    """Returns the checkpoints that match, by the catalog of this user, after a look at the repository: a complete one
    with `refresh`, and where all of them are asked for. Raises as `CatalogCache.query` and `refresh`."""
    kept = True
    for last in (False, True, True):
        try:
            with CatalogCache(repo, report=report, kept=kept) as catalog:
                catalog.refresh(complete=refresh or limit is None)
                return catalog.query(where, order, limit)
        except sqlite3.DatabaseError as error:
            path, code = path_of(repo), _code_of(error)
            if code not in _NOT_DAMAGED and not last:
                report(f"the catalog {path} cannot be used ({error}): it is made again")
                _throw_away(path)
                continue
            busy = f"another command has had the catalog {path} for a minute"
            report(f"{busy if code in _BUSY else f'the catalog {path} cannot be used ({error})'}: everything is read")
            kept = False
    raise StoreError(f"the catalog {path_of(repo)} cannot be used", subject=str(path_of(repo)))


@contextmanager
def _damage_ignored() -> Iterator[None]:
    """Passes over what is wrong with a database, but not that another process uses it or the disk refuses it."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if _code_of(error) in _NOT_DAMAGED:
            raise


def _code_of(error: sqlite3.Error) -> int:
    """Returns the primary code of an error of SQLite; 0 for one of Python's own, as of text that is no UTF-8."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _throw_away(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _connected(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=OFF")  # what a power loss spoils is read again
    return database


def _made(database: sqlite3.Connection, about: tuple[int, str, str]) -> sqlite3.Connection:
    """Makes the tables where there are none. Of two processes the second finds them."""
    exists = "SELECT 1 FROM sqlite_master"
    if database.execute(exists).fetchone():
        return database  # without waiting for another process that writes
    with _transaction(database):
        if not database.execute(exists).fetchone():
            for statement in _TABLES.strip().split(";\n"):
                database.execute(statement)
            database.execute("INSERT INTO about VALUES (?, ?, ?, 0)", about)
    return database


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if database.in_transaction:  # a full disk has ended it
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _local_directory(repo: Repo) -> str | None:
    """Returns the directory in which the manifests of a repository lie as files; None where they do not."""
    parts = urlsplit(home_of(repo.store).url)
    if parts.scheme not in ("", "file"):
        return None
    path = unquote(parts.path) if parts.scheme else home_of(repo.store).url
    return path if os.path.isfile(f"{path}/{object_names.REPOSITORY}") else None
