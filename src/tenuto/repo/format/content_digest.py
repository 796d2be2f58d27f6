"""The content digest: separates equal copies of a checkpoint from unequal ones, in every tier and encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tenuto.model import canonical_json
from tenuto.model.canonical_json import Spelled
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, Json
from tenuto.repo.format.shard_table import BoxTable, table_parts


def content_digest(
    tree: Json | Spelled,
    leaves: Sequence[LeafSpec] | Spelled,
    digests: np.ndarray[Any, Any],
    *,
    chunk_bytes: int,
    private: Sequence[Json] = (),
) -> str:
    """Returns the SHA-256 (hex) of the canonical leaf table and every chunk digest.

    - `leaves`: in the order of leaf numbers, or their `leaf_table`.
    - `digests`: uint8 [chunks, 16] in the same order, over all ranks.
    - `private`: the private trees in the order of ranks.

    Positions, packs and authors have no part in it.
    """
    if not isinstance(tree, Spelled):
        tree = canonical_json.spell(tree)
    table = leaves if isinstance(leaves, Spelled) else leaf_table(leaves)
    # One canonical list, member by member: the tree is spelled once for this and for its manifest.
    digest = hashlib.sha256(b'["tenuto content 1",%d,' % chunk_bytes)
    for part in (tree.text, b",", canonical_json.spell(list(private)).text, b",", table.text, b"]"):
        digest.update(part)
    digest.update(np.ascontiguousarray(digests, dtype=np.uint8).data)
    return digest.hexdigest()


def rank_digest(index: Index) -> str:
    """Returns the SHA-256 (hex) of what one of several ranks wrote: its rows, its private values, its chunk digests."""
    digest = hashlib.sha256(b"tenuto rank 1")
    for part in (leaf_table(index.specs).text, canonical_json.dumps(index.private)):
        digest.update(part)
    digest.update(np.ascontiguousarray(index.digests, dtype=np.uint8).data)
    return digest.hexdigest()


def joint_digest(tree: Spelled, boxes: BoxTable, ranks: Sequence[str]) -> str:
    """Returns the SHA-256 (hex) of a checkpoint of several ranks: its tree, its table of parts, and the `rank_digest`
    of each rank. Equal contents in another layout have another digest."""
    digest = hashlib.sha256(b"tenuto joint content 1")
    for part in (tree.text, *table_parts(boxes), *(rank.encode("ascii") for rank in ranks)):
        digest.update(b"%d " % len(part))
        digest.update(part)
    return digest.hexdigest()


def leaf_table(specs: Sequence[LeafSpec]) -> Spelled:
    """Returns the part of the content digest about leaves: the same for every save of one structure."""
    # The trees map paths to leaf numbers already.
    return canonical_json.spell([f"{spec.dtype} {','.join(map(str, spec.shape))}" for spec in specs])
