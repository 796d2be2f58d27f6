"""The leaves of an index and of a state as sequences of specs, each made on access: a table of columns is cheap to
keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, overload

import numpy as np

from tenuto.errors import CorruptionError
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Json
from tenuto.state.contract import Form
from tenuto.state.tree import leaf_nodes, leaf_paths

Array = np.ndarray[Any, Any]


class LeafSpecs(Sequence[LeafSpec]):
    """The leaves of an index. Row i is the leaf `paths[i]` of dtype `names[code[i]]` and shape `dims[bounds[i]:bounds[i
    + 1]]`; rows from `shared` on are private. With `origin` and `whole`, ragged like `dims`, a row is the part of its
    leaf at that origin. Equal to any sequence of equal leaves."""

    __slots__ = ("_bounds", "_code", "_dims", "_made", "_names", "_parts", "paths", "shared", "trees")

    def __init__(
        self,
        paths: Sequence[str],
        *,
        names: Sequence[str],
        code: Array,
        dims: Array,
        bounds: Array,
        shared: int,
        trees: tuple[Json, Json] = (None, None),
        origin: Array | None = None,
        whole: Array | None = None,
    ) -> None:
        """`trees`: the shared and the private one, already checked against the paths."""
        self.paths = paths
        self.trees = trees
        self.shared = shared
        self._names = names
        self._code: list[int] = code.tolist()
        self._dims: list[int] = dims.tolist()
        self._bounds: list[int] = bounds.tolist()
        self._parts = None if origin is None or whole is None else (origin.tolist(), whole.tolist())
        self._made: dict[int, LeafSpec] = {}

    def __len__(self) -> int:
        return len(self._code)

    @overload
    def __getitem__(self, row: int) -> LeafSpec: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[LeafSpec, ...]: ...
    def __getitem__(self, row: int | slice) -> LeafSpec | tuple[LeafSpec, ...]:
        found = self._made.get(row) if type(row) is int else None
        if found is not None:
            return found
        if isinstance(row, slice):
            return tuple(self[one] for one in range(*row.indices(len(self))))
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        at = row % len(self)
        cut = slice(self._bounds[at], self._bounds[at + 1])
        shape = tuple(self._dims[cut])
        offsets = whole = None
        if self._parts is not None and tuple(self._parts[1][cut]) != shape:
            offsets, whole = (tuple(one[cut]) for one in self._parts)
        path, name = self.paths[at], self._names[self._code[at]]
        made = self._made[at] = LeafSpec(path, name, shape, at >= self.shared, offsets, whole)
        return made

    def __iter__(self) -> Iterator[LeafSpec]:
        if self._parts is not None:
            return (self[row] for row in range(len(self)))
        if len(self._made) < len(self):
            private = [row >= self.shared for row in range(len(self))]
            names, shapes = zip(*self.forms(), strict=True)
            self._made = dict(enumerate(map(LeafSpec, self.paths, names, shapes, private)))
        return iter(self._made[row] for row in range(len(self)))

    def forms(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns dtype and shape of each row."""
        shapes: Iterable[tuple[int, ...]]
        width = self._bounds[1] if len(self) else 0
        if width and self._bounds == list(range(0, width * len(self) + 1, width)):
            shapes = zip(*[iter(self._dims)] * width, strict=True)  # all have equally many dimensions: cut at once
        else:
            shapes = [tuple(self._dims[start:stop]) for start, stop in pairwise(self._bounds)]
        return list(zip(map(self._names.__getitem__, self._code), shapes, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Specs({len(self)} leaves)"


class LeafTable(LeafSpecs):
    """The full leaves of a shared tree, then those of a private one (None without one), by number."""

    __slots__ = ()

    def __init__(self, tree: Json, private: Json, forms: Sequence[Form]) -> None:
        """`forms`: dtype and full shape of each leaf. Raises CorruptionError for trees with another number of leaves,
        or that `flatten` cannot have made."""
        shared = leaf_paths(tree)
        paths = shared + (leaf_paths(private) if private is not None else [])
        if len(forms) != len(paths):
            raise CorruptionError(
                f"{len(forms)} leaves are described, the trees name {len(paths)}",
                hint="`tenuto verify WHERE` names all that is damaged",
            )
        codes = {name: code for code, name in enumerate(dict.fromkeys(name for name, _ in forms))}
        super().__init__(
            paths,
            names=list(codes),
            code=np.array([codes[name] for name, _ in forms], np.int64),
            dims=np.array([length for _, shape in forms for length in shape], np.int64),
            bounds=np.array([0, *accumulate(len(shape) for _, shape in forms)], np.int64),
            shared=len(shared),
            trees=(tree, private),
        )


def leaf_forms(tree: Json) -> dict[int, Form]:
    """Returns leaf number -> dtype and full shape, of leaves whose nodes have them: those that a rank may have a part
    of."""
    found: dict[int, Form] = {}
    for path, node in leaf_nodes(tree):
        if node["!"] == "leaf" and "dtype" in node:
            shape = node.get("shape")
            if type(node["dtype"]) is not str or type(shape) is not list or not all(map(_is_length, shape)):
                raise CorruptionError(f"{path}: a leaf without a shape", subject=path)
            found[node["n"]] = (node["dtype"], tuple(shape))
    return found


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
