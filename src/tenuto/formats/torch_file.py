"""Files of `torch.save` (`.pt`, `.pth`, `.bin`, Lightning's `.ckpt`): a zip archive of a pickle and of raw storages.

The pickle is read without running it (`pickles`), the storages lie in the archive as they are and are read in place.
Refused by name: the formats of torch before 1.6, TorchScript, big-endian files, tensor subclasses, sparse and expanded
tensors, conjugate and negative views, storages without a tensor.
"""

from __future__ import annotations

import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from tenuto.errors import Unserialisable, typed
from tenuto.formats.contract import (
    ArrayTensor,
    RawFile,
    RawTensor,
    Reader,
    Section,
    SummedTensor,
    Tensor,
    check_shape,
    run_boxes,
)
from tenuto.formats.pickles import PLAIN, Constant, Known, Record, Unknown, resolved, unpickle
from tenuto.model.leaf import DTYPES, dtype
from tenuto.state.contract import Buffer

WHAT: Final = "file of torch.save"
LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
LIGHTNING: Final = "pytorch-lightning_version"
_LOOSE: Final = ("hyper_parameters", "datamodule_hyper_parameters", "callbacks", "hparams_type")
"""Entries of a Lightning checkpoint in which users' own objects lie: those are left out, with a remark."""
STRIP_BYTES: Final = 32 << 20
_CLOSE_BYTES: Final = 4 << 10
"""What is read at once, although most of it belongs to other items."""
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")

_STORAGES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_ATTRIBUTE_DICTS: Final = (
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "lightning.pytorch.utilities.parsing",
    "pytorch_lightning.utilities.parsing",
)

_PLAIN_TENSOR: Final = Constant("torch.Tensor")
DTYPE_NAMES: Final[Known] = {f"torch {name}": Constant(f"torch.{name}") for name in DTYPES}


class _Storage:
    """Bytes in the archive. `dtype`: of its items, uint8 of an untyped one; `count`: how many."""

    __slots__ = ("count", "dtype", "name", "offset")

    def __init__(self, name: str, offset: int, dtype: str, count: int) -> None:
        self.name = name
        self.offset = offset
        self.dtype = dtype
        self.count = count


class _Strips:
    """The part of a strided tensor that was read last, kept for the next read of what lies beside it. One for a file:
    whoever reads tensors one after the other needs no more memory than that."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of: object = None
        self.start = 0
        self.data: Buffer = np.empty(0, np.uint8)


class StridedTensor(Tensor):
    """A tensor whose items do not lie one after the other: a transposed one, or one column of a larger one.

    Of a transposed one, rows that are read one after the other lie all over the file; so it is read in strips of many
    rows, each byte once.
    """

    __slots__ = ("_strips", "file", "offset", "strides")

    def __init__(
        self,
        file: RawFile,
        offset: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        strips: _Strips | None = None,
    ) -> None:
        """`strides`: in bytes."""
        super().__init__(dtype, shape)
        self.file = file
        self.offset = offset
        self.strides = tuple(strides)
        self._strips = strips or _Strips()

    def read_into(self, out: Buffer, start: int = 0) -> None:
        strips, strip = self._strips, STRIP_BYTES // self.itemsize * self.itemsize
        done = 0
        while done < len(out):
            at = start + done
            first = at // strip * strip
            count = min(first + strip - at, len(out) - done)
            with strips.lock:
                if strips.of is not self or strips.start != first:
                    length = min(strip, self.nbytes - first)
                    if len(strips.data) < length:
                        strips.data = np.empty(length, np.uint8)
                    strips.of = None
                    self._read(strips.data[:length], first)
                    strips.of, strips.start = self, first
                np.copyto(out[done : done + count], strips.data[at - first : at - first + count])
            done += count

    def _read(self, out: Buffer, start: int) -> None:
        size, at = self.itemsize, 0
        for box in run_boxes(self.shape, start // size, (start + len(out)) // size):
            nbytes = box.size * size
            first = sum(map(int.__mul__, box.offsets, self.strides))
            self._fill(np.ndarray(box.shape, f"V{size}", out[at : at + nbytes]), self.offset + first)
            at += nbytes

    def _fill(self, target: np.ndarray[Any, Any], first: int) -> None:
        """Reads a box whose first item is at byte `first`: at once where it lies close together, else in parts along
        the axis with the longest steps."""
        size, shape = self.itemsize, target.shape
        last = sum((length - 1) * stride for length, stride in zip(shape, self.strides, strict=True))
        if last + size <= max(2 * target.size * size, _CLOSE_BYTES):
            data = np.empty(last + size, np.uint8)
            self.file.read_into(data, first)
            np.copyto(target, np.ndarray(shape, f"V{size}", data, 0, self.strides))
            return
        axis = max((axis for axis, length in enumerate(shape) if length > 1), key=self.strides.__getitem__)
        step = max(min(_CLOSE_BYTES // self.strides[axis], shape[axis] // 2), 1)
        before = (slice(None),) * axis
        for begin in range(0, shape[axis], step):
            self._fill(target[(*before, slice(begin, begin + step))], first + begin * self.strides[axis])


class BytesFile(RawFile):
    """Bytes in memory, as a file."""

    def __init__(self, data: bytes, *, name: str, what: str) -> None:
        self.path = Path(name)
        self.what = what
        self.length = len(data)
        self._data = np.frombuffer(data, np.uint8)

    def read_into(self, out: Buffer, start: int) -> None:
        np.copyto(out, self._data[start : start + len(out)])

    def close(self) -> None:
        pass


# -- the archive


class Archive:
    """The members of an archive of `torch.save`, which may be a part of a file. Every member is stored as it is."""

    def __init__(self, file: RawFile, start: int = 0, length: int | None = None) -> None:
        """CorruptionError where it is no such archive, or one that lies about itself."""
        self.file = file
        self._strips = _Strips()
        self._start = start
        self._length = file.length - start if length is None else length
        if start < 0 or self._length < 0 or start + self._length > file.length:
            file.refuse(f"bytes {start} to {start + self._length} are claimed, and the file has {file.length}")
        try:
            with zipfile.ZipFile(Section(file, start, self._length)) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error, OverflowError) as error:
            file.refuse(f"its zip archive cannot be read: {error}")
        self.members: dict[str, tuple[int, int]] = {}
        """The first byte in the file and the length of each, by its name behind the archive's own directory."""
        self._crcs: dict[str, int] = {}
        end = 0
        for member in sorted(members, key=lambda member: member.header_offset):
            name = member.filename.partition("/")[2]
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or not name or name in self.members:
                file.refuse(f"the member {member.filename[:80]!r} is compressed, encrypted, there twice or has no name")
            begin = self._begin(member)
            if member.header_offset < end or begin + member.file_size > self._length:
                file.refuse(f"the member {member.filename[:80]!r} overlaps another, or reaches beyond the archive")
            end = begin + member.file_size
            self.members[name] = (start + begin, member.file_size)
            self._crcs[name] = member.CRC
        if self.text("byteorder", "little") != "little":
            raise unsupported(
                file, "its numbers are big-endian", "load it with torch, and save it again on this machine"
            )
        if "data.pkl" not in self.members or "constants.pkl" in self.members:
            if "constants.pkl" in self.members:
                raise unsupported(
                    file, "it is a TorchScript archive", "torch.jit.load(path).state_dict() has its tensors"
                )
            file.refuse("it is a zip archive without data.pkl, and no file of torch.save")

    def _begin(self, member: zipfile.ZipInfo) -> int:
        """Returns where the bytes of a member begin, behind a header of its own whose length only that header tells."""
        raw = (
            self.file.read(self._start + member.header_offset, _LOCAL_HEADER.size)
            if (member.header_offset + _LOCAL_HEADER.size <= self._length)
            else b""
        )
        if len(raw) != _LOCAL_HEADER.size or raw[:4] != b"PK\x03\x04":
            self.file.refuse(f"the member {member.filename[:80]!r} has no header where one is claimed")
        _, name_length, extra_length = _LOCAL_HEADER.unpack(raw)
        return member.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)

    def data(self, name: str) -> bytes:
        found = self.file.read(*self.members[name])
        if self.has_checksums and zlib.crc32(found) != self._crcs[name]:
            self.file.refuse(f"its member {name!r} is not what its checksum says")
        return found

    @property
    def has_checksums(self) -> bool:
        """Whether it was written with them: `torch.serialization.set_crc32_options(False)` leaves zeros."""
        return any(self._crcs.values())

    def text(self, name: str, default: str) -> str:
        return self.data(name).decode("ascii", "replace").strip() if name in self.members else default

    def load(
        self, *, constants: bool = False, known: Known | None = None, loose: bool = False
    ) -> tuple[Any, list[str]]:
        """Returns what was saved, and remarks. Raises Unserialisable for a class or function that is no plain value and
        no tensor, by its name; with `loose` it is left out, with a remark. `constants`: element types and devices stay
        Constants, for whoever has torch. `known`: more names that the pickle may use; a Record becomes its fields."""
        made: dict[tuple[Any, ...], Tensor] = {}
        file = self.file

        def storage(id: Any) -> _Storage:
            if isinstance(id, tuple) and len(id) == 5 and isinstance(id[1], Unknown):
                raise unknown(file, id[1].name, "")
            if not isinstance(id, tuple) or len(id) != 5 or id[0] != "storage" or not isinstance(id[1], Constant):
                raise ValueError("it names something outside of itself that is not the storage of a tensor")
            _, kind, key, _, count = id
            name = f"data/{key}"
            if name not in self.members or type(count) is not int or count < 0:
                raise ValueError(f"the storage {str(key)[:40]!r} is not there")
            offset, length = self.members[name]
            if count * dtype(kind.text).size > length:
                raise ValueError(f"the storage {str(key)[:40]!r} of {count} items has {length} bytes")
            return _Storage(name, offset, kind.text, count)

        def tensor(kept: _Storage, first: int, shape: Any, strides: Any, *more: Any) -> Tensor:
            name = (
                more[2].text.removeprefix("torch.") if len(more) > 2 and isinstance(more[2], Constant) else kept.dtype
            )
            count = kept.count * dtype(kept.dtype).size // dtype(name).size
            key = (kept.offset, first, name, tuple(shape), tuple(strides))
            if key not in made:
                made[key] = self._tensor(kept, count, name, first, (tuple(shape), tuple(strides)))
            return made[key]

        data = self.data("data.pkl")
        names = {**_known(), **_tensors(file, tensor), **(known or {})}
        found = unpickle(data, names, file.refuse, persistent=storage)
        top = found.value
        lightning = isinstance(top, dict) and LIGHTNING in top
        remarks: list[str] = []
        met: set[str] = set()

        def convert(value: Any, path: str) -> Any:
            if isinstance(value, Record):
                fields = value.state if isinstance(value.state, dict) else {}
                return {name: one for name, one in fields.items() if isinstance(one, int | float | str)}
            if isinstance(value, Unknown):
                met.add(value.name)
                if not (loose or (lightning and path.partition("/")[0] in _LOOSE)):
                    raise unknown(file, value.name, path)
                remarks.append(f"{path} is a {value.name}, which only its own code can read, and is left out")
                return None
            if isinstance(value, Constant) and not constants:
                remarks.append(f"{path} is {value.text}, and is kept as text")
                return value.text
            if isinstance(value, _Storage):
                raise unsupported(file, f"at {path!r} it has a storage of {value.dtype} without a tensor", _AS_TENSOR)
            return value

        tree = resolved(found, file.refuse, convert)
        for name in sorted(found.unknown - met):
            if not (loose or (lightning and name.startswith(("lightning.", "pytorch_lightning.")))):
                raise unknown(file, name, "")
        return tree, remarks

    def _tensor(
        self, kept: _Storage, count: int, name: str, first: Any, form: tuple[tuple[Any, ...], tuple[Any, ...]]
    ) -> Tensor:
        """Returns the tensor of shape and strides `form` from item `first` on of a storage of `count` items."""
        (shape, strides), begin = form, kept.offset
        file, size = self.file, dtype(name).size
        check_shape(file.path, file.what, "a tensor", shape)
        if len(strides) != len(shape) or any(type(one) is not int or one < 0 for one in (first, *strides)):
            file.refuse(f"a tensor of shape {list(shape)} has the strides {list(strides)[:70]} from {first}")
        if not prod(shape):
            return ArrayTensor(np.empty(0, np.uint8), name, shape)
        last = first + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if last >= count:
            file.refuse(f"a tensor of shape {list(shape)} reaches to item {last} of a storage of {count}")
        if prod(shape) > count:
            raise unsupported(
                file,
                f"a tensor of shape {list(shape)} repeats the {count} items that are stored (an expanded tensor)",
                "save it with .contiguous(); torch.load reads the file",
            )
        if _dense(shape, strides):
            if self.has_checksums and prod(shape) * size == self.members[kept.name][1]:
                return SummedTensor(file, begin, name, shape, name=kept.name, crc=self._crcs[kept.name])
            return RawTensor(file, begin + first * size, name, shape, name="a tensor")
        return StridedTensor(
            file, begin + first * size, name, shape, [one * size for one in strides], strips=self._strips
        )


def unknown(file: RawFile, name: str, path: str) -> Unserialisable:
    where = f"at {path!r} it" if path else "it"
    return Unserialisable(
        f"{file.path}: {where} holds a {name}, which only its own code can read; nothing of it was run",
        subject=path or str(file.path),
        hint="save plain values and state_dict()s; if you trust the file, load it with torch and save those of it",
    )


def unsupported(file: RawFile, what: str, hint: str) -> Unserialisable:
    """Returns the error for a file that is whole, and has in it what Tenuto does not read."""
    return Unserialisable(f"{file.path}: {what}, which Tenuto does not read", subject=str(file.path), hint=hint)


_AS_TENSOR: Final = "save a tensor instead: torch.tensor(storage), or torch.frombuffer of an untyped one"


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    pace = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != pace:
            return False
        pace *= length
    return True


def _tensors(file: RawFile, tensor: Callable[..., Tensor]) -> dict[str, Callable[..., Any] | Constant]:
    """Returns the functions that torch's pickles call for tensors."""

    def rebuilt(kept: Any, first: Any, shape: Any, strides: Any, *more: Any) -> Tensor:
        # Behind what gradients need: bits that say that the stored numbers stand for others.
        if len(more) > 2 and isinstance(more[2], dict) and any(more[2].get(bit) for bit in ("conj", "neg")):
            raise unsupported(
                file,
                "a tensor is stored as the conjugate or the negative of its numbers",
                "save it with resolve_conj() and resolve_neg(); torch.load reads the file",
            )
        return tensor(kept, first, shape, strides)

    def with_attributes(function: Any, kind: Any, arguments: Any, _: Any) -> Tensor:
        # A tensor on which somebody has set attributes, such as DeepSpeed's `ds_id`: they say nothing of its numbers.
        if function not in (tensor, rebuilt) or kind != _PLAIN_TENSOR or not isinstance(arguments, tuple):
            raise ValueError("a tensor of a class of its own")
        made: Tensor = function(*arguments)
        return made

    return {
        "torch Tensor": _PLAIN_TENSOR,
        "torch._tensor _rebuild_from_type_v2": with_attributes,
        "torch._utils _rebuild_tensor": tensor,
        "torch._utils _rebuild_tensor_v2": rebuilt,
        "torch._utils _rebuild_tensor_v3": tensor,
        "torch._utils _rebuild_parameter": lambda data, *_: data,
        "torch._utils _rebuild_parameter_with_state": lambda data, *_: data,
    }


def _device(*parts: Any) -> Constant:
    return Constant(":".join(map(str, parts)))


def _known() -> Known:
    found: dict[str, Callable[..., Any] | Constant] = {**PLAIN, **DTYPE_NAMES}
    found |= {f"torch {name}": Constant(kind) for name, kind in _STORAGES.items()}
    found |= {"torch.storage UntypedStorage": Constant("uint8"), "torch Size": tuple, "torch device": _device}
    found |= {f"{module} AttributeDict": dict for module in _ATTRIBUTE_DICTS}
    return found


# -- reading


def read(path: Path) -> Reader:
    """Opens a file of `torch.save`, or a Lightning checkpoint."""
    file = RawFile(path, what=WHAT)
    try:
        start = file.read(0, min(len(LEGACY), file.length))
        if start[:4] != b"PK\x03\x04":
            _refuse_legacy(file, start)
        archive = Archive(file)
        tree, remarks = archive.load()
        step, metrics = _of_lightning(tree) if isinstance(tree, dict) and LIGHTNING in tree else (None, {})
    except BaseException:
        file.close()
        raise
    weights = isinstance(tree, dict) and bool(tree) and all(isinstance(one, Tensor) for one in tree.values())
    return Reader(
        format="lightning" if step is not None else "torch",
        path=path,
        tree=tree,
        kind="weights" if weights else "state",
        step=step,
        metrics=metrics,
        remarks=remarks,
        files=[path],
        on_close=file.close,
    )


def load_bytes(data: bytes, name: str) -> Any:
    """Returns what `torch.save` has written into memory, with element types and devices as Constants. `name`: in
    errors."""
    found, _ = Archive(BytesFile(data, name=name, what=WHAT)).load(constants=True)
    return found


def _refuse_legacy(file: RawFile, start: bytes) -> NoReturn:
    if start[:2] != b"\x80\x02" and start[257:262] != b"ustar":
        file.refuse("it is not a zip archive, as torch.save has written since torch 1.6")
    script = "import sys, torch; torch.save(torch.load(sys.argv[1], weights_only=True), sys.argv[1] + '.new')"
    raise Unserialisable(
        f"{file.path} is of the format that torch.save wrote before torch 1.6, which Tenuto does not read",
        subject=str(file.path),
        hint=typed("python", "-c", script, file.path),
    )


def _of_lightning(tree: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Returns the step, and the metrics that its callbacks have followed."""
    step, metrics = tree.get("global_step"), {}
    callbacks = tree.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and isinstance(name := state.get("monitor"), str):
            score = state.get("current_score")
            if isinstance(score, Tensor) and not score.shape and score.dtype in ("float32", "float64"):
                metrics[name] = float(score.read())
    return step if type(step) is int and step >= 0 else 0, metrics
