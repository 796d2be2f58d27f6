"""Ranks that keep their states in memory, as real processes: killed, damaged, on other nodes, in another number."""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tenuto
from support.memory_ranks import ROWS, WIDTH, Ends, live, untouched
from support.memory_training import Kill, Life, shared_memory
from support.thinning import crossed, thinned
from tenuto import every, on
from tenuto.crashpoints import armed
from tenuto.engine.memory_tier.listing import FoundImage, images
from tenuto.engine.staging import slots
from tenuto.maintenance.emergency import flush_anywhere
from tenuto.maintenance.flush import execute, plan_flush
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")

GOING_ON = [
    "what is in memory told, choice not yet heard",
    "memory image found, not adopted",
    "memory image looked into, not yet voted for",
    "restore voted for, run not yet claimed",
    "memory image adopted, not yet claimed",
    "claimed, memory image not yet resealed",
]
EXPECTED = {ranks: untouched(ranks) for ranks in (2, 3)}
SETTLED = {rank: Ends(step=7, settled=True) for rank in (0, 1)}
"""Both ranks have steps 6 and 7 in memory, and nothing is in the store."""


@pytest.fixture
def where(tmp_path: Path, root: Path) -> Iterator[Path]:
    yield tmp_path / "ckpts"
    if (tmp_path / "ckpts").exists():
        assert_whole(Repo.open(open_store(tmp_path / "ckpts")))


def right(*jobs: list[Life]) -> None:
    """Every step of every rank, and what each began from, is bit for bit what an untouched training has there; and all
    began at the same step."""
    for job in jobs:
        assert len({life.began for life in job}) == 1, [life.began for life in job]
        for rank, life in enumerate(job):
            assert life.digests, f"rank {rank} told of no step"
            wrong = [step for step, digest in life.digests.items() if digest != EXPECTED[len(job)][rank][step]]
            assert wrong == [], f"rank {rank}"


def from_memory(job: list[Life], step: int) -> None:
    assert [(life.status, life.began) for life in job] == [(0, step)] * len(job)
    assert all(life.source.startswith(f"from memory, step {step}, sealed ") for life in job)


def data_file(where: Path, rank: int) -> Path:
    (found,) = where.glob(f"runs/main/a0001/step-00000010/rank-{rank:05d}*.safetensors")
    return found


def image_of(root: Path, rank: int, step: int) -> tuple[Path, FoundImage]:
    with mock.patch.object(slots, "SHARED_MEMORY", str(root)):
        found = next(one for one in images() if one.footer and (one.footer.rank, one.footer.id.step) == (rank, step))
    return Path(root, f"tenuto-{os.geteuid()}", found.name), found


def change(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*-*") if path.is_file() and path.suffix != ".lock")


# -- killed ------------------------------------------------------------------------------------------------------------


def test_a_last_step_that_only_memory_has_is_saved_by_the_restart_that_has_nothing_left_to_do(where: Path) -> None:
    first = live(where, ends=SETTLED)
    second = live(where, steps=7)
    assert [(life.status, life.began, [*life.digests]) for life in second] == [(0, 7, [7])] * 2
    assert Repo.open(open_store(where)).committed("main", 2) == [7]
    last = live(where)
    right(first, last)
    assert {life.began for life in last} == {7}


def test_a_crash_loses_at_most_one_step(where: Path, root: Path) -> None:
    first = live(where, ends={1: Ends(step=7)})
    assert all(life.killed for life in first)
    second = live(where, ends={0: Ends(step=13)})
    last = live(where)
    right(first, second, last)
    for before, after in ((first, second), (second, last)):
        reached = min(max(life.digests) for life in before)
        assert reached - 2 <= after[0].began <= reached
        assert all(life.source.startswith("from memory, step ") for life in after)
    assert [life.status for life in last] == [0, 0]
    assert files(root) == [], "a good end leaves nothing"


@pytest.mark.parametrize(("at", "rank"), crossed(["memory image captured, not sealed", "memory image sealed"], [0, 1]))
def test_killed_between_the_seals_of_two_ranks(where: Path, rank: int, at: str) -> None:
    """The other one may have sealed the step, and may not have; some step is common to both either way."""
    first = live(where, ends={rank: Ends(at=at, count=6)})
    last = live(where)
    assert last[0].began in (4, 5, 6)
    from_memory(last, last[0].began)
    right(first, last)


@pytest.mark.parametrize(("at", "rank"), crossed(GOING_ON, [0, 1]))
def test_killed_while_going_on_from_memory(where: Path, rank: int, at: str) -> None:
    """Nothing is lost by it, also where one rank has sealed its image anew and the other one has not."""
    live(where, ends=SETTLED)
    again = live(where, ends={rank: Ends(at=at)})
    assert again[rank].killed
    last = live(where)
    assert last[0].began >= 7
    from_memory(last, last[0].began)
    right(last)


def test_killed_after_the_claim_before_the_others_have_heard_of_it(where: Path) -> None:
    live(where, ends=SETTLED)
    for rank, at in ((0, "attempt claimed"), (1, "claim heard, nothing saved yet")):
        assert live(where, ends={rank: Ends(at=at)})[rank].killed
    last = live(where)
    from_memory(last, last[0].began)
    right(last)


@pytest.mark.parametrize("slow", thinned([0, 1], 2))
def test_a_fast_rank_does_not_let_go_of_what_a_slow_one_still_needs(where: Path, slow: int) -> None:
    """One rank is killed while it is still sealing step 6, after the other has had every chance to take step 7 in the
    place of step 5: then no step would be common to both."""
    stack = ExitStack()  # entered by the process that is killed

    def before(rank: int) -> None:
        left, kill = [6], Kill()

        def sealing() -> None:
            left[0] -= 1
            if left[0] == 0:
                time.sleep(1.0)
                kill()

        if rank == slow:
            stack.enter_context(armed("memory image captured, not sealed", sealing))

    first = live(where, save=on.end(), before=before)
    assert first[slow].killed
    last = live(where)
    from_memory(last, 5)
    right(first, last)


POINTS = (
    "memory image captured, not sealed",
    "memory image sealed",
    "image captured",
    "ready told, not yet begun",
    "begun, nothing written",
    "parts put and told, manifest not yet",
    "commit heard, not yet reported",
)


@pytest.mark.parametrize("seed", thinned([0, 1], 2))
def test_killed_again_and_again_wherever_it_is(where: Path, seed: int) -> None:
    chance = random.Random(seed)
    jobs = []
    for _ in range(5):
        end = Ends(at=chance.choice(POINTS), count=chance.randint(1, 9))
        jobs.append(live(where, steps=30, ends={chance.randrange(2): end}))
    jobs.append(live(where, steps=30))
    right(*jobs)
    for before, after in pairwise(jobs):
        if before[0].killed:
            reached = min(max(life.digests) for life in before)
            assert reached - 2 <= after[0].began, "at most the step that was under way, and the one that was sealed"
    assert max(jobs[-1][0].digests) == 30


@pytest.mark.parametrize(("at", "rank"), crossed([GOING_ON[0], GOING_ON[2]], [0, 1]))
def test_a_rank_that_dies_while_all_look_into_memory_is_waited_for_no_longer_than_allowed(
    where: Path, rank: int, at: str
) -> None:
    """No launcher ends the others: they raise by themselves, and what is in memory is there for the next start."""
    live(where, ends=SETTLED)
    again = live(where, ends={rank: Ends(at=at, alone=True)}, ranks_timeout=30.0)
    assert (again[rank].status, again[1 - rank].status) == (3, 1)
    from_memory(live(where), 7)


# -- damaged, gone, elsewhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("harm", "rank"), crossed(["removed", "torn", "tampered", "described wrongly"], [0, 1]))
def test_where_one_rank_has_no_whole_image_all_go_back_to_the_step_before(
    where: Path, root: Path, rank: int, harm: str
) -> None:
    first = live(where, ends=SETTLED)
    path, found = image_of(root, rank, 7)
    assert found.footer is not None
    if harm == "removed":
        path.unlink()
    elif harm == "torn":
        os.truncate(path, path.stat().st_size // 2)
    else:
        change(path, found.footer.image // 2 if harm == "tampered" else found.footer.image + 200)
    last = live(where)
    from_memory(last, 6)
    assert [life.skipped for life in last] == [[7] if harm in ("tampered", "described wrongly") else []] * 2
    right(first, last)


def test_where_one_rank_has_nothing_all_go_back_to_the_store(where: Path, root: Path) -> None:
    first = live(where, ends={rank: Ends(step=13, settled=True) for rank in (0, 1)})
    for step in (12, 13):
        image_of(root, 1, step)[0].unlink()
    last = live(where)
    assert [(life.status, life.began) for life in last] == [(0, 10)] * 2
    assert all(life.source.startswith(f"from {where}") for life in last)
    said = [text for life in last for text in life.told("Warned")]
    assert "step 13 in memory is passed over: rank 1 has no image of it" in said
    right(first, last)


def test_each_node_has_its_own_memory(where: Path, root: Path) -> None:
    with shared_memory() as other:
        first = live(where, ends={rank: Ends(step=13, settled=True) for rank in (0, 1)}, roots=[root, other])
        from_memory(second := live(where, steps=14, roots=[root, other]), 13)
        assert files(root) == files(other) == []
        third = live(where, ends={rank: Ends(step=17, settled=True) for rank in (0, 1)}, roots=[root, other])
    with shared_memory() as another:
        last = live(where, roots=[root, another])
    assert [(life.status, life.began) for life in last] == [(0, 14)] * 2, "the node of rank 1 is another one"
    right(first, second, third, last)


def test_where_one_node_is_lost_the_others_read_nothing_of_a_step_that_is_durable(where: Path, root: Path) -> None:
    """The data file of the rank that has its image is damaged in the store, and nobody needs it."""
    with shared_memory() as other:
        first = live(where, ends={rank: Ends(step=10, settled=True) for rank in (0, 1)}, roots=[root, other])
    change(data_file(where, 0), 9000)
    with shared_memory() as another:
        last = live(where, roots=[root, another], health=False)
    assert [(life.status, life.began, life.skipped) for life in last] == [(0, 10, [])] * 2
    for life in last:
        assert life.memory[1] == 0 and life.memory[0] == life.nbytes[0] > 0, "what rank 0 has is all it needs"
        assert life.nbytes[1] > 0
    right(first, last)
    change(data_file(where, 0), 9000)  # whole again


@pytest.mark.parametrize("harm", ["tampered", "described wrongly"])
def test_what_is_damaged_in_memory_is_read_from_the_store(where: Path, root: Path, harm: str) -> None:
    with shared_memory() as other:
        first = live(where, ends={rank: Ends(step=10, settled=True) for rank in (0, 1)}, roots=[root, other])
    path, found = image_of(root, 0, 10)
    assert found.footer is not None
    change(path, found.footer.image // 2 if harm == "tampered" else found.footer.image + 200)
    with shared_memory() as another:
        last = live(where, roots=[root, another])
    assert [(life.status, life.began, life.skipped) for life in last] == [(0, 10, [])] * 2
    assert not last[0].memory or last[0].memory[0] < last[0].nbytes[0]
    right(first, last)


def test_another_number_of_ranks_takes_what_it_has_in_memory(where: Path, root: Path) -> None:
    """Three ranks become two on the same machine: their parts are others, and what all had is not looked for again."""
    first = live(where, 3, ends={rank: Ends(step=10, settled=True) for rank in range(3)})
    last = live(where, 2)
    assert [(life.status, life.began) for life in last] == [(0, 10)] * 2
    assert not any(life.memory for life in last), "the images are those of other ranks"
    right(first)


# -- no room -----------------------------------------------------------------------------------------------------------


def off(life: Life) -> list[str]:
    return [text for text in life.told("Warned") if "states are not kept in memory" in text]


def test_where_one_rank_has_no_room_none_keeps_states(where: Path, root: Path) -> None:
    def full(descriptor: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "no room here")

    def before(rank: int) -> None:
        if rank == 1:
            mock.patch("tenuto.engine.staging.arena.reserve", full).start()

    job = live(where, steps=12, before=before)
    assert [life.status for life in job] == [0, 0]
    assert [len(off(life)) for life in job] == [1, 1]
    assert "no room here" in off(job[1])[0]
    assert "rank 1 keeps none (" in off(job[0])[0]
    assert tenuto.load(where).step == 12
    assert files(root) == []
    right(job)


@pytest.mark.parametrize("rank", thinned([0, 1], 2))
def test_where_one_rank_runs_out_of_room_all_stop_keeping_states(where: Path, root: Path, rank: int) -> None:
    def on_step(ckpt: Any, own: int, step: int) -> None:
        if own == rank and step == 5:
            ckpt._training.saving.memory.tier.turn_off("no room any more")

    job = live(where, steps=12, on_step=on_step)
    assert [life.status for life in job] == [0, 0]
    assert "no room any more" in off(job[rank])[0]
    assert f"rank {rank}: no room any more" in off(job[1 - rank])[0]
    assert [len(off(life)) for life in job] == [1, 1]
    assert tenuto.load(where).step == 12
    right(job)


@pytest.mark.parametrize("rank", thinned([0, 1], 2))
def test_a_state_that_one_rank_cannot_keep_is_no_loss_of_the_one_before(where: Path, rank: int) -> None:
    """Step 6 fails to be sealed on one rank: 5 stays on both, and 7 becomes the common one."""

    def before(own: int) -> None:
        from tenuto.engine.memory_tier import tier

        inner, done = tier.new_seal, []

        def fail(repo: Any, id: Any, *words: Any, **more: Any) -> Any:
            if id.step == 6 and not done:
                done.append(id)
                raise OSError(errno.EIO, "a bad moment")
            return inner(repo, id, *words, **more)

        if own == rank:
            mock.patch.object(tier, "new_seal", fail).start()

    first = live(where, ends=SETTLED, before=before)
    assert ["step 6 is not kept in memory: a bad moment" in life.told("Warned") for life in first] == [
        own == rank for own in (0, 1)
    ]
    last = live(where)
    from_memory(last, 7)
    right(first, last)


def test_a_rank_that_says_nothing_holds_up_training_once_and_not_for_ever(where: Path) -> None:
    """Steps are left out of memory then; what all had stays."""

    from tenuto.engine.memory_tier import common_states
    from tenuto.ranks.common_step import CommonStep

    def before(rank: int) -> None:
        if rank == 1:
            inner = CommonStep.sealed
            mock.patch.object(CommonStep, "sealed", lambda self, step: inner(self, step) if step < 5 else None).start()

    def on_step(ckpt: Any, rank: int, step: int) -> None:
        if step == 6:  # of the steps before 5 all ranks get to know, however long that takes
            mock.patch.object(common_states, "SETTLE_S", 0.2).start()

    first = live(where, steps=14, save=every(steps=100), ends={0: Ends(step=12)}, before=before, on_step=on_step)
    assert first[0].killed
    said = "it is not known whether all ranks have step 5 in memory"
    assert any(text.startswith(said) for text in first[0].told("SaveSkipped"))
    last = live(where, steps=14)
    assert last[0].began in (4, 5)
    from_memory(last, last[0].began)
    right(first, last)


# -- at other cadences -------------------------------------------------------------------------------------------------


def test_a_cadence_of_more_than_a_step_and_no_save_at_all(where: Path) -> None:
    first = live(where, memory=every(steps=4), save=on.end(), ends={1: Ends(step=15)})
    last = live(where, memory=every(steps=4), save=on.end())
    assert last[0].began in (8, 12)
    from_memory(last, last[0].began)
    right(first, last)


def test_a_clock_is_refused_for_ranks_would_keep_different_steps(where: Path) -> None:
    from tenuto.errors import UsageError
    from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks

    with pytest.raises(UsageError, match="several ranks") as raised:
        tenuto.Checkpointer(
            where, {"w": np.ones(3)}, memory=every(minutes=1), ranks=ThreadRanks(0, 2, InProcessKVStore())
        )
    assert "every(steps=" in str(raised.value.hint)


def test_a_loop_that_somebody_else_owns(where: Path) -> None:
    """Nothing is restored by hand: each rank finds out whether there is something, and all find the same."""
    first = live(where, own_loop=True, ends=SETTLED)
    last = live(where, own_loop=True)
    from_memory(last, 7)
    right(first, last)


# -- flush -------------------------------------------------------------------------------------------------------------


def test_flush_writes_what_all_ranks_have_as_one_checkpoint(where: Path, root: Path) -> None:
    first = live(where, ends=SETTLED)
    repo = Repo.open(open_store(where))
    flushed = execute(repo, plan_flush(repo, "main"))
    assert flushed is not None and str(flushed.id) == "main/a0002/7"
    found = tenuto.load(where).state
    table = np.sum(
        [np.random.default_rng(step).standard_normal((ROWS, WIDTH)).astype(np.float32) for step in range(1, 8)],
        axis=0,
        dtype=np.float32,
    )
    assert np.allclose(found["table"], table, atol=1e-5)
    assert plan_flush(repo, "main").states == ()
    last = live(where)
    assert [(life.status, life.began) for life in last] == [(0, 7)] * 2
    assert all(life.source.startswith(f"from {where}") for life in last)
    right(first, last)


def test_what_all_ranks_have_is_written_to_an_emergency_place_and_taken_over(
    where: Path, root: Path, tmp_path: Path
) -> None:
    """As by a supervisor that gives up, whose store does not answer."""
    first = live(where, ends=SETTLED, emergency=str(tmp_path / "other"))
    (place,) = (tmp_path / "other").iterdir()
    said: list[str] = []
    assert "main/a0001/7 in the emergency location" in (flush_anywhere([str(place)], said.append) or ""), said
    assert_whole(Repo.open(open_store(place)))
    assert len(Repo.open(open_store(place)).manifest(tenuto.open(place).id).indexes) == 2
    with shared_memory() as other:
        last = live(where, roots=[other, other], emergency=str(tmp_path / "other"))
    assert [(life.status, life.began) for life in last] == [(0, 7)] * 2
    assert any("took over step 7 of run main" in text for text in last[0].told("Warned"))
    assert not list(place.rglob("*.safetensors"))
    right(first, last)


def test_flush_takes_the_state_before_where_one_image_is_damaged(where: Path, root: Path) -> None:
    live(where, ends=SETTLED)
    path, found = image_of(root, 1, 7)
    assert found.footer is not None
    change(path, found.footer.image // 2)
    repo, said = Repo.open(open_store(where)), []
    flushed = execute(repo, plan_flush(repo, "main"), report=said.append)
    assert flushed is not None and flushed.id.step == 6
    assert any("the state that 2 ranks have kept is passed over" in text for text in said)


def test_flush_writes_nothing_where_a_rank_is_missing(where: Path, root: Path) -> None:
    live(where, ends=SETTLED)
    for step in (6, 7):
        image_of(root, 1, step)[0].unlink()
    repo = Repo.open(open_store(where))
    plan = plan_flush(repo, "main")
    assert (plan.states, execute(repo, plan)) == ((), None)
    assert len(plan.images) == 2
