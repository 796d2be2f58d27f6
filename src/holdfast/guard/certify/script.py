"""Running a training script under an order: its output kept, its steps followed, nothing of it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import psutil  # type: ignore[import-untyped]

from holdfast.errors import DeadlineExceeded, ScriptFailed
from holdfast.guard.certify.followed import Followed
from holdfast.guard.certify.order import Order
from holdfast.model.trail import Trail
from holdfast.plan.naming import rank_names

POLL_S: Final = 0.02
LEAVING_S: Final = 30.0
"""How long a script may take to end once it has done every step; then it is killed, and nothing is lost by that."""
TAIL_LINES: Final = 20

Tell = Callable[[int], None]
"""Told how many steps are completed."""


class Process(Protocol):
    """A running process, as `subprocess.Popen` has it."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


Launch = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""Starts a command, the leader of a session, with variables added to its environment and its output in a file."""


def launch(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Without a terminal and without an input, so that what asks ends instead of waiting."""
    with log.open("ab") as output:
        try:
            return subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise ScriptFailed(
                f"{command[0]} could not be started: {error.strerror}",
                subject=command[0],
                hint="give the command as in a shell: holdfast certify WHERE -- python train.py",
            ) from error


@dataclass
class Script:
    """One life of the script. Records of its trail are read as they come."""

    name: str
    command: Sequence[str]
    order: Order
    log: Path
    patience_s: float
    tell: Tell = lambda step: None
    launch: Launch = launch
    status: int | None = None
    seconds: float = 0.0
    _ranks: list[Followed] = field(default_factory=list)
    _below: tuple[psutil.Process, ...] = ()

    def run(self) -> tuple[Trail, ...]:
        """The trail of each rank. Raises ScriptFailed with the tail of its output, and DeadlineExceeded where no step
        comes."""
        began = time.monotonic()
        self._ranks = [Followed(self.order, 0)]
        process = self.launch(self.command, self.order.environment(), self.log)
        try:
            self._follow(process)
        finally:
            # Also on Ctrl-C, which it does not get by itself: it is in a session of its own.
            end(process, self._below)
        self.status, self.seconds = process.returncode, time.monotonic() - began
        self._check()
        return tuple(one.trail() for one in self._ranks)

    @property
    def saved(self) -> int | None:
        """The step that all ranks have saved."""
        found = {one.saved for one in self._ranks}
        return found.pop() if len(found) == 1 else None

    @property
    def done(self) -> bool:
        """Whether every rank has done its steps."""
        return all(one.done is not None for one in self._ranks)

    @property
    def _leaving(self) -> bool:
        """Whether a rank has done its steps: none leaves before all have come so far."""
        return any(one.done is not None for one in self._ranks)

    @property
    def _refused(self) -> dict[str, Any] | None:
        return next((one.refused for one in self._ranks if one.refused is not None), None)

    @property
    def _step(self) -> int:
        """The step that all ranks have come to."""
        return min(one.step for one in self._ranks)

    def _look(self) -> bool:
        """Whether any rank has told something. How many there are the first one says."""
        before = self._step
        news = [one.look() for one in self._ranks]
        for rank in range(len(self._ranks), self._ranks[0].ranks):
            self._ranks.append(Followed(self.order, rank))
            news.append(self._ranks[-1].look())
        if self._step > before:
            self.tell(self._step)
        return any(news)

    def _follow(self, process: Process) -> None:
        """Until it ends, has saved what it was to save, or has done all its steps and been given time to leave."""
        last_news = time.monotonic()
        while True:
            ended = process.poll() is not None
            news = self._look()
            if self._leaving and not self._below:
                self._below = below(process.pid)  # before it leaves: then nobody knows any more whose they were
            if news:
                last_news = time.monotonic()
            waited = time.monotonic() - last_news
            # Whoever started the other ranks may be the first to leave, and does not have to wait for them.
            to_come = self._leaving and not self.done and waited <= LEAVING_S
            if (ended and not to_come) or self.saved is not None or self._refused is not None:
                return
            if self.done and waited > LEAVING_S:
                return
            if waited > self.patience_s:
                raise DeadlineExceeded(
                    f"the script ({self.name}) told nothing for {self.patience_s:g} s, after {self._so_far()}"
                    + self._tail(),
                    subject=self.name,
                    hint="--patience SECONDS waits longer for a step; a script that asks on a terminal cannot be run",
                )
            time.sleep(POLL_S)

    def _check(self) -> None:
        """Whether it did what was asked of it."""
        refused = self._refused
        if refused is not None:
            raise ScriptFailed(
                f"the script cannot be certified: {refused['reason']}", subject=self.name, hint=str(refused["hint"])
            )
        if self.done and self.order.save_at is not None and self.saved is None:
            raise ScriptFailed(
                f"the script ({self.name}) counts its steps in leaps: none lay between {self.order.save_at} and "
                f"{self.order.last}, so there was nothing to resume",
                subject=self.name,
                hint="a larger --more leaves room for a step in between",
            )
        if self.done or self.saved is not None:
            return
        if not self._ranks[0].ranks:
            raise self._failed(
                "without building a Checkpointer",
                "the command must train with holdfast.Checkpointer, in a Python that has this version of Holdfast"
                if self.status == 0
                else "see that the command runs by itself",
            )
        if self.status == 0:
            reached = self._step
            raise self._failed(
                f"after {self._so_far()}, and {self.order.last} were wanted",
                f"let it train longer, or certify fewer: --steps and --more with a sum of at most {reached}"
                if reached > 1
                else "see that it trains with ckpt.steps, ckpt.epochs or ckpt.step_done",
            )
        raise self._failed(f"after {self._so_far()}", "see that the command runs by itself")

    def _failed(self, how: str, hint: str) -> ScriptFailed:
        status = self.status or 0
        ended = f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status}"
        return ScriptFailed(f"the script ({self.name}) {ended} {how}{self._tail()}", subject=self.name, hint=hint)

    def _so_far(self) -> str:
        said = f"{self._step} step{'' if self._step == 1 else 's'}"
        behind = [rank for rank, one in enumerate(self._ranks) if one.step == self._step]
        ahead = len(self._ranks) - len(behind)
        return f"{said} on {rank_names(behind)}, more on the others" if ahead else said

    def _tail(self) -> str:
        lines = self.log.read_text("utf-8", "replace").splitlines()[-TAIL_LINES:]
        return "; its output ends:\n" + "\n".join(f"  | {line}" for line in lines) if lines else "; it printed nothing"


def end(process: Process, known: Sequence[psutil.Process] = ()) -> None:
    """Kills the process with SIGKILL, and everything that it has started: its session's group, and whoever has left
    that for a session of its own."""
    everything = {*known, *(below(process.pid) if process.poll() is None else ())}
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in everything:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.wait()


def below(pid: int) -> tuple[psutil.Process, ...]:
    """Its children, and theirs."""
    try:
        return tuple(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return ()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
