"""P2: how long a fenced save holds training, the wait at its fence included.

    python benchmarks/p2_fenced.py --gib 1

A round of ours is one step, `save()`, one forward and backward, one update. What counts is the time in `save()` and the
time that the update waits for the copy; how long forward and backward take, in memcpys, is a fact beside it. Without
`--tokens` a batch has as few of them as make forward and backward take four memcpys, measured at the start.
Target: at most 5 % of one warm memcpy + 5 us a leaf, where forward and backward take at least three memcpys.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import peers
import raw
from harness import (
    Contender,
    Result,
    Target,
    arguments,
    choosing,
    compare,
    empty_directory,
    left_out,
    note,
    report,
    timed,
    workplace,
)
from p3_overhead import Training

import tenuto
from tenuto.state.update_barrier import PROBATION

ROUNDS = 30
LEAST_MEMCPYS = 3.0
AIM_MEMCPYS = 4.0
MOST_TOKENS = 8192
FENCED = "tenuto save(), fenced"
EAGER = "tenuto save(), eager"
BESIDE = ("eager", "thread", "process", "torch.save")


def options_of_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, help="of a batch (default: as many as the target needs, measured)")
    choosing(parser, BESIDE)


def feed_enough(
    training: Training, memcpy: Callable[[], float], agreed: Callable[[float], float] = lambda seconds: seconds
) -> int:
    """Gives the training a batch for which forward and backward take long enough; its tokens. `agreed`: of what this
    process has measured, what counts for all that train together."""
    copy_s = agreed(float(np.median([memcpy() for _ in range(5)])))
    tokens = 32
    while True:
        training.feed(tokens)
        training.forward_and_backward()
        took_s = agreed(float(np.median([timed(training.forward_and_backward) for _ in range(3)])))
        note(f"{tokens} tokens: forward and backward take {took_s / copy_s:.1f} memcpys")
        if took_s >= AIM_MEMCPYS * copy_s or tokens >= MOST_TOKENS:
            return tokens
        more = tokens * AIM_MEMCPYS * copy_s / took_s * 1.1
        tokens = max(tokens + 16, -(-int(more) // 16) * 16)


class Ours:
    """Saves of one training, captured as `capture` says."""

    def __init__(self, training: Training, where: Path, capture: Literal["eager", "fenced"]) -> None:
        self._training = training
        self.between_s: list[float] = []
        """Forward and backward after each save."""
        self.fence_s: list[float] = []
        self.checkpointer = tenuto.Checkpointer(
            where,
            training.objects(),
            keep=tenuto.keep.latest(1),
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
        training.forward_and_backward()
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


def contenders_of(training: Training, place: Path, memcpy: raw.Memcpy, beside: list[str]) -> list[Contender]:
    """Without ours of the fenced kind, which is there always."""
    found = [Contender("memcpy", memcpy)]
    found += [Contender(EAGER, Ours(training, place / "eager", "eager"))] if "eager" in beside else []
    found += [dcp_stall(training, place, mode) for mode in ("thread", "process") if mode in beside]
    if "torch.save" in beside:
        file = place / "state.pt"
        found.append(Contender("torch.save", lambda: timed(lambda: peers.torch.save(training.dictionaries(), file))))
    return found


def main() -> None:
    options = arguments(__doc__ or "", add=options_of_training)
    training = Training(options.gib, options.tokens or 32)
    tensors = training.tensors()
    options.leaves = len(tensors)
    with workplace(options) as place:
        peers.start_group()
        memcpy = raw.Memcpy(tensors)
        tokens = options.tokens or feed_enough(training, memcpy)
        fenced = Ours(training, place / "fenced", "fenced")
        others = contenders_of(training, place, memcpy, options.beside)
        contenders = [others[0], Contender(FENCED, fenced), *others[1:]]
        seconds = compare(contenders, rounds=options.rounds or ROUNDS, own=FENCED, note=note)
        for one in contenders:
            if isinstance(one.measure, Ours):
                one.measure.checkpointer.close()
        result = Result("p2_fenced", seconds, sum(one.nbytes for one in tensors), sized=True)
        memcpys = float(np.median(fenced.between_s) / np.median(seconds["memcpy"]))
        result.facts["tokens"] = tokens
        result.facts["forward_and_backward_memcpys"] = round(memcpys, 2)
        result.facts["fence_wait_ms"] = round(float(np.median(fenced.fence_s)) * 1e3, 3)
        result.facts["longest_fence_wait_ms"] = round(max(fenced.fence_s) * 1e3, 3)
        left_out(result, options, BESIDE)
        result.judge(
            Target(
                "fenced stall <= 0.05 memcpy + 5 us a leaf",
                FENCED,
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
