"""P3 with several ranks: training time lost to a save, while all ranks together keep all cores busy.

    python benchmarks/ranks_compute.py --ranks 2 --gib 1

As `p3_overhead.py`: blocks of training steps without a save and with one by each, in turning order; a block ends when
its steps are done and its save is committed, on the slowest rank. Targets: at most twice one memcpy of the state (all
ranks copy their share at the same time), eager and fenced; at least four times less than dcp.async_save in thread mode.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from harness import Contender, arguments, compare, left_out
from p3_overhead import EAGER, OF_RANKS, ROUNDS, Contenders, block, judge, options_of_training, steps_for
from ranks_job import Job, Sharded, dcp_async, memcpy, ranks_option, removed, run


def options_here(parser: argparse.ArgumentParser) -> None:
    options_of_training(parser, OF_RANKS)
    ranks_option(parser)


class Together(Contenders):
    """The same blocks, on all ranks at once."""

    def __init__(self, job: Job, training: Sharded, steps: int, place: Path) -> None:
        super().__init__(training, steps, place)
        self._job, self._sharded = job, training

    def none(self) -> Contender:
        return self._together(super().none())

    def ours(self, capture: Literal["eager", "fenced"]) -> Contender:
        return self._together(super().ours(capture))

    def dcp(self, mode: str) -> Contender:
        job, where = self._job, self._place / mode
        save: Callable[[], Callable[[], object]] = dcp_async(job, self._sharded, where, mode)
        held = job.contender("", lambda: block(self._training, self._steps, save))

        def measure() -> float:
            job.emptied(where)
            seconds = held.measure()
            removed(job, where)
            gc.collect()  # what it staged hangs in reference cycles
            return seconds

        return Contender(f"dcp.async_save, {mode}", measure)

    def _together(self, one: Contender) -> Contender:
        return self._job.contender(one.name, one.measure)


def measured(job: Job, options: argparse.Namespace) -> None:
    training = Sharded(options.gib, options.tokens)
    tensors = training.tensors()
    options.leaves = len(tensors)
    with job.workplace(options) as place:
        steps = job.first_says(steps_for(training, options.block_s))
        blocks = Together(job, training, steps, place)
        saving = [blocks.ours("eager")]
        saving += [blocks.ours("fenced")] if "fenced" in options.beside else []
        saving += [blocks.dcp(mode) for mode in ("thread", "process") if mode in options.beside]
        contenders = [blocks.none(), memcpy(job, tensors), *saving]
        seconds = compare(contenders, rounds=options.rounds or ROUNDS, own=EAGER, note=job.note)
        blocks.close()
        result = job.result("compute", seconds, tensors)
        result.speeds = False
        result.facts["steps_in_a_block"] = steps
        result.facts["saves_in_a_block"] = 1
        result.facts["tokens"] = options.tokens
        left_out(result, options, OF_RANKS)
        judge(result, saving)
        job.report(result, options, place)


if __name__ == "__main__":
    run(measured, arguments(__doc__ or "", add=options_here))
