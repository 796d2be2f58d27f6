"""Which Checkpointers live in this process: a second one on the same run closes the first (a notebook's cell run
twice)."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from types import FrameType
from typing import Protocol

Key = tuple[str, str]
"""Repository id and the run's directory key."""


class Closable(Protocol):
    def close(self) -> None: ...


_live: dict[Key, weakref.ref[Closable]] = {}
_lock = threading.Lock()


def live(key: Key) -> Closable | None:
    """The Checkpointer of this process that owns the run, if there is one."""
    with _lock:
        found = _live.get(key)
    return found() if found is not None else None


def register(key: Key, owner: Closable) -> None:
    with _lock:
        _live[key] = weakref.ref(owner)


def unregister(key: Key, owner: Closable) -> None:
    with _lock:
        found = _live.get(key)
        if found is not None and found() in (owner, None):
            del _live[key]


def imported_by_worker() -> bool:
    """Whether this code runs because a spawned worker imports its parent's main module anew, not because it was
    called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


def _forget() -> None:
    _live.clear()


os.register_at_fork(after_in_child=_forget)
