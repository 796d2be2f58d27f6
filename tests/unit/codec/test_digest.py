import numpy as np
import pytest
import xxhash

from support.interpreter_lock import lets_others_run
from tenuto.codec.chunk_map import chunk_count, chunk_starts
from tenuto.codec.digest import digest


def test_the_digest_is_canonical_xxh3_128() -> None:
    # The value that xxHash's own documentation of the canonical form gives for no bytes: it must never change.
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert digest(np.frombuffer(b"abc", np.uint8)) == digest(memoryview(b"abc")) == xxhash.xxh3_128(b"abc").digest()


@pytest.mark.parametrize(("length", "chunks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2)])
def test_chunks_of_a_length(length: int, chunks: int) -> None:
    assert chunk_count(length, 256) == chunks
    assert chunk_starts(np.array([length, 1]), 256).tolist() == [0, chunks, chunks + 1]


def test_hashing_lets_other_threads_run() -> None:
    large = np.zeros(256 << 20, np.uint8)
    assert lets_others_run(lambda: digest(large))


def test_a_call_that_holds_the_interpreter_is_told_apart() -> None:
    numbers = list(range(1 << 21))
    assert not lets_others_run(lambda: sum(numbers))
