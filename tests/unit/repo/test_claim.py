"""Claiming: who may own a run, when, and what becomes of the one before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tenuto.concurrency.deadlines import Clock
from tenuto.concurrency.process import judge, this_process
from tenuto.crashpoints import armed
from tenuto.errors import CheckpointNotFound, RunInUse, StoreUnavailable, Superseded
from tenuto.events import WaitingForOwner
from tenuto.model.ids import CheckpointId
from tenuto.model.records import AttemptRecord, Owner, Receipt
from tenuto.repo.commit import begin, commit
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.manifest import Aborted
from tenuto.repo.format.small_records import LeaseRecord, encode_lease
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import Attempt, claim, claim_newest
from tenuto.repo.ownership.lease import Lease, read_last
from tenuto.repo.ownership.owner_watch import OwnerFinding, OwnerWatch
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import is_tombstoned, put_tombstone
from tenuto.store.contract import Bytes

SLOW = 3600.0
"""Beats that do not come during a test."""


class Time:
    """A clock that moves when it is slept on; `each` runs at every sleep."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.each: Callable[[], None] = lambda: None
        self.clock = Clock(lambda: self.seconds, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.each()


@pytest.fixture
def time() -> Time:
    return Time()


Claim = Callable[..., Attempt]


@pytest.fixture
def take(repo: Repo, time: Time) -> Iterator[Claim]:
    """Claims without waiting in real time, and releases at the end."""
    made: list[Attempt] = []

    def act(parent: CheckpointId | None = None, *, run: str = "gpt", **options: Any) -> Attempt:
        observe = options.pop("observe", None) or OwnerWatch(repo, run, clock=time.clock)
        attempt = claim(repo, run, parent, observe=observe, beat_s=SLOW, **options)
        made.append(attempt)
        return attempt

    yield act
    for attempt in made:
        attempt.release()


def ended_process() -> Owner:
    """A process of this host that is dead and reaped."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    from tenuto.concurrency import process

    found = process._inspect(pid)
    os.close(write)
    os.waitpid(pid, 0)
    os.close(read)
    assert found is not None
    return replace(this_process(), pid=pid, started=found.started)


def beat(
    repo: Repo,
    record: AttemptRecord,
    number: int,
    *,
    closed: bool = False,
    released: bool = False,
    leaving: bool = False,
) -> None:
    data = encode_lease(
        LeaseRecord(number, record.id, record.parent, closed, released, leaving), record.run, record.number, repo.id
    )
    name = object_names.numbered(object_names.lease_directory(record.run, record.number), number)
    repo.store.put_if_absent(name, Bytes(data), token="x")


# -- liveness ---------------------------------------------------------------------------------------------------------


def test_this_process_is_alive_and_an_ended_one_is_dead() -> None:
    assert judge(this_process()) == "alive"
    assert judge(ended_process()) == "dead"


def test_a_reused_pid_is_another_process() -> None:
    assert judge(replace(this_process(), started="1")) == "dead"


def test_a_zombie_is_dead() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    from tenuto.concurrency import process

    found = process._inspect(pid)
    assert found is not None
    owner = replace(this_process(), pid=pid, started=found.started)
    assert judge(owner) == "alive"
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert judge(owner) == "dead"
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "elsewhere", [{"boot": "x"}, {"pid_namespace": "pid:[1]"}, {"host": "x"}, {"boot": ""}, {"started": ""}]
)
def test_a_process_elsewhere_is_unknown(elsewhere: dict[str, str]) -> None:
    assert judge(replace(this_process(), **elsewhere)) == "unknown"


def test_a_process_that_proc_hides_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.concurrency import process

    parent = replace(this_process(), pid=os.getppid(), started=_started(os.getppid()))
    monkeypatch.setattr(process, "_inspect", lambda pid: None)
    assert judge(parent) == "unknown"
    me = this_process()
    assert judge(replace(me, pid=2**31 - 1)) == "dead"
    assert judge(replace(me, pid=2**60)) == "dead"


# -- claiming ---------------------------------------------------------------------------------------------------------


def test_the_first_claim_is_attempt_one_and_says_who(repo: Repo, take: Claim) -> None:
    attempt = take()
    assert (attempt.run, attempt.number, attempt.parent) == ("gpt", 1, None)
    record = repo.attempt("gpt", 1)
    assert record == attempt.record
    assert record.owner == this_process()
    assert read_last(repo, "gpt", 1)[0] >= 1
    attempt.check()


def test_names_that_differ_in_case_are_one_run(take: Claim) -> None:
    take(run="GPT").release()
    assert take(run="Gpt").number == 2


def test_a_released_attempt_is_claimed_over_at_once(time: Time, take: Claim) -> None:
    first = take()
    first.release()
    assert take().number == 2
    assert time.seconds == 0
    with pytest.raises(Superseded, match="attempt 2 by process") as caught:
        first.check()
    assert caught.value.subject == "gpt"


def test_this_very_process_is_told_so_at_once(time: Time, take: Claim) -> None:
    take()
    with pytest.raises(RunInUse, match="this very process"):
        take()
    assert time.seconds == 0
    assert take(takeover=True).number == 2


def test_an_ended_process_is_claimed_over_at_once(make: Any, time: Time, take: Claim) -> None:
    make.attempt(1, owner=ended_process())
    assert take().number == 2
    assert time.seconds == 0


def test_a_live_process_is_waited_for_and_then_named(make: Any, time: Time, take: Claim) -> None:
    owner = replace(this_process(), pid=os.getppid(), started=_started(os.getppid()))
    make.attempt(1, owner=owner)
    told: list[WaitingForOwner] = []
    with pytest.raises(RunInUse, match=f"process {owner.pid} of ") as caught:
        take(wait_s=60.0, waiting=told.append)
    assert 60 <= time.seconds < 62
    assert "takeover=True" in str(caught.value)
    (waits,) = told
    assert (waits.run, waits.pid, waits.host, waits.state) == ("gpt", owner.pid, owner.host, "its process is running")
    assert 57 <= waits.seconds <= 58, "what is left of the minute after two seconds"
    assert take(takeover=True, wait_s=0.0).number == 2


def test_one_that_stays_is_waited_for_a_few_seconds_and_one_that_leaves_a_minute(
    repo: Repo, make: Any, time: Time, take: Claim
) -> None:
    owner = replace(this_process(), pid=os.getppid(), started=_started(os.getppid()))
    record = make.attempt(1, owner=owner)
    beat(repo, record, 1)

    def beats() -> None:
        last = read_last(repo, "gpt", 1)[0]
        if time.seconds > 3 * last:
            beat(repo, record, last + 1)

    time.each = beats
    with pytest.raises(RunInUse, match="its process is running"):
        take()
    assert 5 <= time.seconds < 6
    time.each = lambda: None
    beat(repo, record, read_last(repo, "gpt", 1)[0] + 1, leaving=True)
    time.seconds = 0
    with pytest.raises(RunInUse, match="it is leaving"):
        take()
    assert 60 <= time.seconds < 62


def test_a_killed_process_that_takes_long_to_vanish_is_waited_for(
    repo: Repo, make: Any, time: Time, take: Claim
) -> None:
    owner = replace(this_process(), pid=os.getppid(), started=_started(os.getppid()))
    record = make.attempt(1, owner=owner)
    beat(repo, record, 1)  # its last

    def gone() -> None:
        if time.seconds > 40:
            beat(repo, record, 2, released=True)
            time.each = lambda: None

    time.each = gone
    assert take().number == 2
    assert 40 < time.seconds < 42


def test_one_that_is_told_to_leave_meanwhile_is_waited_for(repo: Repo, make: Any, time: Time, take: Claim) -> None:
    owner = replace(this_process(), pid=os.getppid(), started=_started(os.getppid()))
    record = make.attempt(1, owner=owner)

    def step() -> None:
        last = read_last(repo, "gpt", 1)[0]
        if time.seconds > 3 and last == 0:
            beat(repo, record, 1, leaving=True)
        elif time.seconds > 30 and last == 1:
            beat(repo, record, 2, released=True)

    time.each = step
    assert take().number == 2
    assert 30 < time.seconds < 32


def _started(pid: int) -> str:
    from tenuto.concurrency import process

    found = process._inspect(pid)
    assert found is not None
    return found.started


def test_a_process_that_ends_while_waited_for_is_claimed_over(repo: Repo, make: Any, time: Time, take: Claim) -> None:
    owner = replace(this_process(), pid=os.getppid(), started=_started(os.getppid()))
    record = make.attempt(1, owner=owner)

    def close() -> None:
        if time.seconds > 3 and read_last(repo, "gpt", 1)[0] == 0:
            beat(repo, record, 1, released=True)

    time.each = close
    assert take().number == 2
    assert 3 < time.seconds < 5


def test_an_owner_elsewhere_is_dead_when_its_lease_does_not_move(
    repo: Repo, make: Any, time: Time, take: Claim
) -> None:
    beat(repo, make.attempt(1), 7)
    assert take().number == 2
    assert 15 <= time.seconds < 16


def test_an_owner_elsewhere_whose_lease_moves_is_alive(repo: Repo, make: Any, time: Time, take: Claim) -> None:
    record = make.attempt(1)
    beats = iter(range(1, 1000))
    time.each = lambda: beat(repo, record, next(beats))
    with pytest.raises(RunInUse, match="its lease moves"):
        take()
    assert 60 <= time.seconds < 62


def test_a_watch_begun_before_the_restore_has_decided_after_it(repo: Repo, make: Any, time: Time, take: Claim) -> None:
    beat(repo, make.attempt(1), 7)
    watch = OwnerWatch(repo, "gpt", clock=time.clock)
    assert watch.inspect().verdict == "unknown"
    time.seconds += 20
    assert take(observe=watch).number == 2
    assert time.seconds == 20


def test_a_store_too_slow_to_tell_is_not_asked_for_ever(
    repo: Repo, make: Any, time: Time, take: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(repo, make.attempt(1), 7)

    def slow(*words: Any) -> Any:
        time.seconds += 7
        return read_last(*words)

    monkeypatch.setattr("tenuto.repo.ownership.owner_watch.read_last", slow)
    with pytest.raises(RunInUse, match="its lease is being watched"):
        take()
    assert 120 <= time.seconds < 135


def test_no_waiting_at_all_still_needs_a_verdict(repo: Repo, make: Any, time: Time, take: Claim) -> None:
    beat(repo, make.attempt(1), 7)
    assert take(wait_s=0.0).number == 2
    assert time.seconds >= 15


def test_a_damaged_record_counts_as_an_owner_to_be_watched(make: Any, time: Time, take: Claim) -> None:
    make.attempt(4)
    make.damage(object_names.attempt_name("gpt", 4))
    assert take().number == 5
    assert time.seconds >= 15


def test_copies_and_unclaimed_directories_do_not_count(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(1, owner=ended_process())
    make.copy("runs/gpt/a0001", "runs/gpt/a0002")
    make.copy("runs/gpt/a0001", "runs/gpt/a0009")
    repo.store.put_if_absent("runs/gpt/a0012/lease/1.json", Bytes(b"x"), token="x")
    attempt = take()
    assert attempt.number == 3
    attempt.check()


def test_of_claims_that_race_one_wins(repo: Repo) -> None:
    results: list[object] = []
    barrier = threading.Barrier(6)

    def act() -> None:
        barrier.wait()
        try:
            results.append(claim(repo, "gpt", None, beat_s=SLOW))
        except RunInUse as error:
            results.append(error)

    threads = [threading.Thread(target=act) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [result for result in results if isinstance(result, Attempt)]
    assert [attempt.number for attempt in won] == [1]
    assert len(results) == 6
    won[0].release()


def test_who_looks_while_a_claim_is_being_put_finds_it_in_use(repo: Repo, take: Claim) -> None:
    found: list[OwnerFinding] = []
    with armed("attempt claimed", lambda: found.append(OwnerWatch(repo, "gpt").inspect())):
        take()
    assert [(one.verdict, one.number) for one in found] == [("here", 1)]


def test_a_claim_that_was_interrupted_is_nobodys_though_its_traceback_is_kept(repo: Repo, take: Claim) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with armed("attempt claimed", interrupt), pytest.raises(KeyboardInterrupt) as kept:
        take()
    assert kept.traceback
    assert OwnerWatch(repo, "gpt").inspect().verdict == "dead"
    assert take().number == 2


def test_i4_a_parent_that_is_gone_is_not_relied_on(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(1, owner=ended_process())
    for step in (10, 20):
        make.checkpoint(1, step)
    gone = CheckpointId("gpt", 1, 20)
    repo.store.delete([gone.manifest])
    with pytest.raises(CheckpointNotFound) as caught:
        take(gone)
    assert caught.value.subject == "gpt/a0001/20"
    # No attempt goes on from it: one would hide what was committed after it.
    assert repo.attempts("gpt") == [1]
    assert take(latest(repo, "gpt")).number == 2


def test_i4_a_parent_that_goes_right_before_the_claim_is_not_relied_on(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(1, owner=ended_process())
    first, going, last = (make.checkpoint(1, step) for step in (10, 20, 30))
    withdrawn: set[int] = set()
    with pytest.raises(CheckpointNotFound) as caught:
        take(going, before_put=lambda: repo.store.delete([going.manifest]), withdrawn=withdrawn)
    assert caught.value.subject == "gpt/a0001/20"
    # The attempt stands, with that parent and no commit: so the walk goes on below it, but for whoever made it.
    assert repo.attempt("gpt", 2).parent == going and withdrawn == {2}
    assert latest(repo, "gpt") == first
    assert latest(repo, "gpt", withdrawn=withdrawn) == last
    assert take(last).number == 3
    assert latest(repo, "gpt") == last


def test_i4_a_run_whose_newest_checkpoint_keeps_changing_is_not_claimed(repo: Repo, make: Any) -> None:
    make.attempt(1, owner=ended_process())
    stale = make.checkpoint(1, 10)
    asked: list[int] = []

    def again() -> tuple[CheckpointId | None, CheckpointId | None]:
        newest = latest(repo, "gpt")
        asked.append(make.checkpoint(1, 20 + len(asked)).step)
        return newest, newest

    make.checkpoint(1, 15)
    with pytest.raises(Superseded, match="keeps committing"):
        claim_newest(repo, "gpt", stale, stale, again=again)
    assert asked == [20, 21] and repo.attempts("gpt") == [1], "no claim was put"


def test_a_claim_from_a_checkpoint_that_is_being_removed_says_so(repo: Repo, make: Any) -> None:
    make.attempt(1, owner=ended_process())
    newest = make.checkpoint(1, 10)
    put_tombstone(repo, newest, reason="rm")
    with pytest.raises(CheckpointNotFound, match="being removed"):
        claim_newest(repo, "gpt", newest, newest, again=lambda: (newest, newest))


def test_i4_a_claim_whose_work_is_outdated_is_given_back_and_made_anew(repo: Repo, make: Any) -> None:
    make.attempt(1, owner=ended_process())
    newest, outdated, withdrawn = make.checkpoint(1, 10), [True, False], set[int]()
    attempt = claim_newest(
        repo,
        "gpt",
        newest,
        newest,
        again=lambda: (latest(repo, "gpt", withdrawn=withdrawn), newest),
        stale=lambda: outdated.pop(0),
        withdrawn=withdrawn,
    )
    attempt.release()
    assert (attempt.number, attempt.parent, withdrawn) == (3, newest, {2})


def test_whoever_claims_looks_again_when_the_owner_has_ended(repo: Repo, make: Any, time: Time, take: Claim) -> None:
    beat(repo, make.attempt(1), 7)
    looked: list[float] = []

    def look() -> None:
        looked.append(time.seconds)
        raise RunInUse("something newer")

    with pytest.raises(RunInUse, match="something newer"):
        take(before_put=look)
    assert len(looked) == 1 and looked[0] >= 15
    assert repo.attempts("gpt") == [1]


def test_an_owner_that_is_claimed_over_alive_is_not_looked_at_first(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(1, owner=replace(this_process(), pid=os.getppid(), started=_started(os.getppid())))
    looked: list[bool] = []
    assert take(takeover=True, before_put=lambda: looked.append(True)).number == 2
    assert not looked  # only the claim stops what it goes on committing


def test_i4_a_parent_under_a_tombstone_is_not_relied_on(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(1, owner=ended_process())
    id = make.checkpoint(1, 10)
    put_tombstone(repo, id, reason="rm")
    with pytest.raises(CheckpointNotFound, match="being removed"):
        take(id)
    assert is_tombstoned(repo, id)


def test_a_parent_that_was_never_there_is_refused_before_the_claim(repo: Repo, take: Claim) -> None:
    with pytest.raises(CheckpointNotFound):
        take(CheckpointId("gpt", 5, 10))
    assert repo.attempts("gpt") == []


def test_a_parent_in_another_run_is_a_fork(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(3, run="base")
    id = make.checkpoint(3, 10, run="base")
    assert take(id, run="fork").parent == id
    assert latest(repo, "fork") == id


def test_a_claim_that_crashes_right_after_leaves_a_lawful_attempt(
    repo: Repo, make: Any, take: Claim, time: Time
) -> None:
    make.attempt(1, owner=ended_process())
    id = make.checkpoint(1, 10)

    def die() -> None:
        raise KeyboardInterrupt

    with armed("attempt claimed", die), pytest.raises(KeyboardInterrupt):
        take(id)
    assert latest(repo, "gpt") == id
    assert take(id).number == 3


# -- what is closed ---------------------------------------------------------------------------------------------------


def test_unfinished_saves_are_marked_and_freed_and_can_commit_no_more(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(1, owner=ended_process())
    kept = make.checkpoint(1, 10)
    id, save_id = make.begin(1, 20)
    manifest, receipts = make.data(id, save_id)
    repo.store.put_if_absent(f"{id.directory}/mine.txt", Bytes(b"foreign"), token="x")
    before = make.names(kept.directory)
    take(kept)
    assert sorted(make.names(id.directory)) == ["manifest.json", "mine.txt"]
    mark = repo.mark(id)
    assert isinstance(mark, Aborted)
    assert mark.save_id == save_id
    assert make.names(kept.directory) == before
    make.data(id, save_id)
    with pytest.raises(Superseded):
        commit(repo, manifest, receipts)
    assert latest(repo, "gpt") == kept


def test_a_claim_looks_for_unfinished_saves_down_to_the_newest_checkpoint(
    repo: Repo, make: Any, take: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.attempt(1, owner=ended_process())
    kept = [make.checkpoint(1, step) for step in (10, 20, 30)]
    left = [make.begin(1, step)[0] for step in (40, 50)]
    seen: list[str] = []
    walk = repo.store.walk
    monkeypatch.setattr(repo.store, "walk", lambda prefix, **more: seen.append(prefix) or walk(prefix, **more))
    take(kept[-1])
    assert all(isinstance(repo.mark(id), Aborted) for id in left)
    assert kept[2].directory in seen and not {kept[0].directory, kept[1].directory} & set(seen)


def test_what_a_failed_save_has_left_goes_before_the_next_one_is_begun(repo: Repo, make: Any, take: Claim) -> None:
    """So a claim may take it that below a checkpoint nothing is unfinished."""
    attempt = take()
    failed = begin(attempt, 10, "ab" * 16, ["rank-00000.safetensors", "rank-00000.index"])
    repo.store.put_if_absent(f"{failed.directory}/rank-00000.safetensors", Bytes(b"left"), token="x")
    attempt.unclosed.add(failed)
    begin(attempt, 20, "cd" * 16, ["rank-00000.index"])
    assert make.names(failed.directory) == ["manifest.json"] and isinstance(repo.mark(failed), Aborted)
    assert attempt.unclosed == set()


def test_a_save_whose_beginning_failed_with_its_object_there_is_closed_too(
    repo: Repo, make: Any, take: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = take()
    put = repo.store.put_if_absent

    def answered_by_an_error(name: str, content: Any, *, token: str) -> Receipt:
        put(name, content, token=token)
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(repo.store, "put_if_absent", answered_by_an_error)
        with pytest.raises(StoreUnavailable):
            begin(attempt, 10, "ab" * 16, ["rank-00000.index"])
    failed = CheckpointId("gpt", attempt.number, 10)
    assert make.names(failed.directory) == ["begin.json"]
    begin(attempt, 20, "cd" * 16, ["rank-00000.index"])
    assert make.names(failed.directory) == ["manifest.json"] and isinstance(repo.mark(failed), Aborted)
    assert attempt.unclosed == set()


def test_a_crash_between_mark_and_freeing_is_finished_by_the_next_claim(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(1, owner=ended_process())
    id, save_id = make.begin(1, 20)
    make.data(id, save_id)

    def die() -> None:
        raise KeyboardInterrupt

    with armed("unfinished save marked aborted, objects still there", die), pytest.raises(KeyboardInterrupt):
        take()
    assert "rank-00000.safetensors" in make.names(id.directory)
    take()
    assert make.names(id.directory) == ["manifest.json"]


def test_a_checkpoint_in_the_trash_is_not_taken_for_an_unfinished_save(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(1, owner=ended_process())
    id = make.checkpoint(1, 10)
    data = repo.manifest_bytes(id)
    repo.store.put_if_absent(f"{object_names.trash_directory(id)}/manifest.json", Bytes(data), token="x")
    repo.store.delete([id.manifest])
    before = make.names(id.directory)
    take()
    assert make.names(id.directory) == before
    repo.store.put_if_absent(id.manifest, Bytes(data), token="x")
    assert repo.index(repo.manifest(id)).specs


def test_a_damaged_begin_is_reported_and_its_save_marked(repo: Repo, make: Any, take: Claim) -> None:
    make.attempt(1, owner=ended_process())
    id, save_id = make.begin(1, 20)
    make.data(id, save_id)
    make.damage(object_names.begin_name(id))
    told: list[str] = []
    take(report=told.append)
    assert any("begin.json" in text for text in told)
    assert isinstance(repo.mark(id), Aborted)
    assert "rank-00000.safetensors" in make.names(id.directory)


def test_leases_of_the_dead_go_once_everything_below_is_closed(repo: Repo, make: Any, take: Claim) -> None:
    for number in (1, 2, 3):
        beat(repo, make.attempt(number, owner=ended_process()), 5)
    take()
    assert [make.names(object_names.lease_directory("gpt", number)) for number in (1, 2, 3)] == [[], [], []]
    newest = read_last(repo, "gpt", 4)[1]
    assert newest is not None
    assert newest.closed


def test_a_claim_looks_no_further_than_the_one_that_closed_everything(repo: Repo, make: Any, take: Claim) -> None:
    first = make.attempt(1, owner=ended_process())
    old, _ = make.begin(1, 5)
    second = make.attempt(2, owner=ended_process())
    beat(repo, first, 1)
    beat(repo, second, 1, closed=True)
    take()
    assert repo.mark(old) is None


def test_an_owner_claimed_over_alive_is_closed_again_later(repo: Repo, make: Any, take: Claim) -> None:
    """It may put objects after its save was freed: so begin.json stays until it has ended."""
    old = take()
    id = begin(old, 10, "ab" * 16, ["rank-00000.safetensors", "rank-00000.index"])
    new = take(takeover=True)
    assert isinstance(repo.mark(id), Aborted)
    assert "begin.json" in make.names(id.directory)
    repo.store.put_if_absent(f"{id.directory}/rank-00000.safetensors", Bytes(b"late"), token="x")
    with pytest.raises(Superseded):
        old.check()
    old.release()
    new.release()
    take()
    assert make.names(id.directory) == ["manifest.json"]


def test_a_dead_removers_tombstone_is_taken_back(
    repo: Repo, make: Any, take: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.attempt(1, owner=ended_process())
    ids = [make.checkpoint(1, step) for step in (10, 20, 30, 40)]
    from tenuto.repo import tombstones

    owners = [
        ended_process(),
        make.repo.attempt("gpt", 1).owner,
        replace(this_process(), boot="x"),
        replace(this_process(), boot="x"),
    ]
    for id, owner, attempt in zip(ids, owners, (0, 1, 0, 1), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(tombstones, "this_process", lambda owner=owner: owner)
            put_tombstone(repo, id, reason="rm", attempt=attempt)
    take()
    # A person's removal from another host may still be going on; retention ended with its attempt.
    assert [is_tombstoned(repo, id) for id in ids] == [False, False, True, False]


def test_a_removal_cut_short_after_the_manifest_is_finished(
    repo: Repo, make: Any, take: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenuto.repo import tombstones
    from tenuto.repo.notes import add_note

    make.attempt(1, owner=ended_process())
    id, kept = make.checkpoint(1, 10), make.checkpoint(1, 20)
    add_note(repo, id, "metric", {"loss": 1.0})
    beat(repo, make.attempt(2, kept, owner=ended_process()), 1, closed=True)
    with monkeypatch.context() as patch:
        dead = ended_process()
        patch.setattr(tombstones, "this_process", lambda: dead)
        put_tombstone(repo, id, reason="retention", attempt=2)
    repo.store.delete([id.manifest])
    take(kept)
    assert make.names(id.directory) == ["manifest.json"]
    assert not is_tombstoned(repo, id)
    assert repo.committed("gpt", 1) == [20]


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_keeps_two_beats_and_says_when_it_is_released(repo: Repo, make: Any) -> None:
    lease = Lease(repo, make.attempt(1), interval_s=SLOW)
    lease.start()
    for _ in range(4):
        lease.beat()
    directory = object_names.lease_directory("gpt", 1)
    assert make.names(directory) == ["4.json", "5.json"]
    lease.release()
    lease.release()
    assert make.names(directory) == ["5.json", "6.json"]
    number, newest = read_last(repo, "gpt", 1)
    assert newest is not None
    assert (number, newest.released) == (6, True)


def test_a_lease_beats_by_itself_and_survives_a_store_that_fails(
    repo: Repo, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[object] = []
    enough, back = threading.Event(), threading.Event()
    real = objects.put

    def put(store: Any, name: str, data: bytes, *, token: str) -> Any:
        if len(failures) < 2:
            raise StoreUnavailable("away", subject=name)
        back.set()
        return real(store, name, data, token=token)

    def trouble(error: object) -> None:
        failures.append(error)
        if len(failures) == 2:
            enough.set()

    monkeypatch.setattr(objects, "put", put)
    lease = Lease(repo, make.attempt(1), interval_s=0.001, trouble=trouble)
    lease.start()
    assert enough.wait(30)
    assert back.wait(30)
    lease.release()
    assert read_last(repo, "gpt", 1)[0] >= 3


def test_a_forked_child_does_not_release_its_parents_lease(repo: Repo, take: Claim) -> None:
    attempt = take()
    pid = os.fork()
    if pid == 0:
        attempt.release()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    newest = read_last(repo, "gpt", 1)[1]
    assert newest is not None
    assert not newest.released
    attempt.check()


def test_a_forked_child_cannot_take_its_parents_run(repo: Repo, take: Claim) -> None:
    take()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            claim(repo, "gpt", None, wait_s=0.0)
        except RunInUse as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert f"process {os.getpid()} of".encode() in os.read(read, 1000)
    os.close(read)
    os.close(write)


def test_i11_a_superseded_owner_cannot_change_what_latest_means(repo: Repo, make: Any, take: Claim) -> None:
    old = take()
    id = begin(old, 10, "ab" * 16, ["rank-00000.safetensors", "rank-00000.index"])
    manifest, receipts = make.data(id, "ab" * 16)
    commit(repo, manifest, receipts)
    take(id, takeover=True)
    with pytest.raises(Superseded):
        begin(old, 20, "cd" * 16, ["rank-00000.safetensors", "rank-00000.index"])
    assert make.names("runs/gpt/a0001/step-00000020") == []
    make.checkpoint(1, 30)  # past every check, as a process that was stopped in between might
    assert latest(repo, "gpt") == id


def test_a_save_that_begins_while_the_run_is_claimed_is_closed_by_itself(
    repo: Repo, make: Any, take: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim comes between the first check and begin.json; the claimer has listed already and does not see it."""
    old = take()
    real = objects.put

    def put(store: Any, name: str, data: bytes, *, token: str) -> Any:
        receipt = real(store, name, data, token=token)
        if name.endswith("begin.json"):
            monkeypatch.setattr(objects, "put", real)
            make.attempt(2)
        return receipt

    monkeypatch.setattr(objects, "put", put)
    with pytest.raises(Superseded):
        begin(old, 10, "ab" * 16, ["rank-00000.safetensors"])
    assert make.names("runs/gpt/a0001/step-00000010") == ["manifest.json"]


def test_a_claim_says_how_far_the_attempt_before_it_had_come(repo: Repo, make: Any, take: Claim) -> None:
    """So a place that has more of that attempt is known to know more than its home does."""
    first = take(None)
    first.release()
    assert first.record.before is None
    make.begin(first.number, 7)
    make.begin(first.number, 3)
    second = take(None)
    assert second.record.before == (first.number, 7)
    assert repo.attempt("gpt", second.number).before == (first.number, 7)
