"""Retention beside training: what goes wrong in it is told, and the next commit tries again."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tenuto.engine.save.rank_group import SoloGroup
from tenuto.errors import StoreUnavailable
from tenuto.events import Emitter
from tenuto.policy import keep
from tenuto.policy.keep import CheckpointFacts, KeepPolicy, Opinion
from tenuto.repo.ownership.claim import Attempt, claim
from tenuto.repo.repository import Repo
from tenuto.store.memory import MemoryStore
from tenuto.training import retention_worker as tidying_module
from tenuto.training.retention_worker import RetentionWorker
from tenuto.training.tier_worker import TierWorker


class Broken(KeepPolicy):
    """A policy of somebody's own, with a mistake in it."""

    def judge(self, history: Sequence[CheckpointFacts]) -> list[Opinion]:
        raise KeyError("val_loss")


@pytest.fixture
def attempt() -> Iterator[Attempt]:
    found = claim(Repo.create_or_open(MemoryStore(secrets.token_hex(8))), "main", None)
    yield found
    found.release()


Make = Callable[..., RetentionWorker]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def make(attempt: Attempt, told: list[str]) -> Make:
    def built(policy: KeepPolicy, *, then: Callable[[], None] = lambda: None) -> RetentionWorker:
        def warn(message: str) -> None:
            told.append(message)
            then()

        group = SoloGroup()
        tiers = TierWorker(attempt.repo, "main", policy, emitter=Emitter(), report=warn, group=group)
        return RetentionWorker(attempt.repo, emitter=Emitter(), warn=warn, group=group, tiers=tiers)

    return built


def test_a_policy_that_raises_is_told_and_asked_again_after_the_next_commit(
    attempt: Attempt, make: Make, told: list[str]
) -> None:
    tidying = make(Broken())
    for times in (1, 2):
        tidying.after_commit(attempt, 1)
        assert tidying.join(30)
        assert told == ["retention of run 'main' did not finish: KeyError('val_loss')"] * times


def test_a_store_that_fails_does_not_end_retention(
    attempt: Attempt, make: Make, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*words: Any, **more: Any) -> None:
        raise StoreUnavailable("the store does not answer", subject="s3")

    monkeypatch.setattr(tidying_module, "plan_retention", unreachable)
    tidying = make(keep.latest(1))
    assert tidying.now(attempt) == 0
    tidying.after_commit(attempt, 1)
    assert tidying.join(30)
    assert told == ["retention of run 'main' did not finish: the store does not answer"] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_round_that_ends_its_thread_is_followed_by_another(
    attempt: Attempt, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[threading.Thread] = []

    def ended(self: RetentionWorker, attempt: Attempt, **_: object) -> int:
        rounds.append(threading.current_thread())
        raise SystemExit

    monkeypatch.setattr(RetentionWorker, "now", ended)
    tidying = make(keep.latest(1))
    for _ in range(2):
        tidying.after_commit(attempt, 1)
        assert tidying.join(30)
    assert len(set(rounds)) == 2


def test_a_thread_that_could_not_say_that_it_ended_is_not_waited_for(make: Make) -> None:
    tidying = make(keep.latest(1))
    tidying._rounds._thread = threading.Thread(target=lambda: None)
    tidying._rounds._thread.start()
    assert tidying.join(30)


def test_where_thousands_are_kept_a_round_follows_several_commits_and_the_last_of_all(
    attempt: Attempt, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidying = make(keep.latest(1))
    rounds: list[Attempt] = []
    monkeypatch.setattr(tidying, "_retain", lambda attempt, *, everything: rounds.append(attempt) or 0)
    monkeypatch.setattr(type(tidying._catalog), "known", 3 * tidying_module.PUT_OFF)
    for step in range(1, 4):
        tidying.after_commit(attempt, step)
    assert rounds == [] and tidying._rounds._thread is None
    tidying.after_commit(attempt, 4)
    thread = tidying._rounds._thread
    assert thread is None or thread.join(30) is None
    assert len(rounds) == 1
    tidying.after_commit(attempt, 5)
    assert len(rounds) == 1
    assert tidying.join(30) and len(rounds) == 2
    assert tidying.join(30) and len(rounds) == 2


@pytest.mark.parametrize("policy", [keep.all(), keep.latest(3) | keep.all()])
def test_a_policy_that_keeps_everything_has_no_rounds(
    attempt: Attempt, make: Make, policy: KeepPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidying = make(policy)
    monkeypatch.setattr(tidying_module, "plan_retention", pytest.fail)
    tidying.after_commit(attempt, 1)
    assert tidying.join(30) and tidying.now(attempt) == 0
    assert attempt.repo.observer is None


def test_a_round_that_is_just_being_started_is_waited_for(
    attempt: Attempt, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidying = make(keep.latest(1))
    starting, asked = threading.Event(), threading.Event()
    start = threading.Thread.start

    def held(thread: threading.Thread) -> None:
        if thread.name == "tenuto-retention":
            starting.set()
            asked.wait(1)  # `join` runs meanwhile; it cannot say that it waits for the lock
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", held)
    committing = threading.Thread(target=tidying.after_commit, args=(attempt, 1))
    committing.start()
    assert starting.wait(30)
    assert tidying.join(30)  # raises RuntimeError if it joins a thread that has not begun
    asked.set()
    committing.join(30)
    assert tidying.join(30)
