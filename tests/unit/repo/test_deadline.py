"""Work that is waited for, and not for ever."""

from __future__ import annotations

import threading

import pytest

from holdfast.errors import DeadlineExceeded, StoreError
from holdfast.repo.deadline import within


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

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert within(0, "counting", threading.current_thread, subject="s") is threading.current_thread()
