"""Small objects: what their fields may be, whose copy they are, and what is said where they are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.errors import AlreadyExists, CorruptionError, FormatTooNew, ObjectNotFound, StoreUnavailable, UsageError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.objects import Fields
from tenuto.repo.refs import append, numbers
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Store

NAME = "runs/gpt/a0001/x.json"
OURS, THEIRS = "1" * 32, "2" * 32


def refused(act: Any, message: str) -> None:
    with pytest.raises(CorruptionError) as caught:
        act()
    assert caught.value.message == f"{NAME}: {message}"
    assert caught.value.subject == NAME


def fields(**values: Any) -> Fields:
    return Fields(values, NAME)


def test_an_object_says_its_kind_its_place_and_its_format() -> None:
    data = objects.encode("note", NAME, {"body": {"a": 1}}, OURS)
    found = objects.decode("note", NAME, data, OURS)
    assert {key: value for key, value in found.values.items() if key != "digest"} == {
        "body": {"a": 1},
        "format": 1,
        "kind": "note",
        "path": NAME,
        "repository": OURS,
    }
    assert found.name == NAME
    with pytest.raises(CorruptionError) as caught:
        objects.decode("ref", NAME, data, OURS)
    assert caught.value.message == f"{NAME} is a 'note', not a ref"
    assert caught.value.subject == NAME
    with pytest.raises(CorruptionError, match="a copy of"):
        objects.decode("note", "runs/gpt/a0002/x.json", data, OURS)
    with pytest.raises(CorruptionError) as caught:
        objects.decode("note", NAME, data, THEIRS)
    assert caught.value.message == f"{NAME} belongs to repository {OURS}, this is {THEIRS}"
    assert objects.decode("note", NAME, data, None).text("repository") == OURS, "read to learn whose it is"


def test_a_kind_that_is_long_is_told_in_part() -> None:
    with pytest.raises(CorruptionError) as caught:
        objects.decode("ref", NAME, objects.encode("k" * 41, NAME, {}, OURS), OURS)
    assert caught.value.message == f"{NAME} is a {'k' * 40!r}, not a ref"


def test_a_newer_format_says_how_to_read_it() -> None:
    data = canonical_json.seal({"format": 2, "kind": "note", "path": NAME})
    with pytest.raises(FormatTooNew) as caught:
        objects.decode("note", NAME, data, OURS)
    assert caught.value.message == f"{NAME} has format 2; this version reads formats up to 1"
    assert (caught.value.subject, caught.value.hint) == (
        NAME,
        "read it with the Tenuto that wrote it, or a newer one",
    )
    older = canonical_json.seal({"format": 0, "kind": "note", "path": NAME, "repository": OURS})
    assert objects.decode("note", NAME, older, OURS).whole("format") == 0


def test_what_was_cut_out_of_a_larger_object_is_checked_like_a_whole_one() -> None:
    good = {"format": 1, "kind": "note", "path": NAME, "repository": OURS}
    found = objects.checked("note", NAME, good, OURS)
    assert found is not None and (found.values, found.name) == (good, NAME)
    changed = ({"path": "elsewhere"}, {"kind": "ref"}, {"repository": THEIRS}, {"repository": None})
    for other in ([], None, *({**good, **change} for change in changed)):
        assert objects.checked("note", NAME, other, OURS) is None
    with pytest.raises(FormatTooNew):
        objects.checked("note", NAME, {**good, "format": 2}, OURS)


def test_a_copy_is_whole_and_from_elsewhere() -> None:
    data = objects.encode("note", NAME, {}, OURS)
    assert not objects.is_copy(NAME, data, OURS)
    assert objects.is_copy("runs/gpt/a0002/x.json", data, OURS)
    assert objects.is_copy(NAME, data, THEIRS), "of another repository"
    assert not objects.is_copy("runs/gpt/a0002/x.json", data[:-1], OURS), "damaged is not a copy"


def test_fields_of_a_wrong_type_are_named() -> None:
    values = {"s": "text", "i": 7, "b": True, "o": {"a": 1}, "l": [1], "f": 1.0, "n": None}
    found = Fields(values, NAME)
    readers: dict[str, tuple[Any, str, str]] = {
        "text": (found.text, "s", "a string"),
        "whole": (found.whole, "i", "a whole number"),
        "flag": (found.flag, "b", "a truth value"),
        "mapping": (found.mapping, "o", "an object"),
        "sequence": (found.sequence, "l", "a list"),
    }
    for read, own, what in readers.values():
        assert read(own) == values[own]
        for key in [*values, "absent"]:
            if key != own:
                refused(lambda read=read, key=key: read(key), f"{key!r} is not {what}")


def test_texts_and_numbers_have_bounds() -> None:
    assert fields(s="x" * 4096).text("s") == "x" * 4096
    refused(lambda: fields(s="x" * 4097).text("s"), "'s' is longer than 4096 characters")
    assert fields(s="xy").text("s", limit=2) == "xy"
    refused(lambda: fields(s="xyz").text("s", limit=2), "'s' is longer than 2 characters")
    assert [fields(i=n).whole("i", minimum=2, maximum=4) for n in (2, 3, 4)] == [2, 3, 4]
    for n in (1, 5):
        refused(lambda n=n: fields(i=n).whole("i", minimum=2, maximum=4), f"'i' is {n}, which is not within 2 and 4")
    assert fields(i=0).whole("i") == 0
    assert fields(i=canonical_json.MAX_INTEGER).whole("i") == canonical_json.MAX_INTEGER
    refused(lambda: fields(i=-1).whole("i"), f"'i' is -1, which is not within 0 and {canonical_json.MAX_INTEGER}")


@pytest.mark.parametrize("value", ["", "abc", "abcde", "abcg", "ABCD", "0x12", " abc"])
def test_hexadecimal_digits_are_counted(value: str) -> None:
    assert fields(h="09af").hex("h", 4) == "09af"
    refused(lambda: fields(h=value).hex("h", 4), "'h' is not 4 hexadecimal digits")


def test_an_object_inside_keeps_the_name_of_the_whole() -> None:
    inner = fields().inner({"a": 5}, "a row")
    assert inner.whole("a") == 5
    refused(lambda: inner.text("a"), "'a' is not a string")
    refused(lambda: fields().inner([5], "a row"), "a row is not an object")


def test_a_checkpoints_identity_is_read_back_or_refused() -> None:
    id = CheckpointId("gpt", 3, 500)
    assert objects.checkpoint_json(id) == {"attempt": 3, "run": "gpt", "step": 500}
    assert objects.checkpoint_json(None) is None
    assert fields(parent=objects.checkpoint_json(id)).checkpoint("parent") == id
    assert fields(parent=None).checkpoint("parent") is None
    assert fields(parent={"attempt": 1, "run": "gpt", "step": 0}).checkpoint("parent") == CheckpointId("gpt", 1, 0)
    refused(lambda: fields().checkpoint("parent"), "'parent' is not an object")
    refused(
        lambda: fields(parent={"attempt": 0, "run": "gpt", "step": 0}).checkpoint("parent"),
        f"'attempt' is 0, which is not within 1 and {canonical_json.MAX_INTEGER}",
    )
    with pytest.raises(CorruptionError, match="'parent' is not a checkpoint: ") as caught:
        fields(parent={"attempt": 1, "run": "../x", "step": 0}).checkpoint("parent")
    assert caught.value.subject == NAME


# -- putting ----------------------------------------------------------------------------------------------------------


def test_a_put_that_finds_its_own_bytes_is_a_success_once_settled(store: Store, monkeypatch: Any) -> None:
    settled: list[str] = []
    real = store.settle
    monkeypatch.setattr(store, "settle", lambda name: (settled.append(name), real(name)))
    first = objects.put(store, "a/x", b"mine", token="t")
    assert settled == []
    assert objects.put(store, "a/x", b"mine", token="t") == first
    assert (first.name, first.length, first.store) == ("a/x", 4, store.url)
    assert settled == ["a/x"]
    for other in (b"mime", b"min", b"mine!"):
        with pytest.raises(AlreadyExists) as caught:
            objects.put(store, "a/x", other, token="t")
        assert caught.value.subject == "a/x"
    assert settled == ["a/x"], "what is another's is not flushed for it"


def test_a_put_whose_rival_vanishes_is_still_refused(store: Store, monkeypatch: Any) -> None:
    objects.put(store, "a/x", b"mine", token="t")

    def gone(name: str, *, limit: int) -> bytes:
        raise ObjectNotFound("gone", subject=name)

    monkeypatch.setattr(store, "get", gone)
    with pytest.raises(AlreadyExists, match="exists already"):
        objects.put(store, "a/x", b"mine", token="t")


# -- numbered rows ----------------------------------------------------------------------------------------------------


def test_rows_go_on_from_the_highest_number(repo: Repo) -> None:
    assert numbers(repo, "row") == []
    assert append(repo, "row", "note", {"a": 1}) == 1
    repo.store.put_if_absent("row/9.json", Bytes(b"x"), token="t")
    for foreign in ("07.json", "0.json", "x.json", "12", "12.json.bak"):
        repo.store.put_if_absent(f"row/{foreign}", Bytes(b"x"), token="t")
    assert numbers(repo, "row") == [1, 9]
    assert append(repo, "row", "note", {"a": 2}) == 10
    found = objects.decode("note", "row/10.json", repo.store.get("row/10.json", limit=10_000), repo.id)
    assert (found.whole("a"), found.text("repository")) == (2, repo.id)
    assert len(found.hex("id", 32)) == 32
    assert numbers(repo, "row") == [1, 9, 10]


def test_rows_that_others_put_meanwhile_are_stepped_over(repo: Repo, monkeypatch: Any) -> None:
    from tenuto.repo import refs

    for number in range(1, 100):
        repo.store.put_if_absent(f"row/{number}.json", Bytes(b"x"), token="t")
    monkeypatch.setattr(refs, "numbers", lambda repo, directory: [])
    assert append(repo, "row", "note", {}) == 100
    with pytest.raises(StoreUnavailable, match="no free number below row in 100 tries") as caught:
        append(repo, "row", "note", {})
    assert caught.value.subject == "row"


def test_a_row_number_has_one_spelling() -> None:
    assert [object_names.parse_numbered(text) for text in ("1.json", "10.json", "9" * 18 + ".json")] == [
        1,
        10,
        10**18 - 1,
    ]
    for text in ("0.json", "01.json", "-1.json", "1", "1.jsonx", "x1.json", "1_json", "", "9" * 19 + ".json", "١.json"):
        assert object_names.parse_numbered(text) is None, text


# -- where things lie -------------------------------------------------------------------------------------------------


def test_where_everything_lies() -> None:
    id = CheckpointId("gpt", 7, 500)
    assert object_names.run_directory("GPT") == "runs/gpt"
    assert object_names.attempt_directory("gpt", 7) == "runs/gpt/a0007"
    assert object_names.attempt_name("gpt", 7) == "runs/gpt/a0007/attempt.json"
    assert object_names.lease_directory("gpt", 7) == "runs/gpt/a0007/lease"
    assert object_names.begin_name(id) == "runs/gpt/a0007/step-00000500/begin.json"
    assert object_names.notes_directory(id) == "runs/gpt/a0007/step-00000500/notes"
    assert object_names.trash_directory(id) == "trash/gpt/a0007/step-00000500"
    assert object_names.tombstone_directory(id) == "tombstones/gpt/a0007/step-00000500"
    assert [object_names.index_file(rank) for rank in (0, 12, 123456)] == [
        "rank-00000.index",
        "rank-00012.index",
        "rank-123456.index",
    ]
    assert object_names.numbered("refs/tag/x", 3) == "refs/tag/x/3.json"


def test_a_file_that_leads_out_is_named_in_part() -> None:
    assert object_names.check_file("rank-00000.index", subject="m") == "rank-00000.index"
    for name, shown in (("../x", "'../x'"), ("x" * 200, repr("x" * 120)), (5, "'5'")):
        with pytest.raises(CorruptionError) as caught:
            object_names.check_file(name, subject="m")
        assert caught.value.message == f"m names {shown}, which no object of a checkpoint can be called"
        assert caught.value.subject == "m"


def test_an_unusable_kind_of_note_is_a_wrong_use(repo: Repo, make: Any) -> None:
    from tenuto.repo.notes import add_note

    make.attempt(1)
    with pytest.raises(UsageError) as caught:
        add_note(repo, make.checkpoint(1, 10), "opinion", {})
    kinds = "metric, proven, signed, suspect, text, verified"
    assert caught.value.message == f"'opinion' is not a kind of note; there are {kinds}"
    assert caught.value.subject == "opinion"
