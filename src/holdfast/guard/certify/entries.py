"""The state at one moment as entries that can be compared: each leaf's digest, each plain value as it is spelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from holdfast.codec.digest import digest
from holdfast.errors import HoldfastError
from holdfast.model import canonical
from holdfast.model.checkpoint import Json
from holdfast.state.contract import Flattened
from holdfast.state.flattener import flatten
from holdfast.state.nodes import ROOT, children, kind_of, walk

SPELLED: Final = 80
"""Characters of a plain value; a longer one is told by its digest."""


def entries(flattened: Flattened) -> dict[str, str]:
    """Path -> what is there. Copies one leaf at a time to the host."""
    shared = sum(not spec.private for spec in flattened.specs)
    marks = [_leaf(flattened, number) for number in range(len(flattened.specs))]
    found = dict(_told(flattened.tree, _by_leaf(flattened, marks[:shared]), ""))
    if flattened.private is not None:
        found.update(_told(flattened.private, marks[shared:], ""))
    return found


def _by_leaf(flattened: Flattened, marks: list[str]) -> list[str]:
    """What there is of each leaf here: of one that is cut over ranks every part that this rank holds, or none."""
    if flattened.leaf is None:
        return marks
    rows = list(zip(flattened.leaf, marks, strict=False))
    found = [""] * (
        flattened.shared if flattened.shared is not None else max((leaf + 1 for leaf, _ in rows), default=0)
    )
    for leaf, mark in rows:
        found[leaf] = f"{found[leaf]}, {mark}" if found[leaf] else mark
    return [mark or "no part of it" for mark in found]


def mark_of(value: Any) -> str | None:
    """A digest of anything that could be in a state, such as a batch; None for what has no representation."""
    try:
        return digest(canonical.dumps(entries(flatten({"value": value})))).hex()
    except HoldfastError:
        return None


def _told(tree: Json, marks: list[str], path: str) -> Iterator[tuple[str, str]]:
    for where, node in walk(tree, path):
        kind = kind_of(node)
        if kind == "leaf":
            yield where or ROOT, marks[int(node["n"])]
        elif kind == "alias":
            yield where or ROOT, f"the same as leaf {node['n']}"
        elif not children(node, where):
            text = canonical.dumps(node).decode("ascii")
            yield where or ROOT, text if len(text) <= SPELLED else f"xxh3:{digest(text.encode()).hex()}"


def _leaf(flattened: Flattened, number: int) -> str:
    spec, source = flattened.specs[number], flattened.sources[number]
    content = np.empty(spec.nbytes, np.uint8)
    if spec.nbytes:
        bound = flattened.devices[flattened.device[number]].bind([spec], [content])
        bound.copy([source], 0, 1)
        bound.wait()
    where = "" if spec.offsets is None else f" at {list(spec.offsets)}"
    return f"{spec.dtype}{list(spec.shape)}{where} xxh3:{digest(content).hex()}"
