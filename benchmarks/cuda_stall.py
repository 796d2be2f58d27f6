"""How long a save holds a training on a CUDA device, and how long a restore onto it takes.

    python benchmarks/cuda_stall.py --gib 1

The state is AdamW's: weights and two moments of each on the device, a third of `--gib` each. A block is a save, work of
`--work-ms` in place of forward and backward, one update, and a wait for the device. What counts of a save is the time
in its call; what the block takes longer than one without a save is a fact beside it, and the whole of what a fenced
save costs. Floors: one copy of the same bytes into pinned and into pageable host memory.
Restores: into the tensors on the device, with files in the page cache; every byte verified by tenuto alone.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peers
import torch
import torch.distributed as dist
from harness import (
    GIB,
    Contender,
    Result,
    arguments,
    compare,
    empty_directory,
    note,
    report,
    timed,
    warm_cache,
    workplace,
)

import tenuto
from tenuto.state.update_barrier import PROBATION

ROUNDS = 10
EAGER = "tenuto save(), eager"
FENCED = "tenuto save(), fenced"
NONE = "no save"
SIDE = 4096
"""Rows of the matrix product that stands for forward and backward."""


class Training:
    """Weights with gradients that stay, AdamW, and matrix products for as long as a forward and backward may take."""

    def __init__(self, gib: float, leaves: int, kind: torch.dtype, work_ms: float) -> None:
        torch.manual_seed(0)
        each = max(int(gib * GIB / 3) // leaves // kind.itemsize, 1)
        self.model = torch.nn.ParameterList([torch.randn(each, dtype=kind, device="cuda") for _ in range(leaves)])
        for one in self.model:
            one.grad = torch.randn_like(one)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.optimizer.step()
        self._factor = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        self._times = 8
        self.work()
        torch.cuda.synchronize()
        took_s = timed(self._work_and_wait)
        self._times = max(round(self._times * work_ms / 1e3 / took_s), 1)

    def work(self) -> None:
        for _ in range(self._times):
            torch.mm(self._factor, self._factor)

    def _work_and_wait(self) -> None:
        self.work()
        torch.cuda.synchronize()

    def block(self) -> None:
        self.work()
        self.optimizer.step()
        torch.cuda.synchronize()

    def tensors(self) -> list[torch.Tensor]:
        moments = [one for state in self.optimizer.state.values() for one in state.values() if one.dim()]
        return [*(one.detach() for one in self.model.parameters()), *moments]

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def dictionaries(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Block:
    """A save, and the block behind it. `begin` returns what waits until the save is written."""

    def __init__(self, training: Training, begin: Callable[[], Callable[[], object]]) -> None:
        self._training = training
        self._begin = begin
        self.blocks_s: list[float] = []

    def __call__(self) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        finish = self._begin()
        stall = time.perf_counter() - begun
        self._training.block()
        self.blocks_s.append(time.perf_counter() - begun)
        finish()
        return stall


class Ours:
    def __init__(self, training: Training, where: Path, capture: Literal["eager", "fenced"]) -> None:
        self.checkpointer = tenuto.Checkpointer(
            where, training.objects(), keep=tenuto.keep.latest(1), capture=capture, save=tenuto.on.signal()
        )

    def __call__(self) -> Callable[[], object]:
        self.checkpointer.step_done()
        save = self.checkpointer.save()

        def finish() -> None:
            save.wait()
            self.checkpointer.wait()

        return finish


def dcp_begin(training: Training, place: Path) -> Callable[[], object]:
    finish = peers.dcp_async_begin(training.dictionaries(), empty_directory(place), "thread")

    def end() -> None:
        finish()
        shutil.rmtree(place)
        gc.collect()  # what it staged hangs in reference cycles

    return end


def torch_begin(training: Training, file: Path) -> Callable[[], object]:
    torch.save(training.dictionaries(), file)
    return lambda: peers.fsync_tree(file)


def copy_to_host(tensors: list[torch.Tensor], *, pinned: bool) -> Callable[[], float]:
    places = [torch.zeros(one.shape, dtype=one.dtype, pin_memory=pinned) for one in tensors]

    def measure() -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor, non_blocking=pinned)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    return measure


def restores(training: Training, place: Path) -> list[Contender]:
    where, file, other = place / "restore", place / "restore.pt", empty_directory(place / "restore-dcp")
    tenuto.save(training.objects(), where)
    torch.save(training.dictionaries(), file)
    peers.dcp_save(training.dictionaries(), other)

    def ours() -> None:
        tenuto.load(where, into=training.objects())

    def fresh() -> None:
        tenuto.load(where, device="cuda")

    def by_torch() -> None:
        found = torch.load(file, mmap=True, map_location="cuda", weights_only=True)
        training.model.load_state_dict(found["model"])
        training.optimizer.load_state_dict(found["optimizer"])

    def by_dcp() -> None:
        peers.dcp_load(training.dictionaries(), other)

    def contender(name: str, root: Path, load: Callable[[], None]) -> Contender:
        def whole() -> None:
            load()
            torch.cuda.synchronize()

        def measure() -> float:
            warm_cache(root)
            torch.cuda.synchronize()
            return timed(whole)

        return Contender(name, measure)

    return [
        contender("tenuto.load into the device", where, ours),
        contender("tenuto.load, made anew on the device", where, fresh),
        contender("torch.load(mmap, map_location=cuda)", file, by_torch),
        contender("dcp.load into the device", other, by_dcp),
    ]


def own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work-ms", type=float, default=200.0, help="of forward and backward (default %(default)g)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of weights and moments")


def main() -> None:
    options = arguments(__doc__ or "", add=own_options)
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here: nothing was measured")
    training = Training(options.gib, options.leaves, getattr(torch, options.dtype), options.work_ms)
    tensors = training.tensors()
    with workplace(options) as place:
        # async_save stages through the group's device types, and talks by gloo beside training.
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        own = {EAGER: Ours(training, place / "eager", "eager"), FENCED: Ours(training, place / "fenced", "fenced")}
        blocks = {
            NONE: Block(training, lambda: lambda: None),
            EAGER: Block(training, own[EAGER]),
            FENCED: Block(training, own[FENCED]),
            "dcp.async_save, thread": Block(training, lambda: dcp_begin(training, place / "dcp")),
            "torch.save": Block(training, lambda: torch_begin(training, place / "state.pt")),
        }
        for _ in range(PROBATION + 1):
            blocks[FENCED]()
        contenders = [
            Contender("copy to pinned memory", copy_to_host(tensors, pinned=True)),
            Contender("copy to pageable memory", copy_to_host(tensors, pinned=False)),
            *(Contender(name, block) for name, block in blocks.items()),
        ]
        rounds = options.rounds or ROUNDS
        seconds = compare(contenders, rounds=rounds, own=EAGER, note=note)
        for one in own.values():
            one.checkpointer.close()
        del seconds[NONE]  # its call is empty: only its block says something
        taken = {name: np.array(block.blocks_s[-rounds:]) for name, block in blocks.items()}
        seconds |= {f"block: {name}": found.tolist() for name, found in taken.items()}
        loads = restores(training, place)
        seconds |= compare(loads, rounds=rounds, own=loads[0].name, note=note)
        result = Result("cuda_stall", seconds, sum(one.nbytes for one in tensors), sized=True)
        result.facts["device"] = torch.cuda.get_device_name()
        result.facts["cuda"] = torch.version.cuda
        result.facts["dtype"] = options.dtype
        result.facts["block_without_save_ms"] = round(float(np.median(taken[NONE])) * 1e3, 3)
        result.facts["block_longer_ms"] = {
            name: round(float(np.median(found - taken[NONE])) * 1e3, 3) for name, found in taken.items() if name != NONE
        }
        report(result, options, place)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
