"""What runs beside training is told too: the copy behind a fence, and what states in memory take of a processor."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tenuto
from support.fenced_training import Model, Told, committed, spying, stepping, train
from support.memory_training import shared_memory
from support.tiny_training import state
from support.tiny_training import train as train_one
from tenuto import every, keep
from tenuto.engine.fence import fence
from tenuto.engine.memory_tier.tier import MemoryTier
from tenuto.engine.save import fenced_capture as engine
from tenuto.engine.save import handle as clocks
from tenuto.engine.save.handle import SaveClock
from tenuto.integrations.torch import device
from tenuto.integrations.torch.device import TorchBound
from tenuto.model.timing import Timing

EACH = every(steps=1)
NEVER = every(steps=1000)
CPU_S, WALL_S = 100.0, 1000.0
"""What each piece of work costs in these tests: so much that nothing real comes near it."""


class Costly:
    """The clocks as they are, and what work is said to have cost on top. Each thread has its own processor time."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._wall_s = 0.0
        self._own = threading.local()
        self.pieces: Counter[str] = Counter()
        """By the name of the thread that was at work."""

    def perf_counter(self) -> float:
        return time.perf_counter() + self._wall_s

    def thread_time(self) -> float:
        return time.thread_time() + getattr(self._own, "cpu_s", 0.0)

    def work(self, within: str = "tenuto-") -> None:
        name = threading.current_thread().name
        if name.startswith(within):
            self._wall_s += WALL_S
            self._own.cpu_s = getattr(self._own, "cpu_s", 0.0) + CPU_S
            self.pieces[name] += 1

    def of(self, step: int) -> int:
        return self.pieces[f"tenuto-fence-{step}"]


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costly]:
    """Each slice that a fence's thread copies or compares costs that much."""
    found, copy, compare = Costly(), device.HostCopies.copy, TorchBound.compare

    def copied(copies: device.HostCopies, number: int) -> None:
        found.work("tenuto-fence")
        copy(copies, number)

    def compared(bound: TorchBound, parts: Any) -> Any:
        found.work("tenuto-fence")
        return compare(bound, parts)

    monkeypatch.setattr(device.HostCopies, "copy", copied)
    monkeypatch.setattr(TorchBound, "compare", compared)
    monkeypatch.setattr(fence, "time", found)
    with shared_memory():
        yield found


def sealing(monkeypatch: pytest.MonkeyPatch, seal: Any = MemoryTier.seal) -> Costly:
    """Each seal costs that much, in whatever thread."""
    found = Costly()

    def sealed(*words: Any, **more: Any) -> str:
        found.work()
        return str(seal(*words, **more))

    monkeypatch.setattr(MemoryTier, "seal", sealed)
    monkeypatch.setattr(clocks, "time", found)
    return found


def training() -> tuple[dict[str, Any], Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer}, stepping(model, optimizer)


def said(place: Path, step: int) -> Timing:
    """What the manifest of a step says."""
    repository = tenuto.Repository(place)
    (id,) = [id for id in repository.checkpoints("main") if id.step == step]
    manifest = repository.repo.manifest(id)
    found = Timing.read(manifest.environment["timing"], manifest.bytes)
    assert found is not None
    return found


def join_memory(ckpt: tenuto.Checkpointer) -> None:
    memory = ckpt._armed(needed=True).saving.memory
    assert memory is not None and memory._saver.join(60)


# -- saves behind a fence ----------------------------------------------------------------------------------------------


def test_the_copy_beside_training_is_told_apart_from_what_held_it(costly: Costly, place: Path) -> None:
    one, body = training()
    told = train(place, one, body)
    late_steps = [step for step in committed(place) if told.late.get(step)]
    assert late_steps, "nothing was copied beside training"
    for step in late_steps:
        timing = said(place, step)
        assert costly.of(step) > 0
        assert timing.late_s // WALL_S == costly.of(step), "known when the manifest is put"
        assert timing.cpu_s // CPU_S == costly.of(step)
        assert timing.capture_s < WALL_S
    eager = [step for step in committed(place) if not told.late.get(step)]
    assert eager and not any(said(place, step).late_s for step in eager)


def test_it_is_told_before_the_image_is_called_whole(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, str]] = []
    copied, ended = SaveClock.copied, engine._Watch.ended

    def telling_copied(clock: SaveClock, late_s: float, cpu_s: float) -> None:
        order.append((threading.current_thread().name, "copied"))
        copied(clock, late_s, cpu_s)

    def telling_ended(watch: Any, failure: BaseException | None) -> None:
        order.append((threading.current_thread().name, "ended"))
        ended(watch, failure)

    monkeypatch.setattr(SaveClock, "copied", telling_copied)
    monkeypatch.setattr(engine._Watch, "ended", telling_ended)
    one, body = training()
    told = train(place, one, body)
    late_steps = [step for step, late_leaves in told.late.items() if late_leaves]
    assert late_steps
    for step in late_steps:
        assert [what for name, what in order if name == f"tenuto-fence-{step}"] == ["copied", "ended"]


def test_comparing_in_the_probation_counts_as_processor_time_and_is_no_copy(costly: Costly, place: Path) -> None:
    one, body = training()
    told = Told()
    rehearsed = 0
    with spying(told), tenuto.Checkpointer(place, one, save=EACH, capture="fenced", keep=keep.all()) as ckpt:
        for step in (1, 2, 3):
            body(0)
            ckpt.step_done()
            fencing = ckpt._armed(needed=True).saving.saver.fencing
            assert fencing is not None
            if fencing._current is not None:
                assert fencing._current.at_rest(60)
            ckpt.wait()
            last = ckpt.stats.last
            assert last is not None and not told.late.get(step)
            assert (last.late_s, last.cpu_s // CPU_S) == (0.0, costly.of(step))
            rehearsed += costly.of(step)
    assert rehearsed, "nothing was compared beside training"


# -- states in memory --------------------------------------------------------------------------------------------------


def test_states_in_memory_tell_what_they_took_of_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costly = sealing(monkeypatch)
    with shared_memory(), tenuto.Checkpointer(tmp_path / "c", state(), save=NEVER, memory=EACH) as ckpt:
        for _ in ckpt.steps(4):
            pass
        join_memory(ckpt)
        stats = ckpt.stats
    assert (stats.kept_in_memory, costly.pieces.total()) == (4, 4)
    assert stats.cpu_in_memory_s // CPU_S == 4
    assert stats.held_s < CPU_S, "it held nobody"
    (line,) = [line for line in str(stats).splitlines() if line.startswith("memory ")]
    assert "4 states kept, " in line and line.endswith(", processor time 6 min 40 s")


def test_what_is_sealed_for_a_save_is_the_saves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealing(monkeypatch)
    with shared_memory(), tenuto.Checkpointer(place, one := state(), save=EACH, memory=EACH) as ckpt:
        for _ in ckpt.steps(2):
            train_one(one)
            ckpt.wait()
        join_memory(ckpt)
        ckpt.wait()
        stats = ckpt.stats
    assert (stats.kept_in_memory, stats.cpu_in_memory_s) == (0, 0.0)
    assert stats.last is not None and stats.last.cpu_s // CPU_S == 1


def test_what_a_state_in_memory_took_counts_also_where_it_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> str:
        raise OSError("no")

    sealing(monkeypatch, fails)
    one = {"w": np.zeros(1000)}
    with shared_memory(), tenuto.Checkpointer(tmp_path / "c", one, save=NEVER, memory=EACH) as ckpt:
        for _ in ckpt.steps(2):
            pass
        join_memory(ckpt)
        stats = ckpt.stats
    assert (stats.kept_in_memory, stats.cpu_in_memory_s // CPU_S) == (0, 2)


def test_copies_of_states_in_memory_behind_a_fence_count_with_them(costly: Costly, tmp_path: Path) -> None:
    one, body = training()
    found: list[tenuto.Stats] = []

    def finish(ckpt: tenuto.Checkpointer) -> None:
        join_memory(ckpt)
        found.append(ckpt.stats)

    told = train(tmp_path / "c", one, body, save=NEVER, memory=EACH, finish=finish)
    assert any(told.late.values())
    assert costly.pieces.total() > 0
    assert found[0].cpu_in_memory_s // CPU_S == costly.pieces.total()
    assert found[0].taken == 0
