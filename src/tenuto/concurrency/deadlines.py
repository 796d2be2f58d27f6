"""Calls into a place that may never answer, in a thread of their own: who waits for one gives up in time.

A store whose process is stopped, or a network file system whose server is gone, holds the caller inside the operating
system, where no timeout of ours reaches. The thread stays there; further calls are refused in time until it is back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tenuto.concurrency.worker_threads import beside
from tenuto.errors import DeadlineExceeded, RankStoreLost, TenutoError, UsageError

Result = TypeVar("Result")


def seconds(value: object, what: str) -> float:
    """Returns `value` as a span of time above 0; UsageError, naming the argument `what`, if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(
            f"{what} takes a number of seconds above 0, not {value!r}",
            subject=what,
            hint="give seconds, such as 60",
        )
    return float(value)


class _Call(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self.work = work
        self.ended = threading.Event()
        self.given_up = False
        self.result: Result | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        if self.given_up:
            return
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        self.ended.set()


_Calls = queue.SimpleQueue[_Call[object] | None]


class DeadlineWorker:
    """One thread that makes calls one after another. `lost` makes the error of a fault that the place reported."""

    def __init__(self, name: str, lost: Callable[[Exception], TenutoError]) -> None:
        self.name = name
        self._lost = lost
        self._calls: _Calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def call(self, work: Callable[[], Result], timeout: float) -> Result:
        """What `work` returns. RankStoreLost after `timeout` seconds, or for what it raises."""
        call = _Call(work)
        self._put(call)  # type: ignore[arg-type]
        began = time.monotonic()
        if not call.ended.wait(max(0.0, timeout)):
            call.given_up = True
            raise RankStoreLost(
                f"{self.name}, where the ranks meet, has not answered for {time.monotonic() - began:.3g} s",
                subject=self.name,
                hint="look whether it is alive: is its process stopped, is the network or the file system gone?",
            )
        if isinstance(call.error, Exception) and not isinstance(call.error, TenutoError):
            raise self._lost(call.error) from call.error
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """The thread makes the calls that were asked for, then `last`, and ends; further calls take another one."""
        with self._starting:
            if self._thread is not None:
                self._calls.put(_Call[object](last))
                self._calls.put(None)
                self._thread, self._calls = None, queue.SimpleQueue()

    def _put(self, call: _Call[object]) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self._calls,), name="tenuto-ranks-board", daemon=True
                )
                self._thread.start()
            self._calls.put(call)


def _work(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call.run()


# --------------------------------------------------------------------------------------------------
# Work in the store that a training waits for, and not for ever: a store that hangs answers no timeout of its own.
#
# The work goes on in its thread; whoever waited for it goes on without it, and says so.


def within(seconds: float, what: str, work: Callable[[], Result], *, subject: str) -> Result:
    """What `work` returns or raises. DeadlineExceeded, naming `what`, if it has done neither after `seconds`.

    At the interpreter's end no thread can be started: then the work is done here, without a deadline.
    """
    ended: list[tuple[Result | None, BaseException | None]] = []

    def run() -> None:
        try:
            ended.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            ended.append((None, error))

    try:
        under_way = beside.submit(run, f"tenuto-{what}")
    except RuntimeError:
        return work()
    under_way.join(max(0.0, seconds))
    if not ended:
        raise DeadlineExceeded(
            f"{what} has not ended within {seconds:g} s: the store does not answer",
            subject=subject,
            hint="look at the store: is it mounted, does `ls` there answer?",
        )
    result, error = ended[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
