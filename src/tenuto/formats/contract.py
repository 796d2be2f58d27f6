"""The contract between Tenuto and the formats of other tools.

A format is one module of this package (or of another one: see `registry`), imported when a file of it is met. It has

- `read(path) -> Reader`, where it can be read: opens the checkpoint and describes it, without reading its tensors and
  without running or importing anything that the file names. What a file claims is checked before memory is taken by it:
  CorruptionError names the file and what is wrong (`refuse`), Unserialisable what has no representation here.
- `write(part, content) -> list[str]`, where it can be written: makes the file or directory `part`, which does not exist
  yet, from `content`, a tensor at a time and block by block. Returns what could not be represented, in words. Raises
  UsageError before it writes anything, where the format cannot hold a tensor at all. The caller flushes the result and
  gives it its name.

A tensor is lazy in both directions: `Tensor.read_into` gives any range of its row-major bytes, `read` any box of its
items. Nobody holds more than a few blocks (`BLOCK_BYTES`) of one.
"""

from __future__ import annotations

import errno
import io
import os
import reprlib
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn

import numpy as np

from tenuto.errors import CorruptionError, StoreError, UsageError, typed
from tenuto.model.leaf import Box, dtype, escape, join
from tenuto.record import record
from tenuto.regular_files import opener, strange
from tenuto.state.contract import Buffer
from tenuto.state.numpy_arrays import array_dtype

BLOCK_BYTES: Final = 8 << 20
"""Bytes that a writer takes of a tensor at once."""
SHARD_BYTES: Final = 5_000_000_000
MOST_AT_ONCE: Final = 64 << 20
"""Bytes of a directory inside a file, as zip archives have one: it becomes objects of about ten times its size."""
_MOST_BYTES: Final = 2**63 - 1
_LONGEST: Final = 1000
"""Characters of an error: a name in a file may have millions."""

Array = np.ndarray[Any, Any]


class Tensor(ABC):
    """A tensor of which nothing has been read yet.

    dtype: the name that torch has for the element type, as in `tenuto.model.leaf.DTYPES`; types of numpy alone are
    "numpy:<U8". shape: of all of it. Its bytes are little-endian and row-major, whatever the file has. made_by: the
    kind of array that it comes back as (`Reader.made_by` sets it).
    """

    __slots__ = ("dtype", "made_by", "shape")

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self.made_by = "torch"

    @property
    def itemsize(self) -> int:
        return dtype(self.dtype).size

    @property
    def nbytes(self) -> int:
        return self.itemsize * prod(self.shape)

    @abstractmethod
    def read_into(self, out: Buffer, start: int = 0) -> None:
        """Fills `out` with the bytes from `start` on. Both `start` and the length of `out` are multiples of the item
        size, and lie within the tensor. May be called from several threads.

        Raises CorruptionError where the file does not have these bytes.
        """

    def stored(self) -> Tensor:
        """Returns the tensor as it lies in a file, where this one stands for it and has not looked there yet."""
        return self

    def read(self, box: Box | None = None) -> Array:
        """Returns the items of a box (all, without one) as an array of its own, of the type that numpy or ml_dtypes has
        for them; where neither has one, of opaque items (`V2`)."""
        box = Box.whole(self.shape) if box is None else box
        out = np.empty(box.shape, array_dtype(self.dtype))
        if out.size:
            data = out.reshape(-1).view(np.uint8)
            at = 0
            for first, count in _runs(self.shape, box):
                self.read_into(data[at : at + count * self.itemsize], first * self.itemsize)
                at += count * self.itemsize
        return out

    def blocks(self, nbytes: int = BLOCK_BYTES) -> Iterator[Buffer]:
        """Yields its bytes from the first to the last, in blocks of about `nbytes`. Each is valid until the next."""
        step = max(nbytes // max(self.itemsize, 1), 1) * self.itemsize
        total = self.nbytes
        buffer = np.empty(min(step, total), np.uint8)
        for start in range(0, total, step or 1):
            block = buffer[: min(step, total - start)]
            self.read_into(block, start)
            yield block

    def __repr__(self) -> str:
        return f"<tensor: {self.dtype} {list(self.shape)}>"


class RawFile:
    """A file of which ranges are read by position, from any thread. Closed by the reader that opened it."""

    def __init__(self, path: Path, *, what: str) -> None:
        """`what`: the format's name in errors. Raises StoreError where the file cannot be opened, or is a pipe, a
        socket or a device."""
        self.path = path
        self.what = what
        try:
            self._descriptor: int | None = opener(os.fspath(path), os.O_RDONLY)
            self.length = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise StoreError(
                f"{path} cannot be read: {error.strerror or error}", subject=str(path), hint=typed("ls", "-l", path)
            ) from error

    def read(self, start: int, length: int) -> bytes:
        """Returns these bytes. CorruptionError where the file ends before, without memory taken for them."""
        if start < 0 or length < 0 or start + length > self.length:
            self.refuse(f"bytes {start} to {start + length} are claimed, and the file has {self.length}")
        out = np.empty(length, np.uint8)
        self.read_into(out, start)
        return out.tobytes()

    def read_into(self, out: Buffer, start: int) -> None:
        if self._descriptor is None:
            raise UsageError(f"{self.path} is closed", subject=str(self.path), hint="read inside `with …read(path)`")
        view, done = out.data, 0
        try:
            while done < len(view):
                got = os.preadv(self._descriptor, [view[done:]], start + done)
                if not got:
                    self.refuse(f"it ends at byte {start + done}, inside a tensor")
                done += got
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be read at byte {start + done}: {error.strerror or error}",
                subject=str(self.path),
                hint="look at the kernel log (`dmesg`) and at the disk",
            ) from error

    def refuse(self, message: str) -> NoReturn:
        refuse(self.path, self.what, message)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class Section(io.RawIOBase):
    """Some bytes of a file, as a file of its own for whoever reads only such: `zipfile`, h5py."""

    def __init__(self, raw: RawFile, start: int = 0, length: int | None = None) -> None:
        self._raw, self._start, self._at = raw, start, 0
        self._length = raw.length - start if length is None else length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, out: Any) -> int:
        view = memoryview(out).cast("B")
        count = max(min(len(view), self._length - self._at), 0)
        if count:
            self._raw.read_into(np.frombuffer(view[:count], np.uint8), self._start + self._at)
        self._at += count
        return count

    def read(self, size: int | None = -1) -> bytes:
        """Takes no memory for bytes that are not there, whatever is asked for, nor for more than belong at once."""
        left = max(self._length - self._at, 0)
        count = left if size is None or size < 0 else min(size, left)
        if count > MOST_AT_ONCE:
            self._raw.refuse(f"a directory of {count} bytes is claimed, where at most {MOST_AT_ONCE} belong")
        found = self._raw.read(self._start + self._at, count) if count else b""
        self._at += count
        return found


class RawTensor(Tensor):
    """A tensor whose row-major bytes lie in a file as they are, from byte `offset` on."""

    __slots__ = ("file", "offset")

    def __init__(self, file: RawFile, offset: int, dtype: str, shape: Sequence[int], *, name: str) -> None:
        """Raises CorruptionError, naming the tensor, where its bytes do not lie within the file."""
        super().__init__(dtype, shape)
        self.file = file
        self.offset = offset
        check_shape(file.path, file.what, name, shape)
        if offset < 0 or offset + self.nbytes > file.length:
            file.refuse(f"{name!r} is bytes {offset} to {offset + self.nbytes}, and the file has {file.length}")

    def read_into(self, out: Buffer, start: int = 0) -> None:
        self.file.read_into(out, self.offset + start)


class SummedTensor(RawTensor):
    """A tensor of whose bytes the file has a checksum. It is compared where they are read from the first to the last,
    as conversions do; a read of a part does not look at the others."""

    __slots__ = ("_at", "_crc", "_first", "_lock", "_name", "_now", "_sum")

    def __init__(
        self,
        file: RawFile,
        offset: int,
        dtype: str,
        shape: Sequence[int],
        *,
        name: str,
        crc: int,
        first: int = 0,
        sum: Callable[[Any, int], int] = zlib.crc32,
    ) -> None:
        """`crc`: what `sum` makes of all bytes, begun with `first` (of what lies before them)."""
        super().__init__(file, offset, dtype, shape, name=name)
        self._crc, self._first, self._sum, self._name = crc, first, sum, name
        self._at, self._now = 0, first
        self._lock = threading.Lock()

    def read_into(self, out: Buffer, start: int = 0) -> None:
        super().read_into(out, start)
        with self._lock:
            if start == 0:
                self._at, self._now = 0, self._first
            if start != self._at:
                return
            self._now = self._sum(out, self._now)
            self._at += len(out)
            if self._at == self.nbytes and self._now != self._crc:
                self.file.refuse(f"{self._name!r} is not what its checksum says")


class ArrayTensor(Tensor):
    """A tensor that is in memory: a small one, or one that a library has mapped."""

    __slots__ = ("_data",)

    def __init__(self, data: Buffer, dtype: str, shape: Sequence[int]) -> None:
        """`data`: its row-major bytes."""
        super().__init__(dtype, shape)
        self._data = data

    def read_into(self, out: Buffer, start: int = 0) -> None:
        np.copyto(out, self._data[start : start + len(out)])


class PiecedTensor(Tensor):
    """A tensor that is stored as boxes, each a tensor of its own."""

    __slots__ = ("pieces",)

    def __init__(
        self,
        dtype: str,
        shape: Sequence[int],
        pieces: Sequence[tuple[Box, Tensor]],
        *,
        path: Path,
        what: str,
        name: str,
    ) -> None:
        """Raises CorruptionError where the pieces do not cover the tensor exactly once, or do not fit it."""
        super().__init__(dtype, shape)
        check_shape(path, what, name, shape)
        whole = Box.whole(self.shape)
        self.pieces = [(box, tensor) for box, tensor in pieces if not box.empty]
        for box, tensor in self.pieces:
            if len(box.shape) != len(self.shape) or not whole.contains(box):
                refuse(path, what, f"{name!r} of shape {list(self.shape)} has a piece at {box}")
            if tensor.dtype != self.dtype or tensor.shape != box.shape:
                refuse(path, what, f"{name!r} is {self.dtype}, and its piece at {box} is {tensor!r}")
        if sum(box.size for box, _ in self.pieces) != whole.size or _overlap([box for box, _ in self.pieces]):
            refuse(path, what, f"the pieces of {name!r} overlap, or leave some of {list(self.shape)} out")

    def read_into(self, out: Buffer, start: int = 0) -> None:
        items = np.dtype(f"V{self.itemsize}")
        at = 0
        for box in run_boxes(self.shape, start // self.itemsize, (start + len(out)) // self.itemsize):
            nbytes = box.size * self.itemsize
            target = np.ndarray(box.shape, items, out[at : at + nbytes])
            for place, piece in self.pieces:
                common = place.intersection(box)
                if common is None:
                    continue
                if common == box:  # in one piece, straight to its place
                    into = common.relative_to(place)
                    if _is_run(place.shape, into):
                        first = next(_runs(place.shape, into))[0]
                        piece.read_into(out[at : at + nbytes], first * self.itemsize)
                        continue
                target[common.relative_to(box).slices] = piece.read(common.relative_to(place)).view(items)
            at += nbytes


@dataclass(slots=True)
class Reader:
    """A foreign checkpoint, open for reading. A context manager.

    tree: what it holds: nested dicts and lists of plain values (as `tenuto.save` takes them) and of `Tensor`s.
    kind: "weights": `tree` is one flat dict of a model's tensors; "state": it is a training state with its own nesting.
    made_by: which kind of arrays the tensors were: they come back as such.
    step, metrics: where the format tells.
    remarks: what the file holds that has no representation, in words, each with its path.
    files: what it is read from.
    """

    format: str
    path: Path
    tree: Any
    kind: Literal["weights", "state"] = "state"
    made_by: Literal["torch", "jax", "numpy"] = "torch"
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    files: Sequence[Path] = ()
    on_close: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.made_by != "torch":  # as a Tensor is from the beginning
            for _, tensor in leaves(self.tree):
                tensor.made_by = self.made_by

    def tensors(self) -> dict[str, Tensor]:
        """Returns its tensors by path: names joined by `/`, in which a `/` of a name is `~1`, as in a Tenuto
        checkpoint. One of `kind` "weights" has its tensors' own names as keys of `tree`."""
        return dict(leaves(self.tree))

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for _, tensor in leaves(self.tree))

    def close(self) -> None:
        self.on_close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@record
class Content:
    """What a writer writes.

    tensors: by name, in the order in which they are to be read.
    tree: the nested dicts and lists that they come from, plain values too, for formats that hold such.
    metadata: words about the origin, for formats that have room for them.
    shard_bytes: the most that one file is to hold, where a format has several.
    progress: to be called with the number of bytes that have been written, after each block.
    """

    tensors: Mapping[str, Tensor]
    tree: Any = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    shard_bytes: int = SHARD_BYTES
    progress: Callable[[int], None] = lambda _: None


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of nested dicts, lists and tuples, each with its path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, join(path, escape(key) if isinstance(key, str) else f"#i:{key}"))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from leaves(value, join(path, str(number)))


def refuse(path: Path, what: str, message: str) -> NoReturn:
    """Raises CorruptionError about a foreign file."""
    raise CorruptionError(
        f"{path}: {message if len(message) <= _LONGEST else f'{message[:_LONGEST]}…'}",
        subject=str(path),
        object=path.name,
        hint=f"the file is damaged, or not a {what}; nothing was taken from it",
    ) from None


def is_there(path: Path, what: str) -> bool:
    """Returns whether there is a file to read. Refuses a pipe, a socket or a device, which a file of the format may not
    be."""
    if path.is_file():
        return True
    if path.exists() and (kind := strange(path.stat().st_mode)) is not None:
        refuse(path, what, f"it is {kind}, not a regular file")
    return False


def check_shape(path: Path, what: str, name: str, shape: Sequence[int]) -> None:
    """Refuses a shape that is no shape, or that nothing could have stored."""
    if any(type(length) is not int or length < 0 for length in shape) or len(shape) > 64:
        refuse(path, what, f"{name!r} has the shape {reprlib.repr(shape)}")
    nonzero = 1
    for length in shape:
        nonzero *= max(length, 1)
        if nonzero > _MOST_BYTES // 16:
            refuse(path, what, f"{name!r} has the shape {list(shape)}, which is more than any file holds")


# -- runs and boxes ------------------------------------------------------------------------------------------------


def run_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yields boxes whose items, one box after the other, are items `start..stop-1` of a tensor in row-major order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        for box in run_boxes(shape[1:], start - first * row, stop - first * row):
            yield Box((first, *box.offsets), (1, *box.shape))
        return
    if start % row:
        yield from run_boxes(shape, start, (first + 1) * row)
        first += 1
    whole = stop // row
    if first < whole:
        yield Box((first, *(0,) * (len(shape) - 1)), (whole - first, *shape[1:]))
    if stop % row:
        yield from run_boxes(shape, whole * row, stop)


def _runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yields the first item and the number of items of each run of neighbours that a box is in a tensor."""
    inner = len(shape)
    count = 1
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
        count *= shape[inner]
    if inner:
        inner -= 1
        count *= box.shape[inner]
    paces = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    base = sum(offset * pace for offset, pace in zip(box.offsets, paces, strict=True))
    for index in product(*(range(length) for length in box.shape[:inner])):
        yield base + sum(at * pace for at, pace in zip(index, paces[:inner], strict=True)), count


def _is_run(shape: Sequence[int], box: Box) -> bool:
    return sum(1 for _ in zip(_runs(shape, box), range(2), strict=False)) == 1


def _overlap(boxes: Sequence[Box]) -> bool:
    """Returns whether two boxes, none of them empty, have an item in common: a sweep along the first axis."""
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda one: one.offsets):
        if not box.shape:
            if open_boxes:
                return True
        else:
            open_boxes = [one for one in open_boxes if one.offsets[0] + one.shape[0] > box.offsets[0]]
        if any(one.intersection(box) is not None for one in open_boxes):
            return True
        open_boxes.append(box)
    return False
