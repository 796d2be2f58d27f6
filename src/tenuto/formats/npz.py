"""numpy's archives: a zip file with an array in each member.

Arrays of objects are pickles, and refused. Those that are not compressed are read in place.

Source: numpy's `numpy.lib.format`.
"""

from __future__ import annotations

import ast
import io
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np

from tenuto.errors import Unserialisable, UsageError
from tenuto.formats.contract import Content, RawFile, Reader, SummedTensor, Tensor
from tenuto.formats.zip_members import Archive, DeflatedTensor
from tenuto.state.contract import Buffer
from tenuto.state.numpy_arrays import array_dtype, dtype_name, has_type

_MOST_HEADER: Final = 10_000
_LENGTHS: Final = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}
"""Bytes of the header's length, by version."""
_DESCR: Final = re.compile(r"[<>=|]?[?bBiufcSUVmMO][0-9]{0,9}(\[[0-9a-zA-Z]{1,9}\])?")
_WHAT: Final = "numpy archive"
_SHOWN: Final = 5


def read(path: Path) -> Reader:
    file = RawFile(path, what=_WHAT)
    try:
        archive = Archive(file)
        tree = {}
        for member in archive.members:
            if not member.endswith(".npy"):
                file.refuse(f"it has a member {member!r}, which is not an array")
            tree[member.removesuffix(".npy")] = _tensor(archive, member)
        return Reader("npz", path, tree, kind="weights", made_by="numpy", files=(path,), on_close=archive.close)
    except BaseException:
        file.close()
        raise


def _tensor(archive: Archive, member: str) -> Tensor:
    file = archive.file
    shape, fortran, kind, offset = _header(archive, member)
    if kind.hasobject:
        raise Unserialisable(
            f"{file.path}: {member!r} holds Python objects, which numpy stores as a pickle",
            subject=member,
            hint="loading it would run code: convert it where you trust the file, with numpy.load(allow_pickle=True)",
        )
    swapped = kind.newbyteorder("<") != kind
    name = dtype_name(kind.newbyteorder("<") if swapped else kind, member)
    stored = shape[::-1] if fortran else shape
    found: Tensor
    if archive.members[member].deflated:
        found = DeflatedTensor(archive, member, offset, name, stored)
    else:
        start = archive.members[member].start
        first, crc = zlib.crc32(file.read(start, offset)), archive.members[member].crc
        found = SummedTensor(file, start + offset, name, stored, name=member, crc=crc, first=first)
        if offset + found.nbytes != archive.members[member].length:
            file.refuse(f"{member!r} has {archive.members[member].length - offset} bytes for {found!r}")
    if swapped:
        found = _Swapped(found)
    return _Transposed(found) if fortran and len(shape) > 1 else found


def _header(archive: Archive, member: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Returns shape, whether it is in Fortran's order, type, and where the array's bytes begin.

    Parsed here: numpy's own parser falls back to a tokenizer that fails in ways of its own.
    """
    data, file = archive.head(member, _MOST_HEADER), archive.file
    if data[:6] != b"\x93NUMPY" or data[6:8] not in _LENGTHS:
        file.refuse(f"{member!r} is not an array of a version of numpy's format that is known")
    start = 8 + _LENGTHS[data[6:8]]
    stop = start + int.from_bytes(data[8:start], "little")
    if stop > len(data):
        file.refuse(f"{member!r} has a header of {stop - start} bytes")
    try:
        found = ast.literal_eval(data[start:stop].decode("utf-8").strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        file.refuse(f"{member!r} has a header that is not a dictionary: {type(error).__name__}")
    if not isinstance(found, dict) or found.keys() != {"descr", "fortran_order", "shape"}:
        file.refuse(f"{member!r} has a header without descr, fortran_order and shape, or with more")
    descr, fortran, shape = found["descr"], found["fortran_order"], found["shape"]
    if not isinstance(shape, tuple) or not all(type(length) is int for length in shape) or type(fortran) is not bool:
        file.refuse(f"{member!r} has the shape {shape!r}")
    if isinstance(descr, list):
        raise Unserialisable(
            f"{file.path}: {member!r} has fields", subject=member, hint="save its fields as arrays of their own"
        )
    if not isinstance(descr, str) or not _DESCR.fullmatch(descr):
        file.refuse(f"{member!r} has the type {str(descr)[:60]!r}, which is not known")
    try:
        return shape, fortran, np.dtype(descr), stop
    except (TypeError, ValueError):
        file.refuse(f"{member!r} has the type {descr!r}, which is not known")


class _Swapped(Tensor):
    """A tensor whose file has the other order of bytes."""

    __slots__ = ("_base",)

    def __init__(self, base: Tensor) -> None:
        super().__init__(base.dtype, base.shape)
        self._base = base

    def read_into(self, out: Buffer, start: int = 0) -> None:
        self._base.read_into(out, start)
        items = out.view(array_dtype(self.dtype))
        items.byteswap(inplace=True)


class _Transposed(Tensor):
    """A tensor whose file has the last axis first."""

    __slots__ = ("_base",)

    def __init__(self, base: Tensor) -> None:
        super().__init__(base.dtype, base.shape[::-1])
        self._base = base

    def read_into(self, out: Buffer, start: int = 0) -> None:
        from tenuto.formats.contract import run_boxes
        from tenuto.model.leaf import Box

        items, at = array_dtype(self.dtype), 0
        for box in run_boxes(self.shape, start // self.itemsize, (start + len(out)) // self.itemsize):
            nbytes = box.size * self.itemsize
            found = self._base.read(Box(box.offsets[::-1], box.shape[::-1]))
            np.ndarray(box.shape, items, out[at : at + nbytes])[...] = found.T
            at += nbytes


def write(part: Path, content: Content) -> list[str]:
    opaque = [name for name, tensor in content.tensors.items() if not _lasting(tensor.dtype)]
    for name in content.tensors:
        if not name or "\0" in name:
            raise UsageError(f"a numpy archive has no array called {name!r}", subject=name, hint="rename it: --rename")
    done = 0
    with zipfile.ZipFile(part, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, tensor in content.tensors.items():
            kind = array_dtype(tensor.dtype) if _lasting(tensor.dtype) else np.dtype(f"V{tensor.itemsize}")
            header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": tensor.shape}
            # A fixed time: equal content makes an equal file.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                start = io.BytesIO()
                np.lib.format.write_array_header_1_0(start, header)
                member.write(start.getvalue())
                for block in tensor.blocks():
                    member.write(block.data)
                    done += len(block)
                    content.progress(done)
    remarks = []
    if opaque:
        more = f" and {len(opaque) - _SHOWN} more" if len(opaque) > _SHOWN else ""
        remarks.append(
            f"a numpy archive has no such element type, and holds their bytes: {', '.join(opaque[:_SHOWN])}{more}"
        )
    return remarks


def _lasting(dtype: str) -> bool:
    """Returns whether numpy's format keeps this element type: not those of ml_dtypes."""
    return has_type(dtype) and np.dtype(array_dtype(dtype).str) == array_dtype(dtype)
