"""What the repository says when something is not there or not as it was: who is meant, and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenuto.errors import (
    CheckpointNotFound,
    CorruptionError,
    NotARepository,
    RepositoryError,
    RunInUse,
    RunNotFound,
    SaveFailed,
    Superseded,
    TenutoError,
    UsageError,
)
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.repo.commit import begin, commit
from tenuto.repo.format import object_names
from tenuto.repo.lineage import resolve, walk
from tenuto.repo.notes import add_note
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo, known_runs, nearby, now_text
from tenuto.store.contract import Bytes, Capabilities
from tenuto.store.local.store import LocalStore
from tenuto.store.memory import MemoryStore

SLOW = 3600.0


def said(kind: type[TenutoError], act: Any) -> tuple[str, str | None, str | None]:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    return caught.value.message, caught.value.subject, caught.value.hint


# -- the repository ---------------------------------------------------------------------------------------------------


def test_no_repository(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "here")
    assert said(NotARepository, lambda: Repo.open(store)) == (
        f"there is no Tenuto repository at {store.url}",
        store.url,
        "name the directory that your script gives to tenuto.Checkpointer or tenuto.save; they create it",
    )
    Repo.create_or_open(LocalStore(tmp_path / "here" / "inner"))
    assert said(NotARepository, lambda: Repo.open(store))[2] == f"there is one at {store.url}/inner"


def test_a_place_that_cannot_hold_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    monkeypatch.setattr(LocalStore, "probe", lambda self: Capabilities(commits=False, persistent=True))
    assert said(RepositoryError, lambda: Repo.create_or_open(store)) == (
        f"{store.url} can hold copies of checkpoints, but cannot decide which exist: it lets a second writer replace "
        "an object that is there",
        store.url,
        "keep the repository in an object store that refuses that (If-None-Match), or on a file system with hard "
        f"links, and copies here: tenuto.Mirror(THAT_PLACE, {store.url!r})",
    )


@pytest.mark.parametrize("size", [0, -1, (1 << 30) + 1])
def test_chunks_of_an_impossible_size(tmp_path: Path, size: int) -> None:
    store = LocalStore(tmp_path / "x")
    assert said(UsageError, lambda: Repo.create_or_open(store, chunk_bytes=size))[0] == (
        f"a chunk cannot have {size} bytes"
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("size", [1, 1 << 30])
def test_chunks_of_the_smallest_and_the_largest_size(size: int) -> None:
    store = MemoryStore(f"chunks of {size}")
    assert Repo.create_or_open(store, chunk_bytes=size).chunk_bytes == size
    assert Repo.open(store).chunk_bytes == size


def test_a_foreign_tenuto_json_is_named_with_its_place(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "tenuto.json").write_bytes(b"{}")
    message, subject, _ = said(CorruptionError, lambda: Repo.open(store))
    assert message.startswith(f"tenuto.json at {store.url} is not Tenuto's, or damaged: ")
    assert subject == "tenuto.json"


def test_what_a_new_repository_says_of_itself(tmp_path: Path) -> None:
    repo = Repo.create_or_open(LocalStore(tmp_path))
    body = canonical_json.loads((tmp_path / "tenuto.json").read_bytes())
    assert isinstance(body, dict)
    assert body["digests"] == {"chunk": "xxh3-128", "content": "sha-256", "object": "xxh3-128"}
    assert body["id"] == repo.id and len(repo.id) == 32
    from tenuto.version import __version__

    assert body["version"] == __version__
    assert str(body["created"]).endswith("Z")


def test_the_time_is_told_in_whole_seconds_of_universal_time() -> None:
    from datetime import UTC, datetime

    text = now_text()
    assert len(text) == len("2026-01-01T00:00:00Z") and text[10] == "T" and text[-1] == "Z"
    assert abs((datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()) < 10


def test_runs_are_named_for_a_message() -> None:
    assert known_runs([]) == "there are no runs yet"
    assert known_runs(["a", "b"]) == "there are: a, b"
    many = [str(number) for number in range(21)]
    assert known_runs(many[:20]) == "there are: " + ", ".join(many[:20])
    assert known_runs(many) == "there are: " + ", ".join(many[:20]) + ", …"


def test_what_is_not_there_is_named(repo: Repo, make: Any) -> None:
    make.attempt(1)
    begun, _ = make.begin(1, 5)
    hint = f"tenuto ls {repo.url} shows those that exist"
    none = CheckpointId("gpt", 1, 6)
    assert said(CheckpointNotFound, lambda: repo.manifest(none)) == (
        f"no checkpoint {none} at {repo.url}: there is none",
        str(none),
        hint,
    )
    from tenuto.repo.unfinished import abort

    abort(repo, begun, "ab" * 16)
    assert said(CheckpointNotFound, lambda: repo.manifest(begun)) == (
        f"no checkpoint {begun} at {repo.url}: its save was never finished",
        str(begun),
        hint,
    )
    for id in (begun, none):
        assert said(CheckpointNotFound, lambda id=id: repo.manifest_bytes(id)) == (
            f"no checkpoint {id} at {repo.url}: there is none, or its save was never finished",
            str(id),
            hint,
        )
    assert said(CheckpointNotFound, lambda: repo.attempt("GPT", 7)) == (
        f"run 'GPT' has no attempt 7 at {repo.url}",
        "GPT/7",
        None,
    )
    assert repo.mark(none) is None


def test_an_index_that_is_not_the_manifests_is_told_apart(repo: Repo, make: Any) -> None:
    make.attempt(1)
    id, other = make.checkpoint(1, 5), make.checkpoint(1, 6)
    manifest = repo.manifest(id)
    name = f"{id.directory}/rank-00000.index"
    data = repo.store.get(name, limit=1 << 20)
    entry = manifest.indexes[0]

    def after(replacement: bytes | None) -> tuple[str, str | None]:
        repo.store.delete([name])
        if replacement is not None:
            repo.store.put_if_absent(name, Bytes(replacement), token="x")
        return said(CorruptionError, lambda: repo.index(manifest))[:2]

    assert after(None) == (f"{name} is missing, which the manifest of {id} names", name)
    assert after(data[:-1]) == (f"{name} has {len(data) - 1} bytes, the manifest says {len(data)}", name)
    assert after(data[:-1] + bytes([data[-1] ^ 1])) == (
        f"{name} is damaged: its digest is not the one in the manifest",
        name,
    )
    repo.store.delete([name])
    repo.store.put_if_absent(name, Bytes(data), token="x")
    assert repo.index(manifest).save_id == manifest.save_id
    assert said(CorruptionError, lambda: repo.index(replace(manifest, save_id="0" * 32)))[:2] == (
        f"{name} belongs to another save than its manifest",
        name,
    )
    assert said(CorruptionError, lambda: repo.index(replace(manifest, chunk_bytes=7)))[:2] == (
        f"{name} belongs to another save than its manifest",
        name,
    )
    assert said(CorruptionError, lambda: repo.index(manifest, rank=3))[:2] == (
        f"the manifest of {id} names no index rank-00003.index",
        id.manifest,
    )
    huge = replace(entry, length=(1 << 32) + 1)
    assert said(CorruptionError, lambda: repo.index_bytes(id, huge))[:2] == (
        f"{name} claims {(1 << 32) + 1} bytes; at most {1 << 32} are read",
        name,
    )
    assert other in make.written


# -- claims and saves -------------------------------------------------------------------------------------------------


def test_a_run_in_use_is_told_with_its_owner(repo: Repo, release: list[Any]) -> None:
    release.append(claim(repo, "gpt", None, beat_s=SLOW))
    assert said(RunInUse, lambda: claim(repo, "gpt", None, beat_s=SLOW)) == (
        f"run 'gpt' at {repo.url} is in use: attempt 1 belongs to this very process (which has not closed it)",
        "gpt",
        "stop that process, wait for it with wait_for_owner=600, use another run name, or pass takeover=True",
    )
    assert repr(release[0]) == "Attempt(gpt/1)"
    assert len(release[0].id) == 32


def test_a_superseded_owner_is_told_by_whom(repo: Repo, make: Any, release: list[Any]) -> None:
    attempt = claim(repo, "gpt", None, beat_s=SLOW)
    release.append(attempt)
    attempt.check()
    make.attempt(2)
    hint = "let one of the two processes train, or give each a run of its own"
    assert said(Superseded, attempt.check) == (
        "run 'gpt' has been claimed as attempt 2 by process 1 of someone on elsewhere; attempt 1 can no longer save",
        "gpt",
        hint,
    )
    make.damage(object_names.attempt_name("gpt", 2))
    assert said(Superseded, attempt.check)[0] == (
        "run 'gpt' has been claimed as attempt 2 by a process whose record is damaged; attempt 1 can no longer save"
    )


def test_a_parent_that_is_no_parent(repo: Repo, make: Any) -> None:
    gone = CheckpointId("gpt", 5, 10)
    assert said(CheckpointNotFound, lambda: claim(repo, "gpt", gone, beat_s=SLOW))[:2] == (
        f"there is no checkpoint {gone} to resume from",
        str(gone),
    )
    make.attempt(1, run="base")
    lost = CheckpointId("base", 1, 10)
    assert said(CheckpointNotFound, lambda: claim(repo, "gpt", lost, beat_s=SLOW)) == (
        f"there is no checkpoint {lost} to resume from",
        str(lost),
        f"tenuto ls {repo.url} shows what is left",
    )


def test_a_step_that_was_used_and_a_save_that_was_closed(repo: Repo, make: Any, release: list[Any]) -> None:
    attempt = claim(repo, "gpt", None, beat_s=SLOW)
    release.append(attempt)
    id = begin(attempt, 10, "ab" * 16, ["rank-00000.safetensors", "rank-00000.index"])
    assert said(SaveFailed, lambda: begin(attempt, 10, "cd" * 16, ["rank-00000.index"])) == (
        "attempt 1 of run 'gpt' has begun a save of step 10 before",
        str(id),
        "the next step saves again; a new Checkpointer can save this one",
    )
    manifest, receipts = make.data(id, "ab" * 16)
    index = f"{id.directory}/rank-00000.index"
    assert said(SaveFailed, lambda: commit(repo, manifest, [])) == (
        f"I1: {index} ({manifest.indexes[0].length} bytes) has no receipt from {repo.url}; the manifest is not put",
        index,
        None,
    )
    message, subject, _ = said(CorruptionError, lambda: commit(repo, replace(manifest, save_id="cd" * 16), receipts))
    assert message.startswith(f"{index} belongs to another save")
    assert subject is not None and subject.endswith("rank-00000.index")
    from tenuto.repo.unfinished import abort

    abort(repo, id, "ab" * 16)
    assert said(Superseded, lambda: commit(repo, manifest, receipts)) == (
        f"the save of {id} cannot commit: run 'gpt' was claimed since, and the save closed",
        "gpt",
        "stop this process, or the one that runs now",
    )


def test_a_note_on_what_is_not_there(repo: Repo, make: Any) -> None:
    make.attempt(1)
    none = CheckpointId("gpt", 1, 6)
    assert said(CheckpointNotFound, lambda: add_note(repo, none, "metric", {}))[:2] == (
        f"no checkpoint {none} at {repo.url} to add a note to",
        str(none),
    )


def test_a_note_on_what_is_removed_meanwhile_goes_with_it(
    repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.attempt(1)
    id = make.checkpoint(1, 6)
    add_note(repo, id, "metric", {"loss": 1})
    answers = iter([True, False])
    monkeypatch.setattr(repo, "exists", lambda id: next(answers))
    assert said(CheckpointNotFound, lambda: add_note(repo, id, "metric", {"loss": 2}))[:2] == (
        f"checkpoint {id} was removed while a note was added to it",
        str(id),
    )
    assert make.names(object_names.notes_directory(id)) == ["1.json"]


def test_notes_behind_a_replaced_one_are_read(repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.repo import notes

    make.attempt(1)
    id = make.checkpoint(1, 6)
    for loss in (1, 2, 3):
        add_note(repo, id, "metric", {"loss": loss})
    directory = object_names.notes_directory(id)
    repo.store.delete([f"{directory}/2.json"])
    make.copy(f"{directory}/1.json", f"{directory}/2.json")
    assert [note.body.get("loss") for note in notes.notes(repo, id)] == [1, None, 3]
    monkeypatch.setattr(notes, "numbers", lambda repo, directory: [1, 9, 3])
    assert [note.body.get("loss") for note in notes.notes(repo, id)] == [1, None, 3]


# -- which checkpoint is meant ----------------------------------------------------------------------------------------


def test_what_a_person_means_is_not_there(repo: Repo, make: Any) -> None:
    shows = f"tenuto ls {repo.url} shows "
    assert said(RunNotFound, lambda: resolve(repo, "gpt")) == (
        f"no run 'gpt' at {repo.url}; there are no runs yet",
        "gpt",
        shows + "what there is",
    )
    make.attempt(1)
    assert said(RunNotFound, lambda: resolve(repo, "gtp"))[2] == "did you mean 'gpt'?"
    assert said(CheckpointNotFound, lambda: resolve(repo, "gpt"))[:2] == (
        f"run 'gpt' at {repo.url} has no checkpoint yet",
        "gpt",
    )
    missing = CheckpointId("gpt", 1, 7)
    assert said(CheckpointNotFound, lambda: resolve(repo, "gpt", "a0001/7")) == (
        f"no checkpoint {missing} at {repo.url}; steps of that attempt: none",
        str(missing),
        shows + "all",
    )
    for step in range(10, 130, 10):
        make.checkpoint(1, step)
    assert said(CheckpointNotFound, lambda: resolve(repo, "gpt", missing))[0].endswith(
        "steps of that attempt: 120, 110, 100, 90, 80, 70, 60, 50, 40, 30"
    )
    assert said(CheckpointNotFound, lambda: resolve(repo, "gpt", 61)) == (
        "run 'gpt' has no checkpoint of step 61; the nearest are 40, 50, 60, 70, 80",
        "gpt/61",
        shows + "all",
    )
    hint = "give a step, latest, a tag, best:METRIC, or attempt/step such as a0007/500"
    assert said(UsageError, lambda: resolve(repo, "gpt", "No Name")) == (
        "'No Name' names no checkpoint",
        "No Name",
        hint,
    )
    from tenuto.repo.refs import put_ref

    newest = CheckpointId("gpt", 1, 120)
    assert said(CheckpointNotFound, lambda: resolve(repo, "gpt", "best")) == (
        "'best' names no checkpoint: it is neither a step nor a tag; tags that there are: none",
        "best",
        hint,
    )
    for tag in ("good", "better"):
        put_ref(repo, "tag", tag, newest)
    assert said(CheckpointNotFound, lambda: resolve(repo, "gpt", "best"))[0].endswith("there are: better, good")
    assert resolve(repo, "elsewhere", "good") == newest


@pytest.mark.parametrize("how", ["lease", "begin", "nothing"])
def test_a_lost_parent_is_told_of(repo: Repo, make: Any, how: str) -> None:
    make.attempt(1)
    base = make.checkpoint(1, 10)
    record = make.attempt(2, base)
    if how == "lease":
        from tenuto.repo.ownership.lease import Lease

        lease = Lease(repo, record, interval_s=SLOW)
        lease.beat()
        repo.store.put_if_absent("runs/gpt/a0002/lease/0.json", Bytes(b"foreign"), token="x")
        repo.store.put_if_absent("runs/gpt/a0002/lease/7.json", Bytes(b"damaged"), token="x")
    if how == "begin":
        make.begin(2, 15, parent=base)
        repo.store.put_if_absent("runs/gpt/a0002/step-00000020/begin.json", Bytes(b"damaged"), token="x")
        repo.store.put_if_absent("runs/gpt/a0002/step-00000030/other", Bytes(b"foreign"), token="x")
    repo.store.delete([object_names.attempt_name("gpt", 2)])
    make.attempt(3, CheckpointId("gpt", 2, 99))
    told: list[str] = []
    assert list(walk(repo, "gpt", report=told.append)) == [base]
    lost = "attempt 2 of run gpt has no record of its own"
    assert told == [
        f"{lost}; what it was restored from is not known, the walk continues with the next lower attempt"
        if how == "nothing"
        else f"{lost}; its parent was taken from its other objects"
    ]


def test_the_nearest_repository(tmp_path: Path) -> None:
    deep = tmp_path / "1/2/3/4/5/6/7/8/9"
    deep.mkdir(parents=True)
    (tmp_path / "1" / "tenuto.json").write_text("x")
    assert nearby(LocalStore(deep)) == str(tmp_path / "1"), "eight levels above"
    (deep / "10").mkdir()
    assert nearby(LocalStore(deep / "10")) is None, "nine are not looked at"
    assert nearby(LocalStore(tmp_path)) == str(tmp_path / "1")
    (tmp_path / "1" / "tenuto.json").unlink()
    (tmp_path / "1" / "tenuto.json").mkdir()
    assert nearby(LocalStore(tmp_path)) is None, "a directory of that name is none"
    memory = MemoryStore("nearby")
    memory.put_if_absent("a/x", Bytes(b""), token="t")
    assert nearby(memory) is None
    memory.put_if_absent("b/tenuto.json", Bytes(b""), token="t")
    assert nearby(memory) == "memory://nearby/b"
