"""Shows one path for `tenuto show WHERE PATH`: a leaf with its values, a plain value, or the entries below it."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.cli.console import output
from tenuto.errors import TenutoError

if TYPE_CHECKING:
    from tenuto.engine.read.opened import Leaf, Opened
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo


FIRST = 8
"""Number of values printed."""
BLOCK_BYTES = 64 << 20
"""Bytes of a leaf read at once for its statistics, unless one row has more."""


def show_path(repo: Repo, id: CheckpointId, path: str, *, json: bool, depth: int | None, rank: int | None) -> None:
    """Prints the entry at `path`. Raises LeafNotFound if there is none."""
    from tenuto.api.open import open

    with open(repo.store, run=id.run, step=id, rank=rank) as opened:
        if path in opened:
            _leaf(opened, opened[path], json)
        else:
            _below(opened, path, depth, json)


def _below(opened: Opened, path: str, depth: int | None, json: bool) -> None:
    from tenuto.cli.views.shards import spread
    from tenuto.cli.views.state_tree import columns, entries_below

    found = entries_below(opened.node(path), path, opened.specs(path), depth=depth)
    if json:
        content = {"below": {line.path: line.what for line in found}} if found else {"value": opened.plain(path)}
        output.document("show", {"where": opened.where, "checkpoint": opened.id, "path": path, **content})
        return
    output.line(str(opened.id))
    if found:
        output.line(path)
        parts = {line.path: opened[line.path].parts for line in found if line.path in opened}
        for text in columns(found, spread(parts)):
            output.line(text)
    else:
        output.line(output.rows([(path, repr(opened.plain(path)))]))


def _leaf(opened: Opened, leaf: Leaf, json: bool) -> None:
    from tenuto.cli.views.shards import parts_json, parts_rows
    from tenuto.units import size

    head, facts = first_values(leaf), statistics(leaf)
    if json:
        body = {
            "where": opened.where,
            "checkpoint": opened.id,
            "path": leaf.path,
            "kind": leaf.kind,
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
            "bytes": leaf.nbytes,
            "private": leaf.private,
            "parts": parts_json(leaf.parts),
            "first": head,
            "statistics": facts,
        }
        output.document("show", body)
        return
    output.line(str(opened.id))
    shape = f" [{', '.join(map(str, leaf.shape))}]" if leaf.shape else ""
    rows = [("leaf", leaf.path), ("holds", f"{leaf.dtype}{shape}, {size(leaf.nbytes)}")]
    if head:
        more = ", …" if facts and facts["count"] > len(head) else ""
        rows.append(("first", ", ".join(map(_text, head)) + more))
    rows += [(name, _text(value)) for name, value in facts.items() if name != "count"]
    rows += parts_rows(leaf.parts) if opened.ranks > 1 else []
    output.line(output.rows(rows))


def first_values(leaf: Leaf) -> list[Any]:
    """Returns the first values in row-major order; none if the element type needs torch, which is not installed."""
    if 0 in leaf.shape:
        return []
    key = (*[0] * max(leaf.ndim - 1, 0), *([slice(0, FIRST)] if leaf.ndim else []))
    values = _array(leaf, key if leaf.ndim else ...)
    return [] if values is None else np.atleast_1d(values).tolist()


def statistics(leaf: Leaf) -> dict[str, Any]:
    """Returns the number of values, their extremes and mean, and how many are zero, NaN or infinite.

    Reads and verifies the full leaf, a block at a time. Empty for values without an order, and for element types that
    need torch, which is not installed.
    """
    gathered = _Statistics()
    for key in _blocks(leaf):
        values = _array(leaf, key)
        if values is None or values.dtype.kind not in "fiub":
            return {}
        gathered.add(values.reshape(-1))
    return gathered.summary()


class _Statistics:
    def __init__(self) -> None:
        self.count = self.finite = self.zeros = self.nans = self.infinite = 0
        self.low, self.high, self.sum = np.inf, -np.inf, 0.0

    def add(self, values: np.ndarray[Any, Any]) -> None:
        self.count += values.size
        self.zeros += int(np.count_nonzero(values == 0))
        if values.dtype.kind == "f":
            self.nans += int(np.isnan(values).sum())
            self.infinite += int(np.isinf(values).sum())
            values = values[np.isfinite(values)]
        if values.size:
            self.finite += values.size
            self.low, self.high = min(self.low, values.min().item()), max(self.high, values.max().item())
            self.sum += float(values.sum(dtype=np.float64))

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"count": self.count}
        if self.finite:
            found |= {"min": self.low, "max": self.high, "mean": self.sum / self.finite}
        counts = {"zeros": self.zeros, "nan": self.nans, "infinite": self.infinite}
        return found | {name: count for name, count in counts.items() if count}


def _blocks(leaf: Leaf) -> list[Any]:
    if not leaf.nbytes:
        return []
    if not leaf.ndim:
        return [...]
    rows = max(BLOCK_BYTES // max(leaf.nbytes // leaf.shape[0], 1), 1)
    return [slice(low, low + rows) for low in range(0, leaf.shape[0], rows)]


def _array(leaf: Leaf, key: Any) -> np.ndarray[Any, Any] | None:
    """Returns values as numpy has them; types that only torch has become float32."""
    try:
        values = leaf[key]
    except TenutoError as error:
        if isinstance(error, ImportError):
            return None
        raise
    if isinstance(values, np.ndarray | np.generic):
        return np.asarray(values)
    try:
        return np.asarray(values.numpy())
    except TypeError:
        pass  # a type that only torch has
    try:
        return np.asarray(values.float().numpy())
    except (RuntimeError, NotImplementedError):
        return None  # bits without a numeric meaning


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if isfinite(value) else str(value)
    return str(value)
