"""JAX's adapter: arrays and keys, registered pytrees, and Flax's NNX objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import jax

from tenuto.errors import Unserialisable
from tenuto.integrations.jax import arrays, nnx_objects, pytrees
from tenuto.integrations.jax.versions import check_version
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.state.contract import Sink
from tenuto.state.declarations import Shard
from tenuto.state.encode.walker import StateWalker
from tenuto.state.frameworks import Refresh
from tenuto.state.restore.restorer import Restorer, Thunk
from tenuto.state.tree import ROOT

_ARRAYS: Final = (jax.Array, jax.ShapeDtypeStruct, jax.core.Tracer)


class JaxAdapter:
    def claims(self, kind: type) -> bool:
        return issubclass(kind, _ARRAYS) or pytrees.knows(kind)

    def plain(self, kind: type) -> bool:
        return False

    def owners(self, value: Any, path: str) -> Iterable[tuple[Any, str]]:
        return ()

    def encode_entries(self, entries: Mapping[str, Any], path: str, writer: StateWalker) -> None:
        return None

    def encode(self, value: Any, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        if isinstance(value, _ARRAYS):
            return arrays.encode(value, path, writer)
        room: Any = nnx_objects if nnx_objects.is_one(value) else pytrees
        return room.node(value, path, writer), lambda again, replay: room.node(again, path, replay)

    def encode_shard(self, value: Shard, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        raise Unserialisable(
            f"{path or ROOT}: a part of an array of JAX cannot be declared: its sharding says where it lies",
            subject=path,
            hint="give it a NamedSharding over all processes, jax.make_array_from_process_local_data(…)",
        )

    def restore(self, value: Any, node: Json, path: str, restorer: Restorer) -> Thunk:
        if isinstance(value, _ARRAYS):
            return arrays.restore(value, node, path, restorer)
        room: Any = nnx_objects if nnx_objects.is_one(value) else pytrees
        thunk: Thunk = room.restore(value, node, path, restorer)
        return thunk

    def restore_shard(self, value: Shard, node: Json, path: str, restorer: Restorer) -> Thunk:
        return restorer.mismatch(value.value, path, restorer.words(node), "a declared part of an array of JAX")

    def fresh(self, node: Json, path: str, restorer: Restorer) -> Thunk:
        return arrays.fresh_key(node, path, restorer)

    def allocate(self, spec: LeafSpec, node: Json, device: Any) -> tuple[Any, Sink]:
        return arrays.allocate(spec, device)

    def view(self, base: arrays.NewArray, node: Json) -> Any:
        return base.take(bool(node.get("weak")))


check_version()
adapter: Final = JaxAdapter()
