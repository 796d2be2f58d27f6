from __future__ import annotations

import errno
import os
import sys

import pytest

from holdfast.store.backends.filesystem import Forgetful
from holdfast.store.backends.operating_system import OperatingSystem

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
