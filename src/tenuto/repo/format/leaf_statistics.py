"""Statistics of the rows of an index, as its head has them: columns in base64, and what is rare by row number.

Older readers pass over them, and nothing but reports depends on them. Reading trusts nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tenuto.errors import CorruptionError
from tenuto.model.records import Json
from tenuto.record import record

Array = np.ndarray[Any, Any]
COLUMNS: Final = ("norm", "min", "max", "changed", "sampled")


@record(eq=False)
class RowStatistics:
    """Statistics of the rows of one index.

    norm, min, max: float32 [n]; NaN where there is none. norm is scaled up to all elements.
    changed: float32 [n], the fraction of a row's bytes, in whole chunks, that differs from the save before; NaN where
        that is not known.
    sampled: float32 [n], the fraction of a row's elements that norm, min and max are of.
    nonfinite: of each row with NaN or infinite values: how many, how many of them are NaN, and whether it has always
        had some.
    """

    norm: Array
    min: Array
    max: Array
    changed: Array
    sampled: Array
    nonfinite: Mapping[int, tuple[int, int, bool]]

    def encoded(self) -> Json:
        columns = {name: np.asarray(getattr(self, name), "<f4") for name in COLUMNS}
        return {
            **{name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()},
            "nonfinite": [[row, *map(int, found)] for row, found in sorted(self.nonfinite.items())],
        }


def decode(record: Json, rows: int, *, name: str) -> RowStatistics | None:
    """Returns the statistics of an index of so many rows; None if it has none. `name`: of the index, for errors. Raises
    CorruptionError for what no save writes."""
    if record is None:
        return None
    try:
        columns = {column: np.frombuffer(base64.b64decode(record[column], validate=True), "<f4") for column in COLUMNS}
        rare = {int(row): (int(bad), int(nan), bool(usual)) for row, bad, nan, usual in record["nonfinite"]}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise CorruptionError(f"{name}: its statistics are not what a save writes: {error}", subject=name) from None
    if any(len(column) != rows for column in columns.values()) or any(not 0 <= row < rows for row in rare):
        raise CorruptionError(f"{name}: its statistics are of another number of rows than {rows}", subject=name)
    return RowStatistics(**columns, nonfinite=rare)
