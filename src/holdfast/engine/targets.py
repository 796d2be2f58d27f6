"""Where the wanted leaves arrive: their destinations' own memory, or memory of ours for sinks that must be filled."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from holdfast.errors import CorruptionError
from holdfast.model.checkpoint import Index
from holdfast.plan.reads import SMALL_BYTES, Column
from holdfast.state.contract import Buffer, Sink

_move: Final = ctypes.PyDLL(None).memmove
"""Kept under the interpreter's lock: giving it away and taking it back takes longer than a kibibyte does."""
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move.restype = None


class Targets:
    """One destination for each of `wants`, which takes the bytes `span[0][i]` to `span[1][i]` - 1 of its leaf; None:
    all of it. Places in a leaf are counted from its first chunk that is read. CorruptionError where a destination has
    not the length."""

    def __init__(
        self,
        index: Index,
        wants: Sequence[tuple[int, Sink]],
        leaf: Column,
        span: tuple[Column, Column] | None = None,
    ) -> None:
        self._index = index
        self._wants = wants
        self._lengths: list[int] = (index.length[leaf] if span is None else span[1] - span[0]).tolist()
        self._lead = None if span is None else span[0] % index.chunk_bytes
        """Bytes before what is wanted that are read because they are of its first chunk."""
        self._leads: list[int] | None = None if self._lead is None else self._lead.tolist()
        self._buffers: dict[int, Buffer] = {}
        """By place among the wanted; of small leaves only where nothing else tells the address."""
        self._ours: list[int] = []
        self._address: Column = np.fromiter(self._addresses(), np.int64, len(wants))
        """Of the small leaves; 0 for the others."""

    def _addresses(self) -> Sequence[int]:
        found = []
        for place, ((_, sink), nbytes) in enumerate(zip(self._wants, self._lengths, strict=True)):
            span = sink.span() if nbytes < SMALL_BYTES else None
            if span is None:
                buffer = self._buffer(place, sink, nbytes)
                span = (buffer.ctypes.data if 0 < nbytes < SMALL_BYTES else 0, len(buffer))
            if span[1] != nbytes:
                path = self._index.specs[self._wants[place][0]].path
                raise CorruptionError(
                    f"{path} has {nbytes} bytes in the checkpoint and {span[1]} in the target", subject=path
                )
            found.append(span[0])
        return found

    def _buffer(self, place: int, sink: Sink, nbytes: int) -> Buffer:
        buffer = sink.buffer
        if buffer is None:
            self._ours.append(place)
            buffer = np.empty(nbytes, np.uint8)
        self._buffers[place] = buffer
        return buffer

    def part(self, place: int, start: int, stop: int) -> Buffer | None:
        """Where bytes `start..stop-1` of the leaf go; None where not all of them are wanted."""
        if self._leads is not None:
            start, stop = start - self._leads[place], stop - self._leads[place]
            if start < 0 or stop > self._lengths[place]:
                return None
        return self._whole(place)[start:stop]

    def put(self, place: int, start: int, data: Buffer) -> None:
        """Copies what is wanted of `data`, the bytes of the leaf from `start` on."""
        if self._leads is not None:
            start -= self._leads[place]
        stop = min(start + len(data), self._lengths[place])
        begin = max(start, 0)
        np.positive(data[begin - start : stop - start], out=self._whole(place)[begin:stop])

    def _whole(self, place: int) -> Buffer:
        found = self._buffers.get(place)
        if found is None:
            found = self._buffers[place] = _memory(int(self._address[place]), self._lengths[place])
        return found

    def scatter(self, source: Buffer, at: Column, want: Column, start: Column, size: Column) -> None:
        """Copies pieces of small leaves: `size[i]` bytes from `at[i]` of `source` to `start[i]` of destination
        `want[i]`."""
        assert not len(at) or int((at + size).max()) <= len(source), "pieces lie within what was read"
        if self._lead is not None:
            start = start - self._lead[want]
            begin = np.maximum(start, 0)
            stop = np.minimum(start + size, np.array([self._lengths[one] for one in want.tolist()], np.int64))
            at, start, size = at + begin - start, begin, stop - begin
        to, of = self._address[want] + start, at + source.ctypes.data
        deque(map(_move, to.tolist(), of.tolist(), size.tolist()), maxlen=0)

    def finish(self) -> None:
        """Fills the sinks that had no memory to offer."""
        for place in self._ours:
            self._wants[place][1].fill(self._buffers[place])


def _memory(address: int, nbytes: int) -> Buffer:
    flat: Buffer = np.ndarray((nbytes,), np.uint8, (ctypes.c_uint8 * nbytes).from_address(address))  # type: ignore[arg-type]
    return flat
