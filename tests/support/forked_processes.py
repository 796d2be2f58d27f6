"""Processes forked from a server that has torch and Tenuto loaded, and ran none of either: an interpreter that loads
them anew takes seconds of a processor for each.

One server serves all tests of a process: whoever comes first says what it loads, so all say the same.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path

from campaigns.ports import free_port

LOADED = [
    "torch._dynamo",  # the first module that FSDP cuts imports it, which takes over a second
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.optim.adamw",
    "tenuto.training.checkpointer",
    "tenuto.engine.read.sharded_reader",
    "tenuto.integrations.torch.adapter",
    "tenuto.integrations.torch.certificate",
    "tenuto.integrations.torch.data.iteration",
    "tenuto.integrations.torch.rng",
    "tenuto.integrations.torch.state_dicts",
    "tenuto.ranks.kv.shared_files",
    "tenuto.ranks.kv.torch_store",
    "support.forked_from",
]


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(LOADED)
    return found


def job(program: Path, ranks: int, *words: str, log: Path, timeout: float) -> list[int]:
    """Runs a program as `ranks` ranks of a job of torch.distributed, each with the variables that torchrun sets; rank 0
    serves the store. Where one fails the others are killed. The exit status of each; a signal's number is negative."""
    about = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    about |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    started = []
    for rank in range(ranks):
        here = {**about, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(context().Process(target=_program, args=(str(program), words, here, f"{log}.{rank}")))
        started[-1].start()
    try:
        waiting, until = {one.sentinel: one for one in started}, time.monotonic() + timeout
        while waiting and not any(one.exitcode for one in started):
            ended = wait(list(waiting), max(until - time.monotonic(), 0.0))
            assert ended, f"{program.name} hangs: {told(log, ranks)}"
            for sentinel in ended:
                waiting.pop(sentinel).join()  # type: ignore[arg-type]
        return [0 if one.exitcode is None else one.exitcode for one in started]
    finally:
        for one in started:
            one.kill()
            one.join()


def told(log: Path, ranks: int) -> str:
    """What the ranks of a job have printed."""
    return "\n".join(f"rank {rank}: {Path(f'{log}.{rank}').read_text()[-4000:]}" for rank in range(ranks))


def _program(program: str, words: tuple[str, ...], about: Mapping[str, str], log: str) -> None:
    """As an interpreter that was started with this program: what it leaves by, and what runs at its exit."""
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update(about)
    sys.argv = [program, *words]
    sys.path[:0] = [str(Path(program).parent), str(Path(__file__).parents[1])]
    import torch

    torch.set_num_threads(1)
    status = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
