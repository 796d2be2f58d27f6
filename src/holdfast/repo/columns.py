"""Tables as safetensors files of one-dimensional columns: indexes, the table of parts, what ranks tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from holdfast.errors import CorruptionError
from holdfast.image.header import build_header, parse_header
from holdfast.model import canonical
from holdfast.model.checkpoint import Json

Array = np.ndarray[Any, Any]
Kind = tuple[str, str, str]
"""Name, safetensors dtype, numpy dtype."""
_ALIGN: Final = 64
_SAVE_ID: Final = "holdfast.save_id"


def encode_columns(columns: Mapping[str, Array], kinds: Sequence[Kind], *, save_id: str = "") -> bytes:
    """The bytes of a table. `kinds` with the widest first: then each column is aligned for its items."""
    parts = [np.ascontiguousarray(columns[name], dtype=kind) for name, _, kind in kinds]
    entries = [(name, code, (part.size,)) for (name, code, _), part in zip(kinds, parts, strict=True)]
    header = build_header(entries, {_SAVE_ID: save_id} if save_id else {}, align=_ALIGN)
    return b"".join([header, *(part.tobytes() for part in parts)])


def decode_columns(
    data: bytes, kinds: Sequence[Kind], *, more: Sequence[Kind] = (), name: str, what: str
) -> dict[str, Array]:
    """The columns by name, views of `data`: exactly those of `kinds`, or these and those of `more`. CorruptionError
    that says it is no `what`."""
    header = parse_header(data, name=name)
    wanted = [*more, *kinds] if more and more[0][0] in header else kinds
    if header.keys() != {column for column, _, _ in wanted}:
        raise CorruptionError(f"{name} does not have the columns of {what}", subject=name)
    columns = {}
    for column, code, kind in wanted:
        entry = header[column]
        if entry.code != code or len(entry.shape) != 1:
            raise CorruptionError(f"{name}: the column {column!r} is no row of {code}", subject=name)
        columns[column] = np.frombuffer(data, dtype=kind, count=entry.shape[0], offset=entry.start)
    return columns


def encode_json(value: Json) -> Array:
    """A value as a column of bytes."""
    return np.frombuffer(canonical.dumps(value), np.uint8)


def decode_json(columns: Mapping[str, Array], column: str, name: str) -> Json:
    try:
        return canonical.loads(columns[column].tobytes())
    except CorruptionError as error:
        raise CorruptionError(f"{name}: the column {column!r}: {error.message}", subject=name) from None
