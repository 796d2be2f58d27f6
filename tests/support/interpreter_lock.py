"""Whether a call lets other threads run while it works, or holds the interpreter."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

ROUNDS = 50
"""Of the call, for a machine that has no processor left for the other thread now and then."""
ENOUGH = 5
"""Of them: one alone may have been interrupted in the gap before it."""
OFTEN = 20
"""More than there are such gaps in a call."""


def lets_others_run(call: Callable[[], object]) -> bool:
    """Another thread gets on while `call`, which takes some 10 ms, works; with the lock held it would move on in the
    gaps around it alone. A thread keeps the interpreter meanwhile until it lets go of it by itself."""
    moved, done = 0, False

    def go_on() -> None:
        nonlocal moved
        while not done:
            moved += 1
            time.sleep(1e-4)  # lets go of the interpreter, for long enough to be taken

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    thread = threading.Thread(target=go_on)
    thread.start()
    found = 0
    try:
        for _ in range(ROUNDS):
            before = moved
            call()
            found += moved - before > OFTEN
            if found == ENOUGH:
                break
    finally:
        done = True
        thread.join()
        sys.setswitchinterval(switch_s)
    return found == ENOUGH
