"""P3: compute lost per save, while a training keeps all cores busy.

    python benchmarks/p3_overhead.py --gib 1

A block is a fixed number of steps of one and the same training, with one save after its first step, and it ends when
the steps are done and that save is committed. Blocks without a save and with one by each contender follow each other
in turning order; what a save costs is its block's time less that of the block without one in the same round.
Fenced saves come from a Checkpointer of their own, which has been through its probation before anything counts.
Target: at most twice one memcpy of the state, eager and fenced; at least four times less than dcp.async_save in thread
mode. A writing process in place of the writing thread is measured by the least that it would have to do.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import peers
import raw
import torch
from harness import (
    GIB,
    Contender,
    Result,
    Target,
    arguments,
    choosing,
    compare,
    empty_directory,
    left_out,
    median_interval,
    note,
    report,
    workplace,
)
from writing_process import WritingProcess

import tenuto
from tenuto.state.update_barrier import PROBATION

WIDTH = 1024
HEADS = 16
LAYER_BYTES = 3 * 4 * 12 * WIDTH * WIDTH
"""Of one transformer layer's weights (four of attention, eight of its feed-forward part) and AdamW's two moments."""
ROUNDS = 12
NONE = "no save"
EAGER = "tenuto save()"
FENCED = "tenuto save(), fenced"
WRITER = "copy, then a writing process"
OF_RANKS = ("fenced", "thread", "process")
BESIDE = (*OF_RANKS, "writer")


def options_of_training(parser: argparse.ArgumentParser, beside: Sequence[str] = BESIDE) -> None:
    parser.add_argument("--block-s", type=float, default=3.0, help="seconds that a block without a save takes")
    parser.add_argument("--tokens", type=int, default=128, help="of a batch (default 128)")
    choosing(parser, beside)


class Training:
    """A transformer's encoder, AdamW, one random batch: matrix products on all of torch's threads.

    Normalised and residual, as real ones are: in a deep stack of bare matrices the numbers fade into denormals, on
    which a processor is a hundred times slower.
    """

    def __init__(self, gib: float, tokens: int, passes: int = 1) -> None:
        """passes: forward and backward so many times for one update, with gradients added up."""
        torch.manual_seed(0)
        layers = max(round(gib * GIB / LAYER_BYTES), 1)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.prepare(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.passes = passes
        self.feed(tokens)
        self.step()  # the optimizer's state is born here

    def prepare(self, model: torch.nn.TransformerEncoder) -> None:
        """Before there is an optimizer for its parameters."""

    def feed(self, tokens: int) -> None:
        """From now on a batch has so many tokens, an even number."""
        self.data = torch.randn(2, tokens // 2, WIDTH)

    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            self.forward_and_backward()
        self.optimizer.step()

    def forward_and_backward(self) -> None:
        torch.nn.functional.mse_loss(self.model(self.data), self.data).backward()

    def tensors(self) -> list[torch.Tensor]:
        moments = [one for state in self.optimizer.state.values() for one in state.values() if one.dim()]
        return [*(one.detach() for one in self.model.parameters()), *moments]

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def dictionaries(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def steps_for(training: Training, seconds: float) -> int:
    for _ in range(3):
        training.step()
    begun = time.perf_counter()
    for _ in range(10):
        training.step()
    return max(round(seconds / ((time.perf_counter() - begun) / 10)), 3)


def block(training: Training, steps: int, save: Callable[[], Callable[[], object]] | None) -> float:
    """Seconds of `steps` steps, a save begun after the first of them, and whatever waiting for it is left then."""
    begun = time.perf_counter()
    training.step()
    finish = save() if save is not None else None
    for _ in range(steps - 1):
        training.step()
    if finish is not None:
        finish()
    return time.perf_counter() - begun


def ours(checkpointer: tenuto.Checkpointer) -> Callable[[], Callable[[], object]]:
    def save() -> Callable[[], object]:
        checkpointer.step_done()
        return checkpointer.save().wait

    return save


def dcp(training: Training, where: Path, mode: str) -> Callable[[], Callable[[], object]]:
    def save() -> Callable[[], object]:
        return peers.dcp_async_begin(training.dictionaries(), where, mode)

    return save


class Contenders:
    """Blocks of one training, with saves by each."""

    def __init__(self, training: Training, steps: int, place: Path) -> None:
        self._training, self._steps, self._place = training, steps, place
        self._checkpointers: list[tenuto.Checkpointer] = []
        self._processes: list[WritingProcess] = []

    def none(self) -> Contender:
        return Contender(NONE, lambda: block(self._training, self._steps, None))

    def ours(self, capture: Literal["eager", "fenced"]) -> Contender:
        training = self._training
        checkpointer = tenuto.Checkpointer(
            self._place / capture, training.objects(), keep=tenuto.keep.latest(1), capture=capture
        )
        self._checkpointers.append(checkpointer)
        for _ in range(PROBATION if capture == "fenced" else 0):
            training.step()
            checkpointer.step_done()
            checkpointer.save().wait()
        training.step()  # what was watched at the last of them is compared before this update

        def measure() -> float:
            seconds = block(training, self._steps, ours(checkpointer))
            checkpointer.wait()  # what is unlinked beside training would run into the next block
            return seconds

        return Contender(FENCED if capture == "fenced" else EAGER, measure)

    def writer(self) -> Contender:
        """The bound for a writing process, and no contender of ours or of a peer: it commits nothing."""
        process = WritingProcess(self._training.tensors(), self._place / "written")
        self._processes.append(process)
        return Contender(WRITER, lambda: block(self._training, self._steps, process.begin))

    def dcp(self, mode: str) -> Contender:
        def measure() -> float:
            where = empty_directory(self._place / mode)
            seconds = block(self._training, self._steps, dcp(self._training, where, mode))
            shutil.rmtree(where)
            gc.collect()  # what it staged hangs in reference cycles
            return seconds

        return Contender(f"dcp.async_save, {mode}", measure)

    def close(self) -> None:
        for checkpointer in self._checkpointers:
            checkpointer.close()
        for process in self._processes:
            process.close()


def judge(result: Result, contenders: list[Contender]) -> None:
    """What each save has cost; of ours, in memcpys, and beside the peer."""
    seconds, lost = result.seconds, {}
    for one in contenders:
        lost[one.name] = f"lost to a {one.name}"
        pairs = zip(seconds[one.name], seconds[NONE], strict=True)
        seconds[lost[one.name]] = [block_s - without for block_s, without in pairs]
    result.facts["lost_s"] = {
        name: [round(part, 4) for part in median_interval(seconds[name])] for name in lost.values()
    }
    for name, words in ((EAGER, "a save"), (FENCED, "a fenced save")):
        if name in lost:
            text = f"memcpys lost to {words} <= 2.0"
            result.judge(Target(text, lost[name], "memcpy", at_most=2.0, of_medians=True))
    thread = lost.get("dcp.async_save, thread")
    if thread is not None:
        text = "share of what dcp.async_save, thread, loses <= 0.25"
        result.judge(Target(text, lost[EAGER], thread, at_most=0.25, of_medians=True))


def main() -> None:
    options = arguments(__doc__ or "", add=options_of_training)
    training = Training(options.gib, options.tokens)
    with workplace(options) as place:
        peers.start_group()
        steps = steps_for(training, options.block_s)
        tensors = training.tensors()
        options.leaves = len(tensors)
        blocks = Contenders(training, steps, place)
        saving = [blocks.ours("eager")]
        saving += [blocks.ours("fenced")] if "fenced" in options.beside else []
        saving += [blocks.writer()] if "writer" in options.beside else []
        saving += [blocks.dcp(mode) for mode in ("thread", "process") if mode in options.beside]
        contenders = [blocks.none(), Contender("memcpy", raw.Memcpy(tensors)), *saving]
        seconds = compare(contenders, rounds=options.rounds or ROUNDS, own=EAGER, note=note)
        blocks.close()
        result = Result("p3_overhead", seconds, sum(one.nbytes for one in tensors), sized=True, speeds=False)
        result.facts["steps_in_a_block"] = steps
        result.facts["saves_in_a_block"] = 1
        result.facts["tokens"] = options.tokens
        left_out(result, options, BESIDE)
        judge(result, saving)
        report(result, options, place)
        peers.end_group()


if __name__ == "__main__":
    main()
