"""tenuto.open: what was saved comes back by slice, or an error that names leaf, pack and offset (I5)."""

from __future__ import annotations

import pickle
import re
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tenuto
from support.loaded_interpreter import Program
from tenuto.errors import (
    BadIndex,
    CheckpointNotFound,
    CorruptionError,
    LeafNotFound,
    NothingRestorable,
    ObjectNotFound,
    StateError,
    UsageError,
)
from tenuto.state import numpy_arrays
from tenuto.store.contract import Reader
from tenuto.store.memory import MemoryReader, MemoryStore

CHUNK = 262_144
BIG = torch.arange(3000 * 700, dtype=torch.float32).reshape(3000, 700)


def state() -> dict[str, Any]:
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "model": {
            "w": base,
            "tied": base,
            "t": base.t(),
            "bf16": torch.arange(6).bfloat16(),
            "flags": torch.ones(2, 2).bool(),
        },
        "f8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(4.5),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(4).to_sparse(),
        "array": np.arange(24).reshape(2, 3, 4),
        "big endian": np.arange(4, dtype=">f8"),
        "text": np.array(["ab", "c"]),
        "bytes": b"xyz" * 1000,
        "epoch": 3,
        "rates": [0.1, float("nan"), (1, 2)],
        "nothing": None,
        "list": [torch.ones(2), "x"],
        3: torch.full((2,), 3.0),
        "a/b": {"é": torch.full((2,), 7.0)},
        "random": np.random.default_rng(5),
    }


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "ckpts") if request.param == "local" else f"memory://{uuid.uuid4()}"


def test_leaves_are_what_was_saved(place: str) -> None:
    saved = state()
    tenuto.save(saved, place, step=7)
    with tenuto.open(place) as opened:
        assert (opened.step, opened.run, str(opened.id)) == (7, "main", "main/a0001/7")
        assert opened.progress == {"step": 7} and opened.metrics == {} and opened.bytes > sum_of(opened)
        assert torch.equal(opened["model/w"][...], saved["model"]["w"])
        assert torch.equal(opened["model/tied"][1], saved["model"]["w"][1])
        assert torch.equal(opened["model/t"][1:, ::2], saved["model"]["t"][1:, ::2])
        assert torch.equal(opened["model/bf16"][2:], saved["model"]["bf16"][2:])
        assert opened["f8"][1:3].view(torch.uint8).tolist() == saved["f8"][1:3].view(torch.uint8).tolist()
        assert opened["scalar"][...].item() == 4.5 and opened["scalar"][()].shape == ()
        assert opened["empty"][:, 2].shape == (0,)
        assert opened["sparse/values"][...].tolist() == [1.0] * 4
        assert np.array_equal(opened["array"][1, ::-1, -2:], saved["array"][1, ::-1, -2:])
        assert opened["big endian"][1:3].dtype == np.dtype(">f8") and opened["big endian"][3] == 3.0
        assert opened["text"][...].tolist() == ["ab", "c"]
        assert opened["bytes"][:3].tobytes() == b"xyz" and opened["bytes"].kind == "bytes"
        assert opened["#i:3"][0] == 3.0 and opened["a~1b/é"][1] == 7.0 and opened["list/0"][1] == 1.0
        leaf = opened["array"]
        assert (leaf.path, leaf.dtype, leaf.shape, leaf.ndim, leaf.nbytes, leaf.kind) == (
            "array", "int64", (2, 3, 4), 3, 192, "numpy"
        )  # fmt: skip
        assert len(leaf) == 2 and not leaf.private and np.asarray(leaf, dtype="f4").dtype == np.float32


def sum_of(opened: tenuto.Opened) -> int:
    """Of the leaves alone, tied tensors once: without the packs' headers."""
    return sum(leaf.nbytes for path, leaf in opened.items() if path != "model/tied")


def test_what_is_read_belongs_to_who_asked(place: str) -> None:
    tenuto.save({"w": torch.zeros(4), "a": np.zeros(4)}, place, step=1)
    with tenuto.open(place) as opened:
        first, array = opened["w"][...], opened["a"][1:]
        first.fill_(5)
        array[:] = 5
        assert opened["w"][...].sum() == 0 and opened["a"][...].sum() == 0 and not first.requires_grad
        held = opened["w"]
    assert first.sum() == 20
    with pytest.raises(UsageError, match="closed"):
        held[...]


def test_it_is_a_mapping_of_every_leaf(place: str) -> None:
    tenuto.save(state(), place, step=1)
    with tenuto.open(place) as opened:
        paths = list(opened)
        assert len(opened) == len(paths) == len(set(paths)) == 17
        assert {"model/w", "model/tied", "sparse/indices", "list/0", "bytes"} <= set(paths)
        assert "epoch" not in opened and "model" not in opened and 5 not in opened and opened.get("nope") is None
        for path, leaf in opened.items():
            assert leaf.path == path and tuple(leaf[...].shape) == leaf.shape


def test_plain_values(place: str) -> None:
    saved = state()
    tenuto.save(saved, place, step=1)
    with tenuto.open(place) as opened:
        assert opened.plain("epoch") == 3 and opened.plain("nothing") is None and opened.plain("rates/2") == (1, 2)
        assert opened.plain("rates")[0] == 0.1 and opened.plain("bytes") == saved["bytes"]
        assert opened.plain("random").random() == np.random.default_rng(5).random()
        assert {"epoch", "rates/0", "rates/2/1", "nothing", "list/1"} <= set(opened.plain_paths())
        with pytest.raises(StateError, match="model/w"):
            opened.plain("model")
        with pytest.raises(LeafNotFound, match="nothing at 'nope'"):
            opened.plain("nope")


def test_errors_say_what_to_do(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_arrays, "_extended", lambda name: None)  # as without ml_dtypes
    tenuto.save(state(), place, step=1)
    with tenuto.open(place) as opened:
        for path, words in {
            "epoch": r"opened.plain\('epoch'\)",
            "sparse": "below it are sparse/indices, sparse/values",
            "nope": "nothing at",
        }.items():
            with pytest.raises(KeyError) as caught:
                opened[path]
            assert isinstance(caught.value, LeafNotFound) and re.search(words, str(caught.value))
        with pytest.raises(StateError, match="numpy has no type bfloat16"):
            opened["model/bf16"].numpy()
        with pytest.raises(StateError, match="torch has no type numpy:<U2"):
            opened["text"].torch()
        with pytest.raises(BadIndex, match="model/w"):
            opened["model/w"][5]
        with pytest.raises(StateError, match="no dimension"):
            len(opened["scalar"])
        assert [row.tolist() for row in opened["model/w"]] == state()["model"]["w"].tolist()
        assert opened["array"].torch().dtype == torch.int64 and opened["model/w"].numpy().dtype == np.float32
    with pytest.raises(CheckpointNotFound):
        tenuto.open(place, step=2)


def test_reads_are_no_longer_than_they_need_be(tmp_path: Path) -> None:
    tenuto.save({"big": BIG, "other": torch.ones(1000, 1000)}, tmp_path, step=1)
    with tenuto.open(tmp_path) as opened:
        assert opened.bytes_read == 0
        assert torch.equal(opened["big"][1500], BIG[1500])
        assert 0 < opened.bytes_read <= 700 * 4 + 2 * CHUNK
        before = opened.bytes_read
        assert torch.equal(opened["big"][1500:1501, 3:9], BIG[1500:1501, 3:9])
        assert opened.bytes_read == before, "verified once"
        assert torch.equal(opened["big"][:, 5], BIG[:, 5])
        assert opened.bytes_read <= BIG.nbytes, "each chunk once"
        assert torch.equal(opened["big"][...], BIG) and torch.equal(opened["big"][::1000], BIG[::1000])


class Ranged(MemoryStore):
    """A store whose objects are only to be had by reading ranges, as those of an object store are."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reads: list[tuple[int, int]] = []
        self.gone = False

    def open(self, name: str) -> Reader:
        inner, outer = super().open(name), self

        class Far(MemoryReader):
            def view(self) -> memoryview | None:
                return None

            def read_into(self, offset: int, buffer: memoryview) -> None:
                if outer.gone:
                    raise ObjectNotFound(f"there is no object {name}")
                if name.endswith(".safetensors"):
                    outer.reads.append((offset, len(buffer)))
                super().read_into(offset, buffer)

        return Far(inner.name, inner.data)


@pytest.fixture
def far() -> Ranged:
    store = Ranged(str(uuid.uuid4()))
    tenuto.save({"big": BIG, "w": torch.arange(5)}, store, step=1)
    store.reads.clear()
    return store


def test_ranged_reads(far: Ranged) -> None:
    with tenuto.open(far) as opened:
        assert far.reads == [], "no leaf is read by opening"
        assert torch.equal(opened["big"][1500], BIG[1500])
        assert len(far.reads) == 1 and far.reads[0][1] <= 700 * 4 + 2 * CHUNK
        for row in range(1500, 1520):
            assert torch.equal(opened["big"][row], BIG[row])
        assert len(far.reads) <= 2, "neighbours come from the chunk that was read last"
        far.reads.clear()
        assert torch.equal(opened["big"][...], BIG)
        assert sum(length for _, length in far.reads) <= BIG.nbytes
        far.reads.clear()
        assert torch.equal(opened["big"][100:2900, 3:5], BIG[100:2900, 3:5])
        assert sum(length for _, length in far.reads) <= 2800 * 2800 + 2 * CHUNK and len(far.reads) <= 4
        far.reads.clear()
        assert torch.equal(opened["big"][::1000, :3], BIG[::1000, :3])
        assert len(far.reads) <= 3 and sum(length for _, length in far.reads) <= 3 * (12 + 2 * CHUNK)


def test_an_object_that_is_gone_is_said_to_be(far: Ranged) -> None:
    with tenuto.open(far) as opened:
        far.gone = True
        with pytest.raises(CheckpointNotFound, match="removed while it was open"):
            opened["w"][...]


def flip(store: MemoryStore, name: str, at: int) -> None:
    data, time = store.place.objects[name]
    store.place.objects[name] = (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], time)


@pytest.mark.parametrize("kind", [MemoryStore, Ranged])
def test_i5_a_flipped_bit_is_an_error_naming_leaf_pack_and_offset(kind: type[MemoryStore]) -> None:
    store = kind(str(uuid.uuid4()))
    tenuto.save({"big": BIG, "w": torch.arange(5)}, store, step=1)
    pack = next(name for name in store.place.objects if name.endswith(".safetensors"))
    start = len(store.place.objects[pack][0]) - BIG.nbytes - torch.arange(5).nbytes  # its length is no multiple of 64
    flip(store, pack, start + 5 * CHUNK + 17)
    with tenuto.open(store) as opened:
        assert torch.equal(opened["w"][...], torch.arange(5)) and torch.equal(opened["big"][:100], BIG[:100])
        for key in (..., slice(460, 480), (slice(None), 3)):
            with pytest.raises(CorruptionError) as caught:
                opened["big"][key]
            said = str(caught.value)
            assert caught.value.subject == "big" and pack in said and f"offset {start + 5 * CHUNK}," in said


def test_a_damaged_latest_is_passed_over_and_said(tmp_path: Path) -> None:
    for step in (1, 2):
        last = tenuto.save({"w": np.full(3, step)}, tmp_path, step=step)
    index = tmp_path / last.id.directory / "rank-00000.index"
    index.write_bytes(index.read_bytes()[:-1])
    with tenuto.open(tmp_path) as opened:
        assert opened.step == 1 and opened["w"][0] == 1
        assert [str(id) for id, _ in opened.skipped] == ["main/a0001/2"]
    with pytest.raises(CorruptionError):
        tenuto.open(tmp_path, step=2)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes() + b"0")
    with pytest.raises(NothingRestorable):
        tenuto.open(tmp_path)


def test_private_leaves_and_several_threads(tmp_path: Path) -> None:
    with tenuto.Checkpointer(tmp_path, {"w": BIG}, data=list(range(4))) as ckpt:
        for _ in ckpt.steps(1):
            pass
    with tenuto.open(tmp_path) as opened:
        found: list[bool] = []
        threads = [
            threading.Thread(target=lambda k=k: found.append(torch.equal(opened["w"][k::7, k], BIG[k::7, k])))
            for k in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 6
        assert all(opened[path].private == path.startswith("#private/") for path in opened)
        with pytest.raises((TypeError, pickle.PicklingError)):
            pickle.dumps(opened)


TRAINING = """
import sys, torch, tenuto
state = {"w": torch.zeros(600, 600)}
with tenuto.Checkpointer(sys.argv[1], state, save=tenuto.every(steps=1), keep=tenuto.keep.latest(1)) as ckpt:
    for step in ckpt.steps(6):
        state["w"].fill_(step + 1)
        if step in (1, 5):
            print("at", step, flush=True)
            sys.stdin.readline()
"""


def test_a_checkpoint_stays_readable_while_training_removes_it(tmp_path: Path) -> None:
    training = Program(["-c", TRAINING, str(tmp_path)], torch=True)
    assert training.stdout.readline() == "at 1\n"
    opened = opened_when_there(tmp_path)
    assert opened.step == 1
    training.stdin.write("\n")
    training.stdin.flush()
    assert training.stdout.readline() == "at 5\n"
    said = training.communicate("\n")
    assert training.returncode == 0, said
    assert not (tmp_path / opened.id.directory / "manifest.json").exists()
    with pytest.raises(CheckpointNotFound):
        tenuto.open(tmp_path, step=1)
    with opened:
        assert torch.equal(opened["w"][...], torch.ones(600, 600)) and opened.get("x") is None
    with tenuto.open(tmp_path) as newest:
        assert (newest.step, newest["w"][0, 0].item()) == (6, 6.0)


def opened_when_there(place: Path) -> tenuto.Opened:
    """The first save is in flight: its process waits, and commits it without us."""
    waiting = threading.Event()
    for _ in range(600):
        try:
            return tenuto.open(place)
        except (CheckpointNotFound, tenuto.TenutoError):
            waiting.wait(0.1)
    raise AssertionError("no checkpoint appeared")
