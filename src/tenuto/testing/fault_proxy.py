"""A proxy that puts faults between a client and any plain-HTTP server: an object store, say.

    with FaultProxy("http://127.0.0.1:9000") as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        proxy.add(Fault("lose reply", method="PUT", path="manifest"))
        ...
        assert proxy.counts()["PUT"] == 2

Requests go on as they came, the Host header too, so that signatures over it stay valid: the client has to be pointed at
`proxy.url`. One thread serves all connections; every request has a connection to the server of its own.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self
from urllib.parse import unquote, urlsplit

from tenuto.errors import UsageError
from tenuto.record import record

Kind = Literal["status", "hang", "cut request", "cut reply", "truncate", "flip", "lose reply", "hang reply"]
"""What happens to a request:

- status: the server never sees it; it is answered with `status` and an S3 error of `code`.
- hang: the server never sees it, and nobody answers it.
- cut request: the server gets `after` bytes of its body, then both connections are gone.
- cut reply: the client gets `after` bytes of the reply's body, then its connection is gone.
- truncate: the client gets `after` bytes of the body and is told that these are all (of a chunked reply: as cut reply).
- flip: one bit of byte `after` of the reply's body is another one.
- lose reply: the server does what it was asked for, and the client's connection ends without an answer.
- hang reply: as lose reply, but the connection stays open.
"""

_HEAD_LIMIT: Final = 1 << 16
_BLOCK: Final = 1 << 16


@record
class Fault:
    """One fault, and the requests that it meets.

    method, path: those of this method (None: any) in whose decoded path and query the regular expression is found.
    nth, times: of these, counted from `add` on, the nth and those that follow it, so many (None: all).
    chance: each of them with this probability.
    """

    kind: Kind
    method: str | None = None
    path: str = ""
    nth: int = 1
    times: int | None = 1
    chance: float = 1.0
    after: int = 0
    status: int = 503
    code: str = "SlowDown"


@dataclass(slots=True)
class Request:
    """A request as it came: `target` is its decoded path and query. `status` is that of the server's or the proxy's
    reply; None if there was none, or not yet."""

    method: str
    target: str
    status: int | None = None
    fault: Kind | None = None
    body_bytes: int = 0
    reply_bytes: int = 0


@dataclass(slots=True)
class _Armed:
    fault: Fault
    matched: int = 0
    met: int = 0


@dataclass(slots=True)
class _Head:
    """The first line and the headers of a message, as they came."""

    first: str
    headers: list[tuple[str, str]]

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def without(self, name: str) -> _Head:
        return _Head(self.first, [(key, value) for key, value in self.headers if key.lower() != name])

    @property
    def length(self) -> int:
        return int(self.get("content-length") or 0)

    @property
    def chunked(self) -> bool:
        return "chunked" in (self.get("transfer-encoding") or "").lower()

    def encode(self) -> bytes:
        lines = [self.first, *(f"{key}: {value}" for key, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class _Cut(Exception):
    """The connection to the client ends here."""


@dataclass
class FaultProxy:
    """Serves `url` on loopback, between `start` and `stop`, for the server at `upstream` (http://HOST:PORT).

    latency_s: how long each request waits before the server gets it.
    bytes_per_s: what all bodies together may take, in both directions; None: no limit.
    seed: of the faults that meet some requests by chance.
    Faults, latency and rate can be changed at any time; they hold for the requests that come from then on.
    """

    upstream: str
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    seed: int = 0
    requests: list[Request] = field(default_factory=list)
    """All since `start` or `forget`, in the order in which they came."""
    _faults: list[_Armed] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _port: int = 0
    _free_at: float = 0.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.upstream)
        if parts.scheme != "http" or parts.hostname is None or parts.path not in ("", "/"):
            raise UsageError(
                f"{self.upstream} cannot be proxied: it is not the root of a plain-HTTP server",
                subject=self.upstream,
                hint="give http://HOST:PORT",
            )
        self._address = parts.hostname, parts.port or 80
        self._random = random.Random(self.seed)

    # ----------------------------------------------------------------------------------------------
    # For the test

    def add(self, *faults: Fault) -> None:
        """Arms faults. A request meets the first of all that are armed for it."""
        with self._lock:
            self._faults += [_Armed(fault) for fault in faults]

    def clear(self) -> None:
        """Disarms all faults; requests that hang stay so."""
        with self._lock:
            self._faults.clear()

    def forget(self) -> None:
        """Empties `requests`."""
        with self._lock:
            self.requests.clear()

    def counts(self) -> Counter[str]:
        """Returns how many requests of each method came."""
        with self._lock:
            return Counter(request.method for request in self.requests)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._run(
            asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=_HEAD_LIMIT)
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        """Ends all connections, also those that hang. `start` serves the same port again."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    async def _end(self) -> None:
        self._server.close()
        connections = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    # ----------------------------------------------------------------------------------------------
    # For each connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await _read_head(reader)) is not None:
                await self._pass_on(head, reader, writer)
        except (_Cut, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the client sees it as what it is: its connection is gone
        finally:
            writer.close()

    async def _pass_on(self, head: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one request. Raises _Cut where the client's connection ends with it."""
        method, target, _ = head.first.split(" ", 2)
        request = Request(method, unquote(target))
        fault = self._fault_of(request)
        if (head.get("expect") or "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = head.without("expect")
        await asyncio.sleep(self.latency_s)
        if fault is not None and fault.kind in ("status", "hang"):
            async for piece in _body(reader, head, closes=False):
                request.body_bytes += len(piece)
            if fault.kind == "hang":
                await _until_gone(reader)
            await self._answer(request, fault, writer)
            return
        server_reader, server_writer = await asyncio.open_connection(*self._address, limit=_HEAD_LIMIT)
        try:
            await self._send(request, fault, head, reader, server_writer)
            reply = await _read_head(server_reader)
            while reply is not None and reply.first.split(" ")[1].startswith("1"):
                reply = await _read_head(server_reader)
            if reply is None:
                raise _Cut
            request.status = int(reply.first.split(" ")[1])
            if fault is not None and fault.kind in ("lose reply", "hang reply"):
                async for _ in _reply_body(request, reply, server_reader):
                    pass
                if fault.kind == "hang reply":
                    await _until_gone(reader)
                raise _Cut
            await self._reply(request, fault, reply, server_reader, writer)
        finally:
            server_writer.close()

    async def _send(
        self,
        request: Request,
        fault: Fault | None,
        head: _Head,
        reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        end = fault.after if fault is not None and fault.kind == "cut request" else None
        taken = True
        server.write(head.encode())
        if end == 0:
            await self._cut(server)
        async for piece in _body(reader, head, closes=False):
            await self._pace(len(piece))
            request.body_bytes += len(piece)
            if end is not None and request.body_bytes >= end:
                server.write(piece[: len(piece) - (request.body_bytes - end)])
                await self._cut(server)
            if taken:
                server.write(piece)
                try:
                    await server.drain()
                except OSError:
                    taken = False  # it has answered before it had read all, and the answer is still to be passed on
        with suppress(OSError):
            await server.drain()

    async def _cut(self, server: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await server.drain()
        server.close()
        raise _Cut

    async def _reply(
        self,
        request: Request,
        fault: Fault | None,
        head: _Head,
        server: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        kind, after = (fault.kind, fault.after) if fault is not None else (None, 0)
        shown = head
        if kind == "truncate" and not _has_no_body(request) and head.length > after:
            shown = head.without("content-length")
            shown.headers.append(("Content-Length", str(after)))
        writer.write(shown.encode())
        async for whole in _reply_body(request, head, server):
            await self._pace(len(whole))
            start, piece = request.reply_bytes, whole
            request.reply_bytes += len(piece)
            if kind == "flip" and start <= after < start + len(piece):
                changed = bytearray(piece)
                changed[after - start] ^= 1
                piece = bytes(changed)
            if kind in ("cut reply", "truncate") and request.reply_bytes > after:
                writer.write(piece[: max(0, after - start)])
                await writer.drain()
                if shown is head:
                    raise _Cut
                continue
            writer.write(piece)
            await writer.drain()
        if _ends_with_its_connection(request, head) or (head.get("connection") or "").lower() == "close":
            raise _Cut

    async def _answer(self, request: Request, fault: Fault, writer: asyncio.StreamWriter) -> None:
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{fault.code}</Code><Message>fault</Message></Error>'
        )
        body = b"" if request.method == "HEAD" else text.encode()
        first = f"HTTP/1.1 {fault.status} {fault.code}"
        head = _Head(first, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        request.status = fault.status
        writer.write(head.encode() + body)
        await writer.drain()

    def _fault_of(self, request: Request) -> Fault | None:
        """Notes a request, and returns the fault that it meets."""
        with self._lock:
            self.requests.append(request)
            for armed in self._faults:
                fault = armed.fault
                if fault.method not in (None, request.method) or not re.search(fault.path, request.target):
                    continue
                armed.matched += 1
                over = fault.times is not None and armed.met >= fault.times
                if armed.matched < fault.nth or over or self._random.random() >= fault.chance:
                    continue
                armed.met += 1
                request.fault = fault.kind
                return fault
        return None

    async def _pace(self, length: int) -> None:
        """Waits until `length` more bytes keep the rate."""
        if self.bytes_per_s is not None:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now) + length / self.bytes_per_s
            await asyncio.sleep(self._free_at - now)


# --------------------------------------------------------------------------------------------------
# HTTP/1.1


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """Reads the head of a message; None where the connection ends instead."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    return _Head(first, [(key, value.strip()) for key, _, value in pairs])


async def _body(reader: asyncio.StreamReader, head: _Head, *, closes: bool) -> AsyncIterator[bytes]:
    """Yields the body that follows a head, as it came: of a chunked one also what frames the chunks.

    closes: it has no length and lasts until the connection ends.
    """
    if closes:
        while piece := await reader.read(_BLOCK):
            yield piece
    elif head.chunked:
        length = -1
        while length != 0:
            line = await reader.readuntil(b"\r\n")
            yield line
            length = int(line.split(b";")[0], 16)
            async for piece in _exactly(reader, length):
                yield piece
            if length:
                yield await reader.readexactly(2)
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            yield line
        yield line
    else:
        async for piece in _exactly(reader, head.length):
            yield piece


def _reply_body(request: Request, head: _Head, server: asyncio.StreamReader) -> AsyncIterator[bytes]:
    return (
        _exactly(server, 0)
        if _has_no_body(request)
        else _body(server, head, closes=_ends_with_its_connection(request, head))
    )


def _has_no_body(request: Request) -> bool:
    return request.method == "HEAD" or request.status in (204, 304)


def _ends_with_its_connection(request: Request, head: _Head) -> bool:
    return not _has_no_body(request) and not head.chunked and head.get("content-length") is None


async def _exactly(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    while length > 0:
        piece = await reader.read(min(length, _BLOCK))
        if not piece:
            raise _Cut
        length -= len(piece)
        yield piece


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Returns when the client has given up."""
    while await reader.read(_BLOCK):
        pass
    raise _Cut
