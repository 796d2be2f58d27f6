"""Each codec passes the shipped suite, and comes back from content that hypothesis makes up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.interpreter_lock import lets_others_run
from tenuto.codec import registry
from tenuto.codec.contract import Codec
from tenuto.testing.codec_suite import CodecSuite, decoded, view


class TestEveryCodec(CodecSuite):
    @pytest.fixture(autouse=True, params=registry.names())
    def _named(self, request: pytest.FixtureRequest) -> None:
        self.name = request.param

    def codec(self) -> Codec:
        return registry.codec(self.name)


WORDS = st.sampled_from([0, 1, 0x7F80, 0x7FC1, 0x8000, 0xFFFF, 0x3C00, 0x7C01])


@st.composite
def chunks(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A chunk and a base of its length: runs of odd words and of bytes, repeated so that something compresses."""
    piece = b"".join(
        draw(st.lists(WORDS.map(lambda word: word.to_bytes(2, "little")) | st.binary(max_size=9), max_size=12))
    )
    chunk = (piece * draw(st.integers(1, 40)) + draw(st.binary(max_size=7)))[: draw(st.integers(0, 3000))]
    base = bytearray(chunk)
    for place, value in draw(st.lists(st.tuples(st.integers(0, 2999), st.integers(0, 255)), max_size=8)):
        if place < len(base):
            base[place] = value
    return chunk, bytes(base)


@settings(deadline=None, max_examples=120)
@given(case=chunks())
def test_made_up_chunks_come_back(case: tuple[bytes, bytes]) -> None:
    """To draw a chunk takes far longer than any codec does, so each is tried with all of them."""
    for name in registry.names():
        codec = registry.codec(name)
        chunk, base = case[0], case[1] if codec.needs_base else None
        stored = codec.encode(memoryview(chunk), view(base))
        assert stored is None or decoded(codec, stored, len(chunk), base) == chunk, name


@settings(deadline=None, max_examples=120)
@given(stored=st.binary(max_size=200), size=st.integers(0, 400))
def test_made_up_stored_bytes_are_another_chunk_or_damage(stored: bytes, size: int) -> None:
    for name in registry.names():
        codec = registry.codec(name)
        decoded(codec, stored, size, bytes(size) if codec.needs_base else None)


@pytest.mark.parametrize("level", [1, 3, 9, 12])
@pytest.mark.parametrize("name", ["zstd", "lz4", "planes4-zstd", "delta4-zstd", "delta2-lz4"])
def test_what_any_level_stores_is_decoded_by_any_other(name: str, level: int) -> None:
    weights = np.random.default_rng(0).standard_normal(5000).astype(np.float32).round(2)
    chunk, base = weights.tobytes(), (weights + np.float32(0.01)).tobytes()
    codec = registry.codec(name, level)
    given_base = memoryview(base) if codec.needs_base else None
    stored = codec.encode(memoryview(chunk), given_base)
    assert stored is not None
    assert decoded(registry.codec(name), stored, len(chunk), base if codec.needs_base else None) == chunk


@pytest.mark.parametrize("name", ["zstd", "lz4", "planes2-zstd", "planes4-lz4", "delta4-zstd", "xor8-zstd"])
def test_others_run_while_it_encodes_and_decodes(name: str) -> None:
    codec = registry.codec(name)
    chunk = np.random.default_rng(0).standard_normal(1 << 23).astype(np.float32).round(1)
    raw, base = memoryview(chunk.tobytes()), memoryview((chunk * np.float32(1.01)).tobytes())
    stored = codec.encode(raw, base)
    assert stored is not None
    out = memoryview(bytearray(len(raw)))
    assert lets_others_run(lambda: codec.encode(raw, base))
    assert lets_others_run(lambda: codec.decode(memoryview(stored), out, base))
