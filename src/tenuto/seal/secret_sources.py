"""What opens a key slot: 32 bytes of a file or of an environment variable, a passphrase, AWS KMS, HashiCorp Vault.

Each of them protects a *slot key*, which in turn wraps the repository key (`seal/keys.py`). What a slot records is
no secret: a salt and the cost of scrypt, or what the service has encrypted, and names.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import stat
import unicodedata
from dataclasses import field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from tenuto.errors import KeyMissing, StoreDenied, StoreError, UsageError, in_words, typed
from tenuto.record import record
from tenuto.regular_files import opener
from tenuto.seal.cipher import KEY, missing

Kind = Literal["file", "environment", "passphrase", "kms", "vault"]
KINDS: Final[tuple[Kind, ...]] = ("file", "environment", "passphrase", "kms", "vault")
MAX_NAME: Final = 2048
MAX_DATA: Final = 2048
SHORTEST: Final = 8
"""Characters of a passphrase, at least."""


@record
class Cost:
    """scrypt's parameters: memory is 128 * n * r bytes, and time goes with n * r * p."""

    n: int = 1 << 17
    r: int = 8
    p: int = 1

    @property
    def bearable(self) -> bool:
        """Returns whether a slot that somebody else may have written can be tried: at most 256 MiB and a few
        seconds."""
        power = self.n >= 2 and self.n & (self.n - 1) == 0
        return power and 1 <= self.r <= 64 and 1 <= self.p <= 4 and 128 * self.n * self.r <= 256 << 20


@record
class Lock:
    """What a slot records of how its key is protected. `name`: of the variable, or of the service's key. `data`: the
    salt, or what the service has encrypted."""

    kind: Kind
    name: str = ""
    data: bytes = b""
    cost: Cost | None = None


class Secret(Protocol):
    """Opens slots. None of these is ever stored, logged, or part of an error."""

    @property
    def words(self) -> str:
        """Describes where it is from, for messages: never what it is."""
        ...

    def draw(self, repository: str) -> tuple[Lock, bytes]:
        """Returns what a new slot records, and its slot key."""
        ...

    def fits(self, lock: Lock) -> bool:
        """Returns whether it may open such a slot, without trying."""
        ...

    def slot_key(self, lock: Lock, repository: str) -> bytes:
        """Returns the slot key, which is the right one only if the secret is. Raises KeyMissing where a service
        refuses."""
        ...


# --------------------------------------------------------------------------------------------------
# 32 bytes.


@record
class RawKey:
    """`variable`: the environment variable that it is from, where it is from one."""

    key: bytes = field(repr=False)
    words: str
    variable: str = ""

    def draw(self, repository: str) -> tuple[Lock, bytes]:
        return Lock("environment" if self.variable else "file", self.variable), self.key

    def fits(self, lock: Lock) -> bool:
        return lock.kind in ("file", "environment")

    def slot_key(self, lock: Lock, repository: str) -> bytes:
        return self.key


def from_file(path: str | os.PathLike[str]) -> RawKey:
    """Reads a key file: 32 bytes that nobody but its owner may read. Raises KeyMissing, StoreDenied, UsageError."""
    place = Path(path).expanduser()
    try:
        with open(place, "rb", opener=opener) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read(KEY + 1)
    except FileNotFoundError:
        raise KeyMissing(
            f"there is no key file {place}", subject=str(place), hint="name it by key=, or by TENUTO_KEY_FILE"
        ) from None
    except OSError as error:
        raise StoreDenied(
            f"the key file {place} cannot be read: {error.strerror}",
            subject=str(place),
            hint=typed("ls", "-ld", place),
        ) from None
    if mode & 0o077:
        raise UsageError(
            f"others than its owner may use the key file {place} (mode {mode:04o})",
            subject=str(place),
            hint=typed("chmod", "600", place),
        )
    if len(key) != KEY:
        raise UsageError(
            f"{place} is not a key file: it does not have exactly {KEY} bytes",
            subject=str(place),
            hint=f"{typed('tenuto', 'key', 'add', 'WHERE', '--key-file')} FILE makes one where there is none",
        )
    return RawKey(key, f"the key file {place}")


def make_file(path: str | os.PathLike[str]) -> RawKey:
    """Makes a key file, durable on return. Raises UsageError where something is there, StoreError where it cannot."""
    place = Path(path).expanduser()
    key = secrets.token_bytes(KEY)
    try:
        number = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(number, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        above = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(above)
        finally:
            os.close(above)
    except FileExistsError:
        raise UsageError(f"{place} is there already", subject=str(place), hint="name a file that is not") from None
    except OSError as error:
        raise StoreError(
            f"the key file {place} cannot be written: {error.strerror}",
            subject=str(place),
            hint=typed("ls", "-ld", place.parent),
        ) from None
    return RawKey(key, f"the key file {place}")


def from_variable(name: str) -> RawKey:
    """Reads 32 bytes in base64 from an environment variable. Raises KeyMissing and UsageError."""
    hint = f"export {name}=$(openssl rand -base64 {KEY})"
    text = os.environ.get(name, "")
    if not text:
        raise KeyMissing(f"the environment variable {name} is not set", subject=name, hint=hint)
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY:
        raise UsageError(f"{name} is not {KEY} bytes in base64", subject=name, hint=hint)
    return RawKey(key, f"the environment variable {name}", name)


# --------------------------------------------------------------------------------------------------
# Passphrases.


@record
class Passphrase:
    """`cost`: of new slots."""

    text: str = field(repr=False)
    words: str = "the passphrase"
    cost: Cost = Cost()

    def draw(self, repository: str) -> tuple[Lock, bytes]:
        if len(self.text) < SHORTEST:
            raise UsageError(
                f"a passphrase has at least {SHORTEST} characters: whoever has the repository can try short ones",
                subject="passphrase",
                hint="six words drawn by dice, or a key file: --key-file FILE",
            )
        lock = Lock("passphrase", data=secrets.token_bytes(16), cost=self.cost)
        return lock, self.slot_key(lock, repository)

    def fits(self, lock: Lock) -> bool:
        return lock.kind == "passphrase"

    def slot_key(self, lock: Lock, repository: str) -> bytes:
        cost = lock.cost or Cost()
        if not cost.bearable:
            raise KeyMissing(
                f"a slot asks for more than scrypt may use here (n={cost.n}, r={cost.r}, p={cost.p})",
                subject=repository,
                hint="somebody has altered it: put keys/ back from a copy of the repository",
            )
        text = unicodedata.normalize("NFC", self.text).encode("utf-8", "surrogateescape")
        return hashlib.scrypt(text, salt=lock.data, n=cost.n, r=cost.r, p=cost.p, maxmem=512 << 20, dklen=KEY)


# --------------------------------------------------------------------------------------------------
# Services. They see a slot key, never the repository key, and log who has asked for it.


@record
class Kms:
    """AWS KMS, as boto3 finds region and credentials. `name`: id, ARN or alias of a symmetric key."""

    name: str

    @property
    def words(self) -> str:
        return f"AWS KMS key {self.name}"

    def draw(self, repository: str) -> tuple[Lock, bytes]:
        key = secrets.token_bytes(KEY)
        answer = self._ask("encrypt", KeyId=self.name, Plaintext=key, EncryptionContext=_context(repository))
        return Lock("kms", self.name, bytes(answer["CiphertextBlob"])), key

    def fits(self, lock: Lock) -> bool:
        return lock.kind == "kms" and lock.name == self.name

    def slot_key(self, lock: Lock, repository: str) -> bytes:
        context = _context(repository)
        answer = self._ask("decrypt", KeyId=self.name, CiphertextBlob=lock.data, EncryptionContext=context)
        return _checked(bytes(answer["Plaintext"]), self.words)

    def _ask(self, what: str, **request: Any) -> Any:
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError:
            raise missing("AWS KMS", "kms") from None
        try:
            return getattr(boto3.client("kms"), what)(**request)
        except (BotoCoreError, ClientError) as error:
            raise KeyMissing(
                f"{self.words} did not {what}: {error}", subject=self.name, hint="aws sts get-caller-identity"
            ) from None


def _context(repository: str) -> dict[str, str]:
    return {"tenuto-repository": repository}


@record
class Vault:
    """HashiCorp Vault's transit engine, at VAULT_ADDR with VAULT_TOKEN. `name`: MOUNT/KEY, such as transit/tenuto."""

    name: str

    @property
    def words(self) -> str:
        return f"Vault key {self.name}"

    def draw(self, repository: str) -> tuple[Lock, bytes]:
        key = secrets.token_bytes(KEY)
        answer = self._ask("encrypt_data", plaintext=base64.b64encode(key).decode())
        return Lock("vault", self.name, str(answer["data"]["ciphertext"]).encode()), key

    def fits(self, lock: Lock) -> bool:
        return lock.kind == "vault" and lock.name == self.name

    def slot_key(self, lock: Lock, repository: str) -> bytes:
        answer = self._ask("decrypt_data", ciphertext=lock.data.decode("ascii", "replace"))
        try:
            key = base64.b64decode(answer["data"]["plaintext"], validate=True)
        except (binascii.Error, ValueError):
            key = b""
        return _checked(key, self.words)

    def _ask(self, what: str, **request: Any) -> Any:
        try:
            import hvac
            import requests
        except ImportError:
            raise missing("HashiCorp Vault", "vault") from None
        mount, slash, key = self.name.rpartition("/")
        if not slash or not mount or not key:
            raise UsageError(
                f"{self.name!r} does not name a key of Vault", subject=self.name, hint="--vault transit/NAME"
            )
        try:
            return getattr(hvac.Client().secrets.transit, what)(name=key, mount_point=mount, **request)
        except (hvac.exceptions.VaultError, requests.RequestException) as error:
            raise KeyMissing(
                f"{self.words} did not {what.partition('_')[0]}: {in_words(error)}",
                subject=self.name,
                hint="vault token lookup  # with VAULT_ADDR and VAULT_TOKEN as here",
            ) from None


def _checked(key: bytes, words: str) -> bytes:
    if len(key) != KEY:
        raise KeyMissing(
            f"{words} has decrypted something that is not a slot key",
            subject=words,
            hint="tenuto key ls WHERE shows the slots",
        )
    return key


def of_service(lock: Lock) -> Secret | None:
    """Returns what may open a slot with nothing but its record and this machine's credentials."""
    return Kms(lock.name) if lock.kind == "kms" else Vault(lock.name) if lock.kind == "vault" else None
