from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tenuto.codec import registry, stages
from tenuto.codec.choosing import choose, codecs_for, encoded, measure
from tenuto.errors import FormatTooNew, MissingExtra
from tenuto.model.leaf import DTYPES

WEIGHTS = np.random.default_rng(0).standard_normal(65536).astype(np.float32) * np.float32(0.02)
LATER = WEIGHTS * np.float32(1.0001)


def bfloat16(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def chunks(array: np.ndarray[Any, Any]) -> list[memoryview]:
    whole = memoryview(array.tobytes())
    return [whole[begin : begin + 65536] for begin in range(0, len(whole), 65536)]


@pytest.mark.parametrize("family", ["zstd", "lz4"])
@pytest.mark.parametrize("dtype", [*DTYPES, "numpy:<f16", "numpy:>f4", "numpy:<M8[ns]"])
def test_every_dtype_has_codecs_that_exist(dtype: str, family: str) -> None:
    plain, deltas = codecs_for(dtype, family)
    assert not any(registry.codec(name).needs_base for name in plain)
    assert all(registry.codec(name).needs_base for name in deltas)
    assert plain and deltas


@pytest.mark.parametrize(
    ("dtype", "planes"),
    [
        ("bfloat16", "planes2-zstd"), ("float16", "planes2-zstd"), ("float32", "planes4-zstd"),
        ("float64", "planes8-zstd"), ("float8_e4m3fn", "planes1-zstd"), ("complex64", "planes4-zstd"),
        ("complex128", "planes8-zstd"), ("int64", "zstd"), ("bool", "zstd"), ("numpy:<f16", "zstd"),
    ],
)  # fmt: skip
def test_floats_are_cut_into_planes_of_their_words(dtype: str, planes: str) -> None:
    assert codecs_for(dtype).plain[0] == planes


@pytest.mark.parametrize(
    ("dtype", "content", "base", "chosen"),
    [
        ("bfloat16", bfloat16(WEIGHTS), None, "planes2-zstd"),
        ("float32", WEIGHTS, None, "planes4-zstd"),
        ("float32", LATER, WEIGHTS, "delta4-zstd"),
        ("float32", LATER, LATER[::-1].copy(), "planes4-zstd"),
        ("float32", np.tile(WEIGHTS[:1000], 60), None, "zstd"),
        ("uint8", np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8), None, "raw"),
        ("int64", np.arange(30_000), None, "zstd"),
        ("int64", np.random.default_rng(0).integers(0, 1000, 60_000), None, "planes8-zstd"),
    ],
)
def test_what_stores_the_fewest_bytes_is_chosen(dtype: str, content: Any, base: Any, chosen: str) -> None:
    given = chunks(content)
    found = choose(dtype, given, None if base is None else chunks(base))
    assert found.name == chosen
    assert found.raw_bytes == content.nbytes
    assert found.ratio >= 1.0
    assert found.name == "raw" or found.ratio > 1.02


def test_chunks_that_do_not_become_shorter_count_as_they_are() -> None:
    given = chunks(np.random.default_rng(0).integers(0, 256, 131072, dtype=np.uint8))
    assert measure("zstd", given).stored_bytes == 131072


def test_a_few_changed_words_cost_a_few_bytes() -> None:
    changed = WEIGHTS.copy()
    changed[::1000] *= np.float32(1.5)  # 66 words of 4 bytes
    for name in ("delta4-zstd", "xor4-zstd"):
        assert measure(name, [memoryview(changed.tobytes())], [memoryview(WEIGHTS.tobytes())]).stored_bytes < 66 * 12


def test_a_chunk_is_constant_or_what_shortens_it_first_or_raw() -> None:
    planes, delta = registry.codec("planes4-zstd"), registry.codec("delta4-zstd")
    now, before = memoryview(LATER.tobytes()), memoryview(WEIGHTS.tobytes())
    assert encoded(memoryview(bytes(1000)), (planes,)) == ("constant", b"\0")
    assert encoded(now, (delta, planes), before)[0] == "delta4-zstd"
    assert encoded(now, (delta, planes))[0] == "planes4-zstd"
    assert encoded(now[:4092], (delta, planes), before[:4092]) == ("raw", now[:4092])
    noise = memoryview(np.random.default_rng(0).bytes(5000))
    assert encoded(noise, (planes,)) == ("raw", noise)


def test_an_unknown_codec_is_of_a_newer_version() -> None:
    with pytest.raises(FormatTooNew, match="'planes2-later', which this version does not know"):
        registry.codec("planes2-later")


@pytest.mark.parametrize(("name", "package"), [("planes2-zstd", "backports.zstd"), ("xor4-lz4", "lz4")])
def test_an_absent_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    for module in ("compression", "backports", "lz4.block"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"need {package}, which is not installed(?s:.)*\[{name.split('-')[1]}\]"):
        registry.codec(name, 17)  # which nobody has made yet


def test_a_library_without_the_huffman_parameter_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    exponents = (bfloat16(WEIGHTS) >> 7).astype(np.uint8).tobytes()
    plain = len(stages.Zstd().compress(exponents, repeats=True))
    best = len(stages.Zstd().compress(exponents, repeats=False))
    stages._huffman_options.cache_clear()
    monkeypatch.setattr(stages, "LITERALS_BY_HUFFMAN", {9_999_999: 1})
    try:
        other = stages.Zstd()
        assert best <= len(other.compress(exponents, repeats=False)) < plain * 0.95
    finally:
        stages._huffman_options.cache_clear()
