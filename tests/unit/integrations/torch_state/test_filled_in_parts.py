"""Tensors on a device have no memory of the host's: what is read goes there in parts. Here those on the CPU say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tenuto
from support.saves_of_ranks import held, save_jointly
from tenuto.engine.read import leaf_reader, read_segments
from tenuto.integrations.torch.tensors import TensorSink
from tenuto.repo.repository import Repo
from tenuto.store.memory import MemoryStore

KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.fixture
def filled() -> Iterator[list[int]]:
    """The lengths of the parts that arrive."""
    lengths: list[int] = []

    def fill(self: TensorSink, start: int, data: Any) -> None:
        lengths.append(len(data))
        self._fill_part(start, data)

    with (
        mock.patch.object(TensorSink, "buffer", None),
        mock.patch.object(TensorSink, "span", lambda self: None),
        mock.patch.object(TensorSink, "fill_part", property(lambda self: lambda *part: fill(self, *part))),
    ):
        yield lengths


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def made(seed: int) -> dict[str, Any]:
    source = torch.Generator().manual_seed(seed)
    return {
        f"{str(kind)[6:]}-{count}": torch.randint(0, 2, (count * kind.itemsize,), generator=source)
        .to(torch.uint8)
        .view(kind)
        .reshape(-1, 1)
        for kind in KINDS
        for count in (0, 3, 30_001, 700_000)
    } | {"parameter": torch.nn.Parameter(torch.randn(200_000, generator=source))}


def test_every_type_arrives_bit_for_bit(tmp_path: Path, filled: list[int]) -> None:
    state, target = made(1), made(2)
    tenuto.save(state, tmp_path)
    tenuto.load(tmp_path, into=target)
    for name, tensor in state.items():
        assert torch.equal(bytes_in(target[name]), bytes_in(tensor)), name
    large = [one.nbytes for one in state.values() if one.nbytes >= 16_384]
    assert sum(filled) == sum(large) and max(filled) < max(large), "in parts"
    assert isinstance(target["parameter"], torch.nn.Parameter) and target["parameter"].requires_grad


def test_what_ranks_have_saved_arrives_in_a_process_alone(filled: list[int]) -> None:
    """Rows lie one after the other, columns are cut out."""

    def in_torch(rank: int, of: int, step: int) -> dict[str, Any]:
        state = held(rank, of, step)
        layouts = {"rows": (90, 40), "columns": (6, 60, 4)}
        ends = [0, 33, 63, 90]
        offsets = {"rows": (ends[rank], 0), "columns": (0, 20 * rank, 0)}
        for name, whole in layouts.items():
            part = WHOLE[name][
                tuple(slice(at, at + size) for at, size in zip(offsets[name], SHAPES[name][rank], strict=True))
            ]
            state["model"][name] = tenuto.shard(part.clone(), whole=whole, offsets=offsets[name])
        return state

    store = MemoryStore("parts")
    save_jointly(Repo.create_or_open(store), 3, (1,), holding=in_torch)
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}}
    with (
        mock.patch.object(read_segments, "PIECE_BYTES", 64),
        mock.patch.object(leaf_reader, "SMALL_BYTES", 64),
    ):
        tenuto.load(store, into=target, strict=False)
    for name, tensor in WHOLE.items():
        assert torch.equal(target["model"][name], tensor), name
    assert sum(filled) == WHOLE["rows"].nbytes, "the columns are collected first"


WHOLE = {"rows": torch.randn(90, 40), "columns": torch.randn(6, 60, 4)}
SHAPES = {"rows": [(33, 40), (30, 40), (27, 40)], "columns": [(6, 20, 4)] * 3}
