"""The order of a loader that a trainer iterates: made where the loader itself makes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tenuto.torch


def loader(*, own: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3) if own else None
    return DataLoader(range(12), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]


def epoch(source: DataLoader[Any]) -> Iterator[list[int]]:
    """Draws between `iter` and the first batch, as a trainer's hooks do."""
    batches = iter(source)
    torch.rand(3)
    for batch in batches:
        torch.rand(1)
        yield batch.tolist()


@pytest.mark.parametrize("own", [False, True])
def test_draws_between_iter_and_the_first_batch_change_no_order(own: bool) -> None:
    torch.manual_seed(5)
    plain = [list(epoch(one)) for one in [loader(own=own)] * 2]
    torch.manual_seed(5)
    counted = tenuto.torch.resumable(loader(own=own), runs_out=True)
    assert [list(epoch(counted)) for _ in range(2)] == plain

    torch.manual_seed(5)
    interrupted = tenuto.torch.resumable(loader(own=own), runs_out=True)
    first = epoch(interrupted)
    assert [next(first) for _ in range(2)] == plain[0][:2]
    saved, generator = interrupted.state_dict(), torch.get_rng_state()  # type: ignore[attr-defined]
    resumed = tenuto.torch.resumable(loader(own=own), runs_out=True)
    resumed.load_state_dict(saved)  # type: ignore[attr-defined]
    rest = iter(resumed)
    torch.set_rng_state(generator)
    torch.rand(0)
    assert [batch.tolist() for batch in rest] == plain[0][2:]
