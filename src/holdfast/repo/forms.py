"""What tables say of the forms of leaves: dtypes, and lengths out of shapes; none of it believed unchecked."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from holdfast.model.dtypes import dtype
from holdfast.repo.objects import Fields

Array = np.ndarray[Any, Any]

MAX_DTYPES: Final = 4096
MAX_DIMENSIONS: Final = 64
_LIMIT: Final = 2**62
"""Bytes that one checkpoint may have: sums of two such numbers still fit into 64 bits."""
_NUMPY_DTYPE: Final = re.compile(r"numpy:[<>|][a-zA-Z][0-9]{0,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?", re.ASCII)


def bounded(column: Array, head: Fields, what: str) -> Array:
    if column.size and int(column.max()) >= _LIMIT:
        raise head.refuse(f"{what} is beyond 2^62")
    return column.astype(np.int64)


def read_dtypes(head: Fields) -> tuple[list[str], Array]:
    """The dtype names and the size in bytes of one item of each."""
    names = head.sequence("dtypes")
    if len(names) > MAX_DTYPES:
        raise head.refuse(f"lists {len(names)} dtypes")
    sizes = []
    for name in names:
        try:
            if not isinstance(name, str) or (name.startswith("numpy:") and not _NUMPY_DTYPE.fullmatch(name)):
                raise KeyError(name)
            sizes.append(dtype(name).size)
        except (KeyError, TypeError, ValueError, SyntaxError):
            raise head.refuse(f"has the dtype {str(name)[:80]!r}, which this version does not know") from None
    return names, np.array(sizes, dtype=np.int64)


def lengths(dims: Array, bounds: Array, itemsize: Array, head: Fields) -> Array:
    """Bytes of each row: item size times the product of its dimensions, without overflow. int64 [n]."""
    ndim = np.diff(bounds)
    if ndim.size and int(ndim.max()) > MAX_DIMENSIONS:
        raise head.refuse(f"a leaf has more than {MAX_DIMENSIONS} dimensions")
    out = itemsize.astype(np.int64)
    about = itemsize.astype(np.float64)
    for axis in range(int(ndim.max()) if ndim.size else 0):
        rows = np.flatnonzero(ndim > axis)
        size = dims[bounds[rows] + axis]
        about[rows] *= size
        with np.errstate(over="ignore"):
            out[rows] *= size
    if (about >= float(_LIMIT)).any():
        raise head.refuse("the shape of a leaf gives more than 2^62 bytes")
    return out
