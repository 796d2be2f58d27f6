"""Encodes and restores parts of global tensors: DTensors, and tensors with a declared layout.

Also gives meta tensors memory on load, as the same objects that optimizers, ties and the state refer to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from tenuto.errors import StateError, Unserialisable
from tenuto.integrations.torch import tensors
from tenuto.integrations.torch.device import TORCH_DTYPES
from tenuto.integrations.torch.meshes import is_dtensor, layout_of, local_of, local_part, on_one_rank
from tenuto.integrations.torch.tensors import Signature, form_of, geometry, signature_of
from tenuto.model.leaf import Box, LeafSpec, join
from tenuto.model.records import Json
from tenuto.state.declarations import Shard, ShardLayout, attached, part_view, replicated_layout
from tenuto.state.encode.aliasing import Geometry
from tenuto.state.encode.walker import SeenLeaf, StateWalker, StructureChanged
from tenuto.state.frameworks import Refresh, type_name
from tenuto.state.restore.restorer import SWAPS, Restorer, Thunk
from tenuto.state.tree import LEAVES, ROOT, kind_of, segment


def encode_shard(value: Shard, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
    """Encodes a tensor with a declared layout. Raises StateError if its shape is not the declared one."""
    tensor, layout = value.value, value.layout
    node, again = _encode(tensor, _declared_local(tensor, layout, path), layout, path, writer)

    def refresh(now: Shard, replay: StateWalker) -> Json:
        if now.layout != layout:
            raise StructureChanged
        return again(now.value, now.value, replay)

    return node, refresh


def encode_dtensor(tensor: Any, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
    """Encodes a DTensor: this rank's part of it."""
    layout = layout_of(tensor, path)
    local = local_of(tensor)
    node, again = _encode(tensor, local, layout, path, writer)
    kind, spec = type(tensor), tensor._spec

    def refresh(now: Any, replay: StateWalker) -> Json:
        if type(now) is not kind or not (now._spec is spec or now._spec == spec):
            raise StructureChanged
        return again(now, local_part(now), replay)

    return node, refresh


class ShardDict:
    """A dictionary whose values are all tensors, DTensors or shards, encoded without a walk step for each. `pairs`:
    keys and nodes."""

    def __init__(self, entries: Mapping[str, Any], path: str, writer: StateWalker) -> None:
        self.pairs: list[Json] = []
        self._entries: list[tuple[str, type, Refresh]] = []
        for key, value in entries.items():
            encode = encode_shard if type(value) is Shard else tensors.encode
            node, refresh = encode(value, join(path, segment(key)), writer)
            self.pairs.append([key, node])
            self._entries.append((key, type(value), refresh))

    def again(self, entries: Mapping[str, Any], replay: StateWalker) -> None:
        if len(entries) != len(self._entries):
            raise StructureChanged
        for (key, value), (name, kind, refresh) in zip(entries.items(), self._entries, strict=True):
            if type(value) is not kind or key != name:
                raise StructureChanged
            refresh(value, replay)


def _declared_local(tensor: torch.Tensor, layout: ShardLayout, path: str) -> torch.Tensor:
    if is_dtensor(tensor) or tuple(tensor.shape) != layout.local:
        what = "a DTensor" if is_dtensor(tensor) else f"a tensor of shape {list(tensor.shape)}"
        raise StateError(
            f"{path or ROOT}: {what} where a part of shape {list(layout.local)} was declared",
            subject=path or ROOT,
            hint="declare the tensor as it is now; a DTensor says itself where it lies",
        )
    return tensor


def _encode(
    tensor: torch.Tensor, local: torch.Tensor, layout: ShardLayout, path: str, writer: StateWalker
) -> tuple[Json, Callable[[torch.Tensor, torch.Tensor, StateWalker], Json]]:
    """Encodes the rows of `local`. `tensor` is the object in the state, which identifies the leaf. Returns the node and
    a refresh for both."""
    if tensors.is_subclass(local):
        raise Unserialisable(
            f"{path or ROOT}: a part of a {type_name(type(local))}, which other tensors make up, has no representation",
            subject=path or ROOT,
            hint="each of its tensors is cut in a way of its own: keep it whole on every rank, as DDP does, or use an "
            "optimizer whose state has the shape of its parameters",
        )
    tensors.check(local, path)
    if local.layout is not torch.strided:
        raise StateError(f"{path or ROOT}: a part of a sparse tensor has no representation", subject=path or ROOT)
    seen = seen_as(tensor, local)
    known = form_of(seen)
    if known is None:
        raise tensors.unknown_type(local, path)
    if writer.private or (is_dtensor(tensor) and on_one_rank(tensor)):
        place = local.data_ptr() or id(local)
        about = {**known.about, "dtensor": True} if writer.private and is_dtensor(tensor) else known.about
        node = writer.leaf(path, about, known.spec, local, device=known.device, address=place, geometry=known.geometry)
        layout = replicated_layout(local.shape)
    else:
        row_list = _part_rows(local, layout)
        node = writer.rows(path, known.about, known.spec[0], layout, row_list, device=known.device, tensor=tensor)
    kind, reference = type(tensor), weakref.ref(tensor) if not layout.parts else None

    def refresh(now: torch.Tensor, local: torch.Tensor, replay: StateWalker) -> Json:
        if type(now) is not kind or seen_as(now, local) != seen or (reference is not None and reference() is not now):
            raise StructureChanged
        for part in layout.parts:
            source = _source(local, part)
            replay.again(source, source.data_ptr() or id(local))
        return node

    return node, refresh


def seen_as(tensor: torch.Tensor, local: torch.Tensor) -> Signature:
    """Returns the signature of the local tensor, with the role of the tensor around it."""
    found = signature_of(local)
    return found if tensor is local else (*found[:4], tensor.requires_grad, *found[5:7], role_of(tensor))


def role_of(tensor: torch.Tensor) -> str:
    return "param" if isinstance(tensor, torch.nn.Parameter) else ""


def _source(local: torch.Tensor, part: Any) -> torch.Tensor:
    if not part.cut and local.shape == part.shape:
        return local
    piece: torch.Tensor = part_view(local.detach(), part).reshape(part.shape)
    return piece


def _part_rows(local: torch.Tensor, layout: ShardLayout) -> list[SeenLeaf]:
    """Returns the rows of a local tensor. The first has the extent of the entire tensor: rows may lie in each other's
    gaps."""
    lies = geometry(local)
    found: list[SeenLeaf] = []
    for number, part in enumerate(layout.parts):
        source = _source(local, part)
        shape = (lies.shape, layout, number)
        found.append(
            (source, source.data_ptr() or id(local), Geometry(lies.space, 0 if number else lies.extent, shape))
        )
    return found


# -- restore


def restore_shard(value: Shard, node: Json, path: str, restorer: Restorer) -> Thunk:
    tensor, layout = value.value, value.layout
    if kind_of(node) not in LEAVES:
        return restorer.mismatch(tensor, path, restorer.words(node), f"a shard of {_words(tensor, layout)}")
    return _restore(tensor, layout, (_declared_local(tensor, layout, path), node), path, restorer)


def restore_dtensor(tensor: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
    if kind_of(node) not in LEAVES:
        return restorer.mismatch(tensor, path, restorer.words(node), f"a DTensor {tensors.words(tensor)}")
    if restorer.private:
        return _restore(tensor, replicated_layout(local_of(tensor).shape), (local_of(tensor), node), path, restorer)
    return _restore(tensor, layout_of(tensor, path), (local_of(tensor), node), path, restorer)


def _words(tensor: torch.Tensor, layout: ShardLayout) -> str:
    return f"{str(tensor.dtype)[6:]} {list(layout.whole)}"


def _restore(
    tensor: torch.Tensor, layout: ShardLayout, into: tuple[torch.Tensor, Json], path: str, restorer: Restorer
) -> Thunk:
    """Plans filling the local tensor in `into` with its parts of the leaf of the node in `into`."""
    local, node = into
    number, spec = restorer.spec(node, path)
    if TORCH_DTYPES.get(spec.dtype) is not tensor.dtype or spec.shape != layout.whole:
        return restorer.mismatch(tensor, path, f"{spec.dtype} {list(spec.shape)}", _words(tensor, layout))
    if local.is_meta:
        return materialise_part(tensor, layout, number, path, restorer)
    tensors.note_gradient(tensor, node, path, restorer)
    address = local.data_ptr() or id(local)  # empty tensors have no address
    if prod(layout.local) and layout.parts == replicated_layout(layout.whole).parts:
        sink = tensors.TensorSink(local, around=tensor if tensor is not local else None)
        restorer.want_existing(number, sink, path, address, lambda: geometry(local))
    else:
        parts = sinks(local, layout, tensor if tensor is not local else None)
        restorer.want_parts(number, parts, path, address, lambda: geometry(local))
    return lambda: tensor


def sinks(
    local: torch.Tensor, layout: ShardLayout, around: torch.Tensor | None = None
) -> Sequence[tuple[Box, tensors.TensorSink]]:
    """Returns a sink for each box of the local tensor, which is the memory of the DTensor `around`."""
    return [
        (Box(part.offsets, part.shape), tensors.TensorSink(part_view(local.detach(), part), around=around))
        for part in layout.parts
    ]


def made_like(parameter: Any, layout: ShardLayout, node: Json, path: str, restorer: Restorer) -> Thunk:
    """Plans a new tensor for a leaf on the restorer's device, laid out like its parameter (a DTensor for a DTensor)."""
    number, spec = restorer.spec(node, path)
    restorer.created.append(path)
    kind = TORCH_DTYPES[spec.dtype]
    local = torch.empty(layout.local if layout.parts else local_of(parameter).shape, dtype=kind, device=restorer.device)
    if layout.parts == replicated_layout(layout.whole).parts:
        restorer.want(number, tensors.TensorSink(local))
    else:
        restorer.want_boxes(number, sinks(local, layout))
    made = local if not is_dtensor(parameter) else around(local, parameter)
    return lambda: made


def own_like(parameter: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
    """Plans a new DTensor on the restorer's device of this rank's own part of one, cut as its parameter is."""
    local = restorer.new_leaf(node, path)
    return lambda: around(local(), parameter)


def replicated_like(parameter: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
    """Plans a new DTensor on the restorer's device, replicated on the mesh of its parameter, whose shape differs."""
    number, spec = restorer.spec(node, path)
    restorer.created.append(path)
    local = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=restorer.device)
    restorer.want(number, tensors.TensorSink(local))
    made = _replicated(local, parameter)
    return lambda: made


def _replicated(local: torch.Tensor, like: Any) -> Any:
    """Makes a DTensor replicated on the mesh of `like`, without communication."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, meta = like._spec.mesh, like._spec.tensor_meta
    meta = meta._replace(shape=local.shape, stride=local.stride(), dtype=local.dtype)
    kind: Any = DTensor
    return kind(local, type(like._spec)(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta), requires_grad=False)


def around(local: torch.Tensor, like: Any) -> Any:
    """Makes a DTensor of `local` with the layout of `like`, without communication."""
    from torch.distributed.tensor import DTensor

    spec = like._spec
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    kind: Any = DTensor
    return kind(local, replace(spec, tensor_meta=meta), requires_grad=False)


def layout_like(tensor: Any, path: str) -> ShardLayout | None:
    """Returns the layout of a DTensor or declared parameter, which its state of equal shape shares; else None."""
    return layout_of(tensor, path) if is_dtensor(tensor) else attached(tensor)


# -- meta tensors

_HINT = "build the model on the device that it trains on, or load before anything else refers to its tensors"


def materialise(tensor: torch.Tensor, number: int, spec: LeafSpec, path: str, restorer: Restorer) -> Thunk:
    """Plans giving a meta tensor memory and the bytes of leaf `number`; `tensor` stays the same object."""
    if not _note_filled(tensor, path, restorer):
        return lambda: tensor
    base = restorer.new_base(number, spec, {"as": "torch"}, path)
    return _swapped(tensor, base, path, restorer)


def materialise_part(tensor: torch.Tensor, layout: ShardLayout, number: int, path: str, restorer: Restorer) -> Thunk:
    """`materialise` for a tensor with a layout, a DTensor or a declared one: gives it memory for this rank's part."""
    if not _note_filled(tensor, path, restorer):
        return lambda: tensor
    local = torch.empty_like(local_of(tensor), device=restorer.device if restorer.device is not None else "cpu")
    local = local.detach()
    restorer.want_boxes(number, sinks(local, layout))
    return _swapped(tensor, around(local, tensor) if is_dtensor(tensor) else local, path, restorer)


def _note_filled(tensor: torch.Tensor, path: str, restorer: Restorer) -> bool:
    """Notes that a meta tensor is filled. Returns False if it already is."""
    taken = filled(restorer)
    restorer.restored.append(path)
    if id(tensor) in taken:
        return False
    taken[id(tensor)] = tensor
    return True


def _swapped(tensor: torch.Tensor, base: torch.Tensor, path: str, restorer: Restorer) -> Thunk:
    if weakref.getweakrefcount(tensor):
        restorer.faults.append(
            f"{path}: a meta tensor that something holds a weak reference to cannot be given memory ({_HINT})"
        )
    restorer.later(path, lambda: _swap(tensor, base, path, restorer), SWAPS)
    return lambda: tensor


def _swap(tensor: torch.Tensor, base: torch.Tensor, path: str, restorer: Restorer) -> None:
    made: torch.Tensor = base.detach()
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    elif type(tensor) is not torch.Tensor and not is_dtensor(tensor):
        made = made.as_subclass(type(tensor))
    if made.requires_grad != tensor.requires_grad:
        made.requires_grad_(tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise StateError(
            f"{path}: a meta tensor that cannot be given memory: {error}", subject=path, hint=_HINT
        ) from error
    restorer.kept.undo(path, lambda: torch.utils.swap_tensors(tensor, made))  # type: ignore[no-untyped-call]


def filled(restorer: Restorer) -> dict[int, Any]:
    """Returns the meta tensors that this restore fills, by identity."""
    found: dict[int, Any] = restorer.extra.setdefault("meta", {})
    return found


def device_after(tensor: torch.Tensor, restorer: Restorer) -> Any:
    """Returns the device of a tensor after the restore."""
    if not tensor.is_meta:
        return tensor.device
    return torch.device(restorer.device if restorer.device is not None else "cpu")
