"""Which leaves are the same memory, and which overlap without being the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Geometry(NamedTuple):
    """What a leaf's memory looks like, its address apart. Equal geometry at an equal address: an alias.

    `space` is the memory it lies in ("cpu", "cuda:0"), `extent` bytes from the first to the last element, `shape` is
    whatever else tells two views of one address apart.
    """

    space: str
    extent: int
    shape: Hashable


def first_of_each(addresses: Sequence[int], geometries: Sequence[Geometry]) -> list[int]:
    """For each leaf the position of the first that is the same memory; its own where it is the first."""
    seen: dict[tuple[int, Geometry], int] = {}
    return [
        seen.setdefault((address, geometry), position)
        for position, (address, geometry) in enumerate(zip(addresses, geometries, strict=True))
    ]


def overlaps(
    addresses: Sequence[int], geometries: Sequence[Geometry], positions: Sequence[int]
) -> list[tuple[int, int]]:
    """Pairs among `positions` whose memory overlaps, each leaf with the one that reaches furthest before it."""
    ordered = sorted(
        (position for position in positions if geometries[position].extent),
        key=lambda position: (geometries[position].space, addresses[position]),
    )
    found: list[tuple[int, int]] = []
    furthest = -1
    for position in ordered:
        if furthest >= 0 and geometries[furthest].space == geometries[position].space:
            if addresses[position] < addresses[furthest] + geometries[furthest].extent:
                found.append((furthest, position))
            elif addresses[position] + geometries[position].extent <= addresses[furthest] + geometries[furthest].extent:
                continue
        if (
            furthest < 0
            or geometries[furthest].space != geometries[position].space
            or addresses[position] + geometries[position].extent > addresses[furthest] + geometries[furthest].extent
        ):
            furthest = position
    return found
