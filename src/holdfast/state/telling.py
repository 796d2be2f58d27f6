"""Leaves as a walk tells them: numbers, rows, and which of them are the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.errors import Unserialisable
from holdfast.model.checkpoint import Json
from holdfast.model.leaf import LeafSpec, Placement
from holdfast.model.paths import METADATA
from holdfast.state.contract import Device
from holdfast.state.layouts import Layout
from holdfast.state.leaves import Leaves
from holdfast.state.memory import Geometry
from holdfast.state.nodes import ROOT

Told = tuple[Any, int, Geometry]
"""One row: its source, address and geometry."""


class Telling:
    """The leaves that one walk has met so far, shared ones first, then those of this rank alone."""

    def __init__(self) -> None:
        self.leaves = Leaves()
        self.count = 0
        self._private = False
        self._placement: Placement = "whole"
        self._base = 0
        self._first: dict[int, int] = {}
        """Address -> position of the leaf that was met there first."""
        self._others: dict[int, dict[Geometry, int]] = {}
        """Address -> row of every leaf that was met there, where there are several."""
        self._nowhere: dict[int, tuple[Any, int]] = {}
        """Identity -> a tensor of which this rank holds nothing, kept for as long as the walk takes, and its leaf."""

    def begin_private(self) -> None:
        """What follows belongs to this rank alone; its leaves are numbered from 0 again in its own tree."""
        self._private = True
        self._placement = "per_rank"
        self._nowhere.clear()
        self._base = self.count
        self._first.clear()
        self._others.clear()

    @property
    def private(self) -> bool:
        """Whether what is told now belongs to this rank alone."""
        return self._private

    @contextmanager
    def placed(self, placement: Placement) -> Iterator[None]:
        """What is told inside is placed like this; what belongs to one rank stays so."""
        before = self._placement
        self._placement = before if self._private else placement
        try:
            yield
        finally:
            self._placement = before

    def leaf(
        self,
        path: str,
        about: Json,
        spec: tuple[str, tuple[int, ...]],
        source: Any,
        *,
        device: Device,
        address: int,
        geometry: Geometry,
    ) -> Json:
        """A leaf, or an alias of one seen before: its node, which also carries `about`."""
        where = _checked_path(path)
        leaves = self.leaves
        row = self._met(source, address, geometry)
        if row != len(leaves.specs):
            return {"!": "alias", "n": leaves.leaf[row] - self._base, **about}
        leaves.specs.append(LeafSpec(where, spec[0], spec[1], self._private, placement=self._placement))
        leaves.leaf.append(self.count)
        leaves.devices.append(device)
        self.count += 1
        return {"!": "leaf", "n": leaves.leaf[row] - self._base, **about}

    def rows(
        self, path: str, about: Json, dtype: str, layout: Layout, told: Sequence[Told], *, device: Device, tensor: Any
    ) -> Json:
        """A leaf of which this rank holds the parts of `layout`, `told` one by one; or an alias of one seen before.

        Its node says dtype and whole shape too, because there is no row to say so where a rank holds nothing. `tensor`
        is what two names of such a leaf have in common.
        """
        where, leaves = _checked_path(path), self.leaves
        about = {**about, "dtype": dtype, "shape": list(layout.whole)}
        if not told:
            number = self._nowhere.setdefault(id(tensor), (tensor, self.count))[1]
            if number == self.count:
                leaves.without.append(LeafSpec(where, dtype, layout.whole))
                self.count += 1
                return {"!": "leaf", "n": number - self._base, **about}
            return {"!": "alias", "n": number - self._base, **about}
        first, new = -1, len(leaves.specs)
        placement = layout.placement if self._placement != "per_rank" else "per_rank"
        for part, (source, address, geometry) in zip(layout.parts, told, strict=True):
            row = self._met(source, address, geometry)
            first = row if first < 0 else first
            if row == len(leaves.specs):
                # A part that is the whole is a leaf like any other: so one rank alone can save what many can.
                cut = layout.placement == "box" and part.shape != layout.whole
                begin, whole = (part.offsets, layout.whole) if cut else (None, None)
                leaves.specs.append(
                    LeafSpec(where, dtype, part.shape, self._private, begin, whole, placement=placement)
                )
                leaves.leaf.append(self.count)
                leaves.devices.append(device)
        if first < new:
            return {"!": "alias", "n": leaves.leaf[first] - self._base, **about}
        self.count += 1
        return {"!": "leaf", "n": self.count - 1 - self._base, **about}

    def _met(self, source: Any, address: int, geometry: Geometry) -> int:
        """The row of the memory that a leaf lies in: that of what lay there before, or the next one."""
        leaves = self.leaves
        position, row = len(leaves.sources), len(leaves.specs)
        leaves.sources.append(source)
        leaves.addresses.append(address)
        leaves.geometries.append(geometry)
        if self._first.setdefault(address, position) != position:
            row = self._among_others(address, geometry)
        leaves.numbers.append(row)
        return row

    def _among_others(self, address: int, geometry: Geometry) -> int:
        """The row that is this very memory, where some row lies at this address already."""
        found = self._others.get(address)
        if found is None:
            first = self._first[address]
            found = self._others[address] = {self.leaves.geometries[first]: self.leaves.numbers[first]}
        return found.setdefault(geometry, len(self.leaves.specs))

    def again(self, source: Any, address: int) -> None:
        """A leaf met again, in the place it had at first."""
        self.leaves.sources.append(source)
        self.leaves.addresses.append(address)


def _checked_path(path: str) -> str:
    where = path or ROOT
    if where == METADATA:
        raise Unserialisable(f"a leaf cannot be called {METADATA}", subject=where, hint="rename the entry")
    if '#k:{"!":"str"' in where:
        raise Unserialisable(f"{where}: a key with a lone surrogate cannot name a tensor", subject=where)
    return where
