"""What an index says of the leaves themselves, as columns: the same at every save of one structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from holdfast.model.leaf import LeafSpec

Column = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Row i has the dtype `dtypes[code[i]]` and the dimensions of `dims` that end at `ends[i]`; the first `shared` rows
    are leaves of the manifest's tree, the others those of the private one.

    code: uint16 [n]; ends: int64 [n]; dims: uint64, those of all rows. `origin` and `whole`, like `dims`: where each
    row begins in its leaf, and the shape of the leaf; None where every row is a whole leaf.
    """

    dtypes: list[str]
    code: Column
    dims: Column
    ends: Column
    shared: int
    origin: Column | None = None
    whole: Column | None = None

    def __len__(self) -> int:
        return len(self.code)

    @classmethod
    def of(cls, specs: Sequence[LeafSpec]) -> Rows:
        """The rows of these leaves: shared ones, then private ones."""
        names = [spec.dtype for spec in specs]
        private = [spec.private for spec in specs]
        shared = private.index(True) if True in private else len(private)
        assert all(private[shared:]), "shared leaves come first"
        dtypes = sorted(set(names))
        codes = {name: code for code, name in enumerate(dtypes)}
        shapes = [spec.shape for spec in specs]
        parts = any(spec.whole is not None for spec in specs)
        return cls(
            dtypes,
            np.fromiter(map(codes.__getitem__, names), np.uint16, len(names)),
            _flat(shapes),
            np.cumsum(np.fromiter(map(len, shapes), np.int64, len(shapes))),
            shared,
            _flat([spec.offsets or (0,) * len(spec.shape) for spec in specs]) if parts else None,
            _flat([spec.shape if spec.whole is None else spec.whole for spec in specs]) if parts else None,
        )


def _flat(ragged: Sequence[tuple[int, ...]]) -> Column:
    return np.array(list(chain.from_iterable(ragged)), np.uint64)
