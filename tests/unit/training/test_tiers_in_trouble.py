"""What tiers do where something is cut off, damaged, late, or not what it was: nothing is lost, no run begins anew."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.broken_places import damage
from support.rank_threads import together
from support.said import lines_said, said
from tenuto import Tier, Tiers, every, keep
from tenuto.concurrency.deadlines import begun_within
from tenuto.crashpoints import armed
from tenuto.errors import RepositoryError, StoreError
from tenuto.maintenance import tier_copies
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Receipt
from tenuto.repo.refs import list_tags
from tenuto.repo.repository import Repo
from tenuto.store.contract import Content, Listing
from tenuto.store.registry import open_store
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.training import tier_fill, tier_worker
from tenuto.training.tier_fill import TierFill

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 20_000


class Gated(DelegatingStore):
    """A place whose listings fail, or wait until it answers."""

    def __init__(self, place: Path) -> None:
        super().__init__(open_store(place))
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.answered = threading.Event()
        self.gate = "/a0003"
        """The end of the names that wait."""
        self.asked = threading.Event()

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        if name.endswith(self.gate):
            self.asked.set()
            self.answers.wait(60)
        return super().put_if_absent(name, content, token=token)

    def children(self, prefix: str, *, after: str = "") -> Listing:
        if self.error is not None:
            raise self.error
        waited = not self.answers.is_set() and prefix.endswith(self.gate)
        if waited:
            self.asked.set()
            self.answers.wait(60)
        found = super().children(prefix, after=after)
        if waited:
            self.answered.set()
        return found


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return tmp_path / "slow"


@contextmanager
def training(place: Any, steps: int, **more: Any) -> Iterator[Any]:
    """Trains to the step, and yields before the Checkpointer is closed."""
    state = {"w": np.zeros(SIZE)}
    with tenuto.Checkpointer(place, state, **{"save": every(steps=1), "keep": keep.latest(2), **more}) as ckpt:
        for _ in ckpt.steps(steps):
            state["w"] += 1
        ckpt.wait()
        yield ckpt
    assert (state["w"] == steps).all()


def train(place: Any, steps: int, **more: Any) -> None:
    with training(place, steps, **more):
        pass


def steps_in(place: Path) -> list[int]:
    """The checkpoints that lie there whole: data file and manifest."""
    found = {int(path.parent.name[5:]) for path in place.rglob("manifest.json")}
    return sorted(found & {int(path.parent.name[5:]) for path in place.rglob("*.safetensors")})


def part(ranks: Any) -> dict[str, Any]:
    begin, end = (SIZE * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
    return {"w": tenuto.shard(np.arange(float(SIZE))[begin:end].copy(), whole=(SIZE,), offsets=(begin,))}


class Killed(BaseException):
    """What a crash is to this process."""


def killed() -> None:
    raise Killed


# -- a lost primary ----------------------------------------------------------------------------------------------------


def test_names_survive_a_takeover_that_was_cut_off(fast: Path, slow: Path) -> None:
    with training(Tiers(Tier(fast), Tier(slow)), 4) as ckpt:
        ckpt.log(tag="good")
    shutil.rmtree(fast)
    tiers = Tiers(Tier(fast), Tier(slow))
    repo = Repo.create_or_open(tiers)
    with armed("primary has the claims of another tier, not its checkpoints", killed), pytest.raises(Killed):
        tier_copies.catch_up(repo, open_store(slow), "main", tier_copies.Takeover(open_store(fast)), print)
    train(Tiers(Tier(fast), Tier(slow)), 8)
    for place in (fast, slow):
        repo = Repo.open(open_store(place))
        assert list_tags(repo) == {"good": CheckpointId("main", 1, 4)}, place
    assert 4 in steps_in(slow)


def test_a_damaged_newest_checkpoint_of_another_tier_hides_none_before_it(fast: Path, slow: Path) -> None:
    train(Tiers(Tier(fast), Tier(slow, keep=keep.all())), 2)
    train(Tiers(Tier(fast), Tier(slow, keep=keep.all())), 3)
    shutil.rmtree(fast)
    damage(slow / "runs/main/a0002/step-00000003/manifest.json")
    state = {"w": np.zeros(SIZE)}
    with tenuto.Checkpointer(Tiers(Tier(fast), Tier(slow)), state) as ckpt:
        restored = ckpt.restore()
    assert restored is not None and restored.checkpoint.step == 2


def test_a_primary_without_checkpoints_does_not_begin_anew_where_another_tier_does_not_answer(
    fast: Path, slow: Path
) -> None:
    unwell = Gated(slow)
    train(Tiers(Tier(fast), Tier(unwell)), 2)
    shutil.rmtree(fast)
    Repo.create_or_open(Tiers(Tier(fast), Tier(unwell)))  # a job that was killed behind this
    unwell.error = StoreError("no route to host")
    with pytest.raises(RepositoryError, match="may have its checkpoints"):
        train(Tiers(Tier(fast), Tier(unwell)), 3)
    unwell.error = None
    with said("takes over step 2"):
        train(Tiers(Tier(fast), Tier(unwell)), 3)


def test_a_tier_that_answers_too_late_changes_nothing_in_the_primary(
    fast: Path, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(fast, 1)
    shutil.copytree(fast, fast.with_name("backup"))
    train(Tiers(Tier(fast), Tier(slow)), 2)
    train(Tiers(Tier(fast), Tier(slow)), 3)
    shutil.rmtree(fast)
    shutil.move(fast.with_name("backup"), fast)  # the primary was set back, and the other tier knows more
    gated, state = Gated(slow), {"w": np.zeros(SIZE)}
    gated.answers.clear()

    def impatient(seconds: float, what: str, work: Callable[[], Any], *, subject: str) -> Any:
        """Its patience begins once the tier hangs: else it may have ended before anything was asked of it."""
        outcome = begun_within(0.2, what, work, subject=subject)
        assert gated.asked.wait(60)
        return outcome()

    monkeypatch.setattr(tier_worker, "within", impatient)
    with tenuto.Checkpointer(Tiers(Tier(fast), Tier(gated)), state, save=every(steps=1)) as ckpt:
        steps = ckpt.steps(4)
        next(steps)
        gated.answers.set()
        assert gated.answered.wait(60)
        until = time.monotonic() + 60
        while any(thread.name.startswith("tenuto-asking") for thread in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.005)  # a pool's thread lives on, by another name
        for _ in steps:
            pass
    assert steps_in(fast)[-1] == 4
    assert sorted(path.name for path in (fast / "runs/main").iterdir()) == ["a0001", "a0002"]


# -- what is believed to lie elsewhere ---------------------------------------------------------------------------------


def test_i7_a_full_primary_frees_nothing_that_a_slower_tier_has_lost_meanwhile(fast: Path, slow: Path) -> None:
    tiers, state = Tiers(Tier(fast, capacity=3 * 8 * SIZE), Tier(slow)), {"w": np.zeros(SIZE)}
    with tenuto.Checkpointer(tiers, state, save=every(steps=1), keep=keep.all()) as ckpt:
        for step in ckpt.steps(8):
            if step == 2:
                ckpt.wait()
                for fill in ckpt._training.saving.tiers.followers:
                    assert fill.rounds.join(60)
                shutil.rmtree(slow)
                slow.mkdir()
    assert steps_in(fast) == list(range(1, 9))


def test_what_a_node_had_half_brought_to_the_primary_is_brought(tmp_path: Path) -> None:
    home = tmp_path / "home"

    def job(steps: int) -> None:
        def work(ranks: Any) -> None:
            tiers = Tiers(Tier(tmp_path / f"node{ranks.rank}", per_node=True), Tier(home), node=f"node{ranks.rank}")
            with tenuto.Checkpointer(tiers, part(ranks), save=every(steps=1), ranks=ranks) as ckpt:
                for _ in ckpt.steps(steps):
                    pass

        found = together(2, work)
        assert not [one for one in found if isinstance(one, BaseException)], found

    job(2)
    (home / "runs/main/a0001/step-00000002/rank-00001.safetensors").unlink()  # as a job leaves it that was killed
    job(2)
    assert (home / "runs/main/a0001/step-00000002/rank-00001.safetensors").exists()
    for node in ("node0", "node1"):
        shutil.rmtree(tmp_path / node)
    assert (np.asarray(tenuto.load(home).state["w"]) == np.arange(float(SIZE))).all()


def test_the_end_of_training_waits_for_what_other_nodes_are_bringing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, slow = tmp_path / "home", tmp_path / "slow"
    brings, looks, wait = threading.Event(), [], TierFill._await_nodes

    def awaits(fill: TierFill, id: CheckpointId) -> None:
        if fill._closed:
            looks.append(id)
        if len(looks) == 20:
            brings.set()
        wait(fill, id)

    class SlowNode(DelegatingStore):
        def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
            if name.endswith("rank-00001.safetensors"):
                assert brings.wait(20), "nobody looks for it any more"
            return super().put_if_absent(name, content, token=token)

    monkeypatch.setattr(TierFill, "_await_nodes", awaits)
    monkeypatch.setattr(tier_fill, "LOOK_S", 0.01)

    def work(ranks: Any) -> None:
        node = f"node{ranks.rank}"
        tiers = Tiers(Tier(tmp_path / node, per_node=True), Tier(SlowNode(open_store(home))), Tier(slow), node=node)
        with tenuto.Checkpointer(tiers, part(ranks), save=every(steps=1), ranks=ranks) as ckpt:
            for _ in ckpt.steps(1):
                pass

    with lines_said() as lines:
        found = together(2, work)
    assert not [one for one in found if isinstance(one, BaseException)], found
    assert not [line for line in lines if "lacks step" in line]
    assert steps_in(slow) == [1]


def test_a_job_that_was_taken_over_leaves_no_torn_checkpoint_in_a_tier(fast: Path, slow: Path) -> None:
    gated, state = Gated(slow), {"w": np.zeros(SIZE)}
    gated.gate = "step-00000001/manifest.json"
    gated.answers.clear()
    ckpt = tenuto.Checkpointer(Tiers(Tier(fast), Tier(gated)), state, save=every(steps=1), keep=keep.all())
    for step in ckpt.steps(2):
        if step == 1:
            assert gated.asked.wait(60), "step 1 is being copied"
    ckpt.wait()
    next_job = f"""
import numpy as np, tenuto
tiers = tenuto.Tiers(tenuto.Tier({str(fast)!r}), tenuto.Tier({str(slow)!r}))
with tenuto.Checkpointer(tiers, {{"w": np.zeros({SIZE})}}, save=tenuto.every(steps=1), takeover=True) as ckpt:
    for _ in ckpt.steps(4):
        pass
"""
    subprocess.run([sys.executable, "-c", next_job], check=True, timeout=120)
    directory = slow / "runs/main/a0001/step-00000001"
    assert not (directory / "rank-00000.safetensors").exists()
    gated.answers.set()
    assert ckpt._training.saving.tiers.followers[0].rounds.join(60)
    assert not (directory / "manifest.json").exists()
    ckpt.close()
    assert_whole(Repo.open(open_store(slow)))


def test_a_metric_that_comes_after_the_next_checkpoint_counts_in_every_tier(fast: Path, slow: Path) -> None:
    tiers, state = Tiers(Tier(fast), Tier(slow, keep=keep.best(1, "loss"))), {"w": np.zeros(SIZE)}
    with tenuto.Checkpointer(tiers, state, save=every(steps=1), keep=keep.all()) as ckpt:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
            for _ in ckpt.steps(step):
                pass
            ckpt.wait()
            assert ckpt._training.saving.tiers.followers[0].rounds.join(60)
            ckpt.log(loss=loss)  # of the step that is saved, and copied, already
    assert 2 in steps_in(slow)


def test_a_tier_that_came_back_with_another_line_is_neither_written_over_nor_taken_for_a_copy(
    fast: Path, slow: Path, tmp_path: Path
) -> None:
    train(Tiers(Tier(fast), Tier(slow)), 2)
    train(Tiers(Tier(tmp_path / "other"), Tier(tmp_path / "theirs")), 2)
    shutil.rmtree(slow / "runs")
    shutil.copytree(tmp_path / "theirs" / "runs", slow / "runs")  # another job's, under the same numbers
    tiers = Tiers(Tier(fast), Tier(slow))
    repo, id = Repo.open(tiers), CheckpointId("main", 1, 2)
    (place,) = tiers.followers
    before = {path: path.read_bytes() for place in (fast, slow) for path in place.rglob("*") if path.is_file()}
    (pack,) = (path.name for path in (slow / id.directory).glob("*.safetensors"))
    assert not tier_copies.heal(repo, f"{id.directory}/{pack}", place)
    assert tier_copies.free_copies(repo, tiers.home, [id], [place]) == []
    assert {path: path.read_bytes() for place in (fast, slow) for path in place.rglob("*") if path.is_file()} == before
