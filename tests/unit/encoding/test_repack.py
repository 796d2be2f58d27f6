"""Repacking: the same steps and values in another encoding, all of them or none, and the originals in the trash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto import every, keep
from tenuto.cli import main
from tenuto.crashpoints import armed
from tenuto.engine.save import held_commit
from tenuto.errors import RemovalRefused, RunInUse, SaveFailed, UsageError
from tenuto.maintenance import repack
from tenuto.maintenance.gc import execute, plan_gc
from tenuto.maintenance.usage import usage_of
from tenuto.maintenance.verify import assert_whole
from tenuto.model.records import Manifest
from tenuto.policy.encoding import PRESETS
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.filterwarnings("ignore")
LEAF = 200_000
STEPS = 6


def state_of(step: int) -> dict[str, Any]:
    source = np.random.default_rng(0)
    return {
        "frozen": source.random(LEAF, np.float32),
        "trained": source.random(LEAF, np.float32) + np.float32(step) / 64,
        "step": step,
        "nested": {"flag": True, "name": f"at {step}", "empty": np.zeros((0, 3))},
    }


def train(where: Path, steps: int = STEPS, **settings: Any) -> None:
    state = state_of(0)
    given = {"save": every(steps=1), "keep": keep.all(), "on_error": "raise", **settings}
    with tenuto.Checkpointer(where, state, **given) as ckpt:
        for step in ckpt.steps(steps):
            state.update(state_of(step + 1))
            ckpt.log(loss=1.0 / (step + 1), **({"tag": "good"} if step == 2 else {}))


def restored(where: Path, steps: int = STEPS) -> None:
    for step in range(1, steps + 1):
        found = tenuto.load(where, step=step).state
        for name, value in state_of(step).items():
            assert (
                np.array_equal(found[name], value)
                if isinstance(value, np.ndarray)
                else found[name]["name"] == (value["name"])
                if isinstance(value, dict)
                else found[name] == value
            )


def manifests(where: Path) -> dict[int, Manifest]:
    repo = Repo.open(open_store(where))
    return {id.step: repo.manifest(id) for id in repo.checkpoints()}


def freed(where: Path) -> int:
    repo = Repo.open(open_store(where))
    while execute(repo, plan_gc(repo, now=True)).deleted:
        pass
    return usage_of(repo).stored


def test_a_plain_run_becomes_small_and_trains_on(tmp_path: Path) -> None:
    where = tmp_path / "ckpts"
    train(where)
    before = manifests(where)
    plain = freed(where)
    with pytest.raises(SystemExit) as ended:
        main(["repack", str(where), "--encoding", "small", "--yes"])
    assert not ended.value.code
    restored(where)
    after = manifests(where)
    assert after.keys() == before.keys()
    for step, one in after.items():
        old = before[step]
        assert (one.content, one.metrics, one.created) == (old.content, old.metrics, old.created)
    assert tenuto.load(where).step == STEPS and tenuto.load(where, step="good").step == 3
    assert freed(where) < plain / 3, "the originals are in the trash, and nothing rests on them"
    assert not list(where.rglob("*.safetensors"))
    restored(where)
    assert_whole(Repo.open(open_store(where)))
    train(where, STEPS + 2, encoding="small")
    restored(where, STEPS + 2)


def test_data_files_that_are_mostly_dead_go(tmp_path: Path) -> None:
    """Two checkpoints that rest on parts of others: stored anew they have what they need, and the others go."""
    where = tmp_path / "ckpts"
    train(where, 12, encoding="dedupe", keep=keep.latest(1))
    tenuto.Repository(where).repack(encoding="dedupe")
    freed(where)
    repo = Repo.open(open_store(where))
    assert {(id.attempt, id.step) for id in repo.checkpoints()} == {(2, 3), (2, 12)}
    assert {path.parent for path in where.rglob("rank-*.pack")} == {where / id.directory for id in repo.checkpoints()}


def test_a_sealed_run_is_opened_and_sealed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, key = tmp_path / "ckpts", tmp_path / "tenuto.key"
    train(where, 2)
    with pytest.raises(SystemExit):
        main(["key", "add", str(where), "--key-file", str(key)])
    monkeypatch.setenv("TENUTO_KEY_FILE", str(key))
    train(where, 4, encoding="dedupe")
    tenuto.Repository(where).repack()
    freed(where)
    restored(where, 4)
    assert not list(where.rglob("*.safetensors")), "what lay there unsealed is sealed now"
    monkeypatch.delenv("TENUTO_KEY_FILE")
    with pytest.raises(tenuto.errors.KeyMissing):
        tenuto.load(where)


class Abandoned(BaseException):
    pass


@pytest.mark.parametrize(
    ("point", "times"),
    [
        ("repacked checkpoints durable, none visible", 1),
        ("a repacked checkpoint is visible", 1),
        ("a repacked checkpoint is visible", 3),
        ("repacked checkpoints visible, originals still there", 1),
        ("copy in trash, manifest still there", 2),
    ],
)
def test_killed_anywhere_it_loses_nothing_and_latest_stays_what_it_was(tmp_path: Path, point: str, times: int) -> None:
    where = tmp_path / "ckpts"
    train(where)
    repo, left = Repo.open(open_store(where)), [times]
    plan = repack.plan_repack(repo, "main", PRESETS["small"])

    def die() -> None:
        left[0] -= 1
        if not left[0]:
            raise Abandoned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repack.HeldCommit, "take_back", lambda *given, **named: None)  # as of a killed process
        with armed(point, die), pytest.raises(Abandoned):
            repack.execute(repo, plan)
    assert tenuto.load(where).step == STEPS
    restored(where)
    train(where, STEPS + 1)
    restored(where, STEPS + 1)
    freed(where)
    restored(where, STEPS + 1)
    assert_whole(Repo.open(open_store(where)))
    tenuto.Repository(where).repack()
    freed(where)
    restored(where, STEPS + 1)


def test_what_a_killed_one_leaves_is_copied_after_the_command_that_the_error_names(tmp_path: Path) -> None:
    where, elsewhere = tmp_path / "ckpts", tmp_path / "elsewhere"
    train(where)
    repo = Repo.open(open_store(where))

    def die() -> None:
        raise Abandoned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repack.HeldCommit, "take_back", lambda *given, **named: None)  # as of a killed process
        with armed("a repacked checkpoint is visible", die), pytest.raises(Abandoned):
            repack.execute(repo, repack.plan_repack(repo, "main", PRESETS["small"]))
    (failed,) = tenuto.Repository(where).replicate(elsewhere).failed
    assert failed.hint == f"a repack was cut off: tenuto repack {where} --run main ends it"
    tenuto.Repository(where).repack("main")
    assert tenuto.Repository(where).replicate(elsewhere).ok
    restored(elsewhere)


def test_one_that_fails_when_some_are_visible_keeps_what_they_rest_on(tmp_path: Path) -> None:
    where = tmp_path / "ckpts"
    train(where)
    repo = Repo.open(open_store(where))

    def fail() -> None:
        raise tenuto.errors.StoreError("the disk is away", subject="disk")

    with armed("a repacked checkpoint is visible", fail), pytest.raises(tenuto.errors.StoreError):
        repack.execute(repo, repack.plan_repack(repo, "main", PRESETS["small"]))
    freed(where)
    restored(where)
    assert_whole(Repo.open(open_store(where)))


def test_one_whose_put_arrived_and_failed_keeps_what_it_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "ckpts"
    train(where)
    repo = Repo.open(open_store(where))

    def lost(*given: Any, **named: Any) -> None:
        held_commit_put(*given, **named)
        raise tenuto.errors.StoreError("the answer is lost", subject="disk")

    held_commit_put = held_commit.commit
    monkeypatch.setattr(held_commit, "commit", lost)
    with pytest.raises(tenuto.errors.StoreError):
        repack.execute(repo, repack.plan_repack(repo, "main", PRESETS["small"]))
    monkeypatch.undo()
    assert repo.manifest(repo.checkpoints()[-1]).bases, "it is visible, and rests on others"
    restored(where)
    freed(where)
    restored(where)


def test_what_comes_back_otherwise_is_never_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "ckpts"
    train(where, 3)
    before = tenuto.Repository(where).checkpoints()
    read = repack._Row.read_into

    def wrong(self: Any, out: Any, start: int) -> None:
        read(self, out, start)
        if self.spec.path == "trained":
            out[0] ^= 1

    monkeypatch.setattr(repack._Row, "read_into", wrong)
    with pytest.raises(SaveFailed, match="is not the same state"):
        tenuto.Repository(where).repack()
    monkeypatch.undo()
    assert tenuto.Repository(where).checkpoints() == before
    restored(where, 3)


def test_refusals(tmp_path: Path) -> None:
    where = tmp_path / "ckpts"
    state = state_of(0)
    with tenuto.Checkpointer(where, state, save=every(steps=1)) as ckpt:
        for _ in ckpt.steps(2):
            pass
        with pytest.raises(RunInUse):
            tenuto.Repository(where).repack()
    with pytest.raises(SystemExit):
        main(["pin", str(where), "2"])
    with pytest.raises(RemovalRefused, match="pin"):
        tenuto.Repository(where).repack()

    def work(ranks: Any) -> Any:
        part = tenuto.shard(np.arange(6.0) + ranks.rank, whole=(12,), offsets=(6 * ranks.rank,))
        return tenuto.save({"w": part}, tmp_path / "ranks", ranks=ranks)

    together(2, work)
    with pytest.raises(UsageError, match="saved by 2 ranks"):
        tenuto.Repository(tmp_path / "ranks").repack()
