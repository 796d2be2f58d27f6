"""A code for large content that stays readable: an image in memory, which the training that resumes from it maps as it
is. Who has no key of the repository can neither make one nor change a bit that it is made of."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Final

from tenuto.seal.cipher import KEY, Buffer, aes_gcm, derive, split_number, tampered
from tenuto.seal.keys import RepositoryKeys

PIECE: Final = 1 << 20
"""Bytes that one call of the cipher takes: it does not give the interpreter away, and training waits no longer."""
_SALT: Final = 16


def sign_content(keys: RepositoryKeys, identity: bytes, parts: Sequence[Buffer]) -> str:
    """Returns the code of `parts`, one after the other: number of the key, a colon, and 96 hexadecimal digits.

    identity: what they are, so that the same bytes are refused as anything else.
    """
    salt = secrets.token_bytes(_SALT)
    return f"{keys.number}:{salt.hex()}{_code(keys.newest, salt, identity, parts).hex()}"


def check_content(keys: RepositoryKeys, identity: bytes, parts: Sequence[Buffer], code: str, name: str) -> None:
    """Raises Tampered unless `code` is that of these bytes; KeyMissing as `RepositoryKeys.key`."""
    if not code:
        raise tampered(name)
    number, digits = split_number(code, name)
    try:
        found = bytes.fromhex(digits)
    except ValueError:
        raise tampered(name) from None
    salt, code_found = found[:_SALT], found[_SALT:]
    if not hmac.compare_digest(_code(keys.key(number, name), salt, identity, parts), code_found):
        raise tampered(name)


def _code(key: bytes, salt: bytes, identity: bytes, parts: Sequence[Buffer]) -> bytes:
    """GMAC of each piece under a key of this code alone, its place as the nonce; HMAC-SHA256 over what they are."""
    fresh = derive(key, "content", salt=salt, length=2 * KEY)
    gmac, code = aes_gcm(fresh[:KEY]), hmac.new(fresh[KEY:], digestmod="sha256")
    place = 0
    lengths = [len(part) for part in parts]
    for part in parts:
        view = memoryview(part)
        for begin in range(0, len(view), PIECE):
            code.update(gmac.encrypt(place.to_bytes(12, "big"), b"", view[begin : begin + PIECE]))
            place += 1
    code.update(b"".join(length.to_bytes(8, "big") for length in (*lengths, len(lengths))))
    code.update(identity)
    return code.digest()
