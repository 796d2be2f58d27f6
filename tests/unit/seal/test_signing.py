"""Signatures of checkpoints: valid for every byte that was signed, and for nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

import tenuto
from tenuto.errors import CheckpointNotFound, CorruptionError, KeyMissing, UsageError
from tenuto.maintenance.sign import check_signed, sign, signatures
from tenuto.model.ids import CheckpointId
from tenuto.repo.notes import add_note, notes
from tenuto.repo.repository import Repo
from tenuto.seal.signing import Signer, read_public, read_signer
from tenuto.store.registry import open_store

ID = CheckpointId("main", 1, 0)


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    tenuto.save({"w": np.arange(1000.0)}, tmp_path / "ckpts")
    return Repo.open(open_store(tmp_path / "ckpts"))


@pytest.fixture
def signer() -> Signer:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Signer(Ed25519PrivateKey.generate())


def files(place: Path) -> list[Path]:
    return sorted(path for path in (place / "runs").rglob("step-*/*") if path.is_file() and path.name != "begin.json")


def test_every_changed_object_is_named(repo: Repo, signer: Signer, tmp_path: Path) -> None:
    before = check_signed(repo, ID, [signer.public])
    assert [str(finding.message) for finding in before] == ["is not signed by any of the trusted keys"]
    sign(repo, ID, signer)
    assert check_signed(repo, ID, [signer.public]) == []
    parts = files(tmp_path / "ckpts")
    assert [path.name for path in parts] == ["manifest.json", "rank-00000.index", "rank-00000.safetensors"]
    for path in parts:
        data = path.read_bytes()
        for changed in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], data + b"\0", b""):
            path.write_bytes(changed)
            (found,) = check_signed(repo, ID, [signer.public])
            assert (found.object, found.severity) == (str(path.relative_to(tmp_path / "ckpts")), "error")
        path.write_bytes(data)
    path.unlink()
    assert [finding.object for finding in check_signed(repo, ID, [signer.public])] == [f"{ID.directory}/{path.name}"]


def test_only_a_trusted_key_counts(repo: Repo, signer: Signer) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    other = Signer(Ed25519PrivateKey.generate())
    sign(repo, ID, other)
    assert len(check_signed(repo, ID, [signer.public])) == 1
    assert check_signed(repo, ID, [signer.public, other.public]) == []
    sign(repo, ID, signer)
    assert check_signed(repo, ID, [signer.public]) == []
    assert [public for public, _ in signatures(repo, ID)] == [other.public, signer.public]


def test_a_signature_is_of_one_checkpoint_and_of_its_list_alone(repo: Repo, signer: Signer, tmp_path: Path) -> None:
    tenuto.save({"w": np.arange(1000.0)}, tmp_path / "ckpts", step=1)
    (second,) = (CheckpointId("main", 1, step) for step in repo.committed("main", 1) if step)
    body = dict(sign(repo, ID, signer).body)
    for note in (
        body,  # of another checkpoint
        {**body, "public": "00" * 32},
        {**body, "public": "x"},
        {**body, "public": None},
        {**body, "signature": "00" * 64},
        {**body, "objects": body["objects"][1:]},
        {**body, "objects": [[]]},
        {**body, "objects": [["a", True, "b"]]},
        {**body, "objects": {}},
        {},
    ):
        add_note(repo, second, "signed", note)
    assert list(signatures(repo, second)) == []
    assert len(check_signed(repo, second, [signer.public])) == 1


def test_a_signature_that_leaves_the_manifest_out_does_not_count(repo: Repo, signer: Signer) -> None:
    from tenuto.seal.signing import statement

    add_note(
        repo,
        ID,
        "signed",
        {"objects": [], "public": signer.public, "signature": signer.sign(statement(repo.id, ID.directory, []))},
    )
    assert [finding.object for finding in check_signed(repo, ID, [signer.public])] == [ID.manifest]


def test_what_is_not_whole_is_not_signed(repo: Repo, signer: Signer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        sign(repo, CheckpointId("main", 1, 9), signer)
    (tmp_path / "ckpts" / ID.directory / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptionError, match="is missing"):
        sign(repo, ID, signer)
    assert notes(repo, ID) == []


def test_keys_of_openssl_and_of_ssh(tmp_path: Path) -> None:
    private, public = tmp_path / "me.pem", tmp_path / "me.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    private.chmod(0o600)
    assert read_signer(private).public == read_public(public)
    private.chmod(0o644)
    with pytest.raises(UsageError, match="others than its owner"):
        read_signer(private)
    for wrong in (public, private):
        wrong.chmod(0o600)
    with pytest.raises(UsageError, match="not an Ed25519 private key"):
        read_signer(public)
    with pytest.raises(UsageError, match="not an Ed25519 public key"):
        read_public(private)
    with pytest.raises(KeyMissing, match="there is no key"):
        read_signer(tmp_path / "none")
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "rsa", "-pkeyopt", "rsa_keygen_bits:1024", "-out", tmp_path / "rsa"],
        check=True,
        capture_output=True,
    )
    (tmp_path / "rsa").chmod(0o600)
    with pytest.raises(UsageError, match="not an Ed25519 private key"):
        read_signer(tmp_path / "rsa")
    locked = tmp_path / "locked"
    words = ["openssl", "pkey", "-in", private, "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(words, check=True)
    locked.chmod(0o600)
    with pytest.raises(UsageError, match="has a passphrase"):
        read_signer(locked)


def test_a_key_of_ssh_signs(repo: Repo, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, place = Ed25519PrivateKey.generate(), tmp_path / "id_ed25519"
    form = serialization.PrivateFormat.OpenSSH
    place.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    place.chmod(0o600)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (tmp_path / "id.pub").write_bytes(line + b" me@here\n")
    sign(repo, ID, read_signer(place))
    assert check_signed(repo, ID, [read_public(tmp_path / "id.pub")]) == []
