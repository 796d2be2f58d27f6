"""How much memory this process may still take: of the machine, of its control groups, of a file system in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60
"""Version 1 says 'no limit' as a number about as large as the address space."""


def memory_headroom() -> int | None:
    """Bytes that can still be touched before the machine or a control group refuses, or None where nobody knows.

    Page cache that can be dropped counts as free.
    """
    rooms = [room for room in (_machine(), *_cgroups()) if room is not None]
    return min(rooms) if rooms else None


def file_system_headroom(descriptor: int) -> int:
    """Bytes that can still be written to the file system of this open file or directory."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize


def _machine() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroups() -> Iterator[int | None]:
    """The room in every control group that this process is in, ancestors too."""
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = CGROUPS, ("memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
        else:
            continue
        # In a container the path is the host's, and only the mount's root is there: it is the container's own group.
        parts = [part for part in path.strip("/").split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield _cgroup_room(root.joinpath(*parts[:depth]), *files)


def _cgroup_room(group: Path, limit_name: str, usage_name: str, *droppable: str) -> int | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    statistics = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    cache = sum(int(statistics.get(name, 0)) for name in droppable)
    return max(0, limit - max(0, usage - cache))


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
