"""Threads that are kept for the next work."""

from __future__ import annotations

import os
import threading
import weakref

import pytest

from tenuto.concurrency.worker_threads import MAX_IDLE, BackgroundWork, LoopThreads, WorkerThreads


def ended(work: BackgroundWork) -> bool:
    work.join(60)
    return not work.is_alive()


def test_work_is_done_in_a_thread_that_has_its_name_and_keeps_no_interpreter_alive() -> None:
    found: list[threading.Thread] = []
    names: list[str] = []

    def look() -> None:
        found.append(threading.current_thread())
        names.append(found[-1].name)

    assert ended(WorkerThreads().submit(look, "tenuto-looking"))
    assert names == ["tenuto-looking"]
    assert found[0].daemon
    assert found[0] is not threading.current_thread()


def one_after_the_other(parked: WorkerThreads, count: int) -> set[int]:
    """The threads that do so much work, each begun when the one before has been parked again."""
    found: set[int] = set()
    for _ in range(count):
        assert ended(parked.submit(lambda: found.add(threading.get_ident()), "work"))
        until = threading.Event()
        while not parked._idle:
            until.wait(0.001)
    return found


def test_a_thread_is_used_again() -> None:
    assert len(one_after_the_other(WorkerThreads(), 20)) == 1


def test_work_does_not_wait_for_other_work_and_no_more_threads_are_kept_than_a_few() -> None:
    parked, all_here = WorkerThreads(), threading.Barrier(MAX_IDLE + 3)
    works = [parked.submit(lambda: all_here.wait(60) and None, "work") for _ in range(MAX_IDLE + 2)]
    all_here.wait(60)
    assert all(ended(work) for work in works)
    until = threading.Event()
    while len(parked._idle) < MAX_IDLE:
        until.wait(0.001)
    assert len(parked._idle) == MAX_IDLE


def test_a_forked_child_begins_with_threads_of_its_own() -> None:
    parked = WorkerThreads()
    one_after_the_other(parked, 1)
    child = os.fork()
    if not child:
        os._exit(0 if ended(parked.submit(lambda: None, "work")) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_was_worked_on_is_let_go_of_with_the_work() -> None:
    class Held:
        """Something large."""

    held = Held()
    seen = weakref.ref(held)

    def work(held: Held = held) -> None:
        assert held is not None

    parked = WorkerThreads()
    given = parked.submit(work, "work")
    del held, work
    assert ended(given)
    until = threading.Event()
    while not parked._idle:
        until.wait(0.001)
    assert seen() is None


@pytest.mark.parametrize(
    ("own", "of_node", "processes", "expected"),
    [
        (2, 2, 1, (8, 4)),  # alone on a small machine
        (2, 2, 2, (4, 2)),
        (2, 2, 4, (2, 1)),
        (64, 64, 1, (8, 4)),
        (64, 64, 8, (8, 4)),
        (8, 64, 8, (8, 4)),  # each bound to cores of its own, which are not divided again
        (1, 64, 64, (4, 2)),
        (16, 16, 62, (2, 1)),
    ],
)
def test_the_processes_of_a_node_divide_its_cores(
    own: int, of_node: int, processes: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(own)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: of_node)
    assert LoopThreads.of(processes) == expected
