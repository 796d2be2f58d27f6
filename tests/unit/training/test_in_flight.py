"""Several saves in flight: training goes on, commits stay in order, and each ends by itself."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.held_store import Held, held
from support.said import said
from support.tiny_training import steps_of
from tenuto import every, keep, on
from tenuto.engine.save import handle as handles
from tenuto.engine.save.handle import Save
from tenuto.engine.save.saver import Saver
from tenuto.engine.staging import pool
from tenuto.engine.staging.pool import StagingPool
from tenuto.errors import DeadlineExceeded, SaveFailed, StoreError, StoreFull, Superseded, UsageError
from tenuto.events import Captured, Event, Removed, SaveDelayed, SaveFailedEvent, SaveSkipped, SaveStarted, Warned
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store
from tenuto.training.preemption import Preempted
from tenuto.training.saves import RunSaver

ALL = keep.latest(100)
MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:the save of:tenuto.TenutoWarning")


class Told:
    """Events; `act` is called with each."""

    def __init__(self, act: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self.act = act

    def emit(self, event: Event) -> None:
        self.events.append(event)
        if self.act is not None:
            self.act(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def fewer(self) -> list[str]:
        return [event.message for event in self.of(Warned) if "may be in flight" in event.message]


def state(elements: int = 1000) -> dict[str, Any]:
    return {"w": np.zeros(elements, np.float32), "n": 0}


def step_on(ckpt: tenuto.Checkpointer, one: dict[str, Any], **options: Any) -> Save:
    """A step of training, and its save."""
    one["w"] += 1
    one["n"] += 1
    ckpt.step_done()
    return ckpt.save(**options)


def built(store: Any, one: dict[str, Any], k: int = 3, **options: Any) -> tenuto.Checkpointer:
    return tenuto.Checkpointer(store, one, in_flight=k, **{"save": on.end(), "keep": ALL, **options})


def holds(where: Path, step: int) -> bool:
    found = tenuto.load(where, step=step).state
    return bool(np.all(found["w"] == step)) and found["n"] == step


def saver_of(ckpt: tenuto.Checkpointer) -> Saver:
    training = ckpt._training
    assert training is not None
    return training.saving.saver


def test_training_goes_on_behind_a_slow_save_and_commits_keep_their_order(place: Path) -> None:
    store, one = held(place, 1), state()
    with built(store, one) as ckpt:
        saves = [step_on(ckpt, one) for _ in range(3)]
        store.await_pack(1)
        assert [save.phase for save in saves] == [
            "writing rank-00000.safetensors",
            "waiting for step 1 to be written",
            "waiting for step 2 to be written",
        ]
        assert ckpt.stats.in_flight == 3 and "3 in flight" in str(ckpt.stats)
        assert store.put == [(1, "begin.json")], "one stream to the disk"
        store.let_go()
        ckpt.wait()
        assert ckpt.stats.in_flight == 0
        assert saves[2].timing.queue_s > 0 and saves[0].timing.queue_s == 0
    assert store.committed == [1, 2, 3]
    assert [step for step, _ in store.put] == sorted(step for step, _ in store.put)
    assert all(holds(place, step) for step in (1, 2, 3))


def test_each_takes_an_image_of_its_own_and_one_takes_no_more_than_ever(place: Path) -> None:
    told, one = Told(), state(MIB // 4)
    for k in (1, 3):
        with built(held(place), one, k, run=f"k{k}", sinks=[told]) as ckpt:
            saver = saver_of(ckpt)
            assert sum(buffer.memory.nbytes for buffer in saver._pool.buffers) == pytest.approx(k * MIB, rel=0.02)
    assert not told.fewer()


def test_a_save_that_fails_does_not_stop_those_behind_it(place: Path) -> None:
    store, one, told = held(place, 1), state(), Told()
    store.failures[1] = [StoreError("the disk is on fire")]
    with built(store, one, sinks=[told]) as ckpt:
        saves = [step_on(ckpt, one) for _ in range(3)]
        store.let_go()
        with said("on fire"):
            ckpt.wait()
        with pytest.raises(SaveFailed, match="on fire"):
            saves[0].wait()
        assert ckpt.stats.failed == 1
    assert store.committed == [1, 2, 3], "of the first, the mark of a save that was given up"
    assert [event.id.step for event in told.of(SaveFailedEvent)] == [1]
    assert holds(place, 3) and steps_of(place) == [3, 2]


def test_a_run_that_is_claimed_by_another_process_ends_all_of_them(place: Path) -> None:
    store, one = held(place, 1), state()
    ckpt = built(store, one)
    saves = [step_on(ckpt, one) for _ in range(3)]
    store.await_pack(1)
    other = claim(Repo.open(open_store(place)), "main", None, takeover=True, wait_s=0.0)
    store.let_go()
    for save in saves:
        with pytest.raises(Superseded, match="claimed"):
            save.wait(60)
    assert {step for step, _ in store.put} == {1}, "nothing of the others was begun"
    with pytest.raises(Superseded):
        ckpt.close()
    other.release()
    assert steps_of(place) == []


def test_a_save_is_skipped_only_where_as_many_as_may_be_are_in_flight(place: Path) -> None:
    store, one, told = held(place, 1, 2, 4), state(), Told()
    with built(store, one, 2, save=every(steps=1), on_busy="skip", sinks=[told]) as ckpt:
        for step in ckpt.steps(4):
            one["w"] += 1
            one["n"] += 1
            if step == 3:  # two in flight; the third was skipped
                assert ckpt.stats.skipped == 1
                first = saver_of(ckpt).in_flight[0]  # now: once let go it may have ended before it is looked for
                store.let_go(1)
                first.wait(60)
        assert ckpt.stats.in_flight == 2
        store.let_go()
    assert store.committed == [1, 2, 4]
    (skipped,) = told.of(SaveSkipped)
    assert (skipped.step, skipped.reason) == (3, "the 2 saves before are still being written")


def test_a_save_that_has_to_wait_waits_for_the_oldest_and_not_for_all(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, one, told = held(place, 1, 2), state(), Told()
    wait = Saver.await_free

    def waits(saver: Saver, timeout: float | None) -> bool:
        store.let_go(1)
        return wait(saver, timeout)

    monkeypatch.setattr(Saver, "await_free", waits)
    with built(store, one, 2, sinks=[told]) as ckpt:
        saves = [step_on(ckpt, one) for _ in range(3)]
        assert saves[0].join(60)  # its image is given back a moment before it has ended
        assert [save.done for save in saves] == [True, False, False]
        assert (ckpt.stats.delayed, ckpt.stats.in_flight) == (1, 2)
        assert [event.step for event in told.of(SaveDelayed)] == [3]
        store.let_go()
    assert store.committed == [1, 2, 3]


def test_who_waits_for_its_own_save_waits_for_those_before_it(place: Path) -> None:
    store, one = held(place, 1, 2), state()

    def act(event: Event) -> None:
        if isinstance(event, SaveStarted) and event.id.step == 3:
            store.let_go()

    with built(store, one, sinks=[Told(act)]) as ckpt:
        step_on(ckpt, one)
        step_on(ckpt, one)
        assert step_on(ckpt, one, wait=True).committed
        assert store.committed == [1, 2, 3]
    assert holds(place, 3)


@pytest.mark.parametrize("k", [2, 3])
def test_the_budget_is_for_all_of_them_and_fewer_are_in_flight_where_it_holds_fewer(
    place: Path, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, one = Told(), state(MIB // 4)
    store = held(place, 1, 2)
    with built(store, one, 3, memory_budget=k * MIB + MIB // 2, on_busy="skip", sinks=[told]) as ckpt:
        for _ in range(4):
            one["w"] += 1
            one["n"] += 1
            ckpt.step_done()
            if saver_of(ckpt).free:
                ckpt.save()
        assert ckpt.stats.in_flight == k
        store.let_go()
    assert {event.arena for event in told.of(Captured)} <= {"shared memory", "anonymous"}
    if k == 3:
        assert not told.fewer()
    else:
        (message,) = told.fewer()
        assert message.startswith("2 of 3 saves may be in flight at once: one more image takes 1.0 MiB")
        assert "the budget is 2.5 MiB, of which 2.0 MiB are taken" in message


def test_through_a_window_one_save_is_in_flight(place: Path) -> None:
    told, one = Told(), state(MIB)
    with built(held(place), one, 3, memory_budget=MIB, sinks=[told]) as ckpt:
        saver = saver_of(ckpt)
        assert (saver._pool.most, saver._pool.buffers[1].memory.nbytes) == (1, 0)
        step_on(ckpt, one)
        step_on(ckpt, one)
    (message,) = told.fewer()
    assert message.startswith("1 of 3 saves may be in flight at once: a window")
    assert steps_of(place) == [2, 1]


def test_the_structure_may_change_while_another_is_being_written(place: Path) -> None:
    store, one = held(place, 1, 2), state()
    with built(store, one) as ckpt:
        step_on(ckpt, one)
        one["more"] = np.arange(5000)
        step_on(ckpt, one)
        one["more"] = np.arange(70_000)
        step_on(ckpt, one)
        assert ckpt.stats.in_flight == 3
        store.let_go()
    assert all(holds(place, step) for step in (1, 2, 3))
    found = [tenuto.load(place, step=step).state.get("more", ()) for step in (1, 2, 3)]
    assert [len(more) for more in found] == [0, 5000, 70_000]


def test_an_image_that_has_become_too_small_is_let_go_before_room_is_asked_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, there = state(), list[bool]()
    headroom = pool.memory_headroom
    with built(held(place), one, 1) as ckpt:
        step_on(ckpt, one)
        ckpt.wait()  # for the thread that has written it as well
        (buffer,) = saver_of(ckpt)._pool.buffers
        assert buffer.plan is not None
        held_by = weakref.ref(buffer.plan.capturer)

        def asked() -> int | None:
            there.append(held_by() is not None)
            return headroom()

        monkeypatch.setattr(pool, "memory_headroom", asked)
        one["more"] = np.ones(MIB, np.float32)
        step_on(ckpt, one).wait()
    assert there and not any(there), "its pages stay taken as long as anything has a view of them"


def test_a_state_that_outgrows_the_budget_waits_for_the_images_that_are_in_its_way(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, one, told = held(place, 1), state(MIB // 4), Told()
    wait = StagingPool._await_given_back
    waited: list[int] = []

    def waits(buffers: StagingPool, free: int, until: float) -> None:
        waited.append(free)
        store.let_go(1)
        wait(buffers, free, until)

    monkeypatch.setattr(StagingPool, "_await_given_back", waits)
    with built(store, one, 2, memory_budget=5 * MIB // 2, sinks=[told]) as ckpt:
        step_on(ckpt, one)
        one["more"] = np.ones(MIB // 4, np.float32)
        step_on(ckpt, one).wait()
        assert waited == [1]
        step_on(ckpt, one)
    assert {event.arena for event in told.of(Captured)} <= {"shared memory", "anonymous"}
    assert all(holds(place, step) for step in (1, 2, 3))
    assert len(tenuto.load(place).state["more"]) == MIB // 4


def test_a_capture_that_breaks_off_gives_its_image_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = state()
    with built(held(place), one, 2) as ckpt:
        step_on(ckpt, one, wait=True)

        def breaks(*_: object, **__: object) -> None:
            raise SaveFailed("no capture today")

        with monkeypatch.context() as patched:
            patched.setattr("tenuto.engine.staging.capture.Capturer.capture", breaks)
            for number in range(3):
                # Of the same failure one warning, until a save commits.
                with said("today") if not number else nullcontext():
                    failed = step_on(ckpt, one)
                with pytest.raises(SaveFailed, match="today"):
                    failed.wait(60)
                assert saver_of(ckpt).free and not saver_of(ckpt).in_flight
        assert step_on(ckpt, one).wait(60).step == 5
        assert ckpt.stats.failed == 3


def test_closing_awaits_all_of_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, one = held(place, 1, 2, 3), state()
    wait = RunSaver.wait

    def waits(saving: RunSaver, timeout: float | None) -> None:
        store.let_go()
        wait(saving, timeout)

    monkeypatch.setattr(RunSaver, "wait", waits)
    ckpt = built(store, one)
    saves = [step_on(ckpt, one) for _ in range(3)]
    assert not any(save.done for save in saves)
    ckpt.close()
    assert store.committed == [1, 2, 3] and all(save.committed for save in saves)


def test_a_close_that_may_not_wait_so_long_says_which_save_hangs(place: Path) -> None:
    store, one = held(place, 1), state()
    ckpt = built(store, one)
    saves = [step_on(ckpt, one) for _ in range(3)]
    store.await_pack(1)
    with pytest.raises(DeadlineExceeded, match=r"main/a0001/1 has not ended within 0.05 s; it is writing rank"):
        ckpt.wait(0.05)
    with pytest.raises(DeadlineExceeded, match=r"main/a0001/1 has not ended"):
        ckpt.close(0.05)
    store.let_go()
    assert saver_of(ckpt).join(60)
    assert all(save.committed for save in saves)


def test_a_signal_leaves_with_all_of_them_committed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, one = held(place, 1, 2, 3), state()
    wait = RunSaver.wait

    def waits(saving: RunSaver, timeout: float | None) -> None:
        store.let_go()
        wait(saving, timeout)

    monkeypatch.setattr(RunSaver, "wait", waits)
    monkeypatch.setattr("tenuto.training.exit_status._ending.code", 0)
    with pytest.raises(Preempted):
        with built(store, one, 4, save=every(steps=1) | on.signal()) as ckpt:
            for step in ckpt.steps(10):
                one["w"] += 1
                one["n"] += 1
                if step == 3:
                    assert ckpt.stats.in_flight == 3
                    store.let_go()
                    os.kill(os.getpid(), signal.SIGUSR1)
    assert store.committed == [1, 2, 3, 4]
    assert holds(place, 4)


def test_a_full_disk_makes_room_and_touches_nothing_that_is_behind(place: Path) -> None:
    store, one, told = held(place, 3), state(), Told()
    ckpt = built(store, one, keep=keep.latest(2), sinks=[told])
    step_on(ckpt, one)
    step_on(ckpt, one)
    ckpt.wait()
    assert steps_of(place) == [2, 1]
    training = ckpt._training
    assert training is not None
    training.saving.tiers.keep = keep.latest(1)
    store.failures[3] = [StoreFull("no space", subject="x")]
    store.failures[4] = [StoreFull("no space", subject="x"), StoreFull("no space", subject="x")]
    saves = [step_on(ckpt, one) for _ in range(3)]
    store.let_go()
    with said("no space"):
        ckpt.close()
    assert [save.committed for save in saves] == [True, False, True]
    assert [event.id.step for event in told.of(Removed)] == [1, 2, 3]
    assert steps_of(place) == [5] and holds(place, 5)


def test_retention_goes_on_beside_a_save_that_is_half_written(place: Path) -> None:
    store, one = held(place, 3), state()
    removed = threading.Event()

    def act(event: Event) -> None:
        if isinstance(event, Removed) and event.id.step == 1:
            removed.set()

    with built(store, one, keep=keep.latest(1), sinks=[Told(act)]) as ckpt:
        for _ in range(4):
            step_on(ckpt, one)
            if ckpt.step == 3:
                store.await_pack(3)
                assert removed.wait(60), "step 2 is committed, so step 1 goes"
                assert (3, "begin.json") in store.put
        store.let_go()
    assert store.committed == [1, 2, 3, 4]
    assert steps_of(place) == [4] and holds(place, 4)


def test_metrics_and_tags_that_come_late_find_their_checkpoint(place: Path) -> None:
    store, one = held(place, 1), state()
    with built(store, one) as ckpt:
        step_on(ckpt, one)
        ckpt.log(loss=0.5, tag="first")
        step_on(ckpt, one)
        ckpt.log(loss=0.25)
        store.let_go()
    seen = tenuto.Repository(place)
    last, first = seen.checkpoints()
    assert (seen.metrics(first), seen.metrics(last)) == ({"loss": 0.5}, {"loss": 0.25})
    assert tenuto.load(place, step="first").state["n"] == 1


def test_i8_only_what_stands_still_is_said_to_hang(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, one = held(place, 1), state()
    with built(store, one, 2) as ckpt:
        first, second = step_on(ckpt, one), step_on(ckpt, one)
        store.await_pack(1)
        second._moved_s -= 10_000.0
        first.moves()
        assert second.moved_s == first._moved_s, "what it waits for is getting on"
        monkeypatch.setattr("tenuto.engine.save.handle.STANDSTILL_S", 0.05)
        with pytest.raises(DeadlineExceeded, match=r"has not got on for 0.05 s; it is waiting for step 1"):
            second.wait()
        with pytest.raises(DeadlineExceeded, match="main/a0001/1 has not got on"):
            ckpt.wait()
        monkeypatch.undo()
        store.let_go()
        ckpt.wait()
        assert second._behind is None, "handles do not hold each other for ever"
    assert store.committed == [1, 2]


def test_a_save_that_hangs_and_was_given_up_still_has_its_image(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, one, told = held(place, 1), state(), Told()
    ckpt = built(store, one, 2, on_busy="skip", sinks=[told])
    with monkeypatch.context() as patched:
        patched.setattr("tenuto.engine.save.handle.STANDSTILL_S", 0.05)
        with said("has not got on"), pytest.raises(DeadlineExceeded):
            step_on(ckpt, one, wait=True)
    saver = saver_of(ckpt)
    assert (saver.in_flight, len(saver._with_image), saver.free) == ([], 1, True)
    second = step_on(ckpt, one)
    assert not saver.free
    one["w"] += 1
    one["n"] += 1
    ckpt.step_done()
    assert ckpt.save() is second and [event.step for event in told.of(SaveSkipped)] == [3]
    store.let_go()
    second.wait(60)
    ckpt.close()
    assert holds(place, 2)


def test_a_waited_for_save_is_written_by_a_thread_that_keeps_its_priority(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, one = held(place, 1), state()
    back: list[str] = []
    monkeypatch.setattr("tenuto.engine.save.saver.lower_priority", lambda: back.append(threading.current_thread().name))

    def act(event: Event) -> None:
        if isinstance(event, SaveStarted) and event.id.step == 2:
            store.let_go()

    with built(store, one, sinks=[Told(act)]) as ckpt:
        step_on(ckpt, one)
        step_on(ckpt, one, wait=True)
        step_on(ckpt, one).wait()
    assert back == ["tenuto-save-1", "tenuto-save-3"]


def test_of_an_unending_first_save_the_time_so_far_is_what_writing_takes(place: Path) -> None:
    store, one = held(place, 1), state()
    with built(store, one) as ckpt:
        first = step_on(ckpt, one)
        step_on(ckpt, one)
        store.await_pack(1)
        training = ckpt._training
        assert training is not None and first.begun_s is not None
        first.begun_s -= 100.0
        assert training.saving.totals.persist_s > 100.0
        store.let_go()
        ckpt.wait()
        assert training.saving.totals.persist_s < 100.0


@pytest.mark.parametrize("k", [1, 2])
def test_a_stall_that_may_be_spent_is_not_spent_on_waiting_for_the_saves_in_flight(
    place: Path, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, one, waited = held(place, 1), state(), list[int]()
    wait = Saver.await_free

    def waits(saver: Saver, timeout: float | None) -> bool:
        waited.append(len(saver.in_flight))
        store.let_go()  # else it would be held until the test is over
        return wait(saver, timeout)

    monkeypatch.setattr(Saver, "await_free", waits)
    with built(store, one, k, save=every(stall="50%")) as ckpt:
        for _ in ckpt.steps(k + 3):
            one["w"] += 1
            one["n"] += 1
            saving = ckpt._armed(needed=True).saving
            saving._started_s -= 1000.0  # as if the step had taken that long
            if saving._last_saved_s is not None:
                saving._last_saved_s -= 1000.0
        assert ckpt.stats.taken == k and not waited
        store.let_go()
    assert store.committed == list(range(1, k + 1))


def test_a_store_that_hangs_is_told_also_where_no_save_waits_for_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, one = held(place, 1), state()
    monkeypatch.setattr(handles, "STANDSTILL_S", 0.0)
    with built(store, one, 1, save=every(stall="50%"), on_error="raise") as ckpt:
        with pytest.raises(DeadlineExceeded, match=r"the save of .* has not got on"):
            for step in ckpt.steps(3):
                if step:
                    store.await_pack(1)  # it may have moved just when it is looked at, until it is held
                one["w"] += 1
                one["n"] += 1
        monkeypatch.undo()
        store.let_go()


def test_what_a_save_has_waited_for_in_vain_is_counted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, one = held(place, 1), state()
    with built(store, one, 1) as ckpt:
        step_on(ckpt, one)
        spent = ckpt._armed(needed=True).saving.totals
        with monkeypatch.context() as patched, said("no save of step 2"):
            patched.setattr(Saver, "await_free", lambda saver, timeout: False)
            assert step_on(ckpt, one).error is not None
        assert [save.step for save, _ in spent._stalls] == [1, 2] and spent.stalls_s[1] > 0
        store.let_go()


@pytest.mark.parametrize("k", [0, -1, True, 1.5, "2", None])
def test_what_is_no_number_of_saves_is_refused(place: Path, k: object) -> None:
    with pytest.raises(UsageError, match="in_flight"):
        tenuto.Checkpointer(place, state(), in_flight=k)  # type: ignore[arg-type]
    assert not place.exists()


def test_held_store_is_a_store(place: Path) -> None:
    """What the tests above hold back is what a training puts."""
    store = Held(open_store(place))
    one = state()
    with built(store, one, 1) as ckpt:
        step_on(ckpt, one)
    assert [name for _, name in store.put] == [
        "begin.json",
        "rank-00000.safetensors",
        "rank-00000.index",
        "manifest.json",
    ]
