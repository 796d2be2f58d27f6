"""Tables as safetensors files of one-dimensional columns: indexes, tables of parts, messages between ranks."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from tenuto.errors import CorruptionError
from tenuto.model import canonical_json
from tenuto.model.records import Json
from tenuto.repo.format.safetensors import Header, build_header, parse_header

Array = np.ndarray[Any, Any]
Kind = tuple[str, str, str]
"""Name, safetensors dtype, numpy dtype."""
_ALIGN: Final = 64
_SAVE_ID: Final = "tenuto.save_id"
_WIDTHS: Final[Mapping[str, tuple[str, int]]] = {
    "U8": ("|u1", 1),
    "U16": ("<u2", 2),
    "U32": ("<u4", 4),
    "U64": ("<u8", 8),
}
"""Unsigned integers: numpy's name of each dtype, and its size in bytes."""
_SHORT_HEADER: Final = 4096
"""Headers up to this many bytes are cached: thousands of ranks have tables of one form."""


def encode_columns(
    columns: Mapping[str, Array], kinds: Sequence[Kind], *, save_id: str = "", narrow: bool = False
) -> bytes:
    """Returns the bytes of a table. `kinds`: widest first, so that each column is aligned for its items. `narrow`:
    applies `narrowest`."""
    if narrow:
        kinds = narrowest(columns, kinds)
    parts = [np.ascontiguousarray(columns[name], dtype=kind) for name, _, kind in kinds]
    entries = tuple((name, code, (part.size,)) for (name, code, _), part in zip(kinds, parts, strict=True))
    return b"".join([_header_bytes(entries, save_id), *(part.tobytes() for part in parts)])


def narrowest(columns: Mapping[str, Array], kinds: Sequence[Kind]) -> list[Kind]:
    """Returns the kinds with the fewest bytes that fit each column's largest number, widest first."""
    found = [_narrowed(columns[kind[0]], kind) for kind in kinds]
    return sorted(found, key=lambda kind: -_WIDTHS[kind[1]][1])


def _narrowed(column: Array, kind: Kind) -> Kind:
    name, widest, _ = kind
    largest = int(column.max()) if column.size and widest != "U8" else 0
    code = next(code for code, (_, size) in _WIDTHS.items() if code == widest or largest < 1 << 8 * size)
    return name, code, _WIDTHS[code][0]


@lru_cache(256)
def _header_bytes(entries: tuple[tuple[str, str, tuple[int]], ...], save_id: str) -> bytes:
    return build_header(entries, {_SAVE_ID: save_id} if save_id else {}, align=_ALIGN)


def decode_columns(
    data: bytes, kinds: Sequence[Kind], *, more: Sequence[Kind] = (), narrow: bool = False, name: str, what: str
) -> dict[str, Array]:
    """Returns the columns by name, as views of `data`: exactly those of `kinds`, or these and `more`. `narrow`: a
    column may have fewer bytes per item than in `kinds`. Raises CorruptionError that it is no `what`."""
    header = _header(data, name)
    wanted = [*more, *kinds] if more and more[0][0] in header else kinds
    if header.keys() != {column for column, _, _ in wanted}:
        raise CorruptionError(f"{name} does not have the columns of {what}", subject=name)
    columns = {}
    for column, widest, _ in wanted:
        entry = header[column]
        narrower = narrow and entry.code in _WIDTHS and _WIDTHS[entry.code][1] < _WIDTHS[widest][1]
        if (entry.code != widest and not narrower) or len(entry.shape) != 1:
            raise CorruptionError(f"{name}: the column {column!r} is not a row of {widest}", subject=name)
        kind = _WIDTHS[entry.code][0]
        columns[column] = np.frombuffer(data, dtype=kind, count=entry.shape[0], offset=entry.start)
    return columns


def column_names(data: bytes, name: str) -> Container[str]:
    """Returns the names of the columns."""
    return _header(data, name).keys()


def _header(data: bytes, name: str) -> Header:
    length = 8 + int.from_bytes(data[:8], "little")
    if not 8 < length <= min(_SHORT_HEADER, len(data)):
        return parse_header(data, name=name)
    try:
        return _parse_cached(bytes(data[:length]), len(data))
    except CorruptionError:
        return parse_header(data, name=name)  # whose error names the object


@lru_cache(256)
def _parse_cached(block: bytes, file_length: int) -> Header:
    """Parses a header block. Callers share the result and do not change it."""
    return parse_header(block, name="", file_length=file_length)


def encode_json(value: Json) -> Array:
    """Encodes a value as a column of bytes."""
    return np.frombuffer(canonical_json.dumps(value), np.uint8)


def decode_json(columns: Mapping[str, Array], column: str, name: str) -> Json:
    try:
        return canonical_json.loads(columns[column].tobytes())
    except CorruptionError as error:
        raise CorruptionError(f"{name}: the column {column!r}: {error.message}", subject=name) from None
