"""Directories of `torch.distributed.checkpoint` (DCP): `.metadata`, which is a pickle, and `*.distcp`.

Each tensor is saved in boxes, each box as a small archive of `torch.save` somewhere in one of the files, with its
values as they are. What is no tensor is such an archive too. `layout` also serves adoption in place, which needs to
know where the bytes of each box lie.

Megatron's `torch_dist` is such a directory with `metadata.json`, which says so, and `common.pt`, with what every rank
has alike.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from tenuto.errors import Unserialisable
from tenuto.formats.contract import PiecedTensor, RawFile, Reader, Tensor, check_shape, is_there, refuse
from tenuto.formats.pickles import PLAIN, Constant, Known, Record, read_as_record, unpickle
from tenuto.formats.torch_file import DTYPE_NAMES, Archive, unknown
from tenuto.model.leaf import Box
from tenuto.record import record
from tenuto.state.contract import Buffer

WHAT: Final = "directory of torch.distributed.checkpoint"
METADATA: Final = ".metadata"
_MEGATRON: Final = "metadata.json"
_COMMON: Final = "common.pt"
MAX_DEPTH: Final = 90

_CLASSES: Final = (
    "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata MetadataIndex "
    "StorageMeta"
)


def _known() -> Known:
    module = "torch.distributed.checkpoint"
    found = {**PLAIN, **DTYPE_NAMES}
    found |= {f"{module}.metadata {name}": read_as_record(name) for name in _CLASSES.split()}
    found[f"{module}.metadata _MEM_FORMAT_ENCODING"] = _ignored
    found[f"{module}.filesystem _StorageInfo"] = read_as_record("_StorageInfo")
    found |= {"torch Size": tuple, "torch.serialization _get_layout": _ignored, "torch strided": Constant("strided")}
    found["megatron.core.dist_checkpointing.strategies.torch MCoreMetadata"] = read_as_record("Metadata")  # up to 0.15
    for paths in ("pathlib", "pathlib._local"):  # of a checkpoint_id that was a path
        found |= {f"{paths} PosixPath": _ignored, f"{paths} WindowsPath": _ignored}
    return found


def _ignored(*_: Any) -> Constant:
    return Constant("")


@record
class Piece:
    """Bytes of one archive in a file of the checkpoint."""

    file: str
    offset: int
    length: int


@record
class TensorLayout:
    """A tensor, and the pieces that its boxes are stored in."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Piece], ...]


class Files:
    """The files of a directory, each opened when it is first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, RawFile] = {}
        self._lock = threading.Lock()

    def file(self, name: str) -> RawFile:
        with self._lock:
            if name not in self._open:
                self._open[name] = RawFile(self.path / name, what=WHAT)
            return self._open[name]

    def archive(self, piece: Piece) -> Archive:
        return Archive(self.file(piece.file), piece.offset, piece.length)

    def tensor(self, piece: Piece, dtype: str, shape: tuple[int, ...], name: str) -> Tensor:
        """Returns the tensor that a piece holds. Refuses one that `.metadata` says otherwise about."""
        file = self.file(piece.file)
        found, _ = self.archive(piece).load()
        if not isinstance(found, Tensor) or (found.dtype, found.shape) != (dtype, shape):
            file.refuse(f"at byte {piece.offset} is {found!r:.80}, where {name!r} has {dtype} {list(shape)}")
        return found

    def close(self) -> None:
        with self._lock:
            for file in self._open.values():
                file.close()


class _LazyPiece(Tensor):
    """A box of a tensor, whose archive is looked at when it is first read."""

    __slots__ = ("_files", "_found", "_name", "_piece")

    def __init__(self, files: Files, piece: Piece, dtype: str, shape: tuple[int, ...], name: str) -> None:
        super().__init__(dtype, shape)
        self._files, self._piece, self._name = files, piece, name
        self._found: Tensor | None = None

    def stored(self) -> Tensor:
        if self._found is None:
            self._found = self._files.tensor(self._piece, self.dtype, self.shape, self._name)
        return self._found

    def read_into(self, out: Buffer, start: int = 0) -> None:
        self.stored().read_into(out, start)


@record
class Layout:
    """What `.metadata` says. `names`: each entry's keys in the state that was saved, by DCP's own name of it."""

    tensors: Mapping[str, TensorLayout]
    values: Mapping[str, Piece]
    names: Mapping[str, tuple[str | int, ...]]


def layout(path: Path) -> Layout:
    """Reads `.metadata`. CorruptionError where it contradicts itself, Unserialisable for a class of somebody else's."""
    file = RawFile(path / METADATA, what=WHAT)
    try:
        data = file.read(0, file.length)
        found = unpickle(data, _known(), file.refuse)
        if found.unknown:
            raise unknown(file, min(found.unknown), "")
        return _Decoder(file).layout(found.value)
    finally:
        file.close()


class _Decoder:
    def __init__(self, file: RawFile) -> None:
        self._file = file

    def _refuse(self, message: str) -> NoReturn:
        self._file.refuse(message)

    def _fields(self, value: Any, name: str) -> dict[Any, Any]:
        if not isinstance(value, Record) or value.name != name or not isinstance(value.state, dict):
            self._refuse(f"it has no {name} where one belongs")
        return value.state

    def _sizes(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, tuple):
            self._refuse(f"{what[:80]} is not a shape")
        check_shape(self._file.path, WHAT, what, value)
        return value

    def layout(self, value: Any) -> Layout:
        top = self._fields(value, "Metadata")
        entries, storage = top.get("state_dict_metadata"), top.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            self._refuse(
                "it has no table of what was saved, or of where: it was not written by torch's FileSystemWriter"
            )
        places: dict[tuple[str, tuple[int, ...] | None], Piece] = {}
        for key, info in storage.items():
            index = self._fields(key, "MetadataIndex")
            if not isinstance(index.get("fqn"), str):
                self._refuse("it has a place of something without a name")
            offset = index.get("offset")
            at = None if offset is None else self._sizes(offset, str(index.get("fqn")))
            places[str(index.get("fqn")), at] = self._piece(info)
        tensors: dict[str, TensorLayout] = {}
        values: dict[str, Piece] = {}
        for name, entry in entries.items():
            if not isinstance(name, str) or not isinstance(entry, Record):
                self._refuse(f"it has an entry under {name[:80] if isinstance(name, str) else 'no text'!r}")
            if entry.name == "BytesStorageMetadata":
                values[name] = self._place(places, name, None)
            else:
                tensors[name] = self._tensor(name, entry, places)
        return Layout(tensors, values, self._names(top.get("planner_data"), [*tensors, *values]))

    def _tensor(
        self, name: str, entry: Record, places: Mapping[tuple[str, tuple[int, ...] | None], Piece]
    ) -> TensorLayout:
        fields = self._fields(entry, "TensorStorageMetadata")
        properties, chunks = fields.get("properties"), fields.get("chunks")
        kind = properties.state[0] if isinstance(properties, Record) and isinstance(properties.state, tuple) else None
        if not isinstance(kind, Constant) or not kind.text.startswith("torch.") or not isinstance(chunks, list):
            self._refuse(f"{name!r} has no element type, or no parts")
        shape = self._sizes(fields.get("size"), name)
        boxes = []
        for chunk in chunks:
            inner = self._fields(chunk, "ChunkStorageMetadata")
            offsets, sizes = self._sizes(inner.get("offsets"), name), self._sizes(inner.get("sizes"), name)
            if len(offsets) != len(sizes):
                self._refuse(f"{name!r} has a part at {list(offsets)} of shape {list(sizes)}")
            boxes.append((Box(offsets, sizes), self._place(places, name, offsets)))
        return TensorLayout(kind.text.removeprefix("torch."), shape, tuple(boxes))

    def _place(
        self, places: Mapping[tuple[str, tuple[int, ...] | None], Piece], name: str, at: tuple[int, ...] | None
    ) -> Piece:
        if (name, at) not in places:
            self._refuse(f"it does not say where {name!r}{'' if at is None else f' at {list(at)}'} lies")
        return places[name, at]

    def _piece(self, value: Any) -> Piece:
        fields = self._fields(value, "_StorageInfo")
        file, offset, length = (fields.get(name) for name in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not file or "/" in file or "\0" in file or file in (".", ".."):
            self._refuse(f"it names {file if isinstance(file, str) else '':.80}, which is not a file of this directory")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            self._refuse(f"it does not say which bytes of {file} it means")
        if fields.get("transform_descriptors"):
            path = self._file.path
            raise Unserialisable(
                f"{path}: its files are compressed or otherwise transformed (by an extension of torch's), which Tenuto "
                "does not read",
                subject=str(path),
                hint="load it with torch, and save it again without the extension",
            )
        return Piece(file, offset, length)

    def _names(self, planned: Any, entries: list[str]) -> dict[str, tuple[str | int, ...]]:
        found: dict[str, tuple[str | int, ...]] = {}
        for name in entries:
            keys = planned.get(name) if isinstance(planned, dict) else None
            if keys is None:
                keys = (name,)
            if (
                not isinstance(keys, tuple)
                or not 1 <= len(keys) <= MAX_DEPTH
                or not all(isinstance(key, str) or (type(key) is int and key >= 0) for key in keys)
            ):
                self._refuse(f"{name!r} is not where any state has an entry")
            found[name] = keys
        return found


class _Level(dict[Any, Any]):
    """A container that is being built, which a dict that was saved as one value is not."""


def nested(values: Mapping[tuple[str | int, ...], Any], path: Path) -> Any:
    """Returns nested dicts and lists with these values, each by its keys. Refuses keys that make no such state."""
    top = _Level()
    for keys, value in values.items():
        at = top
        for key in keys[:-1]:
            at = at.setdefault(key, _Level())
            if not isinstance(at, _Level):
                refuse(path, WHAT, f"it has an entry at {list(keys)!r:.80}, and one above it")
        if keys[-1] in at:
            refuse(path, WHAT, f"it has two entries at {list(keys)!r:.80}")
        at[keys[-1]] = value
    return _built(top, path)


def _built(level: Any, path: Path) -> Any:
    if not isinstance(level, _Level):
        return level
    made = {key: _built(value, path) for key, value in level.items()}
    numbers = [key for key in made if isinstance(key, int)]
    if not numbers:
        return made
    if len(numbers) != len(made) or sorted(numbers) != list(range(len(made))):
        refuse(path, WHAT, f"it has a list with the entries {sorted(map(str, made))[:8]}")
    return [made[number] for number in range(len(made))]


def read(path: Path) -> Reader:
    """Opens a directory of DCP. Values that are no tensors are read at once."""
    found, files, megatron = layout(path), Files(path), _is_megatron(path)
    remarks: list[str] = []
    try:
        values: dict[tuple[str | int, ...], Any] = {}
        for name, tensor in found.tensors.items():
            pieces = [(box, _LazyPiece(files, piece, tensor.dtype, box.shape, name)) for box, piece in tensor.boxes]
            values[found.names[name]] = PiecedTensor(
                tensor.dtype, tensor.shape, pieces, path=path, what=WHAT, name=name
            )
        for name, piece in found.values.items():
            value, said = files.archive(piece).load(loose=megatron)
            values[found.names[name]] = value
            remarks += [f"{name}: {one}" for one in said]
        tree, step = nested(values, path), None
        if megatron:
            tree, step, said = _with_common(files, tree)
            remarks += said
    except BaseException:
        files.close()
        raise
    flat = bool(values) and all(len(keys) == 1 and isinstance(one, Tensor) for keys, one in values.items())
    return Reader(
        format="dcp",
        path=path,
        tree=tree,
        kind="weights" if flat and not megatron else "state",
        step=step,
        remarks=remarks,
        files=[path / METADATA, *sorted({path / p.file for p in _pieces(found)})],
        on_close=files.close,
    )


def _is_megatron(path: Path) -> bool:
    """Whether Megatron wrote it. Raises Unserialisable for its older backends."""
    if not is_there(path / _MEGATRON, WHAT):
        return False
    file = RawFile(path / _MEGATRON, what=WHAT)
    try:
        said = json.loads(file.read(0, min(file.length, 1 << 16)))
    except (ValueError, RecursionError):
        refuse(path, WHAT, f"{_MEGATRON} in it is not JSON")
    finally:
        file.close()
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    if backend not in (None, "torch_dist"):
        raise Unserialisable(
            f"{path} was written by Megatron's backend {backend!s:.40}, which Tenuto does not read",
            subject=str(path),
            hint="load it with Megatron, and save it with --ckpt-format torch_dist",
        )
    return backend is not None


def _with_common(files: Files, tree: Any) -> tuple[Any, int | None, list[str]]:
    """Returns the state with what `common.pt` has (under the keys that it has alone), and the iteration. Its arguments
    are objects of Python's own, and are left out by name, as is what only Megatron's classes could read."""
    if not is_there(files.path / _COMMON, WHAT):
        return tree, None, []
    common, said = Archive(files.file(_COMMON)).load(loose=True)
    if not isinstance(common, dict) or not isinstance(tree, dict):
        refuse(files.path, WHAT, f"{_COMMON} in it holds no table of a training's state")
    step = common.get("iteration")
    merged = {**{key: value for key, value in common.items() if key not in tree and value is not None}, **tree}
    return merged, step if type(step) is int and step >= 0 else None, [f"{_COMMON}: {one}" for one in said]


def _pieces(found: Layout) -> list[Piece]:
    return [*found.values.values(), *(piece for one in found.tensors.values() for _, piece in one.boxes)]
