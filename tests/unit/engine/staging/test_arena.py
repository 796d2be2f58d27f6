import fcntl
import gc
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tenuto.engine.staging import arena, slots
from tenuto.engine.staging import arena as arena_module
from tenuto.engine.staging.arena import Arena, acquire
from tenuto.errors import TenutoWarning, UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="arenas lie in shared memory on Linux only")

MIB = 1 << 20


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of its own on the real shared memory, so that no test meets another's files."""
    import shutil
    import tempfile

    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="tenuto-test-", dir=base))
    monkeypatch.setattr(slots, "SHARED_MEMORY", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def take(root: Path) -> Iterator[Callable[..., Arena]]:
    taken: list[Arena] = []

    def take_one(nbytes: int = MIB, **more: object) -> Arena:
        found = acquire(nbytes, **{"repository": "repo", "run": "main", **more})  # type: ignore[arg-type]
        taken.append(found)
        return found

    yield take_one
    for one in taken:
        one.release()


def place(root: Path, run: str = "main") -> Path:
    return root / f"tenuto-{os.geteuid()}" / "repo" / run


def in_child(body: Callable[[], None]) -> int:
    """The exit status of a forked child that ran `body`: 0 if it ended well, 1 if it raised, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:  # noqa: BLE001 - the child must never go on as a second test run
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def elsewhere(root: Path, code: str, *more: str) -> subprocess.Popen[str]:
    """Another process, started afresh, whose shared memory is the same."""
    start = f"import sys, tenuto.engine.staging.slots as s; s.SHARED_MEMORY = {str(root)!r}\n"
    start += "from tenuto.engine.staging.arena import acquire\n"
    return subprocess.Popen(
        [sys.executable, "-c", start + code, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


HOLD = (
    "a = acquire(1 << 20, repository='repo', run='main'); a.buffer[:] = 7; print(a.kind, flush=True); sys.stdin.read()"
)


def test_an_arena_is_a_private_file_in_shared_memory(take, root: Path) -> None:
    found = take(MIB + 1)
    assert (found.kind, found.note) == ("shared memory", "")
    assert found.nbytes == found.buffer.nbytes == MIB + 4096
    assert found.buffer.ctypes.data % 4096 == 0
    status = (place(root) / "0-0").stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == found.nbytes
    assert status.st_blocks * 512 >= found.nbytes, (
        "every page is reserved: a hole would be SIGBUS on a full file system"
    )
    for directory in (root / f"tenuto-{os.geteuid()}", place(root).parent, place(root)):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    found.buffer[-1] = 9
    assert (place(root) / "0-0").read_bytes()[-1] == 9, "the mapping is the file"


def test_release_frees_the_file_and_the_slot(take, root: Path) -> None:
    first = take()
    first.release()
    first.release()
    assert not place(root).parent.exists(), "neither file nor lock stays, nor do their directories"
    assert take().kind == "shared memory"


def test_views_outlive_the_release(take) -> None:
    found = take()
    view = found.buffer[100:200]
    view[:] = 3
    found.release()
    gc.collect()
    assert (view == 3).all()


def test_one_holder_in_one_process(take) -> None:
    first, second = take(), take()
    assert first.kind == "shared memory"
    assert second.kind == "anonymous"
    assert "of this process" in second.note
    second.release()
    assert take().kind == "anonymous", "releasing the one that has no slot gives nobody's slot back"
    assert take(rank=1).kind == take(slot=1).kind == take(run="other").kind == "shared memory"


def test_one_holder_among_processes(take, root: Path) -> None:
    with elsewhere(root, HOLD) as other:
        assert other.stdout and other.stdin
        assert other.stdout.readline() == "shared memory\n"
        found = take()
        assert found.kind == "anonymous"
        assert "another process" in found.note
        found.buffer[:] = 1
        assert set((place(root) / "0-0").read_bytes()) == {7}, "the holder's file is untouched"
        other.stdin.close()
        other.wait()
    assert take().kind == "shared memory"


def test_taking_part_in_one_slot_leaves_other_locks_held(take, root: Path) -> None:
    """Closing any descriptor of a lock's file would drop the lock: measured."""
    take()
    take(rank=1)
    take()
    take(rank=1, run="other").release()
    with elsewhere(root, HOLD) as other:
        assert other.stdout
        assert other.stdout.readline() == "anonymous\n"
        other.communicate()


def test_the_file_of_a_killed_owner_is_freed_before_anything_is_allocated(take, root: Path) -> None:
    with elsewhere(root, HOLD.replace("'repo'", "'gone'")) as other:
        assert other.stdout
        other.stdout.readline()
        other.send_signal(signal.SIGKILL)
        other.wait()
    stale = place(root).parent.parent / "gone" / "main" / "0-0"
    assert stale.exists()
    set_aside = stale.with_name("3-0.stale-1")
    set_aside.write_bytes(b"x")
    take()
    assert not stale.exists()
    assert not set_aside.exists()
    assert not stale.parent.parent.exists(), "neither locks nor empty directories pile up"


def test_a_forked_child_has_no_slot_and_gives_none_back(take, root: Path) -> None:
    found = take()
    found.buffer[:] = 5

    def child() -> None:
        found.release()
        own = acquire(MIB, repository="repo", run="main")
        assert own.kind == "anonymous"
        assert "another process" in own.note
        own.release()

    assert in_child(child) == 0
    assert (place(root) / "0-0").exists()
    assert take().kind == "anonymous"
    assert (found.buffer == 5).all()


@pytest.mark.parametrize("shared", [True, False])
def test_a_forked_child_has_no_copy_of_the_memory(take, shared: bool) -> None:
    if not shared:
        take()
    found = take()
    assert (found.kind == "shared memory") is shared
    address = f"{found.buffer.ctypes.data:x}-"

    def mapped() -> bool:
        return any(line.startswith(address) for line in Path("/proc/self/maps").read_text().splitlines())

    def child() -> None:
        assert not mapped()

    assert mapped()
    assert in_child(child) == 0


def test_a_forked_child_never_unmaps_what_lies_at_an_arenas_address_by_then(take) -> None:
    found = take(4 * MIB)
    address = found.buffer.ctypes.data

    def child() -> None:
        nonlocal found
        import ctypes

        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        fixed = 0x10
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
        assert libc.mmap(address, 4 * MIB, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        foreign = (ctypes.c_uint8 * (4 * MIB)).from_address(address)
        foreign[7] = 77
        take.__closure__[0].cell_contents.clear()  # every reference that the test itself holds
        del found
        gc.collect()
        assert foreign[7] == 77

    assert in_child(child) == 0


def test_a_link_or_an_open_directory_in_its_place_is_refused(take, root: Path, tmp_path: Path) -> None:
    own = root / f"tenuto-{os.geteuid()}"
    own.symlink_to(tmp_path)
    assert take().kind == "anonymous"
    assert not any(tmp_path.iterdir())
    own.unlink()
    own.mkdir(mode=0o755)
    found = take()
    assert found.kind == "anonymous"
    assert "open to others" in found.note
    own.chmod(0o700)
    assert take().kind == "shared memory"


def test_a_link_in_place_of_the_file_is_replaced_not_followed(take, root: Path, tmp_path: Path) -> None:
    place(root).mkdir(parents=True)
    for directory in (place(root), place(root).parent, place(root).parent.parent):
        directory.chmod(0o700)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (place(root) / "0-0").symlink_to(victim)
    assert take().kind == "shared memory"
    assert victim.read_bytes() == b"precious"
    assert not (place(root) / "0-0").is_symlink()


def test_someone_elses_directory_is_refused(take, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "tenuto-4711").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    found = take()
    assert found.kind == "anonymous"
    assert "another user" in found.note


def test_without_room_in_shared_memory_the_note_says_so(take, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "file_system_headroom", lambda descriptor: 64 << 20)
    found = take(65 << 20, prewarm=False)
    assert found.kind == "anonymous"
    assert "64 MiB free" in found.note
    assert not place(root).exists()
    assert take().kind == "shared memory"


def test_without_room_in_the_control_group_the_note_says_so(take, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "memory_headroom", lambda: 64 << 20)
    found = take()
    assert found.kind == "anonymous"
    assert "64 MiB of memory are free" in found.note


def test_without_shared_memory_there_is_anonymous_memory(take, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slots, "SHARED_MEMORY", str(tmp_path / "none"))
    found = take()
    assert found.kind == "anonymous"
    assert "none" in found.note or "No such file" in found.note
    found.buffer[:] = 1


def test_on_another_system_there_is_anonymous_memory(take, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module.sys, "platform", "darwin")
    assert take().kind == "anonymous"


def test_prewarming_gives_every_page_a_frame(take) -> None:
    assert resident(take(4 * MIB, rank=1)) == 1024


def test_prewarming_works_on_kernels_without_the_advice(take, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    assert resident(take(4 * MIB)) == 1024


def resident(found: Arena) -> int:
    """How many of its pages this process has mapped."""
    address = f"{found.buffer.ctypes.data:x}-"
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            if line.startswith(address):
                break
        for line in file:
            if line.startswith("Rss:"):
                return int(line.split()[1]) // 4
    return 0


@pytest.mark.parametrize("repository", ["", "..", "a/b", "a" * 101, "a\0"])
def test_names_that_are_no_file_names_are_refused(root: Path, repository: str) -> None:
    with pytest.raises(UsageError):
        acquire(10, repository=repository, run="main")
    with pytest.raises(UsageError):
        acquire(10, repository="repo", run=repository)


def test_runs_that_differ_only_in_case_share_a_slot(take) -> None:
    take(run="Main")
    assert take(run="main").kind == "anonymous"


def test_what_was_cleared_away_meanwhile_is_no_error_and_a_successors_file_stays(take, root: Path) -> None:
    import shutil

    first = take()
    shutil.rmtree(root / f"tenuto-{os.geteuid()}")
    first.buffer[:] = 1
    with elsewhere(root, HOLD) as other:
        assert other.stdout
        assert other.stdout.readline() == "shared memory\n", "a removed lock keeps nobody out"
        first.release()
        assert set((place(root) / "0-0").read_bytes()) == {7}
        assert take().kind == "anonymous", "the lock that counts is the one that is there"
        other.communicate()


def test_an_arena_that_nobody_releases_is_freed_with_its_last_reference_and_at_exit(root: Path) -> None:
    found = acquire(MIB, repository="repo", run="main")
    del found
    gc.collect()
    assert not (place(root) / "0-0").exists()
    code = "import builtins; builtins.kept = acquire(1 << 20, repository='repo', run='main'); print(builtins.kept.kind)"
    with elsewhere(root, code) as other:
        assert other.communicate()[0] == "shared memory\n"
    assert not place(root).exists()


def test_a_child_that_ends_by_itself_frees_nothing_of_its_parents(take, root: Path) -> None:
    take()
    code = (
        "import os\na = acquire(1 << 20, repository='repo', run='other')\nif os.fork() == 0: sys.exit(0)\n"
        "os.wait(); print(a.kind, os.path.exists(sys.argv[1]))"
    )
    with elsewhere(root, code, str(place(root, "other") / "0-0")) as other:
        assert other.communicate()[0] == "shared memory True\n"


def test_a_foreign_directory_among_ours_is_passed_over(take, root: Path) -> None:
    take().release()
    odd = place(root).parent.parent / "odd"
    odd.mkdir(mode=0o755)
    (place(root).parent.parent / "file").write_bytes(b"")
    assert take().kind == "shared memory"


def descriptors() -> int:
    """How many this process has, without those that garbage of earlier tests has: it may go at any moment."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_do_not_pile_up(take) -> None:
    take()
    before = descriptors()
    for _ in range(5):
        take(rank=1).release()
        take().release()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_removed_by_its_last_holder_while_we_waited_for_it_keeps_nobody_out(
    take, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is granted on a file that has lost its name: whoever comes next would lock another."""
    real, removed = fcntl.lockf, []

    def remove_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append((place(root) / "0-0.lock").unlink())
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", remove_first)
    assert take().kind == "shared memory"
    with elsewhere(root, HOLD) as other:
        assert other.stdout
        assert other.stdout.readline() == "anonymous\n"
        other.communicate()


def test_a_lock_that_is_held_for_a_moment_is_waited_out(take, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take().release()
    tries: list[int] = []
    real = fcntl.lockf

    def busy(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            tries.append(descriptor)
            if len(tries) < 3:
                raise BlockingIOError
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", busy)
    assert take().kind == "shared memory"
    assert len(tries) == 3


def test_rank_and_slot_name_the_file(take, root: Path) -> None:
    assert take(rank=3, slot=2).kind == "shared memory"
    assert sorted(path.name for path in place(root).iterdir()) == ["3-2", "3-2.lock"]


def test_memory_that_is_not_shared_leaves_no_file_and_needs_no_excuse(take, root: Path) -> None:
    found = take(shared=False)
    assert (found.kind, found.note, found.window) == ("anonymous", "", None)
    assert list(root.iterdir()) == []
    assert (take(0).nbytes, take(0, shared=False).nbytes) == (4096, 4096)


@pytest.mark.parametrize(("missing", "kind"), [(0, "shared memory"), (1, "anonymous")])
def test_room_is_enough_to_the_byte(take, monkeypatch: pytest.MonkeyPatch, missing: int, kind: str) -> None:
    monkeypatch.setattr(arena, "file_system_headroom", lambda descriptor: MIB - missing)
    assert take(rank=1).kind == kind
    monkeypatch.setattr(arena, "file_system_headroom", lambda descriptor: 1 << 40)
    monkeypatch.setattr(arena, "memory_headroom", lambda: MIB + (64 << 20) - missing)
    assert take(rank=2).kind == kind
    monkeypatch.setattr(arena, "memory_headroom", lambda: None)
    assert take(rank=4).kind == "shared memory", "where nobody knows, it is tried"


def test_the_notes_say_what_is_missing(take, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "memory_headroom", lambda: (66 << 20) - 1)
    assert take(2 * MIB, prewarm=False).note == "65 MiB of memory are free, the image needs 2"
    monkeypatch.setattr(arena, "file_system_headroom", lambda descriptor: 3 << 20)
    assert take(4 * MIB, prewarm=False).note == "shared memory has 3 MiB free, the image needs 4"
    monkeypatch.setattr(arena_module.sys, "platform", "darwin")
    assert take(prewarm=False).note == "this system keeps no files in memory"


def test_dead_owners_files_are_freed_on_demand(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = place(root) / "0-0"
    stale.parent.mkdir(parents=True)
    for directory in (stale.parent, stale.parent.parent, stale.parent.parent.parent):
        directory.chmod(0o700)
    foreign = stale.with_name("notes.txt")
    for path in (stale, foreign):
        path.write_bytes(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(arena_module.sys, "platform", "darwin")
        arena_module.free_shared_memory()
    assert stale.exists()
    arena_module.free_shared_memory()
    assert not stale.exists()
    assert foreign.exists(), "only what looks like a slot is ours to remove"
    monkeypatch.setattr(slots, "SHARED_MEMORY", str(root / "none"))
    arena_module.free_shared_memory()


def test_a_file_that_cannot_be_removed_is_told_and_ends_nothing(take, monkeypatch: pytest.MonkeyPatch) -> None:
    found = take()
    real = os.unlink

    def refuse(path: object, **options: object) -> None:
        if path == "0-0":
            raise PermissionError(1, "not yours")
        real(path, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.warns(TenutoWarning, match="stays in shared memory until the next start frees it: .*not yours"):
            found.release()
    assert len(found.buffer) == 0
    assert take().kind == "shared memory", "the slot is free, and the file left behind is replaced"


def test_two_slots_of_one_process_are_told_apart_from_another_process(take) -> None:
    take()
    assert take().note == "another arena of this process holds the slot"


def test_a_lock_that_stays_held_is_given_up(take, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, naps = [100.0], []

    class Time:
        monotonic = staticmethod(lambda: clock[0])

        @staticmethod
        def sleep(seconds: float) -> None:
            naps.append(seconds)
            clock[0] += seconds

    def busy(descriptor: int, operation: int) -> None:
        raise BlockingIOError

    monkeypatch.setattr(slots, "time", Time)
    monkeypatch.setattr(fcntl, "lockf", busy)
    before = descriptors()
    assert take(prewarm=False).note == "another process holds the slot"
    assert 0.2 <= sum(naps) < 0.25 and len(naps) >= 20
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("shared", [True, False])
def test_a_released_arena_has_no_bytes_left(take, shared: bool) -> None:
    found = take(shared=shared)
    found.release()
    assert (len(found.buffer), found.buffer.itemsize) == (0, 1)
    assert found.buffer.tobytes() == b""
    assert found.buffer.dtype == "uint8"
