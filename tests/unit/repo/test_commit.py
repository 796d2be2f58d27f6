"""I1 and I2: a checkpoint comes into being in one step, after everything it names; a name is used once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tenuto.errors import (
    AlreadyExists,
    CheckpointNotFound,
    CorruptionError,
    SaveFailed,
    StoreUnavailable,
    Superseded,
    UsageError,
)
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.repo.commit import begin, commit
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import Aborted, content_digest, leaf_table
from tenuto.repo.notes import UNREADABLE, add_note, notes, unread, with_notes
from tenuto.repo.ownership.claim import Attempt, claim
from tenuto.repo.refs import clear_ref, list_refs, put_ref, read_ref
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import put_tombstone, still_exists, take_back
from tenuto.repo.unfinished import abort, free
from tenuto.store.contract import Bytes

SAVE = "ab" * 16
NAMES = ["rank-00000.safetensors", "rank-00000.index"]


@pytest.fixture
def attempt(repo: Repo) -> Iterator[Attempt]:
    attempt = claim(repo, "gpt", None, beat_s=3600.0)
    yield attempt
    attempt.release()


def test_a_save_from_begin_to_commit(repo: Repo, make: Any, attempt: Attempt) -> None:
    id = begin(attempt, 10, SAVE, NAMES)
    assert id == CheckpointId("gpt", 1, 10)
    assert not repo.exists(id)
    manifest, receipts = make.data(id, SAVE)
    assert commit(repo, manifest, receipts) == id
    assert repo.manifest(id) == manifest


def test_i1_a_manifest_without_a_receipt_for_everything_it_names_is_not_put(
    repo: Repo, make: Any, attempt: Attempt
) -> None:
    id = begin(attempt, 10, SAVE, NAMES)
    manifest, receipts = make.data(id, SAVE)
    wrong = [
        [],
        receipts[:1],
        receipts[1:],
        [replace(receipts[0], length=receipts[0].length - 1), receipts[1]],
        [receipts[0], replace(receipts[1], length=1)],
        [replace(receipt, store="elsewhere") for receipt in receipts],
        [replace(receipts[0], name="runs/gpt/a0001/step-00000011/rank-00000.safetensors"), receipts[1]],
    ]
    for given in wrong:
        with pytest.raises(SaveFailed, match="I1"):
            commit(repo, manifest, given)
    assert not repo.exists(id)
    assert commit(repo, manifest, receipts) == id


def test_i1_an_index_that_arrived_damaged_or_is_another_saves_is_not_committed(
    repo: Repo, make: Any, attempt: Attempt
) -> None:
    id = begin(attempt, 10, SAVE, NAMES)
    manifest, receipts = make.data(id, SAVE)
    with pytest.raises(CorruptionError):
        commit(repo, replace(manifest, save_id="cd" * 16), receipts)
    make.damage(f"{id.directory}/rank-00000.index", at=-1)
    with pytest.raises(CorruptionError):
        commit(repo, manifest, receipts)
    assert not repo.exists(id)


def test_i2_a_lost_reply_to_a_commit_is_a_success_and_nothing_else_is(
    repo: Repo, make: Any, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = begin(attempt, 10, SAVE, NAMES)
    manifest, receipts = make.data(id, SAVE)
    settled: list[str] = []
    real = repo.store.settle
    monkeypatch.setattr(repo.store, "settle", lambda name: (settled.append(name), real(name)))
    commit(repo, manifest, receipts)
    assert settled == []
    assert commit(repo, manifest, receipts) == id
    assert settled == [id.manifest]
    with pytest.raises(Superseded):
        commit(repo, replace(manifest, created="later"), receipts)
    assert repo.manifest(id) == manifest


def test_a_lost_reply_that_cannot_be_settled_is_no_success(
    repo: Repo, make: Any, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = begin(attempt, 10, SAVE, NAMES)
    manifest, receipts = make.data(id, SAVE)
    commit(repo, manifest, receipts)

    def fail(name: str) -> None:
        raise StoreUnavailable("away", subject=name)

    monkeypatch.setattr(repo.store, "settle", fail)
    with pytest.raises(StoreUnavailable):
        commit(repo, manifest, receipts)


def test_an_aborted_save_cannot_commit_and_a_committed_one_not_be_aborted(
    repo: Repo, make: Any, attempt: Attempt
) -> None:
    first, second = begin(attempt, 10, SAVE, NAMES), begin(attempt, 20, "cd" * 16, NAMES)
    manifest, receipts = make.data(first, SAVE)
    assert abort(repo, first, SAVE)
    assert abort(repo, first, "ef" * 16)
    with pytest.raises(Superseded):
        commit(repo, manifest, receipts)
    manifest, receipts = make.data(second, "cd" * 16)
    commit(repo, manifest, receipts)
    assert not abort(repo, second, "cd" * 16)
    assert not free(repo, second, names=NAMES)
    assert repo.index(repo.manifest(second)).specs


def test_free_takes_what_begin_lists_and_what_the_caller_knows(repo: Repo, make: Any, attempt: Attempt) -> None:
    id = begin(attempt, 10, SAVE, NAMES)
    make.data(id, SAVE)
    for file in ("rank-00001.safetensors", "theirs.safetensors"):
        repo.store.put_if_absent(f"{id.directory}/{file}", Bytes(b"x"), token="x")
    assert not free(repo, id)
    assert abort(repo, id, SAVE)
    assert free(repo, id, names=["rank-00001.safetensors", "../../attempt.json", "manifest.json"])
    assert make.names(id.directory) == ["manifest.json", "theirs.safetensors"]
    assert free(repo, id)
    assert isinstance(repo.mark(id), Aborted)
    repo.attempt("gpt", 1)


def test_free_takes_temporaries_of_this_saves_objects_only(repo: Repo, make: Any, attempt: Attempt) -> None:
    if not repo.url.startswith("/"):
        pytest.skip("only files leave temporaries")
    from pathlib import Path

    id = begin(attempt, 10, SAVE, NAMES)
    directory = Path(repo.url) / id.directory
    ours = [f"{file}.tmp-{SAVE}" for file in (*NAMES, "begin.json", "manifest.json")]
    for file in (*ours, "notes.txt", "other.bin.tmp-x"):
        (directory / file).write_text("x")
    abort(repo, id, SAVE)
    free(repo, id)
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "notes.txt", "other.bin.tmp-x"]


def test_a_step_is_begun_once_in_an_attempt(repo: Repo, make: Any, attempt: Attempt) -> None:
    id = begin(attempt, 10, SAVE, NAMES)
    assert begin(attempt, 10, SAVE, NAMES) == id
    with pytest.raises(SaveFailed, match="step 10 before") as caught:
        begin(attempt, 10, "cd" * 16, NAMES)
    assert caught.value.subject == str(id)
    abort(repo, id, SAVE)
    free(repo, id)
    with pytest.raises(SaveFailed):
        begin(attempt, 10, "cd" * 16, NAMES)


def test_an_index_is_put_once(repo: Repo, make: Any, attempt: Attempt) -> None:
    id = begin(attempt, 10, SAVE, NAMES)
    make.data(id, SAVE)
    repo.store.delete([f"{id.directory}/rank-00000.safetensors"])
    with pytest.raises(AlreadyExists):
        make.data(id, SAVE, seed=1)


def test_the_content_digest_tells_equal_from_unequal(make: Any) -> None:
    import numpy as np

    from tenuto.model.leaf import LeafSpec

    specs = (LeafSpec("x", "float32", (2,)), LeafSpec("y", "float32", (2,)))
    digests = np.arange(32, dtype=np.uint8).reshape(2, 16)
    base = content_digest({"a": 1}, specs, digests, chunk_bytes=64)
    assert base == content_digest({"a": 1}, specs, digests[:], chunk_bytes=64)
    others = [
        content_digest({"a": 1.0}, specs, digests, chunk_bytes=64),
        content_digest({"a": 1}, specs, digests ^ 1, chunk_bytes=64),
        content_digest({"a": 1}, specs, digests, chunk_bytes=65),
        content_digest({"a": 1}, specs, digests, chunk_bytes=64, private=[1]),
        content_digest({"a": 1}, (specs[0], replace(specs[1], dtype="int32")), digests, chunk_bytes=64),
        content_digest({"a": 1}, (specs[0], replace(specs[1], shape=(1, 2))), digests, chunk_bytes=64),
    ]
    assert len({base, *others}) == 7
    spelled = b'["tenuto content 1",64,{"a":1},[],["float32 2","float32 2"]]' + bytes(range(32))
    assert base == hashlib.sha256(spelled).hexdigest()
    assert base == content_digest(canonical_json.spell({"a": 1}), leaf_table(specs), digests, chunk_bytes=64)


# -- notes and refs ---------------------------------------------------------------------------------------------------


def test_notes_are_appended_and_read_in_order(repo: Repo, make: Any) -> None:
    make.attempt(1)
    id = make.checkpoint(1, 10)
    assert notes(repo, id) == []
    for number in range(1, 13):
        assert add_note(repo, id, "metric", {"loss": number / 2}).number == number
    assert [note.body["loss"] for note in notes(repo, id)] == [number / 2 for number in range(1, 13)]
    with pytest.raises(UsageError):
        add_note(repo, id, "opinion", {})
    with pytest.raises(CheckpointNotFound):
        add_note(repo, CheckpointId("gpt", 1, 11), "metric", {})


def test_notes_that_race_are_all_kept(repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.repo import refs

    make.attempt(1)
    id = make.checkpoint(1, 10)
    add_note(repo, id, "metric", {"loss": 1})
    monkeypatch.setattr(refs, "numbers", lambda repo, directory: [])
    assert add_note(repo, id, "metric", {"loss": 1}).number == 2


def test_a_damaged_note_stands_where_it_was_and_a_copied_one_is_none(repo: Repo, make: Any) -> None:
    make.attempt(1)
    id = make.checkpoint(1, 10)
    for value in (1, 2):
        add_note(repo, id, "metric", {"loss": value})
    make.copy(f"{id.directory}/notes/1.json", f"{id.directory}/notes/7.json")
    assert unread(id, notes(repo, id)) == ""
    make.damage(f"{id.directory}/notes/1.json")
    assert [(note.number, note.kind) for note in notes(repo, id)] == [(1, UNREADABLE), (2, "metric")]
    assert unread(id, notes(repo, id)) == f"{id.directory}/notes/1.json cannot be read"
    assert with_notes({}, notes(repo, id)) == {"loss": 2}


def test_a_note_that_is_missing_below_another_or_replaced_cannot_be_read(repo: Repo, make: Any) -> None:
    make.attempt(1)
    id = make.checkpoint(1, 10)
    for value in (1, 2, 3):
        add_note(repo, id, "metric", {"loss": value})
    repo.store.delete([f"{id.directory}/notes/2.json"])
    assert [note.kind for note in notes(repo, id)] == ["metric", UNREADABLE, "metric"]
    make.copy(f"{id.directory}/notes/1.json", f"{id.directory}/notes/2.json")
    assert [note.kind for note in notes(repo, id)] == ["metric", UNREADABLE, "metric"]


def test_refs_point_move_and_are_cleared(repo: Repo, make: Any) -> None:
    make.attempt(1)
    first, second = make.checkpoint(1, 10), make.checkpoint(1, 20)
    assert read_ref(repo, "tag", "best") is None
    put_ref(repo, "tag", "best", first)
    put_ref(repo, "tag", "best", second)
    put_ref(repo, "pin", "keep", first)
    assert [(ref.kind, ref.name, ref.id) for ref in list_refs(repo)] == [
        ("pin", "keep", first),
        ("tag", "best", second),
    ]
    clear_ref(repo, "tag", "best")
    clear_ref(repo, "tag", "best")
    assert read_ref(repo, "tag", "best") is None
    assert len(list_refs(repo)) == 1
    with pytest.raises(UsageError):
        put_ref(repo, "tag", "../x", first)


def test_i6_a_ref_does_not_rely_on_what_is_going(repo: Repo, make: Any) -> None:
    make.attempt(1)
    kept, going = make.checkpoint(1, 10), make.checkpoint(1, 20)
    stone = put_tombstone(repo, going, reason="rm")
    put_ref(repo, "tag", "best", kept)
    for id in (going, CheckpointId("gpt", 1, 30)):
        with pytest.raises(CheckpointNotFound):
            put_ref(repo, "tag", "best", id)
        assert read_ref(repo, "tag", "best") == kept
    assert still_exists(repo, stone)
    take_back(repo, stone)
    assert not still_exists(repo, stone)
    assert put_ref(repo, "tag", "best", going).id == going


def test_i6_a_damaged_ref_is_not_taken_for_none(repo: Repo, make: Any) -> None:
    make.attempt(1)
    put_ref(repo, "pin", "keep", make.checkpoint(1, 10))
    make.damage("refs/pin/keep/1.json")
    for act in (lambda: read_ref(repo, "pin", "keep"), lambda: list_refs(repo)):
        with pytest.raises(CorruptionError):
            act()


def test_every_name_that_leads_out_is_refused() -> None:
    for name in (
        "../x",
        "a/b",
        "",
        ".",
        "..",
        "notes",
        "begin.json",
        "manifest.json",
        "x\n",
        "é",
        "-x",
        "x" * 101,
        "C:\\x",
        5,
        None,
    ):
        assert not object_names.is_file(name)
    for name in ("rank-00000.safetensors", "rank-00000.01.safetensors", "rank-00000.index", "rank-00000.pack"):
        assert object_names.is_file(name)
