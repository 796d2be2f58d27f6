"""Tiers with an encoding of their own: the same checkpoints, stored smaller, each of them restored from there alone."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tenuto
from support.broken_places import damage
from support.filled_tiers import until_filled
from support.moto import moto, s3  # noqa: F401 - fixtures
from support.rank_threads import together
from support.said import said
from tenuto import Encoding, Mirror, PerNode, Tier, Tiers, every, keep, on
from tenuto.cli import main
from tenuto.engine.save import transcoder
from tenuto.errors import CorruptionError, FormatTooNew, KeyMissing, StoreFull, UsageError
from tenuto.maintenance.encoded_copy import EncodedCopy
from tenuto.maintenance.status import status
from tenuto.maintenance.verify import assert_whole
from tenuto.policy.encoding import PRESETS
from tenuto.repo.encoded_places import encoding_of_place, is_encoded_in
from tenuto.repo.format.index import encode_index
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store
from tenuto.testing.object_store import Bucket, SimulatedObjectStore

pytestmark = pytest.mark.filterwarnings("ignore")
LEAF = 80_000
"""A chunk and a quarter of float32."""
STEPS = 6
ENCODINGS: Sequence[Any] = ["dedupe", "auto", "small", Encoding(codec="lz4", delta=2), Encoding(dedupe=False)]


def state_of(step: int) -> dict[str, Any]:
    """A frozen leaf, one that changes always, counts, none, and an odd one."""
    random = np.random.default_rng(1)
    return {
        "frozen": random.standard_normal(LEAF).astype(np.float32),
        "w": random.standard_normal(LEAF).astype(np.float32) * np.float32(1 + step / 1000),
        "count": np.full(700, step, np.int64),
        "empty": np.zeros((0, 3)),
        "mask": np.arange(LEAF) % 3 == step % 3,
    }


def train(where: Any, steps: int = STEPS, *, each: bool = True, **given: Any) -> None:
    """Trains to a step. `each`: waits until each checkpoint is in every tier, so that none is skipped."""
    state = state_of(0)
    arguments = {"save": every(steps=1), "keep": keep.latest(2), "on_error": "raise", **given}
    with tenuto.Checkpointer(where, state, **arguments) as ckpt:
        for step in ckpt.steps(steps):
            for name, value in state_of(step).items():
                assert np.array_equal(state[name], value), f"{name} at step {step}"
            for name, value in state_of(step + 1).items():
                state[name][...] = value
            if each and step:
                ckpt.wait()
                until_filled(where, step)


def restored(where: Any, step: int | str = "latest", **given: Any) -> int:
    """Asserts that a place has this step, every bit of it; returns its number."""
    found = tenuto.load(where, step=step, **given)
    for name, value in state_of(found.step).items():
        assert np.array_equal(found.state[name], value), f"{name} of step {found.step}"
    return found.step


def steps_in(where: Any) -> list[int]:
    return [id.step for id in Repo.open(open_store(where)).checkpoints()]


def stored(where: Path) -> int:
    return sum(path.stat().st_size for name in ("*.pack", "*.safetensors") for path in where.rglob(name))


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return tmp_path / "slow"


# -- filling and restoring ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_each_checkpoint_is_restored_from_the_encoded_tier_alone_and_training_resumes_from_it(
    fast: Path, slow: Path, encoding: Any
) -> None:
    def tiers() -> Tiers:
        return Tiers(Tier(fast), Tier(slow, encoding=encoding, keep=keep.all()))

    train(tiers())
    ours, theirs = (Repo.open(open_store(place)) for place in (fast, slow))
    for id in ours.checkpoints():
        assert ours.manifest(id).content == theirs.manifest(id).content, "the same checkpoint"
        assert ours.manifest(id).save_id == theirs.manifest(id).save_id
        assert is_encoded_in(Repo.open(open_store(fast)), open_store(slow), id)
    assert encoding_of_place(theirs.manifest(theirs.checkpoints()[-1])) is not None
    assert not list(fast.rglob("*.pack")), "saves are as they were"
    assert_whole(theirs)
    shutil.rmtree(fast)
    assert [restored(slow, step) for step in steps_in(slow)] == list(range(1, STEPS + 1))
    train(tiers(), STEPS + 2)
    assert restored(fast) == restored(slow) == STEPS + 2
    assert restored(fast, STEPS + 1) == STEPS + 1
    for place in (fast, slow):
        assert_whole(Repo.open(open_store(place)))


def test_small_takes_a_fraction_of_plain(fast: Path, slow: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    train(Tiers(Tier(fast), Tier(slow, encoding="small", keep=keep.all()), Tier(plain, keep=keep.all())))
    assert steps_in(slow) == steps_in(plain)
    assert stored(slow) < stored(plain) / 2
    assert stored(plain) == pytest.approx(stored(fast) / 2 * STEPS, rel=0.01)


def test_a_save_by_itself_is_encoded_too(fast: Path, slow: Path) -> None:
    tenuto.save(state_of(1), Tiers(Tier(fast), Tier(slow, encoding="auto")), step=1)
    shutil.rmtree(fast)
    assert restored(slow) == 1
    assert list(slow.rglob("*.pack")) and not list(slow.rglob("*.safetensors"))


@pytest.mark.parametrize("saved", ["dedupe", "small"])
def test_what_was_saved_encoded_gets_the_tiers_encoding(fast: Path, slow: Path, saved: str) -> None:
    def tiers() -> Tiers:
        return Tiers(Tier(fast), Tier(slow, encoding="small", keep=keep.all()))

    train(tiers(), encoding=saved)
    assert len({path.name for path in (*fast.rglob("*.pack"), *slow.rglob("*.pack"))}) > STEPS, "names of their own"
    shutil.rmtree(fast)
    assert [restored(slow, step) for step in steps_in(slow)] == list(range(1, STEPS + 1))
    train(tiers(), STEPS + 2, encoding=saved)
    shutil.rmtree(slow)
    assert restored(fast) == STEPS + 2
    assert_whole(Repo.open(open_store(fast)))


def test_a_tier_gets_an_encoding_and_loses_it_again(fast: Path, slow: Path) -> None:
    for steps, encoding in ((2, None), (4, "small"), (6, "plain"), (8, "dedupe")):
        train(Tiers(Tier(fast), Tier(slow, encoding=encoding, keep=keep.all())), steps)
    shutil.rmtree(fast)
    assert [restored(slow, step) for step in steps_in(slow)] == list(range(1, 9))
    assert_whole(Repo.open(open_store(slow)))


def test_a_disk_and_two_tiers_each_in_another_way(fast: Path, slow: Path, tmp_path: Path) -> None:
    node, third = tmp_path / "node", tmp_path / "third"

    def tiers() -> Tiers:
        return Tiers(
            Tier(node, per_node=True), Tier(fast), Tier(slow, encoding="dedupe"), Tier(third, encoding="small")
        )

    train(tiers())
    assert restored(slow) == restored(third) == STEPS
    for place in (node, fast, slow):
        shutil.rmtree(place)
    train(tiers(), STEPS + 1)
    assert restored(slow) == restored(third) == restored(fast) == STEPS + 1


def test_a_tier_frees_what_its_retention_drops_once_nothing_rests_on_it(fast: Path, slow: Path) -> None:
    encoding = Encoding(codec="zstd", delta=2)
    for steps in (9, 10):  # the second one looks into the trash as it begins
        train(Tiers(Tier(fast), Tier(slow, encoding=encoding, keep=keep.latest(1))), steps)
    repo = Repo.open(open_store(slow))
    (id,) = repo.checkpoints()
    assert id.step == 10
    needed = {base.step for base in repo.manifest(id).bases}
    there = {int(path.parent.name[5:]) for path in slow.rglob("*.pack")}
    assert needed <= there and len(there) <= len(needed) + 5, (needed, there)
    assert 2 not in there
    assert restored(slow) == 10


def test_ranks_save_to_it_and_load_from_it(fast: Path, slow: Path) -> None:
    def part(ranks: Any) -> dict[str, Any]:
        whole = np.arange(LEAF, dtype=np.float32).reshape(2, -1)
        mine = whole[ranks.rank : ranks.rank + 1].copy()
        return {"w": tenuto.shard(mine, whole=whole.shape, offsets=(ranks.rank, 0)), "n": np.zeros(3)}

    def tiers() -> Tiers:
        return Tiers(Tier(fast), Tier(slow, encoding="small", keep=keep.all()))

    def work(ranks: Any, steps: int) -> None:
        state = part(ranks)
        with tenuto.Checkpointer(tiers(), state, save=on.end(), ranks=ranks) as ckpt:
            for _ in ckpt.steps(steps):
                state["w"].value[...] += 1

    def load(ranks: Any, step: int | str) -> Any:
        own = part(ranks)
        found = tenuto.load(slow, own, step=step, ranks=ranks)
        return found.step, set((own["w"].value - part(ranks)["w"].value).ravel().tolist())

    for steps in (2, 4):
        assert not [one for one in together(2, lambda ranks, n=steps: work(ranks, n)) if one is not None]
    shutil.rmtree(fast)
    assert together(2, lambda ranks: load(ranks, 2)) == [(2, {2.0})] * 2
    assert together(2, lambda ranks: load(ranks, "latest")) == [(4, {4.0})] * 2
    assert not [one for one in together(2, lambda ranks: work(ranks, 5)) if one is not None]
    assert_whole(Repo.open(open_store(slow)))
    whole = tenuto.load(slow).state["w"]
    assert np.array_equal(whole, np.arange(LEAF, dtype=np.float32).reshape(2, -1) + 5)


def test_a_sealed_repository_is_encoded_before_it_is_sealed(
    fast: Path, slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tenuto.save({"x": 1}, Tiers(Tier(fast), Tier(slow)), run="other")
    key = str(tmp_path / "tenuto.key")
    with pytest.raises(SystemExit) as ended:
        main(["key", "add", str(fast), "--key-file", key])
    assert not ended.value.code

    def tiers() -> Tiers:
        return Tiers(Tier(fast), Tier(slow, encoding="small", keep=keep.all()))

    train(tiers(), key=key)
    assert stored(slow) < stored(fast) / 2 * STEPS / 2, "what is sealed was made smaller before"
    frozen = state_of(0)["frozen"].tobytes()[:64]
    assert not [path for path in slow.rglob("*.pack") if frozen in path.read_bytes()]
    shutil.rmtree(fast)
    with pytest.raises(KeyMissing):
        restored(slow, 3)
    assert [restored(slow, step, run="main", key=key) for step in range(1, STEPS + 1)] == list(range(1, STEPS + 1))
    train(tiers(), STEPS + 2, key=key)
    assert restored(fast, run="main", key=key) == STEPS + 2


# -- where it lies -----------------------------------------------------------------------------------------------------


def test_an_object_store_holds_it_and_training_resumes_from_there(fast: Path) -> None:
    bucket = Bucket()

    def tiers() -> Tiers:
        store = SimulatedObjectStore(bucket)
        return Tiers(Tier(fast), Tier(store, encoding="small", keep=keep.latest(3), bandwidth="500MB/s"))

    train(tiers())
    shutil.rmtree(fast)
    train(tiers(), STEPS + 1)
    assert restored(SimulatedObjectStore(bucket)) == STEPS + 1


def test_s3_holds_it_and_training_resumes_from_there(s3: str, fast: Path) -> None:  # noqa: F811
    where = f"{s3}/team/ckpts"

    def tiers() -> Tiers:
        return Tiers(Tier(fast), Tier(where, encoding="small", keep=keep.all()))

    train(tiers(), 3)
    shutil.rmtree(fast)
    assert [restored(where, step) for step in (1, 2, 3)] == [1, 2, 3]
    train(tiers(), 4)
    assert restored(where) == 4


# -- cut off, full, damaged --------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
sys.path[:0] = {paths!r}
import tenuto
from tenuto.crashpoints import armed
from encoding.test_encoded_tiers import Tier, Tiers, keep, train

with armed({point!r}, lambda: os.kill(os.getpid(), signal.SIGKILL) if {after} else None):
    train(Tiers(Tier({fast!r}), Tier({slow!r}, encoding="small", keep=keep.all())), {steps}, each=False)
"""


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "point",
    [
        "place has the tables of a checkpoint, not its data files",
        "packs copied, checkpoint not looked for again",
        "place has the data files of a checkpoint, not its manifest",
        "place has a checkpoint",
    ],
)
def test_a_process_killed_while_it_encodes_leaves_nothing_half_and_the_next_one_fills_it(
    fast: Path, slow: Path, point: str, first: int
) -> None:
    def tiers() -> Tiers:
        return Tiers(Tier(fast), Tier(slow, encoding="small", keep=keep.all()))

    if first:
        train(tiers(), first)
    script = SCRIPT.format(
        paths=[str(Path(__file__).parents[2]), str(Path(__file__).parents[1])],
        point=point,
        after=True,
        fast=str(fast),
        slow=str(slow),
        steps=first + 2,
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(steps_in(slow)) == first + (point == "place has a checkpoint"), "nothing half is a checkpoint"
    assert_whole(Repo.open(open_store(slow)))
    train(tiers(), first + 3)
    assert steps_in(slow)[-1] == first + 3
    assert [restored(slow, step) for step in steps_in(slow)] == steps_in(slow)
    left = [path for path in slow.glob("runs/main/*/step-*") if not (path / "manifest.json").exists()]
    assert not left, "nothing half is left"
    assert_whole(Repo.open(open_store(slow)))


def test_a_full_tier_is_filled_when_there_is_room_again(
    fast: Path, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StoreFull("no space left")

    with monkeypatch.context() as patched, said("cannot be filled"):
        patched.setattr(EncodedCopy, "_put_segment", full)
        train(Tiers(Tier(fast), Tier(slow, encoding="small")), 2, each=False)
    assert steps_in(slow) == []
    train(Tiers(Tier(fast), Tier(slow, encoding="small")), 3)
    assert restored(slow) == 3


def test_what_does_not_come_back_from_its_codec_is_not_put(
    fast: Path, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = transcoder.encoded

    def faulty(raw: memoryview, tried: Any, base: Any = None) -> tuple[str, Any]:
        name, data = made(raw, tried, base)
        return (name, data) if name == "raw" else made(memoryview(bytes(len(raw))), tried, base)

    with monkeypatch.context() as patched, said("does not come back"):
        patched.setattr(transcoder, "encoded", faulty)
        train(Tiers(Tier(fast), Tier(slow, encoding="auto")), 2, each=False)
    assert steps_in(slow) == []


def test_a_damaged_source_is_not_encoded(fast: Path, slow: Path) -> None:
    train(Tiers(Tier(fast)), 2, each=False)
    for path in fast.rglob("*.safetensors"):
        damage(path)
    repo = Repo.open(open_store(fast))
    with pytest.raises(CorruptionError):
        Tiers(Tier(fast), Tier(slow))
        there = Repo.create_or_open(Tiers(Tier(fast), Tier(slow)))
        EncodedCopy(there, there.store.declared_followers[0], PRESETS["small"]).bring(repo.checkpoints()[-1])
    assert not list(slow.rglob("manifest.json"))


def test_a_checkpoint_that_is_damaged_in_the_primary_is_restored_from_the_tier(fast: Path, slow: Path) -> None:
    def tiers() -> Tiers:
        return Tiers(Tier(fast), Tier(slow, encoding="small"))

    train(tiers())
    flip(max(fast.rglob("*.safetensors")), 0.5)
    with said("is damaged in .*fast: restored from .*slow"):
        assert restored(fast) == STEPS
    with said("is damaged in .*fast: restored from .*slow"):
        train(tiers(), STEPS + 1, encoding="dedupe")
    assert restored(fast) == STEPS + 1, "no save names what is damaged"
    Repo.open(open_store(fast))


def flip(path: Path, *where: float) -> None:
    """Changes a bit at each of these parts of a file."""
    data = bytearray(path.read_bytes())
    for part in where:
        data[int(part * len(data))] ^= 1
    path.write_bytes(data)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_repair_takes_from_the_tier_and_mends_it(
    fast: Path, slow: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(Tiers(Tier(fast), Tier(slow, encoding="small")))
    for path in fast.rglob("*.safetensors"):
        flip(path, 0.0001, 0.5, 0.9999)
    assert run("verify", str(fast)) == 12
    assert run("repair", str(fast), "--yes") == 0
    assert "slow, decoded" in capsys.readouterr().out
    assert run("verify", str(fast)) == 0
    before = stored(slow)
    for id in Repo.open(open_store(slow)).checkpoints()[-2:]:
        damage(next((slow / id.directory).glob("*.pack")))
    assert run("verify", str(slow)) == 12
    assert run("repair", str(fast), "--yes") == 0
    assert run("verify", str(slow)) == 0
    assert restored(slow) == STEPS and stored(slow) >= before


def test_commands_leave_what_is_stored_in_another_way_alone(
    fast: Path, slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(Tiers(Tier(fast), Tier(slow, encoding="small")))
    before = {path: path.read_bytes() for path in slow.rglob("*") if path.is_file()}
    for words in (["verify"], ["repair", "--yes"], ["replicate"], ["gc"], ["status"], ["scrub"]):
        assert run(words[0], str(fast), *words[1:]) == 0, words
        assert {path: path.read_bytes() for path in slow.rglob("*") if path.is_file()} == before, words
    out = capsys.readouterr().out
    assert "lacks" not in out
    run("show", str(slow))
    assert "for this tier" in capsys.readouterr().out


def test_status_says_what_is_whole_and_what_it_takes_there(
    fast: Path, slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(Tiers(Tier(fast), Tier(slow, encoding="small")))
    found = status(Repo.open(open_store(fast)))
    spread = found.runs[0].spread[0]
    assert spread.places == ("whole", "whole") and found.runs[0].behind == (0, 0)
    assert spread.stored[0] == 0 and 0 < spread.stored[1] < spread.bytes / 2
    run("status", str(fast))
    assert "whole, " in capsys.readouterr().out
    next((slow / spread.id.directory).glob("*.pack")).unlink()
    assert status(Repo.open(open_store(fast))).runs[0].spread[0].places == ("whole", "part")
    assert run("replicate", str(fast)) == 0
    assert status(Repo.open(open_store(fast))).runs[0].spread[0].places == ("whole", "whole")
    assert restored(slow) == STEPS


def test_replicate_encodes_what_the_tier_has_missed(fast: Path, slow: Path) -> None:
    train(Tiers(Tier(fast), Tier(slow, encoding="small")), 2)
    train(Tiers(Tier(fast)), 3, each=False)
    assert run("replicate", str(fast)) == 0
    assert steps_in(slow)[-1] == 3 and not list(slow.rglob("*.safetensors"))
    assert restored(slow) == 3


def test_a_codec_that_this_version_does_not_know_is_refused_in_the_tier(fast: Path, slow: Path) -> None:
    train(Tiers(Tier(fast), Tier(slow, encoding="auto")), 2)
    repo = Repo.open(open_store(slow))
    id = repo.checkpoints()[-1]
    name = "zstd" if any(b'"zstd"' in path.read_bytes() for path in slow.rglob("*.index")) else "constant"
    index = repo.index(repo.manifest(id))
    assert index.stored is not None and name in index.stored.codecs
    changed = index.stored.__class__(
        tuple("zstd9" if one == name else one for one in index.stored.codecs),
        *(getattr(index.stored, column) for column in ("pack", "offset", "stored", "raw", "codec", "base", "digests")),
    )
    index = index.__class__(**{**{n: getattr(index, n) for n in index.__dataclass_fields__}, "stored": changed})
    data = encode_index(index, id, repo.id)
    with pytest.raises((FormatTooNew, CorruptionError)):
        from tenuto.repo.format.index import decode_index

        found = decode_index(data, id=id, rank=0, tree=repo.manifest(id).tree, repository=repo.id)
        from tenuto.codec.chunk_map import ChunkMap
        from tenuto.engine.read.encoded_chunks import ChunkDecoder

        ChunkDecoder(repo, id, ChunkMap.of(found), found.packs, str)


# -- any state ---------------------------------------------------------------------------------------------------------

DTYPES = ["float32", "float64", "float16", "int64", "int8", "bool", "complex64", "S3"]
leaves = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 5000), st.integers(0, 2**32 - 1)), max_size=5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), leaves=leaves, delta=st.sampled_from([0, 1, 3]), codec=st.sampled_from(["zstd", "lz4", None]))
def test_any_state_and_any_range_of_it_comes_back(
    tmp_path_factory: pytest.TempPathFactory, data: Any, leaves: Any, delta: int, codec: str | None
) -> None:
    root = tmp_path_factory.mktemp("any")
    encoding = Encoding(codec=codec, delta=delta if codec else 0)
    repo = Repo.create_or_open(open_store(root / "fast"), chunk_bytes=4096)
    tiers = Tiers(Tier(root / "fast"), Tier(root / "slow", encoding=encoding))
    state = {
        f"leaf{number}": np.random.default_rng(seed).integers(0, 250, max(count, 0)).astype("int64").astype(dtype)
        for number, (dtype, count, seed) in enumerate(leaves)
    }
    history = []
    for step in (1, 2, 3):
        for leaf in state.values():
            if len(leaf) and data.draw(st.booleans()):
                at = data.draw(st.integers(0, len(leaf) - 1))
                leaf[at:] = np.roll(leaf[at:], 1)
        tenuto.save(state, tiers, step=step)
        history.append({name: leaf.copy() for name, leaf in state.items()})
    assert repo.chunk_bytes == 4096
    for step, saved in zip((1, 2, 3), history, strict=True):
        with tenuto.open(root / "slow", step=step) as opened:
            for name, leaf in saved.items():
                begin = data.draw(st.integers(0, len(leaf)))
                end = data.draw(st.integers(begin, len(leaf)))
                assert np.array_equal(opened[name][begin:end], leaf[begin:end])
    assert_whole(Repo.open(open_store(root / "slow")))
    shutil.rmtree(root)


# -- what makes no sense -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tiers(Tier("a", encoding="small"), Tier("b")),
        lambda: Tiers(Tier("a"), Tier("b", wait=True, encoding="small")),
        lambda: Tiers(Tier("a", per_node=True), Tier("b", encoding="small")),
    ],
)
def test_a_tier_that_saves_write_to_has_no_encoding_of_its_own(make: Any) -> None:
    with pytest.raises(UsageError, match="cannot have an encoding of its own") as refused:
        make()
    assert "Checkpointer(encoding=)" in str(refused.value.hint)


def test_an_unknown_encoding_is_refused_and_plain_is_none() -> None:
    with pytest.raises(UsageError, match="is not an encoding"):
        Tier("a", encoding="compress")
    assert Tier("a", encoding="plain").encoding is None
    assert PerNode("n", home="h").tiers[1].tier.encoding is None
    assert Mirror("a", "b").tiers[0].tier.encoding is None
