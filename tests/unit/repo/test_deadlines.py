"""Work that is waited for, and not for ever."""

from __future__ import annotations

import threading

import pytest

from tenuto.concurrency import deadlines
from tenuto.concurrency.deadlines import within
from tenuto.concurrency.interruption import Latch
from tenuto.concurrency.worker_threads import WorkerThreads
from tenuto.errors import DeadlineExceeded, StoreError


def test_what_the_work_returns_and_raises_comes_out() -> None:
    assert within(60, "counting", lambda: 3, subject="s") == 3
    with pytest.raises(StoreError, match="gone"):
        within(60, "counting", lambda: (_ for _ in ()).throw(StoreError("gone")), subject="s")


def test_i8_work_that_hangs_is_named() -> None:
    come_back = threading.Event()
    try:
        with pytest.raises(DeadlineExceeded, match="the last beat has not ended within 0 s") as caught:
            within(0, "the last beat", lambda: come_back.wait(60), subject="main")
    finally:
        come_back.set()
    assert caught.value.subject == "main"
    assert caught.value.hint


def test_where_no_thread_can_be_started_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(deadlines, "foreground_threads", WorkerThreads())  # no thread is kept from before
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert within(0, "counting", threading.current_thread, subject="s") is threading.current_thread()


def test_the_work_has_a_thread_of_its_own_that_keeps_no_interpreter_alive() -> None:
    def look() -> tuple[str, bool]:
        return threading.current_thread().name, threading.current_thread().daemon

    assert within(60, "counting", look, subject="s") == ("tenuto-counting", True)


def test_a_deadline_that_has_passed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float | None] = []
    come_back, here, wait = threading.Event(), threading.current_thread(), Latch.wait

    def recorded(event: Latch, timeout: float | None = None) -> bool:
        if threading.current_thread() is not here or timeout is None:
            return wait(event, timeout)
        waited.append(timeout)
        return False

    monkeypatch.setattr(Latch, "wait", recorded)
    try:
        for seconds in (-5.0, 0.0, 0.5, 3.0):
            with pytest.raises(DeadlineExceeded) as caught:
                within(seconds, "counting", lambda: come_back.wait(60), subject="s")
            assert caught.value.message == (f"counting has not ended within {seconds:g} s: the store does not answer")
            assert caught.value.hint == "look at the store: is it mounted, does `ls` there answer?"
    finally:
        come_back.set()
    assert waited == [0.0, 0.0, 0.5, 3.0]


def test_whatever_the_work_raises_is_raised_here() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        within(60, "counting", stop, subject="s")
