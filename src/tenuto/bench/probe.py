"""What a place can do, found out by doing it: `tenuto probe`.

Everything is put under names of its own and removed at the end; what a killed probe left is reported by the next one.
The bandwidth is measured last, in the time that is left, the small cells of the table first; one that cannot end in
time is left out.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from tenuto.bench import raw
from tenuto.bench.place import FileSystemFacts, file_system_of
from tenuto.errors import AlreadyExists, ObjectNotFound, StoreError, typed
from tenuto.store.contract import Bytes, Store
from tenuto.units import count, seconds, size

MIB: Final = 1 << 20
PREFIX: Final = "tenuto-probe-"
"""How the names of a probe's objects begin."""
RACERS: Final = 16
PARALLEL: Final = (1, 4, 16)
SIZES: Final = (MIB, 16 * MIB, 64 * MIB)
MOST_IN_FLIGHT: Final = 256 * MIB
"""Cells of the table that move more at once are left out, and none moves more in each direction."""
SMALL: Final = 4096
_SMALL_ROUNDS: Final = 40
_FLUSHES: Final = 10
_SEEN_WITHIN_S: Final = 2.0
_ENDING_WITHIN_S: Final = 60.0
_GOOD_ENOUGH: Final = 0.9
"""The smallest requests, and the fewest at once, that reach this share of the best are the ones to use."""
SLOW: Final = 50e6
"""Bytes per second below which a place is called slow."""
NO_FLUSH_S: Final = 20e-6
"""No medium that survives a power loss confirms a flush sooner."""
NEARLY_FULL: Final = 10 << 30


@dataclass(frozen=True)
class Cell:
    """Bandwidth with `parallel` requests of `nbytes` each at the same time, in bytes per second."""

    parallel: int
    nbytes: int
    put: float
    get: float


@dataclass
class Probe:
    """What was found. None: not measured, because there is no such thing there or the time was over."""

    url: str
    atomic: bool | None = None
    """Whether of 16 that put one name at the same time exactly one succeeds, and a later one is refused."""
    persistent: bool = True
    seen_after_s: float | None = None
    """Until another handle saw a put; infinite if it never did."""
    lists_times: bool = False
    links: bool | None = None
    direct: bool | None = None
    file_system: FileSystemFacts | None = None
    cached_attributes: bool = False
    flush_s: Sequence[float] = ()
    put_s: Sequence[float] = ()
    """Latencies of objects of 4 KiB."""
    get_s: Sequence[float] = ()
    cells: list[Cell] = field(default_factory=list)
    free_bytes: int | None = None
    left_behind: int = 0
    """Objects of probes that were killed, or are running."""

    @property
    def best(self) -> Cell | None:
        """The smallest and fewest requests that read about as fast as any."""
        top = max((cell.get for cell in self.cells), default=0.0)
        enough = [cell for cell in self.cells if cell.get >= _GOOD_ENOUGH * top]
        return min(enough, key=lambda cell: (cell.parallel * cell.nbytes, cell.nbytes), default=None)

    def document(self) -> dict[str, Any]:
        best = self.best
        finite = self.seen_after_s is not None and math.isfinite(self.seen_after_s)
        return {
            **asdict(self),
            "seen_after_s": self.seen_after_s if finite else None,
            "parallel": None if best is None else best.parallel,
            "part_bytes": None if best is None else best.nbytes,
            "warnings": warnings(self),
        }


class Prober:
    """Probes one place. `open_again` opens another handle of it; `directory`: where it is one of this machine."""

    def __init__(
        self,
        store: Store,
        open_again: Callable[[], Store],
        *,
        directory: Path | None = None,
        limit_s: float = 20.0,
        on_activity: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._open_again = open_again
        self._directory = directory
        self._on_activity = on_activity
        self._clock = clock
        self._end = clock() + limit_s
        self._stop = threading.Event()
        self._names: list[str] = []
        self._putting: set[tuple[str, str]] = set()
        """Name and token of each put under way."""

    def run(self) -> Probe:
        found = Probe(self._store.url)
        try:
            self._do(found)
        finally:
            self._stop.set()
            # A signal may have interrupted the start of a thread, which nobody waits for then.
            until = time.monotonic() + _ENDING_WITHIN_S
            while self._putting and time.monotonic() < until:
                time.sleep(0.01)
            # Whatever became of a put: it may have arrived although its reply was lost.
            with contextlib.suppress(ObjectNotFound):
                self._store.delete(self._names)
        return found

    def _do(self, found: Probe) -> None:
        found.left_behind = sum(name.startswith(PREFIX) for name in self._store.children("").objects)
        self._report("sixteen put one name")
        found.atomic = self._race() and self._store.probe().commits
        self._report("another handle looks")
        found.seen_after_s = self._seen_after()
        self._report("small objects")
        found.put_s, found.get_s, found.lists_times = self._latencies()
        found.persistent = self._store.capabilities.persistent
        if self._directory is not None:
            self._report("the file system")
            self._examine(self._directory, found)
        found.free_bytes = self._store.free_bytes()
        self._bandwidth(found)

    def _report(self, what: str) -> None:
        self._on_activity(f"probing: {what}")

    def _left_s(self) -> float:
        return self._end - self._clock()

    def _name(self) -> str:
        self._names.append(f"{PREFIX}{secrets.token_hex(16)}")
        return self._names[-1]

    def _put(self, data: bytes | memoryview, name: str = "", token: str = "probe") -> str:
        name = name or self._name()
        self._putting.add((name, token))
        try:
            if self._stop.is_set():  # asked after it was added: whoever sets it sees the one or the other
                raise CancelledError
            self._store.put_if_absent(name, Bytes(data), token=token)
        finally:
            self._putting.discard((name, token))
        return name

    # What it promises.

    def _race(self) -> bool:
        """Returns whether exactly one of several puts of one name succeeds, and its bytes are there."""
        name, barrier = self._name(), threading.Barrier(RACERS)

        def put(number: int) -> bool:
            barrier.wait(60)
            try:
                self._put(bytes([number]) * SMALL, name, f"racer-{number}")
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(RACERS, thread_name_prefix="tenuto-probe") as pool:
            won = [number for number, first in enumerate(pool.map(put, range(RACERS))) if first]
        return len(won) == 1 and self._store.get(name, limit=SMALL) == bytes(won) * SMALL

    def _seen_after(self) -> float:
        """Returns how long another handle does not see what was put; it has looked there before."""
        other, name = self._open_again(), self._name()
        with contextlib.suppress(ObjectNotFound):
            other.stat(name)
        self._put(b"seen", name)
        begun = self._clock()
        while True:
            with contextlib.suppress(ObjectNotFound):
                other.stat(name)
                if name in other.children("").objects:
                    return self._clock() - begun
            if self._clock() - begun > _SEEN_WITHIN_S:
                return math.inf

    def _latencies(self) -> tuple[list[float], list[float], bool]:
        puts, gets, name = [], [], ""
        until = self._clock() + self._left_s() / 4
        for _ in range(_SMALL_ROUNDS):
            data = secrets.token_bytes(SMALL)
            begun = self._clock()
            name = self._put(data)
            middle = self._clock()
            same = self._store.get(name, limit=SMALL) == data
            ended = self._clock()
            if not same:
                raise StoreError(
                    f"{self._store.url} gives other bytes than were put",
                    subject=self._store.url,
                    hint="keep no checkpoints there",
                )
            puts.append(middle - begun)
            gets.append(ended - middle)
            if ended > until:
                break
        entry = next((entry for entry in self._store.walk("") if entry.name == name), None)
        return puts, gets, entry is not None and entry.modified_ns is not None

    def _examine(self, directory: Path, found: Probe) -> None:
        """Looks at a directory past the store, with one file."""
        found.file_system = file_system_of(directory)
        found.cached_attributes = found.file_system.network and caches_attributes(directory)
        name = self._name()
        path, second = directory / name, directory / f"{name}.tmp-probe"
        try:
            found.flush_s = [raw.flush_small_file(path) for _ in range(_FLUSHES) if self._left_s() > 0]
            path.write_bytes(b"")
            found.links = _links(path, second)
            path.unlink()
            found.direct = _writes_directly(path)
        finally:
            for one in (path, second):
                one.unlink(missing_ok=True)

    # How fast it is.

    def _bandwidth(self, found: Probe) -> None:
        room = raw.aligned(max(SIZES))
        room[:] = np.tile(np.frombuffer(secrets.token_bytes(MIB), np.uint8), len(room) // MIB)
        cells = sorted(((n, b) for n in PARALLEL for b in SIZES), key=lambda cell: cell[0] * cell[1])
        fastest = 0.0
        for done, (parallel, nbytes) in enumerate(cells):
            moved = 2 * parallel * nbytes
            needed_s = moved / fastest if fastest else 0.0
            full = found.free_bytes is not None and found.free_bytes < 2 * moved
            late = bool(found.cells) and self._left_s() <= needed_s
            if late or parallel * nbytes > MOST_IN_FLIGHT or full:
                continue
            self._report(f"{parallel} at a time of {size(nbytes)}")
            cell = self._cell(parallel, room[:nbytes].data, self._left_s() / (len(cells) - done))
            found.cells.append(cell)
            fastest = max(fastest, min(cell.put, cell.get))

    def _cell(self, parallel: int, data: memoryview, for_s: float) -> Cell:
        """Puts and gets, each for half of the time and at least once by each thread."""
        into = raw.aligned(len(data)).data  # of all threads: nobody looks at what is read
        names: list[list[str]] = [[] for _ in range(parallel)]

        def put(worker: int) -> None:
            names[worker].append(self._put(data))

        def get(worker: int) -> None:
            with self._store.open(names[worker][-1]) as reader:
                reader.read_into(0, into)

        speeds = [self._rate(put, parallel, len(data), for_s / 2), self._rate(get, parallel, len(data), for_s / 2)]
        gone = [name for some in names for name in some]
        self._store.delete(gone)
        self._names = [name for name in self._names if name not in set(gone)]
        return Cell(parallel, len(data), *speeds)

    def _rate(self, act: Callable[[int], None], parallel: int, nbytes: int, for_s: float) -> float:
        begun = self._clock()

        def work(worker: int) -> int:
            done = 0
            while done == 0 or (self._clock() - begun < for_s and (done + 1) * parallel * nbytes <= MOST_IN_FLIGHT):
                if self._stop.is_set():
                    break
                act(worker)
                done += 1
            return done

        with ThreadPoolExecutor(parallel, thread_name_prefix="tenuto-probe") as pool:
            try:
                done = sum(pool.map(work, range(parallel)))
            except BaseException:
                self._stop.set()
                raise
        return done * nbytes / max(self._clock() - begun, 1e-9)


def _links(path: Path, second: Path) -> bool:
    try:
        os.link(path, second)
    except OSError:
        return False
    return True


def _writes_directly(path: Path) -> bool:
    try:
        raw.write(path, raw.aligned(SMALL), SMALL)
    except OSError:
        return False
    return True


def caches_attributes(path: Path, mounts: str | None = None) -> bool:
    """Returns whether the file system of a directory may show other machines' changes late: NFS without noac."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
    best, kind, options = "", "", ""
    for line in mounts.splitlines():
        _, mounted, found_kind, found_options, *_ = line.split(" ")
        at = mounted.replace("\\040", " ").rstrip("/")
        if len(at) >= len(best) and f"{path}/".startswith(f"{at}/"):
            best, kind, options = at, found_kind, found_options
    return kind.startswith("nfs") and not {"noac", "actimeo=0"} & set(options.split(","))


# --------------------------------------------------------------------------------------------------
# In words.


def rows(found: Probe) -> Iterator[tuple[str, str]]:
    """Yields what was found, by what it is about."""
    yield "create if absent", _words(found.atomic, "atomic: one of 16 at the same time", "NOT ATOMIC")
    if found.seen_after_s is not None:
        late = found.seen_after_s >= 0.1
        never = not math.isfinite(found.seen_after_s)
        yield (
            "seen by others",
            "not within 2 s" if never else f"after {seconds(found.seen_after_s)}" if late else "at once",
        )
    yield "times in listings", "yes" if found.lists_times else "no"
    if found.file_system is not None:
        yield "file system", found.file_system.name
        yield "hard links", _words(found.links, "yes", "no")
        yield "direct I/O", _words(found.direct, "yes", "no: through the page cache")
    if found.flush_s:
        yield "flush of a small file", _latency(found.flush_s)
    if found.put_s:
        yield "put of 4 KiB", _latency(found.put_s)
        yield "get of 4 KiB", _latency(found.get_s)
    yield "free", "unknown" if found.free_bytes is None else size(found.free_bytes)
    if found.best is not None:
        yield "best read by", f"{count(found.best.parallel, 'request')} of {size(found.best.nbytes)} at a time"


def _words(what: bool | None, yes: str, no: str) -> str:
    return "not tried" if what is None else yes if what else no


def _latency(found: Sequence[float]) -> str:
    p95 = sorted(found)[math.ceil(0.95 * len(found)) - 1]
    return f"median {seconds(statistics.median(found))}, 95 % within {seconds(p95)}"


def warnings(found: Probe) -> list[str]:
    """Returns what somebody who wants to keep checkpoints there has to know."""
    place, told = found.url, []
    if found.atomic is False:
        told.append(
            f"{place} does not refuse a name that is taken: it can hold copies (a mirror's or a tier's), and cannot be "
            "the primary, where checkpoints are committed"
        )
    if found.seen_after_s is not None and found.seen_after_s >= 0.1:
        late = "not within 2 s" if not math.isfinite(found.seen_after_s) else f"after {seconds(found.seen_after_s)}"
        told.append(f"others see what was put {late}: two jobs may take one run for free")
    volatile = found.file_system is not None and found.file_system.volatile
    quick = bool(found.flush_s) and statistics.median(found.flush_s) < NO_FLUSH_S
    if volatile or quick or not found.persistent:
        told.append("a flush has no effect here: what was saved does not survive a power loss")
    if found.direct is False:
        told.append("no direct I/O: saves go through the page cache, and take memory from training")
    best = max((min(cell.put, cell.get) for cell in found.cells), default=None)
    if best is not None and best < SLOW:
        told.append(f"slow: {size(round(best))}/s at best; make it a tier that no save waits for")
    if found.free_bytes is not None and found.free_bytes < NEARLY_FULL:
        told.append(f"nearly full: {size(found.free_bytes)} left; {typed('tenuto', 'gc', place)} may free some")
    if found.cached_attributes:
        told.append(
            "a network file system that caches attributes: other machines may see changes up to a minute late; mount "
            "it with actimeo=0 where several jobs use one run"
        )
    if found.left_behind:
        told.append(
            f"{count(found.left_behind, 'object')} of a probe that was killed, or is running: {PREFIX}…; "
            "remove what is left of them"
        )
    return told
