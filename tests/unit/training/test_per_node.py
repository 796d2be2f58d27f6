"""Ranks on several nodes, each with a directory of its own for packs, and one home for all the rest."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.broken_places import damage
from support.rank_threads import together
from support.said import said
from tenuto.engine.group import rounds
from tenuto.errors import CorruptionError, NothingRestorable, RanksDisagree, RepositoryError
from tenuto.maintenance import gc, remove, replicate
from tenuto.maintenance.verify import assert_whole, execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.local.store import LocalStore
from tenuto.store.registry import open_store

ROWS = 12


def whole(number: float = 1.0) -> Any:
    return np.arange(ROWS * 4.0).reshape(ROWS, 4) * number


def part(ranks: Any, number: float = 1.0) -> dict[str, Any]:
    begin, end = (ROWS * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
    return {
        "w": tenuto.shard(whole(number)[begin:end].copy(), whole=(ROWS, 4), offsets=(begin, 0)),
        "own": tenuto.per_rank(np.full(2, ranks.rank)),
    }


class Cluster:
    """Nodes of two ranks each, with a disk each, and what they share."""

    def __init__(self, root: Path, copies: int = 1) -> None:
        self.root = root
        self.home = root / "home"
        self.copies = copies
        self.nodes = {rank: f"n{rank // 2}" for rank in range(8)}

    def place(self, ranks: Any) -> Any:
        node = self.nodes[ranks.rank]
        return tenuto.PerNode(self.root / node, home=self.home, copies=self.copies, node=node)

    def on(self, count: int, work: Any) -> Sequence[Any]:
        found = together(count, work)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found

    def save(self, count: int, number: float) -> Any:
        return self.on(count, lambda ranks: tenuto.save(part(ranks, number), self.place(ranks), ranks=ranks))[0]

    def train(self, count: int, steps: int, **more: Any) -> Sequence[Any]:
        """Steps that multiply what each rank holds; what each began with."""

        def work(ranks: Any) -> Any:
            state = part(ranks)
            with tenuto.Checkpointer(
                self.place(ranks),
                state,
                ranks=ranks,
                save=tenuto.every(steps=1),
                on_error="raise",
                ranks_timeout=60.0,
                **more,
            ) as ckpt:
                restored = ckpt.restore()
                began = _local(state["w"]).copy(), None if restored is None else restored.step
                for _ in ckpt.steps(steps):
                    _local(state["w"])[:] += 1
            return began

        return self.on(count, work)

    def load(self, count: int) -> Sequence[Any]:
        def work(ranks: Any) -> Any:
            restored = tenuto.load(self.place(ranks), into=part(ranks, 0.0), ranks=ranks)
            return restored.step, _local(restored.state["w"]), _local(restored.state["own"])

        return self.on(count, work)

    def packs(self, node: str) -> set[str]:
        """Step and file of every pack on a node, or in the home."""
        found = (self.root / node).rglob("*.safetensors")
        return {f"{int(path.parent.name[5:])}/{path.name}" for path in found}


@contextmanager
def watched_puts(home: Path) -> Iterator[list[str]]:
    """Yields a list of the packs, and partial copies of packs, that are put into the home."""
    names: list[str] = []
    original = LocalStore.put_if_absent

    def watched(self: LocalStore, name: str, content: Any, *, token: str) -> Any:
        if Path(self.root) == home and ".safetensors" in name:
            names.append(name.rpartition("/")[2])
        return original(self, name, content, token=token)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "put_if_absent", watched)
        yield names


class Told:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def emit(self, event: Any) -> None:
        self.messages.append(str(getattr(event, "message", "")))


def _local(value: Any) -> Any:
    return getattr(value, "value", value)


def joined(found: Sequence[Any]) -> Any:
    return np.concatenate([one[1] for one in found])


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_each_rank_writes_to_its_own_node_and_the_home_has_no_pack(cluster: Cluster) -> None:
    cluster.save(4, 2.0)
    assert cluster.packs("n0") == {"0/rank-00000.safetensors", "0/rank-00001.safetensors"}
    assert cluster.packs("n1") == {"0/rank-00002.safetensors", "0/rank-00003.safetensors"}
    assert cluster.packs("home") == set()


def test_the_same_layout_is_restored_from_each_nodes_own_disk(cluster: Cluster) -> None:
    cluster.save(4, 2.0)
    found = cluster.load(4)
    assert np.array_equal(joined(found), whole(2.0))
    assert [own.tolist() for _, _, own in found] == [[rank, rank] for rank in range(4)]
    assert cluster.packs("home") == set(), "nothing had to be handed on"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.filterwarnings("ignore")
def test_another_number_of_ranks_is_handed_what_it_does_not_find(cluster: Cluster, count: int) -> None:
    cluster.save(4, 2.0)
    if count == 1:  # a process by itself has nobody who hands it anything on
        with pytest.raises(NothingRestorable, match=r"it may be on n1 \("):
            tenuto.load(tenuto.PerNode(cluster.root / "n0", home=cluster.home, node="n0"))
        return
    cluster.nodes = {rank: f"n{rank % 2}" for rank in range(8)}
    assert np.array_equal(joined(cluster.load(count)), whole(2.0))


def test_only_what_some_rank_lacks_is_put_into_the_home_and_it_is_said(cluster: Cluster) -> None:
    cluster.save(4, 2.0)
    cluster.nodes = {0: "n1", 1: "n1", 2: "n0", 3: "n0"}  # each rank has changed its node
    told, put = Told(), watched_puts(cluster.home)

    def work(ranks: Any) -> Any:
        return tenuto.load(cluster.place(ranks), into=part(ranks, 0.0), ranks=ranks, sinks=[told]).state["w"]

    with put as names:
        found = cluster.on(4, work)
    assert np.array_equal(np.concatenate([_local(one) for one in found]), whole(2.0))
    assert sorted(name.partition(".part-")[0] for name in names) == [
        f"rank-0000{rank}.safetensors" for rank in range(4)
    ]
    assert sum("of 2 data files" in one and "are put into" in one for one in told.messages) == 2, (
        "by a rank of each node"
    )
    assert not list(cluster.home.rglob("*.safetensors*")), "for as long as ranks read"


def test_what_all_nodes_hold_alike_and_is_small_is_handed_to_nobody(cluster: Cluster) -> None:
    """As AdamW's counts of steps: whoever has written them, all find them."""

    def state(ranks: Any, number: float) -> dict[str, Any]:
        return {**part(ranks, number), "small": {str(one): np.full((), number) for one in range(20)}}

    cluster.on(4, lambda ranks: tenuto.save(state(ranks, 7.0), cluster.place(ranks), ranks=ranks))
    assert cluster.packs("home") == {"0/rank-00000.home.safetensors"} < cluster.packs("n0")
    assert cluster.packs("n1") == {"0/rank-00002.safetensors", "0/rank-00003.safetensors"}

    def load(ranks: Any) -> Any:
        return tenuto.load(cluster.place(ranks), into=state(ranks, 0.0), ranks=ranks).state

    with watched_puts(cluster.home) as names:
        found = cluster.on(4, load)
    assert not names
    assert {float(one) for state in found for one in state["small"].values()} == {7.0}
    assert np.array_equal(np.concatenate([_local(one["w"]) for one in found]), whole(7))
    assert_whole(Repo.open(open_store(cluster.home)))


@pytest.mark.parametrize("copies", [1, 2])
def test_what_one_node_holds_alike_stays_there(cluster: Cluster, copies: int) -> None:
    cluster.nodes, cluster.copies = dict.fromkeys(range(2), "n0"), copies
    cluster.on(2, lambda ranks: tenuto.save({"small": np.arange(9)}, cluster.place(ranks), ranks=ranks))
    assert not [name for name in cluster.packs("n0") if ".home." in name]


@pytest.mark.filterwarnings("ignore")
def test_what_a_killed_restore_has_put_into_the_home_goes_with_the_checkpoint_or_by_gc(cluster: Cluster) -> None:
    cluster.train(4, 2, keep=tenuto.keep.latest(2))
    left = [next(cluster.home.rglob(f"step-0000000{step}")) / "rank-00003.safetensors.part-0123" for step in (1, 2)]
    for one in left:
        one.write_bytes(b"some of it")
    assert_whole(Repo.open(open_store(cluster.home)))
    cluster.train(4, 3, keep=tenuto.keep.latest(2))
    assert [one.exists() for one in left] == [False, True]
    for _ in range(2):
        repo = Repo.open(open_store(cluster.home))
        gc.execute(repo, gc.plan_gc(repo, grace_s=0.0))
    assert not left[1].exists() and left[1].parent.exists()


def test_a_lost_node_makes_all_ranks_fall_back_together_to_what_is_whole(cluster: Cluster) -> None:
    cluster.copies = 2
    cluster.save(4, 2.0)
    cluster.copies = 1
    cluster.save(4, 3.0)
    shutil.rmtree(cluster.root / "n1")
    with said("step 1 of run main is damaged and was passed over .* is on no node of this job") as lines:
        found = cluster.load(4)
    assert len([line for line in lines if "passed over" in line]) == 1, "by the first rank alone"
    assert {step for step, _, _ in found} == {0}
    assert np.array_equal(joined(found), whole(2.0))
    skipped = cluster.on(4, lambda ranks: tenuto.load(cluster.place(ranks), part(ranks), ranks=ranks).skipped)
    assert [[id.step for id, _ in one] for one in skipped] == [[1]] * 4


def test_a_lost_node_without_any_copy_is_no_start_from_scratch(cluster: Cluster) -> None:
    cluster.save(4, 2.0)
    shutil.rmtree(cluster.root / "n1")
    found = together(4, lambda ranks: tenuto.load(cluster.place(ranks), into=part(ranks), ranks=ranks))
    assert isinstance(found[0], NothingRestorable)
    assert "on no node of this job" in str(found[0])
    assert all(isinstance(one, Exception) for one in found)


def test_copies_2_survives_the_loss_of_every_node(cluster: Cluster) -> None:
    cluster.copies = 2
    cluster.save(4, 2.0)
    for node in ("n0", "n1"):
        shutil.rmtree(cluster.root / node)
    assert np.array_equal(joined(cluster.load(4)), whole(2.0))


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_pack_of_a_node_is_read_from_the_home(cluster: Cluster) -> None:
    cluster.copies = 2
    cluster.save(4, 2.0)
    for pack in (cluster.root / "n1").rglob("*.safetensors"):
        damage(pack)
    assert np.array_equal(joined(cluster.load(4)), whole(2.0))


def test_what_is_damaged_on_its_node_is_not_handed_on(cluster: Cluster) -> None:
    cluster.copies = 2
    cluster.save(4, 1.0)
    cluster.copies = 1
    cluster.save(4, 2.0)
    pack = next((cluster.root / "n1").rglob("step-00000001/rank-00003.safetensors"))
    damage(pack)
    cluster.nodes = {0: "n1", 1: "n1", 2: "n0", 3: "n0"}
    found = cluster.load(4)
    assert {step for step, _, _ in found} == {0}
    assert "1/rank-00003.safetensors" not in cluster.packs("home")


def test_ranks_that_declare_it_differently_are_refused(cluster: Cluster) -> None:
    def work(ranks: Any) -> Any:
        place = cluster.place(ranks) if ranks.rank else cluster.home
        return tenuto.save(part(ranks), place, ranks=ranks)

    assert all(isinstance(one, RanksDisagree) for one in together(2, work))


def test_a_home_that_is_not_shared_is_still_found_out(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "VISIBLE_S", 0.2)
    cluster.nodes = {0: "n0", 1: "n1"}
    cluster.train(2, 1)
    shutil.copytree(cluster.home, cluster.root / "copy")

    def work(ranks: Any) -> Any:
        home = cluster.home if ranks.rank == 0 else cluster.root / "copy"
        node = f"n{ranks.rank}"
        place = tenuto.PerNode(cluster.root / node, home=home, node=node)
        with tenuto.Checkpointer(place, part(ranks), ranks=ranks, ranks_timeout=60.0) as ckpt:
            for _ in ckpt.steps(2):
                pass

    found = together(2, work)
    assert all(isinstance(one, RanksDisagree) for one in found)
    assert "is not one location for all ranks" in str(found[0])


@pytest.mark.filterwarnings("ignore")
def test_a_training_goes_on_from_its_nodes_and_each_tidies_its_own(cluster: Cluster) -> None:
    cluster.train(4, 5, keep=tenuto.keep.latest(2))
    assert {name.partition("/")[0] for name in cluster.packs("n0")} == {"4", "5"}
    began = cluster.train(4, 8, keep=tenuto.keep.latest(2))
    assert {step for _, step in began} == {5}
    assert np.array_equal(np.concatenate([one[0] for one in began]), whole() + 5)
    steps = {name.partition("/")[0] for name in cluster.packs("n1")}
    assert steps == {"7", "8"}


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.filterwarnings("ignore")
def test_another_number_of_ranks_on_other_nodes_trains_on(cluster: Cluster, count: int) -> None:
    """Whose random state a rank begins with may lie on another node too."""
    cluster.train(4, 3)
    cluster.nodes = {rank: f"n{1 - rank % 2}" for rank in range(8)}
    began = cluster.train(count, 5)
    assert {step for _, step in began} == {3}
    assert np.array_equal(np.concatenate([one[0] for one in began]), whole() + 3)


@pytest.mark.filterwarnings("ignore")
def test_all_places_copied_into_one_directory_are_the_repository(cluster: Cluster) -> None:
    """The home is lost for good: nodes hold the manifest, each its own ranks' packs and indexes, and what they need."""
    cluster.train(4, 3)
    shutil.rmtree(cluster.home)
    one = cluster.root / "one"
    for node in ("n0", "n1"):
        shutil.copytree(cluster.root / node, one, dirs_exist_ok=True)
    (one / "tenuto-member.json").unlink()
    restored = tenuto.load(one)
    assert restored.step == 3
    assert np.array_equal(restored.state["w"], whole() + 3)
    assert_whole(Repo.open(open_store(one)))


def test_a_nodes_directory_given_as_the_home_is_refused(cluster: Cluster) -> None:
    cluster.save(2, 1.0)
    with pytest.raises(RepositoryError, match="whose primary is"):
        tenuto.save({"w": 1.0}, cluster.root / "n0")


@pytest.mark.filterwarnings("ignore")
def test_the_home_by_itself_reads_what_lies_on_this_node(cluster: Cluster) -> None:
    cluster.save(4, 2.0)
    restored = tenuto.load(cluster.home)  # a person on a machine that sees both
    assert np.array_equal(restored.state["w"], whole(2.0))


def test_nothing_is_told_while_all_goes_well(cluster: Cluster) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cluster.save(4, 2.0)
        cluster.load(4)
    assert not [one for one in told if "tenuto: " in str(one.message)]


# -- looked after by a person ------------------------------------------------------------------------------------------


def opened(cluster: Cluster, *gone: str) -> Repo:
    """The home as one finds it who does not see some nodes."""
    for node in gone:
        (cluster.root / node).rename(cluster.root / f"{node} away")
    return Repo.open(open_store(cluster.home))


def test_verify_says_what_it_did_not_see_and_takes_none_of_it_for_damage(cluster: Cluster) -> None:
    cluster.save(4, 2.0)
    report = execute(opened(cluster, "n1"), plan_verify(Repo.open(open_store(cluster.home))), note=True)
    assert report.ok and report.unseen == 2
    assert ["n1" in finding.message for finding in report.findings] == [True]
    assert not tenuto.Repository(cluster.home).notes(report.checked[0]), "of what was not all read nothing is noted"
    with pytest.raises(CorruptionError, match="2 data files not looked at"):
        assert_whole(Repo.open(open_store(cluster.home)))


def replicated(repo: Repo) -> replicate.ReplicateReport:
    return replicate.execute(repo, replicate.plan_replicate(repo, [CheckpointId("main", 1, 0)]))


def test_replicate_brings_what_lies_on_this_node_into_the_home(cluster: Cluster) -> None:
    cluster.save(4, 2.0)
    repo = opened(cluster, "n1")
    plan = replicate.plan_replicate(repo, [CheckpointId("main", 1, 0)])
    assert len(plan.unfound) == 2 and [len(one.packs) for one in plan.copies] == [2]
    assert [place.node for place in plan.away] == ["n1"]
    report = replicate.execute(repo, plan)
    assert report.bytes == plan.bytes > 0 and not report.failed
    (cluster.root / "n1 away").rename(cluster.root / "n1")
    (cluster.root / "n0").rename(cluster.root / "n0 away")
    replicated(Repo.open(open_store(cluster.home)))
    shutil.rmtree(cluster.root / "n1")
    assert np.array_equal(tenuto.load(cluster.home).state["w"], whole(2.0))
    assert not replicate.plan_replicate(Repo.open(open_store(cluster.home)), [CheckpointId("main", 1, 0)]).copies


def test_replicate_copies_no_damage_and_all_the_rest(cluster: Cluster) -> None:
    cluster.save(2, 2.0)
    pack = next((cluster.root / "n0").rglob("rank-00000.safetensors"))
    damage(pack)
    (error,) = replicated(Repo.open(open_store(cluster.home))).failed
    assert "not what was saved" in error.message
    assert not list(cluster.home.rglob("*.tmp-*"))
    assert cluster.packs("home") <= {"0/rank-00001.safetensors"}


@pytest.mark.filterwarnings("ignore")
def test_gc_on_a_node_frees_there_what_the_home_no_longer_knows(cluster: Cluster) -> None:
    cluster.save(4, 1.0)
    cluster.save(4, 2.0)
    repo = opened(cluster, "n1")
    remove.execute(repo, remove.plan_remove(repo, [CheckpointId("main", 1, 0)]))
    for _ in range(2):
        repo = Repo.open(open_store(cluster.home))
        gc.execute(repo, gc.plan_gc(repo, grace_s=0.0))
    assert cluster.packs("n0") == {"1/rank-00000.safetensors", "1/rank-00001.safetensors"}
    (cluster.root / "n1 away").rename(cluster.root / "n1")
    assert "0/rank-00002.safetensors" in cluster.packs("n1")
    repo = Repo.open(open_store(cluster.home))
    plan = gc.plan_gc(repo, grace_s=3600.0)
    assert [one.id.step for one in plan.forgotten] == [0]
    assert gc.execute(repo, plan).forgotten == 1
    assert cluster.packs("n1") == {"1/rank-00002.safetensors", "1/rank-00003.safetensors"}


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_freed_under_a_claim_that_the_home_does_not_have(cluster: Cluster) -> None:
    """A home that was set back to a backup knows nothing of what came after: that is no reason to remove it."""
    cluster.train(4, 1)
    backup = shutil.copytree(cluster.home, cluster.root / "backup")
    cluster.train(4, 3)
    shutil.rmtree(cluster.home)
    backup.rename(cluster.home)
    before = cluster.packs("n1")
    repo = Repo.open(open_store(cluster.home))
    assert not gc.plan_gc(repo).forgotten
    assert {"1/rank-00002.safetensors", "3/rank-00002.safetensors"} <= before == cluster.packs("n1")
