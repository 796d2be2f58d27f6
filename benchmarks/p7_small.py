"""P7: saving and restoring 10,000 tensors of 1 KiB, where what counts is the cost of each tensor and not its bytes.

    python benchmarks/p7_small.py

A save is the whole `Checkpointer.save(wait=True)`: copied, digested, files and directories synced, committed. The first
one is by a Checkpointer that has only just been built, with plan and memory taken, which is a figure of its own;
`tenuto.save` is everything at once. Restores are into existing tensors, every byte verified, from the page cache; the
first is by a Checkpointer that has only just been built. Target: at most 20 us a tensor each.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import peers
import torch
from harness import (
    Contender,
    Result,
    arguments,
    compare,
    empty_directory,
    make_state,
    median_interval,
    note,
    report,
    tensors_of,
    timed,
    warm_cache,
    workplace,
)

import tenuto

TENSOR_BYTES = 1024
LEAVES = 10_000
TARGET_US = 20.0
JUDGED = ("tenuto save(wait=True)", "tenuto first save(wait=True)", "tenuto.load", "tenuto first restore()")


class Saving:
    """Contenders that save the same state, each to a place of its own."""

    def __init__(self, place: Path, state: dict[str, Any]) -> None:
        self.place = place
        self.state = state
        self.constructing: list[float] = []
        self.steady = tenuto.Checkpointer(place / "steady", state, keep=tenuto.keep.latest(1))

    def _steady(self) -> float:
        self.steady.step_done()
        seconds = timed(lambda: self.steady.save(wait=True))
        self.steady.wait()  # what is unlinked beside training would run into the next contender
        return seconds

    def _first(self) -> float:
        where = empty_directory(self.place / "first")
        begun = time.perf_counter()
        with tenuto.Checkpointer(where, self.state) as checkpointer:
            self.constructing.append(time.perf_counter() - begun)
            checkpointer.step_done()
            return timed(lambda: checkpointer.save(wait=True))

    def _once(self) -> float:
        where = empty_directory(self.place / "once")
        return timed(lambda: tenuto.save(self.state, where))

    def _dcp(self) -> float:
        return peers.dcp_save(self.state, empty_directory(self.place / "dcp-written"))

    def _file(self, write: Any, what: Any) -> float:
        path = self.place / "written"
        path.unlink(missing_ok=True)
        seconds: float = write(what, path)
        return seconds

    def contenders(self) -> list[Contender]:
        return [
            Contender("tenuto save(wait=True)", self._steady),
            Contender("tenuto first save(wait=True)", self._first),
            Contender("tenuto.save, one-off", self._once),
            Contender("torch.save + fsync", lambda: self._file(peers.torch_save, self.state)),
            Contender("dcp.save", self._dcp),
            Contender("safetensors + fsync", lambda: self._file(peers.safetensors_save, self.state["model"])),
        ]

    def close(self) -> None:
        self.steady.close()
        for name in ("first", "once", "dcp-written"):
            shutil.rmtree(self.place / name, ignore_errors=True)


class Restoring:
    """Contenders that restore the same state into one target, each from files of its own that the page cache holds."""

    def __init__(self, place: Path, state: dict[str, Any]) -> None:
        self.place = place
        self.state = state
        self.target = {"model": {name: torch.zeros_like(one) for name, one in state["model"].items()}, "epoch": 0}
        tenuto.save(state, place / "ours")
        peers.torch_save(state, place / "state.pt")
        peers.safetensors_save(state["model"], place / "state.safetensors")
        (place / "dcp").mkdir()
        peers.dcp_save(state, place / "dcp")

    def _load(self) -> float:
        warm_cache(self.place / "ours")
        return timed(lambda: tenuto.load(self.place / "ours", into=self.target))

    def _first(self) -> float:
        warm_cache(self.place / "ours")
        checkpointer = tenuto.Checkpointer(self.place / "ours", self.target)
        seconds = timed(checkpointer.restore)
        checkpointer.close()
        return seconds

    def contenders(self) -> list[Contender]:
        place, target = self.place, self.target
        return [
            Contender("tenuto.load", self._load),
            Contender("tenuto first restore()", self._first),
            Contender("torch.load + copy", lambda: peers.torch_load(target, place / "state.pt")),
            Contender("dcp.load", lambda: peers.dcp_load(target, place / "dcp")),
            Contender("safetensors + copy", lambda: peers.safetensors_load(target, place / "state.safetensors")),
        ]

    def check(self) -> None:
        """What was timed was the whole work: the bytes are there, by each of our two ways."""
        for restore in (self._load, self._first):
            for tensor in tensors_of(self.target):
                tensor.zero_()
            self.target["epoch"] = 0
            restore()
            assert all(torch.equal(self.target["model"][name], one) for name, one in self.state["model"].items())
            assert self.target["epoch"] == self.state["epoch"]


def main() -> None:
    options = arguments(__doc__ or "", leaves=LEAVES, gib=LEAVES * TENSOR_BYTES / (1 << 30))
    state = make_state(options.gib, options.leaves)
    with workplace(options) as place:
        saving = Saving(place, state)
        seconds = compare(saving.contenders(), rounds=options.rounds, own="tenuto save(wait=True)", note=note)
        saving.close()
        restoring = Restoring(place, state)
        restoring.check()
        seconds |= compare(restoring.contenders(), rounds=options.rounds, own="tenuto.load", note=note)
        result = Result("p7_small", seconds, sum(one.nbytes for one in tensors_of(state)))
        result.seconds["building a Checkpointer"] = saving.constructing[1:]
        for name in JUDGED:
            each = [one * 1e6 / options.leaves for one in seconds[name]]
            text = f"{name} <= {TARGET_US:.0f} us a tensor"
            result.judge_value(text, median_interval(each), at_most=TARGET_US, unit="us")
        report(result, options, place)


if __name__ == "__main__":
    main()
