"""AES-256-GCM for chunks, HMAC-SHA256 for what stays readable, HKDF-SHA256 between the keys.

A key that lives long (a repository key, or one that wraps it) never encrypts directly: each use derives a key of its
own from 32 random bytes (`wrap`), so that no number of uses can repeat key and nonce. A pack has a data key of its own,
drawn at random; there the nonce is the frame's place in the pack, of which there is one of each.
"""

from __future__ import annotations

import functools
import hmac
import secrets
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.errors import CorruptionError, MissingExtra, Tampered, UsageError, install
from tenuto.model import canonical_json
from tenuto.record import record
from tenuto.units import size

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY: Final = 32
"""Bytes of every key."""
TAG: Final = 16
"""By how many bytes a frame is longer than what was sealed."""
MAX_CHUNK: Final = 16 << 20
"""Bytes sealed in one frame, at most: a frame is checked as a whole before a byte of it is used."""
MAX_PLACE: Final = (1 << 62) - 1
WRAPPED: Final = 32 + TAG
"""By how many bytes `wrap` lengthens."""
MAX_KEY_NUMBER: Final = 1 << 20
Buffer = bytes | bytearray | memoryview
Digests = np.ndarray[Any, np.dtype[np.uint8]]
_DIGEST: Final = 16


@record
class Identity:
    """What sealed bytes are part of: bytes of another repository, save or object are refused. `name`: the file's."""

    repository: str
    save_id: str
    name: str

    def bound(self, what: str) -> bytes:
        """Returns the associated data, from which every part can be told."""
        return canonical_json.dumps([f"tenuto {what} 1", self.repository, self.save_id, self.name])


def missing(what: str, extra: str) -> MissingExtra:
    return MissingExtra(f"{what} needs the extra tenuto[{extra}]", subject=extra, hint=install(extra))


def aes_gcm(key: bytes) -> AESGCM:
    """Raises MissingExtra without the package `cryptography`."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise missing("sealing", "seal") from None
    return AESGCM(key)


def derive(key: bytes, purpose: str, *, salt: bytes = b"", length: int = KEY) -> bytes:
    """Returns the key for one purpose: who knows it does not know `key`."""
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise missing("sealing", "seal") from None
    return HKDF(SHA256(), length, salt or None, f"tenuto {purpose} 1".encode()).derive(key)


def wrap(key: bytes, data: Buffer, *, purpose: str, bound: bytes) -> bytes:
    """Encrypts `data` under a key for this use alone: 32 random bytes, then the ciphertext with its tag."""
    salt = secrets.token_bytes(32)
    fresh = derive(key, purpose, salt=salt, length=KEY + 12)
    return salt + aes_gcm(fresh[:KEY]).encrypt(fresh[KEY:], data, bound)


def unwrap(key: bytes, wrapped: Buffer, *, purpose: str, bound: bytes) -> bytes | None:
    """Returns what was wrapped; None under another key, for another purpose or identity, or if a bit has changed."""
    from cryptography.exceptions import InvalidTag

    if len(wrapped) < WRAPPED:
        return None
    fresh = derive(key, purpose, salt=bytes(wrapped[:32]), length=KEY + 12)
    try:
        return aes_gcm(fresh[:KEY]).decrypt(fresh[KEY:], memoryview(wrapped)[32:], bound)
    except InvalidTag:
        return None


# --------------------------------------------------------------------------------------------------
# Chunks.


class PackKey:
    """One pack's data key, ready for use by several threads at once."""

    __slots__ = ("aead", "bound", "identity")

    def __init__(self, key: bytes, identity: Identity) -> None:
        self.aead = aes_gcm(key)
        self.identity = identity
        self.bound = identity.bound("pack")

    def tampered(self, place: int) -> Tampered:
        return Tampered(
            f"{self.identity.name}: what lies at byte {place} was not sealed there: it was altered, or belongs to "
            "another place, file or checkpoint",
            subject=self.identity.name,
            object=self.identity.name,
        )


def seal_chunk(pack: PackKey, raw: Buffer, place: int) -> bytes:
    """Returns the frame of a chunk, TAG bytes longer. `place`: where it begins in the pack. A place is sealed once in
    the life of a data key: `PackSealer` sees to that."""
    if len(raw) > MAX_CHUNK:
        raise UsageError(
            f"{pack.identity.name}: a chunk of {size(len(raw))} cannot be sealed: at most {size(MAX_CHUNK)}",
            subject=pack.identity.name,
            hint=f"chunk_bytes={MAX_CHUNK}, or less, when the repository is made",
        )
    return pack.aead.encrypt(_nonce(place), raw, pack.bound)


def open_chunk(pack: PackKey, frame: Buffer, place: int, into: memoryview | None = None) -> memoryview:
    """Returns the chunk that was sealed at `place`, in `into` where that is given: it has exactly the chunk's length.
    Raises Tampered, and then `into` has nothing of use."""
    from cryptography.exceptions import InvalidTag

    length = len(frame) - TAG
    if not 0 <= length <= MAX_CHUNK or not 0 <= place <= MAX_PLACE:
        raise pack.tampered(place)
    if into is None:
        into = memoryview(bytearray(length))
    elif into.nbytes != length:
        raise pack.tampered(place)
    try:
        pack.aead.decrypt_into(_nonce(place), frame, pack.bound, into)
    except InvalidTag:
        raise pack.tampered(place) from None
    return into


def _nonce(place: int) -> bytes:
    return place.to_bytes(12, "big")


class PackSealer:
    """Seals the chunks of one pack under a data key that is drawn here, and gives each frame its place: so no place is
    ever sealed twice under one key. Whoever has to write other bytes to a place begins the pack with another sealer.

    `wrapped`: the data key as the index has it. `end`: the pack's length so far. `start`: of the first frame.
    """

    def __init__(self, key: bytes, number: int, identity: Identity, *, start: int = 0) -> None:
        data_key = secrets.token_bytes(KEY)
        self.wrapped = f"{number}:{wrap(key, data_key, purpose='data key', bound=identity.bound('data key')).hex()}"
        self.end = start
        self._pack = PackKey(data_key, identity)
        self._lock = threading.Lock()

    def seal(self, raw: Buffer) -> tuple[int, bytes]:
        """Returns the place and the frame of a chunk. Thread-safe; frames are in the order of the calls."""
        with self._lock:
            place = self.end
            self.end += len(raw) + TAG
        return place, seal_chunk(self._pack, raw, place)


# --------------------------------------------------------------------------------------------------
# What a repository key opens, hides and signs.


def open_data_key(key: bytes, wrapped: bytes, identity: Identity) -> PackKey:
    """Returns a pack's data key. Raises Tampered."""
    found = unwrap(key, wrapped, purpose="data key", bound=identity.bound("data key"))
    if found is None or len(found) != KEY:
        raise tampered(identity.name)
    return PackKey(found, identity)


def hide(key: bytes, digests: Digests) -> Digests:
    """Returns digests, uint8 [n, 16], each encrypted by itself: a digest of what was sealed would tell who guesses its
    content that the guess is right."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    # One block each, and equal ones are to stay equal, so there is nothing that a mode would add.
    encryptor = Cipher(algorithms.AES256(derive(key, "digests")), modes.ECB()).encryptor()
    data = encryptor.update(np.ascontiguousarray(digests, np.uint8).tobytes()) + encryptor.finalize()
    return np.frombuffer(data, np.uint8).reshape(-1, _DIGEST)


def sign_object(key: bytes, data: Buffer) -> str:
    """Returns the code by which a holder of the repository key knows its own objects, as 64 hexadecimal digits."""
    return hmac.digest(_object_key(key), data, "sha256").hex()


@functools.lru_cache(maxsize=16)
def _object_key(key: bytes) -> bytes:
    """Derives it once: retention checks hundreds of notes after each save."""
    return derive(key, "object")


def check_object(key: bytes, data: Buffer, code: str, name: str) -> None:
    """Raises Tampered unless `code` is that of these bytes."""
    if not hmac.compare_digest(sign_object(key, data).encode(), code.encode("utf-8", "replace")):
        raise tampered(name)


def tampered(name: str) -> Tampered:
    return Tampered(
        f"{name} is not what a holder of the repository's key has put there: it was altered, or belongs to another "
        "checkpoint",
        subject=name,
        object=name,
    )


def split_number(text: str, name: str) -> tuple[int, str]:
    """Splits `<number of the key>:<hexadecimal digits>`. Raises CorruptionError for anything else."""
    number, colon, _ = text[:16].partition(":")
    if not colon or not number.isascii() or not number.isdigit() or not 1 <= int(number) <= MAX_KEY_NUMBER:
        raise CorruptionError(f"{name}: {text[:16]!r} does not begin with the number of a key", subject=name)
    return int(number), text[len(number) + 1 :]
