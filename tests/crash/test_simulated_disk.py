"""The simulated disk behaves as the operating system does, wherever the store could notice."""

from __future__ import annotations

import errno
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.testing.layers import Fault, Faulty
from tenuto.testing.simulated_disk import BLOCK, SimulatedDisk


def read_all(disk: SimulatedDisk, path: str) -> bytes:
    descriptor = disk.open(path)
    try:
        buffer = bytearray(disk.fstatus(descriptor).size)
        assert disk.pread(descriptor, [memoryview(buffer)], 0) == len(buffer)
        return bytes(buffer)
    finally:
        disk.close(descriptor)


def refused(number: int, act: object, *arguments: object) -> None:
    with pytest.raises(OSError) as caught:
        act(*arguments)  # type: ignore[operator]
    assert caught.value.errno == number


def test_names_are_exclusive_and_links_share_the_file() -> None:
    disk = SimulatedDisk()
    disk.mkdir("/a")
    descriptor = disk.create("/a/temporary")
    disk.pwrite(descriptor, [memoryview(b"one"), memoryview(b"two")], 0)
    refused(errno.EEXIST, disk.create, "/a/temporary")
    refused(errno.EEXIST, disk.mkdir, "/a")
    disk.link("/a/temporary", "/a/final")
    refused(errno.EEXIST, disk.link, "/a/temporary", "/a/final")
    refused(errno.EEXIST, disk.rename_noreplace, "/a/temporary", "/a/final")
    disk.unlink("/a/temporary")
    disk.pwrite(descriptor, [memoryview(b"ONE")], 0)
    assert read_all(disk, "/a/final") == b"ONEtwo"
    refused(errno.ENOTEMPTY, disk.rmdir, "/a")
    refused(errno.ENOENT, disk.open, "/a/temporary")
    refused(errno.ENOENT, disk.create, "/b/file")
    refused(errno.ENOTDIR, disk.create, "/a/final/file")
    refused(errno.EISDIR, disk.unlink, "/a")
    disk.close(descriptor)
    refused(errno.EBADF, disk.close, descriptor)
    assert disk.open_descriptors == 0


def test_space_is_limited_and_reserved() -> None:
    disk = SimulatedDisk(capacity=4 * BLOCK)
    first = disk.create("/first")
    disk.reserve(first, 3 * BLOCK)
    assert disk.free_bytes("/") == BLOCK
    second = disk.create("/second")
    refused(errno.ENOSPC, disk.pwrite, second, [memoryview(bytes(2 * BLOCK))], 0)
    refused(errno.ENOSPC, disk.reserve, second, 2 * BLOCK)
    disk.pwrite(first, [memoryview(bytes(3 * BLOCK))], 0)
    disk.truncate(first, 1)
    assert disk.free_bytes("/") == 3 * BLOCK
    disk.unlink("/first")
    assert disk.free_bytes("/") == 3 * BLOCK, "an open file keeps its blocks"
    disk.close(first)
    assert disk.free_bytes("/") == 4 * BLOCK


def test_direct_io_wants_alignment() -> None:
    page = memoryview(mmap.mmap(-1, 2 * BLOCK))
    disk = SimulatedDisk()
    descriptor = disk.create("/file", direct=True)
    disk.pwrite(descriptor, [page], 0)
    refused(errno.EINVAL, disk.pwrite, descriptor, [page[:100]], 0)
    refused(errno.EINVAL, disk.pwrite, descriptor, [page[:BLOCK]], 100)
    refused(errno.EINVAL, disk.pwrite, descriptor, [page[8 : 8 + BLOCK]], 0)
    disk.set_direct(descriptor, False)
    disk.pwrite(descriptor, [page[:100]], 3)
    with pytest.raises(OSError):
        SimulatedDisk(direct_io=False).create("/file", direct=True)


def test_an_image_is_a_copy() -> None:
    disk = SimulatedDisk()
    descriptor = disk.create("/file")
    disk.pwrite(descriptor, [memoryview(b"old")], 0)
    image = disk.image()
    copy = SimulatedDisk.holding(image)
    disk.pwrite(descriptor, [memoryview(b"new")], 0)
    copy.mkdir("/directory")
    assert read_all(copy, "/file") == b"old"
    assert list(image.tree()) == ["/file"]
    assert image.fingerprint() != disk.image().fingerprint()
    assert SimulatedDisk.holding(image).image().fingerprint() == image.fingerprint()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "cut", "reserve"]), st.integers(0, 3 * BLOCK), st.integers(0, 2 * BLOCK)),
        max_size=8,
    )
)
def test_contents_follow_a_plain_byte_array(calls: list[tuple[str, int, int]]) -> None:
    disk, plain = SimulatedDisk(), bytearray()
    descriptor = disk.create("/file")
    for number, (call, at, length) in enumerate(calls):
        if call == "write" and length:
            data = bytes(np.random.default_rng(number).integers(1, 255, length, np.uint8))
            plain.extend(bytes(max(0, at + length - len(plain))))
            plain[at : at + length] = data
            disk.pwrite(descriptor, [memoryview(data)], at)
        elif call == "cut":
            del plain[at:]
            plain.extend(bytes(at - len(plain)))
            disk.truncate(descriptor, at)
        elif call == "reserve" and length:
            plain.extend(bytes(max(0, length - len(plain))))
            disk.reserve(descriptor, length)
    assert read_all(disk, "/file") == bytes(plain)
    assert disk.image().files[1].data() == bytes(plain)


def test_faults_strike_where_they_are_told() -> None:
    disk = SimulatedDisk()
    faulty = Faulty(disk, Fault("link", errno.EIO, "final", when="after"), Fault("fsync", errno.EIO, nth=2))
    descriptor = faulty.create("/temporary")
    faulty.fsync(descriptor)
    refused(errno.EIO, faulty.fsync, descriptor)
    faulty.fsync(descriptor)
    refused(errno.EIO, faulty.link, "/temporary", "/final")
    assert disk.status("/final").kind == "file", "the reply was lost, the link was made"
    assert [call for call, _ in faulty.calls] == ["create", "fsync", "fsync", "fsync", "link"]
