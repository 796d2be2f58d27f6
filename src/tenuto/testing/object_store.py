"""An object store in memory that counts its requests, and can lose them or their replies.

It has the semantics that S3, GCS and Azure share: flat keys, create-if-absent, strong consistency, listings in pages of
1000 keys or common prefixes, removals of 1000 keys at once. Each of these is one request, whose latency is added to a
clock and not waited for. So a test says how many requests something takes, and how long they would last one after
another.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from tenuto.errors import AlreadyExists, CorruptionError, ObjectNotFound, StoreError, StoreUnavailable
from tenuto.model.records import Receipt
from tenuto.record import record
from tenuto.store.base import BaseReader, BaseStore
from tenuto.store.contract import (
    Capabilities,
    Content,
    Entry,
    Listing,
    Stat,
    check_name,
    check_new_name,
    check_prefix,
    check_token,
    is_leftover,
)

PAGE: Final = 1000
"""Keys or common prefixes in one page of a listing, and keys in one removal."""
HEAD: Final = 64 << 10
"""Bytes that come along when an object is opened."""

Verb = Literal["put", "part", "get", "head", "list", "delete"]
Fate = Literal["done", "refused", "reply lost"]
"""What becomes of a request: it is done; it fails and changes nothing; it is done, and the caller is told that it
failed."""


@record
class Request:
    verb: Verb
    name: str


@dataclass
class Bucket:
    """The objects of a simulated object store, and what was asked of it.

    latency_s: of each request, added to `elapsed_s`.
    fate: decides what becomes of each request.
    """

    latency_s: float = 0.0
    fate: Callable[[Request], Fate] = lambda request: "done"
    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    clock_ns: int = 1_700_000_000_000_000_000
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def elapsed_s(self) -> float:
        """How long the requests would have taken, one after another."""
        return self.latency_s * len(self.requests)

    def counts(self, *, without: str = "") -> dict[str, int]:
        """Returns how many requests there were of each kind. `without`: not those of names that contain this."""
        found: dict[str, int] = {}
        for request in self.requests:
            if not without or without not in request.name:
                found[request.verb] = found.get(request.verb, 0) + 1
        return found

    def forget(self) -> None:
        """Begins to count anew."""
        self.requests.clear()

    def keys(self, start: str) -> list[str]:
        with self.lock:
            return sorted(key for key in self.objects if key.startswith(start))


class SimulatedObjectStore(BaseStore):
    """A store in a Bucket. Several may share one: then they are several processes' clients."""

    def __init__(self, bucket: Bucket | None = None, *, part_bytes: int = 8 << 20, parallel: int = 16) -> None:
        self.bucket: Final = bucket or Bucket()
        self._part_bytes = part_bytes
        self._parallel = parallel

    @property
    def url(self) -> str:
        return f"simulated://{self.bucket.name}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            commits=True,
            persistent=True,
            lists_times=True,
            part_bytes=self._part_bytes,
            parallel=self._parallel,
            remote=True,
        )

    def _request(self, verb: Verb, name: str, work: Callable[[], None]) -> None:
        """Carries out one request, or what its fate leaves of it."""
        request = Request(verb, name)
        with self.bucket.lock:
            self.bucket.requests.append(request)
            fate = self.bucket.fate(request)
            if fate != "refused":
                work()
        if fate != "done":
            raise StoreUnavailable(f"{verb} of {name} failed: the simulated store says so", subject=name)

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        check_new_name(name)
        check_token(token)
        data = b"".join(bytes(piece) for piece in content.pieces())  # copied before the next is requested
        if len(data) != content.length:
            raise StoreError(f"{name} was announced with {content.length} bytes and has {len(data)}", subject=name)
        for start in range(self._part_bytes, len(data), self._part_bytes):
            self._request("part", f"{name}@{start}", lambda: None)

        def put() -> None:
            if name in self.bucket.objects:
                raise AlreadyExists(f"{name} exists already ({self.url})", subject=name)
            self.bucket.clock_ns += 1_000_000
            self.bucket.objects[name] = data, self.bucket.clock_ns

        self._request("put", name, put)
        return Receipt(name, len(data), self.url)

    def _find(self, verb: Verb, name: str) -> tuple[bytes, int]:
        found: list[tuple[bytes, int]] = []

        def find() -> None:
            if check_name(name) not in self.bucket.objects:
                raise ObjectNotFound(f"there is no object {name} ({self.url})", subject=name)
            found.append(self.bucket.objects[name])

        self._request(verb, name, find)
        return found[0]

    def get(self, name: str, *, limit: int) -> bytes:
        data = self._find("get", name)[0]
        if len(data) > limit:
            raise CorruptionError(f"{name} has {len(data)} bytes where at most {limit} belong", subject=name)
        return data

    def open(self, name: str) -> SimulatedReader:
        return SimulatedReader(self, name, self._find("get", name)[0])

    def stat(self, name: str) -> Stat:
        data, modified_ns = self._find("head", name)
        return Stat(len(data), modified_ns)

    def _pages(self, prefix: str, found: Sequence[str]) -> None:
        for start in range(0, max(len(found), 1), PAGE):
            self._request("list", f"{prefix}@{start}", lambda: None)

    def children(self, prefix: str, *, after: str = "") -> Listing:
        start = f"{check_prefix(prefix)}/" if prefix else ""
        segments: dict[str, bool] = {}
        for key in self.bucket.keys(start):
            segment, below, _ = key[len(start) :].partition("/")
            if segment > after:
                segments[segment] = segments.get(segment, False) or bool(below)
        self._pages(prefix, list(segments))
        directories = sorted(segment for segment, below in segments.items() if below)
        return Listing(
            tuple(directories), tuple(sorted(s for s, below in segments.items() if not below and not is_leftover(s)))
        )

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        keys = self.bucket.keys(f"{check_prefix(prefix)}/" if prefix else "")
        self._pages(prefix, keys)
        with self.bucket.lock:
            there = [(key, self.bucket.objects[key]) for key in keys if key in self.bucket.objects]
        return (Entry(key, len(data), time) for key, (data, time) in there if leftovers or not is_leftover(key))

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        checked = [check_name(name) for name in names]
        for start in range(0, len(checked), PAGE):
            page = checked[start : start + PAGE]

            def remove(page: list[str] = page) -> None:
                for name in page:
                    self.bucket.objects.pop(name, None)

            self._request("delete", page[0], remove)

    def advance(self, seconds: float) -> None:
        """Advances the clock of the bucket, for code that depends on the age of objects."""
        with self.bucket.lock:
            self.bucket.clock_ns += round(seconds * 1e9)


class SimulatedReader(BaseReader):
    """Has the object's head from when it was opened; every other read is a request."""

    def __init__(self, store: SimulatedObjectStore, name: str, data: bytes) -> None:
        super().__init__(name, len(data))
        self._store = store
        self._data = data

    def fetch(self, offset: int, buffer: memoryview) -> None:
        def read() -> None:
            buffer[:] = memoryview(self._data)[offset : offset + len(buffer)]

        if offset + len(buffer) <= HEAD:
            read()
        else:
            self._store._request("get", f"{self.name}@{offset}", read)
