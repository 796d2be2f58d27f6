"""Keras's files of weights: `.weights.h5`, and the one inside a `.keras` archive. Read and written by h5py.

Links to other files, virtual and external data are refused: they name what lies elsewhere. A tensor that lies in one
piece is read in place. Of a `.keras` archive the weights alone are taken.

Source: keras/src/saving/saving_lib.py.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final, cast

import h5py
import numpy as np

from tenuto.errors import CorruptionError, UsageError
from tenuto.formats.contract import Content, RawFile, RawTensor, Reader, Section, Tensor, check_shape, refuse, run_boxes
from tenuto.formats.zip_members import Archive
from tenuto.state.contract import Buffer
from tenuto.state.numpy_arrays import array_dtype, dtype_name, has_type

_WHAT: Final = "Keras file"
_INNER: Final = "model.weights.h5"
_DEEPEST: Final = 64
_MOST_OBJECTS: Final = 1_000_000
_BFLOAT16: Final = "bfloat16"


def read(path: Path) -> Reader:
    raw = RawFile(path, what=_WHAT)
    remarks: list[str] = []
    try:
        start, length = 0, raw.length
        if raw.read(0, min(2, raw.length)) == b"PK":
            archive = Archive(raw)
            member = archive.members.get(_INNER)
            if member is None or member.deflated:
                raw.refuse(f"it has no {_INNER} that is stored as it is")
            start, length = member.start, member.length
            remarks.append("config.json and metadata.json, which describe the model and not its weights")
        section = Section(raw, start, length)
        try:
            file = h5py.File(section, "r")
        except (OSError, ValueError, RuntimeError) as error:
            raw.refuse(f"no HDF5 file: {error}")
        try:
            tree = _Walk(raw, start).group(file, "", 0)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            if isinstance(error, CorruptionError):
                raise
            raw.refuse(f"it cannot be read: {error}")
    except BaseException:
        raw.close()
        raise

    def close() -> None:
        file.close()
        raw.close()

    return Reader("keras", path, tree, made_by="numpy", remarks=remarks, files=(path,), on_close=close)


class _Walk:
    """Takes the datasets of a file, and refuses what leads out of it."""

    def __init__(self, raw: RawFile, start: int) -> None:
        self._raw = raw
        self._start = start
        self._lock = threading.Lock()
        self._seen: set[Any] = set()

    def group(self, group: Any, path: str, depth: int) -> dict[str, Any]:
        if depth > _DEEPEST:
            self._raw.refuse(f"{path!r} lies {depth} groups deep")
        found: dict[str, Any] = {}
        for name in group:
            where = f"{path}/{name}" if path else name
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                self._raw.refuse(f"{where!r} is a link to something else ({type(link).__name__})")
            value = group[name]
            identity = h5py.h5o.get_info(value.id).addr
            if identity in self._seen or len(self._seen) > _MOST_OBJECTS:
                self._raw.refuse(f"{where!r} is there twice")
            self._seen.add(identity)
            if isinstance(value, h5py.Group):
                found[name] = self.group(value, where, depth + 1)
            elif isinstance(value, h5py.Dataset):
                found[name] = self._tensor(value, where)
            else:
                self._raw.refuse(f"{where!r} is neither a group nor a dataset")
        return found

    def _tensor(self, dataset: Any, path: str) -> Tensor:
        if dataset.is_virtual or dataset.external:
            self._raw.refuse(f"{path!r} has its data in another file")
        if dataset.shape is None or dataset.dtype.hasobject:
            self._raw.refuse(f"{path!r} is not an array of numbers")
        check_shape(self._raw.path, _WHAT, path, dataset.shape)
        bfloat16 = dataset.attrs.get("dtype") == _BFLOAT16 and dataset.dtype.itemsize == 2
        kind = dataset.dtype.newbyteorder("<")
        name = _BFLOAT16 if bfloat16 else dtype_name(kind, path)
        offset = dataset.id.get_offset()
        if offset is not None and kind == dataset.dtype:
            return RawTensor(self._raw, self._start + offset, name, dataset.shape, name=path)
        stored = dataset.id.get_storage_size()
        if dataset.size and not stored:
            self._raw.refuse(f"{path!r} has a shape and no data")
        return _H5Tensor(dataset, name, self._lock)


class _H5Tensor(Tensor):
    """A tensor in pieces, or compressed: read by h5py."""

    __slots__ = ("_dataset", "_lock")

    def __init__(self, dataset: Any, dtype: str, lock: threading.Lock) -> None:
        super().__init__(dtype, dataset.shape)
        self._dataset = dataset
        self._lock = lock

    def read_into(self, out: Buffer, start: int = 0) -> None:
        kind = self._dataset.dtype.newbyteorder("<")
        at = 0
        for box in run_boxes(self.shape, start // self.itemsize, (start + len(out)) // self.itemsize):
            nbytes = box.size * self.itemsize
            try:
                with self._lock:
                    values = np.ascontiguousarray(self._dataset[box.slices], kind)
            except (OSError, ValueError, RuntimeError) as error:
                refuse(Path(str(self._dataset.name)), _WHAT, f"it cannot be read: {error}")
            np.copyto(out[at : at + nbytes], values.reshape(-1).view(np.uint8))
            at += nbytes


def write(part: Path, content: Content) -> list[str]:
    """Writes a `.weights.h5`: a dataset for each tensor, under its name. Keras's `load_weights` looks for names such as
    `layers/dense/vars/0`."""
    for name, tensor in content.tensors.items():
        if not (has_type(tensor.dtype) and _lasting(tensor.dtype)) and tensor.dtype != _BFLOAT16:
            raise UsageError(f"{name}: an HDF5 file has no {tensor.dtype}", subject=name, hint="convert it: --dtype")
    done = 0
    with h5py.File(part, "x") as file:
        for name, tensor in content.tensors.items():
            kind = np.dtype("V2") if tensor.dtype == _BFLOAT16 else array_dtype(tensor.dtype)
            dataset = file.create_dataset(name.replace("~1", "/"), tensor.shape, kind)
            if tensor.dtype == _BFLOAT16:
                dataset.attrs["dtype"] = _BFLOAT16
            first = 0
            for block in tensor.blocks():
                at = 0
                for box in run_boxes(tensor.shape, first // tensor.itemsize, (first + len(block)) // tensor.itemsize):
                    nbytes = box.size * tensor.itemsize
                    dataset[box.slices] = np.ndarray(box.shape, kind, cast(Any, block[at : at + nbytes]))
                    at += nbytes
                first += len(block)
                done += len(block)
                content.progress(done)
    return []


def _lasting(dtype: str) -> bool:
    return np.dtype(array_dtype(dtype).str) == array_dtype(dtype)
