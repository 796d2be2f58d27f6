"""Finds leaves that are the same memory, and leaves that overlap without being the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

Column = np.ndarray[Any, np.dtype[np.int64]]


class Geometry(NamedTuple):
    """The layout of a leaf in memory without its address. Equal geometry at equal address is an alias.

    - `space`: the memory ("cpu", "cuda:0").
    - `extent`: bytes from the first to the last element.
    - `shape`: whatever else distinguishes two views of one address.
    """

    space: str
    extent: int
    shape: Hashable


def first_of_each(addresses: Sequence[int], geometries: Sequence[Geometry]) -> list[int]:
    """Returns for each leaf the position of the first that is the same memory; its own if it is the first."""
    seen: dict[tuple[int, Geometry], int] = {}
    return [
        seen.setdefault((address, geometry), position)
        for position, (address, geometry) in enumerate(zip(addresses, geometries, strict=True))
    ]


class Arrangement:
    """The memory relations of the leaves of one state: which are the same, and that no others share a byte.

    `firsts` are those of `first_of_each`, separately for the leaves before `boundary` and from it on.
    """

    def __init__(self, geometries: Sequence[Geometry], firsts: Sequence[int], boundary: int) -> None:
        count = len(geometries)
        extents = np.fromiter((one.extent for one in geometries), np.int64, count)
        names = {name: number for number, name in enumerate(dict.fromkeys(one.space for one in geometries))}
        spaces = np.fromiter((names[one.space] for one in geometries), np.int64, count)
        first: Column = np.asarray(firsts, np.int64)
        own = first == np.arange(count)
        self._aliases: Column = np.flatnonzero(~own)
        self._targets: Column = first[self._aliases]
        self._stored: Column = np.flatnonzero(own & (extents > 0))
        self._extents: Column = extents[self._stored]
        self._spaces: Column = spaces[self._stored]
        empty = np.flatnonzero(extents == 0).tolist()
        # Empty leaves have no location: their addresses only tell which are the same object.
        self._empty = [
            (positions, [geometries[position] for position in positions], [firsts[position] for position in positions])
            for positions in ([one for one in empty if one < boundary], [one for one in empty if one >= boundary])
            if positions
        ]

    def holds(self, addresses: Sequence[int]) -> bool:
        """Returns whether leaves at these addresses have the same aliases and no overlaps.

        False means that a full check is needed; never True for another arrangement.
        """
        at: Column = np.fromiter(addresses, np.int64, len(addresses))
        for positions, geometries, firsts in self._empty:
            found = first_of_each([addresses[position] for position in positions], geometries)
            if [positions[place] for place in found] != firsts:
                return False
        if not np.array_equal(at[self._aliases], at[self._targets]):
            return False
        return _apart(at[self._stored], self._extents, self._spaces)


def _apart(begins: Column, extents: Column, spaces: Column) -> bool:
    """Returns whether no two of these non-empty ranges share a byte of one space."""
    order = np.lexsort((begins, spaces))
    begin, space = begins[order], spaces[order]
    ends = begin + extents[order]
    return not bool(((space[1:] == space[:-1]) & (begin[1:] < ends[:-1])).any())


def overlaps(
    addresses: Sequence[int], geometries: Sequence[Geometry], positions: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns overlapping pairs among `positions`: each leaf with the one that reaches furthest before it."""
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
