"""States that go into memory alone with capture="fenced": copied behind the fence, never sealed torn, never in the way
of training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tenuto
from support.fenced_training import (
    HeldCopy,
    Model,
    Told,
    assert_images_are_right,
    committed,
    holding,
    loss_of,
    snapshot,
    spying,
    stepping,
    train,
)
from support.memory_training import shared_memory
from tenuto import every, keep
from tenuto.concurrency.worker_threads import BackgroundWork, WorkerThreads
from tenuto.engine.fence import fence
from tenuto.engine.memory_tier.cadence import MemorySaver
from tenuto.events import SavedToMemory, SaveSkipped, Warned
from tenuto.state import update_barrier

PROBATION = update_barrier.PROBATION
NEVER = every(steps=1000)
EACH = every(steps=1)

pytestmark = pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch.manual_seed(0)
    with shared_memory():
        yield
    assert not update_barrier._barriers, "a fence outlived its Checkpointer"


@pytest.fixture
def held_copy() -> Iterator[HeldCopy]:
    with holding() as held:
        yield held


class Scene:
    """A model, its optimizer, and a training that keeps states in memory; `step` is one step of a loop of one's own."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.body = stepping(self.model, self.optimizer)
        self.told = Told()

    def training(self, place: Path, **more: Any) -> tenuto.Checkpointer:
        options = {"save": NEVER, "memory": EACH, "capture": "fenced", "keep": keep.all(), "sinks": [self.told]}
        return tenuto.Checkpointer(place, self.state, **{**options, **more})

    def step(self, ckpt: tenuto.Checkpointer, *, update: bool = True, held: HeldCopy | None = None) -> None:
        """`held`: what is copied of its state waits."""
        if update:
            self.body(0)
        if held is not None:
            held.hold()  # not before: the update waits for the copy of the step before
        ckpt.step_done()
        self.told.snapshots[ckpt.step] = snapshot(self.state)

    def write(self) -> None:
        with torch.no_grad():
            self.model.last.weight.clamp_(-0.001, 0.001)

    def sealed(self) -> list[int]:
        return [event.id.step for event in self.told.events if isinstance(event, SavedToMemory)]

    def said(self) -> list[str]:
        return [event.message for event in self.told.events if isinstance(event, Warned)]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def memory_of(ckpt: tenuto.Checkpointer) -> Any:
    memory = ckpt._armed(needed=True).saving.memory
    assert memory is not None
    return memory


def sealed(ckpt: tenuto.Checkpointer) -> int:
    """The newest step that is whole in memory, once what is under way has ended."""
    memory = memory_of(ckpt)
    assert memory._saver.join(60)
    return int(memory.tier.sealed.id.step)


def restored(place: Path, scene: Scene) -> int:
    """The step that the next process goes on from, out of memory; its state is what it was then, in every bit."""
    other = Scene()
    with other.training(place) as ckpt:
        found = ckpt.restore()
        assert found is not None and found.source.startswith("from memory")
        wanted, now = scene.told.snapshots[found.step], snapshot(other.state)
        assert now.keys() == wanted.keys()
        assert all(torch.equal(now[path], wanted[path]) for path in wanted)
        return int(found.step)


def contents(place: Path, capture: str, steps: int = 8) -> tuple[dict[int, str], Told]:
    torch.manual_seed(7)
    one, told = Model(), Told()
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
    state = {"model": one, "optimizer": optimizer}
    train(place, state, stepping(one, optimizer), steps=steps, told=told, capture=capture, save=NEVER, memory=EACH)
    return {event.id.step: event.content for event in told.events if isinstance(event, SavedToMemory)}, told


def test_what_an_optimizer_owns_is_copied_late_and_the_image_is_the_eager_one(tmp_path: Path) -> None:
    eager, nothing = contents(tmp_path / "eager", "eager")
    late, told = contents(tmp_path / "fenced", "fenced")
    assert late == eager and sorted(late) == list(range(1, 9))
    assert not nothing.late and not told.demoted
    assert all(not told.late[step] for step in range(1, PROBATION + 1))
    assert all("model/first.weight" in told.late[step] | told.watched[step] for step in range(PROBATION + 1, 8))
    assert 8 not in told.late, "no step follows the last one"


def test_saves_and_states_in_memory_share_probation_and_record(scene: Scene, tmp_path: Path) -> None:
    told = train(
        tmp_path / "p", scene.state, scene.body, told=scene.told, save=every(steps=2), memory=EACH, on_busy="wait"
    )
    assert assert_images_are_right(tmp_path / "p", scene.state, told) == [2, 4, 6, 8]
    assert not told.late[3] and told.late[4] and told.late[5], "steps 1 and 3 in memory, and 2 in the store, were three"
    assert set(scene.sealed()) == {1, 3, 5, 7}


def test_what_a_state_in_memory_demotes_is_eager_in_saves_too(
    scene: Scene, tmp_path: Path, held_copy: HeldCopy
) -> None:
    with spying(scene.told), scene.training(tmp_path / "p") as ckpt:
        for _ in range(4):
            scene.step(ckpt)
        scene.step(ckpt, held=held_copy)
        scene.write()
        held_copy.let_go()
        for _ in range(2):
            scene.step(ckpt)
        scene.body(0)
        ckpt.save()
        ckpt.wait()
        scene.told.snapshots[7] = snapshot(scene.state)
    assert set(scene.told.demoted) == {"model/last.weight"}
    assert "model/last.weight" not in scene.told.late[7]


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_a_torn_image_is_never_sealed_and_the_next_step_takes_its_place(
    scene: Scene, tmp_path: Path, held_copy: HeldCopy, on_busy: str
) -> None:
    with spying(scene.told), scene.training(tmp_path / "p", memory=every(steps=2), on_busy=on_busy) as ckpt:
        for _ in range(9):
            scene.step(ckpt)
            assert ckpt.step % 2 or sealed(ckpt) == ckpt.step
        scene.step(ckpt, held=held_copy)
        assert held_copy.reached.wait(60) and scene.told.late[10]
        scene.write()
        held_copy.let_go()
        scene.body(0)
        assert sealed(ckpt) == 8, "the other slot is whole"
        assert not any(slot.filling for slot in memory_of(ckpt).tier._pool.slots), "the torn one is let go"
        ckpt.step_done()
        scene.told.snapshots[11] = snapshot(scene.state)
        assert sealed(ckpt) == 11, "though nothing asks for step 11"
        assert 11 not in scene.told.late, "eagerly"
        scene.step(ckpt)
        assert sealed(ckpt) == 12 and "model/last.weight" not in scene.told.late[12]
        assert ckpt.stats.skipped_in_memory == 0
    assert 10 not in scene.sealed() and set(scene.told.demoted) == {"model/last.weight"}
    assert any("step 10 is not kept in memory" in text and "model/last.weight" in text for text in scene.said())


def test_a_save_in_place_of_a_torn_state_is_eager(scene: Scene, tmp_path: Path, held_copy: HeldCopy) -> None:
    with spying(scene.told), scene.training(tmp_path / "p", save=every(steps=6)) as ckpt:
        for _ in range(4):
            scene.step(ckpt)
        scene.step(ckpt, held=held_copy)
        assert held_copy.reached.wait(60)
        scene.write()
        held_copy.let_go()
        scene.step(ckpt)
        ckpt.wait()
        assert sealed(ckpt) == 6 and 6 not in scene.told.late
    assert assert_images_are_right(tmp_path / "p", scene.state, scene.told) == [6]


@pytest.mark.parametrize("kinds", ["memory, then store", "store, then memory"])
def test_the_next_capture_waits_for_the_one_before(
    scene: Scene, tmp_path: Path, held_copy: HeldCopy, kinds: str
) -> None:
    """Without an update between them, nothing else has waited for the copy."""
    at = 6 if kinds.startswith("memory") else 5
    with spying(scene.told), scene.training(tmp_path / "p", save=every(steps=at)) as ckpt:
        for _ in range(4):
            scene.step(ckpt)
        scene.step(ckpt, held=held_copy)
        assert held_copy.reached.wait(60)
        assert memory_of(ckpt).tier.busy
        before = ckpt.stats.fence_in_memory_s
        threading.Timer(0.05, held_copy.let_go).start()
        scene.step(ckpt, update=False)
        assert not scene.told.late[6], "no update was seen"
        ckpt.wait()
        assert sealed(ckpt) == 6
        assert ckpt.stats.fence_in_memory_s == before, "what the capture after it waits is not the fence's"
    assert assert_images_are_right(tmp_path / "p", scene.state, scene.told) == [at]
    assert not scene.told.demoted and scene.sealed()[-1] == (5 if at == 6 else 6)


def test_with_skip_a_state_that_comes_too_early_is_left_out(scene: Scene, tmp_path: Path, held_copy: HeldCopy) -> None:
    with spying(scene.told), scene.training(tmp_path / "p", on_busy="skip") as ckpt:
        for _ in range(4):
            scene.step(ckpt)
            sealed(ckpt)
        scene.step(ckpt, held=held_copy)
        scene.step(ckpt, update=False)
        assert [event.step for event in scene.told.events if isinstance(event, SaveSkipped)] == [6]
        held_copy.let_go()
        assert sealed(ckpt) == 5
        assert ckpt.stats.skipped_in_memory == 1
    assert scene.sealed() == [1, 2, 3, 4, 5]


def test_the_update_waits_and_the_time_is_told(scene: Scene, tmp_path: Path, held_copy: HeldCopy) -> None:
    with spying(scene.told), scene.training(tmp_path / "p") as ckpt:
        for _ in range(4):
            scene.step(ckpt)
        scene.step(ckpt, held=held_copy)
        before = ckpt.stats
        loss_of(scene.model).backward()
        thread = threading.Thread(target=scene.optimizer.step)
        thread.start()
        assert held_copy.reached.wait(60)
        thread.join(0.05)
        assert thread.is_alive(), "the update went past a copy that is still to come"
        held_copy.let_go()
        thread.join(60)
        stats = ckpt.stats
        waited = stats.fence_in_memory_s - before.fence_in_memory_s
        assert waited > 0 and stats.held_s - before.held_s == pytest.approx(waited)
        assert "fence " in str(stats)
        assert sealed(ckpt) == 5
    kept = next(event for event in scene.told.events if isinstance(event, SavedToMemory) and event.id.step == 5)
    assert kept.stall_s > 0


def test_fence_returns_when_the_copy_is_done(scene: Scene, tmp_path: Path, held_copy: HeldCopy) -> None:
    with spying(scene.told), scene.training(tmp_path / "p") as ckpt:
        for _ in range(4):
            scene.step(ckpt)
        scene.step(ckpt, held=held_copy)
        threading.Timer(0.05, held_copy.let_go).start()
        ckpt.fence()
        scene.write()
        assert sealed(ckpt) == 5
    assert not scene.told.demoted
    assert restored(tmp_path / "p", scene) == 5


@pytest.mark.parametrize("failing", [False, True], ids=["close", "an exception in the step"])
def test_what_is_being_copied_at_the_end_is_copied_and_sealed(
    scene: Scene, tmp_path: Path, held_copy: HeldCopy, failing: bool
) -> None:
    try:
        with spying(scene.told), scene.training(tmp_path / "p") as ckpt:
            for _ in range(4):
                scene.step(ckpt)
            scene.step(ckpt, held=held_copy)
            assert held_copy.reached.wait(60)
            threading.Timer(0.05, held_copy.let_go).start()
            if failing:
                raise LookupError("the training's own")
    except LookupError:
        assert failing
    assert restored(tmp_path / "p", scene) == 5


def test_a_copy_that_fails_loses_its_state_alone(scene: Scene, tmp_path: Path) -> None:
    with spying(scene.told), scene.training(tmp_path / "p") as ckpt:
        for _ in range(4):
            scene.step(ckpt)
        assert sealed(ckpt) == 4
        with mock.patch("tenuto.integrations.torch.device.HostCopies.copy", side_effect=OSError("a page is gone")):
            scene.step(ckpt)
            scene.body(0)
        assert sealed(ckpt) == 4
        ckpt.step_done()
        assert sealed(ckpt) == 6
    assert any("step 5 is not kept in memory" in text and "a page is gone" in text for text in scene.said())


def test_an_update_does_not_wait_for_ever(
    scene: Scene, tmp_path: Path, held_copy: HeldCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spying(scene.told), scene.training(tmp_path / "p") as ckpt:
        for _ in range(4):
            scene.step(ckpt)
        assert sealed(ckpt) == 4
        scene.step(ckpt, held=held_copy)
        monkeypatch.setattr(fence, "DEADLINE_S", 0.02)
        scene.body(0)
        assert sealed(ckpt) == 4, "what was not copied in time is not sealed"
        held_copy.let_go()
        ckpt.step_done()
        assert sealed(ckpt) == 6
    assert any("did not end within" in text for text in scene.said())


@pytest.mark.parametrize("thread", ["tenuto-fence-5", "tenuto-memory-5"])
def test_where_no_thread_can_be_started_nothing_waits_for_it(scene: Scene, tmp_path: Path, thread: str) -> None:
    submit = WorkerThreads.submit

    def refusing(self: WorkerThreads, work: Callable[[], None], name: str) -> BackgroundWork:
        if name == thread:
            raise RuntimeError("can't start new thread")
        return submit(self, work, name)

    with spying(scene.told), scene.training(tmp_path / "p") as ckpt:
        for _ in range(4):
            scene.step(ckpt)
        assert sealed(ckpt) == 4
        with mock.patch.object(WorkerThreads, "submit", refusing):
            scene.step(ckpt)
        assert any("step 5 is not kept in memory" in text and "new thread" in text for text in scene.said())
        assert not update_barrier._barriers and not memory_of(ckpt).tier.busy
        scene.step(ckpt)
        assert sealed(ckpt) == 6


def test_without_room_for_two_images_saves_alone_are_fenced(scene: Scene, tmp_path: Path) -> None:
    told = train(tmp_path / "p", scene.state, scene.body, told=scene.told, memory=EACH, memory_budget=30 << 10)
    assert assert_images_are_right(tmp_path / "p", scene.state, told) == list(range(1, 9))
    assert not scene.sealed() and told.late[5]
    assert sum("states are not kept in memory" in text for text in scene.said()) == 1


def test_capture_eager_starts_no_fence(scene: Scene, tmp_path: Path) -> None:
    told = train(tmp_path / "p", scene.state, scene.body, told=scene.told, capture="eager", save=NEVER, memory=EACH)
    assert not told.late and committed(tmp_path / "p") == []


def test_the_wait_for_a_state_hastens_its_copy(scene: Scene, tmp_path: Path) -> None:
    with spying(scene.told), scene.training(tmp_path / "p") as ckpt:
        for _ in range(4):
            scene.step(ckpt)
        saver: MemorySaver = memory_of(ckpt)._saver
        assert saver.fencing is not None
        saver.fencing._pace.spare_s = 3600.0
        with mock.patch.object(fence.CopyPace, "learn", lambda self, seconds: None):
            scene.step(ckpt)
            assert sealed(ckpt) == 5
