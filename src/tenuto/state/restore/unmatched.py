"""What one of several ranks does not take of a checkpoint, told so that it can be laid beside what the others say: a
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
    """Of one rank. `paths`: the terminals of the checkpoint's tree, as its target calls them. A bit for each, packed:
    `over` for what lies in an entry that the target names, and has no place there; `untaken` for that, and for what the
    rank does not ask for."""

    paths: Sequence[str]
    over: bytes
    untaken: bytes

    def encode(self) -> bytes:
        spelled = "\0".join(self.paths).encode("utf-8", "backslashreplace")
        return hashlib.sha256(spelled).digest()[:_MARK_BYTES] + zlib.compress(self.over + self.untaken)

    def named(self, packed: bytes) -> list[str]:
        """The paths whose bits are set."""
        return [self.paths[at] for at in np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8))).tolist()]


def unmatched(
    tree: Json, over: Collection[str], aside: Collection[str], takes: Callable[[str], bool]
) -> Unmatched | None:
    """Of a tree: what lies at and below `over` is left over; what lies at and below `aside`, and what `takes` says no
    to, is not asked for. None where all of it is taken."""
    paths, roots, others = terminals(tree), frozenset(over), frozenset((*over, *aside))
    untaken = [not takes(path) or _below(path, others) for path in paths]
    if not any(untaken):
        return None
    return Unmatched(paths, _packed([_below(path, roots) for path in paths]), _packed(untaken))


def unmatched_by_all(said: Sequence[bytes]) -> bytes:
    """What no rank takes, although one names the entry that it lies in: a bit for each terminal, packed; empty for
    nothing. `said[rank]`: of `LeftOver.encode`, empty for a rank that takes all. Of ranks that call the terminals by
    different names nothing can be said."""
    if not all(said) or len({one[:_MARK_BYTES] for one in said}) > 1:
        return b""
    told = [np.frombuffer(zlib.decompress(one[_MARK_BYTES:]), np.uint8).reshape(2, -1) for one in said]
    over, untaken = np.stack(told, axis=1)
    found: np.ndarray[Any, np.dtype[np.uint8]] = np.bitwise_or.reduce(over) & np.bitwise_and.reduce(untaken)
    return found.tobytes() if found.any() else b""


def _below(path: str, roots: frozenset[str]) -> bool:
    return not roots.isdisjoint(lineage(path))


def _packed(bits: Sequence[bool]) -> bytes:
    return np.packbits(np.array(bits, bool)).tobytes()
