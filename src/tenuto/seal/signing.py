"""Ed25519 signatures: who vouches for a checkpoint, whether it is sealed or not.

What is signed is the SHA-256 of every object that the checkpoint consists of. The digests within a checkpoint would not
do: XXH3 finds accidents, and whoever wants to can make other bytes with the same one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tenuto.errors import KeyMissing, StoreDenied, UsageError, typed
from tenuto.model import canonical_json
from tenuto.record import record
from tenuto.regular_files import opener
from tenuto.seal.cipher import missing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_LONGEST: Final = 16 << 10
_MAKE: Final = "openssl genpkey -algorithm ed25519 -out FILE"


@record
class SignedObject:
    """An object of a checkpoint as it was signed: its full name, its length in bytes, and its SHA-256."""

    name: str
    length: int
    sha256: str


def statement(repository: str, checkpoint: str, objects: Sequence[SignedObject]) -> bytes:
    """Returns the bytes that are signed. `checkpoint`: its directory."""
    rows = [[one.name, one.length, one.sha256] for one in objects]
    return canonical_json.dumps(["tenuto signature 1", repository, checkpoint, rows])


class Signer:
    """A private key. `public`: the 32 bytes by which it is known, as hexadecimal digits."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        return self._key.sign(message).hex()


def read_signer(path: str | os.PathLike[str]) -> Signer:
    """Reads an Ed25519 private key as openssl (PEM) or ssh-keygen writes it. Raises KeyMissing, UsageError."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise missing("signing", "seal") from None
    place, data = _read(path)
    if place.stat().st_mode & 0o077:
        raise UsageError(
            f"others than its owner may use the private key {place}",
            subject=str(place),
            hint=typed("chmod", "600", place),
        )
    ssh = b"OPENSSH" in data[:64]
    try:
        load: Any = serialization.load_ssh_private_key if ssh else serialization.load_pem_private_key
        key = load(data, password=None)
    except TypeError:
        raise UsageError(
            f"{place} has a passphrase, which is not supported",
            subject=str(place),
            hint=f"without one: {typed('openssl', 'pkey', '-in', place)} -out FILE",
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{place} is not an Ed25519 private key", subject=str(place), hint=_MAKE)
    return Signer(key)


def read_public(path: str | os.PathLike[str]) -> str:
    """Reads an Ed25519 public key (PEM, or a line such as `ssh-ed25519 AAAA…`); returns its 64 hexadecimal digits."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise missing("signing", "seal") from None
    place, data = _read(path)
    ssh = data.lstrip().startswith(b"ssh-")
    try:
        key: Any = serialization.load_ssh_public_key(data) if ssh else serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(
            f"{place} is not an Ed25519 public key",
            subject=str(place),
            hint="openssl pkey -in PRIVATE -pubout -out FILE",
        )
    return key.public_bytes_raw().hex()


def is_signed(public: str, signature: str, message: bytes) -> bool:
    """Returns whether the holder of the private key has signed these bytes."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise missing("signing", "seal") from None
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _read(path: str | os.PathLike[str]) -> tuple[Path, bytes]:
    place = Path(path).expanduser()
    try:
        with open(place, "rb", opener=opener) as file:
            return place, file.read(_LONGEST)
    except FileNotFoundError:
        raise KeyMissing(f"there is no key {place}", subject=str(place), hint=_MAKE) from None
    except OSError as error:
        raise StoreDenied(
            f"the key {place} cannot be read: {error.strerror}", subject=str(place), hint=typed("ls", "-ld", place)
        ) from None
