"""What keeps a checkpoint, and what announces its end: which names there are, and whose announcement still counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tenuto.concurrency.process import this_process
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreUnreliable, UsageError
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Owner, Receipt
from tenuto.repo import tombstones
from tenuto.repo.format import object_names, objects
from tenuto.repo.notes import add_note, notes
from tenuto.repo.refs import (
    Ref,
    check_tag,
    clear_ref,
    find_tag,
    is_damaged,
    is_name,
    list_refs,
    list_tags,
    put_ref,
    read_ref,
)
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import STALE_S, Tombstone, dead_tombstones, is_tombstoned, put_tombstone, take_back
from tenuto.store.contract import Bytes, Content, Entry, time_of
from tenuto.store.wrappers.delegating import DelegatingStore

ELSEWHERE = Owner(host="elsewhere", boot="b", pid_namespace="n", pid=1, started="1", user="someone")


@pytest.fixture
def id(make: Any) -> CheckpointId:
    make.attempt(1)
    return make.checkpoint(1, 10)


class FlushFails(DelegatingStore):
    """The next put is visible, and its flush fails."""

    fails = True

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        receipt = super().put_if_absent(name, content, token=token)
        if self.fails:
            self.fails = False
            raise StoreUnreliable("flushing the directory failed", subject=name)
        return receipt


def test_a_note_or_tag_whose_flush_failed_leaves_no_number_that_a_power_loss_would_turn_into_a_gap(
    repo: Repo, id: CheckpointId
) -> None:
    unwell = FlushFails(repo.store)
    troubled = Repo(unwell, repo.id, repo.chunk_bytes)
    with pytest.raises(StoreUnreliable):
        add_note(troubled, id, "text", {"text": "lost"})
    assert notes(repo, id) == []
    assert add_note(troubled, id, "text", {"text": "kept"}).number == 1
    unwell.fails = True
    with pytest.raises(StoreUnreliable):
        put_ref(troubled, "tag", "good", id)
    assert list_tags(repo) == {}
    put_ref(troubled, "tag", "good", id)
    assert find_tag(repo, "good") == id


# -- refs -------------------------------------------------------------------------------------------------------------


def test_what_a_ref_can_be_called() -> None:
    for name in ("best", "v1.0", "a_b=c-d", "7", "x" * 100):
        assert is_name(name)
    for name in ("Best", "", "a/b", "..", "-x", "x.", "é", "x" * 101):
        assert not is_name(name)


@pytest.mark.parametrize("name", ["latest", "7", "007", "Best", "", "../x", 7, None])
def test_what_no_tag_can_be_called(name: object) -> None:
    with pytest.raises(UsageError) as caught:
        check_tag(name)
    assert caught.value.message == f"{name!r} cannot be a tag"
    assert caught.value.subject == str(name)
    assert caught.value.hint == (
        "use lower-case letters, digits and . _ = -, at most 100, not digits alone, and not the word latest"
    )


def test_a_tag_is_checked_and_other_refs_may_be_called_what_no_tag_can(repo: Repo, id: CheckpointId) -> None:
    assert check_tag("best-7") == "best-7"
    with pytest.raises(UsageError, match="cannot be a tag"):
        put_ref(repo, "tag", "latest", id)
    assert put_ref(repo, "hold", "latest", id) == Ref("hold", "latest", id)
    assert put_ref(repo, "pin", "7", id) == Ref("pin", "7", id)
    with pytest.raises(UsageError) as caught:
        put_ref(repo, "pin", "Best", id)
    assert caught.value.message == "pin 'Best' cannot name a ref"
    assert (caught.value.subject, caught.value.hint) == ("Best", "use lower-case letters, digits and . _ = -")
    with pytest.raises(UsageError, match="label 'x' cannot name a ref"):
        read_ref(repo, "label", "x")  # type: ignore[arg-type]


def test_tags_are_found_by_name_and_listed(repo: Repo, id: CheckpointId) -> None:
    put_ref(repo, "pin", "best", id)
    assert find_tag(repo, "best") is None
    assert list_tags(repo) == {}
    put_ref(repo, "tag", "best", id)
    put_ref(repo, "tag", "old", id)
    clear_ref(repo, "tag", "old")
    assert find_tag(repo, "best") == id
    assert find_tag(repo, "No Name") is None
    assert list_tags(repo) == {"best": id}
    assert list_refs(repo, kinds=("tag",)) == [Ref("tag", "best", id)]
    assert list_refs(repo, kinds=("hold",)) == []


def test_a_ref_is_a_row_of_versions_of_which_the_highest_counts(repo: Repo, make: Any, id: CheckpointId) -> None:
    other = make.checkpoint(1, 20)
    for target in (id, other, id):
        put_ref(repo, "tag", "best", target)
    assert make.names("refs/tag/best") == ["1.json", "2.json", "3.json"]
    make.copy("refs/tag/best", "refs/tag/copied")
    make.copy("refs/tag/best/2.json", "refs/tag/best/9.json")
    repo.store.put_if_absent("refs/tag/Foreign Name/1.json", Bytes(b"x"), token="x")
    assert list_refs(repo) == [Ref("tag", "best", id)], "copies and foreign names are no refs"
    repo.store.delete(["refs/tag/best/3.json"])
    assert read_ref(repo, "tag", "best") == other
    found = objects.decode("ref", "refs/tag/best/1.json", repo.store.get("refs/tag/best/1.json", limit=10_000), repo.id)
    assert found.checkpoint("to") == id
    assert found.text("created").endswith("Z")


def test_a_version_that_vanishes_while_it_is_read_is_passed_over(
    repo: Repo, make: Any, id: CheckpointId, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenuto.repo import refs

    put_ref(repo, "tag", "best", id)
    monkeypatch.setattr(refs, "numbers", lambda repo, directory: [1, 2])
    assert read_ref(repo, "tag", "best") == id


def test_a_ref_to_what_is_not_there_points_where_it_pointed(repo: Repo, make: Any, id: CheckpointId) -> None:
    gone = CheckpointId("gpt", 1, 99)
    with pytest.raises(CheckpointNotFound) as caught:
        put_ref(repo, "tag", "best", gone)
    assert caught.value.message == f"checkpoint {gone} is not there, or is being removed"
    assert caught.value.subject == str(gone)
    assert read_ref(repo, "tag", "best") is None
    put_ref(repo, "tag", "best", id)
    settled: list[str] = []
    real = repo.store.settle
    repo.store.settle = lambda name: (settled.append(name), real(name))[1]  # type: ignore[method-assign]
    with pytest.raises(CheckpointNotFound):
        put_ref(repo, "tag", "best", gone)
    assert settled == [gone.manifest], "its absence is made durable before it is believed"
    assert read_ref(repo, "tag", "best") == id
    assert make.names("refs/tag/best")[-1] == "5.json"


@pytest.mark.parametrize("kind", ["tag", "pin", "hold"])
def test_a_damaged_version_is_followed_by_one_that_can_be_read(
    repo: Repo, make: Any, id: CheckpointId, kind: Any
) -> None:
    put_ref(repo, kind, "best", id)
    make.damage(f"refs/{kind}/best/1.json")
    with pytest.raises(CorruptionError):
        list_refs(repo)
    with pytest.raises(CheckpointNotFound):
        put_ref(repo, kind, "best", CheckpointId("gpt", 1, 99))
    assert is_damaged(repo, kind, "best"), "what it may keep is not let go of by a mistake"
    put_ref(repo, kind, "best", id)
    assert not is_damaged(repo, kind, "best")
    assert list_refs(repo) == [Ref(kind, "best", id)]
    make.damage(f"refs/{kind}/best/2.json")
    clear_ref(repo, kind, "best")
    assert list_refs(repo) == []


# -- tombstones -------------------------------------------------------------------------------------------------------


@pytest.fixture
def put(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> Any:
    def put_as(owner: Owner, id: CheckpointId, attempt: int = 0) -> Tombstone:
        with monkeypatch.context() as patch:
            patch.setattr(tombstones, "this_process", lambda: owner)
            return put_tombstone(repo, id, reason="retention", attempt=attempt)

    return put_as


def test_a_tombstone_says_who_and_why(repo: Repo, make: Any, id: CheckpointId) -> None:
    assert not is_tombstoned(repo, id)
    stone = put_tombstone(repo, id, reason="rm", attempt=3)
    assert is_tombstoned(repo, id)
    assert (stone.id, stone.owner, stone.reason, stone.attempt) == (id, this_process(), "rm", 3)
    assert stone.name.startswith("tombstones/gpt/a0001/step-00000010/")
    found = objects.decode("tombstone", stone.name, repo.store.get(stone.name, limit=10_000), repo.id)
    assert found.text("created").endswith("Z")
    assert tombstones._read(repo, stone.name) == stone
    body = {key: value for key, value in found.values.items() if key != "digest"}
    theirs = objects.encode("tombstone", stone.name, body, "0" * 32)
    repo.store.delete([stone.name])
    repo.store.put_if_absent(stone.name, Bytes(theirs), token="x")
    assert not is_tombstoned(repo, id), "announced in another repository"
    repo.store.delete([stone.name])
    repo.store.put_if_absent(stone.name, Bytes(theirs[:-1]), token="x")
    assert is_tombstoned(repo, id), "unreadable: it counts"
    repo.store.delete([stone.name])
    stone = put_tombstone(repo, id, reason="rm", attempt=3)
    second = put_tombstone(repo, id, reason="gc")
    assert (second.attempt, tombstones.still_exists(repo, second)) == (0, True)
    take_back(repo, stone)
    assert tombstones._read(repo, stone.name) is None
    assert (tombstones.still_exists(repo, stone), tombstones.still_exists(repo, second)) == (False, True)
    assert is_tombstoned(repo, id)


def test_a_remover_elsewhere_is_dead_when_its_attempt_is(repo: Repo, make: Any, id: CheckpointId, put: Any) -> None:
    stones = {attempt: put(ELSEWHERE, id, attempt) for attempt in (0, 1, 2, 3)}
    now = object_names.attempt_name("gpt", make.attempt(4).number)

    def dead(below: int) -> set[int]:
        return {stone.attempt for stone in dead_tombstones(repo, "gpt", now_name=now, dead_below=below)}

    assert dead(0) == dead(1) == set()
    assert dead(2) == {1}
    assert dead(4) == {1, 2, 3}
    assert dead_tombstones(repo, "other", now_name=now, dead_below=9) == []
    assert all(tombstones.still_exists(repo, stone) for stone in stones.values()), "nothing is taken back by looking"


@pytest.fixture
def aged(new_maker: Any) -> Iterator[Any]:
    """A maker on a store whose clock can be moved."""
    return new_maker()


@pytest.mark.parametrize(("seconds", "stale"), [(STALE_S - 1, False), (STALE_S + 1, True)])
def test_a_remover_elsewhere_is_dead_after_a_quarter_of_an_hour_by_the_stores_clock(
    aged: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, stale: bool
) -> None:
    assert STALE_S == 900
    aged.attempt(1)
    id = aged.checkpoint(1, 10)
    monkeypatch.setattr(tombstones, "this_process", lambda: ELSEWHERE)
    put_tombstone(aged.repo, id, reason="rm")
    aged.repo.store.advance(seconds)
    now = object_names.attempt_name("gpt", aged.attempt(2).number)
    assert bool(dead_tombstones(aged.repo, "gpt", now_name=now, dead_below=0)) is stale


def test_a_live_remover_is_never_dead(aged: Any) -> None:
    aged.attempt(1)
    put_tombstone(aged.repo, aged.checkpoint(1, 10), reason="retention", attempt=1)
    aged.repo.store.advance(10 * STALE_S)
    now = object_names.attempt_name("gpt", aged.attempt(2).number)
    assert dead_tombstones(aged.repo, "gpt", now_name=now, dead_below=2) == []


def test_tombstones_that_cannot_be_read_stay(repo: Repo, make: Any, id: CheckpointId, put: Any) -> None:
    dead = replace(this_process(), started="1")
    good = put(dead, id)
    damaged = put(dead, make.checkpoint(1, 20))
    make.damage(damaged.name)
    make.copy(good.name, "tombstones/gpt/a0001/step-00000030/copied.json")
    data = repo.store.get(good.name, limit=10_000)
    for name in (
        "tombstones/gpt/a0001/x.json",
        "tombstones/gpt/a1/step-00000010/x.json",
        "tombstones/gpt/a0001/step-10/x.json",
        "tombstones/gpt/a0001/step-00000010/deeper/x.json",
    ):
        repo.store.put_if_absent(name, Bytes(data), token="x")
    now = object_names.attempt_name("gpt", make.attempt(2).number)
    assert dead_tombstones(repo, "gpt", now_name=now, dead_below=2) == [good]
    assert is_tombstoned(repo, damaged.id), "one that cannot be read counts"


def test_a_tombstone_under_a_name_that_is_no_run_is_nobodys() -> None:
    assert tombstones._id_of("tombstones/gpt/a0001/step-00000010/x.json") == CheckpointId("gpt", 1, 10)
    for name in (
        "tombstones/Bad Name/a0001/step-00000010/x.json",
        "elsewhere/gpt/a0001/step-00000010/x.json",
        "tombstones/gpt/a0001/step-00000010",
    ):
        assert tombstones._id_of(name) is None


def test_a_tombstone_that_vanishes_while_its_age_is_asked_is_not_stale(repo: Repo, id: CheckpointId) -> None:
    """Where listings tell no times."""
    stone = put_tombstone(repo, id, reason="rm")
    assert time_of(repo.store, Entry(stone.name, 0)) == repo.store.stat(stone.name).modified_ns
    take_back(repo, stone)
    assert time_of(repo.store, Entry(stone.name, 0)) is None


def test_a_damaged_ref_names_itself(repo: Repo, make: Any, id: CheckpointId) -> None:
    put_ref(repo, "tag", "best", id)
    make.damage("refs/tag/best/1.json")
    for act in (lambda: find_tag(repo, "best"), lambda: list_tags(repo)):
        with pytest.raises(CorruptionError) as caught:
            act()
        assert caught.value.subject == "refs/tag/best/1.json"
