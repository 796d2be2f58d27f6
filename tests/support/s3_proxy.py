"""Stands between the client and an S3 server, and does to chosen requests what networks and servers do."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

LOSE, HANG, TRUNCATE, UNCONDITIONAL = "lose the reply", "never answer", "cut the body", "drop If-None-Match"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """With the query."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


Rule = Callable[[Request], str | Answer | None]


@dataclass
class Proxy:
    url: str
    requests: list[Request] = field(default_factory=list)
    rule: Rule = lambda request: None

    def answer(self, status: int, code: str = "", said: str = "") -> None:
        """Answers every request so."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{said}</Message></Error>" if code else ""
        self.rule = lambda request: Answer(status, b"" if request.method == "HEAD" else body.encode())


@contextmanager
def proxy(endpoint: str | None) -> Iterator[Proxy]:
    """`endpoint`: of the server behind it; None where each request is answered by the rule."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def act(self) -> None:
            asked = Request(self.command, self.path)
            made.requests.append(asked)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            what = made.rule(asked)
            if what == HANG:
                over.wait(60)
                self.close_connection = True
                return
            if isinstance(what, Answer):
                found, data, headers = what.status, what.body, list(what.headers)
            else:
                found, data, headers = self.forward(body, drop="if-none-match" if what == UNCONDITIONAL else "")
            if what == LOSE:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            self.send_response(found)
            for key, value in headers:
                if key.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(key, value)
            length = dict((key.lower(), value) for key, value in headers).get("content-length", str(len(data)))
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if what == TRUNCATE else data)
            if what == TRUNCATE:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        def forward(self, body: bytes, drop: str) -> tuple[int, bytes, list[tuple[str, str]]]:
            assert endpoint is not None
            behind = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=60)
            try:
                headers = {key: value for key, value in self.headers.items() if key.lower() != drop}
                behind.request(self.command, self.path, body, headers)
                found = behind.getresponse()
                return found.status, found.read(), found.getheaders()
            finally:
                behind.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PROPFIND = act

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that give up on a reply are what many tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    made = Proxy(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()
