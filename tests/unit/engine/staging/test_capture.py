from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.engine.staging import capture
from tenuto.engine.staging.arena import Arena, acquire
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.engine.staging.capture import Capturer
from tenuto.errors import UsageError
from tenuto.model.leaf import LeafSpec
from tenuto.state.contract import Flattened

SAVE_ID = "5" * 32
BATCH = 1 << 12


class FakeBound:
    """Copies only when waited for, as a device would, and writes down what was asked of it."""

    def __init__(self, views: Sequence[np.ndarray], splits: bool) -> None:
        self.views, self.can_split = views, splits
        self.pending: list[tuple[np.ndarray, np.ndarray]] = []
        self.asked: list[tuple[Any, ...]] = []

    def copy(self, sources: Sequence[np.ndarray], start: int, stop: int) -> None:
        self.asked.append(("copy", start, stop))
        assert len(sources) == len(self.views)
        self.pending += [(self.views[leaf], sources[leaf]) for leaf in range(start, stop)]

    def copy_part(self, source: np.ndarray, leaf: int, start: int, stop: int) -> None:
        self.asked.append(("part", leaf, start, stop))
        self.pending.append((self.views[leaf][start:stop], source[start:stop]))

    def splits(self, source: np.ndarray) -> bool:
        return self.can_split

    def wait(self) -> None:
        for view, source in self.pending:
            view[:] = source
        self.pending = []


class FakeDevice:
    def __init__(self, name: str, splits: bool) -> None:
        self.name, self.can_split = name, splits
        self.bounds: list[FakeBound] = []

    def bind(self, specs: Sequence[LeafSpec], views: Sequence[np.ndarray], *, stays: bool = True) -> FakeBound:
        assert [spec.nbytes for spec in specs] == [len(view) for view in views]
        self.bounds.append(FakeBound(views, self.can_split))
        return self.bounds[-1]


def flattened(
    leaves: list[tuple[str, int, int]], splits: bool = True, fingerprint: str = "f", seed: int = 0
) -> Flattened:
    """Leaves of (dtype, elements, device)."""
    generator = np.random.default_rng(seed)
    specs = tuple(LeafSpec(f"{number:03d}", name, (count,)) for number, (name, count, _) in enumerate(leaves))
    sources = [generator.integers(0, 256, spec.nbytes, dtype=np.uint8) for spec in specs]
    devices = (FakeDevice("first", splits), FakeDevice("second", False))
    return Flattened(None, None, specs, sources, devices, [device for _, _, device in leaves], fingerprint)


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Any:
    monkeypatch.setattr("tenuto.engine.staging.slots.SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(capture, "BATCH_BYTES", BATCH)
    taken: list[Arena] = []

    def take(nbytes: int) -> Arena:
        taken.append(acquire(nbytes, repository="r", run="main"))
        taken[-1].buffer[:] = 0xEE
        return taken[-1]

    yield take
    for arena in taken:
        arena.release()


def check(state: Flattened, arena: Arena, upto: int | None = None) -> None:
    """The image, up to a byte, is what the state says."""
    layout = plan_layout(state.specs)
    expected = np.zeros(layout.nbytes, np.uint8)
    layout.stamp(expected, SAVE_ID)
    for number, source in enumerate(state.sources):
        expected[layout.start[number] : layout.start[number] + layout.length[number]] = source
    assert (arena.buffer[:upto] == expected[:upto]).all()


LEAVES = st.lists(
    st.tuples(
        st.sampled_from(["float64", "float32", "bfloat16", "uint8", "numpy:<U3"]),
        st.integers(0, 3000),
        st.integers(0, 1),
    ),
    max_size=12,
)


def test_progress_never_runs_ahead_of_the_bytes(arenas) -> None:
    @settings(max_examples=30, derandomize=True, deadline=None)
    @given(LEAVES, st.booleans())
    def run(leaves: list[tuple[str, int, int]], splits: bool) -> None:
        state = flattened(leaves, splits)
        layout = plan_layout(state.specs)
        arena = arenas(layout.nbytes)
        ends: list[int] = []

        def progress(end: int) -> None:
            check(state, arena, end)
            ends.append(end)

        Capturer(state, layout, arena).capture(state, SAVE_ID, progress=progress)
        check(state, arena)
        assert ends == sorted(ends)
        assert ends[-1] == layout.nbytes

    run()


def test_without_progress_each_device_is_asked_once_for_whole_leaves(arenas) -> None:
    state = flattened([("float32", 5000, 0), ("float32", 10, 1), ("uint8", 9000, 0), ("float64", 0, 1)])
    layout = plan_layout(state.specs)
    capturer = Capturer(state, layout, arenas(layout.nbytes))
    capturer.capture(state, SAVE_ID)
    check(state, capturer.arena)
    assert [device.bounds[0].asked for device in state.devices] == [[("copy", 0, 2)], [("copy", 0, 2)]]


def test_large_leaves_are_cut_at_their_items_only_for_progress(arenas) -> None:
    state = flattened([("float32", 2500, 0), ("numpy:<U3", 700, 0), ("float32", 2500, 1)])
    layout = plan_layout(state.specs)
    capturer = Capturer(state, layout, arenas(layout.nbytes))
    ends: list[int] = []
    capturer.capture(state, SAVE_ID, progress=ends.append)
    check(state, capturer.arena)
    parts = [asked for asked in state.devices[0].bounds[0].asked if asked[0] == "part"]
    assert parts == [
        ("part", 0, 0, 4096),
        ("part", 0, 4096, 8192),
        ("part", 0, 8192, 10000),
        ("part", 1, 0, 4092),
        ("part", 1, 4092, 8184),
        ("part", 1, 8184, 8400),
    ]
    assert state.devices[1].bounds[0].asked == [("copy", 0, 1)]
    assert ends == [8192, 12288, 14096, 18188, 22280, 22496, 32496, 32768]


def test_small_leaves_go_in_batches(arenas) -> None:
    state = flattened([("float32", 100, 0)] * 50)
    layout = plan_layout(state.specs)
    capturer = Capturer(state, layout, arenas(layout.nbytes))
    capturer.capture(state, SAVE_ID, progress=lambda end: None)
    check(state, capturer.arena)
    assert [stop - start for _, start, stop in state.devices[0].bounds[0].asked] == [10] * 5


def test_destinations_are_bound_once_and_serve_later_states(arenas) -> None:
    first = flattened([("float32", 100, 0), ("uint8", 10, 1)])
    layout = plan_layout(first.specs)
    capturer = Capturer(first, layout, arenas(layout.nbytes))
    for seed in range(1, 4):
        later = flattened([("float32", 100, 0), ("uint8", 10, 1)], seed=seed)
        assert capturer.fits(later)
        capturer.capture(later, SAVE_ID)
        check(later, capturer.arena)
        assert not later.devices[0].bounds
    assert len(first.devices[0].bounds) == 1


def test_another_structure_is_refused_before_anything_is_written(arenas) -> None:
    state = flattened([("float32", 100, 0)])
    layout = plan_layout(state.specs)
    capturer = Capturer(state, layout, arenas(layout.nbytes))
    other = flattened([("float32", 100, 0)], fingerprint="g")
    assert not capturer.fits(other)
    with pytest.raises(UsageError, match="structure"):
        capturer.capture(other, SAVE_ID)
    assert (capturer.arena.buffer == 0xEE).all()


def test_an_arena_that_is_too_small_is_refused(arenas) -> None:
    state = flattened([("float32", 5000, 0)])
    with pytest.raises(UsageError, match="arena"):
        Capturer(state, plan_layout(state.specs), arenas(4096))


def test_what_progress_raises_ends_the_capture(arenas) -> None:
    state = flattened([("float32", 5000, 0)])
    layout = plan_layout(state.specs)
    capturer = Capturer(state, layout, arenas(layout.nbytes))

    def refuse(end: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capturer.capture(state, SAVE_ID, progress=refuse)
    capturer.capture(state, SAVE_ID)
    check(state, capturer.arena)


def test_leaves_worth_it_are_copied_as_one_part_beside_a_writer(arenas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "PART_BYTES", 1024)
    leaves = [("float32", count, 0) for count in (100, 300, 50, 255, 256)]
    for splits, asked in (
        (True, [("part", 0, 0, 1024), ("copy", 1, 2), ("part", 2, 0, 1200), ("copy", 3, 5)]),
        (False, [("copy", 0, 5)]),
    ):
        state = flattened(leaves, splits)
        layout = plan_layout(state.specs)
        capturer = Capturer(state, layout, arenas(layout.nbytes))
        capturer.capture(state, SAVE_ID, progress=lambda end: None)
        check(state, capturer.arena)
        assert state.devices[0].bounds[0].asked == asked


def test_nothing_is_written_before_it_is_admitted_and_the_longest_step_is_known(arenas) -> None:
    @settings(max_examples=30, derandomize=True, deadline=None)
    @given(LEAVES, st.booleans(), st.sampled_from([500_000, 3]))
    def run(leaves: list[tuple[str, int, int]], splits: bool, max_leaves: int) -> None:
        state = flattened(leaves, splits)
        layout = plan_layout(state.specs, max_leaves=max_leaves)
        arena = arenas(layout.nbytes)
        admitted, ends = [0], [0]

        def admit(end: int) -> None:
            assert admitted[-1] <= end <= layout.nbytes
            assert (arena.buffer[admitted[-1] :] == 0xEE).all()
            admitted.append(end)

        def progress(end: int) -> None:
            assert end <= admitted[-1]
            ends.append(end)

        capturer = Capturer(state, layout, arena)
        largest = capturer.largest_step(state)
        capturer.capture(state, SAVE_ID, progress=progress, admit=admit)
        assert ends[-1] == admitted[-1] == layout.nbytes
        assert largest == int(np.diff(ends).max())

    run()


def test_parts_end_at_whole_items() -> None:
    assert capture._cuts(10, 4, 8) == [0, 8, 10]
    assert capture._cuts(16, 4, 8) == [0, 8, 16]
    assert capture._cuts(30, 12, 25) == [0, 24, 30]
    assert capture._cuts(30, 12, 5) == [0, 12, 24, 30], "an item that is longer than a step is a step"


def test_runs_fill_a_step_and_keep_to_one_pack() -> None:
    assert list(capture._runs([], [], 10)) == []
    assert list(capture._runs([4, 6, 1], [0, 0, 0], 10)) == [(0, 2), (2, 3)]
    assert list(capture._runs([4, 7, 1], [0, 0, 0], 10)) == [(0, 1), (1, 3)]
    assert list(capture._runs([4, 4, 1], [0, 1, 1], 10)) == [(0, 1), (1, 3)]
    assert list(capture._runs([30, 30, 1], [0, 0, 0], 10)) == [(0, 1), (1, 2), (2, 3)]
    assert list(capture._runs([0, 30, 0], [0, 0, 0], 10)) == [(0, 1), (1, 2), (2, 3)]


def test_what_does_not_fit_is_told_in_bytes(arenas) -> None:
    state = flattened([("float32", 5000, 0)])
    layout = plan_layout(state.specs)
    with pytest.raises(UsageError) as caught:
        Capturer(state, layout, arenas(4096))
    assert caught.value.message == f"the arena has 4096 bytes, the image needs {layout.nbytes}"
    assert Capturer(state, layout, arenas(layout.nbytes)).fits(state)
