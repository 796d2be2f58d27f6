"""What asks for a save every so many minutes goes on counting across a crash, from when the line was last saved."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.memory_training import Life, live, shared_memory
from tenuto import every
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")

MINUTES = 10


@pytest.fixture(autouse=True)
def _root() -> Iterator[None]:
    with shared_memory():
        yield


def minutes_later(minutes: float) -> Callable[[], None]:
    """In the process that calls it, it is so much later."""

    def set_forward() -> None:
        now, now_ns = time.monotonic, time.monotonic_ns
        time.monotonic = lambda: now() + minutes * 60
        time.monotonic_ns = lambda: now_ns() + int(minutes * 60e9)

    return set_forward


def lived(where: Path, minutes: float, *, kill: int) -> Life:
    """A process that is started so many minutes after the first, and killed when that step is done."""
    life = live(where, kill=kill, save=every(minutes=MINUTES), before=minutes_later(minutes))
    assert life.killed and max(life.digests) == kill
    return life


def saved(where: Path) -> list[tuple[int, int]]:
    """Attempt and step of all that is in the store."""
    repo = Repo.open(open_store(where))
    return [(number, step) for number in range(1, 5) for step in repo.committed("main", number)]


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "ckpts"


def test_minutes_since_the_start_are_those_of_the_process_before_too(where: Path) -> None:
    lived(where, 0, kill=3)
    second = lived(where, MINUTES + 1, kill=5)
    assert second.began == 3 and second.source.startswith("from memory")
    assert saved(where) == [(2, 4)], "its first step is due, and no other"


def test_a_crash_alone_is_no_reason(where: Path) -> None:
    lived(where, 0, kill=3)
    assert lived(where, MINUTES / 2, kill=5).began == 3
    assert saved(where) == []


def test_a_job_that_crashes_every_few_minutes_reaches_the_store(where: Path) -> None:
    for number, kill in enumerate((3, 5, 7, 9)):
        lived(where, number * 0.4 * MINUTES, kill=kill)
    assert saved(where) == [(4, 8)]


def test_what_was_saved_in_between_counts(where: Path) -> None:
    lived(where, 0, kill=3)
    assert lived(where, MINUTES + 1, kill=5).began == 3
    assert lived(where, 1.5 * MINUTES, kill=7).began == 5
    assert lived(where, 2 * MINUTES + 2, kill=9).began == 7
    assert saved(where) == [(2, 4), (4, 8)]
