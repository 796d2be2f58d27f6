"""Servers that are one process: moto and rclone speak S3, Azurite speaks Azure's Blob Storage."""

from __future__ import annotations

import secrets
import sys
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from campaigns.ports import free_port
from stores.install import node
from stores.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from stores.server_process import ServerProcess, answers, installed
from support.moto import SERVE


class MotoServer(S3Server):
    """A fast imitation of S3, in memory: a kill loses everything, and any key is right."""

    name = "moto"

    def __init__(self, home: Path) -> None:
        pytest.importorskip("moto.moto_server")
        self.port = free_port()
        self.process = ServerProcess(
            [sys.executable, "-c", SERVE, str(self.port)], home / "moto.out", answers(self.port)
        )


class GoogleMotoServer(MotoServer):
    """moto, to Google's client: their services differ in the names of headers. No emulator of Google's storage that can
    be installed by name knows the API for which that client is made, or its condition."""

    name = "google"
    wrong_credentials: ClassVar = {}

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.port = free_port()
        self.process = ServerProcess(
            [sys.executable, "-c", SERVE, str(self.port), "google"], home / "google.out", answers(self.port)
        )

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": endpoint or self.endpoint}

    def new_place(self) -> str:
        bucket = f"t{secrets.token_hex(8)}"  # Google's client encodes "-", which moto takes for part of the name
        self.client.create_bucket(Bucket=bucket)
        return f"gs://{bucket}"

    def put(self, url: str, name: str, data: bytes) -> None:
        super().put(url.replace("gs://", "s3://"), name, data)

    def get(self, url: str, name: str) -> bytes | None:
        return super().get(url.replace("gs://", "s3://"), name)

    def delete(self, url: str, name: str) -> None:
        super().delete(url.replace("gs://", "s3://"), name)


class RcloneServer(S3Server):
    """`rclone serve s3`: it ignores conditions of puts without a word. Its buckets are directories in `home`."""

    name = "rclone"

    def __init__(self, home: Path) -> None:
        program = installed("rclone") / "bin/rclone"
        self.port = free_port()
        (home / "buckets").mkdir()
        options = ["--addr", f"127.0.0.1:{self.port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
        options += ["--force-path-style=true", "--config", str(home / "rclone.conf"), "--vfs-cache-mode", "off"]
        self.process = ServerProcess(
            [program, "serve", "s3", home / "buckets", *options], home / "rclone.out", answers(self.port)
        )


class AzuriteServer:
    """Azure's Blob Storage, by Microsoft. `home` has its data."""

    name = "azurite"
    wrong_credentials: ClassVar = {"AZURE_STORAGE_ACCOUNT_KEY": "YS1zZWNyZXQtb2Ytc29tZWJvZHktZWxzZQ=="}
    _account = "devstoreaccount1"
    _key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def __init__(self, home: Path) -> None:
        program = installed("azurite") / "node_modules/azurite/dist/src/blob/main.js"
        self.port = free_port()
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "-l", str(home), "--silent"]
        self.process = ServerProcess(
            [node(), program, *options, "--skipApiVersionCheck", "--disableTelemetry"],
            home / "azurite.out",
            answers(self.port),
        )

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self._account,
            "AZURE_STORAGE_ACCOUNT_KEY": self._key,
            "AZURE_STORAGE_ENDPOINT": f"{endpoint or self.endpoint}/{self._account}",
        }

    @cache  # noqa: B019 - one server for the whole run
    def client(self, url: str) -> Any:
        obstore = pytest.importorskip("obstore.store")
        return obstore.AzureStore(
            url.removeprefix("az://").partition("/")[0],
            account_name=self._account,
            account_key=self._key,
            endpoint=f"{self.endpoint}/{self._account}",
            client_options={"allow_http": True},
        )

    def new_place(self) -> str:
        """Returns the URL of a new container."""
        import base64
        import hashlib
        import hmac
        import urllib.request
        from email.utils import formatdate

        container, date = f"t-{secrets.token_hex(8)}", formatdate(usegmt=True)
        resource = f"/{self._account}/{self._account}/{container}\nrestype:container"
        signed = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:2021-12-02\n{resource}"
        digest = hmac.new(base64.b64decode(self._key), signed.encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": date,
            "x-ms-version": "2021-12-02",
            "Authorization": f"SharedKey {self._account}:{base64.b64encode(digest).decode()}",
        }
        address = f"{self.endpoint}/{self._account}/{container}?restype=container"
        urllib.request.urlopen(urllib.request.Request(address, method="PUT", headers=headers), timeout=30).close()
        return f"az://{container}"

    def put(self, url: str, name: str, data: bytes) -> None:
        import obstore

        obstore.put(self.client(url), _below(url, name), data, use_multipart=False)

    def get(self, url: str, name: str) -> bytes | None:
        import obstore

        try:
            return obstore.get(self.client(url), _below(url, name)).bytes().to_bytes()
        except FileNotFoundError:
            return None

    def delete(self, url: str, name: str) -> None:
        import obstore

        try:
            obstore.delete(self.client(url), _below(url, name))
        except FileNotFoundError:
            pass


def _below(url: str, name: str) -> str:
    prefix = url.removeprefix("az://").partition("/")[2]
    return f"{prefix}/{name}" if prefix else name
