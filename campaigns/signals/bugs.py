"""Bugs in how signals are handled, put in by name one at a time: the sweep has to find each, or it finds nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol
from unittest import mock

from campaigns.signals.campaign import Case, play, sites
from campaigns.signals.trainings import by_name
from tenuto.concurrency import interruption
from tenuto.engine.save.saver import Saver
from tenuto.training.saves import RunSaver

MOST: Final = 40
"""Cases that are played for one bug."""


class Patch(Protocol):
    def __call__(self) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class Bug:
    """`files`: the lines at which it is looked for, by training and mode."""

    name: str
    breaks: str
    patch: Patch
    training: str
    mode: str
    files: tuple[str, ...]


@contextmanager
def _nothing_held_back() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("__enter__", "__exit__"):
            stack.enter_context(mock.patch.object(interruption._Undisturbed, name, lambda *_: None))
        yield


@contextmanager
def _not_awaited() -> Iterator[None]:
    with (
        mock.patch.object(RunSaver, "wait_to_leave", lambda *_: None),
        mock.patch.object(RunSaver, "wait", lambda *_: None),
        mock.patch.object(Saver, "join", lambda *_: True),
    ):
        yield


@contextmanager
def _never_released() -> Iterator[None]:
    """A latch that a thread has waited at stays locked for the next one."""
    original = interruption.Latch.wait

    def wait(self: interruption.Latch, timeout: float | None = None) -> bool:
        found = original(self, timeout)
        self._happened = False
        return found

    with mock.patch.object(interruption.Latch, "wait", wait):
        yield


BUGS: Final = (
    Bug(
        "acted upon at once",
        "a handler waits for a thread that needs a lock which a frame below the handler holds",
        _nothing_held_back,
        "counted",
        "terminate",
        ("training/logged_metrics.py",),
    ),
    Bug(
        "nobody waits",
        "the process leaves with the save of its last step still in flight",
        _not_awaited,
        "own loop",
        "terminate",
        ("training/training_session.py", "engine/save/saver.py"),
    ),
    Bug(
        "waits for what has been",
        "who waits second for the end of a save waits for ever",
        _never_released,
        "own loop",
        "terminate",
        ("engine/save/handle.py", "training/saves.py"),
    ),
)


def cases_of(bug: Bug, seed: int) -> list[Case]:
    found = [
        Case(bug.training, bug.mode, site)
        for site, _ in sites(by_name(bug.training))
        if site.file.startswith(bug.files) and site.event == "line" and not site.writer
    ]
    random.Random(seed).shuffle(found)
    return found[:MOST]


def run_bugs(seed: int) -> list[dict[str, Any]]:
    """Seeds each bug, and plays cases until one has a fault."""
    results = []
    for bug in BUGS:
        what = cases_of(bug, seed)
        played, fault = 0, ""
        with bug.patch():
            for case in what:
                played += 1
                if faults := play(case).faults:
                    fault = f"{case}: {faults[0]}"
                    break
        results.append({"bug": bug.name, "breaks": bug.breaks, "caught": bool(fault), "cases": played, "by": fault})
    return results
