"""Objects of one bucket below a prefix.

An object of up to one part is put in one request that the service refuses if the name is taken (If-None-Match: *, or
what the service has for it). This is what commits, claims and refs rest on. A larger one is a multipart upload, which
services do not refuse: two writers that put the same large name at once may both be told that they did. So only names
that a single writer owns may have objects that large, as packs are: one request before it finds a name that is taken.
Records (`.json`) are put in one request always.

Nothing here retries, but for the parts of a multipart upload: to repeat one costs a part, to repeat the put a pack.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import obstore
from obstore.exceptions import GenericError, NotSupportedError

from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    ForkedProcess,
    ObjectNotFound,
    StoreDenied,
    StoreUnavailable,
)
from tenuto.model.records import Receipt
from tenuto.store.base import BaseReader, BaseStore, refuses_second_put
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
    is_listable,
)
from tenuto.store.objects.failures import translated
from tenuto.store.objects.service import Service
from tenuto.store.objects.unfinished import UnfinishedUploads
from tenuto.store.objects.upload import AT_ONCE, PART, Parts, gathered, part_length

if TYPE_CHECKING:
    from obstore import Bytes, GetResult
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Client

SINGLE: Final = 8 << 20
"""The longest object that is put in one request: one that breaks off is sent again as a whole."""
READ: Final = 8 << 20
"""The length of one read: below it the time to the first byte shows, and longer ones share the work worse."""
BEGIN: Final = 64 << 10
"""Bytes that are read when an object is opened: manifests and the headers of packs are seldom longer, and a request for
so many lasts as long as one for none."""
_DECIDES: Final = ".json"
"""How names end for which several writers may compete, and which are put in one request however long they are: the
manifest of very many ranks, and the mark that it was aborted."""
_RANGE_REFUSED: Final = re.compile(r"status code: 416|non-partial|not satisfiable", re.IGNORECASE)
"""How the client says that an object is empty, or that the server knows no ranges."""
_PAGE: Final = 1000
_MARK: Final = "tenutoput"
"""The key of an object's metadata that says which put has made it: where a reply was lost, the next try looks here
instead of reading back the object. Azure takes letters alone."""

# Silence for so long, also while a body is sent, is a dead connection; the total bounds one that only trickles. Half of
# the time that the wrapper takes for its retries, so that there is a second try. A part may need longer.
_ONE: Final[dict[str, Any]] = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=15),
    "timeout": timedelta(seconds=60),
}
_PART: Final[dict[str, Any]] = {**_ONE, "read_timeout": timedelta(seconds=120), "timeout": timedelta(seconds=120)}
_NO_RETRIES: Final[RetryConfig] = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
_RETRIES: Final[RetryConfig] = {"max_retries": 4, "retry_timeout": timedelta(seconds=180)}

MakeClient = Callable[["ClientConfig", "RetryConfig"], "Client"]

_used_by: int | None = None
"""The process in which the client's threads run, once there are any: a forked child has none, and would wait for
ever."""


class ObjectStore(BaseStore):
    """The store of `url`. `make` makes a client for it, which touches nothing.

    unfinished: finds the uploads that were never finished, where that is possible. directory: stands before each name,
    where the client does not put it there. single, part: the longest object of one request, and the length of a part.
    """

    def __init__(
        self,
        url: str,
        service: Service,
        make: MakeClient,
        unfinished: UnfinishedUploads | None = None,
        *,
        directory: str = "",
        single: int = SINGLE,
        part: int = PART,
    ) -> None:
        self._url: Final = url
        self.service: Final = service
        self._make: Final = make
        self._unfinished: Final = unfinished
        self._above: Final = f"{directory}/" if directory else ""
        self._single: Final = single
        self._part: Final = part
        self._commits = service.writable
        self._clients: dict[str, Client] = {}
        self._lock: Final = threading.Lock()
        self._unanswered: Final[dict[str, str]] = {}
        """The mark of the last put of a name, where its outcome is not known."""

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            commits=self._commits, persistent=True, lists_times=True, part_bytes=READ, parallel=16, remote=True
        )

    def probe(self) -> Capabilities:
        """Puts one name twice: some servers ignore the condition, and replace the first without a word."""
        if self.service.writable:
            self._commits = refuses_second_put(self)
        return self.capabilities

    def _client(self, of: str = "requests") -> Client:
        global _used_by  # noqa: PLW0603 - the client's threads belong to the process, not to a store
        with self._lock:
            if _used_by is None:
                _used_by = os.getpid()
            elif _used_by != os.getpid():
                raise ForkedProcess(
                    f"{self.url} was in use when this process was forked, and cannot be used in the child",
                    subject=self.url,
                    hint="start workers with multiprocessing's 'spawn' or 'forkserver' (DataLoader: "
                    "multiprocessing_context=), or read in the parent",
                )
            if of not in self._clients:
                options, retries = (_PART, _RETRIES) if of == "parts" else (_ONE, _NO_RETRIES)
                with translated(self.service, self.url, "opening", ""):
                    self._clients[of] = self._make({**options}, retries)  # type: ignore[typeddict-item]
            return self._clients[of]

    # -- putting -----------------------------------------------------------------------------------------------------

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        check_new_name(name)
        check_token(token)
        self._check_writable(name)
        if content.length <= self._single or name.endswith(_DECIDES):
            self._put_whole(name, content)
        else:
            self._put_parts(name, content)
        return Receipt(name, content.length, self.url)

    def _check_writable(self, name: str) -> None:
        if not self.service.writable:
            raise StoreDenied(
                f"{name} cannot be put or removed: {self.url} is read-only",
                subject=name,
                hint="train into a directory or an object store, and read from here",
            )

    def _put_whole(self, name: str, content: Content) -> None:
        data = gathered(name, content)
        client = self._client()
        with translated(self.service, self.url, "putting", name):
            obstore.put(client, name, data, mode="create", use_multipart=False)

    def _put_parts(self, name: str, content: Content) -> None:
        if self._is_taken(name):
            return
        mark = self._unanswered[name] = secrets.token_hex(16)
        length = part_length(content.length, self._part)
        parts = Parts(name, content, length)
        client = self._client("parts")
        try:
            with translated(self.service, self.url, "putting", name):
                obstore.put(
                    client,
                    name,
                    parts,
                    attributes={_MARK: mark},
                    use_multipart=True,
                    chunk_size=length,
                    max_concurrency=AT_ONCE,
                )
        finally:
            if parts.failed is not None:
                del self._unanswered[name]
                raise parts.failed
        # The service has answered for every part and for the whole: nothing is asked again.
        del self._unanswered[name]

    def _is_taken(self, name: str) -> bool:
        """Returns whether the object is there by an earlier try, whose reply was lost. Raises AlreadyExists if it is
        somebody else's."""
        try:
            found = self._head(name)
        except ObjectNotFound:
            return False
        mark = self._unanswered.get(name)
        if mark is None or mark != _mark_of(found):
            raise AlreadyExists(f"{name} exists already ({self.url})", subject=name)
        del self._unanswered[name]
        return True

    # -- reading -----------------------------------------------------------------------------------------------------

    def get(self, name: str, *, limit: int) -> bytes:
        client = self._client()
        with translated(self.service, self.url, "reading", check_name(name)):
            found = obstore.get(client, self._above + name)
            if (length := found.meta["size"]) <= limit:
                return found.bytes().to_bytes()
        raise CorruptionError(f"{name} has {length} bytes where at most {limit} belong", subject=name)

    def open(self, name: str) -> ObjectReader:
        """Opens an object and reads its beginning, in one request."""
        begin: Bytes | None = None
        client = self._client()
        with translated(self.service, self.url, "looking at", check_name(name)):
            try:
                found = obstore.get(client, self._above + name, options={"range": (0, BEGIN)})
                begin = found.bytes()
            except (GenericError, NotSupportedError) as error:
                if not _RANGE_REFUSED.search(str(error)):
                    raise
                found = self._head(name)
        return ObjectReader(self, name, found.meta["size"], found.meta["e_tag"], begin)

    def stat(self, name: str) -> Stat:
        meta = self._head(check_name(name)).meta
        return Stat(meta["size"], _nanoseconds(meta["last_modified"]))

    def _head(self, name: str) -> GetResult:
        client = self._client()
        with translated(self.service, self.url, "looking at", name):
            return obstore.get(client, self._above + name, options={"head": True})

    def fetch(self, name: str, length: int, tag: str | None, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from an object that had this length and tag when it was opened."""
        client = self._client()
        whole = offset == 0 and len(buffer) == length  # some servers answer a range of everything like no range
        with translated(self.service, self.url, "reading", name):
            found = obstore.get(
                client, self._above + name, options={} if whole else {"range": (offset, offset + len(buffer))}
            )
            meta = found.meta
            if meta["size"] == length and (tag is None or meta["e_tag"] in (None, tag)):
                data = found.bytes()
                if len(data) == len(buffer):
                    # A ufunc copies without the interpreter's lock: other threads read meanwhile.
                    np.positive(np.frombuffer(memoryview(data), np.uint8), out=np.frombuffer(buffer, np.uint8))
                    return
                raise StoreUnavailable(f"{name} at {self.url}: the answer is too short", subject=f"{name}@{offset}")
        raise CorruptionError(
            f"{name} had {length} bytes when it was opened and is another object of {meta['size']} now",
            subject=f"{name}@{offset}",
        )

    # -- listing -----------------------------------------------------------------------------------------------------

    def children(self, prefix: str, *, after: str = "") -> Listing:
        if after:
            return self._children_behind(prefix, after)
        client = self._client()
        below = self._above + (f"{check_prefix(prefix)}/" if prefix else "")
        with translated(self.service, self.url, "listing", prefix):
            found = obstore.list_with_delimiter(client, below.rstrip("/") or None)
        directories = (path[len(below) :] for path in found["common_prefixes"])
        objects = (meta["path"][len(below) :] for meta in found["objects"])
        return Listing(
            tuple(sorted(name for name in directories if name and is_listable(name))),
            tuple(sorted(name for name in objects if name and is_listable(name) and not is_leftover(name))),
        )

    def _children_behind(self, prefix: str, after: str) -> Listing:
        """Lists whole names behind `after`: the client cannot begin there and leave out what lies deeper."""
        start = self._above + (f"{check_prefix(prefix)}/" if prefix else "")
        directories: set[str] = set()
        objects: list[str] = []
        for meta in self._metas(prefix, offset=f"{start}{after}"):
            segment, below, _ = meta["path"][len(start) :].partition("/")
            if not segment or not is_listable(segment) or segment <= after:
                continue
            if below:
                directories.add(segment)
            elif not is_leftover(segment):
                objects.append(segment)
        return Listing(tuple(sorted(directories)), tuple(sorted(objects)))

    def walk(self, prefix: str, *, leftovers: bool = False) -> Iterator[Entry]:
        found: Iterator[Entry] = (
            Entry(name, meta["size"], _nanoseconds(meta["last_modified"]))
            for meta in self._metas(check_prefix(prefix))
            if (name := meta["path"][len(self._above) :]) and is_listable(name) and (leftovers or not is_leftover(name))
        )
        if leftovers and self._unfinished is not None:
            found = chain(found, self._unfinished.entries(prefix))
        elif self.service.sorts:
            return found
        return iter(sorted(found, key=lambda entry: entry.name))

    def _metas(self, prefix: str, offset: str | None = None) -> Iterator[obstore.ObjectMeta]:
        client = self._client()
        with translated(self.service, self.url, "listing", prefix):
            start = (self._above + prefix).rstrip("/") or None
            for page in obstore.list(client, start, offset=offset, chunk_size=_PAGE):
                yield from page

    # -- removing ----------------------------------------------------------------------------------------------------

    def delete(self, names: Sequence[str] | Iterable[str]) -> None:
        """Removes objects, in batches where the service can: it does not say in which order within one."""
        listed = list(dict.fromkeys(check_name(name) for name in names))
        if not listed:
            return
        self._check_writable(listed[0])
        client = self._client()
        if self._unfinished is not None:
            for name in filter(is_leftover, listed):
                self._unfinished.abort(name)
        with translated(self.service, self.url, "removing", listed[0]):
            try:
                obstore.delete(client, listed)
            except FileNotFoundError:  # Google and Azure mind that one is absent, and stop there
                for name in listed:
                    try:
                        obstore.delete(client, name)
                    except FileNotFoundError:
                        continue


class ObjectReader(BaseReader):
    """Reads ranges of an object. Nothing is kept open: once the object is removed, it is gone for readers too."""

    def __init__(self, store: ObjectStore, name: str, length: int, tag: str | None, begin: Bytes | None) -> None:
        """`begin`: its first bytes, where they are known."""
        super().__init__(name, length)
        self._store = store
        self._tag = tag
        self._begin = memoryview(begin) if begin is not None else memoryview(b"")

    def fetch(self, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) <= len(self._begin):
            buffer[:] = self._begin[offset : offset + len(buffer)]
            return
        self._store.fetch(self.name, self._length, self._tag, offset, buffer)


def _mark_of(found: GetResult) -> str | None:
    return next((value for key, value in found.attributes.items() if key.lower() == _MARK), None)


def _nanoseconds(time: datetime) -> int:
    return int(time.timestamp()) * 1_000_000_000 + time.microsecond * 1000
