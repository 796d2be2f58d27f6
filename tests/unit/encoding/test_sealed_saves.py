"""Sealed saves: without the key nothing of a tensor can be read, and with it nothing can be changed unnoticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import tenuto
from support.rank_threads import together
from tenuto import every, keep
from tenuto.cli import main
from tenuto.errors import CorruptionError, KeyMissing, Tampered, TenutoError, UsageError, WrongKey
from tenuto.maintenance.verify import assert_whole
from tenuto.model import canonical_json
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

PLAIN = b"0123456789abcdef" * 20_000
"""Easily found again in what is stored."""


def sealed(tmp_path: Path) -> tuple[Path, Path]:
    where, key = tmp_path / "ckpts", tmp_path / "tenuto.key"
    with tenuto.Checkpointer(where, {"x": torch.zeros(1)}, save=every(steps=1)):
        pass
    command("key", "add", where, "--key-file", key)
    return where, key


def command(*words: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert not caught.value.code


def state_of(step: int) -> dict[str, Any]:
    return {
        "text": torch.frombuffer(bytearray(PLAIN), dtype=torch.uint8),
        "weights": torch.full((300, 400), float(step)) + torch.arange(400) / 7,
        "frozen": torch.arange(200_000.0).sqrt(),
    }


def train(where: Path, steps: int, **settings: Any) -> None:
    state = state_of(0)
    with tenuto.Checkpointer(where, state, save=every(steps=1), keep=keep.all(), on_error="raise", **settings) as ckpt:
        for step in ckpt.steps(steps):
            state["weights"].copy_(state_of(step + 1)["weights"])


def packs(where: Path) -> list[Path]:
    return sorted(where.glob("runs/main/*/*/rank-*.pack"))


def load_equals(where: Path, step: int, **settings: Any) -> bool:
    got = tenuto.load(where, step=step, **settings).state
    return all(torch.equal(got[name], value) for name, value in state_of(step).items())


@pytest.mark.parametrize("encoding", ["plain", "dedupe", "small"])
def test_what_is_sealed_comes_back_with_the_key_alone(tmp_path: Path, encoding: Any, monkeypatch: Any) -> None:
    where, key = sealed(tmp_path)
    train(where, 3, key=key, encoding=encoding)
    assert packs(where)
    for path in packs(where):
        assert PLAIN[:64] not in path.read_bytes()
    assert all(load_equals(where, step, key=key) for step in (1, 2, 3))
    with tenuto.open(where, key=key) as opened:
        assert torch.equal(opened["weights"][3:5], state_of(3)["weights"][3:5])
    with pytest.raises(KeyMissing, match="key"):
        tenuto.load(where, step=3)
    monkeypatch.setenv("TENUTO_KEY_FILE", str(key))
    assert load_equals(where, 3)
    assert_whole(Repo.open(open_store(where)))  # neither verify nor gc needs the key


def test_nobody_saves_there_without_the_key(tmp_path: Path) -> None:
    where, _ = sealed(tmp_path)
    with pytest.raises(KeyMissing, match="key"):
        tenuto.Checkpointer(where, state_of(0))
    with pytest.raises(KeyMissing, match="key"):
        tenuto.save(state_of(0), where)
    other = tmp_path / "other.key"
    other.write_bytes(bytes(range(32)))
    other.chmod(0o600)
    with pytest.raises(WrongKey):
        tenuto.Checkpointer(where, state_of(0), key=other)


def test_a_key_where_nothing_is_sealed_is_told(tmp_path: Path) -> None:
    key = tmp_path / "a.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    with pytest.raises(KeyMissing, match="has no keys"):
        tenuto.save(state_of(0), tmp_path / "ckpts", key=key)


def test_a_single_save_is_sealed_too(tmp_path: Path) -> None:
    where, key = sealed(tmp_path)
    tenuto.save(state_of(5), where, step=5, key=key)
    assert load_equals(where, 5, key=key)
    assert not list(where.glob("runs/main/*/step-00000005/*.safetensors"))


def redigested(path: Path, change: Any) -> None:
    """Changes a small object, and gives it the digest that it has to have: an attacker can compute that."""
    values = canonical_json.loads(path.read_bytes())
    del values["digest"]
    change(values)
    path.write_bytes(canonical_json.seal(values))


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["metrics"].update(loss=0.0),
        lambda values: values["progress"].update(epoch=7),
        lambda values: values["indexes"][0].pop("sha256"),
        lambda values: values.update(code="1:" + "0" * 64),
        lambda values: values["environment"].update(code="x"),
    ],
    ids=["a metric", "the progress", "a table's digest", "the code", "a code elsewhere"],
)
def test_a_manifest_that_somebody_changed_is_refused(tmp_path: Path, change: Any) -> None:
    where, key = sealed(tmp_path)
    train(where, 1, key=key)
    redigested(next(where.glob("runs/main/*/step-00000001/manifest.json")), change)
    with pytest.raises(Tampered):
        tenuto.load(where, step=1, key=key)
    with pytest.raises(Tampered), tenuto.open(where, step=1, key=key):
        pass


def test_a_manifest_whose_seal_was_taken_off_is_refused(tmp_path: Path) -> None:
    where, key = sealed(tmp_path)
    train(where, 1, key=key)

    def unsealed(values: Any) -> None:
        del values["code"]

    redigested(next(where.glob("runs/main/*/step-00000001/manifest.json")), unsealed)
    with pytest.raises(Tampered, match="is not sealed"):
        tenuto.load(where, step=1, key=key)


def test_a_data_file_of_another_checkpoint_under_the_right_name_is_refused(tmp_path: Path) -> None:
    where, key = sealed(tmp_path)
    train(where, 2, key=key)
    first, second = packs(where)
    assert first.stat().st_size == second.stat().st_size
    shutil.copy(first, second)
    with pytest.raises(CorruptionError):
        tenuto.load(where, step=2, key=key)
    assert load_equals(where, 1, key=key)


def test_a_whole_checkpoint_put_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    """Even with every path and digest of it made to fit."""
    where, key = sealed(tmp_path)
    train(where, 2, key=key)
    old, new = (next(where.glob(f"runs/main/*/step-0000000{step}")) for step in (1, 2))
    for name in ("rank-00000.pack", "rank-00000.index"):
        shutil.copy(old / name, new / name)
    before = canonical_json.loads((old / "manifest.json").read_bytes())

    def replayed(values: Any) -> None:
        step, path, progress = values["step"], values["path"], values["progress"]
        values.clear()
        values.update({name: value for name, value in before.items() if name != "digest"})
        values.update(step=step, path=path, progress=progress)

    redigested(new / "manifest.json", replayed)
    with pytest.raises(Tampered):
        tenuto.load(where, step=2, key=key)


def test_every_bit_of_a_sealed_checkpoint_counts(tmp_path: Path) -> None:
    """One bit in each of many places of each object, with the digests above it made to fit: none is read past."""
    where, key = sealed(tmp_path)
    tenuto.save({"x": torch.arange(3000.0)}, where, step=7, key=key)
    directory = next(where.glob("runs/main/*/step-00000007"))
    for path in (directory / "rank-00000.pack", directory / "rank-00000.index"):
        whole = path.read_bytes()
        for place in range(0, len(whole), 61):
            data = bytearray(whole)
            data[place] ^= 1 << place % 8
            path.write_bytes(data)
            with pytest.raises(TenutoError):
                tenuto.load(where, step=7, key=key)
        path.write_bytes(whole)
    assert torch.equal(tenuto.load(where, step=7, key=key).state["x"], torch.arange(3000.0))


def test_keys_rotate_and_old_checkpoints_stay_readable(tmp_path: Path) -> None:
    where, key = sealed(tmp_path)
    train(where, 2, key=key, encoding="small")
    command("key", "rotate", where, "--key-file", key, "--yes")
    train(where, 4, key=key, encoding="small")
    assert all(load_equals(where, step, key=key) for step in (1, 2, 3, 4))
    manifests = [canonical_json.loads(path.read_bytes()) for path in sorted(where.glob("runs/main/*/*/manifest.json"))]
    assert [values["code"].partition(":")[0] for values in manifests] == ["1", "1", "2", "2"]
    # What is sealed by the new key rests on nothing that the old one opens.
    assert not any(base["step"] < 3 for base in manifests[-1].get("bases", []))


def test_several_ranks_seal_what_each_of_them_holds(tmp_path: Path) -> None:
    where, key = sealed(tmp_path)
    whole = np.random.default_rng(0).random((2000, 32))

    def work(ranks: Any) -> bool:
        begin = 1000 * ranks.rank
        held = whole[begin : begin + 1000].copy()
        state = {"w": tenuto.shard(held, whole=whole.shape, offsets=(begin, 0))}
        with tenuto.Checkpointer(
            where, state, run="many", save=every(steps=1), keep=keep.all(), on_error="raise", ranks=ranks, key=key
        ) as ckpt:
            for _ in ckpt.steps(2):
                held += 1
        return True

    assert together(2, work) == [True, True]
    assert np.array_equal(tenuto.load(where, run="many", key=key).state["w"], whole + 1 + 1)
    with pytest.raises(KeyMissing):
        tenuto.load(where, run="many")


def test_a_key_is_in_no_object_of_the_repository(tmp_path: Path) -> None:
    where, key = sealed(tmp_path)
    train(where, 2, key=key, encoding="small")
    secret = key.read_bytes()
    for path in where.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert secret not in data
            assert secret.hex().encode() not in data


def test_what_is_brought_in_is_sealed_too_or_refused(tmp_path: Path, monkeypatch: Any) -> None:
    where, key = sealed(tmp_path)
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"x": torch.arange(300.0)}, file)
    with pytest.raises(SystemExit) as caught:
        main(["import", str(file), str(where), "--run", "brought", "--step", "3"])
    assert caught.value.code == KeyMissing.exit_code
    monkeypatch.setenv("TENUTO_KEY_FILE", str(key))
    command("import", file, where, "--run", "brought", "--step", "3")
    with tenuto.open(where, run="brought") as opened:
        (path,) = [leaf for leaf in opened if leaf.endswith("x")]
        assert torch.equal(torch.as_tensor(opened[path][:]), torch.arange(300.0))
    assert not list(where.glob("runs/brought/*/*/*.safetensors"))
    with pytest.raises(SystemExit) as caught:
        main(["import", "--in-place", str(file), str(where), "--run", "adopted", "--step", "3"])
    assert caught.value.code == UsageError.exit_code


def test_an_export_needs_the_key(tmp_path: Path, monkeypatch: Any) -> None:
    where, key = sealed(tmp_path)
    train(where, 1, key=key)
    out = tmp_path / "out.safetensors"
    with pytest.raises(SystemExit) as caught:
        main(["export", str(where), str(out)])
    assert caught.value.code == KeyMissing.exit_code
    assert not out.exists()
    monkeypatch.setenv("TENUTO_KEY_FILE", str(key))
    command("export", where, out)
    assert torch.equal(safetensors.torch.load_file(out)["weights"], state_of(1)["weights"])


def test_what_lies_in_memory_is_flushed_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, key = sealed(tmp_path)
    program = (
        "import os, torch, tenuto\n"
        "state, every = {'x': torch.zeros(1000)}, tenuto.every\n"
        f"ckpt = tenuto.Checkpointer({str(where)!r}, state, run='kept', key={str(key)!r},\n"
        "    save=every(steps=100), memory=every(steps=1))\n"
        "for step in ckpt.steps(5):\n"
        "    state['x'] += 1\n"
        "    if step == 3:\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    with pytest.raises(SystemExit) as caught:
        main(["flush", str(where), "--run", "kept"])
    assert caught.value.code == KeyMissing.exit_code
    monkeypatch.setenv("TENUTO_KEY_FILE", str(key))
    command("flush", where, "--run", "kept")
    monkeypatch.delenv("TENUTO_KEY_FILE")
    with pytest.raises(KeyMissing):
        tenuto.load(where, run="kept")
    flushed = tenuto.load(where, run="kept", key=key)
    assert torch.equal(flushed.state["x"], torch.full((1000,), float(flushed.step))) and flushed.step >= 1
    assert not list(where.glob("runs/kept/*/*/*.safetensors"))
    assert_whole(Repo.open(open_store(where)))


def test_what_lies_in_memory_of_a_sealed_run_is_resumed_from(tmp_path: Path) -> None:
    where, key = sealed(tmp_path)
    program = (
        "import os, torch, tenuto\n"
        "state, every = {'x': torch.zeros(1000)}, tenuto.every\n"
        f"ckpt = tenuto.Checkpointer({str(where)!r}, state, run='kept', key={str(key)!r},\n"
        "    save=every(steps=100), memory=every(steps=1))\n"
        "for step in ckpt.steps(5):\n"
        "    state['x'] += 1\n"
        "    if step == 3:\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    state = {"x": torch.zeros(1000)}
    with tenuto.Checkpointer(where, state, run="kept", key=key, memory=every(steps=1)) as ckpt:
        restored = ckpt.restore()
        assert restored.memory_s is not None
        ckpt.save()
    found = tenuto.load(where, run="kept", key=key)
    assert found.step == restored.step
    assert torch.equal(found.state["x"], torch.full((1000,), float(restored.step)))
