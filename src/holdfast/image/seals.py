"""The seal of an image's file: two blocks of 4096 bytes at its very end, of which the newer whole one counts.

What a block says is for others to read (`repo/footer`); here it is a sealed line of canonical JSON behind a mark. A
file is unsealed by zeroing both blocks before anything else in it is touched, and sealed by writing one of them last: a
process that is killed anywhere in between leaves a file that says of itself that it holds nothing.
"""

from __future__ import annotations

import os
from typing import Final

from holdfast.errors import CorruptionError
from holdfast.model import canonical

BLOCK: Final = 4096
BLOCKS: Final = 2
ROOM: Final = BLOCK * BLOCKS
"""Bytes at the end of a file that belong to its seal."""
_MARK: Final = b"holdfast memory\n"
_HEAD: Final = len(_MARK) + 4
MAX_PAYLOAD: Final = BLOCK - _HEAD


def write_seal(descriptor: int, number: int, payload: bytes) -> None:
    """Writes block `number` (0 or 1); the other one stays."""
    assert len(payload) <= MAX_PAYLOAD
    block = _MARK + len(payload).to_bytes(4, "little") + payload
    _write(descriptor, block.ljust(BLOCK, b"\0"), _begin(descriptor) + number * BLOCK)


def clear_seal(descriptor: int) -> None:
    """Says that the file holds nothing."""
    _write(descriptor, bytes(ROOM), _begin(descriptor))


def read_seals(descriptor: int) -> list[tuple[int, bytes]]:
    """Number and payload of each block whose own digest is right; what the payload says is not looked at."""
    begin = _begin(descriptor)
    if begin < 0:
        return []
    found = []
    for number in range(BLOCKS):
        block = os.pread(descriptor, BLOCK, begin + number * BLOCK)
        length = int.from_bytes(block[len(_MARK) : _HEAD], "little")
        if len(block) != BLOCK or not block.startswith(_MARK) or length > MAX_PAYLOAD:
            continue
        payload = block[_HEAD : _HEAD + length]
        try:
            canonical.check_seal(payload, name="seal")
        except CorruptionError:
            continue
        found.append((number, payload))
    return found


def is_sealed(descriptor: int) -> bool:
    """Whether the file says that it holds a whole image."""
    return bool(read_seals(descriptor))


def _begin(descriptor: int) -> int:
    return os.fstat(descriptor).st_size - ROOM


def _write(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
