"""Lists the runs that this process trains: a second Checkpointer on the same run closes the first (a notebook's cell
run twice), also where nothing refers to that any more."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, Protocol

Key = tuple[str, str]
"""Repository id and the run's directory key."""


class RunOwner(Protocol):
    def close_replaced(self) -> None:
        """Closes for another owner: waits for what is in flight, and saves nothing new."""
        ...


class _Owner(NamedTuple):
    checkpointer: weakref.ref[object]
    """It may be collected without having been closed; the session still owns the run."""
    training: RunOwner


_live: dict[Key, _Owner] = {}
_writing: dict[Key, Callable[[float], bool]] = {}
"""What waits for the saves of a session that was closed before they had ended: by an interrupt, or in a slow store."""
# A handler that raises just behind the acquisition leaves the lock taken: the thread that closes then must not wait for
# itself.
_lock = threading.RLock()


def live(key: Key) -> RunOwner | None:
    """Returns the session that owns the run in this process, if any."""
    with _lock:
        found = _live.get(key)
    return found.training if found is not None else None


def register(key: Key, training: RunOwner, checkpointer: object) -> None:
    with _lock:
        _live[key] = _Owner(weakref.ref(checkpointer), training)


def unregister(key: Key, owner: object) -> None:
    """Removes the run if `owner`, a session or its Checkpointer, owns it."""
    with _lock:
        found = _live.get(key)
        if found is not None and (owner is found.training or owner is found.checkpointer()):
            del _live[key]


def still_writes(key: Key, join: Callable[[float], bool]) -> None:
    """Notes that the session that owned the run has left a save in flight, for which `join` waits."""
    with _lock:
        _writing[key] = join


def await_writing(key: Key, timeout: float) -> None:
    """Waits, once, for what an earlier session of the run still writes, `timeout` seconds at most."""
    with _lock:
        join = _writing.pop(key, None)
    if join is not None:
        join(timeout)


def imported_by_worker() -> bool:
    """Returns whether this code runs because a spawned worker imports its parent's main module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


os.register_at_fork(after_in_child=_live.clear)
os.register_at_fork(after_in_child=_writing.clear)
