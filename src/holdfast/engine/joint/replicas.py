"""What several ranks hold alike is compared by digest: where it differs, training has gone apart, or memory is bad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.codec.digest import DIGEST_BYTES, digest
from holdfast.errors import ShardMismatch
from holdfast.model.leaf import LeafSpec
from holdfast.plan.columns import Column
from holdfast.plan.holdings import Holdings
from holdfast.plan.naming import rank_names
from holdfast.state.contract import Bound, Flattened


class Replicas:
    """Digests rows of this rank's state, one after the other, through one piece of memory as large as the largest."""

    def __init__(self) -> None:
        self._known: tuple[str, tuple[int, ...]] | None = None
        self._bound: list[tuple[Bound, np.ndarray[Any, np.dtype[np.uint8]]]] = []

    def digests(self, flattened: Flattened, rows: Sequence[int]) -> bytes:
        """16 bytes for each of `rows`, of what training holds now."""
        asked = flattened.fingerprint, tuple(rows)
        specs = [flattened.specs[row] for row in rows]
        if self._known != asked:
            self._known, self._bound = asked, _bind(flattened, rows, specs)
        found = bytearray()
        for row, (bound, view) in zip(rows, self._bound, strict=True):
            bound.copy([flattened.sources[row]], 0, 1)
            bound.wait()
            found += digest(view.data)
        return bytes(found)


def _bind(
    flattened: Flattened, rows: Sequence[int], specs: Sequence[LeafSpec]
) -> list[tuple[Bound, np.ndarray[Any, np.dtype[np.uint8]]]]:
    memory = np.empty(max((spec.nbytes for spec in specs), default=0), np.uint8)
    found = []
    for row, spec in zip(rows, specs, strict=True):
        view = memory[: spec.nbytes]
        found.append((flattened.devices[flattened.device[row]].bind([spec], [view]), view))
    return found


def check_replicas(held: Holdings, groups: Column, lines: Column, digests: Sequence[bytes]) -> None:
    """Raises ShardMismatch, naming leaf and ranks, where equal boxes of several ranks have not the same bytes.

    `groups`: `replica_groups(held)`; `lines`: of `held`, ascending, those that were digested; `digests[rank]`: of the
    rank's own among them, in order.
    """
    said = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)
    if len(said) != len(lines):
        raise ShardMismatch(f"the ranks have digested {len(said)} replicas where there are {len(lines)}")
    if not len(lines):
        return
    first = np.zeros(int(groups.max()) + 1, np.int64)
    first[groups[lines][::-1]] = np.arange(len(lines))[::-1]
    differs = (said != said[first[groups[lines]]]).any(axis=1)
    if not differs.any():
        return
    at = int(lines[int(np.argmax(differs))])
    same = groups[lines] == groups[at]
    path = held.path(at)
    others, some = (held.rank[lines[same & which]].tolist() for which in (differs, ~differs))
    raise ShardMismatch(
        f"{path} is not the same on {rank_names(others)} as on {rank_names(some)}",
        subject=path,
        hint="if each rank has its own: holdfast.per_rank(…); if not, training has gone apart or memory is bad there",
    )


def replica_groups(held: Holdings) -> Column:
    """For each line a number that equal boxes of several ranks share; -1 where one rank alone holds it."""
    columns = np.column_stack([held.leaf, held.offsets, held.shape])
    if not len(columns):
        return np.zeros(0, np.int64)
    _, group, counts = np.unique(columns, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    found: Column = np.where(counts[group] > 1, group, -1)
    return found
