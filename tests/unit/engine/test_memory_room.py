"""Too little room for the memory tier: no crash, one warning in words, and saves to the store as ever."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.memory_training import live
from support.said import said
from tenuto import every
from tenuto.engine.memory_tier.listing import images
from tenuto.engine.staging import arena
from tenuto.errors import UsageError
from tenuto.repo.lineage import latest
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only"),
    pytest.mark.filterwarnings("ignore:states are not kept:tenuto.TenutoWarning"),
]

MIB = 1 << 20


class Told:
    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)

    def of(self, name):
        return [event for event in self.events if type(event).__name__ == name]

    def off(self):
        return [event.message for event in self.of("Warned") if "not kept in memory" in event.message]


def files(root):
    return sorted(path.name for path in root.rglob("0-*") if path.suffix != ".lock")


def train(where, told, *, steps=4, elements=MIB // 4, **options):
    state = {"w": np.zeros(elements, np.float32)}
    with tenuto.Checkpointer(where, state, memory=every(steps=1), sinks=[told], **options) as ckpt:
        for _ in ckpt.steps(steps):
            state["w"] += 1
        tier = ckpt._training.saving.memory.tier
        off = tier.off
    return off


def a_small_file_system(monkeypatch, root, nbytes):
    """As a file system of this size that holds nothing but what lies below `root`, and what did and is still mapped."""

    def room(descriptor):
        there = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
        return max(nbytes - there - still_mapped(root), 0)

    monkeypatch.setattr(arena, "file_system_headroom", room)
    monkeypatch.setattr("tenuto.engine.memory_tier.listing.file_system_headroom", room)


def still_mapped(root):
    """Bytes of files below `root` that are removed and keep their pages, for this process has them mapped."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(root) in line and line.endswith("(deleted)"):
            begin, _, end = line.partition(" ")[0].partition("-")
            found += int(end, 16) - int(begin, 16)
    return found


@pytest.mark.parametrize("room", [0, MIB // 2, 3 * MIB // 2])
def test_where_two_images_do_not_fit_the_tier_is_off_and_says_so_once(tmp_path, root, monkeypatch, room):
    a_small_file_system(monkeypatch, root, room)
    told = Told()
    with said("not kept in memory"):
        off = train(tmp_path / "ckpts", told)
    assert "--shm-size" in off
    assert "MiB" in off
    assert "tenuto memory clear" in off
    assert len(told.off()) == 1
    assert latest(Repo.open(open_store(tmp_path / "ckpts")), "main").step == 4
    assert not told.of("SavedToMemory")
    assert files(root) == [], "the half that did fit is given back"


def test_a_control_group_that_is_full_is_no_crash_either(tmp_path, root, monkeypatch):
    monkeypatch.setattr(arena, "memory_headroom", lambda: 65 * MIB)
    told = Told()
    assert "MiB of memory are free" in train(tmp_path / "ckpts", told)
    assert latest(Repo.open(open_store(tmp_path / "ckpts")), "main").step == 4


def test_the_stated_budget_counts_both_images(tmp_path, root):
    told = Told()
    assert "the budget is 1 MiB" in train(tmp_path / "ckpts", told, memory_budget=3 * MIB // 2)
    assert latest(Repo.open(open_store(tmp_path / "ckpts")), "main").step == 4
    assert train(tmp_path / "two", Told(), memory_budget=5 * MIB // 2) == ""


@pytest.mark.parametrize(
    ("budget", "kept", "why"),
    [
        (9 * MIB // 4, 3, "2 images take 2 MiB, and the budget is 2 MiB"),
        (7 * MIB // 2, 4, "2 images take 4 MiB, and the budget is 3 MiB"),
    ],
    ids=["no room for a window", "room for a window"],
)
def test_a_state_that_outgrows_the_budget_ends_the_tier_and_saves_have_what_it_took(tmp_path, root, budget, kept, why):
    """As the first step of an optimizer makes it grow. The images before it stay until a save needs their room: for
    its whole image, not for a window of it, at which training would wait from then on."""
    told = Told()
    state = {"w": np.zeros(MIB // 4 - 10_000, np.float32)}
    with said("not kept in memory"):
        with tenuto.Checkpointer(
            tmp_path / "ckpts", state, memory=every(steps=1), memory_budget=budget, sinks=[told]
        ) as ckpt:
            for step in ckpt.steps(6):
                if step == 3:
                    state["w"] = np.zeros(MIB // 2, np.float32)
                state["w"] += 1
                tier = ckpt._training.saving.memory.tier
                assert tier.nbytes <= budget
                assert step <= kept or (tier.off and tier.nbytes > 3 * MIB // 2 and files(root))
    assert why in told.off()[0]
    assert [event.id.step for event in told.of("SavedToMemory")] == list(range(1, kept + 1))
    assert not told.of("SaveFailedEvent")
    assert not [event.message for event in told.of("Warned") if "goes out through" in event.message]
    assert set(tenuto.load(tmp_path / "ckpts").state["w"].tolist()) == {3.0}
    assert files(root) == []


def test_a_state_that_grows_within_the_budget_is_kept(tmp_path, root):
    told = Told()
    state = {"w": np.zeros(MIB // 8, np.float32)}
    with tenuto.Checkpointer(
        tmp_path / "ckpts", state, memory=every(steps=1), memory_budget=4 * MIB, sinks=[told]
    ) as ckpt:
        for step in ckpt.steps(6):
            if step == 2:
                state["w"] = np.zeros(3 * MIB // 8, np.float32)
            state["w"] += 1
        assert ckpt._training.saving.memory.tier.off == ""
    assert not told.off() and sorted(event.id.step for event in told.of("SavedToMemory")) == [1, 2, 3, 4, 5]


def test_a_state_that_grows_in_its_first_step_is_kept_in_twice_its_room_and_a_little(tmp_path, root, monkeypatch):
    """As the first step of an optimizer makes it grow."""
    a_small_file_system(monkeypatch, root, int(6.8 * MIB))
    told = Told()
    state = {"w": np.zeros(MIB // 4, np.float32)}
    with tenuto.Checkpointer(tmp_path / "ckpts", state, memory=every(steps=1), sinks=[told]) as ckpt:
        for step in ckpt.steps(6):
            if step == 0:
                state["w"] = np.zeros(3 * MIB // 4, np.float32)
            state["w"] += 1
        assert ckpt._training.saving.memory.tier.off == ""
    assert not told.off() and sorted(event.id.step for event in told.of("SavedToMemory")) == [1, 2, 3, 4, 5]


def test_without_shared_memory_there_is_no_tier(tmp_path, root, monkeypatch):
    monkeypatch.setattr("tenuto.engine.staging.slots.SHARED_MEMORY", str(root / "none"))
    told = Told()
    assert "cannot be used" in train(tmp_path / "ckpts", told)
    assert latest(Repo.open(open_store(tmp_path / "ckpts")), "main").step == 4


def test_a_state_that_outgrows_the_room_ends_the_tier_and_not_training(tmp_path, root, monkeypatch):
    a_small_file_system(monkeypatch, root, 4 * MIB)
    told = Told()
    state = {"w": np.zeros(MIB // 4, np.float32)}
    with tenuto.Checkpointer(tmp_path / "ckpts", state, memory=every(steps=1), sinks=[told]) as ckpt:
        for step in ckpt.steps(6):
            if step == 3:
                state["w"] = np.zeros(2 * MIB, np.float32)
            state["w"] += 1
    assert told.of("SavedToMemory")
    assert len(told.off()) == 1
    newest = tenuto.load(tmp_path / "ckpts")
    assert newest.step == 6
    assert set(newest.state["w"].tolist()) == {3.0}


def test_what_dead_processes_of_other_runs_left_gives_way_oldest_first(tmp_path, root, monkeypatch):
    elements = MIB // 8
    assert live(tmp_path / "old", kill=2, elements=elements).killed
    assert live(tmp_path / "new", kill=2, elements=elements).killed
    assert len(list(images())) == 4
    taken = sum(found.bytes for found in images())
    a_small_file_system(monkeypatch, root, taken + 5 * MIB // 2)
    told = Told()
    assert train(tmp_path / "ckpts", told) == ""
    assert told.of("SavedToMemory")
    assert len(list(images())) == 4, "there was room beside them"
    a_small_file_system(monkeypatch, root, taken + 3 * MIB // 2)
    told = Told()
    assert train(tmp_path / "more", told) == ""
    left = [found.footer.where for found in images()]
    assert 2 <= len(left) < 4
    assert left.count(str(tmp_path / "new")) == 2
    assert any("its room was needed" in event.message for event in told.of("Warned"))


def test_what_dead_processes_left_gives_way_to_a_state_that_has_grown(tmp_path, root, monkeypatch):
    assert live(tmp_path / "old", kill=2, elements=MIB // 8).killed
    a_small_file_system(monkeypatch, root, sum(found.bytes for found in images()) + 2 * MIB)
    told = Told()
    state = {"w": np.zeros(MIB // 16, np.float32)}
    with tenuto.Checkpointer(tmp_path / "ckpts", state, memory=every(steps=1), sinks=[told]) as ckpt:
        assert len([found for found in images() if found.footer is not None]) == 2, "there is room beside them"
        for step in ckpt.steps(4):
            if step == 0:
                state["w"] = np.zeros(MIB // 4, np.float32)
            state["w"] += 1
        assert ckpt._training.saving.memory.tier.off == ""
    assert len([event for event in told.of("Warned") if "its room was needed" in event.message]) == 1
    assert sorted(event.id.step for event in told.of("SavedToMemory")) == [1, 2, 3]


def test_skipping_is_counted_and_told(tmp_path, root, monkeypatch):
    import threading

    from tenuto.engine.memory_tier.tier import MemoryTier

    gate = threading.Event()
    seal = MemoryTier.seal
    monkeypatch.setattr(MemoryTier, "seal", lambda self, *a, **k: gate.wait(30) and seal(self, *a, **k))
    told = Told()
    state = {"w": np.zeros(1000)}
    with tenuto.Checkpointer(
        tmp_path / "ckpts", state, save=every(steps=100), memory=every(steps=1), on_busy="skip", sinks=[told]
    ) as ckpt:
        for _ in ckpt.steps(3):
            state["w"] += 1
        assert ckpt._training.saving.memory.skipped == 2
        gate.set()
    assert [event.step for event in told.of("SaveSkipped")] == [2, 3]
    assert [event.id.step for event in told.of("SavedToMemory")] == [1]


@pytest.mark.parametrize(
    "memory", [3, "every step", tenuto.on.improve("loss"), every(stall="1%"), every(steps=2, stall="1%")]
)
def test_what_does_not_say_when_is_refused(tmp_path, memory):
    with pytest.raises(UsageError, match="memory="):
        tenuto.Checkpointer(tmp_path / "ckpts", {"w": np.zeros(3)}, memory=memory)


def test_a_cadence_in_minutes_and_two_together(tmp_path, root):
    told = Told()
    state = {"w": np.zeros(1000)}
    with tenuto.Checkpointer(
        tmp_path / "ckpts", state, save=every(steps=100), memory=every(minutes=60) | every(steps=2), sinks=[told]
    ) as ckpt:
        for _ in ckpt.steps(5):
            state["w"] += 1
    assert [event.id.step for event in told.of("SavedToMemory")] == [2, 4]
    assert all(event.bytes > 8000 and event.stall_s < event.seconds for event in told.of("SavedToMemory"))


def few(told):
    return [event.message for event in told.of("Warned") if "may be in flight" in event.message]


@pytest.mark.parametrize(("images_", "most"), [(4.5, 3), (3.5, 2), (2.5, 1)])
def test_with_less_room_fewer_saves_are_in_flight_and_it_is_said_once(tmp_path, root, monkeypatch, images_, most):
    a_small_file_system(monkeypatch, root, int(images_ * MIB))
    told = Told()
    state = {"w": np.zeros(MIB // 4 - 40_000, np.float32)}
    with tenuto.Checkpointer(tmp_path / "ckpts", state, in_flight=3, memory=every(steps=1), sinks=[told]) as ckpt:
        for _ in ckpt.steps(4):
            state["w"] += 1
        tier = ckpt._training.saving.memory.tier
        assert (tier.off, tier.in_flight) == ("", most)
        assert len(files(root)) == most + 1
    assert [message.partition(" saves")[0] for message in few(told)] == ([f"{most} of 3"] if most < 3 else [])
    assert set(tenuto.load(tmp_path / "ckpts").state["w"].tolist()) == {4.0}
    assert files(root) == []


def test_the_budget_is_for_all_images_in_memory(tmp_path, root):
    told = Told()
    assert train(tmp_path / "ckpts", told, in_flight=3, memory_budget=7 * MIB // 2) == ""
    (message,) = few(told)
    assert message.startswith("2 of 3 saves may be in flight at once: one more image in memory does not fit (4 images")


def test_a_state_that_outgrows_the_room_is_kept_with_fewer_images_first(tmp_path, root, monkeypatch):
    a_small_file_system(monkeypatch, root, 10 * MIB)
    told = Told()
    state = {"w": np.zeros(MIB // 4, np.float32)}
    with tenuto.Checkpointer(tmp_path / "ckpts", state, in_flight=3, memory=every(steps=1), sinks=[told]) as ckpt:
        for step in ckpt.steps(8):
            if step == 3:
                state["w"] = np.zeros(MIB, np.float32)
            state["w"] += 1
        tier = ckpt._training.saving.memory.tier
        assert (tier.off, tier.in_flight) == ("", 1)
    assert [message.partition(" saves")[0] for message in few(told)] == ["2 of 3", "1 of 3"], "each as it is found out"
    assert not told.off()
    assert set(tenuto.load(tmp_path / "ckpts").state["w"].tolist()) == {5.0}


def test_more_saves_in_flight_take_no_image_of_another_run(tmp_path, root, monkeypatch):
    assert live(tmp_path / "old", kill=2, elements=MIB // 8).killed
    taken = sum(found.bytes for found in images())
    a_small_file_system(monkeypatch, root, taken + 5 * MIB // 2)
    told = Told()
    assert train(tmp_path / "ckpts", told, in_flight=3) == ""
    assert len([found for found in images() if found.footer.where == str(tmp_path / "old")]) == 2
    assert len(few(told)) == 1


def test_memory_that_is_turned_off_while_it_is_written_from_is_given_back_after_it(tmp_path, root, monkeypatch):
    from support.held_store import held

    store, told = held(tmp_path / "ckpts", 1), Told()
    state = {"w": np.zeros(MIB // 4, np.float32)}
    with said("not kept in memory"):
        with tenuto.Checkpointer(store, state, memory=every(steps=1), sinks=[told]) as ckpt:
            ckpt.step_done()
            save = ckpt.save()
            store.await_pack(1)
            a_small_file_system(monkeypatch, root, 3 * MIB)
            state["w"] = np.zeros(MIB, np.float32)
            ckpt.step_done()
            tier = ckpt._training.saving.memory.tier
            assert told.off() and tier.nbytes >= MIB, "the image is still being written from"
            store.let_go()
            save.wait()
            ckpt.wait()
            assert len(files(root)) == 1, "a sealed one stays until the end"
            assert MIB <= tier.nbytes < 2 * MIB, "and takes its part of the budget"
    assert files(root) == []
