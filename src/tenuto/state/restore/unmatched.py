"""The parts of a checkpoint that one of several ranks does not take, encoded for comparison with the other ranks: a
stage that leaves over what others take is no mismatch."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tenuto.model.paths import lineage
from tenuto.model.records import Json
from tenuto.state.tree import terminals

_MARK_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Unmatched:
    """The unmatched paths of one rank.

    - `paths`: the terminals of the checkpoint's tree, as the target names them. The others have one packed bit per
      path:
    - `over`: in an entry that the target names, without a place in it.
    - `untaken`: the same, and what the rank does not ask for.
    """

    paths: Sequence[str]
    over: bytes
    untaken: bytes

    def encode(self) -> bytes:
        spelled = "\0".join(self.paths).encode("utf-8", "backslashreplace")
        return hashlib.sha256(spelled).digest()[:_MARK_BYTES] + zlib.compress(self.over + self.untaken)

    def named(self, packed: bytes) -> list[str]:
        """Returns the paths whose bits are set."""
        return [self.paths[at] for at in np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8))).tolist()]


def unmatched(
    tree: Json, over: Collection[str], aside: Collection[str], takes: Callable[[str], bool]
) -> Unmatched | None:
    """Compares a tree with the target: paths at and below `over` are left over; those at and below `aside`, and those
    `takes` refuses, are not asked for. Returns None if all is taken."""
    paths, roots, others = terminals(tree), frozenset(over), frozenset((*over, *aside))
    untaken = [not takes(path) or _below(path, others) for path in paths]
    if not any(untaken):
        return None
    return Unmatched(paths, _packed([_below(path, roots) for path in paths]), _packed(untaken))


def unmatched_by_all(encoded: Sequence[bytes]) -> bytes:
    """Returns what no rank takes although one names its entry: packed bits per terminal, empty for nothing.

    `encoded[rank]` is `Unmatched.encode`, empty for a rank that takes all. Returns nothing if ranks name the terminals
    differently.
    """
    if not all(encoded) or len({one[:_MARK_BYTES] for one in encoded}) > 1:
        return b""
    columns = [np.frombuffer(zlib.decompress(one[_MARK_BYTES:]), np.uint8).reshape(2, -1) for one in encoded]
    over, untaken = np.stack(columns, axis=1)
    found: np.ndarray[Any, np.dtype[np.uint8]] = np.bitwise_or.reduce(over) & np.bitwise_and.reduce(untaken)
    return found.tobytes() if found.any() else b""


def _below(path: str, roots: frozenset[str]) -> bool:
    return not roots.isdisjoint(lineage(path))


def _packed(bits: Sequence[bool]) -> bytes:
    return np.packbits(np.array(bits, bool)).tobytes()
