"""TensorFlow's bundles: `NAME.index`, a table in LevelDB's format, and the raw bytes of tensors in `NAME.data-…`.

Read without TensorFlow, in place; written by it. Strings and the object graph are left out, with a remark.

Source: tensorflow/core/util/tensor_bundle, tensor_bundle.proto, tensorflow/tsl/lib/io/format.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from tenuto.errors import UsageError, typed
from tenuto.formats.contract import Content, RawFile, RawTensor, Reader, SummedTensor

_WHAT: Final = "bundle of TensorFlow's"
_MAGIC: Final = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER: Final = 48
_TRAILER: Final = 5
_MOST_INDEX: Final = 256 << 20
_MOST_SHARDS: Final = 100_000
_MASK: Final = 0xA282EAD8
_VALUE: Final = "/.ATTRIBUTES/VARIABLE_VALUE"
_GRAPH: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_DTYPES: Final = {
    **{1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64"},
    **{10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64"},
    **{24: "float8_e5m2", 25: "float8_e4m3fn"},
}
"""By the numbers of tensorflow/core/framework/types.proto."""


def read(path: Path) -> Reader:
    path = _newest(path) if path.is_dir() else path
    index = RawFile(path, what=_WHAT)
    shards: list[RawFile] = []
    try:
        entries = dict(_table(index))
        header = _fields(index, entries.pop(b"", b""))
        count = _number(header.get(1, 1))
        if not 0 < count <= _MOST_SHARDS or header.get(2, 0) != 0:
            index.refuse("its header claims no shards, or another order of bytes")
        stem = path.name.removesuffix(".index")
        shards += [RawFile(path.with_name(f"{stem}.data-{n:05d}-of-{count:05d}"), what=_WHAT) for n in range(count)]
        tree: dict[str, Any] = {}
        left_out = []
        for key, value in entries.items():
            name = _text(index, key)
            fields = _fields(index, value)
            kind = _DTYPES.get(_number(fields.get(1, 0)))
            if name == _GRAPH:
                continue
            if kind is None or 7 in fields:
                left_out.append(f"{name}: {'a partitioned variable' if 7 in fields else 'no tensor of numbers'}")
                continue
            shard = _number(fields.get(3, 0))
            if shard >= count:
                index.refuse(f"{name!r} lies in shard {shard} of {count}")
            shape = _shape(index, fields.get(2, b""))
            tensor = _summed(RawTensor(shards[shard], _number(fields.get(4, 0)), kind, shape, name=name), name, fields)
            if tensor.nbytes != _number(fields.get(5, 0)):
                index.refuse(f"{name!r} has {_number(fields.get(5, 0))} bytes for {tensor!r}")
            _put(index, tree, name.removesuffix(_VALUE), tensor)
    except BaseException:
        _close(index, shards)
        raise
    return Reader(
        "tf",
        path,
        tree,
        made_by="numpy",
        step=_step(stem),
        remarks=left_out,
        files=(path, *(one.path for one in shards)),
        on_close=lambda: _close(index, shards),
    )


def _summed(tensor: RawTensor, name: str, fields: dict[int, int | bytes]) -> RawTensor:
    """Returns the tensor with its checksum, where a library computes it: in Python alone it takes 100 ns a byte."""
    crc32c, stored = _crc32c(), fields.get(6)
    if crc32c is None or not isinstance(stored, bytes):
        return tensor
    masked = (int.from_bytes(stored, "little") - _MASK) & 0xFFFFFFFF
    crc = (masked << 15 | masked >> 17) & 0xFFFFFFFF
    return SummedTensor(tensor.file, tensor.offset, tensor.dtype, tensor.shape, name=name, crc=crc, sum=crc32c)


@cache
def _crc32c() -> Callable[[Any, int], int] | None:
    try:
        import google_crc32c
    except ImportError:
        return None
    return lambda data, before: int(google_crc32c.extend(before, data.tobytes()))


def _close(index: RawFile, shards: list[RawFile]) -> None:
    for one in (index, *shards):
        one.close()


def _newest(directory: Path) -> Path:
    """Returns the index that the file `checkpoint` names, else the only one."""
    found = sorted(directory.glob("*.index"))
    state = directory / "checkpoint"
    if state.is_file() and state.stat().st_size < 1 << 20:
        for line in state.read_text(errors="replace").splitlines():
            if line.startswith("model_checkpoint_path:"):
                named = directory / (Path(line.partition(":")[2].strip().strip('"')).name + ".index")
                if named in found:
                    return named
    if len(found) != 1:
        raise UsageError(
            f"{directory} has {len(found)} checkpoints, and no file `checkpoint` names one of them",
            subject=str(directory),
            hint=typed("tenuto", "import", found[-1], "WHERE"),
        )
    return found[0]


def _step(stem: str) -> int | None:
    number = stem.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 16 else None


def _put(index: RawFile, tree: dict[str, Any], name: str, tensor: RawTensor) -> None:
    *above, last = name.split("/")
    node: Any = tree
    for part in above:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            index.refuse(f"{name!r} lies below a tensor")
    if last in node:
        index.refuse(f"{name!r} is there twice, or as a tensor and as a directory")
    node[last] = tensor


# -- LevelDB's table ----------------------------------------------------------------------------------------------


def _table(index: RawFile) -> Iterator[tuple[bytes, bytes]]:
    """Yields keys and values. Every block is checked by its checksum; a compressed one is refused: TensorFlow writes
    none."""
    if not _FOOTER <= index.length <= _MOST_INDEX:
        index.refuse(f"an index of {index.length} bytes")
    content = index.read(0, index.length)
    footer = content[-_FOOTER:]
    if not footer.endswith(_MAGIC):
        index.refuse("it does not end as an index")
    _, _, at = _handle(index, footer, 0)
    offset, length, _ = _handle(index, footer, at)
    for _, value in _block(index, content, offset, length):
        offset, length, _ = _handle(index, value, 0)
        yield from _block(index, content, offset, length)


def _block(index: RawFile, content: bytes, offset: int, length: int) -> Iterator[tuple[bytes, bytes]]:
    if offset + length + _TRAILER > len(content) - _FOOTER or length < 4:
        index.refuse(f"a block of bytes {offset} to {offset + length}")
    block, kind = content[offset : offset + length], content[offset + length]
    if kind != 0:
        index.refuse(f"a block is compressed ({kind}), which TensorFlow does not write")
    stored = int.from_bytes(content[offset + length + 1 : offset + length + _TRAILER], "little")
    if stored != masked_crc(content[offset : offset + length + 1]):
        index.refuse(f"the block at byte {offset} is not what its checksum says")
    restarts = int.from_bytes(block[-4:], "little")
    end = length - 4 - 4 * restarts
    if end < 0:
        index.refuse(f"the block at byte {offset} claims {restarts} restarts")
    at, key = 0, b""
    while at < end:
        shared, at = _varint(index, block, at)
        own, at = _varint(index, block, at)
        size, at = _varint(index, block, at)
        if shared > len(key) or at + own + size > end:
            index.refuse(f"an entry of the block at byte {offset} is longer than the block")
        key = key[:shared] + block[at : at + own]
        yield key, block[at + own : at + own + size]
        at += own + size


def _handle(index: RawFile, data: bytes, at: int) -> tuple[int, int, int]:
    offset, at = _varint(index, data, at)
    length, at = _varint(index, data, at)
    return offset, length, at


def _varint(index: RawFile, data: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while shift < 64 and at < len(data):
        byte = data[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return found, at
    index.refuse("a number in it has no end")


@cache
def _crc_table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ 0x82F63B78 if byte & 1 else byte >> 1  # noqa: PLW2901
        found.append(byte)
    return tuple(found)


def masked_crc(data: bytes) -> int:
    """Returns LevelDB's checksum: CRC-32C, rotated and moved."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


# -- the protocol buffers in it -----------------------------------------------------------------------------------


def _pairs(index: RawFile, data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(index, data, at)
        field, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(index, data, at)
            yield field, value
            continue
        if kind == _BYTES:
            length, at = _varint(index, data, at)
        else:
            length = {_FIXED64: 8, _FIXED32: 4}.get(kind, len(data) + 1)
        if at + length > len(data):
            index.refuse("an entry in it is cut")
        yield field, data[at : at + length]
        at += length


def _fields(index: RawFile, data: bytes) -> dict[int, int | bytes]:
    return dict(_pairs(index, data))


def _number(value: int | bytes) -> int:
    return value if isinstance(value, int) else -1


def _shape(index: RawFile, data: int | bytes) -> list[int]:
    if isinstance(data, int):
        index.refuse("a shape in it is a number")
    found = []
    for field, dimension in _pairs(index, data):
        if field == 2 and isinstance(dimension, bytes):
            size = _number(_fields(index, dimension).get(1, 0))
            found.append(size if size < 1 << 63 else -1)
    return found


def _text(index: RawFile, key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        index.refuse(f"the name {key[:40]!r} is not text")


# -- writing ------------------------------------------------------------------------------------------------------


def write(part: Path, content: Content) -> list[str]:
    """Writes a directory with the bundle `ckpt-1`, which `tf.train.load_checkpoint` reads by the tensors' names.
    TensorFlow takes all of them at once, so they all are in memory."""
    import tensorflow as tf

    known = set(_DTYPES.values())
    for name, tensor in content.tensors.items():
        if tensor.dtype not in known:
            raise UsageError(f"{name}: TensorFlow has no {tensor.dtype}", subject=name, hint="convert it: --dtype")
    part.mkdir()
    names = list(content.tensors)
    values = [tf.convert_to_tensor(content.tensors[name].read()) for name in names]
    tf.raw_ops.SaveV2(
        prefix=str(part / "ckpt-1"), tensor_names=names, shape_and_slices=[""] * len(names), tensors=values
    )
    (part / "checkpoint").write_text('model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n')
    content.progress(sum(tensor.nbytes for tensor in content.tensors.values()))
    return []
