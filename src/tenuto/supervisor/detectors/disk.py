"""The disks that a run's checkpoints lie on: full soon, read-only or failing, slow or without an answer."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final
from urllib.parse import unquote, urlsplit

from tenuto.supervisor.detectors.contract import END, STEPS, Finding, Sample
from tenuto.supervisor.detectors.trend import Streaks, Trend
from tenuto.units import seconds, size

SPAN_S: Final = 7200.0
KNOWN_S: Final = 600.0
SOON_S: Final = 1800.0
SCARCE: Final = 0.2
"""A trend counts where less than this share is free."""
ROOM: Final = 1.2
"""So many times a save has to be free: retention makes room after a commit only."""
INODES: Final = 1000
SLOW_S: Final = 2.0
SLOWER: Final = 20.0
"""A small write that takes so long, and so many times the usual, is slow."""
SLOW_SAVE_S: Final = 30.0
SLOWER_SAVE: Final = 4.0
SILENT_S: Final = 180.0
"""Without an answer for so long a disk counts as hung: that of a network file system does not return."""
RECENT: Final = 60
ENOUGH: Final = 5
BLOCK: Final = 4096


class Disk:
    source: Final = "disk"
    period_s: Final = 30.0

    def __init__(self) -> None:
        self.places: Sequence[str] = ()
        """Directories to sample."""
        self._free: dict[str, Trend] = {}
        self._writes: dict[str, deque[float]] = {}
        self._saves: deque[float] = deque(maxlen=RECENT)
        self._streaks = Streaks()
        self._slow_saves = self._counted = 0
        self._save_bytes = 0.0
        self._sampled: float | None = None

    # -- the half that samples

    def sample(self) -> Mapping[str, float]:
        values: dict[str, float] = {}
        for place in self.places:
            values |= {f"{place}.{name}": value for name, value in _reading(_there(place)).items()}
        return values

    # -- the half that judges

    def judge(self, sample: Sample) -> Sequence[Finding]:
        if sample.source == STEPS:
            return list(self._saved(sample))
        if sample.source == END:
            self._sampled, self._counted = None, 0
            return ()
        if sample.source != self.source:
            silent_s = 0.0 if self._sampled is None else sample.at - self._sampled
            if silent_s < SILENT_S:
                return ()
            return [
                Finding("disk-slow", f"the file system of the checkpoints has not answered for {seconds(silent_s)}")
            ]
        things = sample.by_thing()
        self._sampled = sample.at if things else None
        return [one for place, values in things.items() for one in self._found(place, values, sample.at)]

    def _found(self, place: str, values: Mapping[str, float], at: float) -> Iterator[Finding]:
        if failure := int(values.get("errno", 0)):
            yield Finding("disk-failing", f"{place} cannot be written: {os.strerror(failure).lower()}", place)
        written = values.get("write_s")
        if written is not None:
            before = self._writes.setdefault(place, deque(maxlen=RECENT))
            usual = median(before) if len(before) >= ENOUGH else written
            before.append(written)
            if self._streaks.count(place, written > max(SLOW_S, SLOWER * usual)) >= 3:
                yield Finding(
                    "disk-slow", f"{place} takes {seconds(written)} for a block, usually {seconds(usual)}", place
                )
        free, total = values.get("free_bytes"), values.get("total_bytes")
        if free is None or not total:
            return
        trend = self._free.setdefault(place, Trend(SPAN_S))
        trend.add(at, free)
        left_s = trend.left_s() if trend.known_s >= KNOWN_S else None
        inodes = values.get("free_inodes", INODES)
        if free < ROOM * self._save_bytes:
            words = f"{place} has {size(int(free))} free, and a save takes {size(int(self._save_bytes))}"
            yield Finding("disk-filling", words, place)
        elif left_s is not None and left_s < SOON_S and free < SCARCE * total:
            words = f"{place} has {size(int(free))} free, for {seconds(left_s)} as it goes"
            yield Finding("disk-filling", words, place, left_s)
        elif inodes < INODES:
            yield Finding("disk-filling", f"{place} can take only {inodes:.0f} more files", place)

    def _saved(self, sample: Sample) -> Iterator[Finding]:
        """Judges how long saves take, once for each."""
        number, took_s = int(sample.values.get("saves", 0)), sample.values.get("save_s", 0.0)
        self._save_bytes = sample.values.get("save_bytes", self._save_bytes)
        if number == self._counted or not took_s:
            return
        self._counted = number
        usual = median(self._saves) if len(self._saves) >= ENOUGH else took_s
        self._saves.append(took_s)
        if self._streaks.count("saves", took_s > max(SLOW_SAVE_S, SLOWER_SAVE * usual)) >= 2:
            yield Finding("disk-slow", f"saves take {seconds(took_s)}, usually {seconds(usual)}", "saves")


def directory_of(where: str) -> str | None:
    """Returns the directory of a place that lies on a file system; None for any other."""
    parts = urlsplit(where)
    if parts.scheme == "file":
        return unquote(parts.path)
    return where if where.startswith("/") else None


def _there(place: str) -> Path:
    """Returns the directory, or the one above it that exists."""
    path = Path(place)
    return next((one for one in (path, *path.parents) if one.is_dir()), path)


def _reading(directory: Path) -> dict[str, float]:
    """Reads how full it is, and writes a block to a file without a name, which nobody sees and which goes by itself."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        return {"errno": error.errno or errno.EIO}
    found: dict[str, float] = {
        "free_bytes": status.f_bavail * status.f_frsize,
        "total_bytes": status.f_blocks * status.f_frsize,
    }
    if status.f_files:
        found["free_inodes"] = status.f_favail
    if status.f_flag & os.ST_RDONLY:
        return {**found, "errno": errno.EROFS}
    began_s = time.perf_counter()
    try:
        descriptor = os.open(directory, getattr(os, "O_TMPFILE", 0) | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, bytes(BLOCK))
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EACCES, errno.EINVAL):  # no such files there
            found["errno"] = error.errno or errno.EIO
        return found
    return {**found, "write_s": time.perf_counter() - began_s}
