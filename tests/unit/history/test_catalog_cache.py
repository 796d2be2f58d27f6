"""The operator's catalog says what the repository says, whatever has happened to either since it was made."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from benchmarks.grown_repository import grow_runs
from support.rank_threads import together
from tenuto import every, keep
from tenuto.cli import main
from tenuto.errors import RemovalRefused, UsageError
from tenuto.history import catalog_cache
from tenuto.history.catalog_cache import CatalogCache, path_of
from tenuto.history.query import Order, Query
from tenuto.history.rows import Row
from tenuto.maintenance import remove as removing
from tenuto.maintenance.facts import gather_facts
from tenuto.maintenance.gc import execute, plan_gc
from tenuto.model.ids import CheckpointId
from tenuto.model.records import AttemptRecord, IndexEntry, Manifest, Owner
from tenuto.repo.best import best_of_each, measured, modes_of
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.format.small_records import encode_attempt
from tenuto.repo.lineage import latest
from tenuto.repo.notes import add_note
from tenuto.repo.refs import clear_ref, put_ref
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes
from tenuto.store.registry import open_store

RUNS = ["bert", "gpt", "vit"]
STEPS = range(1, 101)
FINISHED = dict.fromkeys(RUNS, True)
"""Nobody trains them."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog_cache, "RACY_NS", 0)  # these tests change directories right after they were looked at
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("grown") / "ckpts"
    repo = Repo.create_or_open(open_store(where))

    def put(name: str, data: bytes) -> None:
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    grow_runs(repo, RUNS, STEPS, put)
    return where


@pytest.fixture
def where(grown: Path, tmp_path: Path) -> Path:
    shutil.copytree(grown, tmp_path / "ckpts")
    return tmp_path / "ckpts"


@pytest.fixture(params=["local", "listed"])
def repo(request: pytest.FixtureRequest, where: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """Once as files, whose directories have times, and once as a store that has only listings."""
    if request.param == "listed":
        monkeypatch.setattr(catalog_cache, "_local_directory", lambda repo: None)
    return Repo.open(open_store(where))


def found(repo: Repo, text: str | None = None, sort: str | None = None, limit: int | None = None) -> list[Any]:
    where = None if text is None else Query.parse(text)
    return catalog_cache.query(repo, where, None if sort is None else Order.parse(sort), limit)


def remove(repo: Repo, ids: list[CheckpointId]) -> None:
    for id in ids:
        removing.remove(repo, id, finished=FINISHED, force=True)


def names(rows: list[Any]) -> list[str]:
    return [f"{row.id.run}/{row.id.step}" for row in rows]


def check(repo: Repo) -> None:
    """Compares every row with what retention and `ls` make of the repository."""
    rows = {row.id: row for row in found(repo)}
    for run in repo.runs():
        facts = {one.id: one for one in gather_facts(repo, run)}
        assert {id for id in rows if id.run == run} == set(facts)
        best = best_of_each(measured(repo, run), run)
        for id, fact in facts.items():
            row = rows[id]
            assert (row.line == "current") == (fact.walk is not None), id
            assert row.latest == (id == latest(repo, run))
            assert (row.pinned, row.held, row.tags) == (fact.pinned, fact.held, fact.tags)
            assert row.damaged == (fact.suspect or bool(fact.unread))
            assert row.verified == fact.verified
            assert repr(dict(row.metrics)) == repr(dict(sorted(fact.metrics.items())))
            assert set(row.best) == {metric for metric, won in best.items() if won == id}
    assert [row.id for row in found(repo)] == sorted(rows, key=lambda id: (id.run, -id.attempt, -id.step))


def test_a_query_returns_what_matches_sorted(repo: Repo) -> None:
    check(repo)
    values = sorted((step * 7919 + n * 31) % 1000 / 1000 for n in range(len(RUNS)) for step in STEPS)
    assert [row.metrics["val_loss"] for row in found(repo, "val_loss < 0.05", "val_loss")] == [
        one for one in values if one < 0.05
    ]
    rows = found(repo, "val_loss < 0.1 and step > 50", "-val_loss", 5)
    values = [row.metrics["val_loss"] for row in rows]
    assert values == sorted(values, reverse=True) and len(rows) == 5 and all(row.id.step > 50 for row in rows)
    assert names(found(repo, "accuracy >= 0.09", "step")) == [f"{run}/{step}" for step in (90, 100) for run in RUNS]
    assert names(found(repo, "step > 98 and run == 'gpt'")) == ["gpt/100", "gpt/99"]
    assert names(found(repo, "run == 'gpt' and step < 4", "accuracy", 2)) == ["gpt/3", "gpt/2"], "what lacks it is last"
    assert names(found(repo, "best", "run")) == names(found(repo, "best == 'val_loss'", "run")) != []
    assert len(found(repo, "size > '95 MiB' and age > '1d' and created > '2023-01-01'")) == 15
    with pytest.raises(UsageError, match="neither a field nor a metric") as raised:
        found(repo, "val_los < 1")
    assert raised.value.hint == "did you mean 'val_loss'?"
    with pytest.raises(UsageError, match="neither a field"):
        found(repo, sort="-val_los")


def test_what_changed_is_seen_and_what_did_not_is_not_read_again(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    found(repo)
    read: list[str] = []
    monkeypatch.setattr(
        repo.store, "get", lambda name, get=repo.store.get, **more: read.append(name) or get(name, **more)
    )
    assert len(found(repo)) == 300 and read == []
    a, b, c, d = (CheckpointId("gpt", 1, step) for step in (10, 11, 12, 13))
    add_note(repo, a, "metric", {"val_loss": -1.0})
    add_note(repo, b, "suspect", {})
    add_note(repo, c, "verified", {"every_byte": True})
    put_ref(repo, "tag", "paper", d)
    put_ref(repo, "pin", "mine", b)
    read.clear()
    rows = {row.id: row for row in found(repo)}
    manifests = [name for name in read if name.endswith("manifest.json")]
    assert sorted(manifests) == sorted(id.manifest for id in (a, b, c))
    assert rows[a].metrics["val_loss"] == -1.0 and rows[a].best == ("val_loss",)
    assert rows[b].damaged and rows[b].pinned and rows[c].verified and rows[d].tags == ("paper",)
    clear_ref(repo, "tag", "paper")
    assert names(found(repo, "tag")) == []
    check(repo)


def test_what_a_page_shows_is_as_the_repository_has_it(repo: Repo) -> None:
    found(repo)
    ids = [CheckpointId("vit", 1, step) for step in (100, 99, 98)]
    remove(repo, [ids[0]])
    add_note(repo, ids[1], "metric", {"accuracy": 0.5})
    os.unlink(Path(repo.url) / ids[2].manifest)  # a person, behind the catalog's back
    rows = found(repo, "run == 'vit'", "-step", 3)
    assert names(rows) == ["vit/99", "vit/97", "vit/96"]
    assert rows[0].metrics["accuracy"] == 0.5 and rows[0].latest
    check(repo)


def test_a_note_on_what_is_not_shown_counts_after_a_complete_look(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    found(repo)
    add_note(repo, CheckpointId("gpt", 1, 55), "metric", {"val_loss": -3.0})
    assert "gpt/55" not in names(found(repo, "val_loss < 1", "val_loss", 3))
    assert names(catalog_cache.query(repo, None, Order.parse("val_loss"), 1, refresh=True)) == ["gpt/55"]
    add_note(repo, CheckpointId("gpt", 1, 56), "metric", {"val_loss": -4.0})
    monkeypatch.setattr(catalog_cache, "COMPLETE_EVERY_S", -1.0)
    assert names(found(repo, None, "val_loss", 1)) == ["gpt/56"], "an hour later a look is complete by itself"


@pytest.mark.parametrize("jump_s", [-3600, 86_400])
def test_a_clock_that_jumps_hides_nothing(where: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    monkeypatch.setattr(catalog_cache, "RACY_NS", 2_000_000_000)
    repo, now = Repo.open(open_store(where)), time.time()
    for directory in where.rglob("a0001"):
        os.utime(directory, (now - 60, now - 60))
    check(repo)
    monkeypatch.setattr(catalog_cache.time, "time", lambda: now + jump_s)
    monkeypatch.setattr(catalog_cache.time, "time_ns", lambda: int((now + jump_s) * 1e9))
    for step in (5, 6):
        remove(repo, [CheckpointId("bert", 1, step)])
        os.utime(where / "runs/bert/a0001", (now + jump_s, now + jump_s))
        assert len(found(repo, "run == 'bert'", None, 1000)) == 104 - step
    check(repo)


def test_removed_undeleted_freed_and_lost(repo: Repo) -> None:
    check(repo)
    gone = [CheckpointId("bert", 1, step) for step in (5, 6, 100)]
    remove(repo, gone)
    assert len(found(repo, "run == 'bert'", None, 1000)) == 97
    check(repo)
    tenuto_undelete(repo, gone[0])
    check(repo)
    execute(repo, plan_gc(repo, now=True, finished=FINISHED))
    check(repo)
    shutil.rmtree(Path(repo.url) / "runs/vit")
    assert len(found(repo, limit=1000)) == 198 and {row.id.run for row in found(repo)} == {"bert", "gpt"}
    check(repo)


def tenuto_undelete(repo: Repo, id: CheckpointId) -> None:
    """Puts the manifest back, as `undelete` does once every byte was checked: these checkpoints have no data files."""
    (copy,) = [entry.name for entry in repo.store.walk(f"trash/{id.directory.removeprefix('runs/')}")]
    data = repo.store.get(copy, limit=1 << 20)
    repo.store.put_if_absent(id.manifest, Bytes(data), token="x")
    repo.store.delete([copy])


def test_damaged_manifests_records_and_refs(repo: Repo) -> None:
    root = Path(repo.url)
    (root / CheckpointId("gpt", 1, 7).manifest).write_bytes(b"{" * 5000)
    (root / CheckpointId("gpt", 1, 8).manifest).write_bytes((root / CheckpointId("gpt", 1, 9).manifest).read_bytes())
    (root / "runs/vit/a0001/attempt.json").write_bytes(b"no")
    (root / "runs/vit/a0001/step-00000003/notes").mkdir()
    (root / "runs/vit/a0001/step-00000003/notes/1.json").write_bytes(b"no")
    (root / "runs/vit/a0001/step-00001000").mkdir()
    (root / "runs/vit/README").write_bytes(b"not ours")
    check(repo)
    assert [row.id.step for row in found(repo, "damaged and run == 'gpt'")] == [7]
    assert [row.id.step for row in found(repo, "damaged and run == 'vit'")] == [3], "one of its notes cannot be read"
    assert [row.size is None for row in found(repo, "damaged", "step", 9)] == [False, True]


def test_a_training_that_goes_back_and_forks(tmp_path: Path, cache: Path) -> None:
    where, state = tmp_path / "trained", {"w": np.zeros(8, np.float32)}
    there = tenuto.Repository(where) if (where / "tenuto.json").exists() else None
    assert there is None

    def train(steps: int, **more: Any) -> None:
        with tenuto.Checkpointer(
            where, state, save=every(steps=1), log="silent", **{"keep": keep.all(), **more}
        ) as ckpt:
            for step in ckpt.steps(steps):
                ckpt.log(loss=1 / (step + 1))

    train(6)
    there = tenuto.Repository(where)
    assert [row.id.step for row in there.query(limit=3)] == [6, 5, 4]
    train(7, resume_from=3)
    train(2, run="other", resume_from=None)
    train(9, run="fork", resume_from="main/a0001/5")
    check(there.repo)
    assert [row.id.step for row in there.query("line == 'left'", sort="step")] == [4, 5, 6]
    assert [str(row.id) for row in there.query("loss < 0.16", sort="loss", limit=2)] == ["fork/a0001/9", "fork/a0001/8"]
    train(10, keep=keep.latest(1))  # frees at once what leaves the line
    check(there.repo)
    assert [row.id.step for row in there.query("run == 'main' and line == 'current'", limit=9)] == [10]


def test_encoded_sealed_and_in_several_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed, spread = tmp_path / "sealed", tenuto.Mirror(tmp_path / "one", tmp_path / "two")

    def train(where: Any, steps: int, **more: Any) -> list[Row]:
        state = {"w": np.zeros(50_000)}
        with tenuto.Checkpointer(where, state, save=every(steps=1), keep=keep.all(), log="silent", **more) as ckpt:
            for step in ckpt.steps(steps):
                ckpt.log(loss=1 / (step + 1))
        check(tenuto.Repository(where).repo)
        return tenuto.Repository(where).query("loss < 0.4", sort="-loss", limit=5)

    encoded = train(tmp_path / "encoded", 4, encoding="small")
    assert [row.id.step for row in encoded] == [3, 4]
    assert all(row.stored is not None and row.size is not None and row.stored < row.size for row in encoded)
    train(sealed, 1)
    with pytest.raises(SystemExit):
        main(["key", "add", str(sealed), "--key-file", str(tmp_path / "tenuto.key")])
    monkeypatch.setenv("TENUTO_KEY_FILE", str(tmp_path / "tenuto.key"))
    assert [row.id.step for row in train(sealed, 3)] == [3]
    monkeypatch.delenv("TENUTO_KEY_FILE")
    assert [row.id.step for row in tenuto.Repository(sealed).query("loss < 0.4", limit=9)] == [3], "no key is needed"
    assert [row.id.step for row in train(spread, 5)] == [3, 4, 5]


def test_of_several_ranks(tmp_path: Path) -> None:
    def train(ranks: Any) -> None:
        state = {"w": np.zeros(1000)}
        with tenuto.Checkpointer(tmp_path / "ckpts", state, ranks=ranks, save=every(steps=1), log="silent") as ckpt:
            for _ in ckpt.steps(2):
                pass

    assert together(2, train) == [None, None]
    rows = tenuto.Repository(tmp_path / "ckpts").query("ranks == 2 and line == 'current'")
    assert [row.id.step for row in rows] == [2, 1]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_the_users_alone_and_of_one_repository(where: Path, cache: Path) -> None:
    repo = Repo.open(open_store(where))
    found(repo)
    path = path_of(repo)
    assert path.parent == cache / "tenuto" / "catalogs"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    other = Repo.create_or_open(open_store(where.with_name("other")))
    assert found(other) == [] and path_of(other) != path


def spoil_version(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE about SET version=999")


def spoil_owner(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE about SET repository='another'")


def spoil_inside(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = random.Random(1).randbytes(len(data) - 4096)
    path.write_bytes(data)


SPOILT: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(b"not a database at all, but longer than its header" * 100),
    lambda path: path.write_bytes(path.read_bytes()[:5000]),
    spoil_inside,
    spoil_version,
    spoil_owner,
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_another_version_or_a_damaged_file_is_thrown_away(where: Path, spoil: Callable[[Path], object]) -> None:
    repo = Repo.open(open_store(where))
    before = found(repo, "step > 90", "val_loss", 10)
    spoil(path_of(repo))
    said: list[str] = []
    after = catalog_cache.query(repo, Query.parse("step > 90"), Order.parse("val_loss"), 10, report=said.append)
    assert [row.id for row in after] == [row.id for row in before]
    assert len(said) == 1 and "it is made again" in said[0] and str(path_of(repo)) in said[0]
    said.clear()
    assert len(catalog_cache.query(repo, report=said.append)) == 300 and said == []


def test_without_a_place_for_the_file_everything_is_read(where: Path, cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_bytes(b"a file where the directory would be")
    said: list[str] = []
    assert len(catalog_cache.query(Repo.open(open_store(where)), limit=400, report=said.append)) == 300
    assert len(said) == 1 and "everything is read" in said[0]


def test_an_empty_repository_and_a_store_in_memory(tmp_path: Path) -> None:
    empty = tenuto.Repository(Repo.create_or_open(open_store(tmp_path / "empty")).store)
    assert empty.query() == empty.query("nothing_yet < 1", sort="-nothing_yet", limit=3) == []
    with tenuto.Checkpointer("memory://catalog", {"w": np.zeros(2)}, save=every(steps=1), keep=keep.all()) as ckpt:
        for _ in ckpt.steps(3):
            pass
        ckpt.wait()
        rows = tenuto.Repository("memory://catalog").query(sort="-step", limit=2)
        assert [(row.id.step, row.latest) for row in rows] == [(3, True), (2, False)]


def test_two_at_once_and_one_that_dies_in_the_middle(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = Repo.open(open_store(where))
    with CatalogCache(repo) as one, CatalogCache(repo) as other:
        one.refresh(complete=True)
        other.refresh()
        assert [row.id for row in one.query(limit=5)] == [row.id for row in other.query(limit=5)]
    monkeypatch.setattr(catalog_cache, "BATCH", 50)
    path_of(repo).unlink()
    reads: Iterator[int] = iter(range(120))
    original = repo.store.get
    monkeypatch.setattr(repo.store, "get", lambda name, **more: (next(reads), original(name, **more))[1])
    with pytest.raises((StopIteration, RuntimeError)):
        found(repo)
    monkeypatch.setattr(repo.store, "get", original)
    check(repo)


def test_a_catalog_that_another_command_writes_is_not_waited_for_for_ever(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, said = Repo.open(open_store(where)), []
    found(repo)
    monkeypatch.setattr(catalog_cache, "WAIT_S", 0.01)
    with CatalogCache(repo) as other, catalog_cache._transaction(other._database):
        assert len(catalog_cache.query(repo, limit=400, report=said.append)) == 300
    assert len(said) == 1 and "everything is read" in said[0] and path_of(repo).exists()
    assert len(catalog_cache.query(repo, limit=400, report=said.append)) == 300 and len(said) == 1


@pytest.mark.parametrize(("known", "bytes_"), [(False, 0), (False, 20_000), (False, 70_000), (True, 0), (True, 20_000)])
def test_on_a_full_disk_a_query_reads_everything_and_the_catalog_stays(where: Path, known: bool, bytes_: int) -> None:
    repo, said, file = Repo.open(open_store(where)), [], 0
    if known:
        found(repo)
        add_note(repo, CheckpointId("gpt", 1, 9), "metric", {"val_loss": -1.0})
        file = path_of(repo).stat().st_ino
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, before[1]))
    try:
        rows = catalog_cache.query(repo, None, None, 400, refresh=True, report=said.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(rows) == 300
    assert len(said) == 1 and "cannot be used" in said[0] and said[0].endswith("everything is read"), said
    assert not known or path_of(repo).stat().st_ino == file
    said.clear()
    assert len(catalog_cache.query(repo, report=said.append)) == 300 and said == []


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY | 2 << 8, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR, None])
def test_what_sqlite_refuses_again_and_again_is_done_in_memory(
    where: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    repo, said = Repo.open(open_store(where)), []
    refresh = CatalogCache.refresh

    def refuse(catalog: CatalogCache, *, complete: bool = False) -> None:
        if catalog._database.execute("PRAGMA database_list").fetchone()[2]:
            error = sqlite3.OperationalError("no")
            if code is not None:
                error.sqlite_errorcode = code
            raise error
        refresh(catalog, complete=complete)

    monkeypatch.setattr(CatalogCache, "refresh", refuse)
    assert len(catalog_cache.query(repo, report=said.append)) == 300
    busy = code is not None and code & 0xFF == sqlite3.SQLITE_BUSY
    assert len(said) == (1 if busy else 2) and said[-1].endswith("everything is read")
    assert path_of(repo).exists()


def test_each_row_is_looked_at_once(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    found(repo)
    remove(repo, [CheckpointId("vit", 1, 99)])
    add_note(repo, CheckpointId("vit", 1, 98), "metric", {"accuracy": 0.5})
    looked: list[CheckpointId] = []
    sign = CatalogCache._sign
    monkeypatch.setattr(CatalogCache, "_sign", lambda self, id: (looked.append(id), sign(self, id))[1])
    assert names(found(repo, "run == 'vit'", "-step", 4)) == ["vit/100", "vit/98", "vit/97", "vit/96"]
    assert [looked.count(CheckpointId("vit", 1, step)) for step in (100, 97, 96)] == [1, 1, 1]


def test_a_damaged_ref_is_reported_and_hides_nothing(where: Path) -> None:
    repo, said = Repo.open(open_store(where)), []
    put_ref(repo, "tag", "paper", CheckpointId("gpt", 1, 9))
    found(repo)
    (where / "refs/tag/paper/2.json").write_bytes(b"no")
    rows = catalog_cache.query(repo, Query.parse("tag"), report=said.append)
    assert names(rows) == ["gpt/9"] and len(said) == 1 and "refs/tag/paper/2.json" in said[0]


def test_rows_as_json(where: Path) -> None:
    repo = Repo.open(open_store(where))
    (row,) = found(repo, "run == 'gpt' and step == 100")
    said = json.loads(json.dumps(row.json()))
    assert (said["run"], said["attempt"], said["step"], said["latest"]) == ("gpt", 1, 100, True)
    assert said["metrics"]["accuracy"] == 0.1 and said["tags"] == [] and said["created"] == "2023-11-15T14:53:20Z"
    assert modes_of(repo.manifest(row.id)) == {"val_loss": "min"}


class Past:
    """A small repository to which random things happen."""

    def __init__(self, where: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.repo = Repo.create_or_open(open_store(where))
        self.attempts: dict[str, list[int]] = {run: [] for run in ("a", "b")}
        self.there: list[CheckpointId] = []
        self.removed: list[CheckpointId] = []
        self.where = where
        self.times: dict[Path, int] = {}
        self.now = time.time_ns() // 10**9 * 10**9 - 3600 * 10**9

    def tick(self) -> None:
        """Gives each directory that has changed a time that it had never before: many kernels' own times of files move
        on every few milliseconds only, and a quick machine changes a directory twice within one."""
        for path in self.where.rglob("*"):
            if path.is_dir() and path.stat().st_mtime_ns != self.times.get(path):
                self.now += 10**9
                self.times[path] = self.now
                os.utime(path, ns=(self.now, self.now))

    def put(self, name: str, data: bytes) -> None:
        self.repo.store.put_if_absent(name, Bytes(data), token="x")

    def claim(self) -> None:
        run = self.random.choice(["a", "b"])
        number = max(self.attempts[run], default=0) + 1
        lower = [id for id in self.there if id.run != run or id.attempt < number]
        parent = self.random.choice([*lower, None]) if lower else None
        record = AttemptRecord(run, number, f"{number:032x}", parent, Owner("h", "b", "p", 1, "1", "u"))
        self.put(object_names.attempt_name(run, number), encode_attempt(record, self.repo.id))
        self.attempts[run].append(number)

    def save(self) -> None:
        run = self.random.choice([run for run, numbers in self.attempts.items() if numbers])
        attempt = self.random.choice(self.attempts[run])
        newest = max((id.step for id in self.there if (id.run, id.attempt) == (run, attempt)), default=0)
        id = CheckpointId(run, attempt, newest + self.random.randint(1, 9))
        if id not in self.removed:
            made = manifest_of(id, {"loss": self.random.random(), "val_loss": self.random.choice([0.5, math.nan])})
            self.put(id.manifest, encode_manifest(made, self.repo.id))
            self.there.append(id)

    def remove(self) -> None:
        id = self.random.choice(self.there)
        with suppress(RemovalRefused):
            removing.remove(self.repo, id, finished={"a": True, "b": True}, force=True)
            self.there.remove(id)
            self.removed.append(id)

    def tag(self) -> None:
        put_ref(self.repo, self.random.choice(["tag", "pin", "hold"]), "x", self.random.choice(self.there))

    def note(self) -> None:
        kind, body = self.random.choice([("suspect", {}), ("verified", {}), ("metric", {"loss": self.random.random()})])
        add_note(self.repo, self.random.choice(self.there), kind, body)


def text_of(row: Row) -> str:
    """All of it but its age; nan equals nan."""
    return repr(replace(row, age_s=None))


def manifest_of(id: CheckpointId, metrics: dict[str, float]) -> Manifest:
    index = IndexEntry(object_names.index_file(0), 1000, bytes(16))
    modes = {"modes": {"loss": "min"}}
    return Manifest(id, "0" * 32, {}, (index,), "0" * 64, 1, 1, 1 << 18, metrics=metrics, certificate=modes)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_a_quick_look_is_as_good_as_a_complete_one_but_for_notes(tmp_path: Path, seed: int) -> None:
    past = Past(tmp_path / "ckpts", seed)
    past.claim()
    past.save()
    noted = False
    for _ in range(30):
        doing = past.random.choice([past.claim, past.save, past.save, past.save, past.remove, past.tag, past.note])
        if past.there or doing in (past.claim, past.save):
            doing()
        past.tick()
        noted = noted or doing == past.note
        with CatalogCache(past.repo) as catalog:
            catalog.refresh()
            quick = catalog._select(None, None, None)
        if not noted:
            assert {row.id for row, _ in quick} == set(past.there)
            now = {row.id: row for row in found(past.repo)}
            assert [replace(row, age_s=None) for row, _ in quick] == [
                replace(now[row.id], age_s=None) for row, _ in quick
            ]
        shown = found(past.repo, None, "-step", 3)
        check(past.repo)
        now = {row.id: row for row in found(past.repo)}
        assert all(text_of(row) == text_of(now[row.id]) for row in shown if not row.best)
        noted = False


@pytest.mark.parametrize(
    "text", ["run == 'gpt' and not damaged", "age < '3y' and tag is None", "step > 50", "loss < 1"]
)
def test_a_sort_by_a_metric_finds_that_of_each_checkpoint_by_a_key(where: Path, text: str) -> None:
    """Without one, sorting takes the square of the number of checkpoints."""
    with CatalogCache(Repo.open(open_store(where))) as catalog:
        catalog.refresh()
        asked: list[str] = []
        catalog._database.set_trace_callback(asked.append)
        catalog.query(Query.parse(text), Order.parse("val_loss"), 3)
        (select,) = [statement for statement in asked if "LEFT JOIN" in statement]
        plan = [row[3] for row in catalog._database.execute(f"EXPLAIN QUERY PLAN {select}")]
        joined = [line for line in plan if line.startswith("SEARCH m") and "LEFT-JOIN" in line]
        assert joined and all("(name=? AND checkpoint=?)" in line for line in joined), plan
