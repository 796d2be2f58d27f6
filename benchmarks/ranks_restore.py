"""P5 with several ranks: restoring into the training that is there, each rank what it holds, every byte verified.

    python benchmarks/ranks_restore.py --ranks 2 --gib 1 --cache hot
    python benchmarks/ranks_restore.py --ranks 2 --gib 1 --cache cold

`restore()` of a Checkpointer that is constructed outside the figure, beside `dcp.load`. One copy and one raw direct
read are of all ranks at the same time, each its share. Targets: hot at most 1.4 copies, cold at least 90 % of the raw
read; at least twice as fast as `dcp.load`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peers
import raw
import torch
from harness import Contender, Target, arguments, compare, timed
from ranks_job import Job, Restores, Sharded, memcpy, ranks_option, run

import tenuto

OWN = "tenuto restore()"
ROUNDS = 30
RAW_BYTES = 1 << 30


def options_here(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache", choices=["hot", "cold"], default="hot", help="whether the page cache holds the files"
    )
    ranks_option(parser)


class Reading(Restores):
    """Restores of one training, from files of each, all in the same condition of the cache."""

    def __init__(self, job: Job, training: Sharded, place: Path, *, cold: bool) -> None:
        super().__init__(job, cold=cold)
        self.training = training
        self.ours, self.dcp = place / "ours", place / "dcp"
        self.state = training.dictionaries()
        with tenuto.Checkpointer(self.ours, training.objects()) as checkpointer:
            checkpointer.step_done()
            checkpointer.save(wait=True)
        job.emptied(self.dcp)
        peers.dcp_save(self.state, self.dcp)
        self.pack = next(self.ours.rglob(f"rank-{job.rank:05d}.safetensors"))

    def own(self) -> Contender:
        """Each by a Checkpointer of its own: the ranks meet outside the figure."""

        def measure() -> float:
            checkpointer = tenuto.Checkpointer(self.ours, self.training.objects())
            seconds = self.contender(OWN, self.ours, lambda: timed(checkpointer.restore)).measure()
            checkpointer.close()
            return seconds

        return Contender(OWN, measure)

    def raw_read(self) -> tuple[int, Contender]:
        length = self.pack.stat().st_size // 4096 * 4096
        buffer = raw.aligned(min(length, RAW_BYTES))
        piece = self.job.first_says(raw.fastest_piece("read", self.pack, buffer) if self.job.rank == 0 else None)
        read = self.contender("raw O_DIRECT read", self.ours, lambda: raw.read(self.pack, buffer, piece, length=length))
        return piece, read

    def check(self) -> None:
        """What is timed is the whole work: the bytes are there."""
        before = [one.clone() for one in self.training.tensors()]
        for one in self.training.tensors():
            one.zero_()
        self.own().measure()
        after = self.training.tensors()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "not what was saved"


def measured(job: Job, options: argparse.Namespace) -> None:
    training = Sharded(options.gib, 32)
    tensors = training.tensors()
    options.leaves = len(tensors)
    with job.workplace(options) as place:
        reading = Reading(job, training, place, cold=options.cache == "cold")
        reading.check()
        piece, read = reading.raw_read()
        loaded = reading.contender("dcp.load", reading.dcp, lambda: peers.dcp_load(reading.state, reading.dcp))
        contenders = [memcpy(job, tensors), read, reading.own(), loaded]
        seconds = compare(contenders, rounds=options.rounds or ROUNDS, own=OWN, note=job.note)
        result = job.result(f"restore_{options.cache}", seconds, tensors)
        result.facts["cache"] = reading.condition
        result.facts["raw_piece_mib"] = piece >> 20
        if reading.cold:
            text = "share of the raw direct read's speed >= 0.90"
            result.judge(Target(text, "raw O_DIRECT read", OWN, at_least=0.90))
        else:
            result.judge(Target("memcpys that a hot restore takes <= 1.4", OWN, "memcpy", at_most=1.4))
        result.judge(Target("times faster than dcp.load >= 2", "dcp.load", OWN, at_least=2.0))
        job.report(result, options, place)


if __name__ == "__main__":
    run(measured, arguments(__doc__ or "", add=options_here))
