"""The memory tier in real processes: a crash loses a step, and nothing is gone on from that should not be."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support import loaded_interpreter
from support.memory_training import Kill, Life, fork_off, live, right
from tenuto import every, on
from tenuto.crashpoints import armed
from tenuto.engine.memory_tier.listing import images
from tenuto.engine.staging import slots
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")


@pytest.fixture
def where(tmp_path: Path, root: Path):
    yield tmp_path / "ckpts"
    if (tmp_path / "ckpts").exists():
        assert_whole(Repo.open(open_store(tmp_path / "ckpts")))


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("0-*") if path.suffix != ".lock")


def edit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def newest(root: Path) -> tuple[Path, object]:
    found = max((one for one in images() if one.footer is not None), key=lambda one: one.footer.sequence)
    return Path(root, f"tenuto-{os.geteuid()}", found.name), found.footer


def killed_after_its_last_step(where: Path) -> Life:
    """Before the save of the end: memory alone has step 37, and the store has 30."""
    life = live(
        where, steps=37, kill=37, save=every(steps=10), on_step=lambda ckpt, step, state: ckpt.log(loss=1 / step)
    )
    assert life.killed and tenuto.load(where).checkpoint.step == 30
    return life


def test_a_last_step_that_only_memory_has_is_saved_by_the_restart_that_has_nothing_left_to_do(where: Path) -> None:
    first = killed_after_its_last_step(where)
    second = live(where, steps=37)
    assert (second.status, second.began, [*second.digests]) == (0, 37, [37])
    found = tenuto.load(where)
    assert (found.checkpoint.step, found.progress["step"]) == (37, 37)
    assert found.checkpoint.metrics == {"loss": 1 / 37}
    last = live(where, steps=40)
    assert last.began == 37
    right(first, last)


def test_a_restart_that_has_nothing_left_to_do_saves_nothing_that_the_policy_does_not_ask_for(where: Path) -> None:
    killed_after_its_last_step(where)
    second = live(where, steps=37, save=every(steps=10))
    assert (second.status, second.began) == (0, 37) and tenuto.load(where).checkpoint.step == 30


def test_a_last_epoch_that_only_memory_has_is_saved_where_epochs_are(where: Path) -> None:
    def train() -> None:
        state = {"w": np.zeros(3)}
        with tenuto.Checkpointer(where, state, save=every(epochs=1), memory=every(steps=1)) as ckpt:
            for _ in ckpt.epochs(2):
                state["w"] += 1

    def killed() -> None:
        with armed("packs and indexes durable, manifest not yet", Kill(2)):
            train()

    assert os.waitstatus_to_exitcode(os.waitpid(fork_off(killed), 0)[1]) == -9
    assert tenuto.load(where).checkpoint.step == 1
    train()
    found = tenuto.load(where)
    assert found.checkpoint.step == 2 and (found.state["w"] == 2).all()


def test_a_loop_of_ones_own_with_nothing_left_to_do_is_told_what_saves_its_last_step(where: Path, root: Path) -> None:
    killed_after_its_last_step(where)
    script = f"""
import numpy as np, tenuto
from tenuto import every
from tenuto.engine.staging import slots
slots.SHARED_MEMORY = {str(root)!r}
state = {{"model": {{"w": np.zeros(30_000, np.float32), "b": np.zeros(7)}}, "history": [0.0]}}
with tenuto.Checkpointer({str(where)!r}, state, save=every(steps=10), memory=every(steps=1)) as ckpt:
    ckpt.restore()
    while ckpt.step < 37:
        ckpt.step_done()
"""
    done = loaded_interpreter.run(["-c", script])
    assert done.returncode == 0, done.stderr
    assert f"step 37 of run 'main' lies in this machine's memory alone: `tenuto flush {where}` saves it" in done.stderr


def test_a_crash_loses_no_sealed_step(where: Path) -> None:
    first = live(where, kill=7)
    second = live(where, kill=13)
    third = live(where, kill=13 + 5)
    last = live(where)
    assert [first.killed, second.killed, third.killed, last.status] == [True, True, True, 0]
    assert [second.began, third.began, last.began] == [7, 13, 18]
    assert all(life.source.startswith(f"from memory, step {life.began}, sealed ") for life in (second, third, last))
    assert second.told("RestoredFromMemory") == ["main/a0001/7"]
    right(first, second, third, last)
    assert max(last.digests) == 40
    repo = Repo.open(open_store(where))
    assert [repo.committed("main", number) for number in (1, 2, 3, 4)] == [[], [], [], [40, 30, 20]], (
        "step 10, of attempt 2, was durable until retention came"
    )


def test_a_good_end_leaves_nothing_in_memory(where: Path, root: Path) -> None:
    right(live(where, steps=12))
    assert not files(root)
    assert live(where, steps=12).source.startswith(f"from {where}")


def test_what_an_exception_leaves_undurable_stays_for_the_next(where: Path, root: Path) -> None:
    def fail(ckpt, step, state):
        if step == 14:
            raise RuntimeError("the training's own")

    assert live(where, on_step=fail).status == 1
    assert files(root)
    again = live(where)
    assert again.began == 13
    right(again)


@pytest.mark.parametrize(
    ("at", "count", "began"),
    [
        ("memory image captured, not sealed", 6, (5, 5)),
        # What kills is a signal: the other threads run on for a moment.
        ("memory image sealed", 6, (6, 7)),
        # Step 10 may still be on its way to the store: then only its own half is whole while the other one is filled.
        ("memory image captured, not sealed", 12, (10, 12)),
        ("pack durable, index not yet", 1, (10, 40)),
        ("packs and indexes durable, manifest not yet", 1, (10, 40)),
        ("manifest durable, not yet reported", 1, (10, 40)),
    ],
)
def test_killed_while_saving(where: Path, at: str, count: int, began: tuple[int, int]) -> None:
    """What was sealed before counts, whole. Training goes on beside a save to the store, so how far is not fixed."""
    first = live(where, at=at, count=count)
    assert first.killed
    second = live(where)
    assert began[0] <= second.began <= min(began[1], max(first.digests))
    assert second.source.startswith("from memory")
    right(first, second)


@pytest.mark.parametrize(
    "at", ["memory image adopted, not yet claimed", "attempt claimed", "claimed, memory image not yet resealed"]
)
def test_killed_between_adoption_and_the_first_step(where: Path, at: str) -> None:
    right(live(where, kill=13))
    for _ in range(2):
        assert live(where, at=at).killed
    last = live(where)
    assert last.began == 13
    right(last)


def test_a_second_crash_before_any_step_adopts_again(where: Path) -> None:
    live(where, kill=16)

    def die(ckpt, step, state):
        os.kill(os.getpid(), 9)

    for _ in range(3):
        life = live(where, on_step=die)
        assert (life.killed, life.began) == (True, 16)
        right(life)


def test_another_attempt_that_has_gone_further_rules_it_out(where: Path) -> None:
    live(where, kill=13)
    live(where, steps=21, memory=None, save=every(steps=5) | on.end())
    last = live(where)
    assert last.began == 21
    right(last)


def test_one_without_a_commit_does_not(where: Path) -> None:
    live(where, kill=13)
    elsewhere = live(where, kill=14, memory=None)
    assert elsewhere.began == 10, "a process without memory= reads the store alone, and removes no sealed image"
    last = live(where)
    assert last.began == 13
    right(elsewhere, last)


def test_going_back_on_purpose_rules_it_out(where: Path) -> None:
    live(where, kill=27)
    back = live(where, kill=13, resume_from=10, memory=None)
    assert back.began == 10
    last = live(where)
    assert last.began == 10, "attempt 2 went back behind step 20, so nothing of attempt 1's end counts"
    right(back, last)


def test_a_chosen_step_ignores_memory(where: Path) -> None:
    live(where, kill=17)
    chosen = live(where, kill=12, resume_from=10)
    assert chosen.began == 10
    last = live(where)
    assert last.began == 12
    right(chosen, last)


@pytest.mark.parametrize("part", ["image", "index", "manifest", "seal"])
def test_a_tampered_image_is_passed_over(where: Path, root: Path, part: str) -> None:
    def on_step(ckpt, step, state):
        if step == 11:
            assert ckpt._training.saving.saver.join(30), "while it is written, step 10 has a slot to itself"

    live(where, kill=17, on_step=on_step)
    path, footer = newest(root)
    places = {
        "image": footer.image // 2,
        "index": footer.image + footer.index.length // 2,
        "manifest": footer.image + footer.index.length + footer.manifest.length // 2,
        "seal": -slots.ROOM + 100,
    }
    edit(path, places[part])
    last = live(where)
    assert last.began == 16, "the other slot has the step before"
    if part != "seal":
        assert "main/a0001/17" not in last.told("RestoredFromMemory")
        assert any("image in memory" in reason for reason in last.told("CandidateSkipped"))
        assert last.skipped == [17]
    right(last)


def test_with_both_images_damaged_the_store_is_read(where: Path, root: Path) -> None:
    live(where, kill=17)
    for path in files(root):
        edit(path, 60_000)
    last = live(where)
    assert last.began == 10
    assert last.source.startswith(f"from {where}")
    # The other image is the step before, or step 10 where that is still on its way to the store.
    assert last.skipped in ([17, 16], [17, 10])
    right(last)


def test_after_a_reboot_it_is_passed_over(where: Path) -> None:
    live(where, kill=17)

    def booted() -> None:
        from dataclasses import replace

        from tenuto.engine.memory_tier import eligibility

        own = eligibility.this_process()
        eligibility.this_process = lambda: replace(own, boot="another")

    last = live(where, before=booted)
    assert last.began == 10
    assert any("before this machine was started" in text for text in last.told("Warned"))
    right(last)


def test_a_foreign_repository_of_the_same_name_gets_none(where: Path, tmp_path: Path) -> None:
    live(where, kill=7)
    assert live(tmp_path / "other", kill=3).began == 0
    last = live(where)
    assert last.began == 7
    right(last)


def test_two_jobs_on_one_node(where: Path) -> None:
    live(where, kill=7, run="one")
    live(where, kill=9, run="two")
    one, two = live(where, run="one"), live(where, run="two")
    assert (one.began, two.began) == (7, 9)
    right(one, two)


def test_a_state_that_changes_its_size_between_saves(where: Path) -> None:
    def grow(ckpt, step, state):
        if step in (3, 5):
            state["model"]["more"] = np.full(step * 100_000, step, np.float32)

    assert live(where, kill=6, on_step=grow).killed
    place = where.parent / "seen"

    def look() -> None:
        state = {"model": {"w": np.zeros(30_000, np.float32), "b": np.zeros(7), "more": np.zeros(500_000, np.float32)}}
        state["history"] = [0.0]
        with tenuto.Checkpointer(where, state, memory=every(steps=1)) as ckpt:
            found = ckpt.restore()
            place.write_text(f"{found.step} {found.source[:11]} {set(state['model']['more'].tolist())}")

    from support.memory_training import fork

    assert fork(look) == 0
    assert place.read_text() == "6 from memory {5.0}"


def test_a_forked_child_of_the_training_disturbs_nothing(where: Path) -> None:
    def leave_a_child(ckpt, step, state):
        if step == 4 and os.fork() == 0:
            import time

            time.sleep(3)
            os._exit(0)

    assert live(where, kill=7, on_step=leave_a_child).killed
    last = live(where)
    assert last.began == 7
    right(last)


def test_a_disk_save_that_fails_leaves_its_state_in_memory(where: Path) -> None:
    def full() -> None:
        from tenuto.engine.save import save_writer

        save_writer.SMALL_OBJECTS_BYTES = 1 << 62

    life = live(where, kill=13, before=full)
    assert life.told("SaveFailedEvent")
    last = live(where)
    assert last.began == 13
    right(last)


def test_a_flush_that_is_killed_before_its_commit_is_made_again(where: Path) -> None:
    from support.memory_training import Kill, fork
    from tenuto.crashpoints import armed
    from tenuto.maintenance.flush import execute, plan_flush

    assert live(where, kill=13).killed
    repo = Repo.open(open_store(where))

    def cut_off() -> None:
        with armed("flushed image written, not committed", Kill()):
            execute(repo, plan_flush(repo, "main"))

    assert fork(cut_off) == -9
    assert repo.committed("main", 2) == []
    flushed = execute(repo, plan_flush(repo, "main"))
    assert flushed is not None
    assert str(flushed.id) == "main/a0003/13"
    last = live(where)
    assert last.began == 13
    assert last.source.startswith(f"from {where}")
    right(last)


def test_a_copy_of_a_repository_leaves_the_originals_states_alone(where: Path, tmp_path: Path) -> None:
    first = killed_after_its_last_step(where)
    shutil.copytree(where, tmp_path / "copy")
    copy = live(tmp_path / "copy", steps=40)
    assert (copy.status, copy.began) == (0, 30)
    line = copy.told("Warned")[0]
    assert f"step 37 lies in memory already, and it belongs to {where}, of which {tmp_path / 'copy'} is a copy" in line
    last = live(where, steps=40)
    assert (last.status, last.began) == (0, 37)
    right(first, last)


def test_a_repository_that_was_moved_takes_its_states_along(where: Path, tmp_path: Path) -> None:
    first = killed_after_its_last_step(where)
    where.rename(tmp_path / "moved")
    last = live(tmp_path / "moved", steps=40)
    assert (last.status, last.began) == (0, 37)
    right(first, last)


def test_a_repository_that_was_moved_to_another_disk_takes_its_states_along(where: Path, tmp_path: Path) -> None:
    first = killed_after_its_last_step(where)
    shutil.copytree(where, tmp_path / "moved")
    shutil.rmtree(where)
    last = live(tmp_path / "moved", steps=40)
    assert (last.status, last.began) == (0, 37)
    right(first, last)
