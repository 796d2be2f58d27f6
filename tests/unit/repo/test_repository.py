"""Opening and creating a repository, and what it says of what it holds."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    FormatTooNew,
    NotARepository,
    RepositoryError,
    StoreError,
    TenutoError,
)
from tenuto.maintenance.census import take_census
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names
from tenuto.repo.lineage import walk
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Capabilities, Store
from tenuto.store.local.store import LocalStore
from tenuto.store.memory import MemoryStore


def test_it_is_created_once_and_opened_again(store: Store) -> None:
    with pytest.raises(NotARepository):
        Repo.open(store)
    made = Repo.create_or_open(store, chunk_bytes=4096)
    for again in (Repo.create_or_open(store), Repo.open(store)):
        assert (again.id, again.chunk_bytes, again.url) == (made.id, 4096, store.url)
    assert made.runs() == []


def test_what_lies_there_already_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "runs" / "tensorboard").mkdir(parents=True)
    (tmp_path / "model.py").write_text("x = 1")
    (tmp_path / "runs" / "tensorboard" / "events").write_text("e")
    before = sorted(p for p in tmp_path.rglob("*"))
    repo = Repo.create_or_open(LocalStore(tmp_path))
    assert sorted(p for p in tmp_path.rglob("*") if p.name not in ("tenuto.json", "tenuto.copy.json")) == before
    assert repo.runs() == []


def test_creations_that_race_end_with_one_repository(tmp_path: Path) -> None:
    ids: list[str] = []
    barrier = threading.Barrier(8)

    def create() -> None:
        barrier.wait()
        ids.append(Repo.create_or_open(LocalStore(tmp_path / "x")).id)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 8
    assert len(set(ids)) == 1


def test_processes_that_race_end_with_one_repository(tmp_path: Path) -> None:
    children = []
    for _ in range(4):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, Repo.create_or_open(LocalStore(tmp_path / "x")).id.encode())
            os._exit(0)
        os.close(write)
        children.append((pid, read))
    ids = set()
    for pid, read in children:
        ids.add(os.read(read, 64))
        os.close(read)
        assert os.waitpid(pid, 0)[1] == 0
    assert len(ids) == 1


def test_the_nearest_repository_is_named(tmp_path: Path) -> None:
    Repo.create_or_open(LocalStore(tmp_path / "a" / "ckpts"))
    with pytest.raises(NotARepository) as below:
        Repo.open(LocalStore(tmp_path / "a"))
    assert str(tmp_path / "a" / "ckpts") in str(below.value)
    with pytest.raises(NotARepository) as above:
        Repo.open(LocalStore(tmp_path / "a" / "ckpts" / "runs" / "gpt"))
    assert str(above.value).endswith(str(tmp_path / "a" / "ckpts"))
    with pytest.raises(NotARepository) as nowhere:
        Repo.open(LocalStore(tmp_path / "b"))
    assert "create" in str(nowhere.value)
    with pytest.raises(NotARepository):
        Repo.open(MemoryStore("holds nothing"))


def test_a_file_in_its_place_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for act in (Repo.open, Repo.create_or_open):
        with pytest.raises(TenutoError) as caught:
            act(LocalStore(tmp_path / "file"))
        assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError):
        Repo.create_or_open(LocalStore(tmp_path / "x"))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"name":"someone else\'s"}', b"\x00" * 100])
def test_a_foreign_or_damaged_tenuto_json_is_an_error_that_names_it(store: Store, data: bytes) -> None:
    store.put_if_absent(object_names.REPOSITORY, Bytes(data), token="x")
    for act in (Repo.open, Repo.create_or_open):
        with pytest.raises(CorruptionError) as caught:
            act(store)
        assert caught.value.subject == object_names.REPOSITORY
    assert store.get(object_names.REPOSITORY, limit=1000) == data


def test_a_newer_repository_says_to_upgrade(store: Store) -> None:
    data = canonical_json.seal({"format": 2, "path": "tenuto.json", "anything": "else"})
    store.put_if_absent(object_names.REPOSITORY, Bytes(data), token="x")
    for act in (Repo.open, Repo.create_or_open):
        with pytest.raises(FormatTooNew, match="format 2"):
            act(store)


@pytest.mark.parametrize(
    "changes",
    [{"digests": {}}, {"id": "short"}, {"chunk_bytes": 0}, {"chunk_bytes": 1 << 40}, {"kind": "note"}, {"path": "x"}],
)
def test_a_repository_that_lies_is_refused(store: Store, changes: dict[str, Any]) -> None:
    Repo.create_or_open(store)
    body = {k: v for k, v in canonical_json.loads(store.get("tenuto.json", limit=10_000)).items() if k != "digest"}
    store.delete(["tenuto.json", "tenuto.copy.json"])
    store.put_if_absent("tenuto.json", Bytes(canonical_json.seal({**body, **changes})), token="x")
    with pytest.raises(CorruptionError):
        Repo.open(store)


def test_a_store_that_replaces_objects_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    monkeypatch.setattr(LocalStore, "probe", lambda self: Capabilities(commits=False, persistent=True))
    with pytest.raises(RepositoryError, match="cannot decide which exist"):
        Repo.create_or_open(store)
    assert list(tmp_path.iterdir()) == []


def test_runs_attempts_and_steps_are_listed_and_foreign_names_passed_over(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.attempt(2)
    make.attempt(12000)
    for step in (5, 500, 123456789012):
        make.checkpoint(1, step)
    make.attempt(1, run="other=1")
    for name in (
        "runs/gpt/a003/x",
        "runs/gpt/a0000/x",
        "runs/gpt/a00013/x",
        "runs/gpt/notes.txt",
        "runs/Bad Name/a0001/x",
        "runs/x.txt",
    ):
        repo.store.put_if_absent(name, Bytes(b"foreign"), token="x")
    for name in (
        "step-5/manifest.json",
        "step-000000007/manifest.json",
        "checkpoint/manifest.json",
        "step-00000009/other.json",
    ):
        repo.store.put_if_absent(f"runs/gpt/a0001/{name}", Bytes(b"foreign"), token="x")
    assert repo.runs() == ["gpt", "other=1"]
    assert repo.attempts("GPT") == [1, 2, 12000]
    assert repo.committed("Gpt", 1) == [123456789012, 500, 5]
    assert repo.committed("gpt", 2) == repo.committed("nowhere", 1) == []


def test_a_manifest_and_index_are_read_back(repo: Repo, make: Any) -> None:
    make.attempt(1)
    id = make.checkpoint(1, 5)
    manifest = repo.manifest(id)
    assert manifest == make.written[id]
    assert canonical_json.loads(repo.manifest_bytes(id))["path"] == id.manifest
    index = repo.index(manifest)
    assert [spec.path for spec in index.specs] == ["a", "b", "c", "d", "e"]
    assert repo.exists(id)


def test_what_is_not_there_is_said(repo: Repo, make: Any) -> None:
    make.attempt(1)
    id, _ = make.begin(1, 5)
    for act in (repo.manifest, repo.manifest_bytes):
        with pytest.raises(CheckpointNotFound) as caught:
            act(id)
        assert caught.value.subject == "gpt/a0001/5"
    assert not repo.exists(id)
    with pytest.raises(CheckpointNotFound):
        repo.attempt("gpt", 2)


def test_a_damaged_manifest_exists_and_cannot_be_read(repo: Repo, make: Any) -> None:
    make.attempt(1)
    id = make.checkpoint(1, 5)
    make.damage(id.manifest)
    assert repo.exists(id)
    assert repo.committed("gpt", 1) == [5]
    for act in (repo.manifest, repo.manifest_bytes):
        with pytest.raises(CorruptionError) as caught:
            act(id)
        assert caught.value.subject == id.manifest


def test_copied_directories_are_never_candidates(repo: Repo, make: Any) -> None:
    make.attempt(1)
    make.checkpoint(1, 5)
    make.copy("runs/gpt/a0001/step-00000005", "runs/gpt/a0001/step-00000009")
    make.copy("runs/gpt/a0001", "runs/gpt/a0007")
    make.copy("runs/gpt", "runs/gpt-backup")
    assert repo.committed("gpt", 1) == [5]
    assert repo.committed("gpt", 7) == repo.committed("gpt-backup", 1) == []
    assert repo.find_attempt("gpt", 7) is None
    with pytest.raises(CorruptionError, match="a copy of"):
        repo.manifest(CheckpointId("gpt", 1, 9))


@pytest.mark.parametrize("size", [0, 10_000])
def test_i4_a_directory_that_was_copied_with_its_manifest_damaged_is_no_candidate(
    repo: Repo, make: Any, size: int
) -> None:
    make.attempt(1)
    environment = {"text": "x" * size}
    good, bad = (make.checkpoint(1, step, environment=environment) for step in (5, 7))
    make.damage(bad.manifest)
    make.copy(bad.directory, "runs/gpt/a0001/step-00000009")
    make.copy("runs/gpt/a0001", "runs/gpt/a0007")
    assert repo.committed("gpt", 1) == [7, 5]
    assert repo.committed("gpt", 7) == []
    assert list(walk(repo, "gpt")) == [bad, good]
    census = take_census(repo)
    copies = {id for id, save in census.saves.items() if save.state == "copied"}
    assert copies == {CheckpointId("gpt", 1, 9), *(CheckpointId("gpt", 7, step) for step in (5, 7, 9))}
    assert census.saves[bad].state == "damaged"
    repo.store.delete([f"{bad.directory}/begin.json"])
    assert repo.exists(bad), "without a begin.json nothing says that it was copied"


def test_a_large_manifest_is_judged_like_a_small_one(repo: Repo, make: Any) -> None:
    make.attempt(1)
    id = make.checkpoint(1, 5, environment={"text": "x" * 10_000})
    make.copy(id.directory, "runs/gpt/a0001/step-00000006")
    assert repo.committed("gpt", 1) == [5]
    make.damage(id.manifest)
    assert repo.committed("gpt", 1) == [5]


class RangedOnly:
    """A store that gives no object whole, and counts the bytes that it gives."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.given = 0

    def get(self, name: str, *, limit: int) -> bytes:
        raise AssertionError(f"{name} was asked for whole")

    def open(self, name: str) -> Any:
        found = self._inner.open(name)
        read_into = found.read_into

        class Counted:
            length, alignment = found.length, 1
            view, close = staticmethod(found.view), staticmethod(found.close)

            def read_into(_, offset: int, buffer: memoryview) -> None:
                self.given += len(buffer)
                read_into(offset, buffer)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *rest: object) -> None:
                found.close()

        return Counted()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_whether_a_checkpoint_exists_is_told_by_the_first_bytes_of_its_manifest(repo: Repo, make: Any) -> None:
    make.attempt(1)
    small = make.checkpoint(1, 10)
    large = CheckpointId("gpt", 1, 20)
    body = canonical_json.open_seal(repo.store.get(small.manifest, limit=1 << 20), name=small.manifest)
    body.pop("digest", None)
    body.update(path=large.manifest, step=20, tree={"!": "dict", "i": [[f"leaf{n}", n] for n in range(100_000)]})
    repo.store.put_if_absent(large.manifest, Bytes(canonical_json.seal(body)), token="0" * 32)
    length = repo.store.stat(large.manifest).length
    ranged = RangedOnly(repo.store)
    counted = Repo(ranged, repo.id, repo.chunk_bytes)
    assert counted.exists(large) and length > 1 << 20 and ranged.given <= 64 << 10
    assert counted.exists(small)
    assert not counted.exists(CheckpointId("gpt", 1, 30))


@pytest.mark.parametrize("trouble", ["missing", "shorter", "longer", "changed", "of another save"])
def test_an_index_that_is_not_the_manifests_is_refused(repo: Repo, make: Any, trouble: str) -> None:
    make.attempt(1)
    id, other = make.checkpoint(1, 5), make.checkpoint(1, 6)
    name = f"{id.directory}/rank-00000.index"
    data = repo.store.get(name, limit=1 << 20)
    repo.store.delete([name])
    replaced = {
        "shorter": data[:-1],
        "longer": data + b"\0",
        "changed": data[:-1] + bytes([data[-1] ^ 1]),
        "of another save": repo.store.get(f"{other.directory}/rank-00000.index", limit=1 << 20),
    }
    if trouble in replaced:
        repo.store.put_if_absent(name, Bytes(replaced[trouble]), token="x")
    with pytest.raises(CorruptionError) as caught:
        repo.index(repo.manifest(id))
    assert caught.value.subject == name


def test_an_attempt_record_that_lies_is_refused(repo: Repo, make: Any) -> None:
    make.attempt(1)
    name = object_names.attempt_name("gpt", 1)
    body = {k: v for k, v in canonical_json.loads(repo.store.get(name, limit=10_000)).items() if k != "digest"}
    lies: list[dict[str, Any]] = [
        {"parent": {"run": "gpt", "attempt": 1, "step": 5}},
        {"parent": {"run": "GPT", "attempt": 9, "step": 5}},
        {"parent": 5},
        {"parent": {"run": "gpt", "attempt": 1.0, "step": 5}},
        {"attempt": 2},
        {"run": "x"},
        {"id": "z" * 32},
        {"owner": None},
        {"owner": {**body["owner"], "pid": "1"}},
        {"owner": {**body["owner"], "host": "h" * 10_000}},
    ]
    for lie in lies:
        repo.store.delete([name])
        repo.store.put_if_absent(name, Bytes(canonical_json.seal({**body, **lie})), token="x")
        with pytest.raises(CorruptionError) as caught:
            repo.attempt("gpt", 1)
        assert caught.value.subject == name
