"""Encoded and sealed saves in several places: each place that has a checkpoint has every data file that it rests on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.broken_places import damage
from support.filled_tiers import until_filled
from support.rank_threads import together
from tenuto import Mirror, PerNode, Tier, Tiers, every, keep
from tenuto.cli import main
from tenuto.crashpoints import armed
from tenuto.errors import KeyMissing, UsageError
from tenuto.maintenance.gc import free_expired
from tenuto.maintenance.shared_packs import lacking, packs_of
from tenuto.maintenance.status import status
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.filterwarnings("ignore")
LEAF = 80_000
"""Two chunks and a half of float64."""
STEPS = 9


def state_of(step: int) -> dict[str, Any]:
    """A frozen leaf, one that changes at every third step, and one that changes always."""
    return {
        "frozen": np.arange(float(LEAF)),
        "slow": np.full(LEAF, float(step // 3)) + np.arange(LEAF),
        "fast": np.full(LEAF, float(step)) + np.arange(LEAF) / 7,
    }


def train(where: Any, steps: int = STEPS, *, brought: int = 0, in_turn: bool = False, **settings: Any) -> None:
    """Trains to a step. Waits, once step `brought` is done, until all tiers have it: until then none lets it go.
    `in_turn`: what a save removes is gone before the next step, which else may rest on it."""
    state = state_of(0)
    given = {"save": every(steps=1), "keep": keep.latest(2), "encoding": "dedupe", "on_error": "raise", **settings}
    with tenuto.Checkpointer(where, state, **given) as ckpt:
        for step in ckpt.steps(steps):
            for name, value in state_of(step + 1).items():
                state[name][:] = value
            if in_turn or (step and step == brought):
                ckpt.wait()
            if step and step == brought:
                until_filled(where, step)


def restored(where: Any, step: int, **settings: Any) -> None:
    """Asserts that a place by itself has step `step`, every bit of it."""
    found = tenuto.load(where, step=step, **settings).state
    for name, value in state_of(step).items():
        assert np.array_equal(found[name], value), f"{name} of step {step}"


def steps_in(where: Path) -> list[int]:
    return [id.step for id in Repo.open(open_store(where)).checkpoints()]


def assert_alone(where: Path, **settings: Any) -> list[int]:
    """Asserts that each checkpoint of a place can be restored from it alone, and rests on nothing that is not there."""
    repo = Repo.open(open_store(where))
    for id in repo.checkpoints():
        assert not lacking(repo.store, packs_of(repo, repo.manifest(id))), id
        restored(Path(where), id.step, **settings)
    return steps_in(where)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Copies a place to where nothing else of the repository is found, and makes it a repository by itself."""

    def take(where: Path) -> Path:
        to = Path(tempfile.mkdtemp(dir=tmp_path)) / where.name
        shutil.copytree(where, to)
        (to / "tenuto-member.json").unlink(missing_ok=True)
        shutil.rmtree(to / "places", ignore_errors=True)
        return to

    yield take


@pytest.mark.parametrize("encoding", ["dedupe", "small"])
def test_training_resumes_from_the_second_tier_when_the_first_is_lost(
    tmp_path: Path, alone: Callable[[Path], Path], encoding: str
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    tiers = Tiers(Tier(fast, keep=keep.latest(2)), Tier(slow, save=every(steps=4) | tenuto.on.end(), keep=keep.all()))
    train(tiers, brought=4, encoding=encoding)
    assert assert_alone(alone(fast)) == [8, 9]
    assert assert_alone(alone(slow))[-1] == 9
    assert_whole(Repo.open(open_store(slow)))
    shutil.rmtree(fast)
    again = Tiers(Tier(fast, keep=keep.latest(2)), Tier(slow, save=every(steps=4) | tenuto.on.end(), keep=keep.all()))
    train(again, 12, encoding=encoding)
    assert assert_alone(fast)[-1] == 12, "what it rests on was brought to the primary, or written there again"
    assert_whole(Repo.open(open_store(fast)))
    shutil.rmtree(fast)
    assert assert_alone(alone(slow))[-1] == 12


def test_a_tier_frees_what_nothing_there_rests_on_any_more_and_nothing_before(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    train(Tiers(Tier(fast), Tier(slow, save=every(steps=2), keep=keep.latest(1))), 30)
    assert assert_alone(slow) == [30]
    repo = Repo.open(open_store(slow))
    (id,) = repo.checkpoints()
    while free_expired(Repo(open_store(slow), repo.id, repo.chunk_bytes), "main", by="needed", grace_s=0.0):
        pass  # as the tier does once an hour: what rests on others goes before those
    saves = {path.parent.name for path in slow.rglob("rank-*.pack")}
    needed = {base.directory.rpartition("/")[2] for base in (*repo.manifest(id).bases, id)}
    assert saves == needed, "and nothing else has a data file"


def test_a_full_tier_lets_go_what_nothing_rests_on(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    train(Tiers(Tier(fast, keep=keep.all(), capacity=6 * LEAF * 8), Tier(slow, keep=keep.all())), 12, brought=8)
    assert 1 <= len(assert_alone(fast)) < 12  # how many depends on what had arrived when there was no room
    assert {*assert_alone(slow), *assert_alone(fast)} == set(range(1, 13))


@pytest.mark.parametrize("encoding", ["dedupe", "small"])
def test_a_mirror_has_all_by_itself_and_can_become_the_primary(
    tmp_path: Path, alone: Callable[[Path], Path], encoding: str
) -> None:
    """Also what lies in the trash for others to rest on: the next claim would free it as a save that never ended."""
    a, b = tmp_path / "a", tmp_path / "b"
    train(Mirror(a, b), 3, encoding=encoding)
    train(Mirror(a, b), STEPS, encoding=encoding)
    assert assert_alone(alone(b)) == [8, 9]
    shutil.rmtree(a)
    with pytest.raises(SystemExit) as ended:
        main(["promote", str(b), "--yes"])
    assert not ended.value.code
    train(b, 12, encoding=encoding)
    assert assert_alone(b) == [11, 12]
    assert_whole(Repo.open(open_store(b)))


def test_a_new_mirror_gets_what_the_save_would_rest_on_elsewhere(tmp_path: Path, alone: Callable[[Path], Path]) -> None:
    """Data files that one place alone has are not named by a save that wants two copies: it writes the bytes again."""
    a, b = tmp_path / "a", tmp_path / "b"
    train(a, 3)
    train(Mirror(a, b), 5)
    assert assert_alone(alone(b)) == [4, 5]


@pytest.mark.parametrize("lost", ["frozen", "newest"])
@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_what_one_place_has_lost_of_a_shared_data_file_is_read_from_another_and_repaired(
    tmp_path: Path, alone: Callable[[Path], Path], lost: str, how: str
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    train(Mirror(a, b))
    packs = sorted(a.rglob("rank-*.pack"), key=lambda path: path.parent.name)
    pack = packs[0] if lost == "frozen" else packs[-1]
    if how == "damaged":
        damage(pack)
    else:
        pack.unlink()
    restored(Mirror(a, b), 9)
    with pytest.raises(SystemExit) as ended:
        main(["repair", str(a), "--yes"])
    assert not ended.value.code
    assert assert_alone(alone(a)) == [8, 9]
    assert_whole(Repo.open(open_store(a)))


def test_a_damaged_data_file_of_a_removed_checkpoint_is_written_anew_while_training_runs(
    tmp_path: Path, alone: Callable[[Path], Path]
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    train(Tiers(Tier(fast), Tier(slow)), 5)
    damage(min(fast.rglob("rank-*.pack"), key=lambda path: path.parent.name))
    train(Tiers(Tier(fast), Tier(slow)), 7)
    assert assert_alone(alone(fast)) == [6, 7]


def test_status_counts_a_tier_as_whole_with_what_a_checkpoint_rests_on(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    train(Tiers(Tier(fast), Tier(slow)))
    repo = Repo.open(open_store(fast))
    assert status(repo).runs[0].spread[0].places == ("whole", "whole")
    min(slow.rglob("rank-*.pack"), key=lambda path: path.parent.name).unlink()
    assert status(repo).runs[0].spread[0].places == ("whole", "part")


def test_replicate_brings_a_mirror_what_it_lacks_of_a_shared_data_file(
    tmp_path: Path, alone: Callable[[Path], Path]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    train(Mirror(a, b))
    for pack in b.rglob("rank-*.pack"):
        pack.unlink()
    with pytest.raises(SystemExit) as ended:
        main(["replicate", str(a)])
    assert not ended.value.code
    assert assert_alone(alone(b)) == [8, 9]


# -- copies elsewhere --------------------------------------------------------------------------------------------------


def test_a_copy_elsewhere_has_all_that_its_checkpoints_rest_on(tmp_path: Path, alone: Callable[[Path], Path]) -> None:
    where, copy = tmp_path / "ckpts", tmp_path / "copy"
    train(where, 5, encoding="small")
    assert tenuto.Repository(where).replicate(copy).ok
    assert assert_alone(alone(copy)) == [4, 5]
    train(where, 9, encoding="small")
    before = {path: path.stat().st_ino for path in copy.rglob("rank-*.pack")}
    report = tenuto.Repository(where).replicate(copy)
    assert report.ok and {path: path.stat().st_ino for path in before} == before, "nothing is copied again"
    with pytest.raises(SystemExit) as ended:
        main(["replicate", str(where), str(copy), "--check", "--read"])
    assert not ended.value.code
    shutil.rmtree(where)
    assert assert_alone(copy) == [4, 5, 8, 9]
    with pytest.raises(SystemExit) as ended:
        main(["promote", str(copy), "--yes"])
    assert not ended.value.code
    train(copy, 12, encoding="small")
    assert assert_alone(copy)[-1] == 12
    assert_whole(Repo.open(open_store(copy)))


def test_pruned_copies_keep_what_others_rest_on_until_none_does(tmp_path: Path) -> None:
    where, copy = tmp_path / "ckpts", tmp_path / "copy"
    for steps in (3, 5, 9, 30):
        train(where, steps, in_turn=True)
        assert tenuto.Repository(where).replicate(copy, prune=True).ok
        assert assert_alone(copy)[-2:] == [steps - 1, steps]
    while free_expired(Repo.open(open_store(where)), "main", by="needed", grace_s=0.0):
        pass
    assert tenuto.Repository(where).replicate(copy, prune=True).ok
    assert assert_alone(copy) == [29, 30]
    ids = Repo.open(open_store(copy)).checkpoints()
    needed = {one for id in ids for one in (id, *Repo.open(open_store(copy)).manifest(id).bases)}
    assert {path.parent.name for path in copy.rglob("rank-*.pack")} <= {
        one.directory.rpartition("/")[2] for one in needed
    }, "what nothing rests on any more is freed"


def test_a_lost_data_file_of_a_removed_checkpoint_is_copied_again(tmp_path: Path) -> None:
    where, copy = tmp_path / "ckpts", tmp_path / "copy"
    train(where)
    assert tenuto.Repository(where).replicate(copy).ok
    min(copy.rglob("rank-*.pack"), key=lambda path: path.parent.name).unlink()
    assert tenuto.Repository(where).replicate(copy).ok
    assert assert_alone(copy) == [8, 9]


def test_a_forks_copy_has_the_data_files_of_the_run_that_it_was_forked_from(tmp_path: Path) -> None:
    where, copy = tmp_path / "ckpts", tmp_path / "copy"
    train(where, 4, run="first")
    with pytest.raises(SystemExit) as ended:
        main(["fork", str(where), "latest", "second", "--run", "first"])
    assert not ended.value.code
    train(where, 6, run="second")
    assert tenuto.Repository(where).replicate(copy, run="second").ok
    shutil.rmtree(where)
    for step in (5, 6):
        restored(copy, step, run="second")


@pytest.mark.parametrize("point", ["packs copied, checkpoint not looked for again"])
def test_a_copy_that_is_cut_off_goes_on(tmp_path: Path, point: str) -> None:
    where, copy = tmp_path / "ckpts", tmp_path / "copy"
    train(where)

    class Abandoned(BaseException):
        pass

    def abandon() -> None:
        raise Abandoned

    with pytest.raises(Abandoned), armed(point, abandon):
        tenuto.Repository(where).replicate(copy)
    assert tenuto.Repository(where).replicate(copy).ok
    assert assert_alone(copy) == [8, 9]


# -- sealed, several ranks, refused ------------------------------------------------------------------------------------


def key_of(where: Path, key: Path) -> str:
    tenuto.save({"x": np.zeros(1)}, where, run="begun")
    with pytest.raises(SystemExit) as ended:
        main(["key", "add", str(where), "--key-file", str(key)])
    assert not ended.value.code
    return str(key)


@pytest.mark.parametrize("kind", ["tiers", "mirror"])
def test_sealed_checkpoints_are_sealed_in_every_place(tmp_path: Path, kind: str) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    key = key_of(fast, tmp_path / "tenuto.key")
    where = Tiers(Tier(fast), Tier(slow)) if kind == "tiers" else Mirror(fast, slow)
    train(where, encoding="small", key=key)
    shutil.rmtree(fast)
    restored(slow, 9, key=key)
    with pytest.raises(KeyMissing):
        tenuto.load(slow)
    frozen = state_of(0)["frozen"][100:200].tobytes()
    assert not any(frozen in path.read_bytes() for path in slow.rglob("*") if path.is_file())
    if kind == "tiers":
        train(Tiers(Tier(fast), Tier(slow)), 12, encoding="small", key=key)
        restored(fast, 12, key=key)


def test_a_mirror_that_was_away_has_no_key_ring_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that was removed opens the older ring."""
    a, b, away = tmp_path / "a", tmp_path / "b", tmp_path / "away"
    key = key_of(a, tmp_path / "tenuto.key")
    train(Mirror(a, b), 2, key=key)
    b.rename(away)
    monkeypatch.setenv("TENUTO_KEY_FILE", key)
    with pytest.raises(SystemExit):
        main(["key", "add", str(a), "--key-file", str(tmp_path / "second.key")])
    away.rename(b)
    train(Mirror(a, b), 4, key=key)
    rings = [sorted(path.name for path in (where / "keys").iterdir()) for where in (a, b)]
    assert rings[0] == rings[1]
    assert len(rings[0]) == 1


def test_a_primary_that_was_lost_gets_the_newest_key_ring_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow, third = (tmp_path / name for name in ("fast", "slow", "third"))
    key = key_of(fast, tmp_path / "tenuto.key")
    train(Tiers(Tier(fast), Tier(third)), 2, encoding="small", key=key)
    monkeypatch.setenv("TENUTO_KEY_FILE", key)
    with pytest.raises(SystemExit):
        main(["key", "add", str(fast), "--key-file", str(tmp_path / "second.key")])
    train(Tiers(Tier(fast), Tier(slow)), 4, encoding="small", key=key)
    rings = [sorted(path.name for path in (where / "keys").iterdir()) for where in (fast, slow, third)]
    assert rings[0] == rings[1] != rings[2]
    shutil.rmtree(fast)
    train(Tiers(Tier(fast), Tier(third), Tier(slow)), 6, encoding="small", key=key)
    assert sorted(path.name for path in (fast / "keys").iterdir()) == rings[0]


def test_several_ranks_share_data_files_in_tiers(tmp_path: Path, alone: Callable[[Path], Path]) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"

    def work(ranks: Any) -> None:
        half = slice(ranks.rank * LEAF // 2, (ranks.rank + 1) * LEAF // 2)
        own = {name: value[half].copy() for name, value in state_of(0).items()}
        state = {name: tenuto.shard(v, whole=(LEAF,), offsets=(half.start,)) for name, v in own.items()}
        where = Tiers(Tier(fast), Tier(slow))
        with tenuto.Checkpointer(
            where, state, save=every(steps=1), keep=keep.latest(2), encoding="dedupe", ranks=ranks
        ) as ckpt:
            for step in ckpt.steps(6):
                for name, value in state_of(step + 1).items():
                    own[name][:] = value[half]

    for one in together(2, work):
        assert not isinstance(one, BaseException), one
    assert assert_alone(alone(slow))[-1] == 6, "one before it may have been skipped"


def test_a_primary_that_is_filled_in_the_background_takes_no_encoded_saves(tmp_path: Path) -> None:
    place = tmp_path.joinpath
    for first, second in (
        (Tier(place("a"), wait=False), Tier(place("b"), wait=True)),
        (Tier(place("c"), per_node=True), Tier(place("d"))),
    ):
        with pytest.raises(UsageError, match="gets its data files in the background"):
            train(Tiers(first, second))


def test_a_primary_that_a_person_names_alone_writes_what_only_other_places_have(tmp_path: Path) -> None:
    """A repository whose data files lay on a node: a save into the primary alone names none of them."""
    train(PerNode(tmp_path / "disk", home=tmp_path / "shared"), 2, encoding="plain")
    train(tmp_path / "shared", 4)
    shutil.rmtree(tmp_path / "disk")
    restored(tmp_path / "shared", 4)
