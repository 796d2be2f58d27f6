"""One leaf of an opened checkpoint: what it is, and its values when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.engine.joined import JoinedReader
from holdfast.engine.lazy import LazyReader
from holdfast.errors import MissingExtra, StateError, install
from holdfast.model.checkpoint import Json
from holdfast.model.dtypes import dtype
from holdfast.model.leaf import LeafSpec
from holdfast.plan.slices import Region, region
from holdfast.state import registry
from holdfast.state.contract import Buffer

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


class Leaf:
    """A tensor, an array or long bytes in a checkpoint, of which nothing has been read yet.

    `leaf[...]`, `leaf[3]`, `leaf[10:20, ::2]` read what they name and nothing else but the rest of the chunks it lies
    in, verify it, and return memory of its own: a torch tensor in host memory where a tensor was saved, else a numpy
    array. Whole numbers, slices (steps of either sign) and an Ellipsis are understood; BadIndex for anything else.
    CorruptionError, naming leaf, pack and offset, where the bytes are not those that were saved.
    """

    __slots__ = ("_node", "_reader", "_row", "_spec")

    def __init__(self, spec: LeafSpec, row: int, node: Json, reader: LazyReader | JoinedReader) -> None:
        self._spec = spec
        self._row = row
        self._node = node
        self._reader = reader

    @property
    def path(self) -> str:
        return self._spec.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    @property
    def dtype(self) -> str:
        """The element type's name, as torch has it: "float32", "bfloat16"; types of numpy alone are "numpy:<U8"."""
        return self._spec.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self._spec.nbytes

    @property
    def kind(self) -> str:
        """What was saved: "torch", "numpy" or "bytes"."""
        return str(self._node.get("as"))

    @property
    def private(self) -> bool:
        """Whether it belongs to one rank alone."""
        return self._spec.private

    @property
    def parts(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Which rank saved which part of it: rank, where the part begins in the leaf, and its shape. One part of all of
        it where a single rank did."""
        return [(rank, box.offsets, box.shape) for rank, box in self._reader.parts(self._row)]

    def __getitem__(self, key: Any) -> Any:
        framework = "numpy"
        if self.kind == "torch":
            framework = "torch" if _has_torch() or dtype(self.dtype).numpy is None else "numpy"
        return self._values(framework, region(self.shape, key, self.path))

    def __len__(self) -> int:
        if not self.shape:
            raise StateError(
                f"{self.path} has no dimension, and so no length", subject=self.path, hint="[()] reads its one value"
            )
        return self.shape[0]

    def numpy(self) -> Array:
        """All values as an array of their own. StateError where numpy has no such element type."""
        array: Array = self._values("numpy", region(self.shape, ..., self.path))
        return array

    def torch(self, device: Any = None) -> torch.Tensor:
        """All values as a tensor, in host memory or on `device`; neither a parameter nor asking for gradients.

        StateError where torch has no such element type; MissingExtra without torch.
        """
        tensor: torch.Tensor = self._values("torch", region(self.shape, ..., self.path))
        return tensor if device is None else tensor.to(device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise StateError(
                f"{self.path}: values that have not been read are not there without a copy",
                subject=self.path,
                hint="leave copy=False out",
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        return f"<leaf {self.path}: {self.dtype} {list(self.shape)}>"

    def _values(self, framework: str, chosen: Region) -> Any:
        row = dtype(self.dtype)
        if framework == "numpy" and row.numpy is None:
            raise StateError(
                f"{self.path}: numpy has no type {self.dtype}",
                subject=self.path,
                hint="torch() or [...] gives a tensor; torch().float().numpy() an array",
            )
        try:
            adapter = registry.home(framework)
        except ImportError:
            raise MissingExtra(
                f"{self.path} is {self.dtype}, which only torch has" if row.numpy is None else "torch is not installed",
                subject=self.path,
                hint=install("torch"),
            ) from None
        spec = LeafSpec(self.path, self.dtype, chosen.shape)
        value, sink = adapter.allocate(spec, self._node, None)
        buffer = sink.buffer
        data: Buffer = np.empty(spec.nbytes, np.uint8) if buffer is None else buffer
        self._reader.read(self._row, self.path, chosen, row.size, data)
        if buffer is None:
            sink.fill(data)
        return value


def _has_torch() -> bool:
    try:
        registry.home("torch")
    except ImportError:
        return False
    return True
