"""What Tenuto does in several threads of one process, in turns: copies that are put side by side, and tidying beside
saves. Whoever waits for another thread gives up the turn, so that nobody holds it and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from campaigns.rank_crashes.scheduler import HANGS_S, Scheduler
from tenuto.store.wrappers import fan_out


class Lock:
    """As threading.RLock, for threads of one process that take turns."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._holder, self._times, self._waiting = 0, 0, 0

    def __enter__(self) -> None:
        while self._times and self._holder != self._scheduler.number:
            self._waiting += 1
            self._scheduler.sleep(self._scheduler.number, HANGS_S)
            self._waiting -= 1
        self._holder = self._scheduler.number
        self._times += 1

    def __exit__(self, *raised: object) -> None:
        self._times -= 1
        if self._waiting:
            self._scheduler.posted()


class Condition:
    """As threading.Condition. What is done with it held has no turn in it, so that nobody else acts meanwhile."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass

    def wait(self) -> None:
        self._scheduler.sleep(self._scheduler.number, HANGS_S)

    def wait_for(self, met: Callable[[], bool]) -> None:
        while not met():
            self.wait()

    def notify_all(self) -> None:
        self._scheduler.posted()


class Thread:
    """As threading.Thread, as far as copies need it."""

    def __init__(self, scheduler: Scheduler, target: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._scheduler = scheduler
        self._work = partial(target, *args)

    def start(self) -> None:
        self._under_way = self._scheduler.in_background(self._work)

    def join(self) -> None:
        while not self._under_way.over:
            self._scheduler.sleep(self._scheduler.number, HANGS_S)
        self._scheduler.done(self._under_way)


@contextmanager
def scheduled_copies(scheduler: Callable[[], Scheduler]) -> Iterator[None]:
    """Within the block copies that are put side by side are put in these turns."""

    def thread(*, target: Callable[..., object], args: tuple[Any, ...], name: str) -> Thread:
        return Thread(scheduler(), target, args)

    beneath = SimpleNamespace(Condition=lambda: Condition(scheduler()), Thread=thread)
    with mock.patch.object(fan_out, "threading", beneath):
        yield
