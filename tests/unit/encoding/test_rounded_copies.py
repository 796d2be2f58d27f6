"""Copies in half precision beside their float32 masters: stored by what they are rounded from, and never other bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tenuto
from support.changing_state import all_come_back, noise, train
from support.rank_threads import together
from tenuto import Encoding, every, keep
from tenuto.cli import main
from tenuto.codec.derived import rounded
from tenuto.engine.save.baseline import baseline_in
from tenuto.engine.save.rounded_copies import PARTS
from tenuto.errors import CorruptionError, FormatTooNew
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, Manifest
from tenuto.repo.format import objects
from tenuto.repo.format.index import decode_index, encode_index
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

State = dict[str, Any]
CHUNK = 8192
FULL = 3 * CHUNK // 4 + 1000
"""Elements: float32 has four chunks of them, and half precision two."""


def repo_of(where: Path) -> Repo:
    return Repo.open(open_store(where))


def small_chunks(where: Path, chunk_bytes: int = CHUNK) -> Path:
    Repo.create_or_open(open_store(where), chunk_bytes=chunk_bytes)
    return where


def last(where: Path, step: int, attempt: int = 1) -> tuple[Manifest, Index]:
    repo = repo_of(where)
    manifest = repo.manifest(CheckpointId("main", attempt, step))
    return manifest, repo.index(manifest)


def copies(where: Path, step: int, attempt: int = 1) -> set[str]:
    """The leaves that have chunks which are rounded from others."""
    manifest, index = last(where, step, attempt)
    stored = index.stored
    assert stored is not None and manifest.rounded is (stored.rounded is not None)
    if stored.rounded is None:
        return set()
    rows = np.searchsorted(index.chunk_start, np.flatnonzero(stored.rounded), side="right") - 1
    return {index.specs[row].path for row in rows.tolist()}


def half(master: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return master.astype(np.float16)


def rounds(state: State) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        state["half"][:] = half(state["master"])


def pair(count: int = FULL, seed: int = 0) -> State:
    state = {"half": np.zeros(count, np.float16), "master": noise(seed, count), "moment": noise(seed + 1, count)}
    rounds(state)
    return state


def written(where: Path, step: int) -> int:
    return sum(path.stat().st_size for path in where.glob(f"runs/main/a0001/step-{step:08d}/*.pack"))


@pytest.mark.parametrize("encoding", ["small", Encoding(), Encoding(codec="lz4"), Encoding(dedupe=False)], ids=str)
def test_a_copy_takes_a_few_bytes_a_chunk(tmp_path: Path, encoding: Any) -> None:
    state = pair()

    def change(step: int) -> None:
        state["master"] *= np.float32(1.01)
        rounds(state)

    seen = train(small_chunks(tmp_path), state, 3, change, encoding=encoding)
    for step in seen:
        assert copies(tmp_path, step) == {"half"}
        _, index = last(tmp_path, step)
        assert index.stored is not None and index.stored.rounded is not None
        assert index.stored.stored[index.stored.rounded > 0].tolist() == [12, 12]
    all_come_back(tmp_path, seen)


def test_torch_bfloat16_beside_its_masters(tmp_path: Path) -> None:
    masters = {
        f"layer{number}": torch.randn(40, 300, generator=torch.Generator().manual_seed(number)) for number in range(3)
    }
    state = {"model": {name: one.bfloat16() for name, one in masters.items()}, "optimizer": masters}
    small_chunks(tmp_path)
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), keep=keep.all(), encoding="small") as ckpt:
        for _ in ckpt.steps(3):
            for name, one in masters.items():
                one.mul_(1.01)
                state["model"][name].copy_(one)
    assert copies(tmp_path, 3) == {f"model/layer{number}" for number in range(3)}
    found = tenuto.load(tmp_path).state
    for name, one in masters.items():
        assert torch.equal(found["model"][name], one.bfloat16()) and torch.equal(found["optimizer"][name], one)
    assert_whole(repo_of(tmp_path))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.sampled_from([2048, 2049, 2050, 4095, 4096, 4097, 6143, 8191, 8193, 9001]),
    seed=st.integers(0, 1 << 30),
    odd=st.integers(0, 40),
    bfloat=st.booleans(),
)
def test_any_bits_come_back(tmp_path_factory: Any, count: int, seed: int, odd: int, bfloat: bool) -> None:
    """NaN of any payload, denormals, -0.0, sizes of all kinds, and copies of which some elements are no rounding."""
    where, source = small_chunks(tmp_path_factory.mktemp("any")), np.random.default_rng(seed)
    words = (source.standard_normal(count) * 0.02).astype(np.float32).view(np.uint32)
    wild = source.integers(0, count, count // 8)
    words[wild] = source.integers(0, 1 << 32, len(wild), dtype=np.uint32)
    words[source.integers(0, count, 60)] = np.resize(
        np.array([0x80000000, 1, 0x80000001, 0x7F800001, 0xFFFFFFFF, 0x7FC01234, 0x007FFFFF, 0x38800000], np.uint32), 60
    )
    dtype = torch.bfloat16 if bfloat else torch.float16
    master = torch.from_numpy(words.view(np.float32).copy())
    state = {"half": torch.zeros(count, dtype=dtype), "master": master}

    def bits() -> dict[str, bytes]:
        return {name: one.view(torch.uint8).numpy().tobytes() for name, one in state.items()}

    seen = {}
    with tenuto.Checkpointer(where, state, save=every(steps=1), keep=keep.all(), encoding="small") as ckpt:
        for step in ckpt.steps(3):
            master[step::7] += 0.001
            state["half"].copy_(master)
            state["half"].view(torch.int16)[torch.from_numpy(source.integers(0, count, odd))] ^= 0x41
            seen[step + 1] = bits()
    for step, expected in seen.items():
        found = tenuto.load(where, step=step).state
        assert {name: one.view(torch.uint8).numpy().tobytes() for name, one in found.items()} == expected
        if odd < PARTS:  # else each part of the sample may have hit one that is no rounding
            assert copies(where, step) == {"half"}
    assert_whole(repo_of(where))


def test_one_other_element_costs_little_and_another_leaf_is_no_copy(tmp_path: Path) -> None:
    state = pair()
    state["half"][5] = 3.0
    state["unlike"] = half(noise(9, FULL))

    def change(step: int) -> None:
        if step == 1:  # from now on nothing is a copy of anything
            state["half"][:] = half(noise(20, FULL))

    seen = train(small_chunks(tmp_path), state, 2, change, encoding="small")
    assert copies(tmp_path, 1) == {"half"} and copies(tmp_path, 2) == set()
    manifest, _ = last(tmp_path, 2)
    data = json.loads((tmp_path / manifest.id.manifest).read_bytes())
    assert data["format"] == objects.ENCODED
    _, index = last(tmp_path, 1)
    assert index.stored is not None and index.stored.rounded is not None
    assert max(index.stored.stored[index.stored.rounded > 0].tolist()) < 100
    all_come_back(tmp_path, seen)


def test_chunks_that_are_no_rounding_are_stored_in_the_usual_way(tmp_path: Path) -> None:
    """Of a leaf whose other chunks are: as differences to the save before, where there is one."""
    state = pair(3 * FULL)

    def change(step: int) -> None:
        state["master"] *= np.float32(1.01)
        rounds(state)
        state["half"][CHUNK // 2 : CHUNK] = half(noise(7, CHUNK // 2)) * np.float16(1 + step / 512)

    seen = train(small_chunks(tmp_path), state, 4, change, encoding="small")
    for step in seen:
        _, index = last(tmp_path, step)
        assert index.stored is not None and index.stored.rounded is not None
        row = [spec.path for spec in index.specs].index("half")
        first, stop = index.chunk_start[row : row + 2].tolist()
        assert index.stored.rounded[first:stop].tolist() == [2, 0, *[2] * (stop - first - 2)]
        assert bool(index.stored.base[first + 1] >= 0) is (step > 1)
    all_come_back(tmp_path, seen)


def test_a_structure_without_copies_is_seldom_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.engine.save import rounded_copies

    looked: list[int] = []
    alike = rounded_copies._alike
    monkeypatch.setattr(rounded_copies, "_alike", lambda plan: looked.append(1) or alike(plan))
    state = {"a": half(noise(1, FULL)), "b": noise(2, FULL)}
    train(small_chunks(tmp_path), state, 20, lambda step: state["b"].__setitem__(step, 1.0), encoding="small")
    assert len(looked) == 2


def test_what_did_not_change_is_named_and_what_rests_on_new_masters_is_not(tmp_path: Path) -> None:
    state = pair()

    def change(step: int) -> None:
        if step == 2:  # the masters change where no rounding does
            state["master"].view(np.uint32)[:] ^= 1
        if step == 4:
            state["master"] *= np.float32(1.01)
            rounds(state)

    seen = train(small_chunks(tmp_path), state, 6, change, encoding=Encoding(delta=8))
    assert [copies(tmp_path, step) for step in seen] == [{"half"}] * 6
    bases = [{id.step for id in last(tmp_path, step)[0].bases} for step in seen]
    assert bases[:2] == [set(), {1}] and written(tmp_path, 2) < 4096 + 20_000
    own = [pack.at is None for pack in last(tmp_path, 2)[1].packs]
    stored = last(tmp_path, 2)[1].stored
    assert stored is not None and stored.rounded is not None
    assert not any(own[number] for number in stored.pack[stored.rounded > 0]), "named where the masters are"
    stored, own = last(tmp_path, 3)[1].stored, [pack.at is None for pack in last(tmp_path, 3)[1].packs]
    assert stored is not None and stored.rounded is not None
    assert all(own[number] for number in stored.pack[stored.rounded > 0]), "made again from the new masters"
    all_come_back(tmp_path, seen)


def test_masters_that_go_and_come(tmp_path: Path) -> None:
    """A copy whose master is not saved any more is written as it is; its chunks are not named where it was one."""
    state = pair()

    def change(step: int) -> None:
        if step == 1:
            state["kept"] = state.pop("master")[:100].copy()
        if step == 3:
            state["master"] = state["half"].astype(np.float32)
        if step == 4:
            state["master"] *= np.float32(1.01)
            rounds(state)

    seen = train(small_chunks(tmp_path), state, 5, change, encoding="small")
    assert [copies(tmp_path, step) for step in seen] == [{"half"}, set(), set(), set(), {"half"}], (
        "what the step before has stored in another way is named"
    )
    all_come_back(tmp_path, seen)


@pytest.mark.parametrize(
    "given",
    [
        {"in_flight": 2},
        {"capture": "fenced"},
        {"memory": every(steps=1)},
        {"memory_budget": 1 << 20},
        {},
    ],
    ids=str,
)
def test_however_a_save_is_taken(tmp_path: Path, given: State) -> None:
    state = pair(150_000)

    def change(step: int) -> None:
        state["master"] *= np.float32(1.01)
        rounds(state)

    all_come_back(tmp_path, train(small_chunks(tmp_path), state, 4, change, encoding="small", **given))
    if "memory_budget" not in given:
        assert copies(tmp_path, 4) == {"half"}


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, State]:
    state = pair(50_000)

    def change(step: int) -> None:
        state["master"] *= np.float32(1.01)
        rounds(state)

    train(small_chunks(tmp_path / "ckpts"), state, 4, change, encoding=Encoding(delta=8))
    assert copies(tmp_path / "ckpts", 4) == {"half"}
    return tmp_path / "ckpts", state


def same(found: Any, state: State) -> None:
    for name, value in state.items():
        assert np.asarray(found[name]).tobytes() == value.tobytes(), name


def test_parts_are_read_alone(saved: tuple[Path, State]) -> None:
    where, state = saved
    with tenuto.open(where) as opened:
        for part in (slice(0, 3), slice(4095, 4097), slice(49_990, 50_000), slice(1000, 40_000, 7)):
            assert np.array_equal(opened["half"][part], state["half"][part])


def test_it_is_exported_repacked_copied_and_stays_when_others_go(saved: tuple[Path, State], tmp_path: Path) -> None:
    where, state = saved
    repository = tenuto.Repository(where)
    assert repository.replicate(tmp_path / "copy").ok
    same(tenuto.load(tmp_path / "copy").state, state)
    for command in (
        ["export", str(where), str(tmp_path / "out.npz")],
        ["cp", str(where), "4", "--to-run", "other"],
        ["cp", str(where), "4", str(tmp_path / "elsewhere")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert not ended.value.code, command
    same(np.load(tmp_path / "out.npz"), state)
    same(tenuto.load(where, run="other").state, state)
    same(tenuto.load(tmp_path / "elsewhere").state, state)
    repository.repack("main", encoding="small")
    assert copies(where, 4, attempt=2) == {"half"}
    with pytest.raises(SystemExit) as ended:
        main(["gc", str(where), "--now", "--yes"])
    assert not ended.value.code
    same(tenuto.load(where).state, state)
    assert_whole(repo_of(where))


def test_a_sealed_repository(tmp_path: Path) -> None:
    where, state = small_chunks(tmp_path / "ckpts"), pair()
    key = tmp_path / "tenuto.key"
    tenuto.save({"x": 1}, where)
    with pytest.raises(SystemExit) as ended:
        main(["key", "add", str(where), "--key-file", str(key)])
    assert not ended.value.code
    change: Callable[[int], None] = lambda step: (state["master"].__imul__(np.float32(1.01)), rounds(state))  # noqa: E731
    train(where, state, 3, change, encoding="small", key=key, run="sealed")
    index = json.loads((where / "runs/sealed/a0001/step-00000003/manifest.json").read_bytes())
    assert index["format"] == objects.ROUNDED and index["code"]
    same(tenuto.load(where, run="sealed", key=key).state, state)


def test_parts_of_two_ranks_are_restored_by_three(tmp_path: Path) -> None:
    rows, columns = 12, 6000
    whole = noise(3, rows * columns).reshape(rows, columns)
    small_chunks(tmp_path)

    def of(rank: int, world: int) -> tuple[int, int, State]:
        begin, end = rank * rows // world, (rank + 1) * rows // world
        held = {"half": half(whole[begin:end]), "master": whole[begin:end].copy()}
        mark = lambda name: tenuto.shard(held[name], whole=(rows, columns), offsets=(begin, 0))  # noqa: E731
        return begin, end, {"held": held, "state": {"half": mark("half"), "master": mark("master")}}

    def saves(ranks: Any) -> None:
        _, _, mine = of(ranks.rank, 2)
        with tenuto.Checkpointer(
            tmp_path, mine["state"], ranks=ranks, save=every(steps=1), keep=keep.all(), encoding="small"
        ) as ckpt:
            for _ in ckpt.steps(2):
                pass

    def restores(ranks: Any) -> bool:
        begin, end, mine = of(ranks.rank, 3)
        for one in mine["held"].values():
            one[:] = 0
        with tenuto.Checkpointer(tmp_path, mine["state"], ranks=ranks, keep=keep.all(), encoding="small") as ckpt:
            ckpt.restore()
            return np.array_equal(mine["held"]["half"], half(whole[begin:end]))

    for one in together(2, saves):
        assert not isinstance(one, BaseException), one
    manifest = repo_of(tmp_path).manifest(CheckpointId("main", 1, 2))
    assert manifest.rounded
    assert together(3, restores) == [True] * 3
    tenuto.Repository(tmp_path).repack()
    repacked = repo_of(tmp_path).manifest(repo_of(tmp_path).checkpoints()[0])
    assert repacked.rounded and repacked.content == manifest.content and repacked.id != manifest.id
    assert together(3, restores) == [True] * 3


# -- damage, and bytes that nobody should trust ------------------------------------------------------------------------


def test_a_damaged_master_takes_its_copies_with_it_and_is_told(saved: tuple[Path, State]) -> None:
    where, _ = saved
    manifest, index = last(where, 4)
    assert index.stored is not None and index.stored.rounded is not None
    number = int(index.stored.base[np.flatnonzero(index.stored.rounded)[0]])
    pack = index.packs[int(index.stored.pack[number])]
    path = where / pack.object_name(manifest.id)
    data = bytearray(path.read_bytes())
    data[int(index.stored.offset[number])] ^= 1
    path.write_bytes(data)
    for name in ("half", "master"):
        with (
            tenuto.open(where, step=4) as opened,
            pytest.raises(CorruptionError, match=rf"^{name} is damaged: .*\.pack"),
        ):
            opened[name][...]
    assert tenuto.load(where).step == 3
    report = tenuto.Repository(where).verify()
    told = {finding.leaf: finding.message for finding in report.findings if finding.leaf is not None}
    assert {"half", "master"} <= told.keys()
    assert "rounded from a tensor of which" in told["half"]


TREE: Any = {
    "!": "dict",
    "i": [[name, {"!": "leaf", "n": row, "as": "numpy"}] for row, name in enumerate(("half", "master", "words"))],
}


@pytest.fixture
def honest(tmp_path: Path) -> tuple[Repo, CheckpointId, Index]:
    state = pair() | {"words": np.random.default_rng(5).integers(0, 1 << 32, FULL, np.uint32)}
    del state["moment"]
    tenuto.save(state, small_chunks(tmp_path), step=1, encoding="small")
    manifest, index = last(tmp_path, 1)
    return repo_of(tmp_path), manifest.id, index


LIES: dict[str, tuple[str, list[tuple[str, str, str, int]]]] = {
    "its own rounding": ("fewer|another dtype", [("base", "half", "half", 0)]),
    "a leaf of words": ("another dtype", [("base", "half", "words", 0)]),
    "another copy": ("outside|fewer|dtype", [("base", "half", "half", 1)]),
    "out of range": ("does not list", [("base", "half", "", 10_000)]),
    "behind the last": ("outside", [("base", "half", "end", -1)]),
    "nothing": ("outside", [("base", "half", "", -1)]),
    "the end of its master": ("outside|fewer", [("base", "half", "master", 3)]),
    "of another dtype": ("another dtype", [("rounded", "half", "", 1)]),
    "of a dtype that nobody knows": ("does not know", [("rounded", "half", "", 3)]),
    "of words, from a master": ("another dtype", [("base", "words", "master", 0), ("rounded", "words", "", 2)]),
    "a circle": ("one upon the other", [("base", "master", "half", 0)]),
}
"""What is said of a chunk: in which column, of which leaf's first, and what: so many behind another leaf's first."""


@pytest.mark.parametrize("lie", LIES)
def test_a_derivation_that_cannot_be_is_refused(honest: tuple[Repo, CheckpointId, Index], lie: str) -> None:
    repo, id, index = honest
    assert index.stored is not None and index.stored.rounded is not None
    place = {spec.path: int(index.chunk_start[row]) for row, spec in enumerate(index.specs)}
    place |= {"": 0, "end": len(index.digests)}
    base, marks = index.stored.base.copy(), index.stored.rounded.copy()
    words, changes = LIES[lie]
    for column, leaf, other, more in changes:
        (base if column == "base" else marks)[place[leaf]] = place[other] + more
    bad = encode_index(replace(index, stored=replace(index.stored, base=base, rounded=marks)), id, repo.id)
    with pytest.raises(CorruptionError, match=words):
        decode_index(bad, id=id, rank=0, tree=repo.manifest(id).tree, repository=repo.id)


def test_a_master_of_other_bytes_gives_an_error_and_never_other_numbers(
    honest: tuple[Repo, CheckpointId, Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second chunk of the master for the first: all that can be checked before decoding is right."""
    repo, id, index = honest
    assert index.stored is not None and index.stored.rounded is not None
    base = index.stored.base.copy()
    copied = np.flatnonzero(index.stored.rounded)[0]
    base[copied] += 1
    bad = encode_index(replace(index, stored=replace(index.stored, base=base)), id, repo.id)
    monkeypatch.setattr(Repo, "index_bytes", lambda *given: bad)
    with pytest.raises(CorruptionError, match=r"^half is damaged"):
        tenuto.load(repo.url, step=1)


def test_an_older_version_says_that_it_is_too_old(
    honest: tuple[Repo, CheckpointId, Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, _, _ = honest
    monkeypatch.setattr(objects, "_KNOWN", {kind: (1, 2) for kind in ("index", "manifest", "begin")})
    with pytest.raises(FormatTooNew, match="format 4"):
        tenuto.load(repo.url, step=1)


def test_rounding_takes_numbers_that_lie_in_two_chunks() -> None:
    numbers = noise(0, 10).tobytes()
    assert rounded(memoryview(numbers[:12] + numbers[12:]), "float16") == half(noise(0, 10)).tobytes()


def test_what_is_decoded_from_a_rounded_chunk_is_never_named(honest: tuple[Repo, CheckpointId, Index]) -> None:
    """No save of ours makes such a chunk; another writer may, and what it is decoded from would be left behind."""
    _, id, index = honest
    assert index.stored is not None and index.stored.rounded is not None
    base = index.stored.base.copy()
    copied = int(np.flatnonzero(index.stored.rounded)[0])
    other = int(index.chunk_start[[spec.path for spec in index.specs].index("words")])
    base[other] = copied
    found = baseline_in(replace(index, stored=replace(index.stored, base=base)), id)
    assert not found.usable[[copied, other]].any() and found.again[copied] and not found.again[other]
    assert baseline_in(index, id).usable[other]
