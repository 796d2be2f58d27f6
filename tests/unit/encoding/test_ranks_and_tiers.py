"""What ranks restore together where a checkpoint is damaged in the primary, and a tier has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from support.said import said
from tenuto import Tier, Tiers, every, keep, on
from tenuto.cli import main
from tenuto.errors import CorruptionError, NothingRestorable
from tenuto.events import CandidateSkipped
from tenuto.model import canonical_json

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 40_000


def part(rank: int, step: int) -> dict[str, Any]:
    mine = np.full((ROWS, 1), step + rank / 2, np.float32)
    return {"w": tenuto.shard(mine, whole=(2 * ROWS, 1), offsets=(ROWS * rank, 0)), "n": np.full(3, step)}


def tiers(tmp_path: Path) -> Tiers:
    return Tiers(Tier(tmp_path / "fast"), Tier(tmp_path / "slow", keep=keep.all()))


def save(tmp_path: Path, *steps: int, **given: Any) -> None:
    def work(ranks: Any, step: int) -> None:
        tenuto.save(part(ranks.rank, step), tiers(tmp_path), step=step, ranks=ranks, run="main", **given)

    for step in steps:
        assert not [one for one in together(2, lambda ranks, step=step: work(ranks, step)) if one is not None]


def load(tmp_path: Path, ranks: Any, step: int | str = "latest", **given: Any) -> int | str:
    """Returns the step that was loaded, every bit of it; or why none was."""
    own = part(ranks.rank, 0)
    try:
        found = tenuto.load(tmp_path / "fast", own, step=step, ranks=ranks, run="main", **given).step
    except (CorruptionError, NothingRestorable) as error:
        return error.message
    wanted = part(ranks.rank, found)
    assert np.array_equal(own["w"].value, wanted["w"].value) and np.array_equal(own["n"], wanted["n"])
    return found


def newest(where: Path, file: str) -> Path:
    (found,) = where.glob(f"runs/main/*/step-00000002/{file}")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in (len(data) // 5, len(data) // 2, len(data) - 100):
        data[at] ^= 1
    path.write_bytes(data)


def sealed(tmp_path: Path) -> str:
    tenuto.save({"x": 1}, tiers(tmp_path), run="other")
    with pytest.raises(SystemExit) as ended:
        main(["key", "add", str(tmp_path / "fast"), "--key-file", str(tmp_path / "key")])
    assert not ended.value.code
    return str(tmp_path / "key")


@pytest.mark.parametrize("step", [2, "latest"])
def test_ranks_load_what_is_damaged_from_the_tier(tmp_path: Path, step: int | str) -> None:
    save(tmp_path, 1, 2)
    flip(newest(tmp_path / "fast", "rank-00001.safetensors"))
    with said("is damaged: read from .*slow"):
        assert together(2, lambda ranks: load(tmp_path, ranks, step)) == [2, 2]


class Told(list[int]):
    """The steps that a rank was told are passed over."""

    def emit(self, event: object) -> None:
        if isinstance(event, CandidateSkipped):
            self.append(event.id.step)


def test_what_is_passed_over_is_told_on_each_rank_once_and_what_a_tier_gives_is_not(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip(newest(tmp_path / "fast", "rank-00001.safetensors"))
    for gone, loaded, passed in (("", [2, 2], []), ("slow 2", [1, 1], [2]), ("slow 1, fast 1", None, [2, 1])):
        for where, step in (one.split() for one in gone.split(", ") if one):
            for file in (tmp_path / where).glob(f"runs/main/*/step-0000000{step}/rank-00001*.*"):
                if file.suffix in (".pack", ".safetensors"):
                    flip(file)
        told = [Told(), Told()]
        found = together(2, lambda ranks, told=told: load(tmp_path, ranks, sinks=[told[ranks.rank]]))
        assert loaded is None or found == loaded, found
        assert told == [passed, passed]


def rewritten(manifest: Path) -> None:
    found = canonical_json.open_seal(manifest.read_bytes(), name=manifest.name)
    del found["digest"]
    found["metrics"] = {"loss": 7.0}
    manifest.write_bytes(canonical_json.seal(found))


def test_a_manifest_that_was_forged_is_refused_by_all_ranks(tmp_path: Path) -> None:
    """One of a sealed repository, by somebody without its key."""
    key = sealed(tmp_path)
    save(tmp_path, 1, 2, key=key)
    rewritten(newest(tmp_path / "fast", "manifest.json"))
    assert together(2, lambda ranks: load(tmp_path, ranks, key=key)) == [1, 1]
    refused = together(2, lambda ranks: load(tmp_path, ranks, 2, key=key))
    assert all("is not what a holder of the repository's key has put there" in str(one) for one in refused), refused


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_peeked_at_is_what_is_restored(tmp_path: Path, ranks: int) -> None:
    def work(own: Any, steps: int, *, peek: bool) -> list[int]:
        state, seen = part(own.rank, 0), list[int]()
        if ranks == 1:
            state["w"] = state["w"].value
        with tenuto.Checkpointer(tiers(tmp_path), state, save=every(steps=1) | on.end(), ranks=own) as ckpt:
            if peek:
                opened = ckpt.peek()
                assert opened is not None
                seen = [opened.step, int(opened["n"][...][0])]
            ckpt.restore()
            seen.append(ckpt.step)
            for step in ckpt.steps(steps):
                state["n"][...] = step + 1
                ckpt.wait()
        return seen

    def run(steps: int, *, peek: bool) -> list[Any]:
        if ranks == 1:
            return [work(tenuto.Solo(), steps, peek=peek)]
        return together(2, lambda own: work(own, steps, peek=peek))

    run(2, peek=False)
    for pack in (tmp_path / "fast").glob("runs/main/a0001/step-00000002/*.safetensors"):
        flip(pack)
    assert run(3, peek=True) == [[2, 2, 2]] * ranks
