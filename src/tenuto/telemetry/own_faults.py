"""Faults that a training process puts into itself, for a rehearsal: those that a signal from outside cannot make.

`tenuto chaos` sets the variable `heartbeat.CHAOS`; without it nothing here is imported. The supervisor asks by a
small file beside the process's heartbeat, for which the process looks after each step.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tenuto import log_lines
from tenuto.units import seconds

SLOW_S: Final = 1.0
"""How much longer each put takes in a store that is slow."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_DROP_ALL: Final = struct.pack("HBBI", 6, 0, 0, 0)
"""Classic BPF: `ret 0`. The kernel drops each packet that comes for the socket."""


@dataclass
class Storage:
    """Until when, by the monotonic clock, this process's stores are full or slow; `store.wrappers.struck` looks."""

    full_until_s: float = 0.0
    slow_until_s: float = 0.0


storage: Final = Storage()


def ask(directory: Path, rank: int, pid: int, kind: str, lasts_s: float) -> None:
    """Asks a process for a fault. Does nothing once the directory is gone."""
    path = _request(directory, rank, pid)
    with contextlib.suppress(OSError):
        path.with_suffix(".asking").write_text(json.dumps({"kind": kind, "lasts_s": lasts_s}))
        os.replace(path.with_suffix(".asking"), path)


def _request(directory: Path, rank: int, pid: int) -> Path:
    return directory / f"{rank}-{pid}.fault"


class OwnFaults:
    """Puts into this process what it is asked for. `state`: what it trains, None as long as that is not known."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = _request(directory, rank, os.getpid())
        self.state: Mapping[str, Any] | None = None

    def stepped(self, step: int) -> None:
        """Looks for a fault that is to strike after `step`. Raises MemoryError for the one that is that."""
        try:
            asked = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return
        self._path.unlink()
        kind, lasts_s = str(asked["kind"]), float(asked["lasts_s"])
        faults: Mapping[str, Callable[[float], str]] = {
            "hang": self._hang,
            "oom": self._run_out_of_memory,
            "nan": self._spoil,
            "full-disk": self._fill,
            "slow-store": self._slow_down,
            "partition": self._cut_off,
        }
        log_lines.put(f"rehearsal: {kind} after step {step}\n")
        if more := faults[kind](lasts_s):
            log_lines.put(f"rehearsal: {more}\n")

    def _hang(self, lasts_s: float) -> str:
        while True:  # as a call that never returns: what a signal asks for waits behind it
            time.sleep(3600)

    def _run_out_of_memory(self, lasts_s: float) -> str:
        return f"{len(bytearray(sys.maxsize - 64))} bytes were there"

    def _spoil(self, lasts_s: float) -> str:
        for path, value in _values(self.state or {}, ""):
            if _made_nan(value):
                return f"{path} is NaN"
        return "the state has no floating-point values that can be changed in place: nothing was done"

    def _fill(self, lasts_s: float) -> str:
        storage.full_until_s = time.monotonic() + lasts_s
        return f"no put succeeds for {seconds(lasts_s)}"

    def _slow_down(self, lasts_s: float) -> str:
        storage.slow_until_s = time.monotonic() + lasts_s
        return f"each put takes {seconds(SLOW_S)} longer, for {seconds(lasts_s)}"

    def _cut_off(self, lasts_s: float) -> str:
        """Drops what comes in on each TCP connection that this process has now. Peers notice nothing but silence."""
        if sys.platform != "linux":
            return "a process can be cut off on Linux alone: nothing was done"
        program = ctypes.create_string_buffer(_DROP_ALL)
        cut = list(_connections())
        for one in cut:
            one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))

        def heal() -> None:
            for one in cut:
                one.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
                one.close()

        timer = threading.Timer(lasts_s, heal)
        timer.daemon = True
        timer.start()
        return f"{len(cut)} connections are cut for {seconds(lasts_s)}"


def _connections() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield one
            else:
                one.close()


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields arrays and tensors of a state in its order, each with its path."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif callable(getattr(value, "named_parameters", None)):
        items = list(value.named_parameters())
    else:
        if hasattr(value, "dtype"):
            yield path, value
        return
    for name, one in items:
        yield from _values(one, f"{path}/{name}" if path else str(name))


def _made_nan(value: Any) -> bool:
    """Fills an array of numpy or a tensor of torch, which is known by its methods, with NaN; returns whether it did."""
    if getattr(value.dtype, "kind", "") == "f" and hasattr(value, "fill"):
        value.fill(float("nan"))
        return True
    if getattr(value.dtype, "is_floating_point", False) and hasattr(value, "detach"):
        value.detach().fill_(float("nan"))
        return True
    return False
