"""Loops that tell their sampler the epoch, as loops with a DistributedSampler do, and are gone on with inside one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import tenuto
from support.thinning import crossed
from tenuto import every
from tenuto.integrations.torch.data.sampler import ResumableSampler
from tenuto.state.position.positions import attach

BATCHES = 5


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> int:
        return index


def plain(**more: Any) -> Any:
    return DataLoader(Numbers(), batch_size=4, sampler=ResumableSampler(Numbers(), seed=5), **more)


def stateful(**more: Any) -> Any:
    return StatefulDataLoader(Numbers(), batch_size=4, sampler=ResumableSampler(Numbers(), seed=5), **more)


def in_batches(**more: Any) -> Any:
    order = BatchSampler(ResumableSampler(Numbers(), seed=5), 4, drop_last=False)
    return StatefulDataLoader(Numbers(), batch_sampler=order, **more)


def train(place: Path, loader: Any, until: int | None = None) -> list[tuple[int, list[int]]]:
    """Goes on to the end, or until so many steps are completed; each batch, and the epoch that it was given in."""
    seen: list[tuple[int, list[int]]] = []
    sampler = loader.sampler if isinstance(loader.sampler, ResumableSampler) else loader.batch_sampler.sampler
    with tenuto.Checkpointer(place, {"n": 0}, data=loader, save=every(steps=1)) as ckpt:
        for epoch in ckpt.epochs(3):
            sampler.set_epoch(epoch)
            for batch in ckpt.batches:
                seen.append((epoch, batch.tolist()))
                if ckpt.step + 1 == until:
                    ckpt.stop()
    return seen


@pytest.mark.parametrize(("make", "workers"), crossed([plain, stateful, in_batches], [0, 1]))
def test_nothing_comes_again_where_the_loop_tells_the_epoch(tmp_path: Path, make: Any, workers: int) -> None:
    whole = train(tmp_path / "whole", make())
    assert len(whole) == 3 * BATCHES
    for stops in [(1, 4), (5, 7)] if workers == 0 else [(2, 8)]:
        pieces, place = [], tmp_path / f"until {stops}"
        for until in (*stops, None):
            pieces += train(place, make(num_workers=workers), until)
        assert pieces == whole


def test_what_is_saved_before_the_first_batch_is_where_the_order_is() -> None:
    position = attach(stateful())
    batches = position.iterate(1, 0)
    next(batches), next(batches)
    saved = copy.deepcopy(position.state_dict())
    rest = [batch.tolist() for batch in batches]
    for _ in range(2):
        loader = stateful()
        position = attach(loader)
        position.load_state_dict(copy.deepcopy(saved))
        loader.sampler.set_epoch(1)
        saved = position.state_dict()
    assert [batch.tolist() for batch in position.iterate(1, 2)] == rest
