"""The content digest: tells equal copies of a checkpoint from unequal ones, in every tier and encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.model import canonical
from holdfast.model.checkpoint import Json
from holdfast.model.leaf import LeafSpec


def content_digest(
    tree: Json,
    specs: Sequence[LeafSpec],
    digests: np.ndarray[Any, Any],
    *,
    chunk_bytes: int,
    private: Sequence[Json] = (),
) -> str:
    """SHA-256 (hex) of the canonical leaf table and every chunk digest.

    `specs` in the order of leaf numbers, `digests` uint8 [chunks, 16] in the same order, over all ranks; `private` the
    private trees in the order of ranks. Where leaves lie, in which packs, and who saved them has no part in it.
    """
    # Which leaf lies at which path is in the trees already, by number.
    table = [f"{spec.dtype} {','.join(map(str, spec.shape))}" for spec in specs]
    digest = hashlib.sha256(canonical.dumps(["holdfast content 1", chunk_bytes, tree, list(private), table]))
    digest.update(np.ascontiguousarray(digests, dtype=np.uint8).data)
    return digest.hexdigest()
