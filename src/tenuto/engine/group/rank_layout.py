"""What one rank says of its state when a structure is planned: its tree, and which boxes of which leaves it holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tenuto.errors import CorruptionError
from tenuto.model.leaf import Box, LeafSpec, dtype
from tenuto.repo.format.columns import Kind, decode_columns, decode_json, encode_columns, encode_json
from tenuto.sharding.holdings import Shards, shards
from tenuto.state.contract import Flattened

PLACEMENTS: Final = ("whole", "replicated", "box")
"""Of shared rows, in the order of their codes."""
_WHAT: Final = "what a rank says of its state"
_KINDS: Final[tuple[Kind, ...]] = (
    ("leaf", "U64", "<u8"),
    ("ndim", "U64", "<u8"),
    ("offsets", "U64", "<u8"),
    ("shape", "U64", "<u8"),
    ("whole", "U64", "<u8"),
    ("dtype", "U16", "<u2"),
    ("placement", "U8", "|u1"),
    ("head", "U8", "|u1"),
)


@dataclass(frozen=True, slots=True, eq=False)
class RankLayout:
    """`digest`: of the rank's tree, with the plain values of the moment: equal for ranks whose trees are equal."""

    fingerprint: str
    digest: str
    rows: Shards


def shared_rows(flattened: Flattened) -> int:
    """How many of the rows belong to leaves of the shared tree: they come first."""
    specs = flattened.specs
    return next((row for row, spec in enumerate(specs) if spec.private), len(specs))


def leaf_numbers(flattened: Flattened) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The number of each row's leaf."""
    count = len(flattened.specs)
    return np.arange(count) if flattened.leaf is None else np.asarray(flattened.leaf, np.int64)


def tree_leaves(flattened: Flattened) -> int:
    """How many leaves the shared tree names."""
    return shared_rows(flattened) if flattened.shared is None else flattened.shared


def box_of(spec: LeafSpec) -> Box:
    return Box.whole(spec.shape) if spec.offsets is None else Box(spec.offsets, spec.shape)


def describe(flattened: Flattened, spelled: bytes) -> bytes:
    """All but the tree itself, which is `spelled` so: ranks that have one and the same need not each say it."""
    specs = flattened.specs[: shared_rows(flattened)]
    found = shards(
        leaf_numbers(flattened)[: len(specs)].tolist(),
        [box_of(spec) for spec in specs],
        [spec.leaf_shape for spec in specs],
        [(spec.dtype, spec.itemsize) for spec in specs],
        [PLACEMENTS.index(spec.placement) for spec in specs],
    )
    return encode_layout(RankLayout(flattened.fingerprint, hashlib.sha256(spelled).hexdigest(), found))


def encode_layout(said: RankLayout) -> bytes:
    rows = said.rows
    head = {
        "axes": rows.whole.shape[1],
        "digest": said.digest,
        "dtypes": list(rows.dtypes),
        "fingerprint": said.fingerprint,
    }
    columns = {
        "leaf": rows.leaf,
        "ndim": rows.ndim,
        "offsets": rows.offsets.reshape(-1),
        "shape": rows.shape.reshape(-1),
        "whole": rows.whole.reshape(-1),
        "dtype": rows.dtype,
        "placement": rows.placement,
        "head": encode_json(head),
    }
    return encode_columns(columns, _KINDS, narrow=True)


def read_layout(data: bytes, rank: int) -> RankLayout:
    """CorruptionError for what no rank of this version says."""
    name = f"rank {rank}"
    columns = decode_columns(data, _KINDS, narrow=True, name=name, what=_WHAT)
    head = decode_json(columns, "head", name)
    try:
        axes, dtypes = int(head["axes"]), [str(one) for one in head["dtypes"]]
        sizes = [dtype(one).size for one in dtypes]
        numbers = {name: columns[name].astype(np.int64) for name, _, _ in _KINDS[:-1]}
        rows = Shards(
            leaf=numbers["leaf"],
            offsets=numbers["offsets"].reshape(-1, axes),
            shape=numbers["shape"].reshape(-1, axes),
            whole=numbers["whole"].reshape(-1, axes),
            ndim=numbers["ndim"],
            dtype=numbers["dtype"],
            placement=numbers["placement"],
            dtypes=dtypes,
            sizes=sizes,
        )
        return RankLayout(str(head["fingerprint"]), str(head["digest"]), rows)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{name} says what this version does not understand: {error}", subject=name) from None
