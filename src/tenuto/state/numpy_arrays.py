"""The adapter for numpy values and long bytes (leaves in host memory), and the states of numpy's random generators."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.errors import CorruptionError, Unserialisable
from tenuto.model.leaf import DTYPES, Box, LeafSpec, dtype
from tenuto.model.records import Json
from tenuto.state.contract import Bound, Buffer, Memory, Sink
from tenuto.state.declarations import Shard, ShardLayout, part_view
from tenuto.state.encode.aliasing import Geometry
from tenuto.state.encode.atoms import REGISTERED, encode_scalar
from tenuto.state.encode.walker import SeenLeaf, StateWalker, StructureChanged
from tenuto.state.frameworks import Refresh, type_name
from tenuto.state.tree import LEAVES, ROOT, kind_of

if TYPE_CHECKING:
    from tenuto.state.restore.restorer import Restorer, Thunk


Array = np.ndarray[Any, Any]

_NAMES: Final = {row.numpy: row.name for row in DTYPES.values() if row.numpy is not None}
_EXTENDED: Final = "ml_dtypes"
"""The package that gives numpy bfloat16 and the types of 8 bits."""
_EXTENDED_NAMES: Final = frozenset(row.name for row in DTYPES.values() if row.numpy is None and row.code is not None)


def dtype_name(kind: np.dtype[Any], path: str = "") -> str:
    """Returns the dtype name of an array. Raises Unserialisable for objects, and for types that their string does not
    give."""
    if kind.type.__module__ == _EXTENDED and kind.name in _EXTENDED_NAMES:
        return kind.name
    if kind.hasobject or kind.names is not None or kind.isbuiltin == REGISTERED or np.dtype(kind.str) != kind:
        raise Unserialisable(
            f"{path or ROOT}: an array of {kind} has no representation", subject=path, hint=_hint(kind)
        )
    return _NAMES.get(kind.str) or f"numpy:{kind.str}"


def _hint(kind: np.dtype[Any]) -> str:
    if kind.names is not None:
        return "save its fields as arrays of their own"
    if kind.hasobject:
        return "save its elements as a list"
    if kind.type.__module__ == _EXTENDED:
        return f"save its bytes, array.view(numpy.uint{8 * kind.itemsize}), and view them as {kind} again"
    return "save it as another type"


def has_type(name: str) -> bool:
    """Returns whether numpy, or ml_dtypes where it is installed, has a leaf's dtype."""
    return dtype(name).numpy is not None or _extended(name) is not None


def array_dtype(name: str) -> np.dtype[Any]:
    """Returns numpy's type for a leaf's dtype, or that of ml_dtypes where it is installed; where there is none, opaque
    items of its size."""
    row = dtype(name)
    if row.numpy is not None:
        return np.dtype(row.numpy)
    return _extended(name) or np.dtype(f"V{row.size}")


@cache
def _extended(name: str) -> np.dtype[Any] | None:
    if name not in _EXTENDED_NAMES:
        return None
    try:
        kind: np.dtype[Any] = np.dtype(getattr(importlib.import_module(_EXTENDED), name))
    except (ImportError, AttributeError):  # not installed, or a version without this type
        return None
    return kind


def as_bytes(array: Array) -> Buffer:
    """Returns the bytes of a C-contiguous array without a copy."""
    return np.asarray(array).reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


class HostBound:
    """Destinations for arrays and bytes."""

    def __init__(self, specs: Sequence[LeafSpec], views: Sequence[Buffer]) -> None:
        self._views = views
        self._arrays = [
            np.ndarray(spec.shape, array_dtype(spec.dtype), view) if spec.nbytes else np.empty(0, np.uint8)
            for spec, view in zip(specs, views, strict=True)
        ]

    def copy(self, sources: Sequence[Any], start: int, stop: int) -> None:
        for leaf in range(start, stop):
            source, view = sources[leaf], self._views[leaf]
            if isinstance(source, np.ndarray):
                if source.nbytes:
                    np.copyto(self._arrays[leaf], source, casting="no")
            else:
                view[:] = np.frombuffer(source, np.uint8)

    def copy_part(self, source: Any, leaf: int, start: int, stop: int) -> None:
        content = as_bytes(source) if isinstance(source, np.ndarray) else np.frombuffer(source, np.uint8)
        self._views[leaf][start:stop] = content[start:stop]

    def splits(self, source: Any) -> bool:
        return not isinstance(source, np.ndarray) or bool(source.flags.c_contiguous)

    def wait(self) -> None:
        pass


class HostDevice:
    name = "host"

    def bind(self, specs: Sequence[LeafSpec], views: Sequence[Buffer], *, stays: bool = True) -> Bound:
        return HostBound(specs, views)


HOST: Final = HostDevice()


class ArraySink:
    """The sink of an existing or new array."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def keep(self) -> Callable[[], None]:
        array, before = self._array, self._array.copy()
        return lambda: np.copyto(array, before, casting="no")

    @property
    def buffer(self) -> Buffer | None:
        return as_bytes(self._array) if self._array.flags.c_contiguous and self._array.flags.writeable else None

    def span(self) -> tuple[int, int] | None:
        flags = self._array.flags
        return (_address(self._array), self._array.nbytes) if flags.c_contiguous and flags.writeable else None

    def fill(self, data: Buffer) -> None:
        np.copyto(self._array, np.ndarray(self._array.shape, self._array.dtype, data), casting="no")

    @property
    def fill_part(self) -> None:
        return None


def _geometry(array: Array) -> Geometry:
    low, high = np.lib.array_utils.byte_bounds(array)
    return Geometry("cpu", high - low if array.nbytes else 0, ("numpy", str(array.dtype), array.shape, array.strides))


def _part_rows(array: Array, layout: ShardLayout) -> list[SeenLeaf]:
    """Returns the rows of a declared array. The first has the extent of the entire array: rows may lie in each other's
    gaps."""
    found: list[SeenLeaf] = []
    for number, part in enumerate(layout.parts):
        piece = part_view(array, part).reshape(part.shape)
        whole = _geometry(array)
        shape = (whole.shape, layout, number)
        found.append((piece, _address(piece), Geometry("cpu", 0 if number else whole.extent, shape)))
    return found


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0] if array.nbytes else id(array)


class NumpyAdapter:
    def claims(self, kind: type) -> bool:
        return (
            kind is np.ndarray
            or kind is np.memmap
            or issubclass(kind, np.generic | np.random.Generator | np.random.RandomState | np.random.BitGenerator)
        )

    def owners(self, value: Any, path: str) -> Iterable[tuple[Any, str]]:
        return ()

    def encode_entries(self, entries: Mapping[str, Any], path: str, writer: StateWalker) -> None:
        return None

    def encode(self, value: Any, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        if isinstance(value, np.ndarray):
            return self._encode_array(value, path, writer)
        if isinstance(value, bytes | bytearray):
            return self._encode_bytes(value, path, writer)
        if isinstance(value, np.generic):
            return _scalar_node(value, path), lambda again, _: _scalar_node(again, path)
        return generator_node(value, path, writer), lambda again, replay: generator_node(again, path, replay)

    def _encode_array(self, value: Array, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        name = dtype_name(value.dtype, path)
        geometry = _geometry(value)
        node = writer.leaf(
            path, {"as": "numpy"}, (name, value.shape), value, device=HOST, address=_address(value), geometry=geometry
        )
        known, shape, strides = value.dtype, value.shape, value.strides

        def refresh(again: Array, replay: StateWalker) -> Json:
            if again.dtype != known or again.shape != shape or again.strides != strides:
                raise StructureChanged
            replay.again(again, _address(again))
            return node

        return node, refresh

    def plain(self, kind: type) -> bool:
        return issubclass(kind, np.generic)

    def encode_shard(self, value: Shard, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        array, layout = value.value, value.layout
        if not isinstance(array, np.ndarray) or array.shape != layout.local:
            raise Unserialisable(
                f"{path or ROOT}: not the array of shape {list(layout.local)} that was declared", subject=path
            )
        if writer.private:
            node, again = self.encode(array, path, writer)
            return node, lambda shard, replay: again(shard.value, replay)
        name, seen = dtype_name(array.dtype, path), _part_rows(array, layout)
        node = writer.rows(path, {"as": "numpy"}, name, layout, seen, device=HOST, tensor=array)
        known, strides = array.dtype, array.strides

        def refresh(again: Shard, replay: StateWalker) -> Json:
            now = again.value
            same = isinstance(now, np.ndarray) and now.dtype == known and now.strides == strides
            if not same or now.shape != layout.local or again.layout != layout or (now is not array and not seen):
                raise StructureChanged
            for source, place, _ in _part_rows(now, layout):
                replay.again(source, place)
            return node

        return node, refresh

    def _encode_bytes(self, value: bytes | bytearray, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        length, kind = len(value), type(value).__name__
        data = bytes(value)  # a bytearray may change, or die and have its identity reused, before the leaf is copied
        geometry = Geometry("bytes", 0, (kind, length))
        node = writer.leaf(
            path,
            {"as": "bytes", "type": kind},
            ("uint8", (length,)),
            data,
            device=HOST,
            address=id(data),
            geometry=geometry,
        )

        def refresh(again: bytes | bytearray, replay: StateWalker) -> Json:
            if len(again) != length:
                raise StructureChanged
            data = bytes(again)
            replay.again(data, id(data))
            return node

        return node, refresh

    def restore(self, value: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
        kind = node["!"] if isinstance(node, dict) else ""
        if isinstance(value, np.ndarray) and kind in ("leaf", "alias"):
            return self._restore_array(value, node, path, restorer)
        if not restorer.takes(path):
            return lambda: value
        if kind == "nprandom" and not isinstance(value, np.generic | np.ndarray):
            if node.get("type") != type(value).__name__:
                return restorer.mismatch(value, path, f"a numpy {node.get('type')}", f"a numpy {type(value).__name__}")
            restorer.restored.append(path or ROOT)
            state = restorer.rebuild(node.get("v"), path)
            restorer.later(path, lambda: _replaced(value, state(), path, restorer))
            return lambda: value
        if isinstance(value, np.generic):
            restorer.restored.append(path or ROOT)
            return restorer.rebuild(node, path)
        return restorer.mismatch(value, path, restorer.words(node), type_name(type(value)))

    def _restore_array(self, value: Array, node: Json, path: str, restorer: Restorer) -> Thunk:
        number, spec = restorer.spec(node, path)
        ours = dtype_name(value.dtype, path)
        if spec.dtype != ours or spec.shape != value.shape:
            return restorer.mismatch(value, path, f"{spec.dtype} {list(spec.shape)}", f"{ours} {list(value.shape)}")
        if not value.flags.writeable:
            return restorer.rebuild(node, path)
        restorer.want_existing(number, ArraySink(value), path, _address(value), lambda: _geometry(value))
        return lambda: value

    def restore_shard(self, value: Shard, node: Json, path: str, restorer: Restorer) -> Thunk:
        array, layout = value.value, value.layout
        if kind_of(node) not in LEAVES or not isinstance(array, np.ndarray):
            return restorer.mismatch(array, path, restorer.words(node), "a shard of an array")
        number, spec = restorer.spec(node, path)
        ours = dtype_name(array.dtype, path)
        if spec.dtype != ours or spec.shape != layout.whole or array.shape != layout.local:
            return restorer.mismatch(
                array, path, f"{spec.dtype} {list(spec.shape)}", f"a shard of {ours} {list(layout.whole)}"
            )
        if not array.flags.writeable:
            return restorer.mismatch(array, path, restorer.words(node), "a shard that cannot be written")
        parts = [(Box(part.offsets, part.shape), ArraySink(part_view(array, part))) for part in layout.parts]
        restorer.want_parts(number, parts, path, _address(array), lambda: _geometry(array))
        return lambda: array

    def fresh(self, node: Json, path: str, restorer: Restorer) -> Thunk:
        state = restorer.rebuild(node.get("v"), path)
        return lambda: set_generator(new_generator(node, state, path), state(), path)

    def memory(self, value: Any) -> Memory | None:
        return ArraySink(value) if isinstance(value, np.ndarray) and value.flags.writeable else None

    def allocate(self, spec: LeafSpec, node: Json, device: Any) -> tuple[Any, Sink]:
        array = np.empty(spec.shape, array_dtype(spec.dtype))
        return array, ArraySink(array)

    def view(self, base: Any, node: Json) -> Any:
        if node.get("as") != "bytes":
            return base
        return bytearray(base) if node.get("type") == "bytearray" else bytes(base)


def _scalar_node(value: np.generic, path: str) -> Json:
    try:
        return encode_scalar(value)
    except Unserialisable as error:
        raise Unserialisable(f"{path or ROOT}: {error.message}", subject=path, hint="save it as plain values") from None


adapter: Final = NumpyAdapter()


MT19937_WORDS: Final = 624
PHILOX_WORDS: Final = 4
_BIT_GENERATORS: Final = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}


def generator_node(value: Any, path: str, writer: StateWalker) -> Json:
    state = _state(value)
    name = type(value).__name__
    if name not in _BIT_GENERATORS and name not in ("Generator", "RandomState"):
        raise Unserialisable(f"{path or ROOT}: a bit generator {type_name(type(value))} is not known", subject=path)
    return {"!": "nprandom", "type": name, "v": writer.encode(state, path)}


def _state(value: Any) -> Any:
    return value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else _bits(value).state


def _bits(value: Any) -> Any:
    return value.bit_generator if isinstance(value, np.random.Generator) else value


def _replaced(value: Any, state: Any, path: str, restorer: Restorer) -> None:
    before = _state(value)
    restorer.kept.undo(path, lambda: set_generator(value, before, path))
    set_generator(value, state, path)


def set_generator(value: Any, state: Any, path: str) -> Any:
    """Sets the generator `value` to `state` and returns it. Raises CorruptionError for anything but its state."""
    try:
        check_generator(state)
        if isinstance(value, np.random.RandomState):
            value.set_state(state)
        else:
            _bits(value).state = state
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{path or ROOT}: no state of a numpy {type(value).__name__} ({error})", subject=path
        ) from None
    return value


def check_generator(state: Any) -> None:
    """Raises ValueError, or the error of a missing part, for a state with a position outside its words: numpy does not
    check it, and the next draw would read memory there."""
    if state["bit_generator"] == "MT19937":
        inner = state["state"]
        words, at, last = np.shape(inner["key"]) == (MT19937_WORDS,), inner["pos"], MT19937_WORDS
    elif state["bit_generator"] == "Philox":
        words, at, last = np.shape(state["buffer"]) == (PHILOX_WORDS,), state["buffer_pos"], PHILOX_WORDS
    else:
        return
    if not words or not 0 <= at <= last:
        raise ValueError("key or position has the wrong size")


def new_generator(node: Json, state: Thunk, path: str) -> Any:
    """Makes a generator of the kind that the node and the state name, with its state not set yet."""
    values = state()
    name = values.get("bit_generator") if isinstance(values, dict) else None
    bits = _BIT_GENERATORS.get(str(name))
    if bits is None:
        raise CorruptionError(f"{path or ROOT}: a numpy generator of kind {name!r} is not known", subject=path)
    if node.get("type") == "Generator":
        return np.random.Generator(bits())
    return np.random.RandomState(bits()) if node.get("type") == "RandomState" else bits()
