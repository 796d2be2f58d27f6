"""The leaves of a state, each as a whole: what matching needs to know of them, whoever holds which rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from holdfast.errors import CorruptionError
from holdfast.model.checkpoint import Json
from holdfast.model.leaf import LeafSpec
from holdfast.state.contract import Flattened, Form
from holdfast.state.nodes import leaf_nodes, leaf_paths


class Wholes(Sequence[LeafSpec]):
    """The leaves of a shared tree, then those of a private one (None: there is none), by number.

    `forms` are dtype and whole shape of each. Raises CorruptionError for trees that have another number of leaves, or
    that `flatten` cannot have made.
    """

    def __init__(self, tree: Json, private: Json, forms: Sequence[Form]) -> None:
        shared = leaf_paths(tree)
        self.paths: Sequence[str] = shared + (leaf_paths(private) if private is not None else [])
        self.trees = (tree, private)
        self.shared = len(shared)
        self._forms = list(forms)
        if len(self._forms) != len(self.paths):
            raise CorruptionError(
                f"{len(self._forms)} leaves are described, the trees name {len(self.paths)}",
                hint="`holdfast verify WHERE` names all that is damaged",
            )

    def forms(self) -> Sequence[Form]:
        return self._forms

    def __len__(self) -> int:
        return len(self._forms)

    @overload
    def __getitem__(self, leaf: int) -> LeafSpec: ...
    @overload
    def __getitem__(self, leaf: slice) -> Sequence[LeafSpec]: ...
    def __getitem__(self, leaf: int | slice) -> LeafSpec | Sequence[LeafSpec]:
        if isinstance(leaf, slice):
            return [self[one] for one in range(*leaf.indices(len(self)))]
        number = range(len(self))[leaf]
        return LeafSpec(self.paths[number], *self._forms[number], number >= self.shared)


def told_forms(tree: Json) -> dict[int, Form]:
    """Leaf number -> dtype and whole shape, of the leaves whose nodes say so: those that a rank may hold a part of."""
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


def forms_of(flattened: Flattened) -> list[Form]:
    """Dtype and whole shape of every leaf that the trees of one rank name, by number."""
    numbers = range(len(flattened.specs)) if flattened.leaf is None else flattened.leaf
    found = told_forms(flattened.tree)
    found.update((number, (spec.dtype, spec.leaf_shape)) for number, spec in zip(numbers, flattened.specs, strict=True))
    return [found[number] for number in range(len(found))]
