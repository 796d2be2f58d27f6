"""A Checkpointer that nobody closed is closed when the process ends: what is in flight is awaited, never dropped."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Closing(Protocol):
    def close(self, timeout: float = ...) -> None: ...


def close_at_exit(owner: Closing) -> None:
    """Closes `owner` at the process's end, if it still exists; never in a forked child."""
    held = weakref.ref(owner)
    pid = os.getpid()

    def close() -> None:
        found = held()
        if found is not None and os.getpid() == pid:
            found.close()

    atexit.register(close)
    weakref.finalize(owner, atexit.unregister, close)
