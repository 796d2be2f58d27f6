"""Server processes of a test run: on free ports of loopback, killed with the run whatever ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stores.install import SERVERS

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def required() -> bool:
    """Whether a server that is missing fails its tests."""
    return bool(os.environ.get("TENUTO_STORES_REQUIRED") or os.environ.get("CI"))


def skip_server(name: str, reason: str) -> None:
    """Skips the tests of a server that this machine cannot have; where servers are required, fails them."""
    message = f"{name} is not here: {reason}"
    if required():
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def installed(name: str) -> Path:
    """Returns the directory of an installed server; skips the tests that need one that is missing."""
    if not (SERVERS / f"{name}.done").exists():
        missing = SERVERS / f"{name}.missing"
        skip_server(name, missing.read_text() if missing.exists() else "run `make test-stores`, which installs it")
    return SERVERS / name


def answers(port: int) -> Callable[[], bool]:
    """Whether somebody accepts connections on a port of loopback."""

    def ask() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    return ask


@dataclass
class ServerProcess:
    """A server: `start`, `stop`, and `kill -9` in between. `ready` is asked until it is true."""

    command: Sequence[str | Path]
    log: Path
    ready: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 60) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                list(map(str, self.command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
                cwd=self.log.parent,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                code = self._process.poll()
                self.kill()
                end = self.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{Path(str(self.command[0])).name} did not start ({code}):\n{end}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """Ends it as a lost machine would: nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                pass
            self.kill()

    def pause(self) -> None:
        """Hangs it: connections are accepted by the kernel, and nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
