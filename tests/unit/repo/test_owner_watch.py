"""What a watch says of an owner, and what a lease puts, keeps and gives back."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import replace
from typing import Any

import pytest

from tenuto.concurrency.deadlines import Clock
from tenuto.concurrency.process import this_process
from tenuto.errors import DeadlineExceeded, StoreError, StoreUnavailable
from tenuto.model.ids import CheckpointId
from tenuto.model.records import AttemptRecord
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.small_records import LeaseRecord, decode_lease, encode_lease
from tenuto.repo.ownership import lease as lease_module
from tenuto.repo.ownership import owner_watch as watch_module
from tenuto.repo.ownership.claim import claim
from tenuto.repo.ownership.lease import BEAT_S, TTL_S, Lease, read_last
from tenuto.repo.ownership.owner_watch import OwnerFinding, OwnerWatch, owned_here, release_ownership, take_ownership
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes

SLOW = 3600.0


def beat(repo: Repo, record: AttemptRecord, number: int, **fields: Any) -> None:
    lease = LeaseRecord(number, record.id, record.parent, False, False)
    data = encode_lease(replace(lease, **fields), record.run, record.number, repo.id)
    repo.store.put_if_absent(
        object_names.numbered(object_names.lease_directory(record.run, record.number), number), Bytes(data), token="x"
    )


class Time:
    now = 100.0

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda seconds: None)


def test_a_run_that_nobody_claimed_is_free(repo: Repo) -> None:
    assert OwnerWatch(repo, "gpt").inspect() == OwnerFinding("free", 0, None, "")


def test_a_lease_is_watched_on_the_watchers_own_clock(repo: Repo, make: Any) -> None:
    record = make.attempt(3)
    beat(repo, record, 5)
    time = Time()
    watch = OwnerWatch(repo, "GPT", clock=time.clock(), ttl_s=10)
    assert watch.inspect() == OwnerFinding("unknown", 3, record, "its lease is being watched")
    time.now += 9
    assert watch.inspect().verdict == "unknown"
    beat(repo, record, 6)
    assert watch.inspect() == OwnerFinding("alive", 3, record, "its lease moves")
    time.now += 9.9
    assert watch.inspect().verdict == "alive"
    time.now += 0.1
    assert watch.inspect() == OwnerFinding("dead", 3, record, "its lease has not moved for 10 s")


def test_time_in_which_the_store_answers_nobody_tells_nothing_of_an_owner(
    repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make.attempt(1)
    beat(repo, record, 5)
    time = Time()
    watch = OwnerWatch(repo, "gpt", clock=time.clock(), ttl_s=10)

    def look(taking: float) -> OwnerFinding:
        def slow(*words: Any) -> Any:
            time.now += taking
            return read_last(*words)

        with monkeypatch.context() as patched:
            patched.setattr(watch_module, "read_last", slow)
            return watch.inspect()

    assert look(1.0).verdict == "unknown"
    assert look(60.0).verdict == "unknown"
    time.now += 9.5
    assert look(1.0).verdict == "unknown", "what it has read may be as old as its beginning"
    assert look(0.0) == OwnerFinding("dead", 1, record, "its lease has not moved for 10 s")


def test_a_newer_owner_is_watched_anew(repo: Repo, make: Any) -> None:
    make.attempt(1)
    time = Time()
    watch = OwnerWatch(repo, "gpt", clock=time.clock(), ttl_s=10)
    watch.inspect()
    time.now += 10
    assert watch.inspect().verdict == "dead"
    second = make.attempt(2)
    assert watch.inspect() == OwnerFinding("unknown", 2, second, "its lease is being watched")
    time.now += 9
    assert watch.inspect().verdict == "unknown"
    time.now += 1
    assert watch.inspect().verdict == "dead"


def test_the_usual_patience_is_five_beats() -> None:
    assert (BEAT_S, TTL_S) == (3.0, 15.0)


def test_a_released_lease_ends_its_own_attempt_only(repo: Repo, make: Any) -> None:
    record = make.attempt(1)
    beat(repo, record, 1, released=True, id="ab" * 16)
    assert OwnerWatch(repo, "gpt").inspect().verdict == "unknown", "it is another attempt's"
    beat(repo, record, 2, released=True)
    assert OwnerWatch(repo, "gpt").inspect() == OwnerFinding("dead", 1, record, "it has released its lease")


def test_a_damaged_record_with_a_released_lease_is_dead(repo: Repo, make: Any) -> None:
    record = make.attempt(1)
    beat(repo, record, 1, released=True)
    make.damage(object_names.attempt_name("gpt", 1))
    assert OwnerWatch(repo, "gpt").inspect() == OwnerFinding("dead", 1, None, "it has released its lease")


def test_what_this_very_process_holds_is_known(repo: Repo, make: Any) -> None:
    record = make.attempt(1, owner=this_process())
    assert OwnerWatch(repo, "gpt").inspect() == OwnerFinding("dead", 1, record, "this process has closed it")
    take_ownership(repo, "gpt", 1, repo)
    assert owned_here(repo, "gpt", 1)
    assert not owned_here(repo, "gpt", 2) and not owned_here(repo, "other", 1)
    assert OwnerWatch(repo, "gpt").inspect() == OwnerFinding("here", 1, record, "which has not closed it")
    release_ownership(repo, "gpt", 1)
    release_ownership(repo, "gpt", 1)
    assert not owned_here(repo, "gpt", 1)


def test_a_process_of_this_host_is_judged_by_itself(repo: Repo, make: Any) -> None:
    ended = make.attempt(1, owner=replace(this_process(), started="1"))
    assert OwnerWatch(repo, "gpt").inspect() == OwnerFinding("dead", 1, ended, "its process has ended")
    from tenuto.concurrency import process

    parent = process._inspect(os.getppid())
    assert parent is not None
    running = make.attempt(2, owner=replace(this_process(), pid=os.getppid(), started=parent.started))
    assert OwnerWatch(repo, "gpt").inspect() == OwnerFinding("alive", 2, running, "its process is running")


def test_an_attempt_without_a_record_counts_if_it_committed(repo: Repo, make: Any) -> None:
    first = make.attempt(1)
    make.attempt(2)
    make.checkpoint(2, 10)
    repo.store.delete([object_names.attempt_name("gpt", 2)])
    assert OwnerWatch(repo, "gpt").inspect() == OwnerFinding("unknown", 2, None, "its lease is being watched")
    repo.store.delete([CheckpointId("gpt", 2, 10).manifest])
    assert OwnerWatch(repo, "gpt").inspect().record == first


# -- leases -----------------------------------------------------------------------------------------------------------


def test_the_newest_beat_that_can_be_read_is_told_beside_the_counter(repo: Repo, make: Any) -> None:
    record = make.attempt(1)
    assert read_last(repo, "gpt", 1) == (0, None)
    for number in (9, 10, 11):
        beat(repo, record, number, closed=number == 10)
    assert read_last(repo, "gpt", 1) == (11, LeaseRecord(11, record.id, None, False, False))
    make.damage(object_names.numbered(object_names.lease_directory("gpt", 1), 11))
    assert read_last(repo, "gpt", 1) == (11, LeaseRecord(10, record.id, None, True, False))
    for number in (9, 10):
        make.damage(object_names.numbered(object_names.lease_directory("gpt", 1), number))
    assert read_last(repo, "gpt", 1) == (11, None)


def test_a_beat_says_what_its_attempt_says(repo: Repo, make: Any) -> None:
    make.attempt(1)
    parent = make.checkpoint(1, 10)
    record = make.attempt(2, parent)
    lease = Lease(repo, record, interval_s=SLOW)
    lease.beat()
    lease.mark_closed()
    assert read_last(repo, "gpt", 2) == (2, LeaseRecord(2, record.id, parent, True, False))
    lease.release()
    assert read_last(repo, "gpt", 2) == (3, LeaseRecord(3, record.id, parent, True, True))
    data = repo.store.get("runs/gpt/a0002/lease/3.json", limit=10_000)
    assert decode_lease(data, "gpt", 2, 3, repo.id).released


def test_the_beating_thread_is_named_and_ends_with_the_release(repo: Repo, make: Any) -> None:
    lease = Lease(repo, make.attempt(1), interval_s=SLOW)
    lease.start()
    thread = lease._thread
    assert thread is not None and thread.name == "tenuto-lease-gpt-1" and thread.daemon
    lease.release()
    assert not thread.is_alive()


def test_a_lease_that_is_taken_up_again_beats_again(repo: Repo, make: Any) -> None:
    record = make.attempt(1)
    lease = Lease(repo, record, interval_s=SLOW)
    lease.start()
    lease.resume()
    assert read_last(repo, "gpt", 1)[0] == 1, "it has not been released"
    lease.release()
    lease.resume()
    lease.resume()
    assert read_last(repo, "gpt", 1) == (3, LeaseRecord(3, record.id, None, True, False))
    thread = lease._thread
    assert thread is not None and thread.is_alive()
    lease._last_beat()  # of the release before, where the store has answered only now
    assert read_last(repo, "gpt", 1)[0] == 3
    lease.release()
    assert read_last(repo, "gpt", 1) == (4, LeaseRecord(4, record.id, None, True, True))
    assert not thread.is_alive()


def test_a_lease_that_cannot_be_taken_up_again_says_so(repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: Any, name: str, data: bytes, *, token: str) -> Any:
        raise StoreUnavailable("away", subject=name)

    lease = Lease(repo, make.attempt(1), interval_s=SLOW)
    lease.beat()
    lease.release()
    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
        patch.setattr(objects, "put", refuse)
        lease.resume()
    lease.release()
    last = read_last(repo, "gpt", 1)[1]
    assert last is not None and last.released, "the beat that failed may be there"


def test_a_release_that_hangs_is_given_up_and_named(repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    come_back = threading.Event()

    def hang(*arguments: Any, **named: Any) -> None:
        come_back.wait(60)  # and puts nothing then: its location is being removed

    asked: list[float] = []
    within = lease_module.within

    def noted(seconds: float, *arguments: Any, **named: Any) -> Any:
        asked.append(seconds)
        return within(0.0, *arguments, **named)

    monkeypatch.setattr(lease_module, "within", noted)
    monkeypatch.setattr(objects, "put", hang)
    for number, timeout in ((1, None), (2, 4.0)):
        lease = Lease(repo, make.attempt(number), interval_s=SLOW)
        with pytest.raises(DeadlineExceeded, match=f"giving back attempt {number} of run gpt") as caught:
            lease.release(timeout)
        assert caught.value.subject == "gpt"
    come_back.set()
    assert asked == [10.0, 4.0]


def test_a_release_that_fails_is_told_to_whoever_releases(
    repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: Any, name: str, data: bytes, *, token: str) -> Any:
        raise StoreUnavailable("away", subject=name)

    troubles: list[Any] = []
    lease = Lease(repo, make.attempt(1), interval_s=SLOW, trouble=troubles.append)
    monkeypatch.setattr(objects, "put", refuse)
    lease.start()
    assert [error.message for error in troubles] == ["away"], "a beat that fails ends no training"
    with pytest.raises(StoreError, match="away"):
        lease.release()
    lease.release()


def test_a_failing_beat_without_anybody_to_tell_is_passed_over(
    repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: Any, name: str, data: bytes, *, token: str) -> Any:
        raise StoreUnavailable("away", subject=name)

    lease = Lease(repo, make.attempt(1), interval_s=SLOW)
    with monkeypatch.context() as patch:
        patch.setattr(objects, "put", refuse)
        lease.start()
        with pytest.raises(StoreUnavailable):
            lease.beat()
    lease.release()


def test_after_the_release_nothing_beats(repo: Repo, make: Any) -> None:
    lease = Lease(repo, make.attempt(1), interval_s=SLOW)
    lease.beat()
    lease.release()
    lease._try_beat()
    assert read_last(repo, "gpt", 1)[0] == 2


@pytest.mark.parametrize("held", [False, True])
def test_an_earlier_attempt_of_this_process_has_ended_once_it_is_closed(
    repo: Repo, make: Any, release: list[Any], held: bool
) -> None:
    """Of a save that was never finished everything goes then; before, its process may put more, and somebody has to
    come back for it."""
    from tenuto.repo.ownership.claim import claim

    make.attempt(1, owner=this_process())
    if held:
        take_ownership(repo, "gpt", 1, repo)
    id, save_id = make.begin(1, 10)
    make.data(id, save_id)
    make.attempt(2, owner=replace(this_process(), started="1"))
    release.append(claim(repo, "gpt", None, beat_s=SLOW))
    release_ownership(repo, "gpt", 1)
    assert make.names(id.directory) == (["begin.json", "manifest.json"] if held else ["manifest.json"])
    last = read_last(repo, "gpt", 3)[1]
    assert last is not None and last.closed is not held


def test_what_nobody_in_this_process_holds_any_more_is_not_in_use(repo: Repo, release: list[Any]) -> None:
    """An interrupt between the claim and whoever was to hold it: as Ctrl-C in a notebook."""
    attempt = claim(repo, "gpt", None, beat_s=SLOW)
    number = attempt.number
    assert owned_here(repo, "gpt", number)
    lease = attempt._lease
    del attempt
    gc.collect()
    assert not owned_here(repo, "gpt", number)
    release.append(claim(repo, "gpt", None, beat_s=SLOW))  # else it beats on, into what is being removed
    assert release[0].number == number + 1
    assert lease is not None
    lease.release()
