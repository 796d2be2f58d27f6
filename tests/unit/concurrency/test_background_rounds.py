"""Rounds of work in a thread of their own."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tenuto.concurrency.background_rounds import BackgroundRounds


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks of a process with threads
def test_a_forked_child_does_not_wait_for_a_round_that_is_not_its_own() -> None:
    begun, ends = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        ends.wait(60)

    rounds = BackgroundRounds("rounds", work)
    rounds.wake()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os._exit(0 if rounds.join(5) else 1)
    _, status = os.waitpid(child, 0)
    ends.set()
    assert rounds.join(60)
    assert os.waitstatus_to_exitcode(status) == 0
