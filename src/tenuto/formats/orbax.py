"""Orbax's checkpoints of pytrees, in and out, through Orbax and its storage library, TensorStore.

A path is one item (`_METADATA` lies in it), a step of a CheckpointManager with its items, or the manager's directory,
of which the newest complete step is meant. Tensors are read box by box. Orbax writes from arrays alone: what is
exported goes through one file beside the result, mapped into memory, so that it need not fit.

Source: orbax-checkpoint 0.12 (`PyTreeCheckpointHandler`), whose own code writes and describes the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tenuto.errors import CorruptionError, MissingExtra, UsageError, install
from tenuto.formats.contract import Array, Content, Reader, Tensor, check_shape, is_there, refuse, run_boxes
from tenuto.formats.safetensors import read_json
from tenuto.model.leaf import Box, unescape
from tenuto.state.contract import Buffer
from tenuto.state.numpy_arrays import array_dtype, dtype_name

_WHAT: Final = "checkpoint of Orbax"
_METADATA: Final = "_METADATA"
_COMMITTED: Final = ("commit_success.txt", "_CHECKPOINT_METADATA")
_MOST_TEXT: Final = 256 << 20
"""Bytes of the texts of one item: more is no checkpoint."""
_CONCURRENT_GB: Final = 1
ALIGNMENT: Final = 64


class OrbaxTensor(Tensor):
    """A tensor in TensorStore."""

    __slots__ = ("_name", "_path", "_store")

    def __init__(self, path: Path, name: str, store: Any, dtype: str) -> None:
        check_shape(path, _WHAT, name, store.shape)
        super().__init__(dtype, store.shape)
        self._path, self._name, self._store = path, name, store

    def read(self, box: Box | None = None) -> Array:
        box = Box.whole(self.shape) if box is None else box
        try:
            found = self._store[box.slices].read().result() if box.slices else self._store.read().result()
        except ValueError as error:
            raise CorruptionError(
                f"{self._path}: {self._name!r} cannot be read: {error}", subject=str(self._path), object=self._name
            ) from error
        return np.asarray(found).reshape(box.shape)

    def read_into(self, out: Buffer, start: int = 0) -> None:
        at = 0
        for box in run_boxes(self.shape, start // self.itemsize, (start + len(out)) // self.itemsize):
            nbytes = box.size * self.itemsize
            out[at : at + nbytes] = np.ascontiguousarray(self.read(box)).reshape(-1).view(np.uint8)
            at += nbytes


def _orbax(path: Path) -> Any:
    """Imports Orbax, and with it TensorStore. Raises MissingExtra without it."""
    try:
        import orbax.checkpoint
        import tensorstore  # noqa: F401 - a dependency of Orbax
    except ImportError as error:
        raise MissingExtra(
            f"a {_WHAT} needs {error.name}, which is not installed", subject=str(path), hint=install("orbax")
        ) from error
    return orbax.checkpoint


# -- read


def read(path: Path) -> Reader:
    step_path, remarks = _step_of(path)
    step = int(step_path.name) if step_path.name.isdecimal() else None
    if (step_path / _METADATA).is_file():
        tree: Any = _item(step_path, remarks)
        files = [step_path / _METADATA]
    else:
        items = [one.parent for one in sorted(step_path.glob(f"*/{_METADATA}"))]
        if not items:
            refuse(path, _WHAT, "no item of it is a pytree")
        found = {one.name: _item(one, remarks) for one in items}
        tree = found["default"] if [*found] == ["default"] else found
        files = [one / _METADATA for one in items]
    return Reader("orbax", path, tree, made_by="jax", step=step, remarks=remarks, files=files)


def _step_of(path: Path) -> tuple[Path, list[str]]:
    """Returns the directory of the step that a path means, and what there is to say about it."""
    if (path / _METADATA).is_file() or any(path.glob(f"*/{_METADATA}")):
        if not any((path / name).exists() for name in _COMMITTED):
            refuse(path, _WHAT, "it is not complete: Orbax has not marked it as committed")
        return path, []
    steps = [
        one for one in path.iterdir() if one.name.isdecimal() and any((one / name).exists() for name in _COMMITTED)
    ]
    if not steps:
        refuse(path, _WHAT, "no step in it is complete")
    newest = max(steps, key=lambda one: int(one.name))
    more = f", the newest of {len(steps)}" if len(steps) > 1 else ""
    return newest, [f"step {newest.name}{more}"] if more else []


def _item(path: Path, remarks: list[str]) -> Any:
    """Returns the tree of one pytree, its tensors not read."""
    ocp = _orbax(path)
    for above, _, names in os.walk(path):  # Orbax and TensorStore open them by themselves
        for name in names:
            is_there(Path(above, name), _WHAT)
    described = read_json(path / _METADATA, _WHAT, _MOST_TEXT)
    if not isinstance(described, dict):
        refuse(path / _METADATA, _WHAT, "it is not a JSON object")
    try:
        found = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).metadata(path.absolute())
        about = getattr(found, "item_metadata", found)
        tree, zarr3 = about.tree, bool(about.use_zarr3)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        refuse(path, _WHAT, f"its description cannot be read: {type(error).__name__}: {error}")
    texts = _texts(path)
    ocdbt = bool(described.get("use_ocdbt", (path / "manifest.ocdbt").exists()))

    def value(about: Any) -> Any:
        kind = type(about).__name__
        if kind == "StringMetadata":
            return texts[about.name]
        if kind not in ("ArrayMetadata", "ScalarMetadata"):
            remarks.append(f"{getattr(about, 'name', '')}: a {kind} has no representation")
            return None
        tensor = _tensor(path, about, zarr3=zarr3, ocdbt=ocdbt)
        if kind != "ScalarMetadata":
            return tensor
        if tensor.shape:
            refuse(path, _WHAT, f"{about.name!r} is a single value, and has the shape {list(tensor.shape)}")
        return tensor.read().item()

    return _plain(tree, value)


def _plain(tree: Any, value: Any) -> Any:
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: _plain(inner, value) for key, inner in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(inner, value) for inner in tree]
    return value(tree)


def _texts(path: Path) -> dict[str, str]:
    file = path / "_strings.json"
    if not file.exists():
        return {}
    found = read_json(file, _WHAT, _MOST_TEXT)
    if not isinstance(found, dict):
        refuse(file, _WHAT, "it is not a JSON object")
    return {str(name): str(text) for name, text in found.items()}


def _tensor(path: Path, about: Any, *, zarr3: bool, ocdbt: bool) -> OrbaxTensor:
    import tensorstore as ts

    base = path.absolute().as_posix()
    name = str(about.name)
    if ocdbt:
        kvstore: Any = {"driver": "ocdbt", "base": f"file://{base}", "path": f"{name}/"}
    elif "/" in name or name.startswith(".."):
        refuse(path, _WHAT, f"it has a tensor {name!r} outside of its directory")
    else:
        kvstore = {"driver": "file", "path": f"{base}/{name}/"}
    try:
        store = ts.open({"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore}, open=True).result()
    except ValueError as error:
        refuse(path, _WHAT, f"{name!r} cannot be opened: {error}")
    if about.shape is not None and tuple(about.shape) != tuple(store.shape):
        refuse(path, _WHAT, f"{name!r} is described as {list(about.shape)}, and is {list(store.shape)}")
    return OrbaxTensor(path, name, store, dtype_name(np.dtype(store.dtype.numpy_dtype), name))


# -- write


def write(part: Path, content: Content) -> list[str]:
    """Writes one item, as `StandardCheckpointer` would; names are nested at each `/`."""
    ocp = _orbax(part)
    strange = [name for name, tensor in content.tensors.items() if tensor.dtype.startswith("numpy:")]
    if strange:
        kind = content.tensors[strange[0]].dtype
        raise UsageError(f"Orbax has no type for {strange[0]!r}, {kind}", subject=strange[0], hint="--exclude it")
    tensors = {name: tensor for name, tensor in content.tensors.items() if tensor.nbytes}
    sizes = [tensor.nbytes for tensor in tensors.values()]
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    spool = part.with_name(part.name + ".spool")
    try:
        mapped = np.memmap(spool, np.uint8, "w+", shape=max(starts[-1], 1))
        arrays = _spooled(tensors, mapped, starts, content.progress)
        handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=_CONCURRENT_GB)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(part.absolute(), args=ocp.args.PyTreeSave(_nested(arrays)))
    finally:
        spool.unlink(missing_ok=True)
    empty = [name for name in content.tensors if name not in tensors]
    return [f"{name} has no elements, and Orbax keeps no such array: left out" for name in empty]


def _spooled(
    tensors: Mapping[str, Tensor], mapped: Array, starts: list[int], progress: Callable[[int], None]
) -> dict[str, Array]:
    found, done = {}, 0
    for (name, tensor), start in zip(tensors.items(), starts, strict=False):
        at = start
        for block in tensor.blocks():
            mapped[at : at + len(block)] = block
            at += len(block)
            done += len(block)
            progress(done)
        found[name] = np.ndarray(tensor.shape, array_dtype(tensor.dtype), mapped[start:at])
    return found


def _nested(arrays: Mapping[str, Array]) -> Any:
    """Returns nested dicts, and lists where all names of a level are positions."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        at = tree
        *above, last = map(unescape, name.split("/"))
        for key in above:
            at = at.setdefault(key, {})
        if not isinstance(at, dict) or last in at:
            raise UsageError(f"{name!r} is both a tensor and a place of others", subject=name, hint="--rename it")
        at[last] = array
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    made = {key: _with_lists(inner) for key, inner in tree.items()}
    positions = sorted(made, key=lambda key: (len(key), key))
    return [made[key] for key in positions] if made and positions == [*map(str, range(len(made)))] else made
