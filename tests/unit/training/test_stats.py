"""`ckpt.stats`: what saving has done and cost, counted as it happens and shown as a table."""

from __future__ import annotations

import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import tenuto
from support.memory_training import shared_memory
from support.said import said
from support.tiny_training import Gate, state, train
from tenuto import every, keep, on
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.save.handle import Save
from tenuto.engine.save.saver import Saver
from tenuto.errors import SaveFailed, StoreError
from tenuto.events import Committed, Event, SaveDelayed, SaveSkipped
from tenuto.model.ids import CheckpointId
from tenuto.model.timing import TimedPart, Timing
from tenuto.training.snapshot import Snapshots
from tenuto.training.stats import RECENT_SAVES, ROWS, SaveTotals, Stats, medians

ALL = keep.latest(100)
MINUTE = 60.0


class Recorded:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def handle(step: int = 1, error: SaveFailed | None = None, **parts: float) -> Save:
    """A save that has ended."""
    found = Save(CheckpointId("main", 1, step), "0" * 32)
    for name, seconds in parts.items():
        found.clock.put(name, seconds)  # type: ignore[arg-type]
    found.end(error)
    return found


# -- in a training -----------------------------------------------------------------------------------------------------


def test_a_training_that_saves_can_tell_what_it_cost(place: Path) -> None:
    sink, one = Recorded(), state()
    with tenuto.Checkpointer(place, one, save=every(steps=1), keep=ALL, sinks=[sink]) as ckpt:
        assert ckpt.stats == Stats(), "nothing has been claimed, nothing saved"
        for _ in ckpt.steps(3):
            train(one)
            ckpt.wait()
        ckpt.wait()
        stats = ckpt.stats
    assert (stats.taken, stats.committed, stats.failed, stats.skipped) == (3, 3, 0, 0)
    assert stats.last is not None and stats.usual is not None
    assert stats.last == sink.of(Committed)[-1].timing
    assert stats.last.look_s > 0 and stats.last.bytes > 4000
    assert 0 < stats.last.held_s <= stats.held_s <= stats.elapsed_s
    assert 0 < stats.held_share <= 1
    assert stats.bandwidth is not None and stats.bandwidth > 0
    assert stats.disk_age_s is not None and stats.disk_age_s >= 0
    assert stats.memory_age_s is None
    after = ckpt.stats
    assert (after.committed, after.elapsed_s) == (3, ckpt.stats.elapsed_s), "closed: it can still be asked, and stands"


def test_each_checkpoint_says_where_the_time_of_its_save_went(place: Path) -> None:
    with tenuto.Checkpointer(place, state(), save=every(steps=1)) as ckpt:
        for _ in ckpt.steps(1):
            pass
    repository = tenuto.Repository(place)
    (id,) = repository.checkpoints()
    told = repository.repo.manifest(id).environment["timing"]
    assert {"look_s", "capture_s", "write_s"} <= told.keys()
    tenuto.save(state(), place, run="once")
    (id,) = repository.checkpoints("once")
    assert "timing" not in repository.repo.manifest(id).environment


def test_what_is_skipped_is_counted(gate: Gate, place: Path) -> None:
    one = state()
    with tenuto.Checkpointer(gate, one, save=every(steps=1) | on.end(), on_busy="skip", keep=ALL) as ckpt:
        gate.open_gate.clear()
        for step in ckpt.steps(4):
            train(one)
            if step == 3:
                assert (ckpt.stats.taken, ckpt.stats.committed, ckpt.stats.skipped) == (1, 0, 2)
                assert "0 committed, 1 in flight, 2 skipped" in str(ckpt.stats)
                gate.open_gate.set()
    assert (ckpt.stats.taken, ckpt.stats.committed, ckpt.stats.skipped) == (2, 2, 2)


def test_what_has_to_wait_for_the_save_before_is_counted_and_told(
    gate: Gate, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Saver.await_free

    def let_go(saver: Saver, timeout: float | None) -> bool:
        gate.open_gate.set()
        return whole(saver, timeout)

    monkeypatch.setattr(Saver, "await_free", let_go)
    sink, one = Recorded(), state()
    with tenuto.Checkpointer(gate, one, save=every(steps=1), keep=ALL, sinks=[sink]) as ckpt:
        gate.open_gate.clear()
        for step in ckpt.steps(2):
            train(one)
            assert step == 0 or gate.reached.wait(60)
        ckpt.wait()
        stats = ckpt.stats
    (delayed,) = sink.of(SaveDelayed)
    assert (delayed.step, stats.delayed, stats.skipped) == (2, 1, 0)
    assert stats.last is not None
    assert stats.last.wait_s == delayed.seconds == stats.delayed_s > 0


def test_what_fails_is_counted(gate: Gate, place: Path) -> None:
    gate.failure, gate.failures = StoreError("the disk is on fire"), 1
    with said("on fire"):
        with tenuto.Checkpointer(gate, state(), save=every(steps=1), keep=ALL) as ckpt:
            for step in ckpt.steps(2):
                if step == 1:
                    ckpt._armed(needed=True).saving.saver.join(60)
                    assert (ckpt.stats.failed, ckpt.stats.disk_age_s) == (1, None)
                    assert "0 committed, 1 FAILED" in str(ckpt.stats)
    assert (ckpt.stats.taken, ckpt.stats.committed, ckpt.stats.failed) == (2, 1, 1)


def test_states_in_memory_are_counted_and_have_an_age(tmp_path: Path) -> None:
    one = {"w": np.zeros(50_000)}
    with shared_memory():
        with tenuto.Checkpointer(tmp_path, one, save=every(steps=100), memory=every(steps=1)) as ckpt:
            for step in ckpt.steps(4):
                if step == 3:
                    stats = ckpt.stats
            memory = ckpt._armed(needed=True).saving.memory
            assert memory is not None and memory._saver.join(60)
            after = ckpt.stats
    assert stats.kept_in_memory <= 3
    assert stats.disk_age_s is None, "nothing was saved to the store"
    assert (after.kept_in_memory, after.skipped_in_memory) == (4, 0)
    assert after.memory_age_s is not None and after.memory_age_s >= 0
    assert 0 < after.held_s <= after.elapsed_s


class Watch:
    """A clock that stands still, but for the looks at the state."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the state takes 10 s, and nothing that is done for memory takes any time beside it."""
    watch, now = Watch(), Snapshots.now

    def look(self: Snapshots) -> Any:
        watch.now_s += 10
        return now(self)

    monkeypatch.setattr(Snapshots, "now", look)
    monkeypatch.setattr("tenuto.training.training_session.time", watch)
    monkeypatch.setattr("tenuto.engine.memory_tier.cadence.time", watch)


def test_the_look_at_a_state_that_goes_into_memory_holds_training(tmp_path: Path, looks: None) -> None:
    one = {"w": np.zeros(50_000)}
    with shared_memory():
        with tenuto.Checkpointer(tmp_path, one, save=every(steps=100), memory=every(steps=1)) as ckpt:
            for _ in ckpt.steps(3):
                one["w"] += 1
            memory = ckpt._armed(needed=True).saving.memory
            assert memory is not None and memory.held_s == 30.0


def test_a_state_that_is_skipped_is_not_even_looked_at(
    tmp_path: Path, looks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing, seal = threading.Event(), MemoryTier.seal
    monkeypatch.setattr(MemoryTier, "seal", lambda self, *a, **k: sealing.wait(30) and seal(self, *a, **k))
    one, sink = {"w": np.zeros(50_000)}, Recorded()
    options: dict[str, Any] = {"save": every(steps=100), "memory": every(steps=1), "on_busy": "skip", "sinks": [sink]}
    with shared_memory():
        with tenuto.Checkpointer(tmp_path, one, **options) as ckpt:
            for _ in ckpt.steps(3):
                one["w"] += 1
            memory = ckpt._armed(needed=True).saving.memory
            assert memory is not None and (memory.skipped, memory.held_s) == (2, 10.0)
            sealing.set()
    assert [event.step for event in sink.of(SaveSkipped)] == [2, 3]


def test_what_training_went_on_from_is_as_old_as_the_training(place: Path) -> None:
    with tenuto.Checkpointer(place, state(), save=on.end()) as ckpt:
        for _ in ckpt.steps(1):
            pass
    with tenuto.Checkpointer(place, state(), save=on.end()) as ckpt:
        for _ in ckpt.steps(2):
            resumed = ckpt.stats
    assert resumed.committed == 0
    assert resumed.disk_age_s is not None and resumed.disk_age_s >= 0


def test_a_checkpointer_in_a_worker_has_nothing_to_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tenuto.training.run_registry.imported_by_worker", lambda: True)
    assert tenuto.Checkpointer(tmp_path, state()).stats == Stats()


# -- counting ----------------------------------------------------------------------------------------------------------


def test_the_newest_state_on_disk_is_as_old_as_the_moment_at_which_its_save_was_due() -> None:
    tally, now = SaveTotals(), time.monotonic()
    tally.take(handle(1), now - 5 * MINUTE)
    tally.take(handle(2), now - 3 * MINUTE)
    tally.take(handle(3, SaveFailed("no")), now - 2 * MINUTE)
    tally.take(Save(CheckpointId("main", 1, 4), "0" * 32), now - MINUTE)
    found = tally.stats(None)
    assert (found.taken, found.committed, found.failed) == (4, 2, 1)
    assert found.disk_age_s is not None and 3 * MINUTE <= found.disk_age_s < 4 * MINUTE


def test_held_is_what_saves_held_and_what_skipping_did() -> None:
    tally = SaveTotals()
    tally.skip(0.5)
    tally.skip(0.25)
    tally.hold(handle(), 2.0)
    assert tally.stats(None).held_s == 2.75


def test_medians_are_of_the_last_committed_saves_part_by_part() -> None:
    tally = SaveTotals()
    for number in range(3 * RECENT_SAVES):
        tally.take(handle(write_s=float(number), index_s=float(number % 2)), 0.0)
    found = tally.stats(None)
    assert found.last == Timing(write_s=3 * RECENT_SAVES - 1, index_s=1.0)
    assert found.usual == Timing(write_s=2.5 * RECENT_SAVES - 0.5, index_s=0.5)
    assert medians([Timing(bytes=3), Timing(bytes=4)]).bytes == 4


# -- the table ---------------------------------------------------------------------------------------------------------


def test_a_table_says_all_of_it_and_nothing_that_did_not_occur() -> None:
    both: dict[str, Any] = {"begin_s": 0.002, "digest_s": 0.08, "bytes": 1 << 30}
    last = Timing(look_s=4e-4, wait_s=0.25, capture_s=0.034, late_s=0.3, write_s=0.5, **both)
    usual = Timing(look_s=5e-4, capture_s=0.04, write_s=1.0, cpu_s=0.1, **both)
    stats = Stats(
        taken=14,
        committed=12,
        failed=1,
        skipped=3,
        delayed=2,
        delayed_s=0.35,
        kept_in_memory=40,
        skipped_in_memory=1,
        fence_in_memory_s=0.02,
        cpu_in_memory_s=0.5,
        held_s=1.24,
        elapsed_s=400.0,
        last=last,
        usual=usual,
        disk_age_s=12.0,
        memory_age_s=0.4,
    )
    assert str(stats) == TABLE


TABLE = """\
saves             12 committed, 1 in flight, 1 FAILED, 3 skipped, 2 delayed by 0.35 s
memory            40 states kept, 1 skipped, fence 20.0 ms, processor time 0.50 s
training blocked  1.24 s, 0.31% of 6 min 40 s
newest state      on disk 12.0 s old, in memory 0.40 s old

                      last save      median
training blocked         0.28 s     40.5 ms
  look at the state      400 us      500 us
  save before            0.25 s           -
  copy                  34.0 ms     40.0 ms
copy in background       0.30 s           -
  begin                  2.0 ms      2.0 ms
  digest                80.0 ms     80.0 ms
  write and flush        0.50 s      1.00 s
processor time                -      0.10 s
bytes                  1.00 GiB    1.00 GiB
written at           2.00 GiB/s  1.00 GiB/s"""


def test_no_part_is_left_out_of_the_table() -> None:
    told = {field.name for field in fields(Timing)}
    assert {field for _, field in ROWS} == {"held_s", *told} - {"bytes"}
    assert set(get_args(TimedPart)) == told - {"fence_s", "seconds", "bytes"}, "those the handle knows"


def test_what_memory_took_of_a_processor_is_said_also_where_nothing_could_be_kept() -> None:
    assert "\nmemory            0 states kept, processor time 0.25 s\n" in str(Stats(cpu_in_memory_s=0.25))


def test_a_training_that_has_not_saved_says_so() -> None:
    assert str(Stats()) == (
        "saves             0 committed\n"
        "training blocked  0 us, 0.00% of 0 us\n"
        "newest state      none that a crash would leave"
    )
