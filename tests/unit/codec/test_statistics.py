"""Statistics of values in raw bytes: those of numpy and torch for the same values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.leaf_statistics import statistics
from tenuto.codec import statistics as module
from tenuto.codec.statistics import BLOCK_BYTES, floats_of, kind_of, many
from tenuto.model.leaf import DTYPES

SMALL = (
    *("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)

VALUES = st.integers(-1000, 1000).map(lambda one: one / 8) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])


def check(data: Any, name: str, expected: np.ndarray[Any, Any]) -> None:
    found = statistics(data, name)
    assert found is not None
    finite = expected[np.isfinite(expected)].astype(np.float64)
    assert (found.count, found.sampled) == (expected.size, expected.size)
    assert found.nonfinite == expected.size - finite.size and found.nan == int(np.isnan(expected).sum())
    assert math.isclose(found.norm, math.sqrt(float((finite * finite).sum())), rel_tol=1e-5)
    assert (found.min, found.max) == ((finite.min(), finite.max()) if finite.size else (None, None))


@pytest.mark.parametrize("name", SMALL)
def test_each_value_of_a_small_type_is_what_torch_says(name: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, name)
    size = torch.empty((), dtype=kind).element_size()
    every = np.arange(1 << 8 * size, dtype=f"u{size}")
    signed = torch.from_numpy(every.view(f"i{size}" if size > 1 else "u1").copy())
    expected = signed.view(kind).float().numpy()
    assert np.array_equal(floats_of(every.view(np.uint8), name), expected, equal_nan=True)
    half = 1 << (8 * size - 1)
    cuts = [slice(None), slice(1, 9), slice(half + 1, half + 9), slice(0, 1), slice(half - 5, half + 7)]
    for chosen in (*cuts, np.isfinite(expected)):
        check(every[chosen].tobytes(), name, expected[chosen])


@given(st.lists(st.floats(width=32), min_size=1, max_size=70), st.sampled_from(["float32", "float64"]))
def test_of_any_floats(values: list[float], name: str) -> None:
    array = np.array(values, name)
    with np.errstate(over="ignore"):
        check(array.tobytes(), name, array)


@given(
    st.lists(st.lists(VALUES, min_size=1, max_size=9), min_size=1, max_size=9),
    st.sampled_from(["float16", "float32"]),
)
def test_many_short_leaves_at_once_are_as_each_by_itself(leaves: list[list[float]], name: str) -> None:
    arrays = [np.array(leaf, name) for leaf in leaves]
    starts = np.cumsum([0, *map(len, leaves[:-1])])
    values = floats_of(np.concatenate(arrays).view(np.uint8), name)
    for array, *found in zip(arrays, *(column.tolist() for column in many(values, starts)), strict=True):
        alone = statistics(array.tobytes(), name)
        assert alone is not None and (alone.nonfinite, alone.nan) == tuple(found[:2])
        assert math.isclose(alone.norm, math.sqrt(found[2]), rel_tol=1e-5)
        if alone.min is not None:
            assert (alone.min, alone.max) == tuple(found[3:])


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int64", "uint64", "bool"])
def test_of_whole_numbers(name: str) -> None:
    array = np.random.default_rng(0).integers(0, 2 if name == "bool" else 100, 5000).astype(name)
    check(array.tobytes(), name, array.astype(np.float64))


def test_of_complex_numbers() -> None:
    array = np.array([3 + 4j, 0, complex(math.nan, 1), complex(1, math.inf)], np.complex64)
    found = statistics(array.tobytes(), "complex64")
    assert found is not None and (found.nonfinite, found.nan, found.min, found.max) == (2, 1, None, None)
    assert math.isclose(found.norm, math.sqrt(27))
    clean = statistics(array[:2].tobytes(), "complex64")
    assert clean is not None and clean.norm == 5.0


def test_what_is_not_finite_is_found_in_any_block() -> None:
    array = np.zeros(2 * BLOCK_BYTES // 2 + 7, np.uint16)
    for at in (0, BLOCK_BYTES // 2 - 1, BLOCK_BYTES // 2, len(array) - 1):
        array[:] = 0x3F80
        array[at] = 0xFF80
        found = statistics(array, "bfloat16")
        assert found is not None and (found.nonfinite, found.min, found.max) == (1, 1.0, 1.0)
        assert math.isclose(found.norm, math.sqrt(len(array) - 1), rel_tol=1e-5)


@pytest.mark.parametrize("value", [1e-30, 1e30])
def test_squares_that_float32_cannot_hold_are_summed_all_the_same(value: float) -> None:
    found = statistics(np.full(100, value, np.float32).tobytes(), "float32")
    assert found is not None and found.nonfinite == 0 and math.isclose(found.norm, 10 * value, rel_tol=1e-5)


def test_types_without_numbers_have_none() -> None:
    assert statistics(b"abcd", "numpy:<U1") is None and statistics(b"abcdefgh", "numpy:<M8[s]") is None
    assert statistics(b"ab", "bits16") is None


def test_which_types_have_numbers() -> None:
    without = {name for name in DTYPES if kind_of(name) is None}
    assert all(name.startswith(("bits", "int", "uint")) for name in without)
    assert {kind_of(name) for name in SMALL} == {"float"}


@pytest.mark.parametrize("name", [name for name in DTYPES if kind_of(name) is not None])
def test_every_dtype_with_numbers_has_statistics_also_of_nothing(name: str) -> None:
    found = statistics(bytes(DTYPES[name].size * 5), name)
    assert found is not None and found.count == 5 and found.nonfinite == 0
    empty = statistics(b"", name)
    assert empty is not None and (empty.count, empty.norm, empty.min) == (0, 0.0, None)


def test_blas_gets_no_more_than_one_thread_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS takes every processor for more than 10,000 elements, which training needs."""
    lengths = []

    def counted(x: Any, y: Any) -> Any:
        lengths.append(x.shape[-1])
        return np.einsum("...i,...i->...", x, y)

    monkeypatch.setattr(module.np, "dot", counted)
    monkeypatch.setattr(module.np, "vecdot", counted)
    statistics(np.ones(100_000, np.float32), "float32")
    assert lengths and max(lengths) <= 10_000
