"""What a training process last did, for whoever supervises it: a small file in memory, a microsecond a step.

The supervisor names a directory in `TENUTO_HEARTBEAT`; each process with a Checkpointer keeps one file there. It is
read by a process of the same machine, so times are those of its monotonic clock. In the other direction the supervisor
can ask for a save, by a file that the first process to see it takes away.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from tenuto.events import warn
from tenuto.record import record
from tenuto.telemetry.last_words import LastWords, of_error, when_uncaught, write

if TYPE_CHECKING:
    from tenuto.telemetry.own_faults import OwnFaults

VARIABLE: Final = "TENUTO_HEARTBEAT"
CHAOS: Final = "TENUTO_CHAOS"
"""Set by `tenuto chaos` alone: this process puts into itself the faults that it is asked for."""
EMERGENCY: Final = "TENUTO_EMERGENCY"
"""Where the last state of what trains goes if its store does not take it, divided by `;`, unless the script says."""
STARTING, TRAINING, ENDING, ENDED = "starting", "training", "ending", "ended"
"""ENDING: what is in flight is being saved, and the run given back. ENDED: that is done, and the script does what it
likes."""
RUN_FILE: Final = "run"
"""Beside the beats: where the first rank's checkpoints lie; on lines of their own the run's name, and each place."""
EMERGENCY_FILE: Final = "emergency"
"""Beside the beats: where the state goes if the store does not take it, a URL a line."""
ALIVE_FILE: Final = "alive"
"""Beside the beats: locked by the supervisor as long as it lives."""
REQUEST_FILE: Final = "save"
"""Beside the beats: why the supervisor asks for a save."""
_PHASES: Final = (STARTING, TRAINING, ENDING, ENDED)
_MAGIC: Final = b"tenuto beat 3\n\0\0"
_FIELDS: Final = struct.Struct("<16q")
"""Sequence, process id, rank, step, phase, nanoseconds; of the last save how many there were with it, nanoseconds and
bytes; of how many ranks a state is sealed in memory; the first step; a number for what is trained; of the steps how
many are known, and the nanoseconds of the first, the longest and the usual one; then the sequence once more: a reader
that sees two different ones has read in the middle of a beat."""
_SEQUENCE: Final = struct.Struct("<q")
_BYTES: Final = len(_MAGIC) + _FIELDS.size + _SEQUENCE.size
RECENT_STEPS: Final = 50
_SELDOM: Final = 10
"""Behind the first few, every so many steps the usual one is looked for anew."""


@record
class Beat:
    """`at_s`: by `time.monotonic` of this machine. `step`: completed steps. `saves`: how many have been committed;
    `save_s`, `save_bytes`: of the last one, how long it took and what this process wrote. `sealed`: of how many ranks
    a state is sealed in memory, which outlives the process; 0 without one. `began`: the steps that were completed when
    training began in this process: what it resumed from. `of`: a number that stands for place and run. `known`: of how
    many steps in a row the time is known, but for the first one, which may compile; `first_s`: of that one;
    `longest_s`, `usual_s`: of the recent others, with the saves and evaluations between them."""

    pid: int
    rank: int
    step: int
    phase: str
    at_s: float
    saves: int = 0
    save_s: float = 0.0
    save_bytes: int = 0
    sealed: int = 0
    began: int = 0
    of: int = 0
    known: int = 0
    first_s: float = 0.0
    longest_s: float = 0.0
    usual_s: float = 0.0


class Heartbeat:
    """One process's beats, and its last words. Without a directory to write to it does nothing."""

    def __init__(
        self, directory: Path | None, rank: int, *, where: str = "", run: str = "", places: Sequence[str] = ()
    ) -> None:
        """`where`, `run`: what the process trains, for its last words. `places`: all stores that have a part of it."""
        self._rank = rank
        self._where, self._run = where, run
        self._directory = directory
        self._step = 0
        self._began: int | None = None
        self._faults: OwnFaults | None = None
        self._last_save = (0, 0, 0)
        self._of = zlib.crc32(f"{where}\n{run}".encode(errors="surrogateescape"))
        self._last_step: tuple[int, int] | None = None
        """The step that was completed last, and when, by nanoseconds; None where what follows is no step."""
        self._first_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._known = 0
        self._pace_ns = (0, 0)
        self.sealed = 0
        """Of how many ranks a state is sealed in memory, this one's part here."""
        self._ended_unhealthy = False
        """Whether it has said so: the error that follows from it explains less."""
        self._pid = os.getpid()
        self._sequence = 0
        self._memory: mmap.mmap | None = None
        self.on = False
        """Whether anybody watches: else `beat` has nothing to do."""
        if directory is None:
            return
        try:
            descriptor = os.open(directory / f"{rank}-{self._pid}.beat", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _BYTES)  # without its page, writing to the mapping would be SIGBUS
                self._memory = mmap.mmap(descriptor, _BYTES)
            finally:
                os.close(descriptor)
            if where and not rank:
                (directory / RUN_FILE).write_bytes(os.fsencode("\n".join([where, run, *(places or [where])])))
        except OSError as error:
            if directory.is_dir():  # else the supervisor is gone
                warn(f"the supervisor hears nothing of this training: {directory}: {error.strerror}")
            return
        self.on = True
        self.beat(0, STARTING)

    @classmethod
    def from_environment(
        cls,
        rank: int,
        environment: Mapping[str, str] = os.environ,
        *,
        where: str = "",
        run: str = "",
        places: Sequence[str] = (),
    ) -> Heartbeat:
        """Beats for whoever supervises this process, and tells it of the error that nothing here catches."""
        directory = environment.get(VARIABLE)
        beats = cls(Path(directory) if directory else None, rank, where=where, run=run, places=places)
        if beats.on:
            when_uncaught(lambda error: beats.failed(error, uncaught=True))
            assert directory
            leave_with_supervisor(Path(directory))
        if beats.on and directory and environment.get(CHAOS):
            from tenuto.telemetry.own_faults import OwnFaults

            beats._faults = OwnFaults(Path(directory), rank)
        return beats

    def trains(self, state: Mapping[str, Any]) -> None:
        """Says what is trained: a rehearsal may spoil it."""
        if self._faults is not None:
            self._faults.state = state

    def note_emergency(self, urls: Sequence[str]) -> None:
        """Says where the state goes if its store does not take it; the first rank does."""
        if self.on and self._directory is not None and not self._rank:
            with contextlib.suppress(OSError):
                (self._directory / EMERGENCY_FILE).write_bytes(os.fsencode("\n".join(urls)))

    def beat(self, step: int, phase: str = TRAINING) -> None:
        if self._memory is None or os.getpid() != self._pid:
            return
        self._sequence += 1
        self._step = step
        if self._began is None and phase != STARTING:
            self._began = step
        now_ns = time.monotonic_ns()
        self._pace(step, now_ns, phase)
        fields = (
            self._sequence, self._pid, self._rank, step, _PHASES.index(phase), now_ns, *self._last_save, self.sealed,
            self._began or 0, self._of, self._known, self._first_ns, *self._pace_ns,
        )  # fmt: skip
        self._memory[_BYTES - _SEQUENCE.size :] = _SEQUENCE.pack(-1)
        self._memory[: _BYTES - _SEQUENCE.size] = _MAGIC + _FIELDS.pack(*fields)
        self._memory[_BYTES - _SEQUENCE.size :] = _SEQUENCE.pack(self._sequence)
        if self._faults is not None and phase == TRAINING and step > (self._began or 0):
            self._faults.stepped(step)

    def _pace(self, step: int, now_ns: int, phase: str) -> None:
        """Learns what steps take."""
        last, self._last_step = self._last_step, (step, now_ns) if phase == TRAINING else None
        if last is None or self._last_step is None or step <= last[0]:
            return
        took_ns = max((now_ns - last[1]) // (step - last[0]), 1)
        if not self._first_ns:
            self._first_ns = took_ns
            return
        self._known += 1
        self._steps_ns.append(took_ns)
        longest_ns, usual_ns = self._pace_ns
        if self._known <= _SELDOM or self._known % _SELDOM == 0:
            longest_ns, usual_ns = max(self._steps_ns), int(median(self._steps_ns))
        self._pace_ns = max(longest_ns, took_ns), usual_ns

    def saved(self, duration_s: float, nbytes: int) -> None:
        """Notes a save that was committed, for the next beat. Any thread may call it."""
        self._last_save = (self._last_save[0] + 1, int(duration_s * 1e9), nbytes)

    def save_request(self) -> str | None:
        """Takes the supervisor's request for a save, and returns its reason; None without one. One of the processes of
        this machine gets it."""
        if self._directory is None or not os.access(self._directory / REQUEST_FILE, os.F_OK):
            return None
        own = self._directory / f"{REQUEST_FILE}-{self._pid}"
        try:
            os.rename(self._directory / REQUEST_FILE, own)
            return os.fsdecode(own.read_bytes()) or None
        except OSError:
            return None  # another rank was first

    def failed(self, error: BaseException, *, uncaught: bool = False) -> None:
        """Says which error ends this process, if it is one. uncaught: whether nothing has caught it."""
        found = of_error(error)
        if found is not None:
            self._note_end(found[0], found[1], self._step, uncaught=uncaught)

    def left(self, number: int, step: int) -> None:
        """Says that this process leaves on a signal, with what was to be saved saved."""
        self._note_end(signal.Signals(number).name, (), step, left=number)

    def unhealthy(self, message: str, step: int) -> None:
        """Says that training ends because its values or its loss are wrong since `step`, at the latest."""
        self._note_end(message, (), step, unhealthy=True)

    def _note_end(
        self, message: str, errors: tuple[str, ...], step: int, *, unhealthy: bool = False, **how: Any
    ) -> None:
        if not self.on or self._directory is None or os.getpid() != self._pid or (self._ended_unhealthy and errors):
            return
        self._ended_unhealthy = unhealthy
        how |= {"where": self._where, "run": self._run}
        at_s = time.monotonic()
        write(self._directory, LastWords(self._pid, self._rank, step, at_s, message, unhealthy, errors, **how))


_left_with: Final[set[tuple[int, Path]]] = set()
"""Of this process, by its id: a forked child has no thread of its parent's."""


def leave_with_supervisor(directory: Path) -> None:
    """Has this process sent SIGTERM once its supervisor is gone, whatever stands between the two: the system tells only
    a supervisor's own children. The supervisor holds a lock as long as it lives, for which a thread waits."""
    if (key := (os.getpid(), directory)) in _left_with:
        return
    _left_with.add(key)
    try:
        descriptor = os.open(directory / ALIVE_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # another version's, or gone with its directory

    def wait() -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError:
            return  # no locks here: the system may still tell it
        if os.getpid() == key[0]:
            os.kill(key[0], signal.SIGTERM)

    threading.Thread(target=wait, name="tenuto-supervisor", daemon=True).start()


def request_save(directory: Path, reason: str) -> None:
    """Asks the training for a save of the next step that it completes. An earlier request that still
    waits is replaced."""
    new = directory / f"{REQUEST_FILE}.new"
    with contextlib.suppress(OSError):  # full memory: the training is asked the next time
        new.write_bytes(os.fsencode(reason))
        os.rename(new, directory / REQUEST_FILE)


def read_run(directory: Path) -> tuple[str, str] | None:
    """Returns where the checkpoints of what is trained lie, and the run; None before a Checkpointer is built."""
    where, run, *_ = [*_run_lines(directory), "", ""]
    return (where, run) if run else None


def read_places(directory: Path) -> list[str]:
    """Returns the URLs of all stores that have a part of what is trained; none before a Checkpointer is built."""
    return _run_lines(directory)[2:]


def read_emergency(directory: Path) -> list[str]:
    """Returns the URLs of the emergency places of what is trained, in order."""
    try:
        return os.fsdecode((directory / EMERGENCY_FILE).read_bytes()).split("\n")
    except OSError:
        return []


def _run_lines(directory: Path) -> list[str]:
    try:
        return os.fsdecode((directory / RUN_FILE).read_bytes()).split("\n")
    except OSError:
        return []


def newest(beats: Iterable[Beat]) -> dict[int, Beat]:
    """Returns the newest beat of each rank: a launcher may have replaced its process."""
    found: dict[int, Beat] = {}
    for beat in beats:
        if beat.rank not in found or beat.at_s > found[beat.rank].at_s:
            found[beat.rank] = beat
    return found


def read_beats(directory: Path) -> Iterator[Beat]:
    """Yields the last beat of each process that has one there, in no order. One that is being written is left out."""
    for path in directory.glob("*.beat"):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if len(data) != _BYTES or not data.startswith(_MAGIC):
            continue
        fields = _FIELDS.unpack_from(data, len(_MAGIC))
        sequence, pid, rank, step, phase, at_ns, saves, save_ns, nbytes, sealed, began, of, known, *pace = fields
        if _SEQUENCE.unpack_from(data, _BYTES - _SEQUENCE.size)[0] == sequence and 0 <= phase < len(_PHASES):
            saved = (saves, save_ns / 1e9, nbytes)
            first_s, longest_s, usual_s = (one / 1e9 for one in pace)
            facts = (sealed, began, of, known, first_s, longest_s, usual_s)
            yield Beat(pid, rank, step, _PHASES[phase], at_ns / 1e9, *saved, *facts)
