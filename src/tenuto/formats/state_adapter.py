"""Tensors of foreign checkpoints as leaves of a state: read as they are captured, straight into the image.

So `tenuto.save(tenuto.formats.read("model.safetensors").tree, "checkpoints")` needs no memory for the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

from tenuto.errors import StateError, Unserialisable
from tenuto.formats.contract import Tensor
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.state.encode.aliasing import Geometry
from tenuto.state.encode.walker import StateWalker, StructureChanged
from tenuto.state.frameworks import Refresh
from tenuto.state.self_reading import SelfReading

_FILES: Final = SelfReading("files")


class TensorAdapter:
    """Represents lazy tensors in a state that is saved. They are never restored into: nothing is written to a file."""

    def claims(self, kind: type) -> bool:
        return issubclass(kind, Tensor)

    def plain(self, kind: type) -> bool:
        return False

    def owners(self, value: Any, path: str) -> Iterable[tuple[Any, str]]:
        return ()

    def encode(self, value: Any, path: str, writer: StateWalker) -> tuple[Json, Refresh]:
        form = (value.dtype, value.shape)
        geometry = Geometry("files", 0, None)
        node = writer.leaf(
            path, {"as": value.made_by}, form, value, device=_FILES, address=id(value), geometry=geometry
        )

        def refresh(again: Any, replay: StateWalker) -> Json:
            if (again.dtype, again.shape) != form:
                raise StructureChanged
            replay.again(again, id(again))
            return node

        return node, refresh

    def encode_entries(self, entries: Mapping[str, Any], path: str, writer: StateWalker) -> None:
        return None

    def encode_shard(self, value: Any, path: str, writer: StateWalker) -> NoReturn:
        raise Unserialisable(f"{path}: a tensor in a file is not a shard", subject=path, hint="save it as it is")

    def restore(self, value: Any, node: Json, path: str, restorer: Any) -> NoReturn:
        raise StateError(
            f"{path}: a tensor in a file cannot be restored into",
            subject=path,
            hint="load into tensors or arrays, or without a target",
        )

    restore_shard = restore

    def fresh(self, node: Json, path: str, restorer: Any) -> NoReturn:
        raise StateError(f"{path}: no kind of node is made by a file", subject=path)

    def allocate(self, spec: LeafSpec, node: Json, device: Any) -> NoReturn:
        raise StateError(f"{spec.path}: no leaf is made by a file", subject=spec.path)

    def view(self, base: Any, node: Json) -> Any:
        return base


adapter: Final = TensorAdapter()
