"""What a walk down a state has met, as columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.model.leaf import LeafSpec
from holdfast.state.contract import Device
from holdfast.state.memory import Geometry


@dataclass(slots=True)
class Leaves:
    """Every leaf in the order met, aliases included."""

    sources: list[Any] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    geometries: list[Geometry] = field(default_factory=list)
    specs: list[LeafSpec] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """The row of each, or of the one that it aliases."""
    leaf: list[int] = field(default_factory=list)
    """The leaf number of each row: a leaf has several rows where this rank holds several boxes of it."""
    without: list[LeafSpec] = field(default_factory=list)
    """The leaves of which this rank holds nothing, as they are as a whole: they have no row."""

    def firsts(self) -> list[int]:
        """For each leaf met, the position of the one that is stored: its own, where it is no alias."""
        stored: list[int] = []
        found: list[int] = []
        for position, number in enumerate(self.numbers):
            if number == len(stored):
                stored.append(position)
            found.append(stored[number])
        return found
