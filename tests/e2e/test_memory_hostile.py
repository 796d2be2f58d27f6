"""The memory tier where memory runs out: a file system in memory that is full, a control group that shrinks or kills.

Whatever happens, training goes on or is killed by the kernel, saves to the store are made, and the next start goes on
from what is whole.
"""

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support.memory_training import Life, fork, live, right, sealed
from support.scarce_memory import empty, fill, memory_group, on_a_small_file_system, take_until_killed
from tenuto import every, on
from tenuto.engine.memory_tier.listing import images
from tenuto.engine.staging import arena, slots
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")

MIB = 1 << 20
IMAGES = 2 * (120_000 + (140 << 10))
"""About what two images of the training take, room for their descriptions too."""
LARGE = 2 * MIB
"""Elements of a state that takes 8 MiB."""


@pytest.fixture
def where(tmp_path: Path):
    yield tmp_path / "ckpts"
    if (tmp_path / "ckpts").exists():
        assert_whole(Repo.open(open_store(tmp_path / "ckpts")))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def off(life: Life) -> list[str]:
    return [text for text in life.told("Warned") if "states are not kept in memory" in text]


def unkept(life: Life) -> list[int]:
    """The steps of which it was told that they are not kept."""
    return [int(text.split()[1]) for text in life.told("Warned") if " is not kept in memory: " in text]


def newest_step(where: Path) -> int:
    return tenuto.load(where).step


@pytest.mark.parametrize("leave", [0, 64 << 10, IMAGES // 2 + (20 << 10)], ids=["none", "a little", "one image"])
def test_a_file_system_that_is_full_at_the_start(where: Path, place: Path, leave: int) -> None:
    def body() -> None:
        fill(place, leave=leave)
        life = live(where, steps=12)
        assert life.status == 0
        assert len(off(life)) == 1
        assert "shared memory has 0 MiB free" in off(life)[0]
        right(life)
        assert newest_step(where) == 12
        assert list(images()) == [], "the half that fitted is given back"
        empty(place)
        assert live(where, kill=15).killed
        again = live(where, steps=18)
        assert (again.began, off(again)) == (15, [])
        right(again)

    on_a_small_file_system(place, 4 * MIB, body)


def test_a_file_system_that_fills_up_costs_only_what_needs_more_room(where: Path, place: Path) -> None:
    def fills(ckpt, step, state):
        if step == 4:
            sealed(ckpt)
            fill(place)

    def body() -> None:
        first = live(where, kill=17, on_step=fills)
        assert first.killed
        assert (off(first), unkept(first)) == ([], []), "its images have their pages"
        last = live(where)
        assert last.began == 17, "what is there is taken over on a full file system too"
        assert off(last) == []
        right(first, last)

    on_a_small_file_system(place, 4 * MIB, body)


def test_a_state_that_grows_on_a_full_file_system_goes_to_the_store(where: Path, place: Path) -> None:
    def grows(ckpt, step, state):
        if step == 4:
            sealed(ckpt)
            fill(place)
        if step == 6:
            state["model"]["more"] = np.full(500_000, 6.0)

    def body() -> None:
        life = live(where, steps=12, on_step=grows)
        assert life.status == 0
        assert len(off(life)) == 1
        right(life)
        found = tenuto.load(where)
        assert (found.step, set(found.state["model"]["more"].tolist())) == (12, {6.0})
        assert list(images()) == [], "what was kept before it was turned off is in the store by now"

    on_a_small_file_system(place, 4 * MIB, body)


@pytest.mark.parametrize("kill", [8, 13])
def test_a_description_that_grows_on_a_full_file_system(where: Path, place: Path, kill: int) -> None:
    """Steps 6 to 9 cannot be described; step 5 stays sealed meanwhile. From 10 on there is room again."""

    def grows(ckpt, step, state):
        sealed(ckpt)
        if step == 5:
            fill(place)
        if step == 6:
            state["notes"] = "x" * 600_000
        if step == 10:
            empty(place)

    def body() -> None:
        first = live(where, kill=kill, on_step=grows, save=every(steps=30) | on.end())
        assert first.killed
        assert unkept(first) == [step for step in (6, 7, 8, 9) if step <= kill]
        assert off(first) == []
        seen = where.parent / "seen"

        def look() -> None:
            state = {"model": {"w": np.zeros(30_000, np.float32), "b": np.zeros(7)}, "history": [0.0]}
            if kill == 13:
                state["notes"] = ""
            with tenuto.Checkpointer(where, state, memory=every(steps=1)) as ckpt:
                found = ckpt.restore()
                seen.write_text(f"{found.step} {found.source[:11]} {len(state.get('notes', ''))}")

        assert fork(look) == 0
        assert seen.read_text() == ("5 from memory 0" if kill == 8 else "13 from memory 600000")
        right(first)

    on_a_small_file_system(place, 4 * MIB, body)


def test_one_image_is_gone_on_from_where_two_do_not_fit_any_more(where: Path, place: Path) -> None:
    """It was killed while it made its other image anew, say, and others took the room."""

    def body() -> None:
        assert live(where, kill=17).killed
        older = min(images(), key=lambda one: one.footer.sequence if one.footer is not None else 0)
        (place / f"tenuto-{os.geteuid()}" / older.name).unlink()
        fill(place)
        second = live(where, kill=19)
        assert (second.killed, second.began) == (True, 17)
        assert len(off(second)) == 1
        third = live(where, steps=25)
        assert (third.status, third.began) == (0, 17), "its image counts until something newer is in the store"
        assert list(images()) == [], "a good end leaves nothing, though it was turned off"
        right(second, third)

    on_a_small_file_system(place, 4 * MIB, body)


def test_nobodys_image_gives_way_where_that_would_not_help(where: Path, tmp_path: Path, place: Path) -> None:
    """Somebody may yet go on from it."""

    def no_files_left() -> None:
        def refuse(*words: object) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        slots.SlotTable.create = refuse

    def body() -> None:
        assert live(where, kill=7).killed
        left = [one.footer for one in images()]
        assert len(left) == 2
        large = live(tmp_path / "large", steps=2, elements=MIB)
        assert (large.status, len(off(large))) == (0, 1)
        no_more = live(tmp_path / "no-more", steps=2, before=no_files_left)
        assert (no_more.status, len(off(no_more))) == (0, 1)
        assert "Too many open files" in off(no_more)[0]
        assert [one.footer for one in images()] == left
        assert live(where, steps=8).began == 7

    on_a_small_file_system(place, 4 * MIB, body)


def test_a_trainer_that_the_kernel_kills_for_its_memory_loses_one_step_at_most(where: Path, root: Path) -> None:
    with memory_group(limit=160 * MIB) as group:

        def greedy(ckpt, step, state):
            if step == 11:
                ckpt.wait()  # while a save is being written the steps beside it share one slot
            if step == 13:
                take_until_killed()

        def enter() -> None:
            group.enter(os.getpid())

        first = live(where, on_step=greedy, before=enter)
        assert (first.killed, group.kills > 0) == (True, True)
        assert max(first.digests) == 13
        second = live(where, on_step=greedy, before=enter)
        assert second.killed
        assert second.began in (11, 12), "step 12 was completed, and may not have been sealed"
        assert second.source.startswith("from memory")
        outside = live(where)
        assert outside.began in (11, 12)
        assert outside.source.startswith("from memory")
        right(first, second, outside)
        assert outside.status == 0


def large(where: Path, steps: int = 40, **options) -> Life:
    return live(where, steps, elements=LARGE, **options)


def test_a_limit_that_is_lowered_under_a_training(where: Path, root: Path) -> None:
    """What it has it keeps; what it needs more it does without. Where lowering the limit makes the kernel kill (version
    2), the next start goes on."""
    with memory_group() as group:

        def lower(ckpt, step, state):
            if step == 3:
                sealed(ckpt)
                try:
                    group.limit(group.usage // 2)
                except OSError:
                    assert group.version == 1, "version 1 refuses a limit that is below what is in use"
            if step == 5:
                ckpt.wait()
                state["model"]["more"] = np.full(2 * MIB, 5.0)
                group.limit(group.usage + 78 * MIB)  # for a window, and not for one image more

        def enter() -> None:
            group.enter(os.getpid())

        first = large(where, steps=8, on_step=lower, before=enter, save=every(steps=4) | on.end())
        group.limit(None)
        if first.killed:
            assert group.version == 2
            last = large(where, steps=8)
            assert last.began in (2, 3)
        else:
            assert first.status == 0
            assert max(first.digests) == 8
            assert len(off(first)) == 1
            assert "MiB of memory are free" in off(first)[0]
            assert first.told("SaveFailedEvent") == []
            assert newest_step(where) == 8
            assert list(images()) == []


@pytest.mark.parametrize("memory", [None, every(steps=1)], ids=["without", "with"])
def test_a_save_that_finds_no_memory_fails_and_training_goes_on(where: Path, root: Path, memory) -> None:
    """As with every save that fails: a line, an event, and the exit status; not the end of the training."""

    def grows(ckpt, step, state):
        if step == 5:
            from tenuto.engine.staging import pool

            pool.memory_headroom = arena.memory_headroom = lambda: 64 << 20
            state["model"]["more"] = np.full(2 * MIB, 5.0)
        if step == 12:
            del state["model"]["more"]

    life = live(where, steps=15, on_step=grows, memory=memory, save=every(steps=4) | on.end())
    assert max(life.digests) == 15
    failures = life.told("SaveFailedEvent")
    assert any("takes" in text and "of host memory" in text for text in failures), failures
    assert newest_step(where) == 4
    right(life)


def test_what_the_dead_hold_in_a_group_that_is_gone_gives_way(tmp_path: Path, root: Path) -> None:
    """The pages of a dead trainer's images stay charged to the groups above its own: whoever starts there next meets
    the limit."""
    with memory_group(limit=600 * MIB) as above:
        below = above.path / "trainer"
        if above.version == 2:
            (above.path / "cgroup.subtree_control").write_text("+memory")

        def enter() -> None:
            (below / "cgroup.procs").write_text(str(os.getpid()))

        below.mkdir()
        assert live(tmp_path / "old", kill=2, before=enter, elements=3 * LARGE).killed
        below.rmdir()
        below.mkdir()
        held = sum(found.bytes for found in images())
        assert held > 48 * MIB
        assert above.usage > 48 * MIB, "they are still counted"
        above.limit(above.usage + 64 * MIB + 10 * MIB)  # room for one image, and what is left to others
        try:
            life = large(tmp_path / "new", steps=3, before=enter)
            assert life.status == 0
            assert off(life) == []
            assert any("its room was needed" in text for text in life.told("Warned"))
            assert len(life.told("SavedToMemory")) == 2
            above.limit(None)
            again = live(tmp_path / "old", steps=3, before=enter, elements=3 * LARGE)
            assert (again.status, again.began in (0, 1, 2)) == (0, True)
        finally:
            below.rmdir()
