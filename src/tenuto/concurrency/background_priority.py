"""How a writing thread stands back behind training: it takes the processor and the disk when training leaves them.

A thread that takes a core from a framework's team of threads holds up the whole team, at every barrier, so what it
costs is its own time once for each core. On Linux each thread has a priority of its own; elsewhere nothing is changed.
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
"""A tenth of a training thread's share where both want the core: a save must also come to its end on a machine that is
full of other jobs."""
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_THIS_THREAD: Final = (1, 0)
_BEST_EFFORT_LAST: Final = 2 << 13 | 7


def lower_priority() -> None:
    """Lowers the calling thread's priority for processor and disk, for good: an ordinary user cannot raise it again."""
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox that forbids it: training is disturbed a little more
        os.setpriority(os.PRIO_PROCESS, own, max(NICE, os.getpriority(os.PRIO_PROCESS, own)))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, *_THIS_THREAD, _BEST_EFFORT_LAST)
