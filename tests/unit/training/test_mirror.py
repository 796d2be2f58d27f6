"""Every pack in several places: what a save needs of them, and what is read where one of them has lost something."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.broken_places import Refusing, damage, over
from support.rank_threads import together
from tenuto.errors import SaveFailed, StoreError, UsageError
from tenuto.maintenance.verify import assert_whole, execute, plan_verify
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


def part(ranks: Any) -> dict[str, Any]:
    begin, end = (12 * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
    return {"w": tenuto.shard(np.arange(12.0)[begin:end].copy(), whole=(12,), offsets=(begin,))}


@pytest.fixture
def places(tmp_path: Path) -> Iterator[list[Path]]:
    yield [tmp_path / name for name in "abc"]


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.filterwarnings("ignore")
def test_a_save_commits_with_the_required_copies_of_each_pack_and_not_with_fewer(
    places: list[Path], missing: int
) -> None:
    """One rank's packs alone are short of a copy, or of two: two copies of three are required of each."""
    a, b, c = places

    def work(ranks: Any) -> Any:
        stores = [
            a,
            *(
                over(place, Refusing("rank-00001.safetensors")) if at < missing else place
                for at, place in enumerate((b, c))
            ),
        ]
        return tenuto.save(part(ranks), tenuto.Mirror(*stores, copies=2), ranks=ranks)

    found = together(2, work)
    if missing < 2:
        assert {one.step for one in found} == {0}
        assert np.array_equal(tenuto.load(a).state["w"], np.arange(12.0))
    else:
        assert all(isinstance(one, Exception) for one in found)
        assert "1 of the 2 required copies" in "".join(str(one) for one in found)
        assert not tenuto.Repository(a).checkpoints()
        assert not list(a.rglob("*.safetensors")), "what was put is freed"


def test_a_home_that_fails_fails_the_save(places: list[Path]) -> None:
    a, b, _ = places
    tenuto.save({"w": 1.0}, tenuto.Mirror(a, b))
    with pytest.raises((SaveFailed, StoreError)):
        tenuto.save({"w": 2.0}, tenuto.Mirror(over(a, Refusing("manifest.json")), b, copies=1))
    assert [one.step for one in tenuto.Repository(a).checkpoints()] == [0]
    assert [one.step for one in tenuto.Repository(b).checkpoints()] == [0]


@pytest.mark.parametrize("lost", ["rank-00000.safetensors", "rank-00000.index", "manifest.json"])
@pytest.mark.parametrize("how", ["damaged", "missing"])
@pytest.mark.filterwarnings("ignore")
def test_what_one_place_has_lost_is_read_from_another(places: list[Path], lost: str, how: str) -> None:
    a, b, _ = places
    place = tenuto.Mirror(a, b)
    state = {"w": np.arange(100_000.0)}
    tenuto.save(state, place)
    found = next(a.rglob(lost))
    if how == "damaged":
        damage(found)
    else:
        found.unlink()
    if (lost, how) == ("manifest.json", "missing"):
        assert not tenuto.Repository(place).checkpoints(), "the home decides"
        return
    for first in (tenuto.Mirror(a, b), tenuto.Mirror(a, places[2], b, copies=1)):
        assert np.array_equal(tenuto.load(first).state["w"], state["w"])
    assert np.array_equal(tenuto.load(a).state["w"], state["w"]), "who is given the home finds the other place"
    with tenuto.open(a) as opened:
        assert np.array_equal(opened["w"][10:20], state["w"][10:20])


@pytest.mark.filterwarnings("ignore")
def test_damage_in_both_places_is_damage(places: list[Path]) -> None:
    a, b, _ = places
    tenuto.save({"w": np.arange(100_000.0)}, tenuto.Mirror(a, b))
    for place in (a, b):
        damage(next(place.rglob("*.safetensors")))
    with pytest.raises(tenuto.errors.NothingRestorable, match="damaged"):
        tenuto.load(tenuto.Mirror(a, b))


@pytest.mark.filterwarnings("ignore")
def test_a_place_is_read_by_itself_and_is_the_home_once_a_person_says_so(places: list[Path]) -> None:
    a, b, _ = places
    with tenuto.Checkpointer(tenuto.Mirror(a, b), {"w": np.ones(3)}) as ckpt:
        for _ in ckpt.steps(2):
            ckpt.log(tag="good")
    shutil.rmtree(a)
    assert tenuto.load(b, step="good").step == 2
    (b / "tenuto-member.json").unlink()
    with tenuto.Checkpointer(b, {"w": np.ones(3)}) as ckpt:
        assert len(ckpt.steps(5)) == 3
        for _ in ckpt.steps(5):
            pass
    assert tenuto.load(b).step == 5
    assert_whole(Repo.open(open_store(b)))


@pytest.mark.filterwarnings("ignore")
def test_retention_and_removal_reach_every_place(places: list[Path]) -> None:
    a, b, _ = places
    with tenuto.Checkpointer(
        tenuto.Mirror(a, b), {"w": np.ones(3)}, save=tenuto.every(steps=1), keep=tenuto.keep.latest(2)
    ) as ckpt:
        for _ in ckpt.steps(6):
            pass
    for place in (a, b):
        assert {path.parent.name for path in place.rglob("*.safetensors")} == {"step-00000005", "step-00000006"}
        assert {path.parent.name for path in place.rglob("manifest.json")} == {"step-00000005", "step-00000006"}


@pytest.mark.filterwarnings("ignore")
def test_verify_reads_every_copy_and_says_which_is_damaged(places: list[Path]) -> None:
    a, b, _ = places
    tenuto.save({"w": np.arange(100_000.0)}, tenuto.Mirror(a, b))
    damage(next(b.rglob("*.safetensors")))
    repo = Repo.open(open_store(a))
    report = execute(repo, plan_verify(repo))
    assert [finding.message.partition(":")[0] for finding in report.errors] == [f"in {b}"]
    assert not report.damaged(), "it can be restored"
    damage(next(a.rglob("*.safetensors")))
    report = execute(repo, plan_verify(repo))
    assert len(report.errors) == 2 and report.damaged()


@pytest.mark.filterwarnings("ignore")
def test_verify_says_what_was_read_from_another_place_and_which_lacks_something(places: list[Path]) -> None:
    a, b, _ = places
    tenuto.save({"w": np.arange(100_000.0)}, tenuto.Mirror(a, b))
    next(b.rglob("*.safetensors")).unlink()
    damage(next(a.rglob("*.index")))
    repo = Repo.open(open_store(a))
    report = execute(repo, plan_verify(repo))
    assert not report.ok and not report.damaged()
    assert [f"read from {b}" in finding.message for finding in report.errors] == [True]
    assert any(f"{b} lacks 1 object" in finding.message for finding in report.findings)


def test_several_places_are_no_place_of_others(places: list[Path]) -> None:
    a, b, c = places
    with pytest.raises(UsageError, match="already has several locations"):
        tenuto.Mirror(tenuto.Mirror(a, b), c)
    with pytest.raises(UsageError, match="already has several locations"):
        tenuto.PerNode(a, home=tenuto.Mirror(b, c))
