import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from support.interpreter_lock import lets_others_run
from tenuto.codec.chunk_map import chunk_count, chunk_starts
from tenuto.codec.digest import check_chunks, digest, digest_chunks, digest_rows

BYTES = np.random.default_rng(7).integers(0, 256, 5000, dtype=np.uint8)


def one_by_one(data: bytes, chunk_bytes: int) -> list[bytes]:
    return [xxhash.xxh3_128(data[at : at + chunk_bytes]).digest() for at in range(0, len(data), chunk_bytes)]


def test_the_digest_is_canonical_xxh3_128() -> None:
    # The value that xxHash's own documentation of the canonical form gives for no bytes: it must never change.
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert digest(np.frombuffer(b"abc", np.uint8)) == digest(memoryview(b"abc")) == xxhash.xxh3_128(b"abc").digest()


@pytest.mark.parametrize(("length", "chunks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2)])
def test_chunks_of_a_length(length: int, chunks: int) -> None:
    assert chunk_count(length, 256) == chunks
    assert chunk_starts(np.array([length, 1]), 256).tolist() == [0, chunks, chunks + 1]


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 1000)), max_size=12), st.integers(1, 700))
def test_rows_equal_leaf_by_leaf(rows: list[tuple[int, int]], chunk_bytes: int) -> None:
    starts, lengths = [row[0] for row in rows], [row[1] for row in rows]
    chunk_start, digests = digest_rows(BYTES, np.array(starts, np.int64), np.array(lengths, np.int64), chunk_bytes)
    expected = [one_by_one(BYTES[start : start + length].tobytes(), chunk_bytes) for start, length in rows]
    assert digests.tobytes() == b"".join(one for leaf in expected for one in leaf)
    assert np.diff(chunk_start).tolist() == [len(leaf) for leaf in expected]
    for number, (start, length) in enumerate(rows):
        own = digests[chunk_start[number] : chunk_start[number + 1]]
        out = np.zeros((chunk_count(length, chunk_bytes), 16), np.uint8)
        digest_chunks(BYTES[start : start + length], chunk_bytes, out)
        assert (out == own).all()
        assert check_chunks(BYTES[start : start + length], chunk_bytes, own) == -1


@pytest.mark.parametrize(("start", "length"), [(4000, 1001), (-1, 5), (0, -1), (2**62, 2**62), (5001, 0)])
def test_a_row_outside_the_buffer_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        digest_rows(BYTES, np.array([0, start]), np.array([1, length]), 256)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.integers(0, 999), st.integers(0, 7))
def test_a_flipped_bit_is_found_in_its_chunk(byte: int, bit: int) -> None:
    _, digests = digest_rows(BYTES, np.array([0]), np.array([1000]), 64)
    damaged = BYTES[:1000].copy()
    damaged[byte] ^= 1 << bit
    assert check_chunks(damaged, 64, digests) == byte // 64


def test_a_table_of_another_size_is_wrong_at_the_first_chunk_that_only_one_has() -> None:
    _, digests = digest_rows(BYTES, np.array([0]), np.array([1000]), 256)
    assert check_chunks(BYTES[:1000], 256, digests[:2]) == 2
    assert check_chunks(BYTES[:512], 256, digests) == 2
    assert check_chunks(BYTES[:0], 256, digests[:0]) == -1
    assert check_chunks(BYTES[:0], 256, digests[:1]) == 0


def test_views_of_any_item_type_are_their_bytes() -> None:
    floats = np.arange(100, dtype=np.float32)
    out = np.zeros((2, 16), np.uint8)
    digest_chunks(floats, 256, out)
    assert [row.tobytes() for row in out] == one_by_one(floats.tobytes(), 256)


def test_hashing_lets_other_threads_run() -> None:
    large = np.zeros(256 << 20, np.uint8)
    assert lets_others_run(lambda: digest(large))


def test_a_call_that_holds_the_interpreter_is_told_apart() -> None:
    numbers = list(range(1 << 21))
    assert not lets_others_run(lambda: sum(numbers))
