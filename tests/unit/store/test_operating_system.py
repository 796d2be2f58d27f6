from __future__ import annotations

import errno
import os
import sys

import pytest

from tenuto.store.local.syscalls import Forgetful, OperatingSystem

system = OperatingSystem()
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x")


def test_create_is_exclusive_and_not_inherited(path):
    descriptor = system.create(path)
    try:
        assert not os.get_inheritable(descriptor)
        with pytest.raises(FileExistsError):
            system.create(path)
    finally:
        system.close(descriptor)


def test_creating_through_a_dangling_link_is_refused(path):
    os.symlink(path + "-target", path)
    with pytest.raises(FileExistsError):
        system.create(path)
    assert not os.path.exists(path + "-target")


def test_opening_a_link_is_refused(path):
    os.symlink("/etc/hostname", path)
    with pytest.raises(OSError) as caught:
        system.open(path)
    assert caught.value.errno == errno.ELOOP


def test_a_failed_direct_create_leaves_no_file(path, monkeypatch):
    def refuse(self, descriptor, direct):
        raise OSError(errno.EINVAL, "no direct I/O")

    monkeypatch.setattr(OperatingSystem, "set_direct", refuse)
    with pytest.raises(OSError):
        system.create(path, direct=True)
    assert not os.path.exists(path)


@linux
def test_reserve_takes_space_or_says_that_there_is_none(path):
    descriptor = system.create(path)
    try:
        system.reserve(descriptor, 2**20)
        assert system.fstatus(descriptor).size == 2**20
        with pytest.raises(OSError) as caught:
            system.reserve(descriptor, 2**60)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    finally:
        system.close(descriptor)


def test_link_and_rename_refuse_to_replace(path):
    for name in (path, path + "2"):
        with open(name, "w") as file:
            file.write(name)
    with pytest.raises(FileExistsError):
        system.link(path, path + "2")
    with pytest.raises(FileExistsError):
        system.rename_noreplace(path, path + "2")
    with open(path + "2") as file:
        assert file.read() == path + "2"
    system.rename_noreplace(path, path + "3")
    assert not os.path.exists(path)
    system.link(path + "3", path + "4")
    assert system.status(path + "4").links == 2


def test_rename_of_what_is_absent(path):
    with pytest.raises(FileNotFoundError):
        system.rename_noreplace(path, path + "2")


def test_kinds(tmp_path, path):
    os.mkfifo(path + "-pipe")
    os.symlink(tmp_path, path + "-link")
    os.mkdir(path + "-directory")
    with open(path, "w"):
        pass
    kinds = dict(system.listdir(str(tmp_path)))
    assert kinds == {"x": "file", "x-pipe": "other", "x-link": "other", "x-directory": "directory"}
    for name, kind in kinds.items():
        assert system.status(str(tmp_path / name)).kind == kind


def test_flushing_a_link_or_a_file_as_a_directory_is_refused(tmp_path, path):
    os.symlink(tmp_path, path)
    with pytest.raises(OSError):
        system.fsync_directory(path)
    system.fsync_directory(str(tmp_path))


@linux
def test_nowait_reads_only_what_is_in_memory(path):
    with open(path, "wb") as file:
        file.write(b"1" * 8192)
    descriptor = system.open(path)
    try:
        buffer = bytearray(10)
        try:
            assert system.pread(descriptor, [memoryview(buffer)], 0, nowait=True) == 10
            assert buffer == b"1" * 10
        except OSError as error:
            assert error.errno == errno.EOPNOTSUPP, "tmpfs cannot tell"
        system.fsync(descriptor)
        system.forget(descriptor, 0, 8192)
    finally:
        system.close(descriptor)


def test_it_can_be_told_to_forget():
    assert isinstance(system, Forgetful)


def test_a_new_file_has_the_mode_that_the_umask_leaves(path):
    before = os.umask(0o027)
    try:
        system.close(system.create(path))
        assert os.stat(path).st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_new_file_can_be_read_again_through_its_descriptor(path):
    descriptor = system.create(path)
    try:
        assert system.pwrite(descriptor, [memoryview(b"hello")], 3) == 5
        buffer = bytearray(8)
        assert system.pread(descriptor, [memoryview(buffer)], 0) == 8
        assert buffer == b"\0\0\0hello"
        system.truncate(descriptor, 4)
        assert system.fstatus(descriptor).size == 4
    finally:
        system.close(descriptor)


def test_a_pipe_under_a_name_does_not_hang_the_reader(path):
    os.mkfifo(path)
    descriptor = system.open(path)
    assert system.fstatus(descriptor).kind == "other"
    assert not os.get_inheritable(descriptor)
    system.close(descriptor)


def test_direct_can_be_turned_on_and_off_and_changes_no_other_flag(path, monkeypatch):
    import fcntl

    flags = {"now": os.O_RDWR | os.O_NONBLOCK}

    def control(descriptor, command, argument=0):
        assert descriptor == 7
        if command == fcntl.F_GETFL:
            return flags["now"]
        assert command == fcntl.F_SETFL
        flags["now"] = argument
        return 0

    direct = 0o40000
    monkeypatch.setattr("tenuto.store.local.syscalls._DIRECT", direct)
    monkeypatch.setattr(fcntl, "fcntl", control)
    for _ in range(2):
        system.set_direct(7, True)
        assert flags["now"] == os.O_RDWR | os.O_NONBLOCK | direct
    for _ in range(2):
        system.set_direct(7, False)
        assert flags["now"] == os.O_RDWR | os.O_NONBLOCK


def test_where_there_is_no_direct_io_or_probing_it_is_said_by_number(path, monkeypatch):
    with open(path, "wb") as file:
        file.write(b"1")
    monkeypatch.setattr("tenuto.store.local.syscalls._DIRECT", 0)
    monkeypatch.setattr("tenuto.store.local.syscalls._NOWAIT", 0)
    with pytest.raises(OSError) as caught:
        system.open(path, direct=True)
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, path)
    descriptor = system.open(path)
    try:
        with pytest.raises(OSError) as caught:
            system.set_direct(descriptor, True)
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(OSError) as caught:
            system.pread(descriptor, [memoryview(bytearray(1))], 0, nowait=True)
        assert (caught.value.errno, caught.value.strerror) == (errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    finally:
        system.close(descriptor)


class Library:
    """A C library whose calls fail with these numbers, one a call, and then succeed."""

    def __init__(self, *numbers):
        self.numbers, self.calls = list(numbers), []

    def _call(self, *arguments):
        import ctypes

        self.calls.append([getattr(argument, "value", argument) for argument in arguments])
        if not self.numbers:
            return 0
        ctypes.set_errno(self.numbers.pop(0))
        return -1

    fallocate = renamex_np = _call


@linux
@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([], None),
        ([errno.EINTR, errno.EINTR], None),
        ([errno.ENOSPC], errno.ENOSPC),
        ([errno.EINTR, errno.EDQUOT], errno.EDQUOT),
        ([errno.ENOSYS], errno.EOPNOTSUPP),
        ([errno.EOPNOTSUPP], errno.EOPNOTSUPP),
    ],
)
def test_reserving_is_tried_again_only_when_a_signal_came(monkeypatch, numbers, said):
    library = Library(*numbers)
    monkeypatch.setattr("tenuto.store.local.syscalls._libc", lambda: library)
    if said is None:
        system.reserve(7, 4096)
    else:
        with pytest.raises(OSError) as caught:
            system.reserve(7, 4096)
        assert caught.value.errno == said
    assert library.calls == [[7, 0, 0, 4096]] * max(len(numbers) + (said is None), 1)


def test_elsewhere_nothing_is_reserved(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError) as caught:
        system.reserve(7, 4096)
    assert caught.value.errno == errno.EOPNOTSUPP


def test_on_macos_a_flush_goes_through_to_the_drive(monkeypatch):
    import fcntl

    asked, flushed, refusal = [], [], []

    def control(descriptor, command):
        asked.append((descriptor, command))
        if refusal:
            raise OSError(refusal[0], os.strerror(refusal[0]))

    monkeypatch.setattr("tenuto.store.local.syscalls._FULL_FSYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", flushed.append)
    system.fsync(7)
    assert (asked, flushed) == ([(7, 51)], [])
    for number in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
        refusal[:] = [number]
        system.fsync(7)
    assert flushed == [7, 7, 7], "a file system that cannot do more"
    refusal[:] = [errno.EIO]
    with pytest.raises(OSError) as caught:
        system.fsync(7)
    assert caught.value.errno == errno.EIO
    assert len(flushed) == 3


def test_on_macos_a_rename_that_refuses_has_another_name(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    library = Library(errno.EEXIST)
    monkeypatch.setattr("tenuto.store.local.syscalls._libc", lambda: library)
    with pytest.raises(FileExistsError) as caught:
        system.rename_noreplace("/a", "/é")
    assert caught.value.filename == "/é"
    system.rename_noreplace("/a", "/é")
    assert library.calls == [[b"/a", "/é".encode(), 4]] * 2


def test_a_c_library_without_such_a_rename(monkeypatch):
    monkeypatch.setattr("tenuto.store.local.syscalls._libc", object)
    with pytest.raises(OSError) as caught:
        system.rename_noreplace("/a", "/b")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSYS, "/b")


def test_a_link_itself_is_linked_and_not_what_it_points_to(path):
    os.symlink("/nowhere", path)
    system.link(path, path + "2")
    assert os.readlink(path + "2") == "/nowhere"


def test_a_mapping_shows_the_file_and_cannot_be_written(path):
    with open(path, "wb") as file:
        file.write(b"x" * 5000)
    descriptor = system.open(path)
    mapping = system.map(descriptor, 5000)
    system.close(descriptor)
    assert mapping.readonly
    with open(path, "r+b") as file:
        file.write(b"y")
    assert bytes(mapping) == b"y" + b"x" * 4999


def test_free_space_is_what_an_ordinary_user_may_take(monkeypatch, path):
    class Place:
        f_bavail, f_bfree, f_frsize, f_bsize = 3, 5, 512, 4096

    monkeypatch.setattr(os, "statvfs", lambda asked: Place if asked == path else None)
    assert system.free_bytes(path) == 3 * 512


def test_status_says_size_and_times_as_the_system_has_them(path):
    with open(path, "wb") as file:
        file.write(b"12345")
    os.utime(path, ns=(1_000_000_001, 2_000_000_002))
    found = system.status(path)
    assert (found.kind, found.size, found.modified_ns, found.links) == ("file", 5, 2_000_000_002, 1)


def test_flushing_a_directory_leaves_nothing_open(tmp_path, monkeypatch):
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(real(*arguments)) or opened[-1])
    monkeypatch.setattr(OperatingSystem, "fsync", lambda self, descriptor: (_ for _ in ()).throw(OSError(errno.EIO)))
    with pytest.raises(OSError):
        system.fsync_directory(str(tmp_path))
    (descriptor,) = opened
    with pytest.raises(OSError) as caught:
        os.fstat(descriptor)
    assert caught.value.errno == errno.EBADF
