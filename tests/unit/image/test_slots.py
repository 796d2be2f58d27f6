"""The files behind slots: what a holder may remove, and what is left alone."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.image import slots
from holdfast.image.slots import Slot, SlotTable, parse_name, slot_name

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
    return root / f"holdfast-{os.geteuid()}"


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
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PermissionError, match=r"/…/repo belongs to another user or is open to others"):
        with slots.directory(str(tmp_path), "repo"):
            pass
    place.chmod(0o700)
    with slots.directory(str(tmp_path), "repo") as descriptor:
        assert os.fstat(descriptor).st_ino == place.stat().st_ino
        assert not os.get_inheritable(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("words", "name"), [((3, 1), "3-1"), ((3, 1, 8), "3of8-1"), ((0, 0, 1), "0-0")])
def test_a_slots_name_says_whose_it_is(words: tuple[int, ...], name: str) -> None:
    assert slot_name(*words) == name
    assert parse_name(name) == (words[0], words[1], words[2] if len(words) > 2 else 1)


@pytest.mark.parametrize("name", ["", "3", "of8-1", "3of-1", "3of8", "3of8-1.lock", "a-1", "3 of 8-1"])
def test_what_is_no_slots_name(name: str) -> None:
    with pytest.raises(ValueError):
        parse_name(name)
