"""Handing out work to a few threads, in order, until one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

Item = TypeVar("Item")

READ_THREADS: Final = 8
"""Ranges read at once: a device is fast only with several requests before it, and threads that wait cost nothing."""
COPY_THREADS: Final = 4
"""Ranges copied at once where no read is made: memory is the limit."""


def parallel_for(work: Callable[[Item], None], items: Sequence[Item], threads: int) -> None:
    """Does `work` for each item, several at once; a single one in this thread. What one raises is raised here, once no
    thread works on."""
    if len(items) <= 1:
        for item in items:
            work(item)
        return
    waiting = iter(items)
    failed = threading.Event()

    def take() -> None:
        # Taking from an iterator is one step of the interpreter. A future for each item would cost more than that.
        for item in waiting:
            if failed.is_set():
                return
            try:
                work(item)
            except BaseException:
                failed.set()
                raise

    count = min(threads, len(items))
    with ThreadPoolExecutor(count, thread_name_prefix="tenuto-read") as pool:
        workers = [pool.submit(take) for _ in range(count)]
        try:
            for worker in workers:
                worker.result()
        except BaseException:
            failed.set()
            raise
