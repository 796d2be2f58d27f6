"""A process of the supervisor's own for what may not answer: lines go both ways, and the supervisor waits for none.

It ends with the pipe to it, and so with the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Final

_AT_ONCE: Final = 1 << 20
_KILLED_S: Final = 5.0


class HelperProcess:
    """The supervisor's side."""

    def __init__(self, module: str, *arguments: str, stderr: int | None = None) -> None:
        """stderr: as of `subprocess.Popen`; else this process's own."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._unsent = self._rest = b""
        self.ended = False
        """Whether its lines have come to their end."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def put(self, value: object) -> None:
        """Sends a line of JSON; what the pipe does not take yet goes with a later call of this or `lines`. Does nothing
        once the process has ended: `lines` finds that."""
        self._unsent += json.dumps(value).encode() + b"\n"
        self._send()

    def _send(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the pipe is full, or has ended
            while self._unsent:
                self._unsent = self._unsent[os.write(self._process.stdin.fileno(), self._unsent) :]

    def lines(self) -> list[bytes]:
        """Returns the lines that have come since the last call."""
        if self.ended:
            return []
        self._send()
        assert self._process.stdout is not None
        try:
            data = os.read(self._process.stdout.fileno(), _AT_ONCE)
        except BlockingIOError:
            return []
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def close(self, within_s: float) -> list[bytes]:
        """Ends it, and returns its last lines. May be called again."""
        if self._process.returncode is not None:
            return []
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits inside the kernel for what does not answer
                self._process.wait(_KILLED_S)
        last = self.lines()
        self.ended = True
        self._process.stdout.close()
        return last
