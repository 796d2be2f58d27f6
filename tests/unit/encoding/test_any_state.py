"""States that encoded saves may meet: that change their structure, are empty or many, with chunks of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.changing_state import State, all_come_back, bits, noise, train
from tenuto import Encoding
from tenuto.engine.save import baseline
from tenuto.engine.save.encoder import Rates, StateEncoder
from tenuto.errors import CorruptionError
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

MIB = 1 << 20
PAIR = ["dedupe", "small"]


def nothing(step: int) -> None:
    pass


@pytest.mark.parametrize("encoding", PAIR)
@pytest.mark.parametrize("state", [{}, {"a": np.zeros((0, 3)), "b": np.zeros(0, np.uint8)}, {"n": 3}], ids=str)
def test_a_state_without_bytes(tmp_path: Path, encoding: Any, state: State) -> None:
    all_come_back(tmp_path, train(tmp_path, state, 3, nothing, encoding=encoding))
    with tenuto.open(tmp_path, step=2) as opened:
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                assert opened[name][...].shape == value.shape


@pytest.mark.parametrize("encoding", PAIR)
def test_a_leaf_that_grows_and_shrinks(tmp_path: Path, encoding: Any) -> None:
    state: State = {"grows": noise(0, 10), "rest": noise(1, 100_000)}

    def change(step: int) -> None:
        state["grows"] = noise(2, 40_000 * (step + 1 if step < 3 else 6 - step))
        state["rest"][step] = step

    all_come_back(tmp_path, train(tmp_path, state, 6, change, encoding=encoding))


def test_a_structure_that_comes_and_goes(tmp_path: Path) -> None:
    """What a difference is made to is the checkpoint before, whatever was saved in the same memory earlier."""
    state: State = {"stays": noise(0, 200_000)}

    def change(step: int) -> None:
        state["stays"] *= np.float32(1.0001)
        state.pop("comes", None)
        if step % 2:
            state["comes"] = noise(step, 70_000)

    all_come_back(tmp_path, train(tmp_path, state, 8, change, encoding="small"))


def test_two_leaves_that_change_places(tmp_path: Path) -> None:
    """The images are equally long, and a leaf lies where the other one was."""
    state: State = {"a": noise(0, 100_000), "b": noise(1, 100_000)}

    def change(step: int) -> None:
        turned = [(name, value * np.float32(1.0001)) for name, value in reversed(state.items())]
        state.clear()
        state.update(turned)

    all_come_back(tmp_path, train(tmp_path, state, 6, change, encoding="small"))


def test_differences_where_compressing_stops_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that is not compressed leaves no image behind: the next one must not make differences to an older one."""
    worth = [True]
    monkeypatch.setattr(Rates, "worth", property(lambda rates: worth[0]))
    state: State = {"w": noise(0, 300_000)}

    with tenuto.Checkpointer(
        tmp_path, state, save=tenuto.every(steps=1), keep=tenuto.keep.all(), encoding=Encoding(auto=True, delta=8)
    ) as ckpt:
        seen = {}
        for step in ckpt.steps(7):
            ckpt.wait()
            worth[0] = step not in (2, 5)
            state["w"] *= np.float32(1.0001)
            seen[step + 1] = bits(state)
    all_come_back(tmp_path, seen)
    assert [deltas(tmp_path, step) for step in range(1, 8)] == [False, True, False, False, True, False, False]


def deltas(where: Path, step: int) -> bool:
    """Returns whether a checkpoint has differences of its own."""
    index = index_of(where, step)
    assert index.stored is not None
    own = [pack.at is None for pack in index.packs]
    return any(base >= 0 and own[pack] for base, pack in zip(index.stored.base, index.stored.pack, strict=True))


def index_of(where: Path, step: int, attempt: int = 1) -> Any:
    repo = Repo.open(open_store(where))
    return repo.index(repo.manifest(CheckpointId("main", attempt, step)))


@pytest.mark.parametrize("encoding", PAIR)
@pytest.mark.parametrize("chunk_bytes", [1, 7, 4096, 32 * MIB, 1 << 30])
def test_chunks_of_any_length(tmp_path: Path, encoding: Any, chunk_bytes: int) -> None:
    """Chunks of more than 16 MiB are never compressed: nothing bounds the memory that decoding one would take."""
    Repo.create_or_open(open_store(tmp_path), chunk_bytes=chunk_bytes)
    state: State = {"w": noise(0, 5 * MIB if chunk_bytes == 32 * MIB else 500)}

    def change(step: int) -> None:
        state["w"][:100] += 1

    all_come_back(tmp_path, train(tmp_path, state, 3, change, encoding=encoding))


def test_a_small_state_in_a_repository_of_long_chunks_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    buffer = StateEncoder.buffer
    monkeypatch.setattr(StateEncoder, "buffer", lambda self, nbytes: taken.append(nbytes) or buffer(self, nbytes))
    Repo.create_or_open(open_store(tmp_path), chunk_bytes=1 << 30)
    all_come_back(tmp_path, train(tmp_path, {"w": noise(0, 1000)}, 3, nothing, encoding="dedupe"))
    assert taken and max(taken) < MIB


def test_chunks_that_pass_through_a_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Repo.create_or_open(open_store(tmp_path), chunk_bytes=2 * MIB)
    state: State = {"w": noise(0, 5 * MIB)}

    def change(step: int) -> None:
        state["w"][:100] += 1

    all_come_back(tmp_path, train(tmp_path, state, 3, change, encoding="small", memory_budget=12 * MIB))
    assert "goes out through 12.0 MiB" in caplog.text


def test_many_tiny_leaves_are_matched_without_looking_at_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: State = {str(number): np.full(3, float(number)) for number in range(3000)}
    looked: list[int] = []
    keys_of = baseline.keys_of
    monkeypatch.setattr(baseline, "keys_of", lambda *given: looked.append(1) or keys_of(*given))

    def change(step: int) -> None:
        state[str(step)][0] = -1.0

    all_come_back(tmp_path, train(tmp_path, state, 3, change, encoding="small"))
    assert looked == []


def test_a_codec_that_nothing_is_stored_by_any_more_is_not_listed(tmp_path: Path) -> None:
    """Else a run that has once used a package needs it for ever."""
    state: State = {"w": noise(0, 200_000)}

    def change(step: int) -> None:
        state["w"] += np.float32(1)

    train(tmp_path, state, 1, change, encoding=Encoding(codec="lz4"))
    train(tmp_path, state, 3, change, encoding="small")
    assert any("lz4" in name for name in index_of(tmp_path, 1).stored.codecs)
    assert not any("lz4" in name for name in index_of(tmp_path, 3, 2).stored.codecs)


def test_damage_is_told_of_the_leaf_that_it_strikes(tmp_path: Path) -> None:
    state: State = {"first": noise(0, 1000), "second": noise(1, 1000), "third": noise(2, 1000)}
    train(tmp_path, state, 1, nothing, encoding="dedupe")
    index = index_of(tmp_path, 1)
    leaf = [spec.path for spec in index.specs].index("second")
    chunk = int(index.chunk_start[leaf])
    pack = tmp_path / CheckpointId("main", 1, 1).directory / index.packs[0].name
    data = bytearray(pack.read_bytes())
    data[int(index.stored.offset[chunk])] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"^second is damaged"):
        tenuto.load(tmp_path, step=1)


@pytest.mark.parametrize("encoding", PAIR)
def test_the_ends_of_long_leaves_that_lie_together(tmp_path: Path, encoding: Any) -> None:
    """All that a data file has of two leaves are their last, short chunks: these are no small leaves."""
    Repo.create_or_open(open_store(tmp_path), chunk_bytes=8192)
    source = np.random.default_rng(0)
    state: State = {name: source.integers(0, 255, 30_000, dtype=np.uint8) for name in "abc"}

    def change(step: int) -> None:
        for value in state.values():
            value[-1] = step

    all_come_back(tmp_path, train(tmp_path, state, 3, change, encoding=encoding))
