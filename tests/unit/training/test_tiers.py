"""Tiers fill themselves in the background, keep what each is told, and stand in for a primary that is lost."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tenuto
from support.broken_places import damage
from support.rank_threads import together
from support.said import lines_said, said
from tenuto import Tier, Tiers, every, keep, on
from tenuto.engine.save import job
from tenuto.errors import RepositoryError, RunInUse, StoreDenied, StoreError, StoreFull, TenutoError, UsageError
from tenuto.events import TierLag, TierSkipped
from tenuto.maintenance import remove, replicate
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Receipt
from tenuto.policy.keep import KeepPolicy
from tenuto.repo.repository import Repo
from tenuto.store.contract import Content, Entry, Listing, Reader
from tenuto.store.registry import open_store
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.training import tier_fill, tier_worker
from tenuto.training.tier_fill import FollowerFill
from tenuto.training.tier_worker import TierWorker

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 20_000


class Unwell(DelegatingStore):
    """A tier that can be down, full, read-only or hung, and is well again."""

    def __init__(self, place: Path) -> None:
        super().__init__(open_store(place))
        self.error: Exception | None = None
        self.only_puts = False
        self.answers = threading.Event()
        self.answers.set()
        self.hangs_at = ""
        """The end of the names whose puts hang until `answers`."""
        self.asked = threading.Event()

    def _check(self, *, puts: str = "") -> None:
        if puts.endswith(self.hangs_at):
            self.asked.set()
            self.answers.wait(60)
        if self.error is not None and (puts or not self.only_puts):
            raise self.error

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        self._check(puts=name)
        return super().put_if_absent(name, content, token=token)

    def get(self, name: str, *, limit: int) -> bytes:
        self._check()
        return super().get(name, limit=limit)

    def open(self, name: str) -> Reader:
        self._check()
        return super().open(name)

    def children(self, prefix: str) -> Listing:
        self._check()
        return super().children(prefix)

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        self._check()
        return super().walk(prefix, leftovers=leftovers)


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return tmp_path / "slow"


@contextmanager
def training(place: Any, steps: int, *, brought: int = 0, **more: Any) -> Iterator[Any]:
    """Trains to the step, and yields before the Checkpointer is closed. Once step `brought` is done waits until the
    other tiers have it: or a newer one may take its place."""
    state = {"w": np.zeros(SIZE)}
    arguments = {"save": every(steps=1), "keep": keep.latest(2), **more}
    with tenuto.Checkpointer(place, state, **arguments) as ckpt:
        for step in ckpt.steps(steps):
            state["w"] += 1
            if step and step == brought:
                ckpt.wait()
                for fill in ckpt._training.saving.tiers.followers:  # and not their lag, which may be of a line before
                    assert fill.rounds.join(60)
        ckpt.wait()
        yield ckpt
    assert (state["w"] == steps).all()


def train(place: Any, steps: int, **more: Any) -> None:
    with training(place, steps, **more):
        pass


def steps_in(place: Path) -> list[int]:
    """The checkpoints that lie there whole: data file and manifest."""
    found = set()
    for directory, _, files in os.walk(place / "runs"):  # which passes over what goes meanwhile
        if "manifest.json" in files and any(name.endswith(".safetensors") for name in files):
            found.add(int(Path(directory).name[5:]))
    return sorted(found)


def assert_holds(place: Any, step: int) -> None:
    assert (tenuto.load(place).state["w"] == step).all()


def killed_at(point: str, fast: Path, slow: Path, steps: int) -> None:
    """Trains in a process that is killed at this point."""
    script = f"""
import os, signal, numpy as np, tenuto
from tenuto.crashpoints import armed
state = {{"w": np.zeros({SIZE})}}
with armed({point!r}, lambda: os.kill(os.getpid(), signal.SIGKILL)):
    with tenuto.Checkpointer(tenuto.Tiers(tenuto.Tier({str(fast)!r}), tenuto.Tier({str(slow)!r})), state,
                             save=tenuto.every(steps=1)) as ckpt:
        for _ in ckpt.steps({steps}):
            state["w"] += 1
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -9, killed.stderr


# -- filling -----------------------------------------------------------------------------------------------------------


def test_verify_misses_nothing_in_a_tier_that_keeps_less_and_tells_what_of_a_checkpoint_is_gone_there(
    fast: Path, slow: Path
) -> None:
    tiers = Tiers(Tier(fast, keep=keep.all()), Tier(slow, keep=keep.latest(1)))
    train(tiers, 4)
    assert (steps_in(fast), steps_in(slow)) == ([1, 2, 3, 4], [4])
    repository = tenuto.Repository(fast)
    assert not repository.verify().findings
    (data,) = slow.rglob("*.safetensors")
    data.unlink()
    (found,) = repository.verify().findings
    assert found.id == CheckpointId("main", 1, 4) and f"{slow} lacks 1 object" in found.message


def test_a_tier_has_what_is_due_once_training_is_closed_and_is_a_whole_repository(fast: Path, slow: Path) -> None:
    tiers = Tiers(Tier(fast), Tier(slow))
    with training(tiers, 5, brought=4) as ckpt:  # else one of the first may be being copied still, and stays
        ckpt.log(tag="good")
    assert steps_in(fast) == [4, 5]
    assert 5 in steps_in(slow)
    shutil.rmtree(fast)
    assert_holds(slow, 5)
    assert tenuto.load(slow, step="good").checkpoint.step == 5
    assert_whole(Repo.open(open_store(slow)))
    assert [(one.tier, one.newest.step if one.newest else None, one.behind) for one in tiers.lag()] == [
        (str(slow), 5, 0)
    ]


def test_a_save_by_itself_fills_every_tier_before_it_returns(tmp_path: Path, fast: Path, slow: Path) -> None:
    node, unwell = tmp_path / "node", Unwell(slow)
    tiers = Tiers(Tier(node, per_node=True), Tier(fast), Tier(unwell))
    tenuto.save({"w": np.zeros(SIZE)}, tiers, step=1)
    for place in (node, fast, slow):
        assert steps_in(place) == [1]
    unwell.error = StoreError("no route to host")
    with said("step 2 is saved, and not every tier has it: no route to host"):
        tenuto.save({"w": np.zeros(SIZE)}, tiers, step=2)
    assert steps_in(fast) == [1, 2]


def test_each_tier_has_its_own_cadence_and_its_own_retention(fast: Path, slow: Path) -> None:
    tiers = Tiers(Tier(fast, keep=keep.latest(1)), Tier(slow, save=every(steps=3) | on.end(), keep=keep.all()))
    events: list[Any] = []
    for steps in (3, 5, 7):
        train(tiers, steps, brought=6, sinks=[events.append], keep=keep.latest(5))
    assert steps_in(fast) == [7], "its own policy, not the run's"
    assert steps_in(slow) == [3, 5, 6, 7], "multiples of 3, and the end of each training"
    assert any(isinstance(event, TierLag) and event.behind == 0 for event in events)


def test_what_waits_while_a_newer_one_is_due_is_skipped_with_the_reason(fast: Path, slow: Path) -> None:
    unwell, events = Unwell(slow), []
    train(Tiers(Tier(fast), Tier(unwell)), 1)
    unwell.error = StoreError("no route to host")
    with training(Tiers(Tier(fast), Tier(unwell)), 4, sinks=[events.append]):
        unwell.error = None
    assert steps_in(slow) == [1, 4]
    assert {event.id.step for event in events if isinstance(event, TierSkipped)} == {2, 3}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "point",
    [
        "place has the tables of a checkpoint, not its data files",
        "packs copied, checkpoint not looked for again",
        "place has the data files of a checkpoint, not its manifest",
        "place has a checkpoint",
    ],
)
def test_a_process_killed_while_it_fills_a_tier_leaves_nothing_half_and_the_next_one_fills_it(
    fast: Path, slow: Path, point: str, steps: int
) -> None:
    killed_at(point, fast, slow, steps)
    assert len(steps_in(slow)) == (point == "place has a checkpoint")
    train(Tiers(Tier(fast), Tier(slow)), steps + 1)
    assert steps_in(slow)[-1] == steps + 1
    assert_holds(slow, steps + 1)
    assert not [path for path in slow.rglob("step-*") if not (path / "manifest.json").exists()], "nothing half is left"
    assert_whole(Repo.open(open_store(slow)))


def test_a_tier_that_always_lags_keeps_no_more_than_it_is_to(
    fast: Path, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, steps, ended = FollowerFill._copy, 12, threading.Event()

    def lagging(fill: FollowerFill, id: CheckpointId) -> bool:
        """Ends once a newer checkpoint waits, or training ends."""
        whole = copy(fill, id)
        while not (fill._waiting or ended.is_set()):
            ended.wait(0.005)
        return whole

    monkeypatch.setattr(FollowerFill, "_copy", lagging)
    monkeypatch.setattr(tier_fill, "TIDY_S", 0.0)
    held: list[int] = []
    with tenuto.Checkpointer(
        Tiers(Tier(fast), Tier(slow, keep=keep.latest(1))), state := {"w": np.zeros(SIZE)}, save=every(steps=1)
    ) as ckpt:
        try:
            for _ in ckpt.steps(steps):
                state["w"] += 1
                ckpt.wait()
                until = time.monotonic() + 60
                while ckpt.step and not steps_in(slow) and time.monotonic() < until:
                    time.sleep(0.005)
                held.append(len(steps_in(slow)))
        finally:
            ended.set()  # or what fills the tier waits for good
    assert 0 < max(held) <= 3, held


def test_i7_what_is_being_copied_stays_in_the_primary_until_it_is(fast: Path, slow: Path) -> None:
    unwell, state = Unwell(slow), {"w": np.zeros(SIZE)}
    unwell.hangs_at = ".safetensors"
    unwell.answers.clear()
    with tenuto.Checkpointer(Tiers(Tier(fast), Tier(unwell)), state, save=every(steps=1), keep=keep.latest(1)) as ckpt:
        for step in ckpt.steps(4):
            state["w"] += 1
            if step == 1:
                assert unwell.asked.wait(60), "step 1 is being copied"
        ckpt.wait()
        assert steps_in(fast) == [1, 4]
        unwell.answers.set()
    assert steps_in(slow)[-1] == 4
    train(Tiers(Tier(fast), Tier(unwell)), 5, keep=keep.latest(1))
    assert steps_in(fast) == [5]


# -- a tier that is not well -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "only_puts"),
    [(StoreError("no route to host"), False), (StoreFull("no space left"), True), (StoreDenied("read-only"), True)],
)
def test_a_tier_that_fails_stops_no_training_is_told_of_once_and_filled_when_it_is_back(
    fast: Path, slow: Path, error: Exception, only_puts: bool
) -> None:
    unwell = Unwell(slow)
    train(Tiers(Tier(fast), Tier(unwell)), 1)
    unwell.error, unwell.only_puts = error, only_puts
    with lines_said() as lines:
        train(Tiers(Tier(fast), Tier(unwell)), 4)
    told = [line for line in lines if "training continues without it" in line]
    assert len(told) == 1 and str(slow) in told[0]
    assert [line for line in lines if "tenuto replicate" in line and "lacks step 4" in line]
    assert steps_in(slow) == [1] and steps_in(fast) == [3, 4]
    unwell.error = None
    repo = Repo.open(open_store(fast))
    replicate.execute(repo, replicate.plan_replicate(repo, [CheckpointId("main", 2, 4)]))
    assert steps_in(slow) == [1, 4], "the command that the line names"
    train(Tiers(Tier(fast), Tier(unwell)), 5)
    assert 5 in steps_in(slow)


def test_a_tier_that_comes_back_during_training_is_said_to_be_back(fast: Path, slow: Path) -> None:
    unwell = Unwell(slow)
    with said("is filled again"), training(Tiers(Tier(fast), Tier(unwell)), 1) as ckpt:
        unwell.error = StoreError("no route to host")
        fill = ckpt._training.saving.tiers.followers[0]
        fill.compared = False  # as if it had not been looked at yet
        fill.rounds.wake()
        assert fill.rounds.join(60)
        assert fill.error
        unwell.error = None


def test_a_tier_that_hangs_delays_neither_training_nor_its_end_beyond_the_timeout(
    fast: Path, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_worker, "ANSWER_S", 0.2)
    finish, patience_s = TierWorker.finish, list[float]()

    def finishing(worker: TierWorker, timeout: float) -> None:
        """What is left of the time, most of which the run's own store may need on a machine that is at work."""
        patience_s.append(timeout)
        finish(worker, min(timeout, 0.5))

    monkeypatch.setattr(TierWorker, "finish", finishing)
    unwell, state = Unwell(slow), {"w": np.zeros(SIZE)}
    unwell.answers.clear()
    train(fast, 1)
    patience_s.clear()
    ckpt = tenuto.Checkpointer(Tiers(Tier(fast), Tier(unwell)), state, save=every(steps=1))
    with lines_said() as lines:
        for _ in ckpt.steps(3):
            state["w"] += 1
        ckpt.close(timeout=120)
    assert steps_in(fast)[-1] == 3
    assert len(patience_s) == 1 and patience_s[0] <= 120
    assert [line for line in lines if "lacks step 3" in line]
    unwell.answers.set()


# -- a lost primary ----------------------------------------------------------------------------------------------------


def test_a_lost_primary_is_made_anew_from_another_tier_bit_for_bit(fast: Path, slow: Path) -> None:
    tiers = Tiers(Tier(fast), Tier(slow))
    train(tiers, 3)
    id = Repo.open(open_store(slow)).id
    shutil.rmtree(fast)
    with said("takes over step 3") as lines:
        train(Tiers(Tier(fast), Tier(slow)), 5)  # goes on from 3, or its sum would differ
    assert [line for line in lines if "resumed run main at step 3" in line and str(slow) in line]
    assert Repo.open(open_store(fast)).id == id
    with said(f"resumed run main at step 5 from {fast}"):
        train(Tiers(Tier(fast), Tier(slow)), 6)
    for place in (fast, slow):
        assert_holds(place, 6)
        assert_whole(Repo.open(open_store(place)))


@pytest.mark.parametrize(
    "point",
    [
        "primary has the claims of another tier, not its checkpoints",
        "primary has the tables of another tier's checkpoint, not its manifest",
        "attempt claimed",
        "packs copied, checkpoint not looked for again",
    ],
)
def test_a_process_killed_while_it_takes_over_is_followed_by_one_that_ends_it(
    fast: Path, slow: Path, point: str
) -> None:
    train(Tiers(Tier(fast), Tier(slow)), 3)
    shutil.rmtree(fast)
    killed_at(point, fast, slow, 5)
    train(Tiers(Tier(fast), Tier(slow)), 6)
    for place in (fast, slow):
        assert_holds(place, 6)
        assert_whole(Repo.open(open_store(place)))


def test_a_checkpoint_that_is_taken_over_is_brought_to_the_primary(fast: Path, slow: Path) -> None:
    train(Tiers(Tier(fast), Tier(slow)), 3)
    shutil.rmtree(fast)
    with tenuto.Checkpointer(Tiers(Tier(fast), Tier(slow)), {"w": np.zeros(SIZE)}) as ckpt:
        assert ckpt.restore() is not None
        ckpt.steps(3)
    assert 3 in steps_in(fast)
    shutil.rmtree(slow)
    assert_holds(fast, 3)


def test_an_empty_primary_whose_other_tier_does_not_answer_does_not_start_from_scratch(fast: Path, slow: Path) -> None:
    unwell = Unwell(slow)
    train(Tiers(Tier(fast), Tier(unwell)), 2)
    shutil.rmtree(fast)
    unwell.error = StoreError("no route to host")
    with pytest.raises(RepositoryError, match="may have its checkpoints"):
        train(Tiers(Tier(fast), Tier(unwell)), 3)
    assert not fast.exists()


def test_a_second_job_with_another_primary_is_found_out(tmp_path: Path, fast: Path, slow: Path) -> None:
    train(Tiers(Tier(fast), Tier(slow)), 2)
    shutil.copytree(fast, tmp_path / "copy")
    train(fast, 3)  # the tier hears nothing of this attempt, and gets none of its checkpoints later
    train(tmp_path / "copy", 4)
    train(Tiers(Tier(fast), Tier(slow, save=on.end())), 4)
    with pytest.raises(RunInUse, match="another line of training lies there"):
        train(Tiers(Tier(tmp_path / "copy"), Tier(slow)), 5)


def test_a_checkpoint_that_was_removed_by_hand_is_not_taken_over_again(fast: Path, slow: Path) -> None:
    train(Tiers(Tier(fast), Tier(slow, keep=keep.all())), 3, keep=keep.all())
    repo = Repo.open(open_store(fast))
    remove.execute(repo, remove.plan_remove(repo, [CheckpointId("main", 1, 3)], force=True))
    state = {"w": np.zeros(SIZE)}
    with tenuto.Checkpointer(Tiers(Tier(fast), Tier(slow)), state) as ckpt:
        restored = ckpt.restore()
    assert restored is not None and restored.checkpoint.step < 3


def test_a_step_that_only_a_slower_tier_has_is_loaded_and_resumed_from(fast: Path, slow: Path) -> None:
    tiers = Tiers(Tier(fast), Tier(slow, keep=keep.all()))
    for steps in (1, 2, 3, 4):
        train(Tiers(Tier(fast), Tier(slow, keep=keep.all())), steps, keep=keep.latest(1))
    assert steps_in(fast) == [4] and 2 in steps_in(slow)
    with said("step 2 of run main is not in"):
        assert (tenuto.load(tiers, step=2).state["w"] == 2).all()
    state = {"w": np.zeros(SIZE)}
    with tenuto.Checkpointer(Tiers(Tier(fast), Tier(slow)), state, resume_from=2) as ckpt:
        restored = ckpt.restore()
        assert restored is not None and restored.checkpoint.step == 2
    assert (state["w"] == 2).all()


def test_ranks_load_together_what_only_a_slower_tier_has(tmp_path: Path, fast: Path, slow: Path) -> None:
    def tiers() -> Tiers:
        return Tiers(Tier(fast), Tier(slow, keep=keep.all()))

    def work(ranks: Any, steps: int) -> None:
        state = part(ranks)
        with tenuto.Checkpointer(tiers(), state, save=on.end(), keep=keep.latest(1), ranks=ranks) as ckpt:
            for _ in ckpt.steps(steps):
                state["w"].value[...] += 1

    def load(ranks: Any, step: int | str) -> Any:
        own = part(ranks)
        found = tenuto.load(tiers(), own, step=step, ranks=ranks)
        return found.checkpoint.step, own["w"].value - part(ranks)["w"].value

    for steps in (2, 4, 6):
        found = together(2, lambda ranks, steps=steps: work(ranks, steps))  # type: ignore[misc]
        assert not [one for one in found if isinstance(one, BaseException)], found
    assert steps_in(fast) == [6] and 2 in steps_in(slow)
    with said("step 2 of run main is not in"):
        assert [(step, set(added)) for step, added in together(2, lambda ranks: load(ranks, 2))] == [(2, {2.0})] * 2
    for error in together(2, lambda ranks: load(ranks, 7)):
        assert isinstance(error, TenutoError) and "7" in error.message, error
    shutil.rmtree(fast)
    assert [(step, set(added)) for step, added in together(2, lambda ranks: load(ranks, "latest"))] == [(6, {6.0})] * 2


# -- capacity and damage -----------------------------------------------------------------------------------------------


def test_a_full_primary_frees_what_a_slower_tier_has_whole(fast: Path, slow: Path) -> None:
    for steps in range(1, 6):
        # What the slower tier has is known before the next commit, or nothing could go at it.
        train(Tiers(Tier(fast, capacity=3 * 8 * SIZE), Tier(slow)), steps, brought=steps - 1, keep=keep.all())
    assert steps_in(slow) == [1, 2, 3, 4, 5]
    assert len(steps_in(fast)) <= 3 and steps_in(fast)[-1] == 5


def test_a_full_primary_without_another_copy_frees_nothing_and_says_so(fast: Path, slow: Path) -> None:
    unwell = Unwell(slow)
    unwell.error = StoreError("no route to host")
    train(fast, 1)
    with lines_said() as lines:
        train(Tiers(Tier(fast, capacity=8 * SIZE), Tier(unwell)), 4, keep=keep.all())
    assert steps_in(fast) == [1, 2, 3, 4]
    assert len([line for line in lines if "over its capacity" in line]) == 1


@pytest.mark.parametrize("seed", range(4))
def test_i7_no_history_removes_the_only_copy(fast: Path, slow: Path, seed: int) -> None:
    """Capacity in both tiers and a policy that keeps everything: each committed step lies whole in one of the two."""
    drawn, step = random.Random(seed), 0
    unwell = Unwell(slow)
    train(Tiers(Tier(fast), Tier(unwell)), 1, keep=keep.all())
    committed = {1}
    step = 1
    for _ in range(5):
        unwell.error = StoreError("no route to host") if drawn.random() < 0.4 else None
        capacity = drawn.choice([None, 2 * 8 * SIZE])
        target = step + drawn.randint(1, 3)
        place = Tiers(Tier(fast, capacity=capacity), Tier(unwell, capacity=drawn.choice([None, 8 * SIZE])))
        train(place, target, keep=keep.all())
        committed |= set(range(step + 1, target + 1))
        step = target
        assert committed <= set(steps_in(fast)) | set(steps_in(slow))
    unwell.error = None
    assert_holds(fast, step)


def test_a_damaged_copy_is_written_anew_from_a_whole_one(fast: Path, slow: Path) -> None:
    train(Tiers(Tier(fast), Tier(slow)), 2)
    pack = max(fast.rglob("*.safetensors"))
    before = pack.read_bytes()
    damage(pack)
    with said("is written again, from another copy"):
        train(Tiers(Tier(fast), Tier(slow)), 3)
    assert pack.read_bytes() == before


def test_a_process_killed_between_the_damaged_copy_and_the_new_one_loses_nothing(fast: Path, slow: Path) -> None:
    train(Tiers(Tier(fast), Tier(slow)), 2)
    damage(max(fast.rglob("*.safetensors")))
    killed_at("damaged copy removed, not yet written anew", fast, slow, 3)
    train(Tiers(Tier(fast), Tier(slow)), 4)
    assert_holds(fast, 4)


# -- tiers of each node ------------------------------------------------------------------------------------------------


def part(ranks: Any) -> dict[str, Any]:
    begin, end = (SIZE * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
    return {"w": tenuto.shard(np.arange(float(SIZE))[begin:end].copy(), whole=(SIZE,), offsets=(begin,))}


def test_two_nodes_fill_a_shared_home_and_lose_one_of_them(tmp_path: Path) -> None:
    home, slow = tmp_path / "home", tmp_path / "slow"

    def work(ranks: Any) -> None:
        tiers = Tiers(
            Tier(tmp_path / f"node{ranks.rank}", per_node=True, keep=keep.latest(1)),
            Tier(home),
            Tier(slow),
            node=f"node{ranks.rank}",
        )
        state = part(ranks)
        with tenuto.Checkpointer(tiers, state, save=every(steps=1), keep=keep.latest(3), ranks=ranks) as ckpt:
            for _ in ckpt.steps(3):
                pass

    found = together(2, work)
    assert not [one for one in found if isinstance(one, BaseException)], found
    for node in ("node0", "node1"):
        shutil.rmtree(tmp_path / node)
    for place in (home, slow):
        loaded = tenuto.load(place)
        assert loaded.checkpoint.step == 3
        assert (np.asarray(loaded.state["w"]) == np.arange(float(SIZE))).all()


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tiers(), "names no place"),
        (lambda: Tiers("/a"), "one Tier for each place"),  # type: ignore[arg-type]
        (lambda: Tiers(Tier("/a", per_node=True)), "every tier is per_node"),
        (lambda: Tiers(Tier("/a"), Tier("/b", per_node=True)), "one tier can be per_node"),
        (lambda: Tiers(Tier("/a"), Tier("/a")), "given as two tiers"),
        (lambda: Tiers(Tier("/a", wait=False), Tier("/b")), "no tier has wait=True"),
        (lambda: Tier("/a", save=on.improve("loss")), "depends on more than step and time"),
        (lambda: Tier("/a", capacity="much"), "not a number of bytes"),
        (lambda: Tier("/a", keep=3), "what to keep"),  # type: ignore[arg-type]
    ],
)
def test_tiers_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (keep.hourly() | keep.monthly(2) | keep.yearly(), [1, 6]),
        (keep.after("attempt"), [1, 2, 3, 4, 5, 6]),
        (keep.after("fork"), [6]),
        (keep.within(hours=1), [1, 2, 3, 4, 5, 6]),
        (keep.limit(keep.all(), bytes=3 * 8 * SIZE + 100_000), [4, 5, 6]),
        (keep.limit(keep.latest(4) | keep.after("attempt"), cost=1, per_gib_month=2e3), [4, 5, 6]),
    ],
    ids=repr,
)
def test_every_policy_is_one_of_a_tier_too(fast: Path, slow: Path, policy: KeepPolicy, left: list[int]) -> None:
    # All at one moment of the clock: no hour, month or year begins between the saves.
    with mock.patch.object(job, "now_text", lambda: "2026-01-31T12:00:00Z"):
        for step in range(1, 7):
            train(Tiers(Tier(fast), Tier(slow, keep=policy)), step, keep=keep.all())
    assert steps_in(fast) == [1, 2, 3, 4, 5, 6]
    assert steps_in(slow) == left


def test_a_tier_keeps_what_was_saved_first_after_a_rollback(fast: Path, slow: Path) -> None:
    tiers = Tiers(Tier(fast), Tier(slow, keep=keep.after("rollback")))
    for steps in (2, 4):
        train(tiers, steps, keep=keep.all())
    tenuto.Repository(tiers).rollback(2)
    train(tiers, 5, brought=3, keep=keep.all())
    assert [str(id) for id in tenuto.Repository(fast).checkpoints()][:3] == [f"main/a0004/{step}" for step in (5, 4, 3)]
    assert [str(id) for id in tenuto.Repository(slow).checkpoints()] == ["main/a0004/5", "main/a0004/3"]


def test_a_tiers_budget_below_what_may_not_go_is_a_warning(fast: Path, slow: Path) -> None:
    with said("the budget of 1000 B is not met, since what may not go takes"):
        train(Tiers(Tier(fast), Tier(slow, keep=keep.limit(keep.all(), bytes="1kB"))), 1)
    assert steps_in(slow) == [1]
