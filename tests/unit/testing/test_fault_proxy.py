"""Each fault of the proxy does what it says, and requests without one pass unchanged."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tenuto.errors import UsageError
from tenuto.testing.fault_proxy import Fault, FaultProxy


class Objects(BaseHTTPRequestHandler):
    """PUT stores a body that came whole, GET returns it; /chunked/NAME and /closing/NAME return it in that form."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    hosts: list[str | None]

    def do_PUT(self) -> None:
        data = self.body()
        if data is not None:
            self.objects[self.path] = data
            self.hosts.append(self.headers["Host"])
            self.answer(200, b"")

    def do_GET(self) -> None:
        form, name = self.path[1:].split("/", 1)
        data = self.objects.get(f"/plain/{name}")
        if data is None:
            self.answer(404, b"absent")
        elif form == "chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
        elif form == "closing":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = True
        else:
            self.answer(200, data)

    do_HEAD = do_GET

    def body(self) -> bytes | None:
        if self.headers["Transfer-Encoding"] == "chunked":
            found = b""
            while length := int(self.rfile.readline(), 16):
                found += self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
            return found
        length = int(self.headers["Content-Length"])
        data = self.rfile.read(length)
        return data if len(data) == length else None

    def answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Objects.objects, Objects.hosts = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Objects)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def proxy(server: ThreadingHTTPServer) -> Iterator[FaultProxy]:
    with FaultProxy(f"http://127.0.0.1:{server.server_address[1]}", seed=1) as proxy:
        yield proxy


DATA = bytes(range(256)) * 1024
GONE = (http.client.RemoteDisconnected, http.client.IncompleteRead, ConnectionError)


class Client:
    """One connection, made anew where it was lost."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=30)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        try:
            self.connection.request(method, path, body, headers, encode_chunked="Transfer-Encoding" in headers)
            reply = self.connection.getresponse()
            return reply.status, reply.read()
        except BaseException:
            self.connection.close()
            raise


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[Client]:
    client = Client(proxy)
    yield client
    client.connection.close()


def test_requests_pass_unchanged_and_are_counted(proxy: FaultProxy, client: Client) -> None:
    assert client.ask("PUT", "/plain/a%20b?x=1", DATA) == (200, b"")
    assert client.ask("GET", "/plain/a%20b?x=1") == (200, DATA)
    assert client.ask("HEAD", "/plain/a%20b?x=1") == (200, b"")
    assert client.ask("GET", "/plain/absent") == (404, b"absent")
    assert proxy.counts() == {"PUT": 1, "GET": 2, "HEAD": 1}
    first = proxy.requests[0]
    assert (first.target, first.status, first.fault, first.body_bytes) == ("/plain/a b?x=1", 200, None, len(DATA))
    assert proxy.requests[1].reply_bytes == len(DATA)
    assert Objects.hosts == [proxy.url.removeprefix("http://")]
    proxy.forget()
    assert not proxy.requests


def test_bodies_of_every_form_pass(proxy: FaultProxy, client: Client) -> None:
    pieces = iter([DATA[:1000], DATA[1000:]])
    assert client.ask("PUT", "/plain/x", pieces, **{"Transfer-Encoding": "chunked"}) == (200, b"")
    assert Objects.objects["/plain/x"] == DATA
    for form in ("chunked", "closing", "plain"):
        assert client.ask("GET", f"/{form}/x") == (200, DATA)
    assert client.ask("PUT", "/plain/y", DATA, Expect="100-continue") == (200, b"")
    assert Objects.objects["/plain/y"] == DATA


def test_an_answer_in_the_servers_place(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Fault("status", method="PUT", status=503, code="SlowDown"), Fault("status", status=500, code="Internal"))
    status, body = client.ask("PUT", "/plain/x", DATA)
    assert status == 503 and b"<Code>SlowDown</Code>" in body
    assert client.ask("HEAD", "/plain/x") == (500, b"")
    assert not Objects.objects
    assert client.ask("PUT", "/plain/x", DATA) == (200, b"")
    assert [(request.status, request.fault) for request in proxy.requests] == [
        (503, "status"),
        (500, "status"),
        (200, None),
    ]


def test_a_request_that_is_cut_never_arrives_whole(proxy: FaultProxy, client: Client) -> None:
    for after in (0, 1, 70_000):
        proxy.add(Fault("cut request", after=after))
        with pytest.raises(GONE):
            client.ask("PUT", "/plain/x", DATA)
    assert not Objects.objects
    assert proxy.requests[-1].status is None


@pytest.mark.parametrize("form", ["plain", "chunked", "closing"])
def test_a_reply_that_is_cut(proxy: FaultProxy, client: Client, form: str) -> None:
    client.ask("PUT", "/plain/x", DATA)
    proxy.add(Fault("cut reply", after=1000))
    if form == "closing":
        assert client.ask("GET", "/closing/x") == (200, DATA[:1000])
    else:
        with pytest.raises(GONE) as caught:
            client.ask("GET", f"/{form}/x")
        assert not isinstance(caught.value, http.client.IncompleteRead) or DATA.startswith(caught.value.partial)
    assert client.ask("GET", f"/{form}/x") == (200, DATA)


def test_a_truncated_reply_looks_whole(proxy: FaultProxy, client: Client) -> None:
    client.ask("PUT", "/plain/x", DATA)
    for after in (0, 1000, 70_000):
        proxy.add(Fault("truncate", after=after))
        assert client.ask("GET", "/plain/x") == (200, DATA[:after])
    proxy.add(Fault("truncate", after=1000))
    client.connection.request("HEAD", "/plain/x")
    reply = client.connection.getresponse()
    reply.read()
    assert reply.headers["Content-Length"] == str(len(DATA))
    assert client.ask("GET", "/plain/x") == (200, DATA)


def test_one_bit_differs(proxy: FaultProxy, client: Client) -> None:
    client.ask("PUT", "/plain/x", DATA)
    proxy.add(Fault("flip", after=70_001))
    _, found = client.ask("GET", "/plain/x")
    assert [at for at, (one, other) in enumerate(zip(found, DATA, strict=True)) if one != other] == [70_001]


def test_a_reply_is_lost_after_the_server_did_its_work(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Fault("lose reply", method="PUT"))
    with pytest.raises(GONE):
        client.ask("PUT", "/plain/x", DATA)
    assert Objects.objects["/plain/x"] == DATA
    assert proxy.requests[0].status == 200


@pytest.mark.parametrize(("kind", "arrives"), [("hang", False), ("hang reply", True)])
def test_nobody_answers(proxy: FaultProxy, client: Client, kind: Any, arrives: bool) -> None:
    proxy.add(Fault(kind))
    impatient = Client(proxy).connection
    impatient.request("PUT", "/plain/x", DATA)
    impatient.sock.settimeout(0.3)  # only now: the request itself may take longer
    with pytest.raises(TimeoutError):
        impatient.getresponse()
    impatient.close()
    patient_until = time.monotonic() + 30
    while arrives and "/plain/x" not in Objects.objects and time.monotonic() < patient_until:
        time.sleep(0.005)  # it may be on its way still when the client has lost its patience
    assert ("/plain/x" in Objects.objects) == arrives
    assert client.ask("PUT", "/plain/y", DATA) == (200, b"")


def test_which_requests_a_fault_meets(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Fault("status", method="PUT", path=r"/plain/n\d$", nth=2, times=2))
    for name in ("other", "n1", "n2", "n3", "n4"):
        client.ask("PUT", f"/plain/{name}", b"1")
    client.ask("GET", "/plain/n1")
    assert [request.status for request in proxy.requests] == [200, 200, 503, 503, 200, 200]


def test_chance_is_repeated_by_its_seed(server: ThreadingHTTPServer) -> None:
    seen = []
    for seed in (5, 5, 6):
        with FaultProxy(f"http://127.0.0.1:{server.server_address[1]}", seed=seed) as proxy:
            proxy.add(Fault("status", chance=0.5, times=None))
            client = Client(proxy)
            seen.append([client.ask("GET", "/plain/absent")[0] for _ in range(30)])
            client.connection.close()
    assert seen[0] == seen[1] != seen[2]
    assert {404, 503} == set(seen[0])


def test_faults_are_disarmed(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Fault("status", times=None))
    assert client.ask("GET", "/plain/absent")[0] == 503
    proxy.clear()
    assert client.ask("GET", "/plain/absent")[0] == 404


def test_latency_and_rate_hold_for_every_request(
    proxy: FaultProxy, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the waits that are asked for: no clock is looked at."""
    import asyncio

    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    proxy.latency_s = 7.0
    assert client.ask("PUT", "/plain/x", DATA) == (200, b"")
    assert waits == [7.0]
    waits.clear()
    proxy.latency_s, proxy.bytes_per_s = 0.0, len(DATA) / 10
    assert client.ask("GET", "/plain/x") == (200, DATA)
    assert waits[0] == 0.0
    assert 9.0 < max(waits) <= 10.0


def test_a_server_that_is_gone_is_a_lost_connection(server: ThreadingHTTPServer) -> None:
    with FaultProxy("http://127.0.0.1:1") as proxy:
        with pytest.raises(GONE):
            Client(proxy).ask("GET", "/plain/x")
        assert proxy.requests[0].status is None


def test_stopping_ends_what_hangs_and_the_port_serves_again(server: ThreadingHTTPServer) -> None:
    proxy = FaultProxy(f"http://127.0.0.1:{server.server_address[1]}").start()
    proxy.add(Fault("hang"))
    ended: list[type] = []

    def wait() -> None:
        try:
            Client(proxy).ask("GET", "/plain/x")
        except GONE as error:
            ended.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not proxy.requests:
        pass
    proxy.stop()
    waiting.join(30)
    assert ended
    proxy.start()
    assert Client(proxy).ask("GET", "/plain/absent")[0] == 404
    proxy.stop()


@pytest.mark.parametrize("url", ["https://host", "s3://bucket", "http://", "http://host/path"])
def test_only_the_root_of_a_plain_http_server(url: str) -> None:
    with pytest.raises(UsageError):
        FaultProxy(url)
