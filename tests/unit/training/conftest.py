from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.tiny_training import gate, place
from tenuto.training import exit_status, preemption

__all__ = ["gate", "place"]


@pytest.fixture(autouse=True)
def _failures_on_purpose_do_not_end_the_test_run() -> Iterator[None]:
    yield
    exit_status._ending.failures.clear()


@pytest.fixture(autouse=True)
def _trainings_that_nobody_closes_watch_no_signals_of_later_tests() -> Iterator[None]:
    yield
    for watch in reversed(list(preemption._installed)):
        watch.restore()
    for number in exit_status.ENDED_BY:
        if signal.getsignal(number) == exit_status.end_with_status:
            signal.signal(number, signal.SIG_DFL)
