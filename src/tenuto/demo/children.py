"""Training in child processes that can be killed at a chosen moment, and what their event streams say afterwards.

Children are forked from a process that has imported the framework and run none of it: its thread pools, which a fork
would break, do not exist yet, and a new life costs milliseconds instead of the seconds that an import takes.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tenuto.certify.runner import GrowingLines
from tenuto.demo.trace import Place
from tenuto.errors import DeadlineExceeded

POLL_S: Final = 0.0005
LIFE_S: Final = 300.0
"""No life of a child of the demo takes so long: one that does hangs, and is told so."""
LOOK_S: Final = 1.0
"""No two looks at a child lie further apart, unless this process was stopped meanwhile."""

MEMORY_OFF: Final = "states are not kept in memory: "
"""What the warning begins with that says why."""

Train = Callable[[Path, Callable[[int, float], None]], None]
"""Trains, given where its events go and what to call after each step with its number and loss."""


@dataclass(frozen=True, slots=True)
class Life:
    """What one process did, from its event stream and the counter that it shared with its parent.

    began: the step that it resumed from (0: from scratch; None: it ended before that). reached: steps completed.
    status: exit status, or minus the signal that ended it. saving: a save had begun, and had neither been committed nor
    failed, when it ended. restored: step and content of what it went on from, None if from scratch; `adopted`: out of
    memory. remembered: the content of each step that it sealed in memory, and memory_stalls_s how long each held it.
    memory_off: why nothing was kept in memory. place: the place of the protocol that it was in at its end, and point
    where it killed itself there, as its trace says. saved: the step of the save that it began last. durable: the newest
    step in the store after it.
    """

    began: int | None
    reached: int
    status: int
    saving: bool
    seconds: float
    stalls_s: tuple[float, ...] = ()
    bytes: int = 0
    restored: tuple[int, str] | None = None
    adopted: bool = False
    remembered: Mapping[int, str] = field(default_factory=dict)
    memory_stalls_s: tuple[float, ...] = ()
    memory_off: str = ""
    place: Place | None = None
    point: str | None = None
    saved: int | None = None
    durable: int = 0

    @property
    def at(self) -> int:
        """The step that it had come to, at its end."""
        return max(self.reached, self.began or 0)

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL


@dataclass
class Child:
    """A running child."""

    pid: int
    events: Path
    counter: mmap.mmap
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    _looked: float = field(default_factory=time.monotonic)
    _seen_s: float = 0.0
    """How long it has been looked at: what a pause of both of them takes is no time of its own."""
    _lines: GrowingLines | None = None
    _seen: list[dict[str, Any]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Steps completed, as the child has counted them."""
        return int(struct.unpack_from("q", self.counter)[0])

    def seen(self) -> list[dict[str, Any]]:
        """Every event so far. The last line of a killed process may be cut short; it is not an event."""
        if self._lines is None:
            self._lines = GrowingLines(self.events)
        self._seen.extend(self._lines.new())
        return self._seen

    def running(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        self._seen_s += min(now - self._looked, LOOK_S)
        self._looked = now
        if self.status is None and self._seen_s > LIFE_S:
            self.kill()
            raise DeadlineExceeded(
                f"the training process {self.pid} did not end within {LIFE_S:g} s", subject=str(self.pid)
            )
        return self.status is None

    def wait_until(self, reached: Callable[[], bool], poll_s: float = POLL_S) -> bool:
        """Whether it came so far before it ended."""
        while self.running():
            if reached():
                return True
            time.sleep(poll_s)
        return False

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)

    def end(self) -> Life:
        """Waits for the end that it comes to by itself."""
        self.wait_until(lambda: False, 10 * POLL_S)
        return self.life()

    def life(self) -> Life:
        """What it did; it has ended."""
        assert self.status is not None
        events = self.seen()
        begun = [event for event in events if event["event"] == "SaveStarted"]
        ended = {event["id"]["step"] for event in events if event["event"] in ("Committed", "SaveFailed")}
        restored = [(event["id"]["step"], event.get("content", "")) for event in events if event["event"] == "Restored"]
        remembered = [event for event in events if event["event"] == "SavedToMemory"]
        return Life(
            began=restored[-1][0] if restored else (0 if self.step else None),
            reached=self.step,
            status=self.status,
            saving=any(event["id"]["step"] not in ended for event in begun),
            seconds=time.monotonic() - self.started,
            stalls_s=tuple(event["stall_s"] for event in events if event["event"] == "Captured"),
            bytes=max((event["bytes"] for event in begun), default=0),
            restored=restored[-1] if restored else None,
            adopted=bool(restored) and any(event["event"] == "RestoredFromMemory" for event in events),
            remembered={event["id"]["step"]: event["content"] for event in remembered},
            memory_stalls_s=tuple(event["stall_s"] for event in remembered),
            saved=begun[-1]["id"]["step"] if begun else None,
            memory_off=next((why for why in map(_memory_off, events) if why), ""),
        )


def _memory_off(event: Mapping[str, Any]) -> str:
    message = str(event["message"]) if event["event"] == "Warned" else ""
    return message.removeprefix(MEMORY_OFF) if message.startswith(MEMORY_OFF) else ""


def start(train: Train, events: Path, output: Path) -> Child:
    """Forks a child that trains. What it prints goes to the end of `output`."""
    counter = mmap.mmap(-1, mmap.PAGESIZE)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, events, counter)
    status = 1
    try:
        with output.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        train(events, lambda step, loss: struct.pack_into("q", counter, 0, step))
        status = 0
    except BaseException:  # noqa: BLE001 - a forked child must not return into its parent's program, whatever happens
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def ask(question: Callable[[], Any], output: Path) -> Any:
    """What `question` answers (a JSON value) in a forked child; None where it fails. For work that needs the framework,
    which this process must not run itself."""
    reading, writing = os.pipe()

    def train(events: Path, on_step: Callable[[int, float], None]) -> None:
        os.close(reading)
        os.write(writing, json.dumps(question()).encode())

    child = start(train, output.with_suffix(".none"), output)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    child.end()
    return json.loads(answer) if child.status == 0 else None
