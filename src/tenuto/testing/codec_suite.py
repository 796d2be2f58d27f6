"""What a codec of chunks has to keep, as tests: subclass `CodecSuite` and give the codec.

    class TestMine(CodecSuite):
        def codec(self):
            return MyCodec()

The contract is `tenuto.codec.contract.Codec`.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np

from tenuto.codec.contract import Codec
from tenuto.errors import CorruptionError

SIZES: Final = (*range(10), 17, 33, 41, 64, 127, 1000, 4098, 65539, 262144)
"""Bytes of a chunk: none, fewer than an item has, no multiple of any, and a default chunk's with neighbours."""
GUARD: Final = b"\xa5" * 9
"""Surrounds what a codec is given, at an odd address: nothing of it may change."""
FACTOR: Final = 8
"""A codec may take so many times a chunk's bytes, and OVERHEAD beside them."""
OVERHEAD: Final = 256 << 10


class CodecSuite:
    """The tests."""

    def codec(self) -> Codec:
        """Returns the codec under test."""
        raise NotImplementedError

    def test_every_chunk_comes_back_bit_for_bit(self) -> None:
        found, shortened = self.codec(), 0
        for size in SIZES:
            for what, chunk in contents(size):
                for base_is, base in bases(found, chunk):
                    stored = found.encode(memoryview(chunk), view(base))
                    case = f"{size} bytes of {what}, base: {base_is}"
                    if stored is None:
                        continue
                    assert len(stored) < size, f"{case}: no shorter than the chunk, which had to be None"
                    assert decoded(found, stored, size, base) == chunk, f"{case}: another chunk came back"
                    shortened += 1
        assert shortened or found.name == "raw", "nothing was made any shorter"

    def test_it_writes_to_nothing_but_the_chunk(self) -> None:
        found = self.codec()
        for chunk, base, stored in self.encoded(1000):
            given = [guarded(one) for one in (chunk, base or b"", stored)]
            room = guarded(bytes(len(chunk)))
            inside = [memoryview(one)[len(GUARD) : len(one) - len(GUARD)] for one in given]
            with_base = None if base is None else inside[1]
            assert found.encode(inside[0], with_base) == stored, (
                "the same chunk is stored in other bytes at another place"
            )
            found.decode(inside[2], memoryview(room)[len(GUARD) : len(room) - len(GUARD)], with_base)
            assert given == [guarded(one) for one in (chunk, base or b"", stored)], "what it was given has changed"
            assert room == guarded(chunk), "it wrote beside the chunk, or not all of it"

    def test_a_chunk_that_is_cut_or_goes_on_is_refused(self) -> None:
        for chunk, base, stored in self.encoded(250):
            for length in range(len(stored)):
                self.refused_or_another(stored[:length], chunk, base, f"cut to {length} of {len(stored)} bytes")
            for more in (b"\x00", b"\xff", stored[:1], stored):
                self.refused_or_another(stored + more, chunk, base, f"with {len(more)} bytes behind it")

    def test_damage_at_any_byte_is_an_error_or_another_chunk(self) -> None:
        """The digests tell another chunk apart; no other error may arise, and nothing may hang or crash."""
        for chunk, base, stored in self.encoded(250):
            for place in range(len(stored)):
                for flipped in (0x01, 0x80, 0xFF):
                    changed = bytearray(stored)
                    changed[place] ^= flipped
                    decoded(self.codec(), bytes(changed), len(chunk), base)

    def test_hostile_bytes_are_an_error_in_bounded_memory(self) -> None:
        found, random = self.codec(), np.random.default_rng(0)
        size = 65536
        made = [stored for _, _, stored in self.encoded(size)]
        hostile = [
            b"",
            b"\x00" * size,
            b"\xff" * size,
            *(random.bytes(length) for length in (1, 2, 40, 4000, size - 1)),
        ]
        for stored in made:
            hostile += [stored[: len(stored) // 2] + random.bytes(len(stored) // 2), stored[::-1]]
        base = random.bytes(size) if found.needs_base else None
        for stored in hostile:
            for length in (0, 1, size, 100_003):
                short = base and random.bytes(length)
                assert peak(lambda: decoded(found, stored, length, short)) <= FACTOR * length + len(stored) + OVERHEAD  # noqa: B023

    def test_a_chunk_of_another_length_is_no_reason_to_take_more_memory(self) -> None:
        """What is stored may be a bomb: a few bytes that say or give far more than was recorded."""
        found = self.codec()
        large = 16 << 20
        chunk = bytes(large)
        base = chunk if found.needs_base else None
        stored = found.encode(memoryview(chunk), view(base))
        if stored is None:
            return
        for length in (1, 1000, 65536, 65537):
            short = base and base[:length]
            taken = peak(lambda: decoded(found, stored, length, short))  # noqa: B023
            assert taken <= FACTOR * length + OVERHEAD, (
                f"{len(stored)} stored bytes took {taken} for a chunk of {length}"
            )

    def test_memory_is_a_small_multiple_of_the_chunk(self) -> None:
        found = self.codec()
        for chunk, base, stored in self.encoded(262144):
            most = FACTOR * len(chunk) + OVERHEAD
            assert peak(lambda: found.encode(memoryview(chunk), view(base))) <= most  # noqa: B023
            assert peak(lambda: decoded(found, stored, len(chunk), base)) <= most  # noqa: B023

    def test_threads_do_not_disturb_each_other(self) -> None:
        found = self.codec()
        cases = [one for size in (5000, 60_001) for one in self.encoded(size)]
        wrong: list[int] = []
        start = threading.Barrier(4)

        def work(number: int) -> None:
            start.wait()
            for turn in range(len(cases)):
                place = (turn + number) % len(cases)
                chunk, base, stored = cases[place]
                if (
                    found.encode(memoryview(chunk), view(base)) != stored
                    or decoded(found, stored, len(chunk), base) != chunk
                ):
                    wrong.append(place)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, "chunks were mixed up between threads"

    def encoded(self, size: int) -> list[tuple[bytes, bytes | None, bytes]]:
        """Returns chunk, base and stored form of every content of `size` bytes that the codec makes shorter."""
        found = self.codec()
        cases = [
            (chunk, base, found.encode(memoryview(chunk), view(base)))
            for _, chunk in contents(size)
            for _, base in bases(found, chunk)
        ]
        return [(chunk, base, stored) for chunk, base, stored in cases if stored is not None]

    def refused_or_another(self, stored: bytes, chunk: bytes, base: bytes | None, what: str) -> None:
        assert decoded(self.codec(), stored, len(chunk), base) != chunk, (
            f"the stored bytes, {what}, give the same chunk"
        )


@cache
def contents(size: int) -> tuple[tuple[str, bytes], ...]:
    """Returns chunks of `size` bytes and what they are: of every kind of number, and what a dtype makes of odd bits.
    Every codec is tried with the same ones, so they are made once."""
    return tuple(_contents(size))


def _contents(size: int) -> Iterator[tuple[str, bytes]]:
    random = np.random.default_rng(size)
    words = size // 2 + 1
    normal = random.standard_normal(words).astype(np.float32) * 0.02
    bits = normal.view(np.uint32)

    def cut(array: np.ndarray[Any, Any]) -> bytes:
        return array.tobytes()[:size]

    yield "zeros", bytes(size)
    yield "-0.0 in float32", cut(np.full(words, -0.0, np.float32))
    yield "a constant of 8 bytes", (b"\x01\x02\x03\x04\x05\x06\x07\x88" * (size // 8 + 1))[:size]
    yield "random bytes", random.bytes(size)
    yield "bfloat16", cut((bits >> 16).astype(np.uint16))
    yield "float16", cut(normal.astype(np.float16))
    yield "float32", cut(normal)
    yield "float64", cut(normal.astype(np.float64) * 1.1)
    yield "float8", cut((bits >> 20).astype(np.uint8)) + cut((bits >> 21).astype(np.uint8))[: max(size - words, 0)]
    yield "NaN payloads of both signs, infinities and zeros, bfloat16", cut(_odd(random, words, "<u2", 7))
    yield "the same, float16", cut(_odd(random, words, "<u2", 10))
    yield "the same, float32", cut(_odd(random, words, "<u4", 23))
    yield "the same, float64", cut(_odd(random, words, "<u8", 52))
    yield "denormals, float32", cut(random.integers(0, 1 << 23, words).astype("<u4") | (bits & 0x80000000))
    yield "every word of 2 bytes", cut(np.resize(np.arange(1 << 16, dtype=np.uint16), words))
    yield "counting integers", cut(np.arange(words, dtype=np.int64) - words // 2)
    yield "few values that are not zero", cut(np.where(random.random(words) < 0.02, normal, 0).astype(np.float32))


def _odd(random: np.random.Generator, words: int, word: str, mantissa: int) -> np.ndarray[Any, Any]:
    """Returns words of which half have an exponent of ones and any payload, and half are zeros of either sign."""
    bits = np.dtype(word).itemsize * 8
    low = random.integers(0, 1 << mantissa, words, dtype=np.uint64) * (random.random(words) < 0.8)
    exponent = np.where(random.random(words) < 0.5, ((1 << (bits - 1 - mantissa)) - 1) << mantissa, 0).astype(np.uint64)
    sign = random.integers(0, 2, words, dtype=np.uint64) << np.uint64(bits - 1)
    return (np.where(exponent > 0, exponent | low, 0).astype(np.uint64) | sign).astype(word)


def bases(codec: Codec, chunk: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Yields the bases that a chunk is tried with: None alone for a codec that takes none."""
    if not codec.needs_base:
        yield "none", None
        return
    random = np.random.default_rng(len(chunk))
    near = np.frombuffer(chunk, np.uint8).copy()
    near[::4] += random.integers(0, 3, len(near[::4]), dtype=np.uint8)
    yield "the chunk itself", chunk
    yield "near it", near.tobytes()
    yield "all bits inverted", bytes(~np.frombuffer(chunk, np.uint8))
    yield "other content", random.bytes(len(chunk))


def decoded(codec: Codec, stored: bytes, size: int, base: bytes | None) -> bytes | None:
    """Returns what `stored` gives for a chunk of `size` bytes; None if it is refused."""
    out = bytearray(size)
    try:
        codec.decode(memoryview(stored), memoryview(out), view(base))
    except CorruptionError:
        return None
    return bytes(out)


def view(data: bytes | None) -> memoryview | None:
    return None if data is None else memoryview(data)


def guarded(data: bytes) -> bytearray:
    return bytearray(GUARD + data + GUARD)


def peak(call: Any) -> int:
    """Returns the most memory that `call` has taken at once: what Python and numpy allocate, scratch that the thread
    keeps included once it is larger than before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
