"""When a signal that asks to leave is acted upon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tenuto.concurrency.interruption import undisturbed
from tenuto.training import exit_status
from tenuto.training.preemption import Preempted, PreemptionHandler


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def leaving(told: list[str]) -> Iterator[PreemptionHandler]:
    found = PreemptionHandler(told.append, catch=True)
    found.install()
    yield found
    found.restore()


def ask() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_that_disturbs_nothing_is_acted_upon_at_once(leaving: PreemptionHandler, told: list[str]) -> None:
    assert (leaving.watched, leaving.signal) == (True, None)
    ask()
    assert (leaving.signal, told) == ("SIGUSR1", ["SIGUSR1"])


def test_a_signal_within_what_must_not_be_disturbed_waits_for_its_end(
    leaving: PreemptionHandler, told: list[str]
) -> None:
    with undisturbed:
        ask()
        assert (leaving.signal, told) == ("SIGUSR1", [])
    assert told == ["SIGUSR1"]


def test_one_that_comes_before_something_fails_does_not_hide_the_failure(
    leaving: PreemptionHandler, told: list[str]
) -> None:
    with pytest.raises(ValueError), undisturbed:
        ask()
        raise ValueError
    assert told == []


def test_nothing_is_acted_upon_once_it_is_held_back(leaving: PreemptionHandler, told: list[str]) -> None:
    leaving.hold_back()
    ask()
    assert (leaving.signal, told) == ("SIGUSR1", [])


def test_it_leaves_with_the_status_that_schedulers_know(
    leaving: PreemptionHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_status._ending, "code", 0)
    ask()
    with pytest.raises(Preempted) as left:
        leaving.prepare_to_leave()
        leaving.leave()
    assert left.value.code == exit_status._ending.code == 128 + signal.SIGUSR1


def test_without_catching_there_is_no_signal(told: list[str]) -> None:
    leaving = PreemptionHandler(told.append, catch=False)
    before = signal.getsignal(signal.SIGUSR1)
    leaving.install()
    assert signal.getsignal(signal.SIGUSR1) == before
    with undisturbed:
        pass
    leaving.restore()
    assert (leaving.watched, leaving.signal, told) == (False, None, [])
