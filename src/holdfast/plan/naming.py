"""How errors name leaves, ranks and items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

SHOWN: Final = 8
"""Ranks that are named one by one."""


def leaf_name(paths: Sequence[str], leaf: int) -> str:
    return paths[leaf] if 0 <= leaf < len(paths) else f"leaf {leaf}"


def rank_names(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 and 4`, `ranks 0-3 and 8`; of more than a few runs only the first, and how many ranks."""
    found = sorted(set(ranks))
    if not found:
        return "no rank"
    runs: list[list[int]] = []
    for rank in found:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs[:SHOWN]]
    if len(runs) > SHOWN:
        return f"{len(found)} ranks ({', '.join(words)}, …)"
    if len(found) == 1:
        return f"rank {words[0]}"
    return "ranks " + (f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0])


def item_name(place: Sequence[int]) -> str:
    """An item by its place along each axis; of a leaf without axes there is only the one."""
    return f"item [{', '.join(map(str, place))}]" if len(place) else "its only item"
