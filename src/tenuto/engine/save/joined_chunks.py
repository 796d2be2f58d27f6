"""The chunks that a save has written, and those of its baseline that it names, as one table of an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tenuto.engine.save.baseline import Baseline
from tenuto.model.records import PackEntry, StoredChunks

Column = np.ndarray[Any, np.dtype[np.int64]]


class Written(NamedTuple):
    """Each chunk of a save, in the order of the index, is one of three: a new one, in `pack`, `offset`, `stored`,
    `codec` and `digests`, decoded from chunk `base` of the baseline where that is not -1; chunk `same` of the baseline;
    chunk `twin` of this save. A new one, or `same`, is decoded from the rounding of chunk `master` of this save, and
    the one behind it, where that is not -1.

    - `sizes`: their lengths.
    - `rounded`: as in `StoredChunks`, where there is a `master`.
    - `codecs`: the names of codecs.
    """

    pack: Column
    offset: Column
    stored: Column
    codec: Column
    base: Column
    same: Column
    twin: Column
    sizes: Column
    digests: np.ndarray[Any, np.dtype[np.uint8]]
    codecs: Sequence[str]
    master: Column
    rounded: np.ndarray[Any, np.dtype[np.uint8]]


def joined(
    own: Written, written: Sequence[PackEntry], baseline: Baseline | None
) -> tuple[StoredChunks, tuple[PackEntry, ...]]:
    """Returns where the chunks lie, and the packs: those of this save, then those of others that are named."""
    table, packs = _joined(own, written, baseline)
    copies = np.flatnonzero(own.master >= 0)
    if not len(copies):
        return table, packs
    rounded, base = np.zeros(len(table), np.uint8), table.base.copy()
    rounded[copies], base[copies] = own.rounded[copies], own.master[copies]
    return replace(table, base=base, rounded=rounded), packs


def _joined(
    own: Written, written: Sequence[PackEntry], baseline: Baseline | None
) -> tuple[StoredChunks, tuple[PackEntry, ...]]:
    count = len(own.sizes)
    twins = np.flatnonzero(own.twin >= 0)
    for values in (own.pack, own.offset, own.stored, own.codec, own.base, own.same):
        values[twins] = values[own.twin[twins]]
    own.digests[twins] = own.digests[own.twin[twins]]
    if baseline is None:
        table = StoredChunks(
            tuple(own.codecs),
            own.pack,
            own.offset,
            own.stored,
            own.sizes,
            own.codec,
            own.base,
            own.digests,
        )
        return table, tuple(written)
    old = baseline.stored
    # What is rounded from others is named only where this save names those too, and has them as its own rows.
    base_of = old.base if old.rounded is None else np.where(old.rounded > 0, -1, old.base)
    same = np.flatnonzero(own.same >= 0)
    # Behind the chunks of the rows: whatever of the baseline one of them is decoded from.
    reached = np.unique(np.concatenate([own.base[own.base >= 0], base_of[own.same[same]]]))
    reached = found = reached[reached >= 0]
    while len(reached):
        below = base_of[reached]
        reached = np.setdiff1d(below[below >= 0], found)
        found = np.union1d(found, reached)
    packs, codecs = list(written), list(own.codecs)
    used = np.unique(old.pack[np.concatenate([own.same[same], found])]).tolist()
    pack_of = np.zeros(len(baseline.packs), np.int64)
    for number in used:
        pack_of[number] = len(packs)
        packs.append(baseline.packs[number])
    code_of = np.zeros(len(old.codecs), np.int64)
    for number in np.unique(old.codec[np.concatenate([own.same[same], found])]).tolist():
        name = old.codecs[number]
        if name not in codecs:
            codecs.append(name)
        code_of[number] = codecs.index(name)
    place = np.full(len(old), -1, np.int64)
    place[found] = count + np.arange(len(found))
    taken = np.concatenate([own.same[same], found])
    at = np.concatenate([same, count + np.arange(len(found))])

    def column(ours: Column, theirs: Column) -> Column:
        out = np.concatenate([ours, np.zeros(len(found), np.int64)])
        out[at] = theirs[taken]
        return out

    base = np.concatenate([np.where(own.base >= 0, place[own.base], -1), np.full(len(found), -1, np.int64)])
    below = base_of[taken]
    base[at] = np.where(below >= 0, place[below], -1)
    digests = np.concatenate([own.digests, old.digests[found]])
    digests[same] = old.digests[own.same[same]]
    table = StoredChunks(
        tuple(codecs),
        column(own.pack, pack_of[old.pack]),
        column(own.offset, old.offset),
        column(own.stored, old.stored),
        column(own.sizes, old.raw),
        column(own.codec, code_of[old.codec]),
        base,
        digests,
    )
    return table, tuple(packs)
