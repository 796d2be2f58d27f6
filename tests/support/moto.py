"""An S3 of moto's on a loopback port, for the whole session, and the environment that points at it."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

KEY = "AKIATENUTOTEST000000"
SECRET = "wJalrXUtnFEMI-this-must-show-nowhere-EXAMPLEKEY"


@dataclass(frozen=True)
class Moto:
    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A client that shares no code with the one under test."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}),
        )

    def new_bucket(self) -> str:
        bucket = f"t-{secrets.token_hex(8)}"
        self.client().create_bucket(Bucket=bucket)
        return bucket


SERVE = """
import io, os, sys, threading
os.environ["S3_UPLOAD_PART_MIN_SIZE"] = "1"
import werkzeug.serving
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
moto = DomainDispatcherApplication(create_backend_app)
lock = threading.Lock()

def app(environ, start_response):  # moto looks and then puts; a service does both at once
    body = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
    with lock:
        return list(moto(environ | {"wsgi.input": body}, start_response))

def google(environ, start_response):
    if environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
        return app(environ, start_response)
    credential = "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    environ["HTTP_AUTHORIZATION"] = credential
    for key in [key for key in environ if key.startswith("HTTP_X_GOOG_META_")]:
        environ[key.replace("GOOG", "AMZ")] = environ[key]
    if environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH") == "0":
        environ["HTTP_IF_NONE_MATCH"] = "*"
    if environ["REQUEST_METHOD"] == "DELETE" and "uploadId" not in environ["QUERY_STRING"]:
        asked, absent = io.BytesIO(), []
        look = environ | {"REQUEST_METHOD": "HEAD", "wsgi.input": asked}
        list(app(look, lambda status, headers: absent.append(status.startswith("404"))))
        if absent[0]:  # Google minds, S3 does not
            start_response("404 Not Found", [("Content-Length", "0")])
            return [b""]
    return app(
        environ,
        lambda status, headers, *more: start_response(
            status, [(name.replace("x-amz-meta-", "x-goog-meta-"), value) for name, value in headers], *more
        ),
    )

werkzeug.serving.WSGIRequestHandler.protocol_version = "HTTP/1.1"
server = werkzeug.serving.make_server("127.0.0.1", int(sys.argv[1]), google if sys.argv[2:] else app, threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""
"""A program that serves on the port of its first argument (0: one that it chooses and prints); with a second one to
Google's client."""


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    pytest.importorskip("obstore")
    pytest.importorskip("boto3")
    pytest.importorskip("moto.moto_server", reason="no moto[server] here")
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            assert port, "moto did not start"
            urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=60).close()
            yield Moto(f"http://127.0.0.1:{port}")
        finally:
            server.send_signal(signal.SIGKILL)


@pytest.fixture
def s3(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket, with the environment set to reach it."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{moto.new_bucket()}"
