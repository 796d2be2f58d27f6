"""When a signal may interrupt the main thread, and waits that such an exception leaves whole."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tenuto.concurrency import interruption
from tenuto.concurrency.interruption import Latch, interrupt, interruptible, undisturbed, when_undone
from tenuto.concurrency.worker_threads import BackgroundWork


@pytest.fixture(autouse=True)
def _undisturbed_by_others() -> Iterator[None]:
    assert not interruption._main.depth and not interruption._main.due and not interruption._main.interrupted
    yield
    interruption._reset_after_fork()


@pytest.fixture
def sigint_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupt())
    yield
    signal.signal(signal.SIGINT, before)


def test_what_a_handler_asks_for_is_done_where_the_outermost_block_ends() -> None:
    done: list[str] = []
    with undisturbed:
        with undisturbed:
            when_undone(lambda: done.append("asked within"))
        assert done == []
    assert done == ["asked within"]
    when_undone(lambda: done.append("asked outside"))
    assert done == ["asked within", "asked outside"]


def test_it_does_not_hide_an_error_and_is_done_after_the_next_block() -> None:
    done: list[str] = []
    with pytest.raises(ValueError), undisturbed:
        when_undone(lambda: done.append("asked"))
        raise ValueError
    assert done == []
    with undisturbed:
        pass
    assert done == ["asked"]


def test_the_end_of_a_loop_is_no_error() -> None:
    done: list[str] = []
    with pytest.raises(StopIteration), undisturbed:
        when_undone(lambda: done.append("asked"))
        raise StopIteration
    assert done == ["asked"]


def test_an_interrupt_is_raised_where_the_block_ends() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), undisturbed:
        interrupt()
        reached = True
    assert reached


def test_a_second_one_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), undisturbed:
        interrupt()
        interrupt()
        pytest.fail("it was held back")
    with undisturbed:
        pass  # the first one was raised with it


def test_one_that_is_held_back_is_raised_where_the_block_waits() -> None:
    latch = Latch()
    with pytest.raises(KeyboardInterrupt), undisturbed:
        interrupt()
        latch.wait(60)
        pytest.fail("it was held back")


def test_code_within_a_wait_may_be_undisturbed_again() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), undisturbed, interruptible():
        with undisturbed:
            interrupt()
            reached = True
        with interruptible():
            pytest.fail("it was held back")
    assert reached


def test_a_block_of_another_thread_holds_nothing_back() -> None:
    done: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with undisturbed:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    when_undone(lambda: done.append("asked"))
    assert done == ["asked"]
    leave.set()
    thread.join()


def test_an_interrupt_ends_a_wait_and_leaves_the_latch_whole(sigint_interrupts: None) -> None:
    latch = Latch()
    with pytest.raises(KeyboardInterrupt), undisturbed:
        threading.Timer(0, os.kill, (os.getpid(), signal.SIGINT)).start()
        latch.wait(60)
        pytest.fail("the wait went on")
    latch.set()
    latch.set()
    assert latch.wait(0) and latch.is_set()


def test_a_latch_wakes_all_that_wait() -> None:
    latch, woken = Latch(), []
    threads = [threading.Thread(target=lambda: woken.append(latch.wait(60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join()
    assert woken == [True] * 4
    assert not Latch().wait(0)


def test_work_that_is_withdrawn_never_begins_and_work_that_has_begun_is_not_withdrawn() -> None:
    done: list[str] = []
    given = BackgroundWork(lambda: done.append("work"), "work")
    assert given.withdraw() and not given.is_alive()
    given.do()
    assert done == []
    begun = BackgroundWork(lambda: done.append("work"), "work")
    begun.do()
    assert done == ["work"] and not begun.withdraw()


def test_an_interrupt_right_after_a_wait_leaves_the_latch_open_for_others() -> None:
    latch = Latch()
    lock = latch._lock

    class Interrupting:
        """A handler raises once the lock is taken, before the wait goes on."""

        release = lock.release

        def acquire(self, timeout: float) -> bool:
            latch.set()
            assert lock.acquire(timeout=timeout)
            raise KeyboardInterrupt

    latch._lock = Interrupting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        latch.wait(60)
    assert not lock.locked(), "who waits there as well goes on"


def test_a_child_that_was_forked_within_a_block_goes_on_as_outside_one() -> None:
    with undisturbed:
        pid = os.fork()
    if not pid:
        done: list[str] = []
        with undisturbed:
            when_undone(lambda: done.append("asked"))
            held_back = not done
        os._exit(0 if held_back and done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
