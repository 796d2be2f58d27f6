"""Which runs this process trains: a second Checkpointer on the same run closes the first (a notebook's cell run
twice), also where nobody holds that any more."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from types import FrameType
from typing import NamedTuple, Protocol

Key = tuple[str, str]
"""Repository id and the run's directory key."""


class RunOwner(Protocol):
    """What owns a run, until it is closed."""

    def close_replaced(self) -> None:
        """Ends it, for another one: what is in flight is awaited, and nothing new is saved."""
        ...


class _Owner(NamedTuple):
    checkpointer: weakref.ref[object]
    """It may be gone without having been closed: what owns the run is there all the same."""
    training: RunOwner


_live: dict[Key, _Owner] = {}
_lock = threading.Lock()


def live(key: Key) -> RunOwner | None:
    """What owns the run in this process, if anything does."""
    with _lock:
        found = _live.get(key)
    return found.training if found is not None else None


def register(key: Key, training: RunOwner, checkpointer: object) -> None:
    with _lock:
        _live[key] = _Owner(weakref.ref(checkpointer), training)


def unregister(key: Key, owner: object) -> None:
    """`owner`: the training, or its Checkpointer. Does nothing where another one owns the run."""
    with _lock:
        found = _live.get(key)
        if found is not None and (owner is found.training or owner is found.checkpointer()):
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
