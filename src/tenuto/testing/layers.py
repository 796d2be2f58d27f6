"""File systems layered over another: a base class, one that makes chosen calls fail, and one that dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from tenuto.store.local.syscalls import FileSystem, Kind, Status
from tenuto.testing.simulated_disk import fault

R = TypeVar("R")


class Layer:
    """Forwards every call to `inner` through `around`; a subclass overrides `around` or a method."""

    def __init__(self, inner: FileSystem) -> None:
        self.inner = inner
        self._paths: dict[int, str] = {}

    def around(self, call: str, path: str, act: Callable[[], R]) -> R:
        return act()

    def path_of(self, descriptor: int) -> str:
        return self._paths.get(descriptor, "")

    def create(self, path: str, *, direct: bool = False) -> int:
        descriptor = self.around("create", path, lambda: self.inner.create(path, direct=direct))
        self._paths[descriptor] = path
        return descriptor

    def open(self, path: str, *, direct: bool = False) -> int:
        descriptor = self.around("open", path, lambda: self.inner.open(path, direct=direct))
        self._paths[descriptor] = path
        return descriptor

    def reopen(self, path: str) -> int:
        """Forwards to the simulated disk; for layers that seed bugs."""
        descriptor: int = self.inner.reopen(path)  # type: ignore[attr-defined]
        self._paths[descriptor] = path
        return descriptor

    def rename(self, source: str, target: str) -> None:
        """Forwards to the simulated disk; for layers that seed bugs."""
        self.inner.rename(source, target)  # type: ignore[attr-defined]

    def close(self, descriptor: int) -> None:
        self.around("close", self._paths.pop(descriptor, ""), lambda: self.inner.close(descriptor))

    def set_direct(self, descriptor: int, direct: bool) -> None:
        self.around("set_direct", self.path_of(descriptor), lambda: self.inner.set_direct(descriptor, direct))

    def reserve(self, descriptor: int, length: int) -> None:
        self.around("reserve", self.path_of(descriptor), lambda: self.inner.reserve(descriptor, length))

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self.around("pwrite", self.path_of(descriptor), lambda: self.inner.pwrite(descriptor, buffers, offset))

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int, *, nowait: bool = False) -> int:
        path = self.path_of(descriptor)
        return self.around("pread", path, lambda: self.inner.pread(descriptor, buffers, offset, nowait=nowait))

    def truncate(self, descriptor: int, length: int) -> None:
        self.around("truncate", self.path_of(descriptor), lambda: self.inner.truncate(descriptor, length))

    def fsync(self, descriptor: int) -> None:
        self.around("fsync", self.path_of(descriptor), lambda: self.inner.fsync(descriptor))

    def fstatus(self, descriptor: int) -> Status:
        return self.around("fstatus", self.path_of(descriptor), lambda: self.inner.fstatus(descriptor))

    def link(self, source: str, target: str) -> None:
        self.around("link", target, lambda: self.inner.link(source, target))

    def rename_noreplace(self, source: str, target: str) -> None:
        self.around("rename_noreplace", target, lambda: self.inner.rename_noreplace(source, target))

    def unlink(self, path: str) -> None:
        self.around("unlink", path, lambda: self.inner.unlink(path))

    def mkdir(self, path: str) -> None:
        self.around("mkdir", path, lambda: self.inner.mkdir(path))

    def rmdir(self, path: str) -> None:
        self.around("rmdir", path, lambda: self.inner.rmdir(path))

    def listdir(self, path: str) -> list[tuple[str, Kind]]:
        return self.around("listdir", path, lambda: self.inner.listdir(path))

    def status(self, path: str) -> Status:
        return self.around("status", path, lambda: self.inner.status(path))

    def fsync_directory(self, path: str) -> None:
        self.around("fsync_directory", path, lambda: self.inner.fsync_directory(path))

    def map(self, descriptor: int, length: int) -> memoryview:
        return self.inner.map(descriptor, length)

    def free_bytes(self, path: str) -> int:
        return self.around("free_bytes", path, lambda: self.inner.free_bytes(path))


@dataclass
class Fault:
    """Makes the `nth` call (from 1) of `call` whose path contains `path` raise OSError(`number`).

    times: how many calls from then on fail.
    when: "instead" of the call, or "after" it (the work is done, the reply is lost).
    """

    call: str
    number: int
    path: str = ""
    nth: int = 1
    times: int = 1
    when: Literal["instead", "after"] = "instead"
    seen: int = 0

    def strikes(self, call: str, path: str) -> bool:
        if call != self.call or self.path not in path:
            return False
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times


class Faulty(Layer):
    """A layer in which `faults` strike. `calls`: all calls with their paths, in order."""

    def __init__(self, inner: FileSystem, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = list(faults)
        self.calls: list[tuple[str, str]] = []

    def around(self, call: str, path: str, act: Callable[[], R]) -> R:
        self.calls.append((call, path))
        struck = [planned for planned in self.faults if planned.strikes(call, path)]
        for planned in struck:
            if planned.when == "instead":
                raise fault(planned.number, path)
        result = act()
        for planned in struck:
            raise fault(planned.number, path)
        return result


class Killed(BaseException):
    """The process is dead; nothing it would still do reaches the disk."""


class Mortal(Layer):
    """Lets `calls` changing calls through; the next call kills the process."""

    CHANGING = frozenset(
        {"create", "pwrite", "reserve", "truncate", "fsync", "fsync_directory", "link", "rename_noreplace", "unlink"}
        | {"mkdir", "rmdir"}
    )

    def __init__(self, inner: FileSystem, calls: int) -> None:
        super().__init__(inner)
        self.left = calls

    def around(self, call: str, path: str, act: Callable[[], R]) -> R:
        if call in self.CHANGING:
            self.left -= 1
        if self.left < 0:
            raise Killed
        return act()
