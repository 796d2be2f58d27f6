"""A job of several processes on this machine, as torchrun starts one: an FSDP2 training, measured as its slowest rank.

Every rank runs the same benchmark with the same contenders in the same order. Before each measurement they meet; what
counts is what the slowest of them took. The machine's own limits are measured in the same way: all ranks copy, write or
read their share at the same time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import peers
import raw
import torch
import torch.distributed as dist
from harness import Contender, Result
from p3_overhead import Training
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tenuto

KINDS = ("thread", "process")


def ranks_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="processes of the job (default 2)")


def run(work: Callable[[Job, argparse.Namespace], None], options: argparse.Namespace) -> None:
    """`work` on every rank: started here, once for each, by the command that this process was started by."""
    if "RANK" in os.environ:
        job = Job()
        work(job, options)
        job.end()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # no rank stays behind
    sys.exit(start(options.ranks))


def start(ranks: int, more: Mapping[str, str] | None = None) -> int:
    """This command on every rank, with `more` in its environment: the first exit status that is not 0, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max((os.cpu_count() or 1) // ranks, 1)
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), **(more or {})}
    about |= {"OMP_NUM_THREADS": str(threads), "LOCAL_WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **about, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        codes = [one.wait() for one in started]
    finally:
        for one in started:
            one.kill()
    return next((code for code in codes if code), 0)


class Job:
    """This process as one of the ranks."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.beside = dist.new_group(backend="gloo")
        """For those whose saves talk in the background, where training's own group must not be used."""

    def end(self) -> None:
        dist.barrier()
        dist.destroy_process_group()

    def slowest(self, seconds: float) -> float:
        """What the slowest rank took: the same on all."""
        found = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def first_says(self, said: Any) -> Any:
        """What rank 0 says, on all ranks."""
        box = [said]
        dist.broadcast_object_list(box)
        return box[0]

    def alone(self, work: Callable[[], object]) -> None:
        """On rank 0, while the others wait for it."""
        if self.rank == 0:
            work()
        dist.barrier()

    def emptied(self, path: Path) -> Path:
        self.alone(lambda: harness.empty_directory(path))
        return path

    def contender(self, name: str, measure: Callable[[], float]) -> Contender:
        """As one whose figure is that of the slowest rank. All ranks begin at the same time."""

        def together() -> float:
            dist.barrier()
            return self.slowest(measure())

        return Contender(name, together)

    def note(self, text: str) -> None:
        if self.rank == 0:
            harness.note(text)

    @contextmanager
    def workplace(self, options: argparse.Namespace) -> Iterator[Path]:
        """One empty directory for all; gone afterwards."""
        with harness.workplace(options) as own:
            yield Path(self.first_says(str(own)))
            dist.barrier()  # it is there until none needs it

    def report(self, result: Result, options: argparse.Namespace, place: Path) -> None:
        result.facts = {"ranks": self.world_size, "world": "one machine, gloo, fully_shard, AdamW", **result.facts}
        if self.rank == 0:
            harness.report(result, options, place)

    def all_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        found = torch.tensor(sum(one.nbytes for one in tensors), dtype=torch.int64)
        dist.all_reduce(found)
        return int(found)

    def result(self, what: str, seconds: dict[str, list[float]], tensors: Sequence[torch.Tensor]) -> Result:
        """`ranks_<what>_<ranks>`, sized."""
        return Result(f"ranks_{what}_{self.world_size}", seconds, self.all_bytes(tensors), sized=True)


class Sharded(Training):
    """The same training, its parameters and AdamW's moments cut over all ranks."""

    def prepare(self, model: torch.nn.TransformerEncoder) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def tensors(self) -> list[torch.Tensor]:
        """This rank's parts."""
        return [one.to_local() for one in super().tensors()]  # type: ignore[attr-defined]

    def dictionaries(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def replicas(self) -> dict[str, Any]:
        """Tensors as large as all ranks' parts together, the same on each rank, as data parallelism has them."""
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(one.shape, generator=generator) for one in super().tensors()]
        return {"model": tenuto.replicated({str(number): one for number, one in enumerate(whole)})}


class Restores:
    """Restores by all ranks, each from files in the same condition of the page cache."""

    def __init__(self, job: Job, *, cold: bool) -> None:
        self.job, self.cold = job, cold
        self.how = ""

    def contender(self, name: str, root: Path, restore: Callable[[], float]) -> Contender:
        restored = self.job.contender(name, restore)

        def measure() -> float:
            self.job.alone(lambda: self._prepare(root))
            return restored.measure()

        return Contender(name, measure)

    def _prepare(self, root: Path) -> None:
        if self.cold:
            self.how = harness.drop_cache(root)
        else:
            harness.warm_cache(root)

    @property
    def condition(self) -> str:
        return f"cold: {self.how}" if self.cold else "hot: each file read once before"


def memcpy(job: Job, tensors: Sequence[torch.Tensor]) -> Contender:
    return job.contender("memcpy", raw.Memcpy(tensors))


def dcp_async(job: Job, training: Sharded, where: Path, kind: str) -> Callable[[], Callable[[], object]]:
    """Begins `async_save` into an emptied directory; what that returns waits for its end."""
    return lambda: peers.dcp_async_begin(training.dictionaries(), where, kind, group=job.beside)


def removed(job: Job, path: Path) -> None:
    job.alone(lambda: shutil.rmtree(path))
