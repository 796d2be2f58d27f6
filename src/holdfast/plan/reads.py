"""Coalesced reads: which ranges of a pack to read for a set of wanted leaves, each range in whole chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TASK_BYTES = 1 << 20
GAP_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start..stop-1` of leaf `leaf`: whole chunks of it. `want` is its place among the wanted leaves."""

    want: int
    leaf: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReadTask:
    """One contiguous range of a pack, in bytes from its beginning, and the parts of leaves that lie in it."""

    start: int
    stop: int
    parts: tuple[tuple[int, Part], ...]
    """(position in the pack, part), ascending."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def _parts(
    wants: Sequence[tuple[int, int]], offsets: Sequence[int], lengths: Sequence[int], chunk_bytes: int, task_bytes: int
) -> Iterator[tuple[int, Part]]:
    cut = max(task_bytes // chunk_bytes, 1) * chunk_bytes
    for want, leaf in sorted(wants, key=lambda pair: offsets[pair[1]]):
        offset, length = offsets[leaf], lengths[leaf]
        for start in range(0, length, cut):
            yield offset + start, Part(want, leaf, start, min(start + cut, length))


def coalesce(
    wants: Sequence[tuple[int, int]],
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    chunk_bytes: int,
    task_bytes: int = TASK_BYTES,
    gap_bytes: int = GAP_BYTES,
) -> list[ReadTask]:
    """Tasks that cover every byte of the wanted leaves once, in the order of the pack.

    `wants` are (place among the wanted, leaf number); `offsets` and `lengths` are by leaf number, bytes in the pack. A
    range is at most `task_bytes` long unless one chunk is longer, and spans gaps of unwanted bytes up to `gap_bytes`.
    """
    tasks: list[ReadTask] = []
    pending: list[tuple[int, Part]] = []
    start = stop = 0
    for position, part in _parts(wants, offsets, lengths, chunk_bytes, task_bytes):
        size = part.stop - part.start
        if pending and (position - stop > gap_bytes or position + size - start > task_bytes):
            tasks.append(ReadTask(start, stop, tuple(pending)))
            pending = []
        if not pending:
            start = position
        pending.append((position, part))
        stop = position + size
    if pending:
        tasks.append(ReadTask(start, stop, tuple(pending)))
    return tasks
