"""A limit on the bytes per second that go to a store, so that copying in the background leaves room for training."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Protocol

from tenuto.model.records import Receipt
from tenuto.store.contract import Capabilities, Content, Reader, Store
from tenuto.store.wrappers.delegating import DelegatingStore

_BLOCK: Final = 4096
_LARGEST_SLICE: Final = 1 << 20
_SLICES_PER_S: Final = 10
"""Bytes go out in slices of about this many a second, rather than in bursts of a whole piece."""


class Clock(Protocol):
    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass
class TokenBucket:
    """When the next byte may go. A wait pays for what went before, so the first slice after a pause goes at once, and
    a pause saves up nothing."""

    free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int, bytes_per_s: int, clock: Clock) -> None:
        """Waits until `nbytes` may go."""
        with self._lock:
            now = clock.monotonic()
            begin = max(now, self.free_at)
            self.free_at = begin + nbytes / bytes_per_s
        if begin > now:
            clock.sleep(begin - now)


_system_clock: Final = SystemClock()
_buckets: dict[tuple[Clock, str], TokenBucket] = {}
_buckets_lock = threading.Lock()


class ThrottledStore(DelegatingStore):
    """Puts at most `bytes_per_s` into `inner`; with `reads`, reads too, by the same allowance.

    All throttled stores of one URL in this process share one allowance, however many threads put. It counts bytes that
    are asked for, so a retry by `inner` counts again, as it does on the network.
    """

    def __init__(self, inner: Store, bytes_per_s: int, *, reads: bool = False, clock: Clock = _system_clock) -> None:
        super().__init__(inner)
        self.bytes_per_s: Final = bytes_per_s
        self.reads: Final = reads
        self._clock: Final = clock
        with _buckets_lock:
            self._bucket: Final = _buckets.setdefault((clock, inner.url), TokenBucket())

    @property
    def capabilities(self) -> Capabilities:
        found = self.inner.capabilities
        return replace(found, views=False) if self.reads else found

    def take(self, nbytes: int) -> None:
        """Waits until `nbytes` more may be moved."""
        self._bucket.take(nbytes, self.bytes_per_s, self._clock)

    @property
    def slice_bytes(self) -> int:
        """The most that goes at once: a multiple of 4096, so that aligned pieces stay aligned."""
        return min(max(self.bytes_per_s // _SLICES_PER_S // _BLOCK, 1) * _BLOCK, _LARGEST_SLICE)

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        return self.inner.put_if_absent(name, ThrottledContent(self, content), token=token)

    def get(self, name: str, *, limit: int) -> bytes:
        data = self.inner.get(name, limit=limit)
        if self.reads:
            self.take(len(data))
        return data

    def open(self, name: str) -> Reader:
        reader = self.inner.open(name)
        return ThrottledReader(self, reader) if self.reads else reader


@dataclass(frozen=True)
class ThrottledContent:
    store: ThrottledStore
    content: Content

    @property
    def length(self) -> int:
        return self.content.length

    def pieces(self) -> Iterator[memoryview]:
        size = self.store.slice_bytes
        for whole in self.content.pieces():
            piece = whole.cast("B") if whole.itemsize != 1 or whole.ndim != 1 else whole
            for start in range(0, len(piece), size):
                part = piece[start : start + size]
                self.store.take(len(part))
                yield part


@dataclass
class ThrottledReader:
    store: ThrottledStore
    inner: Reader

    @property
    def length(self) -> int:
        return self.inner.length

    @property
    def alignment(self) -> int:
        return self.inner.alignment

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.store.take(buffer.nbytes)
        self.inner.read_into(offset, buffer)

    def view(self) -> memoryview | None:
        """None: bytes of a view would be read without a limit."""
        return None

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> ThrottledReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
