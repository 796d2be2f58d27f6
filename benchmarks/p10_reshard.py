"""P10: restoring onto another number of ranks, or along another dimension, than saved.

    python benchmarks/p10_reshard.py --savers 3 --ranks 2 --gib 1 --cache hot
    python benchmarks/p10_reshard.py --savers 3 --ranks 2 --gib 1 --cache cold

A state of matrices is saved by as many processes as restore it, each in the layout in which it is restored (`same`),
and by `--savers` processes in rows (`resharded`). Restored are rows, columns, and all of it on every rank. Every
process is one of a job over gloo, on one machine; what counts is what the slowest took. Targets: at most 1.10 times the
same layout's time; and, where the bytes come from the store and not from the page cache, at most 1.05 times the state
asked of it by all ranks together. `dcp.load` of the same layouts is measured beside.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import harness
import peers
import torch
import torch.distributed as dist
from harness import GIB, Contender, Result, Target, arguments, compare, median_interval, timed
from p5_restore import cache_option
from ranks_job import Job, Restores, ranks_option, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tenuto
from tenuto.store.registry import open_store

LAYOUTS = ("rows", "columns", "replicas")
ROWS = 1024
PHASE, PLACE = "P10_PHASE", "P10_PLACE"


def options_here(parser: argparse.ArgumentParser) -> None:
    cache_option(parser)
    ranks_option(parser)
    parser.add_argument("--savers", type=int, default=3, help="processes that save what is resharded (default 3)")


class State:
    """Matrices that every process can make for itself, and this process's part of them in a layout."""

    def __init__(self, gib: float, leaves: int, rank: int, of: int) -> None:
        self.columns = max(int(gib * GIB) // leaves // 4 // ROWS, 8)
        self.leaves = leaves
        self.rank, self.of = rank, of
        self.bytes = ROWS * self.columns * 4 * leaves

    def wholes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One after the other: all of them at once are a state for each process."""
        generator = torch.Generator().manual_seed(0)
        for number in range(self.leaves):
            yield f"layers.{number}.weight", torch.randn(ROWS, self.columns, generator=generator)

    def part(self, layout: str) -> tuple[slice, slice]:
        everything = slice(None)
        if layout == "replicas":
            return everything, everything
        length = ROWS if layout == "rows" else self.columns
        each = -(-length // self.of)  # as torch.chunk cuts: the last one may be shorter
        mine = slice(min(self.rank * each, length), min((self.rank + 1) * each, length))
        return (mine, everything) if layout == "rows" else (everything, mine)

    def local(self, layout: str, *, filled: bool) -> dict[str, torch.Tensor]:
        cut = self.part(layout)
        if filled:
            return {name: one[cut].clone(memory_format=torch.contiguous_format) for name, one in self.wholes()}
        shape = torch.empty(ROWS, self.columns, device="meta")[cut].shape
        return {f"layers.{number}.weight": torch.zeros(shape) for number in range(self.leaves)}

    def declared(self, layout: str, local: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """As Tenuto takes it."""
        if layout == "replicas":
            return {"model": {name: tenuto.replicated(one) for name, one in local.items()}}
        offsets = tuple(one.start or 0 for one in self.part(layout))
        whole = (ROWS, self.columns)
        return {"model": {name: tenuto.shard(one, whole=whole, offsets=offsets) for name, one in local.items()}}

    def tensors(self, layout: str, local: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """As DCP takes it."""
        mesh = init_device_mesh("cpu", (self.of,))
        placed = [{"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}[layout]]
        shape = (ROWS, self.columns)
        return {
            "model": {
                name: DTensor.from_local(one, mesh, placed, run_check=False, shape=shape, stride=(self.columns, 1))
                for name, one in local.items()
            }
        }


class Counting:
    """A store, and how many bytes were asked of it: of objects that are read in place, only what is read besides."""

    def __init__(self, path: Path) -> None:
        self._inner = open_store(path)
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, name: str, *, limit: int) -> bytes:
        data = self._inner.get(name, limit=limit)
        self.bytes += len(data)
        return data

    def open(self, name: str) -> Any:
        return CountingReader(self, self._inner.open(name))


class CountingReader:
    def __init__(self, store: Counting, inner: Any) -> None:
        self._store = store
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> CountingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._store.bytes += len(buffer)
        self._inner.read_into(offset, buffer)


def save(job: Job, state: State, place: Path, kinds: Mapping[str, str]) -> None:
    """`kinds`: layout by the directory that it is saved in."""
    for directory, layout in kinds.items():
        local = state.local(layout, filled=True)
        with tenuto.Checkpointer(place / "ours" / directory, state.declared(layout, local)) as checkpointer:
            checkpointer.step_done()
            checkpointer.save(wait=True)
        where = place / "dcp" / directory
        job.emptied(where)
        peers.dcp_save(state.tensors(layout, local), where)


class Restoring(Restores):
    """Restores, each from files of its own, in the same condition of the cache."""

    def __init__(self, job: Job, state: State, place: Path, *, cold: bool) -> None:
        super().__init__(job, cold=cold)
        self.state, self.place = state, place
        self.asked: dict[str, list[int]] = {}
        self._into = {layout: state.local(layout, filled=False) for layout in LAYOUTS}
        """One destination for all that restore in a layout: four states over all processes."""

    def ours(self, name: str, layout: str, directory: str) -> Contender:
        root = self.place / "ours" / directory
        local = self._into[layout]
        self.asked[name] = []

        def measure() -> float:
            store = Counting(root)
            checkpointer = tenuto.Checkpointer(store, self.state.declared(layout, local))
            store.bytes = 0
            seconds = self.contender(name, root, lambda: timed(checkpointer.restore)).measure()
            asked = torch.tensor(store.bytes, dtype=torch.int64)
            dist.all_reduce(asked)
            self.asked[name].append(int(asked))
            checkpointer.close()
            return seconds

        return Contender(name, measure)

    def peer(self, name: str, layout: str, directory: str) -> Contender:
        root = self.place / "dcp" / directory
        into = self.state.tensors(layout, self._into[layout])
        return self.contender(name, root, lambda: peers.dcp_load(into, root))

    def check(self, layout: str, directory: str) -> None:
        """What is timed is the whole work: the bytes are there."""
        local = self._into[layout]
        checkpointer = tenuto.Checkpointer(self.place / "ours" / directory, self.state.declared(layout, local))
        checkpointer.restore()
        checkpointer.close()
        cut = self.state.part(layout)
        assert all(torch.equal(local[name], one[cut]) for name, one in self.state.wholes()), "not what was saved"


def measure(job: Job, options: argparse.Namespace, state: State, place: Path) -> None:
    restoring = Restoring(job, state, place, cold=options.cache == "cold")
    contenders = []
    for layout in LAYOUTS:
        restoring.check(layout, "resharded")
        contenders += [
            restoring.ours(f"{layout}: same layout", layout, layout),
            restoring.ours(f"{layout}: resharded", layout, "resharded"),
            restoring.peer(f"{layout}: resharded, dcp.load", layout, "resharded"),
        ]
    seconds = compare(contenders, rounds=options.rounds or 15, own="rows: resharded", note=job.note)
    made = f"p10_reshard_{options.savers}to{options.ranks}_{options.cache}"
    result = Result(made, seconds, state.bytes, sized=True, speeds=False)
    result.facts["cache"] = restoring.condition
    result.facts["ranks"] = {"saved by": options.savers, "restored by": options.ranks}
    result.memory = {f"asked of the store, {name}": counts[1:] for name, counts in restoring.asked.items()}
    for layout in LAYOUTS:
        text = f"{layout} resharded / same layout <= 1.10"
        result.judge(Target(text, f"{layout}: resharded", f"{layout}: same layout", at_most=1.10))
        if restoring.cold:
            shares = [count / state.bytes for count in restoring.asked[f"{layout}: resharded"][1:]]
            text = f"{layout}: states asked of the store by all ranks <= 1.05"
            result.judge_value(text, median_interval(shares), at_most=1.05)
    if job.rank == 0:
        harness.report(result, options, place)


def work(options: argparse.Namespace) -> None:
    """As one process of a job."""
    job, place = Job(), Path(os.environ[PLACE])
    state = State(options.gib, options.leaves, job.rank, job.world_size)
    if os.environ[PHASE] == "save resharded":
        save(job, state, place, {"resharded": "rows"})
    elif os.environ[PHASE] == "save same":
        save(job, state, place, {layout: layout for layout in LAYOUTS})
    else:
        measure(job, options, state, place)
    job.end()


def main() -> None:
    options = arguments(__doc__ or "", add=options_here)
    if PHASE in os.environ:
        work(options)
        return
    with harness.workplace(options) as place:
        phases = {"save resharded": options.savers, "save same": options.ranks, "restore": options.ranks}
        for phase, ranks in phases.items():
            code = start(ranks, {PHASE: phase, PLACE: str(place)})
            if code:
                sys.exit(code)


if __name__ == "__main__":
    main()
