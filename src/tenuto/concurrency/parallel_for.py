"""Runs a function over items on a few threads, in order, until one call fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

Item = TypeVar("Item")

READ_THREADS: Final = 8
"""Concurrent range reads: a device is fast only with several requests queued, and waiting threads cost nothing."""
COPY_THREADS: Final = 4
"""Concurrent range copies where nothing is read: memory bandwidth is the limit."""


def parallel_for(work: Callable[[Item], None], items: Sequence[Item], threads: int) -> None:
    """Runs `work` for each item on up to `threads` threads; a single item runs in the calling thread.

    Raises the first exception of `work` once all threads have stopped.
    """
    if len(items) <= 1:
        for item in items:
            work(item)
        return
    waiting = iter(items)
    failed = threading.Event()

    def take() -> None:
        # `next` on an iterator is atomic in the interpreter, and cheaper than a future for each item.
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
