"""Arrays of bfloat16 and of 8 bits, as ml_dtypes gives them to numpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.errors import StateMismatch, Unserialisable
from tenuto.model.leaf import DTYPES
from tenuto.state.numpy_arrays import has_type

ml_dtypes = pytest.importorskip("ml_dtypes")

NAMES = [name for name, row in DTYPES.items() if row.numpy is None and row.code is not None]


def bits(kind: str) -> Any:
    """Every bit pattern of 8 bits, and as many of 16, NaN among them, in an array that is not contiguous."""
    dtype = np.dtype(getattr(ml_dtypes, kind))
    pattern = np.arange(256, dtype=np.uint8) if dtype.itemsize == 1 else np.arange(0, 65536, 257).astype(np.uint16)
    return np.repeat(pattern, 2).view(dtype).reshape(128, 4)[:, ::2]


def test_the_format_has_such_types() -> None:
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2"} <= set(NAMES) and all(map(has_type, NAMES))


@pytest.mark.parametrize("kind", NAMES)
def test_every_bit_and_the_type_come_back(tmp_path: Path, kind: str) -> None:
    saved = bits(kind)
    tenuto.save({"made anew": saved, "filled": saved}, tmp_path)
    target = {"filled": np.zeros_like(saved)}
    filled = target["filled"]
    made = tenuto.load(tmp_path).state["made anew"]
    tenuto.load(tmp_path, into=target)
    assert target["filled"] is filled
    with tenuto.open(tmp_path) as opened:
        for found in (made, filled, opened["made anew"].numpy(), opened["made anew"][...]):
            assert found.dtype == saved.dtype and found.dtype.name == kind
            assert found.tobytes() == saved.tobytes()


def test_another_type_of_the_same_width_is_a_mismatch(tmp_path: Path) -> None:
    tenuto.save({"a": bits("float8_e4m3fn")}, tmp_path)
    with pytest.raises(StateMismatch, match=r"a: float8_e4m3fn \[128, 2\] .*, float8_e5m2 \[128, 2\]"):
        tenuto.load(tmp_path, into={"a": bits("float8_e5m2")})


def test_two_types_over_the_same_memory_stay_two(tmp_path: Path) -> None:
    pattern = np.arange(16, dtype=np.uint8)
    views = {kind: pattern.view(getattr(ml_dtypes, kind)) for kind in ("float8_e4m3fn", "float8_e5m2")}
    tenuto.save(views, tmp_path)
    assert {kind: found.dtype.name for kind, found in tenuto.load(tmp_path).state.items()} == {k: k for k in views}


@pytest.mark.parametrize("kind", ["int4", "float8_e3m4", "float8_e4m3b11fnuz"])
def test_a_type_that_the_format_lacks_is_refused_with_a_way_out(tmp_path: Path, kind: str) -> None:
    with pytest.raises(Unserialisable, match=rf"a: an array of {kind} .*\n.*array.view\(numpy.uint8\)"):
        tenuto.save({"a": np.zeros(3, getattr(ml_dtypes, kind))}, tmp_path)


@pytest.mark.parametrize("kind", NAMES)
def test_a_scalar_of_such_a_type_is_refused_by_its_path(tmp_path: Path, kind: str) -> None:
    with pytest.raises(Unserialisable, match=f"a: a numpy scalar of type {kind} "):
        tenuto.save({"a": bits(kind)[0, 1]}, tmp_path)


def test_a_process_that_has_not_imported_it_gets_the_type_too(tmp_path: Path) -> None:
    tenuto.save({"a": bits("bfloat16")}, tmp_path)
    program = f"import tenuto; assert tenuto.load({str(tmp_path)!r}).state['a'].dtype.name == 'bfloat16'"
    subprocess.run([sys.executable, "-c", program], check=True)
