"""P2: how long a fenced save holds training, the wait at its fence included.

    python benchmarks/p2_fenced.py --gib 1

A round of ours is one step, `save()`, one forward and backward, one update. What counts is the time in `save()` and the
time that the update waits for the copy; how long forward and backward take, in memcpys, is a fact beside it.
Target: at most 5 % of one warm memcpy + 5 us a leaf, where forward and backward take at least three memcpys.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from pathlib import Path
from typing import Literal

import numpy as np
import peers
import raw
import torch
from harness import Contender, Result, Target, arguments, compare, empty_directory, note, report, timed, workplace
from p3_overhead import Training

import holdfast
from holdfast.state.ownership import PROBATION

ROUNDS = 30
LEAST_MEMCPYS = 3.0


def options_of_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=128, help="of a batch (default 128)")


class Ours:
    """Saves of one training, captured as `capture` says."""

    def __init__(self, training: Training, where: Path, capture: Literal["eager", "fenced"]) -> None:
        self._training = training
        self.between_s: list[float] = []
        """Forward and backward after each save."""
        self.fence_s: list[float] = []
        self.checkpointer = holdfast.Checkpointer(
            where,
            training.objects(),
            keep=holdfast.keep.latest(1),
            capture="fenced" if capture == "fenced" else "eager",
        )
        for _ in range(PROBATION):
            self()
        self.between_s.clear()
        self.fence_s.clear()

    def __call__(self) -> float:
        training, checkpointer = self._training, self.checkpointer
        training.step()
        checkpointer.step_done()
        begun = time.perf_counter()
        save = checkpointer.save()
        stall = time.perf_counter() - begun
        begun = time.perf_counter()
        training.optimizer.zero_grad()
        torch.nn.functional.mse_loss(training.model(training.data), training.data).backward()
        self.between_s.append(time.perf_counter() - begun)
        training.optimizer.step()
        self.fence_s.append(save.fence_s)
        save.wait()
        checkpointer.wait()  # what is unlinked beside training would run into the next contender
        return stall + save.fence_s


def dcp_stall(training: Training, place: Path, mode: str) -> Contender:
    def measure() -> float:
        training.step()
        stall = peers.dcp_async_stall(training.dictionaries(), empty_directory(place / mode), mode)
        shutil.rmtree(place / mode)
        gc.collect()  # what it staged hangs in reference cycles
        return stall

    return Contender(f"dcp.async_save, {mode}", measure)


def main() -> None:
    options = arguments(__doc__ or "", add=options_of_training)
    training = Training(options.gib, options.tokens)
    tensors = training.tensors()
    options.leaves = len(tensors)
    with workplace(options) as place:
        peers.start_group()
        fenced, eager = Ours(training, place / "fenced", "fenced"), Ours(training, place / "eager", "eager")
        torch_file = place / "state.pt"
        contenders = [
            Contender("memcpy", raw.Memcpy(tensors)),
            Contender("holdfast save(), fenced", fenced),
            Contender("holdfast save(), eager", eager),
            dcp_stall(training, place, "thread"),
            dcp_stall(training, place, "process"),
            Contender("torch.save", lambda: timed(lambda: peers.torch.save(training.dictionaries(), torch_file))),
        ]
        seconds = compare(contenders, rounds=options.rounds or ROUNDS, own="holdfast save(), fenced", note=note)
        for one in (fenced, eager):
            one.checkpointer.close()
        result = Result("p2_fenced", seconds, sum(one.nbytes for one in tensors), sized=True)
        memcpys = float(np.median(fenced.between_s) / np.median(seconds["memcpy"]))
        result.facts["tokens"] = options.tokens
        result.facts["forward_and_backward_memcpys"] = round(memcpys, 2)
        result.facts["fence_wait_ms"] = round(float(np.median(fenced.fence_s)) * 1e3, 3)
        result.facts["longest_fence_wait_ms"] = round(max(fenced.fence_s) * 1e3, 3)
        result.judge(
            Target(
                "fenced stall <= 0.05 memcpy + 5 us a leaf",
                "holdfast save(), fenced",
                "memcpy",
                at_most=0.05,
                allowance_s=5e-6 * options.leaves,
            )
        )
        text = "forward and backward in memcpys, without which the target says nothing"
        result.judge_value(text, (memcpys, memcpys, memcpys), at_least=LEAST_MEMCPYS)
        report(result, options, place)
        peers.end_group()


if __name__ == "__main__":
    main()
