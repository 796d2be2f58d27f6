"""A memory control group of our own below this process's: what its processes take at most, and a limit that kills.

Version 1 and version 2. Making one needs root, or a group that was delegated to this user.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Files:
    """What one version calls its files, and its statistics of memory that cannot be dropped."""

    peak: str
    usage: str
    limit: str
    anonymous: str
    shared: str
    unlimited: str


V1 = Files("memory.max_usage_in_bytes", "memory.usage_in_bytes", "memory.limit_in_bytes", "rss", "shmem", "-1")
V2 = Files("memory.peak", "memory.current", "memory.max", "anon", "shmem", "max")


class NoControlGroups(Exception):
    """Why no group can be made here."""


class Group:
    """`held` is anonymous and shared memory, which nothing but its owner gives back; `usage` counts the page cache
    too, which the kernel drops under pressure."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version
        self._files = V1 if version == 1 else V2

    def enter(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid), encoding="ascii")

    @property
    def usage(self) -> int:
        return self._number(self._files.usage)

    @property
    def held(self) -> int:
        found = self._statistics()
        return found[self._files.anonymous] + found[self._files.shared]

    @property
    def shared(self) -> int:
        """Of `held` what lies in shared memory."""
        return self._statistics()[self._files.shared]

    def limit(self, nbytes: int | None) -> None:
        text = self._files.unlimited if nbytes is None else str(nbytes)
        (self.path / self._files.limit).write_text(text, encoding="ascii")

    @property
    def kills(self) -> int:
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        for line in (self.path / name).read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[Watch]:
        """The peaks of the block: `usage` by the kernel's own count, `held` as looked at every two milliseconds."""
        with (self.path / self._files.peak).open("r+", encoding="ascii") as peak:
            peak.write("0" if self.version == 1 else "reset")
            peak.flush()
            watch = Watch(self)
            watch.start()
            try:
                yield watch
            finally:
                watch.stop()
                peak.seek(0)  # version 2 counts from the reset only for the descriptor that wrote it
                watch.usage = int(peak.read())

    def _statistics(self) -> dict[str, int]:
        lines = (self.path / "memory.stat").read_text(encoding="ascii").splitlines()
        return {name: int(value) for name, value in (line.split() for line in lines)}

    def _number(self, name: str) -> int:
        return int((self.path / name).read_text(encoding="ascii"))


class Watch:
    def __init__(self, group: Group) -> None:
        self.usage = 0
        self.held = 0
        self._group = group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.is_set():
            self.held = max(self.held, self._group.held)
            time.sleep(0.002)


@contextlib.contextmanager
def group(name: str = "measuring") -> Iterator[Group]:
    """A fresh group; its processes must have ended before it is left. Raises NoControlGroups."""
    parent, version = _own_group()
    path = parent / f"tenuto-{name}-{os.getpid()}"
    try:
        path.mkdir()
        if not (path / (V1 if version == 1 else V2).limit).exists():
            path.rmdir()
            raise NoControlGroups(f"{parent} passes no memory controller on")
    except OSError as error:
        raise NoControlGroups(f"no control group can be made below {parent}: {error}") from error
    try:
        yield Group(path, version)
    finally:
        for _ in range(100):
            try:
                path.rmdir()
                break
            except OSError:
                time.sleep(0.05)  # the last process is still on its way out


def _own_group() -> tuple[Path, int]:
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, below = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _nearest(ROOT / "memory", below), 1
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        if line.startswith("0::") and (ROOT / "cgroup.controllers").exists():
            # Version 2 lets no group hold both processes and groups with controllers: ours lies beside this process's.
            return _nearest(ROOT, line.split(":", 2)[2]).parent, 2
    raise NoControlGroups("no memory control groups are mounted under /sys/fs/cgroup")


def _nearest(root: Path, below: str) -> Path:
    """The group that `below` names; in a container, whose mount begins there, the mount itself."""
    path = root / below.strip("/")
    return path if path.is_dir() else root
