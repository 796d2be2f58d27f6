"""Trains in child processes that can be killed at a chosen moment, and summarises their event streams.

Children are forked from a process that has imported the framework but not run it: the thread pools that a fork would
break do not exist yet, and a new child costs milliseconds instead of the seconds of an import.
"""

from __future__ import annotations

import faulthandler
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

from tenuto.certify.runner import JsonTail
from tenuto.record import record

POLL_S: Final = 0.0005
LIFE_S: Final = 300
"""A child that runs longer hangs: it prints where, and ends."""
MEMORY_OFF: Final = "states are not kept in memory: "
"""The prefix of the warning that gives the reason."""

Train = Callable[[Path, Callable[[int, float], None]], None]
"""Trains, given the path for its events and a callback for each step's number and loss."""


@record
class Life:
    """What one process did, from its event stream and the counter shared with its parent.

    began: the step that it resumed from (0: from scratch; None: it ended earlier).
    reached: completed steps.
    status: exit status, or minus the signal that ended it.
    saving: whether a save was neither committed nor failed at its end.
    restored: step and content that it resumed from; None if from scratch.
    from_memory: whether it resumed from memory.
    sealed: the content of each step that it kept in memory.
    memory_stalls_s: seconds for which each of these blocked training.
    memory_off: why nothing was kept in memory.
    saved: the step of the last save that it began.
    durable: the newest step in the store after its end.
    """

    began: int | None
    reached: int
    status: int
    saving: bool
    seconds: float
    stalls_s: tuple[float, ...] = ()
    bytes: int = 0
    restored: tuple[int, str] | None = None
    from_memory: bool = False
    sealed: Mapping[int, str] = field(default_factory=dict)
    memory_stalls_s: tuple[float, ...] = ()
    memory_off: str = ""
    saved: int | None = None
    durable: int = 0

    @property
    def at(self) -> int:
        """The last step it reached."""
        return max(self.reached, self.began or 0)

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    @property
    def source(self) -> str:
        """What it resumed from: "memory", "disk" or "scratch"; empty if it ended before its first step."""
        if self.restored is not None:
            return "memory" if self.from_memory else "disk"
        return "scratch" if self.began == 0 else ""


@dataclass
class Child:
    """A running child."""

    pid: int
    events: Path
    counter: mmap.mmap
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    _seen: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = JsonTail(self.events)

    @property
    def step(self) -> int:
        """Completed steps, as the child counts them."""
        return int(struct.unpack_from("q", self.counter)[0])

    def seen(self) -> list[dict[str, Any]]:
        """Returns every event so far, without a last line that a kill cut short."""
        self._seen.extend(self._lines.new())
        return self._seen

    def count(self, event: str) -> int:
        return sum(one["event"] == event for one in self.seen())

    def running(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def wait_until(self, reached: Callable[[], bool], poll_s: float = POLL_S) -> bool:
        """Returns whether `reached` became true before the child ended."""
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
        """Waits until the child ends by itself."""
        self.wait_until(lambda: False, 10 * POLL_S)
        return self.life()

    def life(self) -> Life:
        """Summarises the ended child."""
        assert self.status is not None
        events = self.seen()
        begun = [event for event in events if event["event"] == "SaveStarted"]
        ended = {event["id"]["step"] for event in events if event["event"] in ("Committed", "SaveFailed")}
        restored = [(event["id"]["step"], event.get("content", "")) for event in events if event["event"] == "Restored"]
        sealed = [event for event in events if event["event"] == "SavedToMemory"]
        warnings = [str(event["message"]) for event in events if event["event"] == "Warned"]
        return Life(
            began=restored[-1][0] if restored else (0 if self.step else None),
            reached=self.step,
            status=self.status,
            saving=any(event["id"]["step"] not in ended for event in begun),
            seconds=time.monotonic() - self.started,
            stalls_s=tuple(event["stall_s"] for event in events if event["event"] == "Captured"),
            bytes=max((event["bytes"] for event in begun), default=0),
            restored=restored[-1] if restored else None,
            from_memory=bool(restored) and any(event["event"] == "RestoredFromMemory" for event in events),
            sealed={event["id"]["step"]: event["content"] for event in sealed},
            memory_stalls_s=tuple(event["stall_s"] for event in sealed),
            memory_off=next((text[len(MEMORY_OFF) :] for text in warnings if text.startswith(MEMORY_OFF)), ""),
            saved=begun[-1]["id"]["step"] if begun else None,
        )


def start(train: Train, events: Path, output: Path) -> Child:
    """Forks a child that trains, with its output appended to `output`."""
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
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=2, chain=True)
        signal.alarm(LIFE_S)
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
