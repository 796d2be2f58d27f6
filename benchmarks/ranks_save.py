"""P1, P2 and P4 with several ranks: how long a save holds training, and how long a durable one takes.

    python benchmarks/ranks_save.py --what stall --ranks 2 --gib 1
    python benchmarks/ranks_save.py --what fenced --ranks 2 --gib 1
    python benchmarks/ranks_save.py --what durable --ranks 2 --gib 1

Each figure is the slowest rank's, and so are one copy and one raw direct write: all ranks copy, or write, their share
at the same time. A durable save has every rank's bytes flushed and is committed. Beside it is measured what writing by
all ranks gains over writing by one of them, as a centralised save does: for a state of the same size of which each rank
has all, since a part that only one rank has only that rank can write. Targets: those of P1, P2 and P4; at least 1.5
times faster than `dcp.save`.
"""

from __future__ import annotations

import argparse
import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peers
import raw
from harness import Contender, Target, arguments, choosing, compare, left_out, timed
from p2_fenced import Ours, feed_enough
from ranks_job import KINDS, Job, Sharded, memcpy, ranks_option, removed, run

import tenuto
from tenuto.sharding.write_plan import Strategy

OURS = {"stall": "tenuto save()", "fenced": "tenuto save(), fenced", "durable": "tenuto save(wait=True)"}
BY_ALL, BY_ONE = "tenuto save(), replicas, by all ranks", "tenuto save(), all by one rank"
ROUNDS = 30
PER_LEAF_S = 5e-6


def options_here(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", choices=sorted(OURS), default="stall", help="what is measured (default stall)")
    parser.add_argument("--tokens", type=int, help="fenced: of a batch (default: as many as needed, measured)")
    parser.add_argument(
        "--one",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="durable: also a state that every rank has all of, written by all and by one (the size more on each)",
    )
    ranks_option(parser)
    choosing(parser, KINDS)


class Saves:
    """What is measured: saves of one training by each, every one on all ranks."""

    def __init__(self, job: Job, training: Sharded, place: Path) -> None:
        self.job, self.training, self.place = job, training, place
        self.tensors = training.tensors()

    def loop(
        self,
        name: str,
        *,
        wait: bool,
        where: str = "ours",
        state: dict[str, Any] | None = None,
        writers: Strategy = "balanced",
    ) -> tuple[tenuto.Checkpointer, Contender]:
        """`state`: where it is not the training's."""
        state = state or self.training.objects()
        checkpointer = tenuto.Checkpointer(self.place / where, state, keep=tenuto.keep.latest(1), writers=writers)

        def measure() -> float:
            checkpointer.step_done()
            seconds = timed(lambda: checkpointer.save(wait=wait))
            checkpointer.wait()  # what is written, and unlinked, beside training would run into the next contender
            return seconds

        return checkpointer, self.job.contender(name, measure)

    def dcp_stall(self, kind: str) -> Contender:
        state, where = self.training.dictionaries(), self.place / kind
        held = self.job.contender("", lambda: peers.dcp_async_stall(state, where, kind, self.job.beside))

        def measure() -> float:
            self.job.emptied(where)
            seconds = held.measure()
            removed(self.job, where)
            gc.collect()  # what it staged hangs in reference cycles
            return seconds

        return Contender(f"dcp.async_save, {kind}", measure)

    def dcp_durable(self) -> Contender:
        state, where = self.training.dictionaries(), self.place / "dcp"
        saved = self.job.contender("", lambda: peers.dcp_save(state, where))

        def measure() -> float:
            self.job.emptied(where)
            seconds = saved.measure()
            removed(self.job, where)
            return seconds

        return Contender("dcp.save", measure)

    def raw_write(self) -> tuple[int, Contender]:
        data = raw.aligned(sum(one.nbytes for one in self.tensors))
        path = self.place / f"raw-{self.job.rank}"
        piece = self.job.first_says(raw.fastest_piece("write", path, data) if self.job.rank == 0 else None)
        written = self.job.contender("", lambda: raw.write(path, data, piece))

        def measure() -> float:
            seconds = written.measure()
            path.unlink()
            return seconds

        return piece, Contender("raw O_DIRECT write", measure)


def stall(saves: Saves, options: argparse.Namespace) -> None:
    job = saves.job
    checkpointer, own = saves.loop(OURS["stall"], wait=False)
    beside = [saves.dcp_stall(kind) for kind in KINDS if kind in options.beside]
    over = raw.MemcpyOverWritten(saves.tensors, saves.place / f"raw-{job.rank}")
    contenders = [memcpy(job, saves.tensors), job.contender(over.name, over), own, *beside]
    seconds = compare(contenders, rounds=options.rounds or ROUNDS, own=own.name, note=job.note)
    checkpointer.close()
    result = job.result("stall", seconds, saves.tensors)
    left_out(result, options, KINDS)
    text = "stall <= 1.05 memcpy + 5 us a leaf"
    result.judge(Target(text, own.name, "memcpy", at_most=1.05, allowance_s=PER_LEAF_S * options.leaves))
    job.report(result, options, saves.place)


def fenced(saves: Saves, options: argparse.Namespace) -> None:
    job, training = saves.job, saves.training
    copy = raw.Memcpy(saves.tensors)
    tokens = options.tokens or feed_enough(training, copy, job.slowest)
    fence, eager = (Ours(training, saves.place / capture, capture) for capture in ("fenced", "eager"))
    own, plain = job.contender(OURS["fenced"], fence), job.contender("tenuto save(), eager", eager)
    beside = [saves.dcp_stall(kind) for kind in KINDS if kind in options.beside]
    contenders = [job.contender("memcpy", copy), own, plain, *beside]
    seconds = compare(contenders, rounds=options.rounds or ROUNDS, own=own.name, note=job.note)
    fence.checkpointer.close()
    eager.checkpointer.close()
    result = job.result("fenced", seconds, saves.tensors)
    between = job.slowest(float(np.median(fence.between_s)))
    memcpys = between / float(np.median(seconds["memcpy"]))
    result.facts["tokens"] = tokens
    result.facts["forward_and_backward_memcpys"] = round(memcpys, 2)
    result.facts["fence_wait_ms"] = round(job.slowest(float(np.median(fence.fence_s))) * 1e3, 3)
    left_out(result, options, KINDS)
    text = "fenced stall <= 0.05 memcpy + 5 us a leaf"
    result.judge(Target(text, own.name, "memcpy", at_most=0.05, allowance_s=PER_LEAF_S * options.leaves))
    job.report(result, options, saves.place)


def durable(saves: Saves, options: argparse.Namespace) -> None:
    job = saves.job
    piece, written = saves.raw_write()
    checkpointer, own = saves.loop(OURS["durable"], wait=True)
    loops = [(checkpointer, own)]
    if options.one:
        state = saves.training.replicas()
        loops.append(saves.loop(BY_ALL, wait=True, where="all", state=state))
        loops.append(saves.loop(BY_ONE, wait=True, where="one", state=state, writers="one"))
    contenders = [written, *(one for _, one in loops), saves.dcp_durable()]
    seconds = compare(contenders, rounds=options.rounds or ROUNDS, own=own.name, note=job.note)
    for each, _ in loops:
        each.close()
    result = job.result("durable", seconds, saves.tensors)
    result.facts["raw_piece_mib"] = piece >> 20
    if options.one:
        result.facts["by_one_rank_over_by_all"] = [round(one, 3) for one in result.ratio(BY_ONE, BY_ALL)]
    text = "share of the raw direct write's speed >= 0.90"
    result.judge(Target(text, "raw O_DIRECT write", own.name, at_least=0.90))
    result.judge(Target("times faster than dcp.save >= 1.5", "dcp.save", own.name, at_least=1.5))
    job.report(result, options, saves.place)


def measured(job: Job, options: argparse.Namespace) -> None:
    training = Sharded(options.gib, options.tokens or 32)
    with job.workplace(options) as place:
        saves = Saves(job, training, place)
        options.leaves = len(saves.tensors)
        {"stall": stall, "fenced": fenced, "durable": durable}[options.what](saves, options)
        job.alone(lambda: shutil.rmtree(place, ignore_errors=True))


if __name__ == "__main__":
    run(measured, arguments(__doc__ or "", add=options_here))
