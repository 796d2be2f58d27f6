"""A code for large content that stays readable: an image in memory, which the training that resumes from it maps as it
is. Who has no key of the repository can neither make one nor change a bit of what it was made of."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Final

from tenuto.concurrency.worker_threads import LoopThreads, parallel_for
from tenuto.seal.cipher import KEY, Buffer, derive, split_number, tampered
from tenuto.seal.keys import RepositoryKeys

PIECE: Final = 8 << 20
_SALT: Final = 16
_DIGITS: Final = re.compile(r"[0-9a-f]{96}")


def sign_content(keys: RepositoryKeys, identity: bytes, parts: Sequence[Buffer]) -> str:
    """Returns the code of `parts`, one after the other: number of the key, a colon, and 96 hexadecimal digits.

    identity: what they are, so that the same bytes are refused as anything else.
    """
    salt = secrets.token_bytes(_SALT)
    return f"{keys.number}:{salt.hex()}{_code(keys.newest, salt, identity, parts, threads=1).hex()}"


def check_content(keys: RepositoryKeys, identity: bytes, parts: Sequence[Buffer], code: str, name: str) -> None:
    """Raises Tampered unless `code` is that of these bytes; KeyMissing as `RepositoryKeys.key`."""
    number, digits = split_number(code, name)
    if not _DIGITS.fullmatch(digits):
        raise tampered(name)
    found = bytes.fromhex(digits)
    expected = _code(keys.key(number, name), found[:_SALT], identity, parts, threads=LoopThreads.of(1).copy)
    if not hmac.compare_digest(expected, found[_SALT:]):
        raise tampered(name)


def _code(key: bytes, salt: bytes, identity: bytes, parts: Sequence[Buffer], *, threads: int) -> bytes:
    """HMAC-SHA256 of each piece, which goes without the interpreter, and again of these codes and of what they are."""
    fresh = derive(key, "content", salt=salt, length=2 * KEY)
    pieces = [memoryview(part)[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE)]
    found = [b""] * len(pieces)

    def work(number: int) -> None:
        found[number] = hmac.digest(fresh[:KEY], pieces[number], "sha256")

    parallel_for(work, list(range(len(pieces))), threads)
    lengths = [len(part) for part in parts]
    told = b"".join(length.to_bytes(8, "big") for length in (*lengths, len(lengths)))
    return hmac.digest(fresh[KEY:], b"".join(found) + told + identity, "sha256")
