"""Files of `torch.save` and directories of DCP: what torch writes is read as it is, and what lies is refused."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tenuto.torch
from tenuto import formats
from tenuto.errors import CorruptionError, TenutoError, Unserialisable
from tenuto.formats.contract import Tensor
from tenuto.model.leaf import Box


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    base = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [base.permute(2, 0, 1), base[:, 1], base[1], base.to(memory_format=torch.contiguous_format)],
        "types": {
            str(kind): torch.tensor([1, 0, 1]).to(kind)
            for kind in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64)
        },
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "parameter": nn.Parameter(torch.ones(2)),
        "rng": torch.get_rng_state(),
        "epoch": 3,
        "betas": (0.9, 0.999),
        "huge": 10**30,
        "text": "ü",
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "none": None,
        "complex": 1 - 2j,
        "numpy": np.random.RandomState(1).get_state(),
        "float": np.float64(0.1),
        "size": torch.Size([2, 3]),
    }


def same(mine: Any, theirs: Any, path: str = "") -> None:
    if isinstance(theirs, torch.Tensor):
        assert isinstance(mine, Tensor), path
        assert (mine.dtype, mine.shape) == (str(theirs.dtype).removeprefix("torch."), tuple(theirs.shape)), path
        raw = theirs.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert mine.read().tobytes() == raw, path
        if theirs.dim() > 1 and theirs.numel():
            box = Box((0, 1) + (0,) * (theirs.dim() - 2), (1, 1, *theirs.shape[2:]))
            part = theirs.detach()[box.slices].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert mine.read(box).tobytes() == part, path
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs), path
        for key, value in theirs.items():
            same(mine[key], value, f"{path}/{key}")
    elif isinstance(theirs, list | tuple):
        assert type(mine) is (list if isinstance(theirs, list) else tuple) and len(mine) == len(theirs), path
        for number, value in enumerate(theirs):
            same(mine[number], value, f"{path}/{number}")
    elif isinstance(theirs, np.ndarray):
        assert mine.dtype == theirs.dtype and (mine == theirs).all(), path
    else:
        assert mine == theirs and type(mine) is type(theirs), path


def test_a_file_of_torch_is_read_as_it_was_saved(tmp_path: Path) -> None:
    theirs = state()
    torch.save(theirs, tmp_path / "x.pt")
    with formats.read(tmp_path / "x.pt") as reader:
        assert (reader.format, reader.kind, reader.remarks) == ("torch", "state", [])
        same(reader.tree, theirs)
        assert reader.tree["views"][2].nbytes == 48
    torch.save(theirs["model"], tmp_path / "weights.pth")
    with formats.read(tmp_path / "weights.pth") as reader:
        assert reader.kind == "weights" and isinstance(reader.tree, OrderedDict)


def test_a_tied_tensor_is_one(tmp_path: Path) -> None:
    weight = torch.ones(3)
    torch.save({"a": weight, "b": weight, "c": weight[1:]}, tmp_path / "x.pt")
    with formats.read(tmp_path / "x.pt") as reader:
        assert reader.tree["a"] is reader.tree["b"] is not reader.tree["c"]


def test_a_lightning_checkpoint_tells_its_step_and_leaves_users_objects_out(tmp_path: Path) -> None:
    stopping = {"EarlyStopping": {"monitor": "val_loss", "best_score": torch.tensor(0.5)}}
    best = {"ModelCheckpoint": {"monitor": "val_loss", "current_score": torch.tensor(0.25), "dirpath": "x"}}
    whole = {"pytorch-lightning_version": "2.6.6", "global_step": 30, "state_dict": {"w": torch.ones(2)}}
    torch.save(
        {**whole, "callbacks": {**stopping, **best}, "hyper_parameters": {"lr": 1, "own": Own()}}, tmp_path / "x.ckpt"
    )
    with formats.read(tmp_path / "x.ckpt") as reader:
        assert (reader.format, reader.step, reader.metrics) == ("lightning", 30, {"val_loss": 0.25})
        assert reader.tree["hyper_parameters"] == {"lr": 1, "own": None}
        assert len(reader.remarks) == 1 and "hyper_parameters/own" in reader.remarks[0] and "Own" in reader.remarks[0]
    torch.save({**whole, "state_dict": {"w": Own()}}, tmp_path / "y.ckpt")
    with pytest.raises(Unserialisable, match=r"state_dict/w.*Own"):
        formats.read(tmp_path / "y.ckpt")


class Own:
    pass


class Evil:
    """Leaves a file behind wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("nested", [False, True])
def test_nothing_that_a_file_names_is_run(tmp_path: Path, nested: bool) -> None:
    torch.save({"x": [Evil(tmp_path / "ran")] if nested else Evil(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(Unserialisable, match=r"posix\.mkdir"):
        formats.read(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


def packed(path: Path, pickled: bytes, *, storage: bytes = b"", **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", storage)
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return path


TENSOR = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n%s\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    b"%stQ%s%s%s\x89}tR."
)


def number(value: int) -> bytes:
    return b"\x8a\x09" + struct.pack("<q", value) + (b"\xff" if value < 0 else b"\0")


def sizes(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    count: int, first: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: bytes = b"FloatStorage"
) -> bytes:
    return TENSOR % (kind, number(count), number(first), sizes(*shape), sizes(*strides))


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (tensor(4, 0, (2, 2), (2, 1)), ""),
        (tensor(5, 0, (5,), (1,)), "5 items has 16 bytes"),
        (tensor(4, 1, (4,), (1,)), "reaches to item 4"),
        (tensor(4, 0, (2,), (-1,)), "strides"),
        (tensor(4, -1, (2,), (1,)), "strides"),
        (tensor(4, 0, (1 << 40, 1 << 40), (0, 0)), "more than any file holds"),
        (tensor(4, 0, (1 << 40,), (0,)), "expanded"),
        (tensor(4, 0, (2, 2), (1,)), "strides"),
        (tensor(-4, 0, (2,), (1,)), "not there"),
        (tensor(4, 0, (4,), (1,), b"QInt8Storage"), "QInt8Storage"),
        (b"\x80\x02(lp0\nh\x00a.", "instruction"),
        (b"\x80\x02]q\x00h\x00a.", "holds itself"),
        (b"\x80\x02" + b"(" * 3, "can be read"),
        (b"\x80\x02K\x01K\x02.", "left over"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "can be read"),
        (b"\x80\x02j\xff\xff\xff\x7f.", "can be read"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", ""),
        (b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.", "other than bytes"),
        (b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", "builtins.eval"),
        (b"\x80\x02}" + b")" + b"\x85" * 100000 + b"Ns.", "nested tuples"),
        (b"\x80\x02" + b")" + b"\x85" * 100000 + b".", "holds itself"),
        (b"\x80\x02Q.", "can be read"),
    ],
)
def test_a_hostile_pickle_is_refused(tmp_path: Path, pickled: bytes, said: str) -> None:
    path = packed(tmp_path / "x.pt", pickled, storage=bytes(16))
    if not said:
        formats.read(path).close()
        return
    with pytest.raises((CorruptionError, Unserialisable), match=said):
        formats.read(path)


def test_a_value_that_names_itself_again_and_again_does_not_fill_the_memory(tmp_path: Path) -> None:
    value: Any = [0]
    for _ in range(60):
        value = [value, value, value]
    with pytest.raises(CorruptionError, match="again and again"):
        formats.read(packed(tmp_path / "x.pt", pickle.dumps(value, 2)))


def doubled(times: int) -> bytes:
    """Returns a tuple of two tuples of two tuples…: small as a pickle, and without an end to whoever prints it."""
    return b"K\x01\x85q\x00" + b"".join(b"h%c\x86q%c" % (level, level + 1) for level in range(times))


@pytest.mark.parametrize(
    "pickled",
    [
        b"ctorch\ndevice\n" + doubled(60) + b"\x85R.",
        b"X\x01\x00\x00\x00a" + doubled(60) + b"\x93.",
        b"cnumpy\ndtype\n" + doubled(60) + b"\x85R.",
        doubled(60) + b")R.",
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + doubled(60) + b"X\x03\x00\x00\x00cpuK\x04tQ.",
        tensor(4, 0, (4,), (1,)).replace(sizes(4), doubled(60), 1),
    ],
)
def test_values_that_double_are_neither_printed_nor_hashed(tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(CorruptionError, match="pickle"):
        formats.read(packed(tmp_path / "x.pt", b"\x80\x02" + pickled.removeprefix(b"\x80\x02")))


def test_bytes_that_a_pickle_hands_to_functions_again_and_again_do_not_fill_the_memory(tmp_path: Path) -> None:
    text = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20)
    calls = b"h\x01(h\x00X\x06\x00\x00\x00latin1tR" * 1000
    pickled = b"\x80\x02" + text + b"q\x00c_codecs\nencode\nq\x01](h\x00" + calls + b"e."
    with pytest.raises(CorruptionError, match="pickle"):
        formats.read(
            packed(tmp_path / "x.pt", pickled.replace(b"q\x00c", b"q\x000c", 1).replace(b"q\x01]", b"q\x010]"))
        )


@pytest.mark.parametrize(
    ("value", "words", "hint"),
    [
        (torch.ones(3, dtype=torch.complex64).conj(), "conjugate", "resolve_conj"),
        (torch._neg_view(torch.ones(3)), "negative", "resolve_neg"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "negative", "resolve_neg"),
        (torch.ones(3).untyped_storage(), "at 'a' it has a storage of uint8 without a tensor", "save a tensor"),
        (torch.ones(1).expand(4), "expanded", "contiguous"),
    ],
)
def test_what_whole_files_have_and_is_not_read_is_unsupported_and_not_damage(
    tmp_path: Path, value: Any, words: str, hint: str
) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.save({"a": value}, tmp_path / "x.pt")
    for read in (formats.read, tenuto.torch.load):
        with pytest.raises(Unserialisable, match=words) as caught:
            read(tmp_path / "x.pt")
        assert hint in str(caught.value.hint) and "damaged" not in str(caught.value)


def test_an_archive_that_lies_is_refused(tmp_path: Path) -> None:
    good = tensor(4, 0, (4,), (1,))
    with pytest.raises(Unserialisable, match="big-endian"):
        formats.read(packed(tmp_path / "a.pt", good, storage=bytes(16), byteorder=b"big"))
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", good)
        archive.writestr("archive/data/0", bytes(16))
    with pytest.raises(CorruptionError, match="compressed"):
        formats.read(tmp_path / "b.pt")
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(packed(tmp_path / "c.pt", good), "a") as archive:
        archive.writestr("archive/data.pkl", good)
    with pytest.raises(CorruptionError, match="twice"):
        formats.read(tmp_path / "c.pt")
    whole = packed(tmp_path / "d.pt", good, storage=bytes(16)).read_bytes()
    at = whole.rindex(b"archive/data/0") - 4  # the place of the member, in the archive's directory
    (tmp_path / "d.pt").write_bytes(whole[:at] + struct.pack("<I", 0) + whole[at + 4 :])
    with pytest.raises(CorruptionError, match="overlaps"):
        formats.read(tmp_path / "d.pt")
    packed(tmp_path / "e.pt", good, **{"constants.pkl": b""})
    with pytest.raises(Unserialisable, match="TorchScript"):
        formats.read(tmp_path / "e.pt")
    torch.save({"x": 1}, tmp_path / "f.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(Unserialisable, match=r"before torch 1\.6"):
        formats.read(tmp_path / "f.pt")


def test_a_directory_of_dcp_is_read_as_it_was_saved(tmp_path: Path) -> None:
    theirs = state()
    with warnings.catch_warnings(action="ignore"):
        dcp.save(theirs, checkpoint_id=tmp_path / "d")
    with formats.read(tmp_path / "d") as reader:
        assert reader.format == "dcp" and {one.name for one in reader.files} == {".metadata", "__0_0.distcp"}
        mine = {key: reader.tree[key] for key in theirs}
        for number in ("0", "1", "2", "3"):  # DCP's keys are texts
            mine["optimizer"]["state"][int(number)] = mine["optimizer"]["state"].pop(number)
        for part in ("model", "types"):
            mine[part] = type(theirs[part])((key, mine[part][key]) for key in theirs[part])
        mine["optimizer"] = {key: mine["optimizer"][key] for key in theirs["optimizer"]}
        same(mine, theirs)


def metadata(tmp_path: Path) -> tuple[Path, bytes]:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": torch.ones(4, 3), "n": 1}, checkpoint_id=tmp_path / "d")
    return tmp_path / "d", (tmp_path / "d" / ".metadata").read_bytes()


def test_a_checkpoint_of_megatron_is_read_with_what_its_ranks_share(tmp_path: Path) -> None:
    """Its files as torch writes them, in the layout of megatron/core/dist_checkpointing (0.16): core.py, common.py."""
    weights = {
        "decoder.layers.weight": torch.randn(4, 3),
        "optimizer.state.exp_avg.decoder.layers.weight": torch.ones(4, 3),
    }
    with warnings.catch_warnings(action="ignore"):
        dcp.save({**weights, "rng_state/shard_0_1": {"torch": torch.get_rng_state()}}, checkpoint_id=tmp_path)
    common = {"iteration": 70, "args": argparse.Namespace(lr=1.0), "opt_param_scheduler": {"num_steps": 560}}
    torch.save(common, tmp_path / "common.pt")
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (tmp_path / "metadata.json").write_text(json.dumps(said))
    with formats.read(tmp_path) as reader:
        assert reader.step == 70 and reader.tree["opt_param_scheduler"] == {"num_steps": 560}
        assert "args" not in reader.tree and any("argparse.Namespace" in one for one in reader.remarks)
        for name, value in weights.items():
            assert (reader.tree[name].read() == value.numpy()).all()
    (tmp_path / "metadata.json").write_text(json.dumps(said | {"sharded_backend": "zarr"}))
    with pytest.raises(Unserialisable, match="backend zarr"):
        formats.read(tmp_path)


def test_metadata_that_leads_elsewhere_or_is_code_is_refused(tmp_path: Path) -> None:
    where, _ = metadata(tmp_path)
    found: Any = dcp.FileSystemReader(where).read_metadata()

    def put(value: Any) -> None:
        (where / ".metadata").write_bytes(pickle.dumps(value))

    for name in ("../secret", "/etc/passwd", "", "..", "a/b"):
        for info in found.storage_data.values():
            info.relative_path = name
        put(found)
        with pytest.raises(CorruptionError, match="not a file of this directory"):
            formats.read(where)
    put([found, Evil(tmp_path / "ran")])
    with pytest.raises(Unserialisable, match=r"posix\.mkdir"):
        formats.read(where)
    assert not (tmp_path / "ran").exists()
    put({"a": 1})
    with pytest.raises(CorruptionError, match="no Metadata"):
        formats.read(where)


def test_metadata_and_files_that_disagree_are_refused(tmp_path: Path) -> None:
    where, _ = metadata(tmp_path)
    found: Any = dcp.FileSystemReader(where).read_metadata()
    found.state_dict_metadata["w"].size = torch.Size([4, 4])
    (where / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CorruptionError, match="leave some of"):
        formats.read(where)
    found.state_dict_metadata["w"].chunks[0].sizes = torch.Size([4, 4])
    (where / ".metadata").write_bytes(pickle.dumps(found))
    with formats.read(where) as reader, pytest.raises(CorruptionError, match="where 'w' has float32"):
        reader.tree["w"].read()


@pytest.mark.parametrize("kind", ["pt", "metadata"])
def test_damaged_files_are_refused_or_read_and_never_anything_else(tmp_path: Path, kind: str) -> None:
    if kind == "pt":
        torch.save({"w": torch.ones(4, 3), "o": {"lr": 0.1, "n": [1, 2]}}, tmp_path / "x.pt")
        path = target = tmp_path / "x.pt"
        whole = target.read_bytes()
    else:
        path, whole = metadata(tmp_path)
        target = path / ".metadata"
    chance = random.Random(5)
    refused = 0
    for _ in range(250):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 3])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        target.write_bytes(data)
        try:
            with formats.read(path, format=None if kind == "metadata" else "torch") as reader:
                for one in reader.tensors().values():
                    one.read()
        except TenutoError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_what_is_opened_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "pt":
        torch.save({"w": torch.ones(1 << 20)}, tmp_path / "x")
    else:
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"w": torch.ones(1 << 20)}, checkpoint_id=tmp_path / "x")
    read: list[int] = []
    plain = formats.RawFile.read_into

    def counted(self: formats.RawFile, out: Any, start: int) -> None:
        read.append(len(out))
        plain(self, out, start)

    monkeypatch.setattr(formats.RawFile, "read_into", counted)
    with formats.read(tmp_path / "x") as reader:
        assert sum(read) < 100_000
        reader.tree["w"].read(Box((7,), (3,)))
        assert sum(read) < 200_000


@pytest.mark.parametrize("block", [1 << 16, 1 << 20])
def test_a_transposed_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    base = torch.arange(1500 * 1200, dtype=torch.int32).reshape(1500, 1200)
    swapped = base.reshape(15, 100, 1200).permute(2, 0, 1)
    torch.save({"t": base.t(), "column": base[:, 7], "swapped": swapped}, tmp_path / "t.pt")
    monkeypatch.setattr("tenuto.formats.torch_file.STRIP_BYTES", 1 << 20)
    read = []
    from tenuto.formats.contract import RawFile

    original = RawFile.read_into
    monkeypatch.setattr(RawFile, "read_into", lambda self, out, at: (read.append(len(out)), original(self, out, at))[1])
    with formats.read(tmp_path / "t.pt") as reader:
        for name, expected in {"t": base.t(), "swapped": swapped}.items():
            read.clear()
            found = b"".join(bytes(one) for one in reader.tree[name].blocks(block))
            assert found == expected.contiguous().numpy().tobytes()
            assert sum(read) <= 1.2 * base.nbytes  # it was read as often as it has blocks
        read.clear()
        assert (reader.tree["column"].read() == base[:, 7].numpy()).all()
        assert max(read) <= 1 << 17  # and not everything between the first item and the last


def test_a_storage_that_is_not_what_its_checksum_says_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.pt"
    torch.save({"a": torch.arange(100000.0), "b": torch.ones(3)}, file)
    data = bytearray(file.read_bytes())
    at = data.index(torch.arange(100000.0).numpy().tobytes()[-4000:])
    data[at] ^= 1
    file.write_bytes(data)
    with formats.read(file) as reader:
        assert reader.tree["b"].read().tolist() == [1, 1, 1]
        assert len(reader.tree["a"].read(Box((0,), (5,)))) == 5
        with pytest.raises(CorruptionError, match="'data/0' is not what its checksum says"):
            list(reader.tree["a"].blocks(1 << 14))
    file.write_bytes(data.replace(b"byteorder", b"byteorder").replace(b"little", b"Little"))
    with pytest.raises(CorruptionError, match="checksum"):
        formats.read(file)


def test_an_archive_that_was_written_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "t.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with formats.read(tmp_path / "t.pt") as reader:
        assert reader.tree["a"].read().tolist() == [1, 1, 1]
