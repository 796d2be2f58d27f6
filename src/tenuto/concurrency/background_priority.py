"""Lowers the priority of writing threads, so that they use the processor and the disk that training leaves idle.

A thread that takes a core from a framework's thread pool delays the whole pool at every barrier: its cost is its own
time multiplied by the number of cores. Only Linux gives each thread its own priority; elsewhere nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from typing import Final

NICE: Final = 10
"""Gives a writer a tenth of a training thread's share when both want the core: saves must also finish on a machine that
is full of other jobs."""
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_THIS_THREAD: Final = (1, 0)
_BEST_EFFORT_LAST: Final = 2 << 13 | 7


def lower_priority() -> None:
    """Lowers the calling thread's CPU and I/O priority for good: an ordinary user cannot raise it again."""
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    with contextlib.suppress(OSError):  # forbidden in some sandboxes: training is disturbed a little more
        os.setpriority(os.PRIO_PROCESS, own, max(NICE, os.getpriority(os.PRIO_PROCESS, own)))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, *_THIS_THREAD, _BEST_EFFORT_LAST)
