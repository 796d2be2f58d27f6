"""Places that are hard on a memory tier: a file system that is full, a control group that kills, a neighbour who is
another user, a training that goes on beside."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from support.memory_training import Life, Log, OnStep, fork, fork_off, read, sealed, train
from tenuto.engine.staging import slots

ANOTHER_USER = 65533
A_THIRD_USER = 65534
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14
_NO_MOUNT = 77


def on_a_small_file_system(place: Path, nbytes: int, body: Callable[[], None]) -> None:
    """Runs `body` in a process whose shared memory is a file system in memory of its own, `nbytes` large, mounted at
    `place` where nobody else sees it. Skips the test where this user may mount nothing."""

    def inside() -> None:
        try:
            _mount(place, nbytes)
        except OSError as error:
            print(f"no file system can be mounted here: {error}", file=sys.stderr)
            os._exit(_NO_MOUNT)
        with mock.patch.object(slots, "SHARED_MEMORY", str(place)):
            body()

    status = fork(inside)
    if status == _NO_MOUNT:
        pytest.skip("neither this user nor a user namespace may mount a file system here")
    assert status == 0, "see what the process wrote"


def _mount(place: Path, nbytes: int) -> None:
    """As root in a private mount namespace; as anybody else in a user namespace as well, where those are allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()

    def call(name: str, *words: Any) -> None:
        if getattr(libc, name)(*words) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    if user == 0:
        call("unshare", _NEW_MOUNTS)
    else:
        call("unshare", _NEW_MOUNTS | _NEW_USER)
        Path("/proc/self/setgroups").write_text("deny", "ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", "ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", "ascii")
    call("mount", b"none", b"/", None, ctypes.c_ulong(_PRIVATE | _RECURSIVE), None)
    call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", ctypes.c_ulong(0), f"size={nbytes},mode=1777".encode())


def fill(place: Path, *, leave: int = 0) -> None:
    """Takes what room the file system has, but for `leave` bytes; `empty` gives it back."""
    with (place / "filler").open("ab") as file:
        status = os.statvfs(place)
        room = status.f_bavail * status.f_frsize - leave
        if room > 0:
            os.posix_fallocate(file.fileno(), file.tell(), room)
        if leave:
            return
        with contextlib.suppress(OSError):
            while True:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, 4096)


def empty(place: Path) -> None:
    (place / "filler").unlink()


def control_group() -> ModuleType:
    """benchmarks/control_group.py, which makes groups of both versions."""
    name = "control_group"
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
        assert found is not None and found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@contextlib.contextmanager
def memory_group(*, limit: int | None = None) -> Iterator[Any]:
    """A fresh memory control group, version 1 or 2. Skips the test where none can be made: that takes root, or a group
    that was delegated to this user."""
    groups = control_group()
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(groups.group())
            found.limit(limit)
        except (groups.NoControlGroups, OSError) as error:
            pytest.skip(f"no memory control group: {error}")
        yield found


def take_until_killed() -> None:
    """Takes memory until the kernel ends this process."""
    taken = []
    while True:
        taken.append(bytearray(b"\1") * (16 << 20))


@contextlib.contextmanager
def open_place() -> Iterator[Path]:
    """A directory that every user can reach and write to."""
    with tempfile.TemporaryDirectory(prefix="tenuto-test-", dir="/tmp") as found:
        Path(found).chmod(0o777)
        yield Path(found)


def as_user(user: int, body: Callable[[], None]) -> int:
    """The exit status of `body` in a process of another user; the test is skipped where this one may not become it."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")

    def inside() -> None:
        become(user)
        body()

    return fork(inside)


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


class Gate:
    """Holds a training at a step: the test waits until it is there, and lets it go on."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._reached, self._go = os.pipe(), os.pipe()

    def __call__(self, ckpt: Any, step: int, state: Any) -> None:
        if step == self.step:
            sealed(ckpt)
            os.write(self._reached[1], b"r")
            assert os.read(self._go[0], 1)

    def reached(self) -> None:
        assert os.read(self._reached[0], 1)

    def go(self) -> None:
        os.write(self._go[1], b"g")


class Beside:
    """A training that goes on in a process of its own while the test does something else."""

    def __init__(self, where: Path, steps: int = 40, *, on_step: OnStep, **options: Any) -> None:
        self._log = where.parent / f"log-{os.urandom(6).hex()}.jsonl"
        self.pid = fork_off(lambda: train(where, Log(self._log), steps, on_step, **options))
        self.life: Life | None = None

    def kill(self) -> Life:
        os.kill(self.pid, signal.SIGKILL)
        return self.end()

    def end(self) -> Life:
        if self.life is None:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.life = read(self._log, status)
        return self.life
