"""Partial copies of packs: ranges of a pack, read at the places that they have in it."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.errors import CorruptionError
from tenuto.repo.replicated.partial_copy import PartialReader, encode_ranges, partial_name
from tenuto.store.contract import Bytes, final_name
from tenuto.store.memory import MemoryStore

PACK = "runs/main/a0001/step-00000005/rank-00000.safetensors"
NAME = partial_name(PACK, "0123")


def opened(data: bytes) -> PartialReader:
    store = MemoryStore(secrets.token_hex(8))
    store.put_if_absent(NAME, Bytes(data), token="t0")
    return PartialReader(store.open(NAME), NAME)


def copy_of(pack: bytes, ranges: list[tuple[int, int]]) -> bytes:
    low, high = np.array(ranges, np.int64).reshape(-1, 2).T
    return encode_ranges((low, high), len(pack)) + b"".join(pack[begin:end] for begin, end in ranges)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=8), st.integers(0, 300), st.integers(0, 300))
def test_what_it_has_is_read_where_the_pack_has_it_and_the_rest_left_alone(
    places: list[int], one: int, other: int
) -> None:
    places = sorted(places)[: len(places) // 2 * 2]
    ranges = list(zip(places[::2], places[1::2], strict=True))
    pack = bytes(number % 251 for number in range(300))
    with opened(copy_of(pack, ranges)) as reader:
        assert (reader.length, reader.alignment, reader.view()) == (300, 1, None)
        begin, end = sorted((one, other))
        found = bytearray(b"\xff" * (end - begin))
        reader.read_into(begin, memoryview(found))
    has = {at for low, high in ranges for at in range(low, high)}
    assert found == bytes(pack[at] if at in has else 0xFF for at in range(begin, end))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        copy_of(bytes(100), [(0, 9)])[:-60],
        encode_ranges((np.array([5]), np.array([101])), 100),
        encode_ranges((np.array([9]), np.array([5])), 100),
        encode_ranges((np.array([5, 7]), np.array([8, 9])), 100),
        encode_ranges((np.array([5, 7]), np.array([8])), 100),
    ],
)
def test_what_is_no_partial_copy_is_damage(data: Any) -> None:
    with pytest.raises(CorruptionError):
        opened(data)


def test_it_is_named_after_its_pack() -> None:
    assert final_name(NAME) == PACK
