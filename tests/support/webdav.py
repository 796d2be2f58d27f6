"""A web server over a directory: ranges, and listings by WebDAV where it is told to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote


@contextmanager
def serving(root: Path, *, lists: bool = True) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", *headers: tuple[str, str], length: int | None = None) -> None:
            self.send_response(status)
            for key, value in headers:
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            path = root / unquote(self.path).lstrip("/")
            if not path.is_file():
                return self.answer(404)
            self.answer(
                200, b"", ("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True)), length=path.stat().st_size
            )

        def do_GET(self) -> None:
            path = root / unquote(self.path).lstrip("/")
            if not path.is_file():
                return self.answer(404)
            data, wanted = path.read_bytes(), self.headers.get("Range")
            modified = ("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
            if wanted is None:
                return self.answer(200, data, modified)
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            part = data[int(start) : int(end) + 1]
            self.answer(
                206, part, modified, ("Content-Range", f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}")
            )

        def do_PROPFIND(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            top = root / unquote(self.path).strip("/")
            if not lists:
                return self.answer(405)
            if not top.exists():
                return self.answer(404)
            deep = self.headers.get("Depth") == "infinity"
            below = [top] if top.is_file() else [top, *(top.rglob("*") if deep else top.iterdir())]
            body = "".join(map(self.described, below))
            self.answer(207, f'<?xml version="1.0"?><D:multistatus xmlns:D="DAV:">{body}</D:multistatus>'.encode())

        def described(self, path: Path) -> str:
            href = "/" + quote(os.path.relpath(path, root)) if path != root else "/"
            found = path.stat()
            kind = "<D:resourcetype><D:collection/></D:resourcetype>" if path.is_dir() else "<D:resourcetype/>"
            return (
                f"<D:response><D:href>{href}</D:href><D:propstat><D:prop>"
                f"<D:getlastmodified>{formatdate(found.st_mtime, usegmt=True)}</D:getlastmodified>"
                f"<D:getcontentlength>{found.st_size}</D:getcontentlength>{kind}"
                "</D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>"
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
