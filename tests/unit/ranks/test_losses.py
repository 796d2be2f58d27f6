"""Who is dead, stopped, silent or slow, as a rank concludes it; and since when the store does not answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.rank_threads import on_ranks
from tenuto.concurrency.deadlines import Clock
from tenuto.concurrency.process import _inspect, this_process
from tenuto.errors import RankStoreLost
from tenuto.model.records import Owner
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.common_step import CommonStep
from tenuto.ranks.contract import Settings
from tenuto.ranks.heartbeats import RankWatch, beat
from tenuto.ranks.host_processes import HostProcesses, by_host, decode_host
from tenuto.ranks.kv.in_process import InProcessKVStore
from tenuto.ranks.kv.watched import WatchedKVStore
from tenuto.ranks.session import Session


class Told:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.settings = Settings(1.0, 15.0, 10.0, 1.0, Clock(lambda: self.now_s, lambda seconds: None))


def forked() -> Owner:
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    found = None
    while found is None:
        found = _inspect(pid)
    return replace(this_process(), pid=pid, started=found.started)


@pytest.fixture
def child() -> Iterator[Owner]:
    owner = forked()
    yield owner
    try:
        os.kill(owner.pid, signal.SIGKILL)
        os.waitpid(owner.pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def kill(owner: Owner) -> None:
    os.kill(owner.pid, signal.SIGKILL)
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # nobody has reaped it


def stop(owner: Owner) -> None:
    os.kill(owner.pid, signal.SIGSTOP)
    os.waitpid(owner.pid, os.WUNTRACED)


def watching(told: Told, owner: Owner) -> tuple[InProcessKVStore, RankWatch, Callable[[float], list[int]]]:
    kv_store = InProcessKVStore()
    watch = RankWatch(kv_store, lambda rank: f"beat/{rank}", told.settings)
    watch.processes = HostProcesses(told.settings, {1: owner})
    kv_store.put("beat/1", beat(1, "writing", None, {}), timeout=1)

    def look(at: float) -> list[int]:
        told.now_s = at
        watch.refresh(1.0)
        watch.read([1], 1.0)
        return watch.lost([1])

    return kv_store, watch, look


def test_a_killed_process_is_dead_at_the_next_beat(child: Owner) -> None:
    _, watch, look = watching(Told(), child)
    assert look(0.0) == []
    kill(child)
    assert look(0.5) == [], "a process is looked at once a beat"
    assert look(1.0) == [1] and watch.dead() == [1] and watch.dead(for_s=1.0) == []
    assert f"its process {child.pid} has ended" in watch.describe([1])


def test_a_process_that_left_before_it_ended_is_not_dead(child: Owner) -> None:
    kv_store, watch, look = watching(Told(), child)
    assert look(0.0) == []
    kv_store.put("beat/1", beat(2, "", "it has closed", {}), timeout=1)
    kill(child)
    assert look(1.0) == [] and watch.dead() == [] and watch.departed([1]) == {1: "it has closed"}


def test_a_stopped_process_is_lost_after_the_silence_and_back_when_it_goes_on(child: Owner) -> None:
    _, watch, look = watching(Told(), child)
    assert look(0.0) == []
    stop(child)
    assert [look(float(at)) for at in range(1, 15)] == [[]] * 14
    assert look(15.0) == [1] and watch.dead() == [] and "has been stopped for 14.0 s" in watch.describe([1])
    os.kill(child.pid, signal.SIGCONT)
    os.waitpid(child.pid, os.WCONTINUED)
    assert look(17.0) == []


def test_nothing_is_concluded_about_a_stopped_process_from_a_pause_of_ones_own(child: Owner) -> None:
    _, _, look = watching(Told(), child)
    stop(child)
    assert look(0.0) == [] and look(100.0) == []


def test_a_silent_process_that_runs_is_slow_and_one_elsewhere_is_lost(child: Owner) -> None:
    _, _, look = watching(Told(), child)
    assert [look(float(at)) for at in range(0, 60, 5)] == [[]] * 12
    _, _, elsewhere = watching(Told(), replace(child, host="another"))
    assert [elsewhere(float(at)) for at in (0, 5, 10, 14, 15)] == [[]] * 4 + [[1]]


def test_a_heartbeat_says_who_is_dead_on_another_host() -> None:
    kv_store, watch, look = watching(Told(), replace(this_process(), host="another"))
    kv_store.put("beat/1", beat(2, "writing", None, {}, dead=[3]), timeout=1)
    assert look(0.0) == [] and watch.dead() == [3] and watch.lost([1, 3]) == [3]
    kv_store.put("beat/1", beat(3, "writing", None, {}), timeout=1)
    assert look(1.0) == [] and watch.dead() == [3], "for good"


def test_ranks_that_end_when_the_store_is_lost_are_not_what_was_lost(child: Owner) -> None:
    told = Told()
    inner = Silent(told)
    watch = RankWatch(inner, lambda rank: f"beat/{rank}", told.settings)
    watch.processes = HostProcesses(told.settings, {1: child})
    watch.refresh(1.0)
    inner.silent = inner.lasting = True
    kill(child)
    told.now_s = 2.0
    watch.refresh(1.0)
    assert watch.dead() == []


def test_ranks_learn_the_processes_of_their_own_host_alone() -> None:
    me = this_process()
    there = replace(me, host="another")
    unknown = replace(me, boot="")
    hosts = by_host({0: me, 1: there, 2: me, 3: there, 4: replace(me, host="a third"), 5: unknown, 6: unknown})
    assert [sorted(decode_host(raw, 2)) for raw in hosts.values()] == [[0], [1, 3]]
    assert decode_host(None, 0) == {}

    def known(agreement: Agreement) -> list[int]:
        processes = agreement.session.watch.processes
        processes.refresh()
        return [rank for rank in range(3) if processes.runs(rank)]

    assert on_ranks(3, known) == [[1, 2], [0, 2], [0, 1]]


class Silent(InProcessKVStore):
    """Answers or not, as it is told; a request that is not answered takes all its time."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.told, self.lasting, self.silent = told, False, False
        self.limits: list[float] = []

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes | None]:
        self.limits.append(timeout)
        if self.silent:
            self.told.now_s += 0.0 if self.lasting else timeout
            error = RankStoreLost("no answer")
            error.lasting = self.lasting
            raise error
        return super().get_many(keys, timeout=timeout)


def ask(kv_store: WatchedKVStore) -> bool:
    try:
        kv_store.get_many(["key"], timeout=10.0)
    except RankStoreLost:
        return False
    return True


def test_a_store_that_answers_nobody_is_lost_after_the_silence_until_it_answers() -> None:
    told = Told()
    inner = Silent(told)
    kv_store = WatchedKVStore(inner, told.settings)
    assert ask(kv_store)
    inner.silent = True
    assert not ask(kv_store) and not kv_store.lost
    assert not ask(kv_store) and kv_store.lost and kv_store.gone is None
    assert not ask(kv_store)
    assert inner.limits[1:] == [10.0, 5.0, 1.0], "no request takes longer than the silence; then each takes a beat"
    inner.silent = False
    assert ask(kv_store) and not kv_store.lost


def test_a_store_is_gone_once_it_has_failed_for_good_for_two_beats() -> None:
    told = Told()
    inner = Silent(told)
    kv_store = WatchedKVStore(inner, told.settings)
    inner.silent = inner.lasting = True
    for _ in range(3):
        assert not ask(kv_store) and kv_store.lost
        assert kv_store.gone is None, "one request may fail for another reason"
    told.now_s += 2.0
    assert not ask(kv_store) and kv_store.gone is not None


def test_the_loss_of_a_session_names_the_rank_that_served_the_store() -> None:
    told = Told()
    inner: Any = Silent(told)
    inner.host_rank = 0
    session = Session("s", 1, 2, inner, told.settings)
    assert session.loss is None
    session.watch._dead[0] = 0.0
    loss = session.loss
    assert (
        isinstance(loss, RankStoreLost) and loss.lasting and loss.ranks == (0,) and "rank 0 serves it" in loss.message
    )


def test_a_lost_rank_is_not_waited_for() -> None:
    """Its step is void for the others, who keep the one that all have; it counts again when it is back."""
    back = threading.Barrier(3)

    def work(agreement: Agreement) -> list[int]:
        kept, found = CommonStep(agreement.session, 4), []
        lost = [2]
        agreement.session.watch.lost = lambda ranks: [rank for rank in ranks if rank in lost]  # type: ignore[method-assign]
        try:
            if agreement.rank != 2:
                kept.sealed(5)
                found.append(kept.settle(30))
            back.wait(30)
            lost.clear()
            kept.sealed(6)
            found.append(kept.settle(30))
            return found
        finally:
            with agreement.round("end") as round:
                round.all_gather(b"", 30)
            kept.close()

    assert on_ranks(3, work) == [[4, 6], [4, 6], [6]]


def test_a_rank_that_waits_says_for_whom() -> None:
    def work(agreement: Agreement) -> str:
        with agreement.round("put") as round:
            if agreement.rank == 0:
                round.send(b"")
                found: list[str] = []

                def read(timeout: float) -> list[bytes] | None:
                    found.append(agreement.session.waits_for)
                    came.set()
                    return original(timeout)

                original, round._read_messages = round._read_messages, read  # type: ignore[method-assign]
                round.gather(30, "put 0 (step 12)")
                round.broadcast(b"")
                assert agreement.session.waits_for == ""
                return found[0]
            assert came.wait(30)
            round.send(b"")
            round.receive(30)
            return ""

    came = threading.Event()
    assert on_ranks(2, work)[0].startswith("put 0 (step 12): rank 1 (")
