"""How one checkpoint differs from another: structure, values, what is not read, and what the command prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import tenuto
from support.rank_threads import together
from tenuto import every, keep
from tenuto.cli import main
from tenuto.errors import CheckpointNotFound, CorruptionError, KeyMissing, LeafNotFound, UsageError
from tenuto.history.diff import Diff, LeafDiff
from tenuto.history.value_diff import Sums, add_block

NAN = math.nan


def pair(place: Path, before: dict[str, Any], after: dict[str, Any]) -> tenuto.Repository:
    tenuto.save(before, place, step=1)
    tenuto.save(after, place, step=2)
    return tenuto.Repository(place)


def leaf(found: Diff, path: str) -> LeafDiff:
    return next(one for one in found.leaves if one.path == path)


def test_each_kind_of_change_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal(700_000).astype(np.float32)
    new = w + np.where(np.arange(w.size) < 1000, 0.5, 0).astype(np.float32)
    before = {"w": w, "gone": np.zeros(3), "shape": np.zeros((2, 3)), "type": np.ones(4, np.float32), "s": np.ones(9)}
    after = {"w": new, "new": np.zeros(3), "shape": np.zeros((3, 2)), "type": np.ones(4), "s": np.ones(9)}
    found = pair(tmp_path, before | {"lr": 0.1, "n": 3}, after | {"lr": 0.2, "n": 3, "k": "v"}).diff(1, 2)
    kinds = {one.path: one.change for one in found.leaves}
    assert kinds == {
        **{"w": "changed", "gone": "removed", "new": "added"},
        **{"shape": "reshaped", "type": "retyped", "s": "same"},
    }
    one = leaf(found, "w")
    assert one.norms == pytest.approx((np.linalg.norm(w), np.linalg.norm(new)), rel=1e-5)
    assert one.largest == pytest.approx(0.5, rel=1e-5) and one.differing == pytest.approx(1000 / w.size)
    assert one.relative == pytest.approx(np.linalg.norm(new - w) / np.linalg.norm(w), rel=1e-4)
    assert one.cosine == pytest.approx(np.dot(w, new) / np.linalg.norm(w) / np.linalg.norm(new), abs=1e-6)
    assert leaf(found, "type").differing == 0.0 and leaf(found, "type").largest == 0.0
    assert [(one.path, one.before, one.after) for one in found.values] == [("lr", 0.1, 0.2), ("k", None, "v")]
    assert not found.same and [one.path for one in found.by_change()] == ["gone", "new", "shape", "type", "w"]


def test_what_has_equal_digests_is_not_read_even_where_it_is_damaged(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {"big": rng.random(100_000), "w": np.zeros(10)}
    repo = pair(tmp_path, state, state | {"w": np.ones(10)})
    (pack,) = tmp_path.glob("runs/main/*/step-00000002/*.safetensors")
    data = bytearray(pack.read_bytes())
    at = data.index(state["big"].tobytes()[:16])
    data[at + 5000] ^= 1
    pack.write_bytes(data)
    found = repo.diff(1, 2)
    assert found.bytes_read == 160 and leaf(found, "big").change == "same" and leaf(found, "w").change == "changed"
    data[data.index(np.ones(10).tobytes())] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptionError, match="w"):
        repo.diff(1, 2)


@given(
    st.lists(
        st.tuples(*[st.integers(-9, 9).map(float) | st.sampled_from([NAN, math.inf])] * 2), min_size=1, max_size=40
    ),
    st.sampled_from([("float32", "float32"), ("float64", "float64"), ("float16", "float32"), ("float32", "float64")]),
)
def test_sums_are_those_of_numpy(values: list[tuple[float, float]], names: tuple[str, str]) -> None:
    a, b = (np.array(column, name) for column, name in zip(zip(*values, strict=True), names, strict=True))
    sums = Sums()
    add_block(sums, a.view(np.uint8), b.view(np.uint8), names)
    good = np.isfinite(a) & np.isfinite(b)
    x, y = np.where(good, a, 0).astype(float), np.where(good, b, 0).astype(float)
    assert sums.elements == len(values)
    assert sums.bad == (int((~np.isfinite(a)).sum()), int((~np.isfinite(b)).sum()))
    own = (np.where(np.isfinite(one), one, 0).astype(float) for one in (a, b))
    assert sums.norms == pytest.approx(tuple(np.linalg.norm(one) for one in own), rel=1e-5)
    assert (sums.aa, sums.bb, sums.ab) == pytest.approx((x @ x, y @ y, x @ y))
    assert sums.dd == pytest.approx((y - x) @ (y - x)) and sums.largest == np.abs(y - x).max()


def test_a_leaf_of_any_type_or_of_nothing_is_compared(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    before = {
        **{"bf16": torch.ones(3, dtype=torch.bfloat16), "f8": torch.ones(3).to(torch.float8_e4m3fn)},
        **{"c": np.array([1 + 1j]), "text": np.array(["ab"]), "b": np.array([True]), "none": np.zeros((0, 3))},
        **{"long": np.ones(2, np.longdouble), "scalar": np.float32(1)},
    }
    after = {
        **{"bf16": torch.ones(3, dtype=torch.bfloat16) * 2, "f8": (torch.ones(3) * 2).to(torch.float8_e4m3fn)},
        **{"c": np.array([1 + 2j]), "text": np.array(["ac"]), "b": np.array([False]), "none": np.zeros((0, 3))},
        **{"long": np.full(2, 2, np.longdouble), "scalar": np.float32(1)},
    }
    found = pair(tmp_path, before, after).diff(1, 2)
    assert leaf(found, "bf16").largest == 1.0 and leaf(found, "f8").largest == 1.0 and leaf(found, "c").largest == 1.0
    assert leaf(found, "text").change == "changed" and leaf(found, "b").differing == 1.0
    assert leaf(found, "none").change == "same" and leaf(found, "long").relative == 1.0


@pytest.mark.parametrize("encoding", ["dedupe", "small"])
def test_encoded_checkpoints_are_compared_as_plain_ones(tmp_path: Path, encoding: Any) -> None:
    state = {"w": np.zeros(200_000), "same": np.arange(50_000.0)}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), keep=keep.all(), encoding=encoding) as ckpt:
        for step in ckpt.steps(2):
            state["w"][: 1000 * step] = 1
    found = tenuto.Repository(tmp_path).diff(1, 2)
    assert leaf(found, "w").differing == 1000 / 200_000 and leaf(found, "same").change == "same"
    assert found.bytes_read < 2 * state["w"].nbytes + 100_000


def test_sealed_checkpoints_are_compared_with_the_key_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where, key = tmp_path / "ckpts", tmp_path / "key"
    tenuto.save({"w": np.zeros(1)}, where, step=1)
    with pytest.raises(SystemExit):
        main(["key", "add", str(where), "--key-file", str(key)])
    rng = np.random.default_rng(0)
    state = {"w": np.ones(100_000), "same": rng.random(40_000)}
    tenuto.save(state, where, step=2, key=key)
    tenuto.save(state | {"w": np.full(100_000, 2.0)}, where, step=3, key=key)
    with pytest.raises(KeyMissing):
        tenuto.Repository(where).diff(2, 3)
    monkeypatch.setenv("TENUTO_KEY_FILE", str(key))
    found = tenuto.Repository(where).diff(2, 3)
    assert leaf(found, "w").largest == 1.0 and leaf(found, "same").change == "same"
    assert found.bytes_read == 1_600_000, "equal digests are equal under one key"


def test_leaves_that_ranks_hold_in_parts_are_one_leaf(tmp_path: Path) -> None:
    def work(ranks: Any) -> None:
        held = np.full((4, 8), float(ranks.rank))
        state = {"w": tenuto.shard(held, whole=(8, 8), offsets=(4 * ranks.rank, 0))}
        with tenuto.Checkpointer(
            tmp_path, state, save=every(steps=1), keep=keep.all(), ranks=ranks, ranks_timeout=60.0
        ) as ckpt:
            for _ in ckpt.steps(2):
                held += ranks.rank

    assert list(together(2, work)) == [None, None]
    one = leaf(tenuto.Repository(tmp_path).diff(1, 2), "w")
    assert (one.shapes[0], one.largest, one.differing) == ((8, 8), 1.0, 0.5)


def test_where_all_is_nan_there_is_no_difference_to_tell(tmp_path: Path) -> None:
    one = leaf(pair(tmp_path, {"w": np.full(3, 2.0)}, {"w": np.full(3, NAN)}).diff(1, 2), "w")
    assert (one.change, one.relative, one.largest, one.cosine, one.nonfinite) == ("changed", None, None, None, (0, 3))
    assert one.norms == (math.sqrt(12), 0.0) and one.differing == 1.0


def test_with_another_repository_and_below_one_entry(tmp_path: Path) -> None:
    state = {"model": {"w": np.zeros(3)}, "more": {"w": np.zeros(3)}, "lr": 1}
    tenuto.save(state, tmp_path / "a", step=1)
    tenuto.save(state | {"more": {"w": np.ones(3)}}, tmp_path / "b", step=7)
    repo = tenuto.Repository(tmp_path / "a")
    assert not repo.diff(1, where=tmp_path / "b").same
    assert repo.diff(1, where=tmp_path / "b", entry="model").same
    with pytest.raises(LeafNotFound, match="its entries are lr, model, more") as raised:
        repo.diff(1, where=tmp_path / "b", entry="modl")
    assert "model" in str(raised.value.hint)
    with pytest.raises(CheckpointNotFound):
        repo.diff(1, 3)


def test_with_a_file_of_weights(tmp_path: Path) -> None:
    tenuto.save({"model": {"a.w": np.zeros(3), "a.b": np.ones(2)}, "opt": {"a.w": np.zeros(9)}}, tmp_path / "a")
    file = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"a.w": np.ones(3), "a.b": np.ones(2)}, file)
    found = tenuto.Repository(tmp_path / "a").diff("latest", where=file)
    assert {one.path: one.change for one in found.leaves} == {"a.w": "changed", "a.b": "same"}
    assert not found.values and found.first.endswith(", model")
    deep = {"net": {"x": {"w": np.zeros(3)}, "y": {"w": np.ones(3)}}, "opt": {"w": np.zeros(9)}}
    tenuto.save(deep, tmp_path / "deep")
    safetensors.numpy.save_file({"x/w": np.zeros(3), "y/w": np.zeros(3)}, file)
    found = tenuto.Repository(tmp_path / "deep").diff("latest", where=file)
    assert {one.path: one.change for one in found.leaves} == {"x/w": "same", "y/w": "changed"}
    safetensors.numpy.save_file({"other": np.ones(3)}, file)
    with pytest.raises(UsageError, match="no name in common"):
        tenuto.Repository(tmp_path / "a").diff("latest", where=file)


# -- the command -------------------------------------------------------------------------------------------------------


def diff(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["diff", *map(str, words)])
    assert not left.value.code, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    state = {"w": np.ones(3), "v": np.ones((2, 2)), "lr": 0.1}
    pair(tmp_path / "a", state, state | {"w": np.array([1, 1, NAN]), "v": np.full((2, 2), 2.0), "lr": 0.2})
    tenuto.save(state, tmp_path / "b", step=5)
    return tmp_path / "a", tmp_path / "b"


def test_the_command_prints_what_differs(places: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = diff(capsys, places[0], 1, 2)
    assert out.splitlines()[0].startswith("main/a0001/1 -> main/a000")
    assert "NaN or infinite: 0 -> 1" in out and "2 leaves differ, 0 the same" in out and "lr  0.1 -> 0.2" in out
    assert out.index("  w ") < out.index("  v "), "what became NaN comes first"
    by_path = diff(capsys, places[0], 1, 2, "--sort", "path", "--limit", 1)
    assert "  v " in by_path and "  w " not in by_path and "1 more leaf" in by_path


def test_the_command_and_places(places: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(diff(capsys, places[0], "latest", f"{places[1]}:5", "--json"))
    assert found["schema"] == "tenuto.diff/1" and not found["same"] and len(found["leaves"]) == 2
    assert found["values"] == [{"path": "lr", "before": 0.2, "after": 0.1}]
    assert json.loads(diff(capsys, places[0], 1, f"{places[1]}:latest", "--json"))["same"]


@pytest.mark.parametrize("words", [("1", "2", "--sort", "size"), ("1", "nothing"), ("1", "/nowhere:2")])
def test_the_command_refuses_what_makes_no_sense(places: Any, words: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["diff", str(places[0]), *words])
    assert left.value.code and "hint:" in capsys.readouterr().err
