"""Indexes and manifests of the primary that are damaged or lost are made again, byte for byte, from a tier that stores
their checkpoints in another way."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto import Tier, Tiers, keep
from tenuto.cli import main
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(step: int, rank: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {
        "w": random.standard_normal(100_000).astype(np.float32) + np.float32(step),
        "b": random.standard_normal((30, 7)) * (rank + 1),
        "mask": np.arange(1001) % 3 == step % 3,
        "empty": np.zeros((0, 3)),
        "name": "a model",
    }


def save(tmp_path: Path, ranks: int = 1, **given: Any) -> None:
    """Saves two checkpoints into a plain primary and a small tier."""
    where = Tiers(Tier(tmp_path / "fast", keep=keep.all()), Tier(tmp_path / "slow", encoding="small", keep=keep.all()))

    def work(own: Any, step: int) -> None:
        state = state_of(step, own.rank)
        state["b"] = tenuto.per_rank(state["b"]) if ranks > 1 else state["b"]
        tenuto.save(state, where, step=step, ranks=own, run="main", **given)

    for step in (1, 2):
        if ranks == 1:
            work(tenuto.Solo(), step)
        else:
            assert not [one for one in together(ranks, lambda own, step=step: work(own, step)) if one is not None]


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def there(tmp_path: Path, file: str) -> Path:
    (found,) = (tmp_path / "fast").glob(f"runs/main/*/step-00000002/{file}")
    return found


def flipped(file: str, part: float = 0.4) -> Callable[[Path], None]:
    def damage(tmp_path: Path) -> None:
        data = bytearray(there(tmp_path, file).read_bytes())
        data[int(part * len(data))] ^= 4
        there(tmp_path, file).write_bytes(data)

    return damage


def cut(file: str) -> Callable[[Path], None]:
    def damage(tmp_path: Path) -> None:
        there(tmp_path, file).write_bytes(there(tmp_path, file).read_bytes()[:-70])

    return damage


def lost(file: str) -> Callable[[Path], None]:
    return lambda tmp_path: there(tmp_path, file).unlink()


def all_of(*each: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(tmp_path: Path) -> None:
        for one in each:
            one(tmp_path)

    return damage


INDEX, MANIFEST, PACK = "rank-00000.index", "manifest.json", "rank-00000.safetensors"
DAMAGES = {
    "index": flipped(INDEX),
    "index lost": lost(INDEX),
    "index cut": cut(INDEX),
    "manifest": flipped(MANIFEST),
    "manifest cut": cut(MANIFEST),
    "both": all_of(flipped(INDEX), flipped(MANIFEST)),
    "index lost, manifest": all_of(lost(INDEX), flipped(MANIFEST)),
    "index and pack": all_of(flipped(INDEX), flipped(PACK)),
    "all three": all_of(flipped(INDEX), flipped(MANIFEST), lost(PACK)),
}


def files(tmp_path: Path) -> dict[Path, bytes]:
    return {
        file: file.read_bytes()
        for file in (tmp_path / "fast").rglob("*")
        if file.is_file() and "notes" not in str(file)
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_what_a_plain_save_has_put_is_made_again_byte_for_byte(
    tmp_path: Path, damage: Callable[[Path], None], ranks: int
) -> None:
    save(tmp_path, ranks)
    before = files(tmp_path)
    damage(tmp_path)
    assert run("verify", tmp_path / "fast") == 12
    assert run("repair", tmp_path / "fast", "--yes") == 0
    assert files(tmp_path) == before
    assert run("verify", tmp_path / "fast") == 0
    assert_whole(Repo.open(open_store(tmp_path / "fast")))
    found = tenuto.load(tmp_path / "fast", step=2).state["w"]
    assert np.array_equal(found, state_of(2)["w"])


def test_where_the_last_bytes_of_a_manifest_and_an_index_are_gone_nothing_is_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path)
    all_of(cut(MANIFEST), flipped(INDEX))(tmp_path)
    damaged = files(tmp_path)
    capsys.readouterr()
    assert run("repair", tmp_path / "fast", "--yes") == 12
    assert there(tmp_path, MANIFEST).read_bytes() == damaged[there(tmp_path, MANIFEST)]
    assert_brought(tmp_path, capsys)


@pytest.mark.parametrize("encoding", ["dedupe", "small"])
def test_of_a_save_with_an_encoding_the_manifest_is_made_again_and_for_an_index_a_command_is_named(
    tmp_path: Path, encoding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, encoding=encoding)
    before = files(tmp_path)
    flipped(MANIFEST)(tmp_path)
    assert run("repair", tmp_path / "fast", "--yes") == 0
    assert files(tmp_path) == before
    flipped(INDEX)(tmp_path)
    capsys.readouterr()
    assert run("repair", tmp_path / "fast", "--yes") == 12
    assert_brought(tmp_path, capsys)


def assert_brought(tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str = "again") -> None:
    """Asserts that a command was named which brings the checkpoint from the tier, and that it does."""
    named = re.search(
        r"more: tenuto (cp .*slow .*) --to-run NEWRUN brings all of main/a0001/2", capsys.readouterr().err
    )
    assert named
    assert run(*shlex.split(named[1]), "--to-run", to) == 0
    found = tenuto.load(tmp_path / "fast", run=to)
    assert found.step == 2 and np.array_equal(found.state["w"], state_of(2)["w"])


def test_a_manifest_of_a_sealed_repository_is_made_again_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tenuto.save({"x": 1}, Tiers(Tier(tmp_path / "fast"), Tier(tmp_path / "slow")), run="other")
    assert run("key", "add", tmp_path / "fast", "--key-file", tmp_path / "key") == 0
    save(tmp_path, key=str(tmp_path / "key"))
    before = files(tmp_path)
    flipped(MANIFEST)(tmp_path)
    assert run("repair", tmp_path / "fast", "--yes") == 12, "nobody else can sign it"
    monkeypatch.setenv("TENUTO_KEY_FILE", str(tmp_path / "key"))
    assert run("repair", tmp_path / "fast", "--yes") == 0
    assert files(tmp_path) == before
    for file, new in (("rank-00000.pack", "again"), (INDEX, "once-more")):
        flipped(file)(tmp_path)
        capsys.readouterr()
        assert run("repair", tmp_path / "fast", "--yes") == 12
        assert_brought(tmp_path, capsys, new)
