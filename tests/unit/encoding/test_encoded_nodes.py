"""Encoded and sealed saves with data files on the disks of nodes: each rank rests on what its own node has."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from support.thinning import crossed
from tenuto import Encoding, every, keep
from tenuto.cli import main
from tenuto.errors import NothingRestorable
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, WIDE, CHUNK = 12, 9000, 8192
ENCODINGS = ["dedupe", "small", Encoding()]


def whole(step: int) -> dict[str, Any]:
    """A leaf that never changes, masters that always do, and their copy in half precision."""
    source = np.random.default_rng(0)
    frozen = source.standard_normal((ROWS, WIDE), np.float32)
    master = source.standard_normal((ROWS, WIDE), np.float32) * np.float32(1 + step / 1000)
    return {"frozen": frozen, "master": master, "half": master.astype(np.float16)}


class Nodes:
    """Nodes of two ranks each, with a disk each, and what they share."""

    def __init__(self, root: Path, *, copies: int = 1, **given: Any) -> None:
        self.root, self.copies, self.given = root, copies, given
        self.home = root / "home"
        self.nodes = {rank: f"n{rank // 2}" for rank in range(8)}
        Repo.create_or_open(open_store(self.home), chunk_bytes=CHUNK)

    def run(self, count: int, steps: int, *, encoding: Any, keeps: Any = None) -> list[int | None]:
        """Trains to `steps`, and returns the step that each rank has begun with, after comparing what it restored."""

        def work(ranks: Any) -> int | None:
            begin, end = (ROWS * one // count for one in (ranks.rank, ranks.rank + 1))
            held = {name: value[begin:end].copy() for name, value in whole(0).items()}
            state = {
                name: tenuto.shard(value, whole=(ROWS, WIDE), offsets=(begin, 0)) for name, value in held.items()
            } | {"count": np.full(3, 0.0)}
            node = self.nodes[ranks.rank]
            with tenuto.Checkpointer(
                tenuto.PerNode(self.root / node, home=self.home, copies=self.copies, node=node),
                state,
                ranks=ranks,
                save=every(steps=1),
                keep=keeps or keep.all(),
                on_error="raise",
                ranks_timeout=60.0,
                encoding=encoding,
                **self.given,
            ) as ckpt:
                restored = ckpt.restore()
                began = None if restored is None else restored.step
                for name, value in whole(began or 0).items():
                    assert np.array_equal(held[name], value[begin:end]), name
                for step in ckpt.steps(steps):
                    for name, value in whole(step + 1).items():
                        held[name][:] = value[begin:end]
                    state["count"][:] = step + 1
                assert state["count"][0] == max(steps, began or 0)
            return began

        found: Sequence[Any] = together(count, work)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return list(found)

    def packs(self, node: str, step: int, attempt: int = 1) -> int:
        """The bytes of a step's packs in a place."""
        files = (self.root / node).glob(f"runs/main/a{attempt:04d}/step-{step:08d}/*.pack")
        return sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_each_rank_rests_on_what_its_node_has(tmp_path: Path, encoding: Any) -> None:
    nodes = Nodes(tmp_path)
    assert nodes.run(4, 3, encoding=encoding) == [None] * 4
    for node in ("n0", "n1"):
        assert 0 < nodes.packs(node, 2) < 0.75 * nodes.packs(node, 1), "what is frozen is written once"
    assert nodes.packs("home", 1) == 0
    repo = Repo.open(open_store(nodes.home))
    assert [id.step for id in repo.manifest(CheckpointId("main", 1, 3)).bases][:1] == [1]
    assert nodes.run(4, 5, encoding=encoding) == [3] * 4
    assert nodes.packs("home", 4, 2) == 0
    assert nodes.packs("n0", 4, 2) < 0.75 * nodes.packs("n0", 1), "a resumed run rests on its parent"


@pytest.mark.parametrize(("encoding", "count"), crossed(ENCODINGS, [2, 3, 5]), ids=str)
def test_other_ranks_are_handed_what_they_lack_of_every_base(tmp_path: Path, encoding: Any, count: int) -> None:
    """On other nodes than before: parts of the data files of this checkpoint, and of those that it rests on."""
    nodes = Nodes(tmp_path)
    nodes.run(4, 3, encoding=encoding)
    nodes.nodes = {rank: f"n{(rank + 1) % 2}" for rank in range(8)}
    assert nodes.run(count, 5, encoding=encoding) == [3] * count
    assert not list(nodes.home.rglob("*.pack*")), "what was handed over is gone again"
    assert nodes.run(count, 6, encoding=encoding) == [5] * count


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_a_lost_node_is_replaced_by_its_copies_and_without_any_nothing_is_restored(
    tmp_path: Path, encoding: Any
) -> None:
    nodes = Nodes(tmp_path / "two", copies=2)
    nodes.run(4, 3, encoding=encoding)
    shutil.rmtree(nodes.root / "n1")
    assert nodes.run(4, 4, encoding=encoding) == [3] * 4
    shutil.rmtree(nodes.root / "n0")
    shutil.rmtree(nodes.root / "n1")
    assert nodes.run(4, 5, encoding=encoding) == [4] * 4
    alone = Nodes(tmp_path / "one")
    alone.run(4, 3, encoding=encoding)
    shutil.rmtree(alone.root / "n1")
    with pytest.raises(NothingRestorable):
        alone.run(4, 4, encoding=encoding)


def test_what_goes_is_kept_on_its_node_as_long_as_something_rests_on_it(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.run(4, 6, encoding="dedupe", keeps=keep.latest(2))
    steps = [id.step for id in Repo.open(open_store(nodes.home)).checkpoints()]
    assert steps == [5, 6]
    assert nodes.packs("n0", 1) and nodes.packs("n1", 1), "the frozen leaf lies there"
    assert not nodes.packs("n0", 3) and not nodes.packs("n1", 3), "nothing rests on these"
    assert nodes.run(4, 7, encoding="dedupe", keeps=keep.latest(2)) == [6] * 4
    everything = tmp_path / "everything"
    for place in ("home", "n0", "n1"):
        shutil.copytree(
            tmp_path / place, everything, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tenuto-member*")
        )
    assert_whole(Repo.open(open_store(everything)))


def test_sealed_data_files_on_nodes(tmp_path: Path) -> None:
    nodes, key = Nodes(tmp_path), tmp_path / "tenuto.key"
    with pytest.raises(SystemExit) as ended:
        main(["key", "add", str(nodes.home), "--key-file", str(key)])
    assert not ended.value.code
    nodes.given = {"key": key}
    nodes.run(4, 3, encoding="small")
    nodes.nodes = {rank: f"n{(rank + 1) % 2}" for rank in range(8)}
    assert nodes.run(3, 4, encoding="small") == [3] * 3


def test_verify_says_what_it_did_not_see_and_replicate_brings_all_into_the_home(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.run(4, 3, encoding="small")
    (tmp_path / "n1").rename(tmp_path / "n1 away")
    report = tenuto.Repository(nodes.home).verify()
    assert report.ok and report.unseen
    (tmp_path / "n1 away").rename(tmp_path / "n1")
    with pytest.raises(SystemExit) as ended:
        main(["replicate", str(nodes.home)])
    assert not ended.value.code
    for node in ("n0", "n1"):
        shutil.rmtree(tmp_path / node)
    found = tenuto.load(nodes.home)
    assert found.step == 3
    for name, value in whole(3).items():
        assert np.array_equal(found.state[name], value), name
    assert_whole(Repo.open(open_store(nodes.home)))
