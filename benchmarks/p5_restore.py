"""P5: restoring into tensors that exist, every byte verified.

    python benchmarks/p5_restore.py --gib 1 --cache hot
    python benchmarks/p5_restore.py --gib 1 --cache cold

Target: cold at least 90 % of the raw O_DIRECT read of the same file, hot at most 1.4 of one memcpy, twice dcp.load.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import raw
import torch
from harness import (
    Contender,
    Result,
    Target,
    arguments,
    compare,
    drop_cache,
    make_state,
    note,
    report,
    tensors_of,
    timed,
    warm_cache,
    workplace,
)

import tenuto

RAW_BYTES = 1 << 30


def cache_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache", choices=["hot", "cold"], default="hot", help="whether the page cache holds the files"
    )
    parser.add_argument(
        "--beside",
        choices=["all", "dcp"],
        default="all",
        help="peers; dcp: only dcp.load, where the files of all of them do not fit into memory together",
    )


class Reading:
    """Contenders that restore the same state, each from files of its own, in the same condition of the cache."""

    def __init__(self, place: Path, state: dict[str, Any], *, cold: bool, every_peer: bool) -> None:
        self.cold = cold
        self.every_peer = every_peer
        self.how = ""
        self.place = place
        self.state = state
        self.target = {"model": {name: torch.zeros_like(one) for name, one in state["model"].items()}, "epoch": 0}

    def contender(self, name: str, root: Path, restore: Callable[[], float]) -> Contender:
        def measure() -> float:
            if self.cold:
                self.how = drop_cache(root)
            else:
                warm_cache(root)
            return restore()

        return Contender(name, measure)

    def all(self) -> list[Contender]:
        where, state, target = self.place, self.state, self.target
        tenuto.save(state, where / "ours")
        (where / "dcp").mkdir()
        peers.dcp_save(state, where / "dcp")
        pack = max((where / "ours").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        length = pack.stat().st_size // 4096 * 4096
        buffer = raw.aligned(min(length, RAW_BYTES))  # filled over and over: a fifth state would not fit at 4 GiB
        piece = raw.fastest_piece("read", pack, buffer)
        self.piece = piece
        found = [
            Contender("memcpy", raw.Memcpy(tensors_of(state))),
            self.contender("raw O_DIRECT read", pack, lambda: raw.read(pack, buffer, piece, length=length)),
            self.contender(
                "tenuto.load", where / "ours", lambda: timed(lambda: tenuto.load(where / "ours", into=target))
            ),
            self.contender("dcp.load", where / "dcp", lambda: peers.dcp_load(target, where / "dcp")),
        ]
        return found + (self.others() if self.every_peer else [])

    def others(self) -> list[Contender]:
        """The peers beside dcp.load."""
        where, state, target = self.place, self.state, self.target
        peers.torch_save(state, where / "state.pt")
        peers.safetensors_save(state["model"], where / "state.safetensors")
        return [
            self.contender(
                "torch.load + copy", where / "state.pt", lambda: peers.torch_load(target, where / "state.pt")
            ),
            self.contender(
                "torch.load(mmap) + copy", where / "state.pt", lambda: peers.torch_load_mmap(target, where / "state.pt")
            ),
            self.contender(
                "safetensors + copy",
                where / "state.safetensors",
                lambda: peers.safetensors_load(target, where / "state.safetensors"),
            ),
        ]

    def check(self) -> None:
        """What was timed was the whole work: the bytes are there."""
        for tensor in tensors_of(self.target):
            tensor.zero_()
        tenuto.load(self.place / "ours", into=self.target)
        assert all(torch.equal(self.target["model"][name], one) for name, one in self.state["model"].items())
        assert self.target["epoch"] == self.state["epoch"]


def main() -> None:
    options = arguments(__doc__ or "", add=cache_option)
    state = make_state(options.gib, options.leaves)
    with workplace(options) as place:
        reading = Reading(place, state, cold=options.cache == "cold", every_peer=options.beside == "all")
        contenders = reading.all()
        reading.check()
        seconds = compare(contenders, rounds=options.rounds, own="tenuto.load", note=note)
        nbytes = sum(one.nbytes for one in tensors_of(state))
        result = Result(f"p5_restore_{options.cache}", seconds, nbytes, sized=True)
        result.facts["cache"] = f"cold: {reading.how}" if reading.cold else "hot: each file read once before"
        result.facts["raw_piece_mib"] = reading.piece >> 20
        if reading.cold:
            result.judge(
                Target(
                    "share of the raw direct read's speed >= 0.90", "raw O_DIRECT read", "tenuto.load", at_least=0.90
                )
            )
        else:
            result.judge(Target("memcpys that a hot restore takes <= 1.4", "tenuto.load", "memcpy", at_most=1.4))
        result.judge(Target("times faster than dcp.load >= 2", "dcp.load", "tenuto.load", at_least=2.0))
        report(result, options, place)


if __name__ == "__main__":
    main()
