"""Four processes of one group that stay alive: each pair of layouts is saved and restored by as many as it needs."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from campaigns.layouts.bugs import seeded
from campaigns.layouts.meshes import Meshes
from campaigns.layouts.states import Pair, make, wanted
from campaigns.layouts.truth import differences
from tenuto.policy import every
from tenuto.ranks.detection import Solo
from tenuto.ranks.kv.shared_files import SharedFiles
from tenuto.training.checkpointer import Checkpointer

PROCESSES: Final = 4
LOADED: Final = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "tenuto.training.checkpointer",
]
"""Imported once, by a server that runs none of it and that the processes are forked from."""
TIMEOUT_S: Final = 60.0
ANSWER_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked of every process: to save side 0 (`phase` 0), to restore that as side 1 and save it (1), to restore
    that as side 0 again and save it (2). `bug`: what is broken in the product meanwhile."""

    pair: Pair
    phase: int
    place: str
    bug: str = ""


@dataclass
class Processes:
    """As a context manager it ends what it has started."""

    directory: Path
    running: list[tuple[Any, Any]] = field(default_factory=list)

    def __enter__(self) -> Processes:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)
        self.directory.mkdir(parents=True, exist_ok=True)
        store = self.directory / f"store-{len(list(self.directory.iterdir()))}"
        for rank in range(PROCESSES):
            here, there = context.Pipe()
            process = context.Process(target=_live, args=(rank, str(store), there), daemon=True)
            process.start()
            there.close()
            self.running.append((process, here))
        self._answers("nothing")
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self.running:
            pipe.close()
            process.join(1)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        self.running.clear()

    def restart(self) -> None:
        """After a fault processes may wait for each other: they are given up."""
        self.__exit__()
        self.__enter__()

    def do(self, task: Task) -> list[str]:
        """What was not as it has to be, by process."""
        for _, pipe in self.running:
            pipe.send(task)
        return self._answers(f"phase {task.phase} of pair {task.pair.number}")

    def _answers(self, what: str) -> list[str]:
        found: list[str] = []
        until = time.monotonic() + ANSWER_S
        for rank, (_, pipe) in enumerate(self.running):
            try:
                if not pipe.poll(max(until - time.monotonic(), 0.01)):
                    found.append(f"rank {rank} does not answer: {what}")
                    continue
                found += [f"rank {rank}: {one}" for one in pipe.recv()]
            except EOFError:
                found.append(f"rank {rank} has died: {what}")
        return found


def _live(rank: int, store: str, pipe: Any) -> None:
    """What each process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    group: Any = dist
    files = group.FileStore(store, PROCESSES)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=PROCESSES, timeout=timeout)
    meshes = Meshes()
    pipe.send([])
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            found = _done(task, rank, meshes)
        except BaseException:  # noqa: BLE001 - told to the parent, whatever it is
            found = [traceback.format_exc()]
        pipe.send(found)


def _done(task: Task, rank: int, meshes: Meshes) -> Sequence[str]:
    for key in task.pair.meshes():
        meshes.get(*key)
    side = task.phase % 2
    if rank >= task.pair.worlds[side]:
        return []
    with seeded(task.bug):
        truth = make(task.pair, side, task.pair.truth, rank, meshes)
        target = truth
        if task.phase:
            target = make(task.pair, side, task.pair.other, rank, meshes, fresh=task.pair.fresh)
        return _saved(task, side, rank, truth, target)


def _saved(task: Task, side: int, rank: int, truth: Any, target: Any) -> list[str]:
    world = task.pair.worlds[side]
    place = Path(task.place)
    ranks: Any = SharedFiles(place / f"ranks-{task.phase}", rank=rank, world_size=world) if world > 1 else Solo()
    before = {path: value.clone() if hasattr(value, "clone") else value.copy() for path, value in target.read().items()}
    told = []
    with Checkpointer(
        place / "checkpoints",
        target.state,
        save=every(steps=1),
        ranks=ranks,
        ranks_timeout=TIMEOUT_S,
        on_error="raise",
    ) as ckpt:
        if task.phase:
            restored = ckpt.restore()
            if restored is None or restored.step != task.phase:
                told.append(f"{restored} was restored, and not step {task.phase}")
            told += differences(target.read(), wanted(task.pair, side, rank, truth.read(), before))
        ckpt.step_done()
        ckpt.wait(TIMEOUT_S)
    return told
