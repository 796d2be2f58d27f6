"""Slots that outlive their process: what is sealed is whole, whatever it is cut off in."""

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tenuto.engine.memory_tier import slot_file
from tenuto.engine.staging import arena, slots
from tenuto.engine.staging.arena import acquire, free_shared_memory
from tenuto.model import canonical_json

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="arenas lie in shared memory on Linux only")

MIB = 1 << 20


@pytest.fixture
def root(monkeypatch):
    path = Path(tempfile.mkdtemp(prefix="tenuto-test-", dir="/dev/shm"))
    monkeypatch.setattr(slots, "SHARED_MEMORY", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def take(root):
    held = []

    def one(number=0, run="main"):
        held.append(slot_file.take("repo", run, 0, number))
        return held[-1]

    yield one
    for slot in held:
        slot.leave()


def path(root, number=0, run="main"):
    return root / f"tenuto-{os.geteuid()}" / "repo" / run / f"0-{number}"


def payload(text):
    return canonical_json.seal({"path": "p", "text": text})


def texts(slot):
    return [canonical_json.open_seal(data, name="p")["text"] for _, data in slot.seals()]


def in_child(body):
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:  # noqa: BLE001 - the child must never go on as a second test run
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_is_sealed_stays_and_is_found_by_the_next(take, root):
    def first():
        slot = slot_file.take("repo", "main", 0, 0)
        memory = slot.make(MIB, 5000)
        memory.buffer[:] = 7
        slot.describe([b"index", b"manifest"])
        slot.seal(payload("one"))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(first) == -signal.SIGKILL
    slot = take()
    assert texts(slot) == ["one"]
    data = path(root).read_bytes()
    assert len(data) == MIB + 8192 + slots.ROOM
    assert set(data[:MIB]) == {7}
    assert data[MIB : MIB + 13] == b"indexmanifest"


def test_a_file_is_unsealed_before_its_memory_is_touched(take):
    slot = take()
    slot.make(MIB, 0)
    slot.describe([b"x"])
    slot.seal(payload("one"))
    assert slot.sealed
    again = slot.reuse(MIB, 0)
    assert again is not None and slot.sealed, "reuse alone loses nothing"
    slot.unseal()
    assert (slot.seals(), slot.sealed) == ([], False)


def test_a_second_seal_beside_the_first_loses_nothing(take, root):
    slot = take()
    slot.make(MIB, 0)
    slot.describe([b"x"])
    slot.seal(payload("one"))
    slot.seal(payload("two"), beside=0)
    assert texts(slot) == ["one", "two"]
    with path(root).open("r+b") as file:
        file.seek(-slots.BLOCK + 30, os.SEEK_END)
        file.write(b"torn")
    assert texts(slot) == ["one"]


def test_a_description_that_is_longer_than_planned_makes_the_file_grow(take, root):
    slot = take()
    slot.make(MIB, 100)
    long = os.urandom(50_000)
    slot.describe([long, b"m"])
    slot.seal(payload("grown"))
    assert texts(slot) == ["grown"]
    assert path(root).read_bytes()[MIB : MIB + 50_001] == long + b"m"
    assert slot.reuse(MIB, 60_000) is None or path(root).stat().st_size >= MIB + 60_000


def test_pages_of_a_dead_owner_are_used_again_where_they_are_enough(take, root, monkeypatch):
    def dead():
        slot = slot_file.take("repo", "main", 0, 0)
        slot.make(MIB, 0).buffer[:] = 3
        slot.seal(payload("dead"))
        os.kill(os.getpid(), signal.SIGKILL)

    in_child(dead)
    inode = path(root).stat().st_ino
    monkeypatch.setattr(arena, "file_system_headroom", lambda descriptor: 0)
    monkeypatch.setattr(arena, "memory_headroom", lambda: 0)
    slot = take()
    memory = slot.reuse(MIB - 5000, 0)
    assert memory is not None
    assert path(root).stat().st_ino == inode
    assert memory.nbytes == MIB - 4096
    assert memory.buffer[0] == 3
    assert slot.reuse(3 * MIB, 0) is None
    with pytest.raises(OSError, match="shared memory has"):
        slot.make(3 * MIB, 0)


def test_a_file_with_holes_or_too_long_a_one_is_not_used_again(take, root):
    slot = take()
    slot.make(MIB, 0)
    slot.unmap()
    os.truncate(path(root), 2 * MIB)
    assert slot.reuse(MIB, 0) is None, "a hole would be SIGBUS on a full file system"
    slot.make(8 * MIB, 0)
    assert slot.reuse(MIB, 0) is None


def test_sealed_images_are_kept_by_whoever_starts_and_unsealed_ones_freed(take, root):
    for number, sealed in ((0, True), (1, False)):

        def dead(number=number, sealed=sealed):
            slot = slot_file.take("repo", "gone", 0, number)
            slot.make(MIB, 0)
            if sealed:
                slot.seal(payload("x"))
            os.kill(os.getpid(), signal.SIGKILL)

        in_child(dead)
    free_shared_memory()
    assert path(root, 0, "gone").exists()
    assert not path(root, 1, "gone").exists()
    other = acquire(MIB, repository="repo", run="gone")
    assert other.kind == "anonymous"
    assert "a sealed image lies there" in other.note
    other.release()
    assert path(root, 0, "gone").exists()


def test_a_slot_that_is_held_is_nobody_elses(take, root):
    take()
    with pytest.raises(BlockingIOError):
        slot_file.take("repo", "main", 0, 0)

    def child():
        with pytest.raises(BlockingIOError):
            slot_file.take("repo", "main", 0, 0)

    assert in_child(child) == 0


def test_a_file_that_somebody_cleared_is_noticed_at_the_seal(take, root):
    slot = take()
    slot.make(MIB, 0)
    path(root).unlink()
    for touch in (slot.unseal, lambda: slot.describe([b"x"]), lambda: slot.seal(payload("x"))):
        with pytest.raises(FileNotFoundError):
            touch()
    path(root).write_bytes(b"somebody else's")
    with pytest.raises(FileNotFoundError):
        slot.seal(payload("x"))
    assert path(root).read_bytes() == b"somebody else's"


def test_leaving_keeps_the_file_and_discarding_does_not(take, root):
    slot = take()
    slot.make(MIB, 0)
    slot.seal(payload("x"))
    slot.leave()
    slot.leave()
    assert path(root).exists()
    assert not path(root).with_name("0-0.lock").exists()
    again = take()
    assert texts(again) == ["x"]
    again.discard()
    assert not path(root).exists()


def test_a_forked_child_leaves_the_slot_to_its_parent(take, root):
    slot = take()
    slot.make(MIB, 0).buffer[:] = 1

    def child():
        slot.leave()
        assert slot.slot not in arena.table()._held

    assert in_child(child) == 0
    with pytest.raises(BlockingIOError):
        slot_file.take("repo", "main", 0, 0)
    assert slot.arena is not None
    assert np.all(slot.arena.buffer == 1)


@pytest.mark.parametrize("length", [0, 100, slots.ROOM - 1, slots.ROOM, 3 * slots.ROOM])
def test_what_is_no_seal_is_read_as_none(tmp_path, length):
    file = tmp_path / "x"
    file.write_bytes(b"tenuto memory 1\n\xff\xff\xff\xff" * (length // 20) + bytes(length % 20))
    with file.open("rb") as opened:
        assert slots.read_seals(opened.fileno()) == []
        assert not slots.is_sealed(opened.fileno())


def test_touching_pages_keeps_what_they_hold_where_the_kernel_has_no_call_for_it(take, monkeypatch):
    slot = take()
    slot.make(MIB, 0).buffer[:] = 9
    slot.seal(payload("x"))
    slot.unmap()
    monkeypatch.setattr(arena, "_MADV_POPULATE_WRITE", 9999)
    memory = slot.reuse(MIB, 0)
    assert memory is not None
    assert np.all(memory.buffer == 9)
    assert texts(slot) == ["x"]
