"""Calls with a deadline into stores that may never answer.

A stopped server process or an unreachable network file system blocks the caller inside the operating system, where no
timeout of ours reaches. Such a call therefore runs in a thread of its own: the caller gives up in time, and the thread
stays blocked until the store answers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from tenuto.concurrency.interruption import Latch
from tenuto.concurrency.worker_threads import foreground_threads
from tenuto.errors import DeadlineExceeded, RankStoreLost, TenutoError, UsageError
from tenuto.record import record

Result = TypeVar("Result")
_LOOK_S: Final = 0.1
"""How often it is looked whether something makes progress."""


@record
class Clock:
    """This process's own monotonic clock, which tests replace. Clocks of two processes are never compared."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


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
        self.ended = Latch()
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
    """One thread that runs calls in order, each with a deadline.

    lost: converts an exception raised by a call into the error to raise.
    """

    def __init__(self, name: str, lost: Callable[[Exception], TenutoError]) -> None:
        self.name = name
        self._lost = lost
        self._calls: _Calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def call(self, work: Callable[[], Result], timeout: float) -> Result:
        """Returns what `work` returns; raises RankStoreLost after `timeout` seconds, or for an exception of `work`."""
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
        """Runs the queued calls, then `last`, and ends the thread; a later call starts a new one."""
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


def within(seconds: float, what: str, work: Callable[[], Result], *, subject: str) -> Result:
    """Returns or raises what `work` does; raises DeadlineExceeded, naming `what`, after `seconds`.

    After a timeout the work continues in its thread. At interpreter exit no thread can be started: then the work runs
    in the calling thread, without a deadline.
    """
    return begun_within(seconds, what, work, subject=subject)()


def begun_within(seconds: float, what: str, work: Callable[[], Result], *, subject: str) -> Callable[[], Result]:
    """Begins `work` in a thread, beside what the caller does until it calls what this returns: that does as `within`
    does, `seconds` from then."""
    call = _Call(work)
    try:
        foreground_threads.submit(call.run, f"tenuto-{what}")
    except RuntimeError:
        return work

    def outcome() -> Result:
        if not call.ended.wait(max(0.0, seconds)):
            raise DeadlineExceeded(
                f"{what} has not ended within {seconds:g} s: the store does not answer",
                subject=subject,
                hint="look at the store: is it mounted, does `ls` there answer?",
            )
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    return outcome


def while_moving(
    seconds: float, what: str, work: Callable[[], Result], moved_s: Callable[[], float], *, subject: str
) -> Result:
    """Returns or raises what `work` does, as `within`; raises DeadlineExceeded once it has made no progress for
    `seconds`. `moved_s`: when it last did, by the monotonic clock."""
    call = _Call(work)
    began_s = time.monotonic()
    try:
        foreground_threads.submit(call.run, f"tenuto-{what}")
    except RuntimeError:
        return work()
    while not call.ended.wait(_LOOK_S):
        if time.monotonic() - max(began_s, moved_s()) > seconds:
            raise DeadlineExceeded(
                f"{what} has not got on for {seconds:.3g} s: the store does not answer",
                subject=subject,
                hint="look at the store: is it mounted, does `ls` there answer?",
            )
    if call.error is not None:
        raise call.error
    return call.result  # type: ignore[return-value]
