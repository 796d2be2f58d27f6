"""The process of a drill that restores: a fresh interpreter that uses the public interface alone.

Reads its order as JSON from stdin, and writes what it found as lines of JSON: `loaded` once the state is in memory, a
`leaf` for each leaf, one record of the plain values, and `done`; or `failed`. It is not told what to expect.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

import numpy as np

import tenuto
from tenuto.certify.probe import content_of, spelled
from tenuto.codec.digest import digest
from tenuto.errors import CorruptionError, TenutoError
from tenuto.model.leaf import Box
from tenuto.state.encode.flattener import flatten

PRIVATE: Final = "#private/"


def plain_path(path: str) -> str:
    """Returns a path without what escapes separators in it: the name of a parameter inside an optimizer's state is
    several segments, and one key once that state has come back without its class."""
    return path.replace("~1", "/").replace("~0", "~").replace("~1", "/")


def main() -> None:
    order = json.load(sys.stdin)
    with open(order["report"], "w", encoding="ascii") as out:
        try:
            _restore(order, out)
        except TenutoError as error:
            _write(
                out,
                record="failed",
                kind=type(error).__name__,
                message=error.message,
                hint=error.hint,
                damage=isinstance(error, CorruptionError),
                exit_code=error.exit_code,
            )
        except (Exception, MemoryError) as error:  # noqa: BLE001 - the parent says what a stranger would have seen
            _write(out, record="failed", kind=type(error).__name__, message=repr(error), hint=None, damage=False)


def _restore(order: dict[str, Any], out: IO[str]) -> None:
    found = tenuto.load(order["where"], run=order["run"], step=order["step"], ranks=tenuto.Solo(), log="silent")
    # The clock of the machine: the parent noted on it when it started this process.
    _write(out, record="loaded", at=time.monotonic(), seconds=found.seconds, pid=os.getpid(), step=found.step)
    flattened = flatten(found.state)
    chunk, parts = int(order["chunk_bytes"]), order["parts"]
    for number, spec in enumerate(flattened.specs):
        boxes = parts.get(spec.path, parts.get(plain_path(spec.path)))
        for at, data in _parts(content_of(flattened, number), spec.shape, spec.itemsize, boxes):
            _write_leaf(out, spec.path, (spec.dtype, spec.shape), data, chunk, at=at)
    _write(out, record="values", values=spelled(flattened))
    del flattened, found
    for rank in order["private"]:
        own = rank if order["ranks"] > 1 else None
        with tenuto.open(order["where"], run=order["run"], step=order["step"], rank=own) as opened:
            for path in (path for path in opened if path.startswith(PRIVATE)):
                leaf = opened[path]
                data = np.empty(leaf.nbytes, np.uint8)
                leaf.read_into(data, Box.whole(leaf.shape))
                _write_leaf(out, path, (leaf.dtype, leaf.shape), data, chunk, rank=rank)
    _write(out, record="done")


def _parts(
    content: np.ndarray[Any, Any], shape: tuple[int, ...], itemsize: int, parts: list[Any] | None
) -> Iterator[tuple[list[int], np.ndarray[Any, Any]]]:
    """Yields the bytes of a leaf in the boxes in which ranks have saved it; all of it where a single one has."""
    if parts is None:
        yield [], content
        return
    items = content.reshape(*shape, itemsize)
    for offsets, sizes in parts:
        fits = all(low + long <= whole for low, long, whole in zip(offsets, sizes, shape, strict=True))
        if fits:
            box = tuple(slice(low, low + long) for low, long in zip(offsets, sizes, strict=True))
            yield offsets, np.ascontiguousarray(items[box]).reshape(-1)


def _write_leaf(
    out: IO[str],
    path: str,
    form: tuple[str, tuple[int, ...]],
    data: np.ndarray[Any, Any],
    chunk: int,
    *,
    at: Sequence[int] = (),
    rank: int | None = None,
) -> None:
    digests = "".join(digest(data[low : low + chunk]).hex() for low in range(0, len(data), chunk))
    dtype, shape = form
    _write(out, record="leaf", path=path, dtype=dtype, shape=list(shape), at=list(at), rank=rank, digests=digests)


def _write(out: IO[str], **record: Any) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
