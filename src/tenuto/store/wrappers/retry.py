"""The only place that retries: transient faults (StoreUnavailable) a few times for a bounded time, and a failed disk
read once.

A failed flush (StoreUnreliable) and a full or forbidden store are never retried.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Final, TypeVar

from tenuto.errors import AlreadyExists, CorruptionError, ObjectNotFound, StoreError, StoreUnavailable
from tenuto.model.records import Receipt
from tenuto.store.contract import Capabilities, Content, Entry, Listing, Reader, Stat, Store, is_unreadable

_STRIDE: Final = 1 << 20
Result = TypeVar("Result")


@dataclass(frozen=True)
class Patience:
    """How often and how long to retry. No jitter: it would draw from Python's global random state, which belongs to the
    training."""

    attempts: int = 5
    timeout_s: float = 30.0
    wait_s: float = 0.1
    """Before the second attempt; doubled for each further one, at most 5 s."""

    def __call__(self, work: Callable[[], Result]) -> Result:
        try:
            return work()  # outside the loop: its setup alone holds the interpreter lock for a tenth of a read
        except StoreUnavailable as error:
            first = [error]
        for attempt in _retry_context()(
            on=StoreUnavailable,
            attempts=self.attempts,
            timeout=self.timeout_s,
            wait_initial=self.wait_s,
            wait_max=5.0 if self.wait_s else 0.0,
            wait_jitter=0.0,
        ):
            with attempt:
                if first:
                    raise first.pop()
                return work()
        raise AssertionError("stamina ends with a result or an error")


@cache
def _retry_context() -> Callable[..., Iterable[AbstractContextManager[object]]]:
    """Imports the retries only where something is tried again: most processes never need them. They log each one, which
    is nothing to see where nobody has set up logging."""
    import stamina

    logging.getLogger("stamina").addHandler(logging.NullHandler())
    return stamina.retry_context


def _retry_read(read: Callable[[], Result]) -> Result:
    """Reads, and once more after a disk error. A disk may succeed at the second attempt; after that, waiting gains
    nothing."""
    try:
        return read()
    except StoreError as error:
        if not is_unreadable(error):
            raise
    return read()


@dataclass
class RetryingStore:
    """A store that retries transient faults of `inner`."""

    inner: Store
    patience: Patience = field(default_factory=Patience)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def probe(self) -> Capabilities:
        return self.patience(self.inner.probe)

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        """Puts an object with retries. A failed attempt may have put it all the same: if a later one finds the name
        taken, the object is read back, and equal bytes are ours and made durable before the receipt."""
        failed_before = False

        def put() -> Receipt:
            nonlocal failed_before
            try:
                return self.inner.put_if_absent(name, content, token=token)
            except StoreUnavailable:
                failed_before = True
                raise
            except AlreadyExists:
                if not failed_before or not self._has_bytes(name, content):
                    raise
                self.inner.settle(name)
                return Receipt(name, content.length, self.url)

        return self.patience(put)

    def _has_bytes(self, name: str, content: Content) -> bool:
        """Returns whether the object equals `content`. Compares all bytes: a lost reply is rare, and the object of
        another writer may differ only in its last byte."""
        try:
            with self.inner.open(name) as reader:
                if reader.length != content.length:
                    return False
                offset = 0
                block = memoryview(bytearray(min(_STRIDE, content.length)))
                for whole in content.pieces():
                    piece = whole.cast("B") if whole.itemsize != 1 or whole.ndim != 1 else whole
                    for start in range(0, len(piece), _STRIDE):
                        part = piece[start : start + _STRIDE]
                        if offset + len(part) > reader.length:
                            return False
                        reader.read_into(offset, block[: len(part)])
                        if block[: len(part)] != part:
                            return False
                        offset += len(part)
                return offset == reader.length
        except (ObjectNotFound, CorruptionError):
            return False  # removed or truncated meanwhile, so not what we put

    def get(self, name: str, *, limit: int) -> bytes:
        return self.patience(lambda: _retry_read(lambda: self.inner.get(name, limit=limit)))

    def open(self, name: str) -> Reader:
        return RetryingReader(name, self.inner, self.patience, self.patience(lambda: self.inner.open(name)))

    def stat(self, name: str) -> Stat:
        return self.patience(lambda: self.inner.stat(name))

    def children(self, prefix: str, *, after: str = "") -> Listing:
        return self.patience(lambda: self.inner.children(prefix, after=after))

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        return iter(self.patience(lambda: list(self.inner.walk(prefix, leftovers=leftovers))))

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        listed = list(names)
        self.patience(lambda: self.inner.delete(listed))

    def settle(self, name: str) -> None:
        self.patience(lambda: self.inner.settle(name))

    def free_bytes(self) -> int | None:
        return self.patience(self.inner.free_bytes)

    def close(self) -> None:
        self.inner.close()


@dataclass
class RetryingReader:
    """A reader that reopens the object for each retry: a stale handle stays stale."""

    name: str
    store: Store
    patience: Patience
    _reader: Reader
    _alignment: int | None = None
    _outdated: list[Reader] = field(default_factory=list)
    """Open until `close`: other threads may still read through them."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def length(self) -> int:
        return self._reader.length

    @property
    def alignment(self) -> int:
        """As first returned: the caller has laid out its buffers by it."""
        if self._alignment is None:
            self._alignment = self._reader.alignment
        return self._alignment

    def read_into(self, offset: int, buffer: memoryview) -> None:
        used: Reader | None = None

        def read() -> None:
            nonlocal used
            if used is not None:
                self._reopen(used)
            used = self._reader
            if used.alignment < self.alignment and self._reaches_over(offset, len(buffer)):
                used.read_into(offset, buffer[: self.length - offset])  # reopened, and no longer padded at its end
            else:
                used.read_into(offset, buffer)

        self.patience(lambda: _retry_read(read))

    def view(self) -> memoryview | None:
        return self._reader.view()

    def _reaches_over(self, offset: int, length: int) -> bool:
        return 0 <= self.length - offset < length < self.length - offset + self.alignment

    def _reopen(self, failed: Reader) -> None:
        with self._lock:
            if self._reader is not failed:
                return
            fresh = self.store.open(self.name)
            if fresh.length != failed.length:
                fresh.close()
                raise CorruptionError(
                    f"{self.name} had {failed.length} bytes when it was opened and has {fresh.length} now",
                    subject=self.name,
                )
            self._outdated.append(failed)
            self._reader = fresh

    def close(self) -> None:
        with self._lock:
            for reader in (*self._outdated, self._reader):
                reader.close()
            self._outdated.clear()

    def __enter__(self) -> RetryingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
