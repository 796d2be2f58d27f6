"""The fence itself, over a device of the test's own: what is told in which order, and what an update waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tenuto.engine.fence import fence as fences
from tenuto.engine.fence.fence import CaptureTargets, CopyPace, Fence
from tenuto.engine.staging.arena import Arena, acquire
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.engine.staging.capture import Capturer
from tenuto.model.leaf import LeafSpec
from tenuto.state import update_barrier
from tenuto.state.contract import Flattened
from tenuto.state.update_barrier import CaptureChoice, LateLeaf, Span

SAVE_ID = "7" * 32


class Source:
    """Bytes that count their changes, where the writer lets them."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data, self.changes = data, 0

    def write(self, value: int, *, counted: bool = True) -> None:
        self.data[:] = value
        self.changes += counted


class Bound:
    late_step = 100

    def __init__(self, views: Sequence[np.ndarray[Any, Any]], device: Device) -> None:
        self.views, self.device = views, device
        self.on_device = device.on_device

    def copy(self, sources: Sequence[Source], start: int, stop: int) -> None:
        for row in range(start, stop):
            self.views[row][:] = sources[row].data

    def copy_part(self, source: Source, leaf: int, start: int, stop: int) -> None:
        self.views[leaf][start:stop] = source.data[start:stop]

    def splits(self, source: Source) -> bool:
        return True

    def wait(self) -> None:
        pass

    def can_wait(self, source: Source) -> bool:
        return True

    def hold(self, source: Source) -> Source:
        return source

    def version(self, held: Source) -> int:
        return held.changes

    def late(self, parts: Sequence[LateLeaf], watched: Sequence[LateLeaf] = (), probe: object = None) -> Copies:
        return Copies(self, parts, watched)

    def probe(self, parts: Sequence[LateLeaf]) -> Callable[[int], bool]:
        taken = [held.data[a:b].copy() for held, _, a, b in parts]
        return lambda number: bool((parts[number][0].data[slice(*parts[number][2:])] == taken[number]).all())

    def compare(self, parts: Sequence[LateLeaf]) -> Callable[[], Sequence[bool]]:
        found = [bool((held.data[a:b] == self.views[leaf][a:b]).all()) for held, leaf, a, b in parts]
        return lambda: found


class Copies:
    def __init__(self, bound: Bound, parts: Sequence[LateLeaf], watched: Sequence[LateLeaf]) -> None:
        self.bound, self.parts, self.watched = bound, parts, watched

    def copy(self, number: int) -> None:
        if threading.current_thread().name == "fence-test":
            self.bound.device.before_copy(number)
        self.bound.copy_part(*self.parts[number])

    def unchanged(self) -> Sequence[bool]:
        return self.bound.compare(self.watched)()

    def order(self) -> bool:
        return self.bound.on_device


class Device:
    name = "test"

    def __init__(self, *, on_device: bool = False) -> None:
        self.on_device = on_device
        self.before_copy: Callable[[int], object] = lambda number: None

    def bind(self, specs: Sequence[LeafSpec], views: Sequence[np.ndarray[Any, Any]], *, stays: bool = True) -> Bound:
        return Bound(views, self)


class Observer:
    def __init__(self) -> None:
        self.positions: list[int] = []
        self.told: list[tuple[Any, ...]] = []

    def progressed(self, position: int) -> None:
        self.positions.append(position)

    def torn(self, leaf: int, why: str) -> None:
        self.told.append(("torn", leaf))

    def differs(self, leaf: int) -> None:
        self.told.append(("differs", leaf))

    def compared(self) -> None:
        self.told.append(("compared",))

    def passed(self, seconds: float) -> None:
        self.told.append(("passed",))

    def ended(self, failure: BaseException | None) -> None:
        self.told.append(("ended", type(failure)))


class Scene:
    """Three leaves of 250 bytes, of which the first is eager."""

    def __init__(self, *, on_device: bool = False) -> None:
        self.device = Device(on_device=on_device)
        specs = tuple(LeafSpec(name, "uint8", (250,)) for name in "abc")
        self.sources = [Source(np.full(250, number + 1, np.uint8)) for number in range(3)]
        self.flattened = Flattened({}, None, specs, self.sources, (self.device,), (0, 0, 0), "f")
        self.layout = plan_layout(specs)
        self.arena: Arena = acquire(self.layout.nbytes, repository="r", run="main", shared=False)
        self.capturer = Capturer(self.flattened, self.layout, self.arena)
        self.places = CaptureTargets(self.capturer)
        self.observer = Observer()

    def fence(self, choice: CaptureChoice | None = None, pace: CopyPace | None = None) -> Fence:
        choice = choice or CaptureChoice(
            late=[Span(1, 0, 250), Span(2, 0, 100), Span(2, 150, 250)], watched=[Span(2, 100, 150)]
        )
        fence = Fence(self.flattened, choice, self.places, self.observer, pace=pace or CopyPace(), name="fence-test")
        self.places.capture_now(self.capturer, self.flattened, SAVE_ID, choice)
        return fence

    def image(self) -> list[set[int]]:
        starts = self.layout.start.tolist()
        return [set(self.arena.buffer[start : start + 250].tolist()) for start in starts]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_what_is_late_is_copied_in_order_and_the_last_of_it_told_when_all_is_judged(scene: Scene) -> None:
    seen: list[int] = []
    scene.device.before_copy = seen.append
    fence = scene.fence()
    assert scene.image()[0] == {1}, "what is eager is copied before the fence begins"
    fence.begin()
    assert fence.at_rest(60)
    assert scene.image() == [{1}, {2}, {3}]
    begin = scene.layout.start.tolist()
    late = [begin[1], begin[1] + 100, begin[1] + 200, begin[2], begin[2] + 150]
    assert scene.observer.positions == [*late, scene.layout.nbytes]
    assert scene.observer.told == [("ended", type(None))]
    fence.before_update()
    fence.before_update()
    assert scene.observer.told[1:] == [("compared",), ("passed",)], "once"
    scene.sources[1].write(9)  # the update
    assert fence.at_rest(0) and not update_barrier._barriers


def test_an_update_waits_for_the_copy(scene: Scene) -> None:
    go = threading.Event()
    scene.device.before_copy = lambda number: go.wait(60)
    fence = scene.fence(pace=CopyPace(spare_s=3600.0))  # in no hurry at all, until somebody waits
    fence.begin()
    updated = threading.Event()

    def update() -> None:
        update_barrier.let_updates_pass()
        for source in scene.sources:
            source.write(9)
        updated.set()

    thread = threading.Thread(target=update)
    thread.start()
    assert not updated.wait(0.02)
    go.set()
    thread.join(60)
    assert updated.is_set() and scene.image() == [{1}, {2}, {3}]
    assert ("torn", 1) not in scene.observer.told


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_counted_change_before_a_part_is_copied_tears_it(scene: Scene, at: int) -> None:
    leaf = 1 if at < 3 else 2
    scene.device.before_copy = lambda number: scene.sources[leaf].write(9) if number == at else None
    fence = scene.fence()
    fence.begin()
    assert fence.at_rest(60)
    assert ("torn", leaf) in scene.observer.told
    assert scene.layout.nbytes not in scene.observer.positions, "a torn image is never complete"
    fence.before_update()


@pytest.mark.parametrize("leaf", [1, 2])
def test_a_change_that_is_counted_when_its_leaf_was_judged_already_tears_it(
    scene: Scene, leaf: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation is counted when it is done: here when no part of the leaf is left, and for the last leaf when no
    part of the image is."""

    def before(number: int) -> None:
        if number == 3 * (leaf - 1):
            scene.sources[leaf].write(9, counted=False)
        if (leaf, number) == (1, 3):
            scene.sources[leaf].changes += 1

    def unchanged(self: Copies) -> Sequence[bool]:
        scene.sources[leaf].changes = 1
        return [True for _ in self.watched]

    monkeypatch.setattr(Copies, "unchanged", unchanged)
    scene.device.before_copy = before
    fence = scene.fence()
    fence.begin()
    assert fence.at_rest(60)
    assert 9 in scene.image()[leaf]
    assert ("torn", leaf) in scene.observer.told and ("torn", 3 - leaf) not in scene.observer.told
    assert scene.layout.nbytes not in scene.observer.positions, "a torn image is never complete"
    fence.before_update()


def test_a_leaf_on_probation_beside_late_ones_is_compared_and_never_torn(scene: Scene) -> None:
    choice = CaptureChoice(late=[Span(1, 0, 250)], watched=[Span(2, 0, 250)], probation=["c"])
    scene.device.before_copy = lambda number: scene.sources[2].write(9, counted=False) if number == 1 else None
    fence = scene.fence(choice)
    fence.begin()
    assert fence.at_rest(60)
    assert set(scene.observer.told) == {("differs", 2), ("ended", type(None))}
    assert scene.image() == [{1}, {2}, {3}] and scene.observer.positions[-1] == scene.layout.nbytes
    fence.before_update()
    assert scene.observer.told[-2:] == [("compared",), ("passed",)]


def test_an_uncounted_change_of_a_watched_part_tears_it(scene: Scene) -> None:
    scene.device.before_copy = lambda number: scene.sources[2].write(9, counted=False) if number == 3 else None
    fence = scene.fence()
    fence.begin()
    assert fence.at_rest(60)
    assert ("torn", 2) in scene.observer.told and scene.layout.nbytes not in scene.observer.positions
    fence.before_update()


@pytest.mark.parametrize("counted", [True, False])
def test_a_change_after_the_copy_is_only_told(scene: Scene, counted: bool) -> None:
    fence = scene.fence()
    fence.begin()
    assert fence.at_rest(60)
    scene.sources[2].write(9, counted=counted)
    fence.before_update()
    assert ("differs", 2) in scene.observer.told and ("torn", 2) not in scene.observer.told
    assert scene.image()[2] == {3} and scene.observer.positions[-1] == scene.layout.nbytes


def test_in_the_probation_the_image_is_complete_at_once_and_slices_are_compared_on_the_way(scene: Scene) -> None:
    fence = scene.fence(CaptureChoice(watched=[Span(1, 0, 250), Span(2, 0, 250)], probation=["b", "c"]))
    assert scene.image() == [{1}, {2}, {3}]
    scene.sources[1].write(9, counted=False)
    fence.begin()
    assert fence.at_rest(60)
    assert scene.observer.positions == [scene.layout.nbytes] and ("differs", 1) in scene.observer.told
    scene.sources[1].write(2, counted=False)  # back again before the update: the comparison there sees nothing
    fence.before_update()
    assert scene.observer.told[-2:] == [("compared",), ("passed",)] and ("differs", 2) not in scene.observer.told


def test_a_copy_that_fails_is_told_and_lets_the_update_pass(scene: Scene) -> None:
    def fail(number: int) -> None:
        raise OSError("gone")

    scene.device.before_copy = fail
    fence = scene.fence()
    fence.begin()
    fence.before_update()
    assert ("ended", OSError) in scene.observer.told and scene.layout.nbytes not in scene.observer.positions


def test_a_comparison_that_fails_lets_the_update_pass(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = scene.fence()
    fence.begin()
    assert fence.at_rest(60)

    def fail(self: Bound, parts: Sequence[LateLeaf]) -> Callable[[], Sequence[bool]]:
        raise OSError("gone")

    monkeypatch.setattr(Bound, "compare", fail)
    fence.before_update()
    assert scene.observer.told[-2:] == [("ended", OSError), ("passed",)] and not update_barrier._barriers


def test_a_copy_that_hangs_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "DEADLINE_S", 0.02)
    reached, go = threading.Event(), threading.Event()

    def hang(number: int) -> None:
        reached.set()
        go.wait(60)

    scene.device.before_copy = hang
    fence = scene.fence()
    fence.begin()
    assert reached.wait(60)  # a thread that begins when it is given up already copies nothing, and does not hang
    fence.before_update()
    assert ("ended", TimeoutError) in scene.observer.told
    assert not fence.at_rest(0.01), "its memory is not to be used before it has ended"
    go.set()
    assert fence.at_rest(60)
    assert scene.layout.nbytes not in scene.observer.positions


def test_what_is_given_up_ends_with_the_part_that_it_is_at(scene: Scene) -> None:
    go, seen = threading.Event(), list[int]()

    def before(number: int) -> None:
        seen.append(number)
        go.wait(60)

    scene.device.before_copy = before
    fence = scene.fence()
    fence.begin()
    fence.give_up()
    go.set()
    assert fence.at_rest(60) and len(seen) <= 1
    fence.before_update()


def test_a_device_orders_the_update_and_the_host_does_not_wait() -> None:
    scene = Scene(on_device=True)
    go = threading.Event()
    scene.device.before_copy = lambda number: go.wait(60)
    fence = scene.fence()
    fence.begin()
    fence.before_update()  # returns although nothing has arrived
    assert scene.observer.positions in ([], [scene.layout.start.tolist()[1]])
    for source in scene.sources:
        source.changes += 1  # the update is a change, and no tear: versions were judged before it
    go.set()
    assert fence.at_rest(60)
    assert scene.observer.positions[-1] == scene.layout.nbytes
    assert not any(told[0] == "torn" for told in scene.observer.told)
    assert ("compared",) not in scene.observer.told
    fence.settle()
    assert ("compared",) in scene.observer.told, "what a device compares is known later"


def test_a_device_counts_changes_up_to_the_update() -> None:
    scene = Scene(on_device=True)
    go = threading.Event()
    scene.device.before_copy = lambda number: go.wait(60)
    fence = scene.fence()
    fence.begin()
    scene.sources[1].changes += 1
    fence.before_update()
    go.set()
    assert fence.at_rest(60)
    assert ("torn", 1) in scene.observer.told and scene.layout.nbytes not in scene.observer.positions


def test_a_device_counts_changes_of_what_was_judged_already() -> None:
    scene = Scene(on_device=True)
    go, reached = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 3:  # the last part of the leaf before this one is judged
            reached.set()
            go.wait(60)

    scene.device.before_copy = before
    fence = scene.fence()
    fence.begin()
    assert reached.wait(60)
    scene.sources[1].changes += 1
    fence.before_update()
    scene.sources[2].changes += 1  # the update
    go.set()
    assert fence.at_rest(60)
    assert ("torn", 1) in scene.observer.told and ("torn", 2) not in scene.observer.told
    assert scene.layout.nbytes not in scene.observer.positions


def test_memory_is_let_go_of_once_the_update_may_come(scene: Scene) -> None:
    fence = scene.fence()
    fence.begin()
    assert fence.at_rest(60)
    assert fence._sources
    fence.before_update()
    assert not fence._sources and not fence._late and not fence._copies


def test_the_pace_is_learned_from_how_long_the_save_before_had() -> None:
    pace = CopyPace(share=0.5)
    assert pace.delay(begun_s=0.0, done=0.5) < 0, "nothing known: as fast as it goes"
    pace.learn(10.0)
    assert pace.spare_s == 5.0
    pace.learn(7200.0)
    assert pace.spare_s == fences.MOST_SPARE_S, "not an hour, after an evaluation of two"
