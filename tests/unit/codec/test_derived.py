from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tenuto.codec import registry
from tenuto.codec.derived import ROUNDED, rounded

EVERY_HIGH_HALF = np.arange(1 << 16, dtype=np.uint32) << 16


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_it_rounds_as_torch_does(dtype: str, low: int) -> None:
    master = torch.from_numpy((EVERY_HIGH_HALF | low).view(np.float32))
    made = torch.frombuffer(
        bytearray(rounded(memoryview(master.numpy()).cast("B"), dtype)), dtype=getattr(torch, dtype)
    )
    by_torch = master.to(getattr(torch, dtype))
    whole = ~master.isnan()
    assert torch.equal(made[whole].view(torch.int16), by_torch[whole].view(torch.int16))
    assert made[~whole].isnan().all()
    assert len(made[~whole].view(torch.int16).unique()) <= 1, "the base would depend on the processor"


@given(words=st.lists(st.integers(0, (1 << 32) - 1), max_size=50))
@pytest.mark.parametrize("dtype", ROUNDED)
def test_it_takes_any_words(dtype: str, words: list[int]) -> None:
    assert len(rounded(memoryview(np.array(words, "<u4").tobytes()), dtype)) == 2 * len(words)


def test_a_rounded_copy_takes_next_to_nothing_and_one_that_is_not_quite_it_a_little() -> None:
    master = torch.randn(131072, generator=torch.Generator().manual_seed(0))
    copy = master.bfloat16()
    base = memoryview(rounded(memoryview(master.numpy()).cast("B"), "bfloat16"))
    codec = registry.codec("delta2-zstd")
    stored = codec.encode(memoryview(copy.view(torch.uint8).numpy()), base)
    assert stored is not None and len(stored) == 12
    copy[::4000] *= 1.5
    other = memoryview(copy.view(torch.uint8).numpy())
    stored = codec.encode(other, base)
    assert stored is not None and len(stored) < 600
    out = memoryview(bytearray(len(other)))
    codec.decode(memoryview(stored), out, base)
    assert out == other
