"""P3, day to day: every step into memory and every tenth to the disk, while a training keeps all cores busy.

    python benchmarks/p3_everyday.py --gib 1

A block is ten steps of one and the same training, or as many tens as fit into `--block-s`, with a save to the disk
after the first step of each ten. It ends when its steps are done and what was taken in it is committed and sealed.
Before and behind each block with saving lies one without, in turning order: what saving costs is its block's time over
the mean of these two, less one, for a machine whose speed drifts does so within a round as well. dcp.async_save, in
thread mode, saves every tenth step only.
A step adds up the gradients of as many batches as make it last at least a hundred memcpys of the state.
Target: at most 3 % of wall time, where a memcpy of the state is at most 1 % of a step; where it is more the target says
nothing, and the result says so.
"""

from __future__ import annotations

import argparse
import gc
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peers
import raw
from harness import (
    Contender,
    Result,
    arguments,
    choosing,
    compare,
    empty_directory,
    left_out,
    note,
    report,
    timed,
    wait_for_seal,
    workplace,
)
from p3_overhead import Training

import tenuto
from tenuto import events
from tenuto.state.update_barrier import PROBATION

TEN = 10
ROUNDS = 7
LARGEST_SHARE = 0.01
"""Of a step, that a memcpy may take."""
AIM_SHARE = 0.8 * LARGEST_SHARE
"""What a step is made for: the measured share comes out a little different in every run."""
LARGEST_OVERHEAD = 0.03
NONE = "no saving"
WAYS = {"eager": "tenuto, memory and disk", "fenced": "tenuto, memory and disk, fenced"}
PEER = "dcp.async_save, thread, disk"
BESIDE = ("eager", "fenced", "thread")


def options_of_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--block-s", type=float, default=20.0, help="seconds that a block takes; ten steps at least")
    parser.add_argument("--tokens", type=int, default=512, help="of a batch (default %(default)d)")
    parser.add_argument("--passes", type=int, help="batches in a step (default: as many as the target needs, measured)")
    choosing(parser, BESIDE)


def last_long_enough(training: Training, memcpy: raw.Memcpy) -> None:
    """Gives a step so many batches that a memcpy is a small enough part of it."""
    copies, passes = [], []
    training.forward_and_backward()
    for _ in range(5):  # a memcpy of what training has just pushed out of the caches, as after a step
        passes.append(timed(training.forward_and_backward))
        copies.append(memcpy())
    step_s = float(np.median(copies)) / AIM_SHARE
    training.passes = max(math.ceil((step_s - timed(training.optimizer.step)) / float(np.median(passes))), 1)


def block(
    training: Training, steps: int, stepped: Callable[[int], object] | None, finish: Callable[[], object] | None
) -> float:
    """Seconds of `steps` steps, each followed by what `stepped` does after it, and of what `finish` waits for."""
    begun = time.perf_counter()
    for number in range(steps):
        training.step()
        if stepped is not None:
            stepped(number)
    if finish is not None:
        finish()
    return time.perf_counter() - begun


class Stalls:
    """Told how long training was held, by the events of one Checkpointer."""

    def __init__(self) -> None:
        self.disk_s: list[float] = []
        self.memory_s: list[float] = []

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.Captured):
            self.disk_s.append(event.stall_s)
        elif isinstance(event, events.SavedToMemory):
            self.memory_s.append(event.stall_s)


class Ours:
    """Blocks with every step in memory and every tenth on the disk."""

    def __init__(self, training: Training, steps: int, where: Path, capture: Literal["eager", "fenced"]) -> None:
        self._training, self._steps = training, steps
        self._stalls = Stalls()
        self.checkpointer = tenuto.Checkpointer(
            where,
            training.objects(),
            save=tenuto.every(steps=TEN),
            memory=tenuto.every(steps=1),
            keep=tenuto.keep.latest(1),
            capture=capture,
            sinks=[self._stalls],
        )
        for number in range(TEN - 1):  # so that the first step of a block is the tenth
            training.optimizer.step()
            self.checkpointer.step_done()
            if capture == "fenced" and number < PROBATION:
                self.checkpointer.save().wait()
        self._finish()
        self._stalls.disk_s.clear()
        self._stalls.memory_s.clear()
        self._before = self.checkpointer.stats
        self._blocks_s: list[float] = []

    def __call__(self) -> float:
        took = block(self._training, self._steps, lambda _: self.checkpointer.step_done(), self._finish)
        self._blocks_s.append(took)
        return took

    def _finish(self) -> None:
        self.checkpointer.wait()
        wait_for_seal(self.checkpointer)

    def facts(self) -> dict[str, Any]:
        """The warming round's too."""
        now, before, stalls = self.checkpointer.stats, self._before, self._stalls
        steps = len(self._blocks_s) * self._steps
        assert now.failed == 0, "a save failed: this is no measurement"
        assert now.kept_in_memory > before.kept_in_memory, "nothing was kept in memory: this is no measurement"
        return {
            "steps": steps,
            "on_disk": now.committed - before.committed,
            "kept_in_memory": now.kept_in_memory - before.kept_in_memory,
            "skipped": now.skipped - before.skipped,
            "skipped_in_memory": now.skipped_in_memory - before.skipped_in_memory,
            "delayed": now.delayed - before.delayed,
            "delayed_in_memory": now.delayed_in_memory - before.delayed_in_memory,
            "held_share": round((now.held_s - before.held_s) / sum(self._blocks_s), 5),
            "stall_disk_ms": round(float(np.median(stalls.disk_s)) * 1e3, 2),
            "stall_memory_ms": round(float(np.median(stalls.memory_s)) * 1e3, 2),
            "fence_wait_ms": round(now.usual.fence_s * 1e3, 2) if now.usual is not None else None,
        }


def dcp(training: Training, steps: int, place: Path) -> Contender:
    def measure() -> float:
        where, pending = empty_directory(place / "dcp"), []

        def finish() -> None:
            if pending:
                pending.pop()()

        def stepped(number: int) -> None:
            if number % TEN == 0:
                finish()
                pending.append(peers.dcp_async_begin(training.dictionaries(), where / str(number), "thread"))

        seconds = block(training, steps, stepped, finish)
        shutil.rmtree(where)
        gc.collect()  # what it staged hangs in reference cycles
        return seconds

    return Contender(PEER, measure)


def between(saving: Sequence[Contender], none: Callable[[], float]) -> list[Contender]:
    """Each of `saving`, with a block without saving before it; behind the last the round begins anew."""
    found: list[Contender] = []
    for one in saving:
        found += [Contender(f"{NONE}, before {one.name}", none), one]
    return found


def beside(result: Result, saving: Sequence[Contender]) -> None:
    """The means of the blocks before and behind each with saving, and all of them together."""
    seconds = result.seconds
    before = [seconds.pop(f"{NONE}, before {one.name}") for one in saving]
    for one, own, behind in zip(saving, before, [*before[1:], before[0]], strict=True):
        seconds[_beside(one)] = [(first + last) / 2 for first, last in zip(own, behind, strict=True)]
    seconds[NONE] = [each for own in before for each in own]


def _beside(one: Contender) -> str:
    return f"{NONE}, beside {one.name}"


def judge(result: Result, saving: Sequence[Contender], steps: int) -> None:
    """What saving costs; judged where a memcpy is a small enough part of a step."""
    beside(result, saving)
    step_s = float(np.median(result.seconds[NONE])) / steps
    share = float(np.median(result.seconds["memcpy"])) / step_s
    result.facts["step_s"] = round(step_s, 4)
    result.facts["memcpy_share_of_a_step"] = round(share, 5)
    void = share > LARGEST_SHARE
    if void:
        result.facts["target"] = f"void: a memcpy is {share:.2%} of a step, and the target is for at most 1 %"
    result.facts["share_lost"] = {}
    for one in saving:
        found = tuple(part - 1 for part in result.ratio(one.name, _beside(one)))
        result.facts["share_lost"][one.name] = found[0]
        result.facts.setdefault("share_lost_interval", {})[one.name] = [round(part, 5) for part in found[1:]]
        if one.name != PEER and not void:
            text = f"{one.name}: share of wall time lost <= {LARGEST_OVERHEAD}"
            result.judge_value(text, (found[0], found[1], found[2]), at_most=LARGEST_OVERHEAD)


def main() -> None:
    options = arguments(__doc__ or "", add=options_of_training)
    training = Training(options.gib, options.tokens)
    tensors = training.tensors()
    options.leaves = len(tensors)
    with workplace(options) as place:
        peers.start_group()
        memcpy = raw.Memcpy(tensors)
        if options.passes is None:
            last_long_enough(training, memcpy)
        else:
            training.passes = options.passes
        tens = max(int(options.block_s / (TEN * timed(training.step))), 1)
        note(f"{training.passes} batches in a step, {tens} times {TEN} steps in a block")
        steps = tens * TEN
        ours = {WAYS[one]: Ours(training, steps, place / one, one) for one in BESIDE[:2] if one in options.beside}
        saving = [Contender(name, one) for name, one in ours.items()]
        saving += [dcp(training, steps, place)] if "thread" in options.beside else []
        blocks = between(saving, lambda: block(training, steps, None, None))
        rounds = options.rounds or ROUNDS
        seconds = compare([*blocks, Contender("memcpy", memcpy)], rounds=rounds, own=blocks[0].name, note=note)
        result = Result("p3_everyday", seconds, sum(one.nbytes for one in tensors), sized=True, speeds=False)
        result.facts |= {"tokens": options.tokens, "batches_in_a_step": training.passes, "steps_in_a_block": steps}
        result.facts |= {name: one.facts() for name, one in ours.items()}
        for one in ours.values():
            one.checkpointer.close()
        left_out(result, options, BESIDE)
        judge(result, saving, steps)
        report(result, options, place)
        peers.end_group()


if __name__ == "__main__":
    main()
