"""What a run costs that keeps 10, 1,000 and 20,000 small checkpoints: looking, claiming, saving and closing.

Everything that a run keeps was saved by a process that has ended. Each round opens it anew: what `latest` means, a
step far down, all checkpoints, a page of `tenuto ls` as a command; then a Checkpointer claims the run, saves a step,
and closes. Times are the middle of the rounds; the calls of the store are counted once, and do not vary.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from grown_repository import grow
from harness import Result, Target, arguments, median_interval, note, report, workplace

import tenuto
from tenuto import every, keep
from tenuto.cli.commands.ls import PAGE
from tenuto.cli.views.run_listing import listing
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

NUMBERS = (10, 1_000, 20_000)
ROUNDS = 7
CALLS = ("put_if_absent", "get", "open", "stat", "children", "walk", "delete", "settle")
PAGE_MS, CLAIM_MS = 1_000.0, 200.0


class Counting:
    """A store that counts its calls, those of retention too."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in CALLS:
            return found

        def call(*args: Any, **named: Any) -> Any:
            with self._lock:
                self.calls += 1
            return found(*args, **named)

        return call


def make(where: Path, number: int) -> None:
    with trained(open_store(where)) as ckpt:
        for _ in ckpt.steps(1):
            pass

    def put(name: str, data: bytes) -> None:
        path = where / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)

    grow(Repo.open(open_store(where)), CheckpointId("main", 1, 1), range(2, number + 1), put)


def trained(store: Any) -> tenuto.Checkpointer:
    return tenuto.Checkpointer(store, {"w": np.zeros(4, np.float32)}, save=every(steps=1), keep=keep.all())


def cpu_seconds() -> float:
    """Processor time of this process and of those that it has waited for: other work on the machine takes no part."""
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


class Measured:
    def __init__(
        self, result: Result, store: Counting, number: int, counts: dict[str, int], processor: dict[str, list[float]]
    ) -> None:
        self.result, self.store, self.number, self.counts, self.processor = result, store, number, counts, processor

    def time(self, what: str, work: Callable[[], Any]) -> Any:
        name, calls, begun, processor = f"{what}, {self.number:,}", self.store.calls, time.perf_counter(), cpu_seconds()
        found = work()
        self.result.seconds.setdefault(name, []).append(time.perf_counter() - begun)
        self.processor.setdefault(name, []).append(cpu_seconds() - processor)
        self.counts[name] = self.store.calls - calls
        return found


def measure(
    where: Path, number: int, result: Result, counts: dict[str, int], processor: dict[str, list[float]]
) -> None:
    store = Counting(open_store(where))
    one = Measured(result, store, number, counts, processor)
    repository = tenuto.Repository(store)
    assert one.time("latest", repository.latest) is not None
    one.time("find step 2", lambda: repository.find(step=2))
    assert len(one.time("checkpoints()", repository.checkpoints)) >= number
    one.time("a page of ls", lambda: listing(repository.repo, None, PAGE))
    command = [sys.executable, "-c", "from tenuto.cli import main; main()", "ls", str(where)]
    one.time("tenuto ls, the process", lambda: subprocess.run(command, check=True, capture_output=True))
    ckpt = trained(store)
    steps = one.time("claim", lambda: ckpt.steps(10**9))
    next(steps)

    def save() -> None:
        next(steps)  # completes the step, and saves it
        ckpt.wait()

    save()
    one.time("save", save)
    save()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step that is open is left incomplete
        one.time("close", ckpt.close)
    for attempt in set((where / "runs" / "main").iterdir()) - {where / "runs" / "main" / "a0001"}:
        shutil.rmtree(attempt)  # the next round finds the same run again, its newest attempt the large one


def main() -> None:
    options = arguments(__doc__ or "", gib=0.0, leaves=1, rounds=ROUNDS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = Result("many_checkpoints", {}, 16, speeds=False)
    counts: dict[str, int] = {}
    processor: dict[str, list[float]] = {}
    with workplace(options) as place:
        for number in NUMBERS:
            make(place / str(number), number)
            note(f"made {number:,} checkpoints")
        for turn in range(options.rounds):
            for number in NUMBERS:
                measure(place / str(number), number, result, counts, processor)
            note(f"round {turn + 1} of {options.rounds}")
        result.facts["calls of the store"] = counts
        result.facts["processor seconds, median"] = {name: float(np.median(found)) for name, found in processor.items()}
        most = f"{NUMBERS[-1]:,}"
        for what, limit in (("a page of ls", PAGE_MS), ("claim", CLAIM_MS), ("close", CLAIM_MS)):
            found = median_interval([one * 1e3 for one in result.seconds[f"{what}, {most}"]])
            result.judge_value(f"{what}, {most} <= {limit:g} ms", found, at_most=limit, unit="ms")
        for what in ("latest", "find step 2", "a page of ls", "claim", "save", "close"):
            few, many = counts[f"{what}, {NUMBERS[0]:,}"], counts[f"{what}, {most}"]
            ratio = many / max(few, 1)
            text = f"calls of the store for {what}, {most} <= 2 times those with {NUMBERS[0]}"
            result.judge_value(text, (ratio, ratio, ratio), at_most=2.0)
        for what in ("latest", "claim", "save", "close"):
            text = f"time of {what}, {most} <= 2 times that with {NUMBERS[0]}"
            result.judge(Target(text, f"{what}, {most}", f"{what}, {NUMBERS[0]}", at_most=2.0, of_medians=True))
        report(result, options, place)


if __name__ == "__main__":
    main()
