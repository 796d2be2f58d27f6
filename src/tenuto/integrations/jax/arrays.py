"""Encodes and restores arrays of JAX: those of one device, sharded ones, and keys of random generators.

Arrays cannot be written. A save copies them out of the buffers in which they lie; a restore fills buffers of the host,
and makes new arrays of them, which take the places of the old ones in the state. An array of which this process has
every shard is one leaf, saved whole; of one that several processes hold, each saves its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np

from tenuto.concurrency.worker_threads import LoopThreads, parallel_for
from tenuto.errors import StateError, Unserialisable
from tenuto.integrations.jax.versions import private
from tenuto.model.leaf import Box, LeafSpec
from tenuto.model.records import Json
from tenuto.state.contract import Bound, Buffer, Sink
from tenuto.state.declarations import BoxPart, ShardLayout, replicated_layout
from tenuto.state.encode.aliasing import Geometry
from tenuto.state.encode.walker import StateWalker, StructureChanged
from tenuto.state.frameworks import Refresh
from tenuto.state.numpy_arrays import ArraySink, array_dtype, as_bytes, dtype_name
from tenuto.state.restore.restorer import Restorer, Thunk
from tenuto.state.tree import LEAVES, ROOT, kind_of

KEY: Final = "prngkey"
ALIGNMENT: Final = 64
"""Bytes. JAX on a CPU takes a buffer so aligned as it is, without a copy."""
PART_BYTES: Final = 4 << 20
SEVERAL_THREADS: Final = 16 << 20
"""From this many bytes on a copy by several threads is worth starting them."""

Array = np.ndarray[Any, Any]


# -- what is copied


class HeldArray:
    """An array of the state, or one shard of it, as the source of a leaf.

    It holds the array and no view of its memory: JAX cannot donate a buffer while there is one. As arrays never change,
    two of these are equal if they are of the same array.
    """

    __slots__ = ("array", "shard")
    immutable: Final = True

    def __init__(self, array: jax.Array, shard: jax.Array | None = None) -> None:
        self.array = array
        self.shard = shard

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeldArray) and self.array is other.array

    def __hash__(self) -> int:
        return id(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.array if self.shard is None else self.shard, dtype=dtype)

    def pieces(self) -> list[tuple[tuple[slice, ...] | None, jax.Array]]:
        """Returns arrays of one device, each with where it lies in the source; None: everywhere."""
        if self.shard is not None:
            return [(None, self.shard)]
        if self.array.is_fully_replicated:
            return [(None, self.array.addressable_data(0))]
        return [(one.index, one.data) for one in self.array.addressable_shards if one.replica_id == 0]


class JaxBound:
    """Destinations for arrays. Transfers from devices are started together, and copied into the image in `wait`."""

    def __init__(self, specs: Sequence[LeafSpec], views: Sequence[Buffer]) -> None:
        self._places = [
            np.ndarray(spec.shape, _words(array_dtype(spec.dtype)), view) if spec.nbytes else np.empty(0, np.uint8)
            for spec, view in zip(specs, views, strict=True)
        ]
        self._views = views
        self._begun: list[tuple[Array, jax.Array]] = []

    def copy(self, sources: Sequence[Any], start: int, stop: int) -> None:
        for leaf in range(start, stop):
            place = self._places[leaf]
            for index, array in sources[leaf].pieces() if place.nbytes else ():
                _start_transfer(array)
                self._begun.append((place if index is None else place[index], array))

    def copy_part(self, source: Any, leaf: int, start: int, stop: int) -> None:
        self._views[leaf][start:stop] = as_bytes(np.asarray(source))[start:stop]

    def splits(self, source: Any) -> bool:
        pieces = source.pieces()
        return len(pieces) == 1 and pieces[0][0] is None and _on_host(pieces[0][1])

    def wait(self) -> None:
        begun, self._begun = self._begun, []
        parts: list[tuple[Array, Array]] = []
        for place, array in begun:
            held = np.asarray(array)
            parts += _parts(place, held.view(_words(held.dtype)))
        many = sum(place.nbytes for place, _ in parts) >= SEVERAL_THREADS
        parallel_for(_copy, parts, LoopThreads.of(1).copy) if many else [*map(_copy, parts)]


class JaxDevice:
    name = "jax"

    def bind(self, specs: Sequence[LeafSpec], views: Sequence[Buffer], *, stays: bool = True) -> Bound:
        return JaxBound(specs, views)


DEVICE: Final = JaxDevice()


def _copy(part: tuple[Array, Array]) -> None:
    np.copyto(part[0], part[1], casting="no")


def _parts(place: Array, held: Array) -> list[tuple[Array, Array]]:
    """Returns the copies of one piece, cut where it is long and lies in one run on both sides."""
    if place.nbytes <= PART_BYTES or not (place.flags.c_contiguous and held.flags.c_contiguous):
        return [(place, held)]
    into, source, step = place.reshape(-1), held.reshape(-1), PART_BYTES // held.itemsize
    return [(into[at : at + step], source[at : at + step]) for at in range(0, len(source), step)]


def _words(kind: np.dtype[Any]) -> np.dtype[Any]:
    """Returns numpy's own type of the same size: it copies those fastest, and without the interpreter's lock."""
    return np.dtype(f"u{kind.itemsize}" if kind.itemsize <= 8 else f"c{kind.itemsize}")


def _on_host(array: jax.Array) -> bool:
    return bool(next(iter(array.devices())).platform == "cpu")


def _start_transfer(array: jax.Array) -> None:
    if not _on_host(array):
        array.copy_to_host_async()


# -- encode


def is_key(value: Any) -> bool:
    """Returns whether it is an array of typed random keys."""
    return not isinstance(value.dtype, np.dtype) and bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def encode(value: Any, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise Unserialisable(
            f"{path or ROOT}: a ShapeDtypeStruct has no values to save",
            subject=path,
            hint="restore() puts arrays in its place",
        )
    if isinstance(value, jax.core.Tracer):
        raise Unserialisable(
            f"{path or ROOT}: a traced value has no bytes", subject=path, hint="save outside of jit, what it returned"
        )
    if is_key(value):
        return _encode_key(value, path, writer)
    _check_there(value, path)
    name = _dtype_name(value, path)
    weak, whole = bool(value.weak_type), bool(value.is_fully_addressable)
    about = {"as": "jax", "weak": True} if weak else {"as": "jax"}
    known: tuple[Any, ...] = (value.dtype, value.shape, weak)
    sharding = value.sharding
    if whole:
        node = writer.leaf(
            path,
            about,
            (name, value.shape),
            HeldArray(value),
            device=DEVICE,
            address=id(value),
            geometry=_geometry(known, 0),
        )
    else:
        layout, shards = _layout(value, path, writer)
        rows = [
            (HeldArray(value, shard), id(value), _geometry((*known, layout), number))
            for number, shard in enumerate(shards)
        ]
        node = writer.rows(path, about, name, layout, rows, device=DEVICE, tensor=value)

    def refresh(again: Any, replay: StateWalker) -> Json:
        if (again.dtype, again.shape, bool(again.weak_type)) != known or again.is_fully_addressable is not whole:
            raise StructureChanged
        _check_there(again, path)
        if whole:
            replay.again(HeldArray(again), id(again))
            return node
        if again.sharding != sharding:
            raise StructureChanged
        for shard in _layout(again, path, replay)[1]:
            replay.again(HeldArray(again, shard), id(again))
        return node

    return node, refresh


def _encode_key(value: Any, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
    _check_there(value, path)
    impl = _impl(value, path)
    node, again_inside = encode(jax.random.key_data(value), path, writer)

    def refresh(again: Any, replay: StateWalker) -> Json:
        if not is_key(again) or _impl(again, path) != impl:
            raise StructureChanged
        _check_there(again, path)
        return {"!": KEY, "impl": impl, "v": again_inside(jax.random.key_data(again), replay)}

    return {"!": KEY, "impl": impl, "v": node}, refresh


def _impl(key: Any, path: str) -> str:
    found = str(jax.random.key_impl(key))
    try:
        jax.random.key(0, impl=found)
    except ValueError:
        raise Unserialisable(
            f"{path or ROOT}: a random key of an implementation that JAX does not know by a name",
            subject=path,
            hint="save jax.random.key_data(key)",
        ) from None
    return found


def _geometry(known: tuple[Any, ...], number: int) -> Geometry:
    """Returns what tells an array from another of the same identity. It has no extent: arrays never overlap."""
    return Geometry("jax", 0, (known, number))


def _check_there(value: Any, path: str) -> None:
    if value.is_deleted():
        raise StateError(
            f"{path or ROOT}: this array has been donated or deleted, and has no values any more",
            subject=path or ROOT,
            hint="assign the new arrays in the mapping that you passed after each step, state['train'] = …",
        )


def _dtype_name(value: Any, path: str) -> str:
    try:
        return dtype_name(np.dtype(value.dtype), path)
    except (Unserialisable, TypeError):
        raise Unserialisable(
            f"{path or ROOT}: an array of {value.dtype} has no representation",
            subject=path,
            hint=f"save it as another type, with every value: array.astype(jax.numpy.{_wider(str(value.dtype))})",
        ) from None


def _wider(name: str) -> str:
    """Returns a type that has all values of one that cannot be saved."""
    return "int8" if name.startswith("int") else "uint8" if name.startswith("uint") else "float32"


def _layout(value: Any, path: str, writer: StateWalker) -> tuple[ShardLayout, list[jax.Array]]:
    """Returns the layout of the shards that this process has of a larger array, and one array for each of them."""
    if writer.private:
        raise StateError(
            f"{path or ROOT}: an array that lies on several processes cannot belong to one rank alone",
            subject=path or ROOT,
            hint="leave per_rank away: each process saves its own shards",
        )
    shards = {_box(one.index, value.shape): one.data for one in reversed(value.addressable_shards)}
    if [box.shape for box in shards] == [value.shape]:
        return replicated_layout(value.shape), [*shards.values()]
    boxes = sorted(shards, key=lambda box: box.offsets)
    parts = tuple(BoxPart((), box.offsets, box.shape) for box in boxes if not box.empty)
    return ShardLayout(value.shape, (), parts), [shards[box] for box in boxes if not box.empty]


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    spans = [one.indices(length)[:2] for one, length in zip(index, shape, strict=True)]
    return Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))


# -- restore


def restore(value: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
    if is_key(value):
        return _restore_key(value, node, path, restorer)
    if kind_of(node) not in LEAVES:
        return restorer.mismatch(value, path, restorer.words(node), _form(value))
    number, spec = restorer.spec(node, path)
    if spec.dtype != _dtype_name(value, path) or spec.shape != tuple(value.shape):
        return restorer.mismatch(value, path, f"{spec.dtype} {list(spec.shape)}", _form(value))
    restorer.restored.append(path)
    sharding = value.sharding if getattr(value, "committed", True) else None
    weak = bool(node.get("weak", node.get("as") != "jax" and getattr(value, "weak_type", False)))
    made: dict[Any, Thunk] = restorer.extra.setdefault("jax", {})
    if (number, sharding, weak) not in made:  # of one leaf with several names one array is made
        made[number, sharding, weak] = _plan(number, spec, sharding, weak, restorer)
    return made[number, sharding, weak]


def _restore_key(value: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
    impl = _impl(value, path) if not isinstance(value, jax.ShapeDtypeStruct) else str(value.dtype)[4:-1]
    theirs = node.get("impl") if kind_of(node) == KEY else None
    if theirs is None or impl not in (theirs, _tag(theirs)):
        ours = f"random keys of {impl}"
        return restorer.mismatch(value, path, f"those of {theirs}" if theirs else restorer.words(node), ours)
    if not restorer.takes(path):
        return lambda: value
    if isinstance(value, jax.ShapeDtypeStruct):
        like = jax.eval_shape(jax.random.key_data, value)
    else:
        like = jax.random.key_data(value)
    inner = restore(like, node["v"], path, restorer)
    return _once(lambda: jax.random.wrap_key_data(inner(), impl=theirs))


def _tag(impl: str) -> str:
    """Returns the short name of an implementation of keys, which is in the name of their dtype."""
    return str(jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype)[4:-1]


def _form(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}"


def _plan(number: int, spec: LeafSpec, sharding: Any, weak: bool, restorer: Restorer) -> Thunk:
    """Plans an array with the placement of `sharding`, of the boxes that this process has of it; None: on the default
    device, free to be moved from there."""
    places: dict[Any, Box] = {}
    if sharding is not None and 0 not in spec.shape:
        found = sharding.addressable_devices_indices_map(spec.shape)
        places = {device: _box(index, spec.shape) for device, index in found.items()}
    whole = Box.whole(spec.shape)
    hosts = {box: _host_array(box.shape, spec.dtype) for box in {*places.values()} or {whole}}
    if [*hosts] == [whole]:
        restorer.want(number, ArraySink(hosts[whole]))
    else:
        ordered = sorted(hosts.items(), key=lambda item: item[0].offsets)
        restorer.want_boxes(number, [(box, ArraySink(host)) for box, host in ordered])

    def build() -> Any:
        if len(places) <= 1 and [*hosts] == [whole]:
            made = jax.device_put(hosts[whole], sharding)
        else:
            memory = sharding.memory_kind
            pieces = [
                jax.device_put(hosts[box], jax.sharding.SingleDeviceSharding(device, memory_kind=memory))
                for device, box in places.items()
            ]
            made = jax.make_array_from_single_device_arrays(spec.shape, sharding, pieces)
        hosts.clear()
        return finished(made, spec, weak)

    return _once(build)


def finished(made: jax.Array, spec: LeafSpec, weak: bool) -> jax.Array:
    """Returns the array with its weak type. Raises StateError where JAX has made it narrower."""
    if dtype_name(np.dtype(made.dtype)) != spec.dtype:
        raise StateError(
            f"{spec.path}: JAX makes {made.dtype} of {spec.dtype} here",
            subject=spec.path,
            hint="jax.config.update('jax_enable_x64', True) before anything else",
        )
    return private("convert")(made, made.dtype, weak_type=True) if weak and not made.weak_type else made


def _once(build: Callable[[], Any]) -> Thunk:
    done: list[Any] = []

    def take() -> Any:
        if not done:
            done.append(build())
        return done[0]

    return take


def _host_array(shape: tuple[int, ...], name: str) -> Array:
    """Returns new memory that JAX can take as it is."""
    kind = array_dtype(name)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes].view(kind).reshape(shape)


# -- new arrays, where the target has none


class NewArray:
    """The memory of an array to be made, and where it goes: a device, a sharding, the name of a platform, or None."""

    def __init__(self, host: Array, spec: LeafSpec, device: Any) -> None:
        self._host = host
        self._spec = spec
        self._device = jax.local_devices(backend=device)[0] if isinstance(device, str) else device
        self._made: dict[bool, Any] = {}

    def take(self, weak: bool) -> Any:
        """Returns the array; numpy's, where JAX is set to have no elements of 64 bits."""
        if weak not in self._made:
            wide = jax.dtypes.canonicalize_dtype(self._host.dtype) != self._host.dtype
            made = self._host if wide else finished(jax.device_put(self._host, self._device), self._spec, weak)
            self._made[weak] = made
        return self._made[weak]


def allocate(spec: LeafSpec, device: Any) -> tuple[NewArray, Sink]:
    host = _host_array(spec.shape, spec.dtype)
    return NewArray(host, spec, device), ArraySink(host)


def fresh_key(node: Json, path: str, restorer: Restorer) -> Thunk:
    inner, impl = restorer.rebuild(node.get("v"), path), str(node.get("impl"))

    def build() -> Any:
        try:
            return jax.random.wrap_key_data(inner(), impl=impl)
        except (TypeError, ValueError) as error:
            raise StateError(f"{path or ROOT}: no random key: {error}", subject=path or ROOT) from None

    return _once(build)
