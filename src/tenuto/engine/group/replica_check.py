"""Compares by digest what several ranks hold alike: where it differs, training has diverged, or memory is bad.

Each rank digests its rows, and sends one digest for all that it has in common with the same ranks. Only where two of
those differ is every row's digest requested, to name the leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tenuto.codec.digest import DIGEST_BYTES, digest
from tenuto.errors import ShardMismatch
from tenuto.model.leaf import LeafSpec
from tenuto.record import record
from tenuto.sharding.holdings import Column, DistinctBoxes, Holdings, rank_names, replica_sets
from tenuto.state.contract import Bound, Flattened


@record(eq=False)
class ReplicaGroups:
    """The replicas among the lines of Holdings; -1 for a line that only one rank holds.

    group: a number that equal boxes of several ranks share.
    set: a number that all boxes held by the same ranks share.
    """

    group: Column
    set: Column


@record
class ComparedRows:
    """The rows of one rank that are compared, set by set, within each in an order that is the same on its ranks. Set k
    is `rows[bounds[k]:bounds[k + 1]]`."""

    rows: Sequence[int] = ()
    bounds: Sequence[int] = (0,)

    def of_sets(self, digests: bytes) -> bytes:
        """Returns one digest for each set, of those of its rows."""
        cuts = pairwise(bound * DIGEST_BYTES for bound in self.bounds)
        return b"".join(digest(digests[begin:end]) for begin, end in cuts)


def compared_rows(flattened: Flattened, leaf: Column, sets: Column) -> tuple[ComparedRows, ComparedRows]:
    """Returns the rows compared at each save, which are not declared to be equal, and all, compared now and then.

    leaf, sets: of each row, as all ranks number them; sets from 1 on, 0 for what no other rank holds.
    """
    rows = np.flatnonzero(sets).tolist()
    order = sorted(rows, key=lambda row: (sets[row], leaf[row], flattened.specs[row].box.offsets))
    undeclared = [row for row in order if flattened.specs[row].placement == "whole"]
    return _divided(undeclared, sets), _divided(order, sets)


def _divided(rows: Sequence[int], sets: Column) -> ComparedRows:
    cuts = np.flatnonzero(np.diff(sets[list(rows)])) + 1
    return ComparedRows(rows, [0, *cuts.tolist(), len(rows)]) if rows else ComparedRows()


class ReplicaDigests:
    """Digests rows of this rank's state, one after the other, through one piece of memory as large as the largest."""

    def __init__(self) -> None:
        self._known: tuple[str, tuple[int, ...]] | None = None
        self._bound: list[tuple[Bound, np.ndarray[Any, np.dtype[np.uint8]]]] = []

    def digests(self, flattened: Flattened, rows: Sequence[int]) -> bytes:
        """Returns 16 bytes for each of `rows` (`ComparedRows.rows`), of what training holds now."""
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


def check_sets(held: Holdings, groups: ReplicaGroups, lines: Column, digests: Sequence[bytes]) -> bool:
    """Returns whether what sets of ranks hold alike is the same on all of them.

    lines: those of `held` that were digested.
    digests: by rank, `ComparedRows.of_sets`.
    """
    of = held.rank[lines].astype(np.int64) * len(held) + groups.set[lines]
    number = np.unique(of) % max(len(held), 1)
    found = _read(digests, len(number))
    first = np.zeros(len(held), np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]
    return np.array_equal(found, found[first[number]])


def check_replicas(held: Holdings, groups: ReplicaGroups, lines: Column, digests: Sequence[bytes]) -> None:
    """Raises ShardMismatch, naming leaf and ranks, where equal boxes of several ranks have not the same bytes.

    digests: by rank, of its own among `lines`, in the order of `ComparedRows`.
    """
    places = [held.offsets[lines, axis] for axis in reversed(range(held.offsets.shape[1]))]
    lines = lines[np.lexsort((*places, held.leaf[lines], groups.set[lines], held.rank[lines]))]
    found, group = _read(digests, len(lines)), groups.group[lines]
    first = np.zeros(len(held), np.int64)
    first[group[::-1]] = np.arange(len(lines))[::-1]
    differs = (found != found[first[group]]).any(axis=1)
    if not differs.any():
        return
    at = int(np.flatnonzero(differs)[np.argmin(lines[differs])])
    same = group == group[at]
    path = held.path(int(lines[at]))
    others, some = (held.rank[lines[same & which]].tolist() for which in (differs, ~differs))
    raise ShardMismatch(
        f"{path} is not the same on {rank_names(others)} as on {rank_names(some)}",
        subject=path,
        hint="declare what each rank has for itself: tenuto.per_rank(…); a buffer in a module with persistent=False, "
        "and per_rank(buffer) beside it. If it has to be alike: training has gone apart, or memory is bad there",
    )


def _read(digests: Sequence[bytes], count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found = np.frombuffer(b"".join(digests), np.uint8)
    if len(found) != count * DIGEST_BYTES:
        raise ShardMismatch(f"the ranks send {len(found)} bytes of digests where {count} digests are compared")
    return found.reshape(-1, DIGEST_BYTES)


def replica_groups(held: Holdings, found: DistinctBoxes) -> ReplicaGroups:
    """Returns which boxes several ranks hold. `found`: `distinct_boxes(held)`."""
    group, sets = np.full(len(held), -1), np.full(len(held), -1)
    counts = found.counts
    several = counts > 1
    if several.any():
        of = replica_sets(held, found)
        many = of.size > 1
        number = np.cumsum(many) - 1
        cell = np.repeat(np.arange(len(counts)), counts)
        group[found.holders] = np.where(several[cell], cell, -1)
        sets[found.holders] = np.where(several[cell], number[of.of[cell]], -1)
    return ReplicaGroups(group, sets)
