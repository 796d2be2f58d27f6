"""The files behind slots: what a holder may remove, and what is left alone."""

from __future__ import annotations

import fcntl
import gc
import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.memory_training import fork_off
from support.scarce_memory import A_THIRD_USER, ANOTHER_USER, as_user, open_place
from tenuto.engine.staging import slots
from tenuto.engine.staging.slots import OtherUsers, Slot, SlotTable, parse_name, slot_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="slots lie in shared memory on Linux only")


@pytest.fixture
def table() -> SlotTable:
    return SlotTable()


@pytest.fixture
def slot(tmp_path: Path, table: SlotTable) -> Iterator[Slot]:
    found = Slot(str(tmp_path), "repo/main", "0-0")
    table.take(found)
    yield found
    if found in table._locks:
        table.give_back(found)


def own(root: Path) -> Path:
    return root / f"tenuto-{os.geteuid()}"


def test_a_file_is_new_private_and_empty(tmp_path: Path, table: SlotTable, slot: Slot) -> None:
    path = own(tmp_path) / "repo" / "main" / "0-0"
    path.write_bytes(b"a dead owner's")
    descriptor = table.create(slot)
    status = os.fstat(descriptor)
    assert (status.st_size, stat.S_IMODE(status.st_mode)) == (0, 0o600)
    assert not os.get_inheritable(descriptor)
    assert os.write(descriptor, b"x") == 1
    assert os.pread(descriptor, 1, 0) == b"x"
    os.close(descriptor)
    table.remove(slot)
    assert not path.exists()
    table.remove(slot)


def test_a_successors_file_is_not_removed(tmp_path: Path, table: SlotTable, slot: Slot) -> None:
    os.close(table.create(slot))
    path = own(tmp_path) / "repo" / "main" / "0-0"
    path.rename(path.with_name("kept"))
    path.write_bytes(b"another's")
    table.remove(slot)
    assert path.read_bytes() == b"another's"
    table.remove(slot)
    assert path.exists(), "what was created is forgotten with the first removal"


def test_giving_back_clears_the_lock_and_empty_directories_only(tmp_path: Path, table: SlotTable, slot: Slot) -> None:
    other = Slot(slot.root, "repo/other", "0-0")
    table.take(other)
    table.give_back(slot)
    assert [path.name for path in (own(tmp_path) / "repo").iterdir()] == ["other"]
    (own(tmp_path) / "repo" / "other" / "kept").write_bytes(b"x")
    table.give_back(other)
    assert [path.name for path in (own(tmp_path) / "repo" / "other").iterdir()] == ["kept"]
    (own(tmp_path) / "repo" / "other" / "kept").unlink()
    table.take(other)
    table.give_back(other)
    assert list(own(tmp_path).iterdir()) == []


def test_a_slot_is_taken_once(table: SlotTable, slot: Slot) -> None:
    with pytest.raises(BlockingIOError, match="another arena of this process"):
        table.take(slot)
    table.give_back(slot)
    table.take(slot)


def test_without_a_root_nothing_is_waited_for_or_made(tmp_path: Path, table: SlotTable) -> None:
    with pytest.raises(FileNotFoundError):
        table.take(Slot(str(tmp_path / "none"), "repo/main", "0-0"))
    assert list(tmp_path.iterdir()) == []


def test_stale_files_go_and_held_and_foreign_ones_stay(tmp_path: Path, table: SlotTable, slot: Slot) -> None:
    os.close(table.create(slot))
    main = own(tmp_path) / "repo" / "main"
    for name in ("1-0", "12-34", "5-6.stale-7", "0-1.lock"):
        (main / name).write_bytes(b"x")
    kept = ["1-0.bak", "a-0", "1-", "0-0.stale-x", "notes"]
    for name in kept:
        (main / name).write_bytes(b"x")
    table.free_stale(str(tmp_path))
    assert sorted(path.name for path in main.iterdir()) == sorted(["0-0", "0-0.lock", *kept])


def test_of_one_repository_no_other_directory_is_looked_at(
    tmp_path: Path, table: SlotTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        place = own(tmp_path) / name / "main"
        place.mkdir(parents=True, mode=0o700)
        for directory in (place.parent.parent, place.parent, place):
            directory.chmod(0o700)
        (place / "0-0").write_bytes(b"x")
    looked, names = [], slots._names

    def listed(root: str, below: str, user: int | None) -> list[str]:
        looked.append(below)
        return names(root, below, user)

    monkeypatch.setattr(slots, "_names", listed)
    assert [slot.parent for slot in slots.occupied(str(tmp_path), repository="one")] == ["one/main"]
    table.free_stale(str(tmp_path), "one")
    assert set(looked) == {"one", "one/main"}
    assert [path.name for path in own(tmp_path).iterdir()] == ["other"]
    assert list(slots.occupied(str(tmp_path), repository="none")) == []


def test_a_directory_that_is_left_empty_by_the_dead_goes_too(tmp_path: Path, table: SlotTable) -> None:
    gone = own(tmp_path) / "gone" / "main"
    gone.mkdir(parents=True, mode=0o700)
    for directory in (own(tmp_path), gone.parent, gone):
        directory.chmod(0o700)
    (gone / "0-0").write_bytes(b"x")
    table.free_stale(str(tmp_path))
    assert list(own(tmp_path).iterdir()) == []
    table.free_stale(str(tmp_path / "none"))


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o777])
def test_a_directory_open_to_others_is_refused_and_named(tmp_path: Path, mode: int) -> None:
    place = own(tmp_path) / "repo"
    place.mkdir(parents=True)
    own(tmp_path).chmod(0o700)
    place.chmod(mode)
    gc.collect()  # what an earlier test has left as garbage may give its descriptors back at any moment
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PermissionError, match=r"/…/repo belongs to another user or is open to others"):
        with slots.directory(str(tmp_path), "repo"):
            pass
    place.chmod(0o700)
    with slots.directory(str(tmp_path), "repo") as descriptor:
        assert os.fstat(descriptor).st_ino == place.stat().st_ino
        assert not os.get_inheritable(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before


def test_garbage_that_is_collected_while_a_slot_is_taken_gives_its_own_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Abandoned:
        pass

    table, slot, other = SlotTable(), Slot(str(tmp_path), "repo/main", "0-0"), Slot(str(tmp_path), "repo/main", "0-1")
    table.take(slot)
    one, lock = Abandoned(), table._lock
    one.itself = one  # type: ignore[attr-defined]  # a cycle: only the collector frees it
    weakref.finalize(one, table.give_back, slot)

    def collected(wanted: Slot) -> bool:
        gc.collect()
        return lock(wanted)

    monkeypatch.setattr(table, "_lock", collected)
    del one
    taking = threading.Thread(target=table.take, args=(other,), daemon=True)
    taking.start()
    taking.join(60)
    assert not taking.is_alive(), "the thread waits for itself"
    assert set(table._locks) == {other}
    table.give_back(other)


def everything(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(root)), path.lstat().st_mtime_ns) for path in root.rglob("*"))


def test_who_holds_a_slot_is_told_without_taking_it(tmp_path: Path, table: SlotTable) -> None:
    slot = Slot(str(tmp_path), "repo/main", "0-0")
    assert table.holder(slot) is None
    assert list(tmp_path.iterdir()) == [], "to ask makes nothing"
    ready, go = os.pipe(), os.pipe()

    def other() -> None:
        SlotTable().take(slot)
        os.write(ready[1], b"r")
        os.read(go[0], 1)

    pid = fork_off(other)
    try:
        assert os.read(ready[0], 1)
        before = everything(tmp_path)
        assert table.holder(slot) == pid
    finally:
        os.write(go[1], b"g")
        os.waitpid(pid, 0)
    assert table.holder(slot) is None
    assert everything(tmp_path) == before, "nor does it remove the lock of a dead owner"


def test_who_asks_after_its_own_slot_keeps_it(tmp_path: Path, table: SlotTable, slot: Slot) -> None:
    assert table.holder(slot) == os.getpid()

    def other() -> None:
        lock = os.open(own(tmp_path) / "repo" / "main" / "0-0.lock", os.O_RDWR)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise AssertionError("the lock is gone")

    assert os.waitstatus_to_exitcode(os.waitpid(fork_off(other), 0)[1]) == 0


def test_another_users_slot_is_never_held(tmp_path: Path, table: SlotTable) -> None:
    with pytest.raises(PermissionError, match=f"user {ANOTHER_USER}'s"):
        table.take(Slot(str(tmp_path), "repo/main", "0-0", ANOTHER_USER))
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_a_users_directory_is_passed_over_and_told(tmp_path: Path) -> None:
    place, stranger = tmp_path / "shm", os.geteuid() + 1000
    place.mkdir()
    (place / "elsewhere").mkdir(mode=0o700)
    (place / f"tenuto-{stranger}").mkdir(mode=0o700)
    (place / f"tenuto-{stranger + 1}").symlink_to("elsewhere")
    (place / f"tenuto-{stranger + 2}").write_bytes(b"")
    os.mkfifo(place / f"tenuto-{stranger + 3}")
    own(place).mkdir()
    own(place).chmod(0o755)
    for name in ("tenuto-test-x", "tenuto-", "tenuto-01", "tenuto-99999999999", "other"):
        (place / name).mkdir(mode=0o700)
    found = slots.other_users(str(place))
    assert (found.users, found.closed) == ((), 0)
    names = [f"tenuto-{user}" for user in (os.geteuid(), *range(stranger, stranger + 4))]
    assert [text.split(" is passed over: ")[0] for text in found.refused] == [f"{place}/{name}" for name in names]
    own(place).chmod(0o700)
    assert len(slots.other_users(str(place)).refused) == 4
    assert slots.other_users(str(place / "none")) == OtherUsers()


def test_other_users_directories_are_looked_into_where_that_is_allowed() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    with open_place() as place:
        place.chmod(0o1777)
        for user in (ANOTHER_USER, A_THIRD_USER):
            theirs = place / f"tenuto-{user}" / "repo" / "main"
            theirs.mkdir(parents=True)
            (theirs / "0-0").write_bytes(b"x")
            for path in (theirs, theirs.parent, theirs.parent.parent):
                path.chmod(0o700)
                os.chown(path, user, user)
        assert slots.other_users(str(place)) == OtherUsers((ANOTHER_USER, A_THIRD_USER))
        assert list(slots.occupied(str(place))) == []
        assert list(slots.occupied(str(place), ANOTHER_USER)) == [Slot(str(place), "repo/main", "0-0", ANOTHER_USER)]
        (place / f"tenuto-{A_THIRD_USER}" / "repo").chmod(0o750)
        assert list(slots.occupied(str(place), A_THIRD_USER)) == [], "each step is checked"

        def other() -> None:
            assert slots.other_users(str(place)) == OtherUsers(closed=1)
            assert list(slots.occupied(str(place), A_THIRD_USER)) == []

        assert as_user(ANOTHER_USER, other) == 0


@pytest.mark.parametrize(("words", "name"), [((3, 1), "3-1"), ((3, 1, 8), "3of8-1"), ((0, 0, 1), "0-0")])
def test_a_slots_name_says_whose_it_is(words: tuple[int, ...], name: str) -> None:
    assert slot_name(*words) == name
    assert parse_name(name) == (words[0], words[1], words[2] if len(words) > 2 else 1)


@pytest.mark.parametrize("name", ["", "3", "of8-1", "3of-1", "3of8", "3of8-1.lock", "a-1", "3 of 8-1"])
def test_what_is_no_slots_name(name: str) -> None:
    with pytest.raises(ValueError):
        parse_name(name)
