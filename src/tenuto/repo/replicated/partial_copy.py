"""Partial copies of packs: the bytes that ranks of a restore do not find, put into the home by a rank that has them.

A partial copy lasts no longer than the restore. It lies beside the pack under a name that no listing shows, so what a
killed job leaves of it goes with the checkpoint, or by gc. It is a table of ranges, behind its own length in 8 bytes,
and then the bytes of these ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from types import TracebackType
from typing import Any, Final

import numpy as np

from tenuto.errors import CorruptionError
from tenuto.record import record
from tenuto.repo.format.columns import Kind, decode_columns, encode_columns
from tenuto.store.contract import PARTIAL, Reader

Column = np.ndarray[Any, np.dtype[np.int64]]
Span = tuple[Column, Column]
"""Bytes `low[i] .. high[i] - 1` of a pack: ascending, without a common byte."""
_KINDS: Final[tuple[Kind, ...]] = (("low", "U64", "<u8"), ("high", "U64", "<u8"), ("length", "U64", "<u8"))
_LIMIT: Final = 1 << 30
"""Bytes of a table of ranges, at most."""


@record(eq=False)
class PartialCopy:
    """What is to be copied of a pack, in chunks that hold some of `span`. `name`: that of the copy."""

    name: str
    span: Span


def partial_name(pack: str, token: str) -> str:
    """Returns the name of a pack's partial copy. `token`: letters and digits that no other restore has."""
    return f"{pack}{PARTIAL}{token}"


def encode_ranges(span: Span, length: int) -> bytes:
    """Returns the bytes before those of the ranges. `length`: the pack's."""
    table = encode_columns({"low": span[0], "high": span[1], "length": np.array([length])}, _KINDS, narrow=True)
    return len(table).to_bytes(8, "little") + table


class PartialReader:
    """A partial copy, read at the places that its bytes have in the pack. Reads leave alone what it does not have:
    whoever reads chunks verifies them."""

    alignment = 1

    def __init__(self, inner: Reader, name: str) -> None:
        """Takes `inner`, the open copy. Raises CorruptionError where that is none, and StoreError."""
        self._inner = inner
        table = self._read(8, _table_bytes(inner, name))
        columns = decode_columns(table, _KINDS, narrow=True, name=name, what="a partial copy")
        low, high, length = (columns[column].astype(np.int64) for column, _, _ in _KINDS)
        if len(length) != 1 or not _in_order(low, high, length):
            raise CorruptionError(f"{name} has ranges that no data file has", subject=name)
        self.length = int(length[0])
        self._lows: list[int] = low.tolist()
        self._highs: list[int] = high.tolist()
        self._at = list(accumulate((high - low).tolist(), initial=8 + len(table)))

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._inner.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        stop = offset + len(buffer)
        for number in range(bisect_right(self._highs, offset), bisect_left(self._lows, stop)):
            begin = self._lows[number]
            low, high = max(begin, offset), min(self._highs[number], stop)
            self._inner.read_into(self._at[number] + low - begin, buffer[low - offset : high - offset])

    def view(self) -> memoryview | None:
        return None

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> PartialReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _in_order(low: Column, high: Column, length: Column) -> bool:
    """Returns whether these are ranges within `length` bytes, in order and without a common byte."""
    if len(low) != len(high):
        return False
    bounds = np.concatenate([np.zeros(1, np.int64), np.stack([low, high], axis=1).reshape(-1), length])
    return bool((np.diff(bounds) >= 0).all())


def _table_bytes(inner: Reader, name: str) -> int:
    head = bytearray(8)
    inner.read_into(0, memoryview(head))
    found = int.from_bytes(head, "little")
    if found > min(_LIMIT, inner.length - 8):
        raise CorruptionError(f"{name} is not a partial copy of a data file", subject=name)
    return found
