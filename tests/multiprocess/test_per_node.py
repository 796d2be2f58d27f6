"""FSDP2 and AdamW on two nodes with a disk each: which bytes go through the home, counted in processes of their own."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from campaigns.rank_kills.processes import Death, Job, Plan
from support import forked_processes as forked
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

PROGRAM = Path(__file__).with_name("per_node_program.py")
MIB = 1 << 20
WEIGHTS = 3 * 3 * MIB
"""The weight, and what AdamW has of it: all but some kilobytes of the state."""
SMALL = 128 << 10
"""More than headers of packs, and leaves of one number or one row, come to."""


def run(place: Path, nodes: Sequence[str], steps: int, *more: str) -> Any:
    words = (str(place), ",".join(nodes), str(steps), *more)
    status = forked.job(PROGRAM, len(nodes), *words, log=place / "log", timeout=240)
    assert not any(status), forked.told(place / "log", len(nodes))
    return json.loads((place / "told.json").read_text())


def put(told: Any, key: str) -> int:
    """The bytes of packs, and of parts of them, that all ranks have put into the home."""
    return sum(nbytes for rank in told["ranks"] for _, nbytes in rank[key])


def in_home(place: Path) -> int:
    """The bytes of packs, and of parts of them, that lie in the home."""
    return sum(path.stat().st_size for path in (place / "home").rglob("*.safetensors*"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    place = tmp_path_factory.mktemp("nodes")
    return place, run(place, ["a", "b"], 2)


@pytest.fixture
def place(trained: tuple[Path, Any], tmp_path: Path) -> Iterator[Path]:
    """A training of two steps by a rank on each of two nodes; its paths are in it, so that it stays where it is."""
    where, _ = trained
    backup = tmp_path / "backup"
    shutil.copytree(where, backup)
    yield where
    shutil.rmtree(where)
    backup.rename(where)


def test_a_restart_on_the_same_nodes_moves_no_byte_of_any_pack(trained: tuple[Path, Any], place: Path) -> None:
    before, saved = in_home(place), trained[1]
    assert before < SMALL, "of packs the home has what both nodes need"
    told = run(place, ["a", "b"], 2)
    assert (told["step"], told["began"]) == (2, saved["ended"])
    assert put(told, "at_restart") == 0
    assert in_home(place) == before
    assert_whole(Repo.open(open_store(place / "home")))


@pytest.mark.parametrize("encoding", ["dedupe", "small"])
def test_encoded_data_files_stay_on_their_nodes_and_are_handed_over(tmp_path: Path, encoding: str) -> None:
    """The same nodes again, changed nodes, then three ranks: what a rank lacks of a checkpoint, and of those that
    it rests on, goes through the home for as long as they read."""
    saved = run(tmp_path, ["a", "b"], 2, encoding)
    assert not list((tmp_path / "home").rglob("*.pack*"))
    told = run(tmp_path, ["a", "b"], 2, encoding)
    assert (told["step"], told["began"]) == (2, saved["ended"])
    assert put(told, "at_restart") < SMALL, "no more than what both nodes need and one has"
    for nodes, steps in ((["b", "a"], 3), (["a", "b", "b"], 4)):
        told = run(tmp_path, nodes, steps, encoding)
        assert (told["step"], told["began"]) == (steps - 1, saved["ended"])
        assert put(told, "at_restart") > MIB
        assert not list((tmp_path / "home").rglob("*.pack*"))
        saved = told
    assert_whole(Repo.open(open_store(tmp_path / "home")))


def test_ranks_that_have_changed_nodes_are_handed_their_parts_for_as_long_as_they_read(
    trained: tuple[Path, Any], place: Path
) -> None:
    before = in_home(place)
    told = run(place, ["b", "a"], 2)
    assert (told["step"], told["began"]) == (2, trained[1]["ended"])
    assert WEIGHTS <= put(told, "at_restart") < WEIGHTS + SMALL
    assert in_home(place) == before


def test_another_number_of_ranks_is_handed_only_the_chunks_that_a_node_lacks(
    trained: tuple[Path, Any], place: Path
) -> None:
    """Of three ranks the second, on the second node, needs the third sixth of each leaf, which the first node has."""
    before = in_home(place)
    told = run(place, ["a", "b", "b"], 2)
    assert (told["step"], told["began"]) == (2, trained[1]["ended"])
    assert WEIGHTS // 6 <= put(told, "at_restart") < WEIGHTS // 6 + SMALL
    assert in_home(place) == before


def test_the_home_and_the_nodes_together_are_the_repository(trained: tuple[Path, Any], place: Path) -> None:
    for node in ("a", "b"):
        shutil.copytree(place / node, place / "one", dirs_exist_ok=True)
    (place / "one" / "tenuto-member.json").unlink()
    assert_whole(Repo.open(open_store(place / "one")))


def test_where_a_node_is_lost_its_part_is_and_that_is_said(place: Path) -> None:
    shutil.rmtree(place / "b")
    status = forked.job(PROGRAM, 2, str(place), "a,b", "2", log=place / "log", timeout=240)
    assert any(status)
    assert "rank-00001.safetensors is on no node of this job" in forked.told(place / "log", 2)


def _node(life: int, rank: int) -> str:
    return f"node-{(rank + life) % 2}"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_that_was_killed_has_put_for_others_is_passed_by_and_goes_with_the_checkpoint(
    tmp_path: Path, rank: int
) -> None:
    plan = Plan(tmp_path, 2, 4, more={"node": partial(_node, 0)})
    death = Death(rank, "packs copied, checkpoint not looked for again")
    lives = [plan, replace(plan, more={"node": partial(_node, 1)}, death=death)]
    lives.append(replace(lives[1], steps=10, death=None))
    left = []
    for life in lives:
        with Job(life) as job:
            assert job.wait(120)
        left.append(len(list(plan.where.rglob("*.part-*"))))
        if life.death is None:
            assert {one.status for one in job.ended.values()} == {0}
            assert {one.told["step"] for one in job.ended.values()} == {life.steps}
        else:
            assert job.ended[rank].status == -signal.SIGKILL
    assert left[0] == left[2] == 0 < left[1]
    assert_whole(Repo.open(open_store(plan.where)))
