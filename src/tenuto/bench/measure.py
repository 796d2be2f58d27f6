"""Measures a place: raw loops, then real saves and restores of the same bytes, all in a directory of its own.

The sample state has as many bytes and leaves as the user's own, with incompressible values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tenuto.api.save_load import load
from tenuto.bench import figures, raw
from tenuto.bench.figures import Figures
from tenuto.bench.place import file_system_of, leftovers, workplace
from tenuto.codec.digest import digest
from tenuto.errors import CorruptionError, UsageError
from tenuto.events import Captured, Event, Warned
from tenuto.policy import every, keep
from tenuto.record import record
from tenuto.training.checkpointer import Checkpointer

BUFFER_BYTES: Final = 256 << 20
"""Raw loops reuse this much memory: more than any cache, and less than a third copy of the state."""
FLUSHES: Final = 20
NEVER: Final = 1 << 40

ReportActivity = Callable[[str], None]


class _Listener:
    """Records warnings, and where the image was allocated."""

    def __init__(self) -> None:
        self.arena = ""
        self.warnings: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Captured):
            self.arena = event.arena
        elif isinstance(event, Warned) and event.message not in self.warnings:
            self.warnings.append(event.message)


class _Measuring:
    def __init__(self, place: Path, sample: Sample, rounds: int, on_activity: ReportActivity) -> None:
        self.place = place
        self.sample = sample
        self.rounds = rounds
        self.on_activity = on_activity
        self.seconds: dict[str, list[float]] = {what: [] for what in figures.WORDS}
        self.direct = _takes_direct(place)
        self.links = _takes_links(place)
        self.cold = True
        self.listener = _Listener()
        self.prewarm_s = 0.0

    def memory(self) -> None:
        self.on_activity("copying and digesting in memory")
        whole = raw.aligned(self.sample.nbytes + 64 * len(self.sample.arrays))
        into: Arrays = {}
        at = 0
        for name, array in self.sample.arrays.items():
            into[name] = whole[at : at + array.nbytes].view(array.dtype)
            at += -(-array.nbytes // 64) * 64
        self.sample.copy(into)
        for _ in range(self.rounds):
            self._note(figures.COPY, raw.timed(lambda: self.sample.copy(into)))
            self._note(figures.DIGEST, raw.digest_all(whole[: self.sample.nbytes]))

    def disk(self) -> None:
        length = -(-self.sample.nbytes // 4096) * 4096
        data = raw.aligned(min(BUFFER_BYTES, length))
        path = self.place / "raw"
        for number in range(FLUSHES):
            self._note(figures.FLUSH, raw.flush_small_file(self.place / f"small-{number}"))
        self.on_activity("finding the fastest piece size")
        piece = raw.fastest_piece("write", path, data, tries=2) if self.direct else 16 * raw.MIB
        for number_of_round in range(self.rounds):
            self.on_activity(f"writing and reading without Tenuto, round {number_of_round + 1} of {self.rounds}")
            self._note(figures.WRITE_BUFFERED, raw.write(path, data, 16 * raw.MIB, length=length, direct=False))
            if self.direct:
                self._note(figures.WRITE_DIRECT, raw.write(path, data, piece, length=length))
            self._drop(path)
            read = raw.read(path, data, piece, length=length, direct=self.direct)
            self._note(figures.READ_COLD, read)
            raw.warm_cache(path)
            self._note(figures.READ_HOT, raw.read(path, data, 16 * raw.MIB, length=length, direct=False))
        path.unlink()

    def saves(self) -> None:
        where = self.place / "checkpoints"
        saved = self.sample.fingerprint()
        state: dict[str, Any] = dict(self.sample.state)
        with Checkpointer(
            where, state, save=every(steps=NEVER), keep=keep.latest(1), on_error="raise", sinks=[self.listener]
        ) as checkpointer:
            self.prewarm_s = checkpointer.prewarm_s
            for number_of_round in range(self.rounds):
                self.on_activity(f"saving with Tenuto, round {number_of_round + 1} of {self.rounds}")
                self._save(checkpointer)
        self._restores(where)
        for array in self.sample.arrays.values():
            array.fill(0)
        load(where, into=state)
        if self.sample.fingerprint() != saved:  # checks that the timed work was done: the bytes are there
            raise CorruptionError(
                f"what was restored from {where} is not what was saved",
                subject=str(where),
                hint="test this machine's memory and disk; please report it",
            )

    def _save(self, checkpointer: Checkpointer) -> None:
        checkpointer.step_done()
        begun = time.perf_counter()
        save = checkpointer.save()
        self._note(figures.STALL, time.perf_counter() - begun)
        save.wait()
        self._note(figures.DURABLE, time.perf_counter() - begun)
        checkpointer.wait()  # unlinking in the background would disturb the next measurement
        checkpointer.step_done()
        self._note(figures.SYNC, raw.timed(lambda: checkpointer.save(wait=True)))
        checkpointer.wait()

    def _restores(self, where: Path) -> None:
        state: dict[str, Any] = dict(self.sample.state)
        for number_of_round in range(self.rounds):
            self.on_activity(f"restoring with Tenuto, round {number_of_round + 1} of {self.rounds}")
            self._drop(where)
            self._note(figures.RESTORE_COLD, raw.timed(lambda: load(where, into=state)))
            raw.warm_cache(where)
            self._note(figures.RESTORE_HOT, raw.timed(lambda: load(where, into=state)))

    def _drop(self, root: Path) -> None:
        raw.drop_cache(root)
        try:
            self.cold = self.cold and not raw.still_cached(root)
        except OSError:
            self.cold = False  # the kernel cannot report it, so it is not claimed

    def _note(self, what: str, seconds: float) -> None:
        self.seconds[what].append(seconds)


def measure(path: Path, sample: Sample, *, rounds: int, on_activity: ReportActivity) -> Figures:
    """Measures `path` with this state, and leaves it as it was. `on_activity` receives the current activity.

    Raises errors of the store, SaveFailed, and CorruptionError if what is restored is not what was saved.
    """
    left = leftovers(path)
    with workplace(path) as place:
        run = _Measuring(place, sample, rounds, on_activity)
        run.memory()
        run.disk()
        run.saves()
        return Figures(
            where=str(path),
            file_system=file_system_of(path),
            nbytes=sample.nbytes,
            leaves=len(sample.arrays),
            made_of=sample.made_of,
            seconds={what: found for what, found in run.seconds.items() if found},
            prewarm_s=run.prewarm_s,
            arena=run.listener.arena,
            direct=run.direct,
            links=run.links,
            cold=run.cold,
            notes=tuple(run.listener.warnings),
            leftovers=left,
        )


def _takes_direct(place: Path) -> bool:
    """Returns whether direct writes work here; some file systems accept the flag and reject the write."""
    path = place / "direct"
    try:
        raw.write(path, raw.aligned(4096), 4096)
        return hasattr(os, "O_DIRECT")
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)


def _takes_links(place: Path) -> bool:
    first, second = place / "link-1", place / "link-2"
    first.touch()
    try:
        os.link(first, second)
    except OSError:
        return False
    finally:
        for path in (first, second):
            path.unlink(missing_ok=True)
    return True


Arrays = dict[str, np.ndarray[Any, Any]]


@record
class Sample:
    """A state to measure with.

    arrays: the state in host memory, by path.
    state: the same memory as a training would hold it, ready to save.
    copy: `copy(into)` copies every array into the one of the same name, as the framework does.
    made_of: a description in words.
    """

    arrays: Arrays
    state: Mapping[str, Any]
    copy: Callable[[Arrays], None]
    made_of: str

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def fingerprint(self) -> list[bytes]:
        return [digest(array) for array in self.arrays.values()]


FINITE: Final = np.uint64(0xBFFFFFFF_BFFFFFFF)
"""Clears the highest bit of the exponent of both float32 in eight bytes."""


def even_sizes(nbytes: int, leaves: int) -> list[int]:
    """Returns `leaves` equal lengths in bytes, multiples of 4. Raises UsageError if that leaves nothing for each."""
    each = nbytes // leaves // 4 * 4
    if each < 4:
        raise UsageError(f"{nbytes} bytes are too few for {leaves} leaves", hint="a larger --size, or fewer --leaves")
    return [each] * leaves


def make_arrays(sizes: Sequence[int]) -> Arrays:
    """Builds arrays of these lengths in bytes with random bits: float32 if the length allows, else uint8. No number is
    NaN or infinite: a save would say so."""
    generator = np.random.default_rng(0)
    wide = len(str(max(len(sizes) - 1, 0)))
    found: Arrays = {}
    for number, length in enumerate(sizes):
        words = generator.integers(0, 2**64, -(-length // 8), np.uint64, endpoint=False)
        words &= FINITE
        array = words.view(np.uint8)[:length]
        found[f"leaf-{number:0{wide}d}"] = array.view(np.float32) if length % 4 == 0 else array
    return found


def numpy_sample(sizes: Sequence[int]) -> Sample:
    """Builds the state as numpy arrays, which copies on one thread."""
    arrays = make_arrays(sizes)

    def copy(into: Arrays) -> None:
        for name, array in arrays.items():
            np.copyto(into[name], array)

    return Sample(arrays, {"state": arrays}, copy, "numpy arrays")
