"""Formats against files that the packages themselves wrote, and the reverse; hostile files of each are refused."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tenuto.api.migrate import plan_migration
from tenuto.errors import CorruptionError, TenutoError, Unserialisable, UsageError
from tenuto.formats import Content, Tensor, detect, read, tf_bundle
from tenuto.formats.contract import ArrayTensor, RawFile, RawTensor
from tenuto.formats.registry import named
from tenuto.formats.series import find

ARRAYS = {
    "layer.w": np.arange(600, dtype=np.float32).reshape(20, 30),
    "half": np.arange(7, dtype=np.float16),
    "scalar": np.array(3, np.int64),
    "empty": np.zeros((0, 4), np.float64),
    "mask": np.array([True, False]),
}


def values(path: Path) -> dict[str, np.ndarray]:
    with read(path) as reader:
        return {name: tensor.read() for name, tensor in reader.tree.items()}


def equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == array.dtype and np.array_equal(found[name], array) for name, array in wanted.items()
    )


def tensors(arrays: dict[str, np.ndarray], **dtypes: str) -> dict[str, Tensor]:
    return {
        name: ArrayTensor(
            np.ascontiguousarray(array).reshape(-1).view(np.uint8), dtypes.get(name, str(array.dtype)), array.shape
        )
        for name, array in arrays.items()
    }


# -- both ways -----------------------------------------------------------------------------------------------------


def test_safetensors_reads_what_the_package_wrote_and_the_reverse(tmp_path: Path) -> None:
    safetensors.numpy.save_file(ARRAYS, tmp_path / "a.safetensors")
    assert detect(tmp_path / "a.safetensors").name == "safetensors"
    assert equal(values(tmp_path / "a.safetensors"), ARRAYS)
    done: list[int] = []
    content = Content(tensors(ARRAYS), metadata={"origin": "x"}, progress=done.append)
    assert named("safetensors").write(tmp_path / "b.safetensors", content) == []
    assert equal(safetensors.numpy.load_file(tmp_path / "b.safetensors"), ARRAYS)
    assert done[-1] == sum(array.nbytes for array in ARRAYS.values())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_reads_what_numpy_wrote_and_the_reverse(tmp_path: Path, save: Callable[..., None]) -> None:
    arrays = {**ARRAYS, "fortran": np.asfortranarray(np.random.default_rng(0).random((9, 5, 4)))}
    save(tmp_path / "a.npz", **arrays)
    assert detect(tmp_path / "a.npz").name == "npz"
    assert equal(values(tmp_path / "a.npz"), arrays)
    save(tmp_path / "big_endian.npz", x=np.arange(5, dtype=">i4"))
    assert values(tmp_path / "big_endian.npz")["x"].tolist() == [0, 1, 2, 3, 4]
    named("npz").write(tmp_path / "b.npz", Content(tensors(arrays)))
    with np.load(tmp_path / "b.npz") as found:
        assert equal(dict(found), arrays)


def test_npz_says_which_element_types_it_does_not_have(tmp_path: Path) -> None:
    content = Content(tensors({"w": np.arange(3, dtype=np.uint16)}, w="bfloat16"))
    (remark,) = named("npz").write(tmp_path / "a.npz", content)
    assert "w" in remark
    assert np.load(tmp_path / "a.npz")["w"].view(np.uint16).tolist() == [0, 1, 2]


def test_a_deflated_array_can_be_read_back_and_forth(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 9, 500_000, dtype=np.int32)
    np.savez_compressed(tmp_path / "a.npz", x=array)
    with read(tmp_path / "a.npz") as reader:
        out = np.empty(4000, np.uint8)
        for start in (400_000, 0, 1_996_000, 1000):
            reader.tree["x"].read_into(out, start)
            assert np.array_equal(out.view(np.int32), array[start // 4 : start // 4 + 1000])


def test_shards_with_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    part = tmp_path / "model"
    content = Content(tensors(ARRAYS), {"hf_files": {"config.json": b'{"model_type": "x"}'}}, shard_bytes=1000)
    assert named("hf").write(part, content) == []
    index = json.loads((part / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in ARRAYS.values())
    assert equal(values(part / "model.safetensors.index.json"), ARRAYS)
    assert detect(part).name == "hf"
    with read(part) as reader:
        assert equal({name: tensor.read() for name, tensor in reader.tree["model"].items()}, ARRAYS)
        assert reader.tree["hf_files"] == {"config.json": b'{"model_type": "x"}'}


def test_a_checkpoint_of_a_trainer_has_its_step_and_metrics_and_says_what_is_left_out(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-20"
    place.mkdir()
    safetensors.numpy.save_file(ARRAYS, place / "model.safetensors")
    history = [{"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.0, "epoch": 1.0}, {"step": 20, "eval_loss": 1.5}]
    (place / "trainer_state.json").write_text(json.dumps({"global_step": 20, "log_history": history}))
    (place / "training_args.bin").write_bytes(b"a pickle")
    with read(place) as reader:
        assert (reader.format, reader.step, reader.metrics) == ("hf", 20, {"loss": 1.0, "eval_loss": 1.5})
        assert reader.tree["trainer_state"]["log_history"] == history
        assert ["training_args.bin" in remark for remark in reader.remarks] == [True]


def test_gguf_has_each_tensor_at_an_aligned_place(tmp_path: Path) -> None:
    arrays = {"a": ARRAYS["layer.w"], "b": ARRAYS["half"], "c": np.arange(3, dtype=np.uint16)}
    named("gguf").write(tmp_path / "a.gguf", Content(tensors(arrays, c="bfloat16"), metadata={"origin": "x"}))
    data = (tmp_path / "a.gguf").read_bytes()
    assert data[:4] == b"GGUF" and struct.unpack("<IQQ", data[4:24]) == (3, 3, 2)
    for array in arrays.values():
        assert data.find(array.tobytes()) % 32 == 0
    with pytest.raises(UsageError, match="mask is bool"):
        named("gguf").write(tmp_path / "b.gguf", Content(tensors({"mask": ARRAYS["mask"]})))
    assert not (tmp_path / "b.gguf").exists()
    with pytest.raises(UsageError, match="writes and does not read"):
        read(tmp_path / "a.gguf")


# -- series --------------------------------------------------------------------------------------------------------


def test_checkpoints_beside_each_other_are_found_by_their_names(tmp_path: Path) -> None:
    for name in ("checkpoint-200", "checkpoint-1000", "runs"):
        (tmp_path / name).mkdir()
        safetensors.numpy.save_file(ARRAYS, tmp_path / name / "model.safetensors")
    (tmp_path / "checkpoint-300").mkdir()  # empty: of no format
    (tmp_path / "config.json").write_text("{}")
    safetensors.numpy.save_file(ARRAYS, tmp_path / "model.safetensors")  # the model of the end beside them
    assert [(one.path.name, one.number) for one in find(tmp_path)] == [
        ("checkpoint-200", 200),
        ("checkpoint-1000", 1000),
    ]
    flat = tmp_path / "flat"
    flat.mkdir()
    for name in ("epoch=1-step=40", "epoch=0-step=20", "last"):
        safetensors.numpy.save_file(ARRAYS, flat / f"{name}.safetensors")
    # Files beside each other without an index are shards of one, but not where their names tell steps.
    assert [one.number for one in find(flat)] == [20, 40]
    shards = tmp_path / "shards"
    named("hf").write(shards, Content(tensors(ARRAYS), shard_bytes=1000))
    assert [one.path for one in find(shards)] == [shards]


# -- hostile files -------------------------------------------------------------------------------------------------


def header(text: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + data


HOSTILE_SAFETENSORS = {
    "longer than the file": struct.pack("<Q", 10_000) + b"{}",
    "a huge header": struct.pack("<Q", 2**26) + b"{",
    "beyond the end": header('{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', bytes(8)),
    "overlapping": header(
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
        bytes(6),
    ),
    "an absurd shape": header('{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]}}', bytes(16)),
    "a negative shape": header('{"w":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}', bytes(16)),
    "an unknown type": header('{"w":{"dtype":"PICKLE","shape":[16],"data_offsets":[0,16]}}', bytes(16)),
    "a hole": header('{"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}', bytes(8)),
}


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_safetensors_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE_SAFETENSORS[name])
    with pytest.raises(CorruptionError, match=r"x\.safetensors"):
        read(path, format="safetensors")


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/x.safetensors", "..", "a/b.safetensors", 3, "missing.safetensors", "x.bin"]
)
def test_an_index_names_only_files_beside_it(tmp_path: Path, file: object) -> None:
    safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / "secret.safetensors")
    place = tmp_path / "model"
    (place / "a").mkdir(parents=True)
    safetensors.numpy.save_file({"w": np.ones(2)}, place / "a/b.safetensors")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CorruptionError, match=r"index\.json"):
        read(place / "model.safetensors.index.json")


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for content in ('{"weight_map": {"v": "model-1.safetensors"}}', '{"weight_map": {}}', "[]", "{", '"' * 9):
        index.write_text(content)
        with pytest.raises(CorruptionError):
            read(index)


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


WHOLE = zipped({"a.npy": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}", bytes(16))})
HOSTILE_NPZ = {
    "cut": WHOLE[:-30],
    "cut in the data": WHOLE[:140],
    "leads elsewhere": zipped({"../a.npy": b""}),
    "absolute": zipped({"/etc/a.npy": b""}),
    "too long a shape": zipped({"a.npy": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (5,)}", bytes(16))}),
    "absurd": zipped({"a.npy": npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**40}, {2**40})}}")}),
    "code in the header": zipped({"a.npy": npy("__import__('os').system('true')")}),
    "not an array": zipped({"a.npy": b"PK\x03\x04" * 50}),
    "something else": zipped({"a.npy": WHOLE, "run.sh": b""}),
    "a compressed bomb": zipped(
        {"a.npy": npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**50},)}}", bytes(1 << 20))},
        zipfile.ZIP_DEFLATED,
    ),
    "another method": zipped({"a.npy": bytes(100)}, zipfile.ZIP_LZMA),
    "a directory that lies about where it is": WHOLE.replace(b"PK\x03\x04", b"PK\x07\x04"),
}


@pytest.mark.parametrize("name", HOSTILE_NPZ)
def test_hostile_archives_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(HOSTILE_NPZ[name])
    with pytest.raises(CorruptionError, match=r"x\.npz"), read(path, format="npz") as reader:
        for tensor in reader.tree.values():
            tensor.read()


def test_an_archive_with_members_that_overlap_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped({"a.npy": npy("{}"), "b.npy": npy("{}")}))
    first, second = data.find(b"PK\x01\x02"), data.rfind(b"PK\x01\x02")
    data[second + 42 : second + 46] = data[first + 42 : first + 46]  # both begin at one place
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(CorruptionError, match="inside the member before it"):
        read(tmp_path / "x.npz", format="npz")


def test_a_pickle_in_an_archive_is_refused_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", objects=np.array([{}, print], dtype=object))
    with pytest.raises(Unserialisable, match=r"objects\.npy") as caught:
        read(tmp_path / "x.npz")
    assert "run code" in str(caught.value)


def test_a_file_that_is_cut_after_it_was_opened_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"w": np.ones(1000)}, path)
    with read(path) as reader:
        with path.open("r+b") as file:
            file.truncate(500)
        with pytest.raises(CorruptionError, match="ends at byte 500"):
            reader.tree["w"].read()


@pytest.mark.parametrize("name", ["../x.json", "a/b.json", "x.sh", ""])
def test_files_of_a_checkpoint_are_written_beside_the_weights_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(TenutoError, match="hf_files"):
        named("hf").write(tmp_path / "out", Content(tensors(ARRAYS), {"hf_files": {name: b""}}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bytes_are_refused_or_read_as_other_values(tmp_path: Path, seed: int) -> None:
    """Nothing but our own errors, and never more memory than the file has."""
    random = np.random.default_rng(seed)
    small = {"a": np.ones(3, np.float32), "b": np.arange(4)}
    for suffix in ("npz", "safetensors"):
        path = tmp_path / f"x.{suffix}"
        named(suffix).write(path, Content(tensors(small)))
        data = bytearray(path.read_bytes().replace(b" " * 3000, b""))
        for _ in range(int(random.integers(1, 4))):
            data[int(random.integers(0, min(len(data), 600)))] = int(random.integers(0, 256))
        path.write_bytes(data)
        try:
            with read(path, format=suffix) as reader:
                for tensor in reader.tree.values():
                    assert tensor.nbytes <= len(data)
                    tensor.read()
        except TenutoError:
            pass


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_array_that_is_not_what_its_checksum_says_is_refused(tmp_path: Path, save: Callable[..., None]) -> None:
    file = tmp_path / "x.npz"
    save(file, a=np.arange(5000.0))
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        crc = archive.getinfo("a.npy").CRC.to_bytes(4, "little")
    changed = data.replace(crc, bytes([crc[0] ^ 1]) + crc[1:])
    assert changed != data
    file.write_bytes(changed)
    with read(file) as reader:
        with pytest.raises(CorruptionError, match=r"a\.npy"):
            list(reader.tree["a"].blocks(1 << 12))


def test_a_tensor_of_a_bundle_that_is_not_what_its_checksum_says_is_refused(tmp_path: Path) -> None:
    """The checksum of RFC 3720, appendix B.4: 32 bytes of zeros have 0x8A9136AA."""
    pytest.importorskip("google_crc32c")
    file = tmp_path / "x.data-00000-of-00001"
    file.write_bytes(bytes(32))
    raw = RawFile(file, what="")
    masked = (((0x8A9136AA >> 15 | 0x8A9136AA << 17) & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF
    tensor = RawTensor(raw, 0, "float32", (8,), name="w")
    whole = tf_bundle._summed(tensor, "w", {6: masked.to_bytes(4, "little")})
    assert whole.read().tolist() == [0.0] * 8
    file.write_bytes(bytes(31) + b"\1")
    with pytest.raises(CorruptionError, match="'w' is not what its checksum says"):
        whole.read()
    raw.close()


def test_what_is_numbered_and_of_no_known_format_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        safetensors.numpy.save_file({"a": np.zeros(2, np.float32)}, tmp_path / f"step_{step}.safetensors")
    (tmp_path / "step_2.log").write_text("of a checkpoint that was found")
    (tmp_path / "step_3").mkdir()
    plan = plan_migration(tmp_path, tmp_path / "repository")
    assert [(path.name, reason) for path, reason in plan.skipped] == [("step_3", "it is not of a known format")]
    assert [one.step for one in plan.checkpoints] == [1, 2]
