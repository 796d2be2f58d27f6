"""Repacking: the same steps and values in another encoding, all of them or none, and the originals in the trash."""

from __future__ import annotations

import copy
import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.loaded_interpreter import run
from support.rank_threads import together
from tenuto import every, keep
from tenuto.cli import main
from tenuto.crashpoints import armed
from tenuto.engine.save import encoder, held_commit
from tenuto.engine.staging import arena, pool
from tenuto.errors import CorruptionError, RemovalRefused, RunInUse, SaveFailed, StoreFull
from tenuto.maintenance import repack
from tenuto.maintenance.checkpoint_copy import execute as execute_copies
from tenuto.maintenance.checkpoint_copy import plan_copies
from tenuto.maintenance.gc import execute, plan_gc
from tenuto.maintenance.usage import usage_of
from tenuto.maintenance.verify import assert_whole
from tenuto.model.records import Manifest
from tenuto.policy.encoding import PRESETS
from tenuto.repo.format.object_names import begin_name
from tenuto.repo.format.small_records import decode_begin
from tenuto.repo.repository import Repo
from tenuto.store.local.store import LocalStore
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


def part_of(step: int, rank: int, ranks: int) -> dict[str, Any]:
    """What one rank of several holds: a part of what is trained, and something of its own."""
    state, cut = state_of(step), slice(rank * LEAF // ranks, (rank + 1) * LEAF // ranks)
    part = tenuto.shard(state["trained"][cut], whole=(LEAF,), offsets=(cut.start,))
    own = tenuto.per_rank({"noise": np.random.default_rng((rank, step)).random(3), "name": f"rank {rank} at {step}"})
    return {**state, "trained": part, "own": own}


def train(where: Path, steps: int = STEPS, *, ranks: int = 1, **settings: Any) -> list[dict[str, Any]]:
    """Trains from where the run is; returns what each rank has begun with."""
    given = {"save": every(steps=1), "keep": keep.all(), "on_error": "raise", **settings}

    def work(group: Any) -> dict[str, Any]:
        rank = 0 if group is None else group.rank
        of: Any = state_of if group is None else lambda step: part_of(step, rank, ranks)
        state = of(0)
        with tenuto.Checkpointer(where, state, ranks=group, **given) as ckpt:
            ckpt.restore()
            began = {name: copy.deepcopy(getattr(one, "value", one)) for name, one in state.items()}
            for step in ckpt.steps(steps):
                state.update(of(step + 1))
                ckpt.log(loss=1.0 / (step + 1), **({"tag": "good"} if step == 2 else {}))
        return began

    found = [work(None)] if ranks == 1 else together(ranks, work)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return list(found)


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
    while execute(repo, plan_gc(repo, now=True, force=True)).deleted:
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


KILLED_AT = [
    ("save begun", 2),
    ("repacked checkpoints durable, none visible", 1),
    ("a repacked checkpoint is visible", 1),
    ("a repacked checkpoint is visible", 3),
    ("repacked checkpoints visible, originals still there", 1),
    ("copy in trash, manifest still there", 2),
]


@pytest.mark.parametrize(
    ("point", "times", "ranks"),
    [
        *((point, times, 1) for point, times in KILLED_AT),
        *(pytest.param(point, times, 2, marks=[] if times == 3 else pytest.mark.long) for point, times in KILLED_AT),
    ],
)
def test_killed_anywhere_it_loses_nothing_and_latest_stays_what_it_was(
    tmp_path: Path, point: str, times: int, ranks: int
) -> None:
    where = tmp_path / "ckpts"
    train(where, ranks=ranks)
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
    train(where, STEPS + 1, ranks=ranks)
    restored(where, STEPS + 1)
    freed(where)
    restored(where, STEPS + 1)
    assert_whole(Repo.open(open_store(where)))
    tenuto.Repository(where).repack()
    freed(where)
    restored(where, STEPS + 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_killed_one_leaves_is_copied_after_the_command_that_the_error_names(tmp_path: Path, ranks: int) -> None:
    where, elsewhere = tmp_path / "ckpts", tmp_path / "elsewhere"
    train(where, ranks=ranks)
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_comes_back_otherwise_is_never_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    where = tmp_path / "ckpts"
    train(where, 3, ranks=ranks)
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


# -- what several ranks have saved ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "encoding"), [("plain", "small"), ("small", "plain"), ("dedupe", "dedupe")])
def test_a_run_of_several_ranks_stays_one_of_as_many_and_the_same(tmp_path: Path, saved: str, encoding: Any) -> None:
    where, as_it_was = tmp_path / "ckpts", tmp_path / "as it was"
    train(where, ranks=2, encoding=saved)
    shutil.copytree(where, as_it_was)
    before, stored = manifests(where), freed(where)
    done = tenuto.Repository(where).repack(encoding=encoding)
    after = manifests(where)
    assert after.keys() == before.keys() == set(range(1, STEPS + 1))
    for step, one in after.items():
        old = before[step]
        assert (one.content, one.metrics, one.created, one.progress) == (
            *(old.content, old.metrics, old.created, old.progress),
        )
        assert (len(one.indexes), one.certificate, one.tree) == (2, old.certificate, old.tree)
        begin = decode_begin((where / begin_name(one.id)).read_bytes(), one.id, Repo.open(open_store(where)).id)
        assert set(begin.bases) >= set(one.bases), "who frees data files asks it who rests on them"
        put = {path.name for path in (where / one.id.directory).iterdir() if path.is_file()}
        assert put <= {*begin.names, "begin.json", "manifest.json"}, "what a crash leaves is freed by its names"
    assert done.stored == sum(one.stored_bytes for one in after.values())
    now = freed(where)
    assert now < stored / 3 if encoding == "small" else bool(list(where.rglob("*.safetensors"))) == (saved == "small")
    restored(where)
    assert_whole(Repo.open(open_store(where)))
    for ranks in (2, 3, 1):
        same(train(shutil.copytree(where, tmp_path / f"now {ranks}"), ranks=ranks), train(as_it_was, ranks=ranks))
    train(where, STEPS + 2, ranks=2, encoding=encoding)
    restored(where, STEPS + 2)
    assert_whole(Repo.open(open_store(where)))


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_equal(value, other[name], err_msg=name)


def test_a_line_that_other_numbers_of_ranks_have_saved(tmp_path: Path) -> None:
    where = tmp_path / "ckpts"
    for steps, ranks in ((2, 2), (4, 3), (6, 2)):
        train(where, steps, ranks=ranks)
    ranks = [len(one.indexes) for one in manifests(where).values()]
    tenuto.Repository(where).repack()
    freed(where)
    restored(where)
    assert [len(one.indexes) for one in manifests(where).values()] == ranks
    assert sorted(ranks) == [2, 2, 2, 2, 3, 3]
    assert_whole(Repo.open(open_store(where)))


def test_what_has_chunks_of_another_length_than_the_repository_keeps_them(tmp_path: Path) -> None:
    where, other = tmp_path / "ckpts", tmp_path / "other"
    Repo.create_or_open(open_store(other), chunk_bytes=4096)
    train(other, 2, ranks=2)
    train(where, 1, run="another")
    repository = tenuto.Repository(other)
    execute_copies(repository.repo, plan_copies(repository.repo, repository.checkpoints(), to=where), where)
    train(where, 4, ranks=2)
    tenuto.Repository(where).repack()
    found = {step: one.chunk_bytes for step, one in manifests(where).items() if one.id.run == "main"}
    assert found == {1: 4096, 2: 4096, 3: 256 << 10, 4: 256 << 10}
    freed(where)
    restored(where, 4)
    assert_whole(Repo.open(open_store(where)))


def test_damage_of_one_rank_is_named_before_anything_is_visible(tmp_path: Path) -> None:
    where = tmp_path / "ckpts"
    train(where, 3, ranks=2)
    before = tenuto.Repository(where).checkpoints()
    (pack,) = (where / "runs/main/a0001/step-00000002").glob("rank-00001*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-1000] ^= 4
    pack.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"step-00000002/rank-00001\.safetensors"):
        tenuto.Repository(where).repack()
    assert tenuto.Repository(where).checkpoints() == before
    assert freed(where) and not list(where.rglob("*.pack")), "nothing of it stays"


def test_what_a_disk_has_changed_of_what_was_written_is_named_before_anything_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "ckpts"
    train(where, 3, ranks=2)
    before, put = tenuto.Repository(where).checkpoints(), LocalStore.put_if_absent

    def changing(self: Any, name: str, content: Any, **named: Any) -> Any:
        receipt = put(self, name, content, **named)
        if name.endswith("a0002/step-00000003/rank-00001.pack"):
            data = bytearray((where / name).read_bytes())
            data[-1000] ^= 4
            (where / name).write_bytes(data)
        return receipt

    monkeypatch.setattr(LocalStore, "put_if_absent", changing)
    with pytest.raises(CorruptionError, match=r"a0002/step-00000003/rank-00001\.pack"):
        tenuto.Repository(where).repack()
    assert tenuto.Repository(where).checkpoints() == before


def test_a_store_that_is_full_at_the_second_rank_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "ckpts"
    train(where, 3, ranks=2)
    before, put = sorted(path for path in where.rglob("*") if path.is_file()), LocalStore.put_if_absent

    def full(self: Any, name: str, content: Any, **named: Any) -> Any:
        if "a0002/step-00000002/rank-00001" in name:
            raise StoreFull("no room", subject=name)
        return put(self, name, content, **named)

    monkeypatch.setattr(LocalStore, "put_if_absent", full)
    with pytest.raises(SaveFailed, match=r"a0002/2 failed while writing rank-00001\.pack: no room"):
        tenuto.Repository(where).repack()
    monkeypatch.undo()
    left = set(where.rglob("*")) - set(before)
    assert not [path for path in left if path.suffix in (".pack", ".index")]
    restored(where, 3)
    tenuto.Repository(where).repack()
    freed(where)
    restored(where, 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_memory_for_another_state_it_makes_no_differences(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "ckpts"
    train(where, 3, ranks=ranks)
    monkeypatch.setattr(encoder, "memory_headroom", lambda: 8 * LEAF // ranks)
    tenuto.Repository(where).repack()
    assert {one.environment["encoding"]["delta_bytes"] for one in manifests(where).values()} == {0}
    freed(where)
    restored(where, 3)
    monkeypatch.undo()
    tenuto.Repository(where).repack()
    assert manifests(where)[3].environment["encoding"]["delta_bytes"] >= 4 * LEAF


@pytest.mark.parametrize("encoding", ["small", "dedupe", "plain"])
def test_it_holds_the_image_of_one_rank_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: Any
) -> None:
    where, acquire, beside = tmp_path / "ckpts", pool.acquire, list[int]()
    train(where, 2, ranks=3)
    gc.collect()
    before = len(arena._mappings)

    def noting(nbytes: int, **named: Any) -> Any:
        beside.append(len(arena._mappings) - before)
        return acquire(nbytes, **named)

    monkeypatch.setattr(pool, "acquire", noting)
    gc.disable()
    try:
        tenuto.Repository(where).repack(encoding=encoding)
    finally:
        gc.enable()
    assert beside == [0] * 6, "two checkpoints of three ranks"


KILLED = """
import os, signal, sys
import tenuto
from tenuto.crashpoints import armed

left = [int(sys.argv[3])]

def die():
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

with armed(sys.argv[2], die):
    tenuto.Repository(sys.argv[1]).repack()
"""


@pytest.mark.parametrize(
    ("point", "times", "visible"),
    [
        ("pack durable, index not yet", 1, 0),
        ("packs and indexes durable, manifest not yet", 4, 0),
        ("a repacked checkpoint is visible", 2, 2),
        ("copy in trash, manifest still there", 2, STEPS),
    ],
)
def test_a_process_that_is_killed_between_ranks_leaves_the_run_and_the_next_one_ends_it(
    tmp_path: Path, point: str, times: int, visible: int
) -> None:
    where = tmp_path / "ckpts"
    train(where, ranks=2)
    before = manifests(where)
    assert run(["-c", KILLED, str(where), point, str(times)]).returncode == -9
    assert sum(one.id.attempt == 2 for one in manifests(where).values()) == visible
    assert tenuto.load(where).step == STEPS
    restored(where)
    assert run(["-m", "tenuto", "repack", str(where), "--yes"]).returncode == 0
    assert freed(where) < sum(one.stored_bytes for one in before.values()) / 3
    assert {step: one.content for step, one in manifests(where).items()} == {
        step: one.content for step, one in before.items()
    }
    same(train(where, STEPS + 1, ranks=2), [{**part(STEPS, rank)} for rank in range(2)])
    restored(where, STEPS + 1)
    assert_whole(Repo.open(open_store(where)))


def part(step: int, rank: int) -> dict[str, Any]:
    return {name: getattr(one, "value", one) for name, one in part_of(step, rank, 2).items()}


# -- refusals ------------------------------------------------------------------------------------------------------


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
