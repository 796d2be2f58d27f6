"""Topics on one board: no rank succeeds with another session's or topic's data, and the board does not fill up."""

from __future__ import annotations

import errno
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tenuto.concurrency.deadlines import Clock, DeadlineWorker
from tenuto.errors import RankFailed, RanksDisagree, RanksError, RanksMissing, RankStoreLost, UsageError
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import Deadline, Settings
from tenuto.ranks.detection import Solo
from tenuto.ranks.heartbeats import RankWatch, beat
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.ranks.kv.shared_files import SharedFiles, SharedFilesKVStore

QUICK = Settings(beat_s=0.01, dead_after_s=30.0, answer_s=5.0, probe_s=0.05)
PATIENT_S = 30.0


def job(kv_store, world_size, take_part, facts=None):
    """What `take_part` returns on each of the ranks, which are threads."""

    def run(rank):
        with Agreement.open(
            ThreadRanks(rank, world_size, kv_store), facts or {"run": "main"}, PATIENT_S, QUICK
        ) as agreement:
            return take_part(agreement)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def test_alone_everything_is_agreed_at_once_and_nothing_is_left() -> None:
    before = set(threading.enumerate())
    with Agreement.open(Solo(), {"run": "main"}, 0.0) as agreement:
        assert not set(threading.enumerate()) - before
        kv_store = agreement.session.kv_store.inner
        for step in range(5):
            with agreement.round("save", step) as round:
                assert round.all_gather(b"data", 0.0) == [b"data"]
            with agreement.round("vote") as round:
                assert not round.vote(False, "no", 0.0) and round.check() is None
        assert kv_store.keys() == []
        agreement.request_save("a signal")
        proposal = agreement.at(7, 0.0)
        assert proposal is not None and (proposal.step, proposal.reason) == (7, "a signal")
        assert agreement.at(8, 0.0) is None


def test_the_board_holds_no_more_keys_after_many_topics() -> None:
    kv_store = InProcessKVStore()

    def take_part(agreement):
        for _ in range(200):
            with agreement.round("save") as round:
                round.all_gather(b"", PATIENT_S)
            with agreement.round("word") as round:
                round.broadcast(b"") if agreement.is_coordinator else round.receive(PATIENT_S)

    job(kv_store, 3, take_part)
    assert len(kv_store.keys()) < 64 * 4 + 30
    job(kv_store, 3, lambda agreement: None)
    assert len(kv_store.keys()) < 20


def test_numbers_rise() -> None:
    with Agreement.open(Solo(), {}, 0.0) as agreement:
        agreement.round("save", 5)
        with pytest.raises(UsageError, match="save 5 comes after save 5"):
            agreement.round("save", 5)
        assert agreement.round("save").number == 6


def test_an_error_in_a_topic_fails_it_for_all_and_is_raised_unchanged() -> None:
    def take_part(agreement):
        if agreement.rank == 1:
            with pytest.raises(ZeroDivisionError), agreement.round("save"):
                1 / 0  # noqa: B018
            return None
        with pytest.raises(RankFailed, match="save 0: rank 1 has failed: ZeroDivisionError") as caught:
            with agreement.round("save") as round:
                round.all_gather(b"", PATIENT_S)
        return caught.value.ranks

    assert job(InProcessKVStore(), 3, take_part) == [(1,), None, (1,)]


def test_who_is_missing_is_named_with_what_it_last_reported() -> None:
    kv_store, ended, ready = InProcessKVStore(), threading.Event(), threading.Barrier(3)

    def take_part(agreement):
        agreement.report("reading the index")
        with agreement.round("begun") as round:
            round.all_gather(b"", PATIENT_S)
        if agreement.rank == 2:
            agreement.report("writing the pack")
            key = agreement.session.beat_key(2)
            while b"writing the pack" not in (kv_store.get(key, timeout=PATIENT_S) or b""):
                time.sleep(0.001)
            ready.wait(PATIENT_S)
            return ended.wait(PATIENT_S)
        with pytest.raises(RanksMissing) as caught, agreement.round("save") as round:
            round.send(b"")
            ready.wait(PATIENT_S)  # the time begins when only the one is missing, and has said what it does
            try:
                wait = round.gather if agreement.is_coordinator else round.receive
                wait(0.5, "receipts of step 7")
            finally:
                if agreement.rank == 0:
                    ended.set()
        assert (caught.value.ranks, caught.value.phase) == ((2,), "receipts of step 7")
        return caught.value.message

    messages = job(kv_store, 3, take_part)[:2]
    for message in messages:
        assert "rank 2 (last reported 'writing the pack'" in message and "receipts of step 7" in message


def test_an_announcement_cannot_follow_a_failure() -> None:
    def take_part(agreement):
        round = agreement.round("save")
        if agreement.rank == 1:
            assert round.fail("too late")
        with pytest.raises(RankFailed):
            round.receive(PATIENT_S)
        with pytest.raises(RankFailed):
            round.check()
        if agreement.is_coordinator:
            with pytest.raises(RankFailed):
                round.broadcast(b"all is well")
        return True

    assert job(InProcessKVStore(), 2, take_part) == [True, True]


def test_only_the_coordinator_announces() -> None:
    def take_part(agreement):
        with agreement.round("save") as round:
            if agreement.rank == 1:
                with pytest.raises(UsageError, match="only the coordinator can broadcast, and this is rank 1"):
                    round.broadcast(b"")
            return round.all_gather(b"", PATIENT_S)

    assert job(InProcessKVStore(), 2, take_part) == [[b"", b""]] * 2


def test_what_is_no_message_of_the_topic_is_refused() -> None:
    kv_store = InProcessKVStore()

    def take_part(agreement):
        round = agreement.round("save")
        if agreement.rank == 1:
            with agreement.round("other") as other:
                other.send(b"")
                stolen = kv_store.get(other.message_key(1), timeout=1)
            kv_store.put(round.message_key(1), stolen, timeout=1)
            return None
        with pytest.raises(RanksDisagree, match="'other/0'"):
            round.gather(PATIENT_S)

    job(kv_store, 2, take_part)


def test_a_call_that_never_returns_is_given_up() -> None:
    forever, line = threading.Event(), DeadlineWorker("a place", RankStoreLost)
    for _ in range(2):
        with pytest.raises(RankStoreLost, match="a place, where the ranks meet, has not answered"):
            line.call(lambda: forever.wait(PATIENT_S), 0.05)
    forever.set()
    assert line.call(lambda: 7, PATIENT_S) == 7


class Told:
    def __init__(self) -> None:
        self.now_s = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, lambda seconds: None)


def test_silence_counts_only_while_it_is_watched() -> None:
    told, kv_store = Told(), InProcessKVStore()
    watch = RankWatch(kv_store, lambda rank: f"beat/{rank}", Settings(1.0, 10.0, 1.0, 1.0, told.clock))
    kv_store.put("beat/1", beat(1, "writing", None, {}), timeout=1)

    def look(at: float) -> list[int]:
        told.now_s = at
        watch.read([1], 1.0)
        return watch.lost([1])

    assert [look(at) for at in (0.0, 4.0, 8.0, 9.9)] == [[]] * 4
    assert look(100.0) == []  # the observer was itself stopped meanwhile
    assert [look(at) for at in (104.0, 108.0, 110.0)] == [[], [], [1]]
    assert "last reported 'writing', 110.0 s ago; no sign of life for 10.0 s" in watch.describe([1])
    kv_store.put("beat/1", beat(2, "writing", "it was asked to", {}), timeout=1)
    assert look(112.0) == [] and watch.departed([1]) == {1: "it was asked to"}


def test_a_deadline_is_shared() -> None:
    told = Told()
    deadline = Deadline(5.0, told.clock)
    told.now_s = 4.0
    assert (deadline.remaining_s, deadline.passed) == (1.0, False)
    told.now_s = 6.0
    assert (deadline.remaining_s, deadline.passed) == (0.0, True)


@pytest.mark.parametrize("seed", range(12))
def test_random_failures_and_restarts_never_mix_sessions_or_topics(seed: int) -> None:
    """Incarnations of 2 to 5 ranks on one board; ranks fail or leave anywhere. What is heard names who wrote it."""
    source, kv_store = random.Random(seed), InProcessKVStore()
    settings = Settings(beat_s=0.01, dead_after_s=30.0, answer_s=5.0, probe_s=0.05)
    complete = 0
    for _ in range(4):
        world_size = source.randint(2, 5)
        seeds = [source.random() for _ in range(world_size)]
        with ThreadPoolExecutor(world_size) as pool:
            ends = list(pool.map(partial(incarnation, kv_store, seeds, settings), range(world_size)))
        sessions = {session for session, _ in ends if session}
        assert len(sessions) <= 1
        for number in range(8):
            outcomes = {outcomes[number] for _, outcomes in ends if number in outcomes}
            assert len(outcomes) <= 1, outcomes  # one failed and another not, or two that heard different things
            complete += outcomes == {"complete"}
    assert complete


AWAY = 0.08
"""How often a rank does not come."""


def incarnation(kv_store, seeds, settings, rank):
    """The session that this rank was in, and what came of each topic that it waited for to the end."""
    source, outcomes, session = random.Random(seeds[rank]), {}, None
    ranks = ThreadRanks(rank, len(seeds), kv_store)
    try:
        if source.random() < AWAY:
            return None, outcomes
        # Only for who does not come at all the others wait no longer than they must.
        all_come = all(random.Random(seed).random() >= AWAY for seed in seeds)
        with Agreement.open(ranks, {"run": "main"}, PATIENT_S if all_come else 0.6, settings) as agreement:
            session = agreement.session.id
            for number in range(8):
                fate = source.random()
                if fate < 0.05:
                    raise ConnectionResetError("killed")
                try:
                    with agreement.round("save") as round:
                        if fate < 0.12:
                            round.fail("a fault")
                        heard = round.all_gather(f"{session} {number} {rank}".encode(), 10.0)
                    assert heard == [f"{session} {number} {each}".encode() for each in range(len(seeds))]
                    outcomes[number] = "complete"
                except RanksError:
                    outcomes[number] = "failed"
    except (ConnectionResetError, RanksError):
        pass
    return session, outcomes


def test_posts_of_ranks_that_gave_up_unheard_are_not_believed_after_a_gap() -> None:
    """What a coordinator finds that was itself stopped, with the board: all have posted, and none waits any more."""
    settings = Settings(beat_s=0.01, dead_after_s=30.0, answer_s=0.2, probe_s=0.05)
    kv_store, asleep, gave_up, judged = InProcessKVStore(), threading.Event(), threading.Event(), threading.Event()

    class Frozen(InProcessKVStore):
        """The other rank's way to the board, which does not answer while the coordinator sleeps."""

        def __getattribute__(self, name):
            if name in ("get", "get_many", "put", "put_if_absent", "delete"):
                if asleep.is_set():
                    raise RankStoreLost("the board does not answer")
                return getattr(kv_store, name)
            return super().__getattribute__(name)

    def run(rank):
        shared = Frozen() if rank else kv_store
        with Agreement.open(ThreadRanks(rank, 2, shared), {"run": "main"}, PATIENT_S, settings) as agreement:
            with agreement.round("first") as round:
                round.all_gather(b"", PATIENT_S)
            round = agreement.round("save")
            if rank:
                round.send(b"")
                asleep.set()
                with pytest.raises(RankStoreLost):
                    round.receive(0.1)
                gave_up.set()
                asleep.clear()
                assert judged.wait(PATIENT_S)
                return (1,)
            round.send(b"")
            assert gave_up.wait(PATIENT_S)
            guard = agreement.session.stall_guard
            with guard._lock:  # else a beat that is under way may write its own time over it
                guard._last_beat_at -= 10.0  # simulates a pause of the coordinator
            with pytest.raises(RanksMissing, match="gave up") as caught:
                round.gather(PATIENT_S)
            judged.set()
            return caught.value.ranks

    with ThreadPoolExecutor(2) as pool:
        left = pool.submit(run, 1)
        assert run(0) == (1,)
        assert left.result() == (1,)


def test_ranks_that_meet_again_and_again_leave_no_thread_behind(tmp_path) -> None:
    def working():
        return [thread for thread in threading.enumerate() if thread.name == "tenuto-ranks-board"]

    def run(rank):
        with Agreement.open(SharedFiles(tmp_path, rank, 2), {"run": "main"}, PATIENT_S, QUICK) as agreement:
            with agreement.round("end") as round:
                round.all_gather(b"", PATIENT_S)
            return working()

    before = working()
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            assert any(pool.map(run, range(2)))
    for thread in working():
        if thread not in before:
            thread.join(PATIENT_S)
    assert set(working()) <= set(before)


def test_a_line_that_was_closed_takes_another_thread() -> None:
    line, last = DeadlineWorker("a place", RankStoreLost), []
    assert line.call(threading.get_ident, PATIENT_S) == line.call(threading.get_ident, PATIENT_S)
    thread = line._thread
    line.close(lambda: last.append(threading.current_thread()))
    thread.join(PATIENT_S)
    assert last == [thread] and not thread.is_alive()
    assert line.call(threading.current_thread, PATIENT_S) is not thread
    line.close()


@pytest.mark.parametrize("call", ["write_bytes", "replace"])
def test_a_directory_that_takes_no_more_is_not_filled_with_names(tmp_path, monkeypatch, call) -> None:
    kv_store = SharedFilesKVStore(tmp_path)
    original = getattr(Path, call)

    def full(path, *words):
        if call == "write_bytes":
            original(path, b"")
        raise OSError(errno.ENOSPC, "no space left on device")

    kv_store.put("beat/0", b"1", timeout=PATIENT_S)
    with monkeypatch.context() as patched:
        patched.setattr(Path, call, full)
        with pytest.raises(RankStoreLost, match="no space left"):
            kv_store.put("beat/0", b"2", timeout=PATIENT_S)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "beat"]
    assert kv_store.get("beat/0", timeout=PATIENT_S) == b"1"
    kv_store.close()
