"""How much memory processes may still take: of the machine, and of the control groups that this one is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tenuto.record import record

CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60
"""Version 1 says 'no limit' as a number about as large as the address space."""


@record
class Room:
    """Bytes of the machine, or of a control group. Page cache that can be dropped counts as available."""

    available: int
    total: int


def memory_headroom() -> int | None:
    """Returns the bytes that can still be touched before the machine or a control group refuses; None if unknown."""
    rooms = [room.available for room in (machine(), *control_groups()) if room is not None]
    return min(rooms) if rooms else None


def machine() -> Room | None:
    found = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")) if ":" in line)
    if "MemAvailable" not in found:
        return None
    available, total = (int(found.get(name, "0").split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return Room(available, total)


def control_groups() -> Iterator[Room]:
    """Yields the room in every control group with a limit that this process is in, ancestors too."""
    for group, names in _groups():
        if (room := _room(group, *names)) is not None:
            yield room


def memory_kills() -> int:
    """Returns how many processes of this process's control group the kernel has killed for want of memory; 0 where it
    does not say."""
    for group, _ in _groups():
        for name in ("memory.events", "memory.oom_control"):
            found = dict(line.split(" ", 1) for line in _lines(group / name) if " " in line)
            if "oom_kill" in found:
                return int(found["oom_kill"])
    return 0


def _groups() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yields the groups that this process is in, its own first, with the names of files: the limit, the usage, and the
    statistics that count cache."""
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
            yield root.joinpath(*parts[:depth]), files


def _room(group: Path, limit_name: str, usage_name: str, *droppable: str) -> Room | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    statistics = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    cache = sum(int(statistics.get(name, 0)) for name in droppable)
    return Room(max(0, limit - max(0, usage - cache)), limit)


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
