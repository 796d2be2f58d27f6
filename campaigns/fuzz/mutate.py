"""Random changes of valid inputs, without coverage: what the tests try, where no fuzzer is installed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

from campaigns.fuzz.targets import MAX_BYTES

_NUMBERS: Final = (b"0", b"-1", b"1", b"18446744073709551615", b"9007199254740993", b"1e400", b"NaN", b"null", b"[]")


def mutations(inputs: Sequence[bytes], words: Sequence[str], seed: int, count: int) -> Iterator[bytes]:
    """`count` inputs, each changed in one to four places."""
    source = random.Random(seed)
    for _ in range(count):
        data = bytearray(source.choice(inputs))
        for _ in range(source.randint(1, 4)):
            _change(data, inputs, words, source)
        yield bytes(data[:MAX_BYTES])


def _change(data: bytearray, inputs: Sequence[bytes], words: Sequence[str], source: random.Random) -> None:
    at = source.randrange(len(data) + 1)
    stop = min(len(data), at + source.choice((0, 1, 1, 2, 4, 16, 64)))
    match source.randrange(7):
        case 0 if data:
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        case 1:
            del data[at:stop]
        case 2:
            data[at:stop] = source.choice(words).encode("ascii", "backslashreplace") if words else b""
        case 3:
            data[at:stop] = source.choice(_NUMBERS)
        case 4:
            piece = data[at:stop]
            data[at:at] = piece * source.randint(1, 8)
        case 5:
            other = source.choice(inputs)
            begin = source.randrange(len(other) + 1)
            data[at:stop] = other[begin : begin + source.choice((1, 8, 40))]
        case _:
            _renumber(data, source)


def _renumber(data: bytearray, source: random.Random) -> None:
    """Another number where one stands."""
    places = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if places:
        at = source.choice(places)
        stop = at
        while stop < len(data) and 48 <= data[stop] <= 57:
            stop += 1
        data[at:stop] = source.choice(_NUMBERS)
