"""Worker threads: reusable ones, loops on a few of them, background priority; and work without garbage collection.

Starting a thread costs the training thread up to a millisecond, because `start` returns only after the new thread has
been scheduled. Handing work to an idle thread costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final, NamedTuple, ParamSpec, TypeVar

from tenuto.concurrency.interruption import Latch, undisturbed

MAX_IDLE: Final = 4
"""Idle threads kept for reuse in each pool."""
IDLE: Final = "tenuto-idle"
"""The name of an idle thread."""


class BackgroundWork:
    """A piece of work that another thread runs and that never raises; joins like a started thread."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.name = name
        self._work: Callable[[], None] | None = work
        self._ended = Latch()
        self._claimed = threading.Lock()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def withdraw(self) -> bool:
        """Returns whether no thread has begun the work; then none ever will."""
        if not self._claimed.acquire(blocking=False):
            return False
        self._ended.set()
        return True

    def do(self) -> None:
        work, self._work = self._work, None  # whoever keeps this object must not keep the work alive
        if not self._claimed.acquire(blocking=False):
            return
        try:
            if work is not None:
                work()
        finally:
            del work
            self._ended.set()


class WorkerThreads:
    """A pool of worker threads of one priority: a thread that has lowered its priority must not serve other work.

    `foreground`: a thread that was started by one of low priority, and has it from there, is not used again.
    """

    def __init__(self, *, foreground: bool = False) -> None:
        self._foreground = foreground
        self._idle: list[tuple[SimpleQueue[BackgroundWork | None], threading.Thread]] = []
        self._guard = threading.Lock()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def submit(self, work: Callable[[], None], name: str) -> BackgroundWork:
        """Runs `work` on a pool thread, which carries `name` meanwhile. The work must not raise.

        Raises RuntimeError at interpreter exit, when no thread can be started any more.
        """
        given = BackgroundWork(work, name)
        self.run(given)
        return given

    def run(self, given: BackgroundWork) -> None:
        """As `submit`, for work that its giver may withdraw, should this raise."""
        with undisturbed:
            with self._guard:
                queue = self._idle.pop()[0] if self._idle else None
            if queue is None:
                queue = SimpleQueue()
                threading.Thread(target=self._serve, args=(queue,), name=given.name, daemon=True).start()
            queue.put(given)

    def end_idle(self) -> None:
        """Ends the idle threads, and waits for that: for a trainer that expects to find no thread behind it."""
        with undisturbed:
            with self._guard:
                idle, self._idle = self._idle, []
            for queue, thread in idle:
                queue.put(None)
                thread.join()

    def _serve(self, queue: SimpleQueue[BackgroundWork | None]) -> None:
        own = threading.current_thread()
        while (given := queue.get()) is not None:
            own.name = given.name
            given.do()
            del given
            own.name = IDLE
            if self._foreground and _is_behind_training():
                return
            with self._guard:
                if len(self._idle) >= MAX_IDLE:
                    return
                self._idle.append((queue, own))

    def _reset_after_fork(self) -> None:
        """Resets the pool in a forked child, which has none of the threads."""
        self._idle = []
        self._guard = threading.Lock()


foreground_threads = WorkerThreads(foreground=True)
"""Runs work at training's priority: work that somebody waits for, and copies that an update waits for."""
background_threads = WorkerThreads()
"""Runs work at background priority."""


def end_idle_threads() -> None:
    """Ends the threads that wait for more work."""
    for pool in (foreground_threads, background_threads):
        pool.end_idle()


# --------------------------------------------------------------------------------------------------
# Loops over items on a few threads.

Item = TypeVar("Item")

MOST_READ_THREADS: Final = 8
MOST_COPY_THREADS: Final = 4


class LoopThreads(NamedTuple):
    """How many threads the loops of one process have.

    read: concurrent range reads: a device is fast only with several requests queued, and waiting threads cost little.
    copy: concurrent range copies where nothing is read: memory bandwidth is the limit.
    """

    read: int
    copy: int

    @classmethod
    def of(cls, processes: int, *, waiting: int = 0) -> LoopThreads:
        """Returns the threads of each of `processes` that work at the same time on this machine: a few for each core
        that it has. More only take the cores from each other, at every hand-over of the interpreter's lock.
        `waiting`: how many reads at once a store needs whose reads are mostly waiting; 0 for others."""
        own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else math.inf
        cores = min(own, (os.cpu_count() or 1) / processes)  # each process may be bound to cores of its own
        read, copy = math.ceil(4 * cores), math.ceil(2 * cores)
        return cls(max(min(max(read, 2), MOST_READ_THREADS), waiting), min(copy, MOST_COPY_THREADS))


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


# --------------------------------------------------------------------------------------------------
# Background priority: writing threads use the processor and the disk that training leaves idle.
#
# A thread that takes a core from a framework's thread pool delays the whole pool at every barrier: its cost is its own
# time multiplied by the number of cores. Only Linux gives each thread its own priority; elsewhere nothing changes.

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


def _is_behind_training() -> bool:
    """Returns whether the calling thread's CPU priority is below that of the process."""
    if sys.platform != "linux":
        return False
    own, process = threading.get_native_id(), os.getpid()
    return os.getpriority(os.PRIO_PROCESS, own) > os.getpriority(os.PRIO_PROCESS, process)


# --------------------------------------------------------------------------------------------------
# Work that creates thousands of small, long-lived objects, during which the garbage collector is paused.

P = ParamSpec("P")
R = TypeVar("R")


def gc_paused(work: Callable[P, R]) -> Callable[P, R]:
    """Returns `work` wrapped to run with the garbage collector off, which halves the time of a full state walk."""

    @functools.wraps(work)
    def paused(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return work(*args, **kwargs)
        gc.disable()
        try:
            return work(*args, **kwargs)
        finally:
            gc.enable()

    return paused
