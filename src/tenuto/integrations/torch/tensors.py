"""Encodes and restores tensors: dense ones as bytes, sparse ones and subclasses as the dense tensors they consist
of."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tenuto.errors import CorruptionError, StateError, StateMismatch, Unserialisable
from tenuto.integrations.torch.device import (
    QUANTISED,
    TORCH_DTYPES,
    TorchDevice,
    as_bytes,
    device_of,
    over,
    raw,
    writable,
)
from tenuto.integrations.torch.meshes import is_dtensor, local_of
from tenuto.model.leaf import DTYPES, LeafSpec, escape, join, unescape
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.state.contract import Buffer, Sink
from tenuto.state.declarations import Shard, ShardLayout, attached, declarations
from tenuto.state.encode.aliasing import Geometry
from tenuto.state.encode.walker import StateWalker, StructureChanged
from tenuto.state.frameworks import Refresh, type_name
from tenuto.state.restore.class_fields import stand_in
from tenuto.state.restore.restorer import SWAPS, Restorer, Thunk
from tenuto.state.tree import LEAVES, ROOT, items, segment

# -- forms: everything of a dense tensor that its leaf depends on

_NAMES: Final = {kind: name for name, kind in TORCH_DTYPES.items() if name in DTYPES and str(kind) == f"torch.{name}"}

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types without surprises; any other may compute its values, or have none yet."""

Signature = tuple[torch.dtype, torch.Size, Any, torch.device, bool, bool, bool, str]


def signature_of(tensor: torch.Tensor) -> Signature:
    """Returns everything of a dense tensor that its leaf depends on, except type, address and values."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        _role(tensor),
    )


def _role(tensor: torch.Tensor) -> str:
    """Returns the role of a tensor in a module, as its node names it, and behind a space its class, where that is
    neither torch's nor Python's own; empty for a plain tensor."""
    # A Buffer is a Tensor that says so itself; an isinstance for every tensor would cost more than its copy.
    if type(tensor) is torch.Tensor and not tensor.__dict__:
        return ""
    role = (
        "param" if isinstance(tensor, torch.nn.Parameter) else "buffer" if isinstance(tensor, torch.nn.Buffer) else ""
    )
    kind = type(tensor)
    return role if kind in PLAIN or kind.__module__.startswith("torch.") else f"{role} {type_name(kind)}"


def about(seen: Signature) -> dict[str, Json]:
    """Returns the properties in a tensor's node, without its numbers."""
    properties: dict[str, Json] = {"as": "torch"}
    role, _, kind = seen[7].partition(" ")
    if role:
        properties[role] = True
    if kind:
        properties["class"] = kind
    if seen[4]:
        properties["grad"] = True
    if seen[3].type != "cpu":
        properties["device"] = seen[3].type
    return properties


@record
class TensorForm:
    """The common part of the leaves of all tensors of one signature: dtype name and shape, node properties, device,
    geometry."""

    spec: tuple[str, tuple[int, ...]]
    about: Json
    device: TorchDevice
    geometry: Geometry


@lru_cache(maxsize=4096)
def form_of(seen: Signature) -> TensorForm | None:
    """Returns the form of a signature; None for an unnamed dtype. States have many tensors of few forms."""
    kind, shape, strides, device, _, conjugate, negative, _ = seen
    name = _NAMES.get(kind)
    if name is None:
        return None
    lies = _geometry((kind, shape, strides, device, conjugate, negative))
    return TensorForm((name, tuple(shape)), about(seen), device_of(device), lies)


def geometry(tensor: torch.Tensor) -> Geometry:
    """Returns what separates two views of one address: type, shape, strides, conjugate and negative bits."""
    return _geometry((tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg()))


@lru_cache(maxsize=4096)
def _geometry(view: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device, bool, bool]) -> Geometry:
    dtype, shape, strides, device, conjugate, negative = view
    reach = sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    return Geometry(
        str(device),
        0 if 0 in shape else dtype.itemsize * (1 + reach),
        (dtype, shape, strides, (conjugate, negative) if conjugate or negative else None),
    )


def address(tensor: torch.Tensor) -> int:
    """Returns the address of the first element; an empty tensor has none and equals only itself."""
    return tensor.data_ptr() or id(tensor)


SPARSE: Final = {
    torch.sparse_coo: ("coo", ("indices", "values")),
    torch.sparse_csr: ("csr", ("crow_indices", "col_indices", "values")),
    torch.sparse_csc: ("csc", ("ccol_indices", "row_indices", "values")),
    torch.sparse_bsr: ("bsr", ("crow_indices", "col_indices", "values")),
    torch.sparse_bsc: ("bsc", ("ccol_indices", "row_indices", "values")),
}
_LAYOUTS: Final = {name: layout for layout, (name, _) in SPARSE.items()}


def unknown_type(tensor: torch.Tensor, path: str) -> Unserialisable:
    if str(tensor.dtype)[6:] in QUANTISED:
        return Unserialisable(
            f"{path or ROOT}: a quantised tensor has no representation",
            subject=path,
            hint="save its int_repr() beside q_scale() and q_zero_point(), or the numbers that dequantize() gives",
        )
    return Unserialisable(f"{path or ROOT}: {tensor.dtype} is not known to this version", subject=path)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Returns whether a parameter or buffer waits for its first input to get a shape."""
    return isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer)


def check(tensor: torch.Tensor, path: str) -> None:
    """Raises Unserialisable with the path for a tensor without bytes to save."""
    where, kind = path or ROOT, type(tensor)
    if tensor.is_meta:
        raise Unserialisable(
            f"{where}: a meta tensor has no values to save", subject=path, hint="materialise the model first"
        )
    if kind not in PLAIN and is_lazy(tensor):
        raise Unserialisable(
            f"{where}: a lazy parameter that is not initialised yet", subject=path, hint="run one forward first"
        )
    if tensor.is_nested:
        raise Unserialisable(
            f"{where}: a nested tensor has no representation", subject=path, hint="save the list that unbind() gives"
        )
    if tensor.layout is not torch.strided and tensor.layout not in SPARSE:
        raise Unserialisable(
            f"{where}: a tensor of layout {tensor.layout} has no representation", subject=path, hint="save it dense"
        )
    if kind not in PLAIN and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unserialisable(
            f"{where}: {type_name(kind)} computes what it holds",
            subject=path,
            hint="give the class __tensor_flatten__ and __tensor_unflatten__",
        )


def encode(tensor: torch.Tensor, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
    if type(tensor) not in PLAIN and is_dtensor(tensor):
        from tenuto.integrations.torch.sharded import encode_dtensor

        return encode_dtensor(tensor, path, writer)
    layout = attached(tensor)
    if layout is not None:
        return _encode_declared(tensor, layout, path, writer)
    if is_subclass(tensor) and not tensor.is_nested:
        return _subclass_node(tensor, path, writer), lambda again, replay: _subclass_node(again, path, replay)
    check(tensor, path)
    if tensor.layout is not torch.strided:
        return _sparse_node(tensor, path, writer), _sparse_again(tensor.layout, path)
    kind, known = type(tensor), signature_of(tensor)
    node = dense_leaf(tensor, known, path, writer)

    def refresh(again: torch.Tensor, replay: StateWalker) -> Json:
        if type(again) is not kind or signature_of(again) != known:
            raise StructureChanged
        replay.again(again, address(again))
        return node

    return node, refresh


def _encode_declared(tensor: torch.Tensor, layout: ShardLayout, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
    from tenuto.integrations.torch.sharded import encode_shard

    node, again = encode_shard(Shard(tensor, layout), path, writer)

    def refresh(now: torch.Tensor, replay: StateWalker) -> Json:
        found = attached(now)
        if found is None:
            raise StructureChanged
        return again(Shard(now, found), replay)

    return node, refresh


def dense_leaf(tensor: torch.Tensor, seen: Signature, path: str, writer: StateWalker) -> Json:
    """Returns the node of a checked dense tensor with this signature."""
    known = form_of(seen)
    if known is None:
        raise unknown_type(tensor, path)
    place = tensor.data_ptr() or id(tensor)
    return writer.leaf(
        path, known.about, known.spec, tensor, device=known.device, address=place, geometry=known.geometry
    )


def is_subclass(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor consists of other tensors, and can be flattened."""
    return type(tensor) not in PLAIN and bool(is_traceable_wrapper_subclass(tensor))


def is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not is_subclass(value)


def _parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if tensor.layout is torch.sparse_coo:
        return [("indices", tensor._indices()), ("values", tensor._values())]
    return [(name, getattr(tensor, name)()) for name in SPARSE[tensor.layout][1]]


def _sparse_node(tensor: torch.Tensor, path: str, writer: StateWalker) -> Json:
    detached = tensor.detach()
    properties = {key: value for key, value in about(signature_of(tensor)).items() if key != "as"}
    parts = [[name, writer.encode(part, join(path, name))] for name, part in _parts(detached)]
    coalesced = tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None
    return {
        "!": "sparse",
        "layout": SPARSE[tensor.layout][0],
        "shape": list(tensor.shape),
        "coalesced": coalesced,
        "i": parts,
        **properties,
    }


def _sparse_again(layout: torch.layout, path: str) -> Refresh:
    def refresh(again: torch.Tensor, replay: StateWalker) -> Json:
        if again.layout is not layout:
            raise StructureChanged
        return _sparse_node(again, path, replay)

    return refresh


def _subclass_node(tensor: torch.Tensor, path: str, writer: StateWalker) -> Json:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    try:
        properties = writer.closed(context, path)
    except Unserialisable as error:
        raise Unserialisable(
            f"{path or ROOT}: {type_name(type(tensor))} is described by what has no representation: {error.message}",
            subject=path,
        ) from None
    parts = [[escape(name), writer.encode(getattr(tensor, name), join(path, escape(name)))] for name in names]
    shape, stride = list(tensor.shape), list(tensor.stride())
    return {
        "!": "subclass",
        "type": type_name(type(tensor)),
        "context": properties,
        "shape": shape,
        "stride": stride,
        "i": parts,
    }


# -- restore


class TensorSink:
    """The sink of an existing or new tensor. `around`: the DTensor whose memory `tensor` is.

    Whoever gets the memory writes it, which autograd has to know: a backward whose forward has read what was there
    raises then, as after any other change in place.
    """

    __slots__ = ("_around", "_buffer", "_ready", "_span", "_tensor")

    def __init__(
        self, tensor: torch.Tensor, span: tuple[int, int] | None = None, around: torch.Tensor | None = None
    ) -> None:
        self._tensor = tensor
        self._around = around
        self._buffer: Buffer | None = None
        self._span = span
        self._ready = False

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def keep(self) -> Callable[[], None]:
        tensor = self._tensor
        held = tensor.detach()  # the same memory, also when code of others gives the tensor other memory or a size
        before = raw(held).to("cpu", copy=True)

        def put_back() -> None:
            with torch.no_grad():
                raw(held).copy_(before)
                if tensor.shape != held.shape or tensor.data_ptr() != held.data_ptr():
                    tensor.data = held

        return put_back

    def _count(self) -> None:
        """Counts a change of the memory that torch does not see."""
        for one in (self._tensor, self._around):
            if one is not None and not one.is_inference():
                torch.autograd.graph.increment_version(one)

    @property
    def buffer(self) -> Buffer | None:
        if self._buffer is None:
            tensor = self._tensor
            if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                self._count()
                self._buffer = bytes_of(tensor)
        return self._buffer

    def geometry(self) -> Geometry:
        return geometry(self._tensor)

    def span(self) -> tuple[int, int] | None:
        tensor = self._tensor
        if self._span is not None:
            self._count()
            return self._span
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            self._count()
            return tensor.data_ptr(), tensor.nbytes
        return None

    def fill(self, data: Buffer) -> None:
        with torch.no_grad():
            source = over(writable(data), self._tensor.dtype, self._tensor.shape)
            self._await_queued()
            raw(self._tensor).copy_(raw(source))
        if self._around is not None:
            self._count()

    @property
    def fill_part(self) -> Callable[[int, Buffer], None] | None:
        tensor = self._tensor
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() and not tensor.is_quantized
        return self._fill_part if tensor.is_cuda and plain else None

    def _fill_part(self, start: int, data: Buffer) -> None:
        with torch.no_grad():
            self._await_queued()
            as_bytes(raw(self._tensor.detach()))[start : start + len(data)].copy_(torch.from_numpy(writable(data)))

    def _await_queued(self) -> None:
        """Waits, once, until nothing that training has queued before can write into the tensor: readers fill it on a
        stream of their own."""
        if not self._ready and self._tensor.is_cuda:
            torch.cuda.synchronize(self._tensor.device)
        self._ready = True


def memory(tensor: torch.Tensor) -> TensorSink | None:
    """Returns the memory of a tensor that has some of its own, of a DTensor that of its local tensor."""
    if type(tensor) not in PLAIN and is_dtensor(tensor):
        tensor = local_of(tensor)
    plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested
    computes = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return None if not plain or computes or is_lazy(tensor) else TensorSink(tensor)


def bytes_of(tensor: torch.Tensor) -> Buffer:
    """Returns the bytes of a contiguous tensor in host memory without a copy. The array keeps the memory alive."""
    nbytes = tensor.nbytes
    if not nbytes:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    memory.storage = tensor.untyped_storage()  # type: ignore[attr-defined]
    flat: Buffer = np.ndarray((nbytes,), np.uint8, memory)  # type: ignore[arg-type]
    return flat


def allocate(spec: LeafSpec, device: Any) -> tuple[torch.Tensor, Sink]:
    kind = TORCH_DTYPES.get(spec.dtype)
    if kind is None:
        raise StateError(f"{spec.path}: torch has no type {spec.dtype}", subject=spec.path)
    tensor = torch.empty(spec.shape, dtype=kind, device=device if device is not None else "cpu")
    return tensor, TensorSink(tensor)


def view(base: torch.Tensor, node: Json) -> torch.Tensor:
    kind = loaded_subclass(str(node["class"]), "as_subclass") if "class" in node else None
    if kind is not None and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return cast(torch.Tensor, base.detach().as_subclass(kind).requires_grad_(bool(node.get("grad"))))
    if node.get("param"):
        return torch.nn.Parameter(base, requires_grad=bool(node.get("grad")))
    if node.get("buffer"):
        return torch.nn.Buffer(base.detach())
    tensor = base.detach()
    return tensor.requires_grad_() if node.get("grad") else tensor


def restore(tensor: torch.Tensor, node: Json, path: str, restorer: Restorer) -> Thunk:
    kind = node["!"] if isinstance(node, dict) else ""
    if type(tensor) not in PLAIN and is_dtensor(tensor):
        from tenuto.integrations.torch.sharded import restore_dtensor

        return restore_dtensor(tensor, node, path, restorer)
    layout = attached(tensor)
    if layout is not None and not restorer.private:
        from tenuto.integrations.torch.sharded import restore_shard

        return restore_shard(Shard(tensor, layout), node, path, restorer)
    if kind == "subclass" or is_subclass(tensor):
        return _restore_subclass(tensor, node, path, restorer)
    if kind == "sparse" or tensor.layout is not torch.strided:
        return _restore_sparse(tensor, node, path, restorer)
    if kind not in LEAVES:
        return restorer.mismatch(tensor, path, restorer.words(node), words(tensor))
    number, spec = restorer.spec(node, path)
    if TORCH_DTYPES.get(spec.dtype) is not tensor.dtype or spec.shape != tensor.shape:
        return restorer.mismatch(tensor, path, f"{spec.dtype} {list(spec.shape)}", words(tensor))
    if tensor.is_meta:
        from tenuto.integrations.torch.sharded import materialise

        return materialise(tensor, number, spec, path, restorer)
    note_gradient(tensor, node, path, restorer)
    sink = TensorSink(tensor)
    if 0 in spec.shape:
        restorer.restored.append(path)
        restorer.want(number, sink)
    else:
        restorer.want_existing(number, sink, path, tensor.data_ptr(), lambda: geometry(tensor))
    return lambda: tensor


def note_gradient(tensor: torch.Tensor, node: Json, path: str, restorer: Restorer) -> None:
    """Notes a tensor that was trained when saved and is not now, or vice versa."""
    if bool(node.get("grad")) != tensor.requires_grad and tensor.is_leaf:
        restorer.notes.append(
            f"{path}: requires_grad was {bool(node.get('grad'))} when saved and is {tensor.requires_grad}"
        )


def restore_all(
    tensors: Sequence[torch.Tensor], nodes: Sequence[Json], paths: Sequence[str], restorer: Restorer
) -> bool:
    """`restore` for many leaves at once, in place. Returns False, without effect, if one is not an ordinary tensor that
    fits its leaf."""
    if declarations() and any(attached(one) is not None for one in tensors):
        return False
    found = restorer.forms(nodes) if PLAIN.issuperset(map(type, tensors)) else None
    if found is None:
        return False
    numbers, forms = found
    known = {form: (TORCH_DTYPES.get(form[0]), form[1], LeafSpec("", *form).nbytes) for form in {*forms}}
    addresses, sinks = [], []
    try:
        for tensor, node, form in zip(tensors, nodes, forms, strict=True):
            kind, shape, nbytes = known[form]
            address = tensor.data_ptr()  # RuntimeError for a sparse layout, 0 on the meta device
            if not address or tensor.dtype is not kind or tensor.shape != shape:
                return False
            if tensor.requires_grad is not node.get("grad", False):
                return False
            in_order = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not kind.is_complex
            addresses.append(address)
            sinks.append(TensorSink(tensor, (address, nbytes) if in_order else None))
    except RuntimeError:
        return False
    return restorer.want_apart(numbers, sinks, paths, addresses, [sink.geometry for sink in sinks])


def equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one type consist of the same bytes, in the same order."""
    ours, theirs = (as_bytes(raw(found.detach().contiguous())) for found in (one, other))
    return bool(torch.equal(ours, theirs.to(ours.device)))


def words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"


def _restore_sparse(tensor: torch.Tensor, node: Json, path: str, restorer: Restorer) -> Thunk:
    layout = SPARSE.get(tensor.layout, (str(tensor.layout),))[0]
    if not isinstance(node, dict) or node.get("!") != "sparse" or node.get("layout") != layout:
        return restorer.mismatch(tensor, path, restorer.words(node), f"a {layout} tensor {words(tensor)}")
    kind = restorer.spec(dict(items(node)).get("values", {}), path)[1].dtype
    if node.get("shape") != list(tensor.shape) or TORCH_DTYPES.get(kind) is not tensor.dtype:
        return restorer.mismatch(tensor, path, f"{kind} {node.get('shape')}", words(tensor))
    made = fresh_sparse(node, path, restorer, device=tensor.device)

    def take() -> None:
        found = made().detach()
        before = tensor.detach().clone()
        restorer.kept.undo(path, lambda: fill(before))
        fill(found)

    def fill(found: torch.Tensor) -> None:
        with torch.no_grad():
            if tensor.layout is not torch.sparse_coo:
                tensor.resize_as_sparse_(found)  # setting .data of a compressed tensor silently does nothing
            tensor.copy_(found)

    restorer.later(path, take, SWAPS)
    return lambda: tensor


def fresh_sparse(node: Json, path: str, restorer: Restorer, *, device: Any = None) -> Thunk:
    layout = _LAYOUTS.get(str(node.get("layout")))
    parts = dict(items(node))
    if layout is None or set(parts) != set(SPARSE[layout][1]):
        raise CorruptionError(f"{path or ROOT}: a malformed sparse tensor", subject=path)
    thunks = [restorer.new_leaf(parts[name], join(path, name), device) for name in SPARSE[layout][1]]
    shape = node.get("shape")

    def build() -> Any:
        built = [thunk() for thunk in thunks]
        if not isinstance(built[0], torch.Tensor):
            raise StateError(f"{path or ROOT}: a sparse tensor needs torch", subject=path)
        try:
            if layout is torch.sparse_coo:
                coalesced = bool(node.get("coalesced"))
                made = torch.sparse_coo_tensor(built[0], built[1], shape, is_coalesced=coalesced, check_invariants=True)
            else:
                made = torch.sparse_compressed_tensor(
                    built[0], built[1], built[2], size=shape, layout=layout, check_invariants=True
                )
        except (RuntimeError, TypeError) as error:
            raise CorruptionError(f"{path or ROOT}: no sparse tensor: {error}", subject=path) from None
        return view(made, node)

    return build


def _restore_subclass(tensor: torch.Tensor, node: Json, path: str, restorer: Restorer) -> Thunk:
    ours = type_name(type(tensor))
    if not isinstance(node, dict) or node.get("!") != "subclass" or node.get("type") != ours:
        return restorer.mismatch(tensor, path, restorer.words(node), f"a {ours}")
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {key: child for key, child in items(node)}
    if node.get("shape") != list(tensor.shape) or [escape(name) for name in names] != list(parts):
        return restorer.mismatch(
            tensor, path, f"{node.get('shape')} of {list(parts)}", f"{list(tensor.shape)} of {list(names)}"
        )
    if StateWalker(None).closed(context, path) != node.get("context"):
        return restorer.mismatch(tensor, path, f"context {node.get('context')}"[:80], f"context {context}"[:80])
    for name in names:
        restorer.value(parts[escape(name)], getattr(tensor, name), join(path, escape(name)))
    return lambda: tensor


def fresh_subclass(node: Json, path: str, restorer: Restorer) -> Thunk:
    """Plans a new tensor of a class that the program has loaded already; else a stand-in with what it consists of."""
    name = str(node.get("type"))
    thunks = {unescape(str(key)): restorer.rebuild(child, join(path, str(key))) for key, child in items(node)}
    kind = loaded_subclass(name)
    if kind is None:
        return stand_in(restorer, path, name, lambda: {key: thunk() for key, thunk in thunks.items()})
    context = restorer.rebuild(node.get("context"), path)

    def build() -> Any:
        parts = {key: thunk() for key, thunk in thunks.items()}
        try:
            made = kind.__tensor_unflatten__(parts, context(), torch.Size(node["shape"]), tuple(node["stride"]))
            if type(made) is not kind or list(made.shape) != node["shape"]:
                raise ValueError(f"it made a {type_name(type(made))} {list(made.shape)}")
        except Exception as error:
            raise StateMismatch(
                f"{path or ROOT}: a {name} could not be made of what was saved: {error!r}", subject=path
            ) from error
        return made

    return build


def loaded_subclass(name: str, method: str = "__tensor_unflatten__") -> Any:
    """Returns the class of tensors of this name that has this method, if the program has loaded it; the newest of
    several, as a notebook makes them. Nothing is imported for it."""
    waiting: list[type] = [torch.Tensor]
    found = None
    while waiting:
        kind = waiting.pop()
        if type_name(kind) == name and hasattr(kind, method):
            found = kind
        waiting += reversed(kind.__subclasses__())
    return found


# -- many dense tensors, re-recorded in well under a microsecond each


class WatchedTensors:
    """A sequence of tensors, and whether each is still the same. Keeps no references: what the state replaces is to be
    freed."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[torch.Tensor], int, type, Any, Signature]] = []

    def first(self, tensor: torch.Tensor, path: str, writer: StateWalker) -> Json:
        """Records the next tensor in `writer` and returns its node. Raises Unserialisable for one without bytes to
        save."""
        check(tensor, path)
        seen = signature_of(tensor)
        node = dense_leaf(tensor, seen, path, writer)
        self._known.append((weakref.ref(tensor), address(tensor), type(tensor), tensor.layout, seen))
        return node

    def again(self, replay: StateWalker, values: Iterable[torch.Tensor]) -> None:
        """Records the leaves in `replay`, in order. Raises StructureChanged if a tensor differs in more than its
        values."""
        sources, addresses = replay.leaves.sources, replay.leaves.addresses
        for now, (known, place, kind, layout, seen) in zip(values, self._known, strict=True):
            here = now.data_ptr() if known() is now else 0
            if here == place:
                if (
                    now.shape != seen[1]
                    or now.stride() != seen[2]
                    or now.dtype is not seen[0]
                    or now.requires_grad is not seen[4]
                    or now.is_conj() is not seen[5]
                    or now.is_neg() is not seen[6]
                ):
                    raise StructureChanged
            elif type(now) is not kind or now.layout is not layout or signature_of(now) != seen:
                # Another object, or other memory behind the same one: everything may differ.
                raise StructureChanged
            else:
                here = address(now)
            sources.append(now)
            addresses.append(here)


class TensorDict:
    """A dictionary of dense tensors under string keys. `pairs`: as in its node."""

    def __init__(self, entries: Mapping[str, torch.Tensor], path: str, writer: StateWalker) -> None:
        self._keys = list(entries)
        self._watched = WatchedTensors()
        self.pairs: list[Json] = [
            [key, self._watched.first(one, join(path, segment(key)), writer)] for key, one in entries.items()
        ]

    def again(self, entries: Mapping[Any, Any], replay: StateWalker) -> list[Json]:
        """Records the leaves in `replay` and returns the pairs. Raises StructureChanged if keys or tensors differ."""
        if list(entries) != self._keys:
            raise StructureChanged
        self._watched.again(replay, entries.values())
        return self.pairs
