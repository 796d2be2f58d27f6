"""An earlier tree and this one in one process, in turn: the changelog's table. The two need different package names.

    git worktree add /tmp/before 0d4c75e
    python benchmarks/pairs.py save --before /tmp/before/src --package holdfast --gib 1

Prints for each figure both medians and the median of the pairs' ratios; writes no result file.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tenuto

Times = dict[str, dict[str, list[float]]]


class Pairs:
    def __init__(self, before: Any, place: Path, gib: float, leaves: int) -> None:
        self.sides = {"before": before, "after": tenuto}
        self.place = place
        items = max(1, int(gib * 2**30 / 4 / leaves))
        self.state = {f"layer{number}.w": torch.rand(items) for number in range(leaves)}
        self.times: Times = {}
        self.round = 0

    def timed(self, name: str, side: str, work: Callable[[], Any]) -> Any:
        gc.collect()
        began = time.perf_counter()
        result = work()
        self.times.setdefault(name, {}).setdefault(side, []).append(time.perf_counter() - began)
        return result

    def save(self) -> None:
        for side, package in self.order():
            options = {"save": package.on.end(), "keep": package.keep.latest(2), "resume_from": None}
            with package.Checkpointer(self.place / f"steady-{side}", self.state, **options) as ckpt:
                ckpt.step_done()
                ckpt.save(wait=True)
                ckpt.step_done()
                self.timed("stall of save()", side, ckpt.save).wait()
                ckpt.step_done()
                self.timed("save(wait=True)", side, lambda ckpt=ckpt: ckpt.save(wait=True))

    def one_off(self) -> None:
        for side, package in self.order():
            where = self.place / f"one-off-{side}"
            self.timed("one-off save", side, lambda package=package, where=where: package.save(self.state, where))
            shutil.rmtree(where)

    def load(self, *, cold: bool = False) -> None:
        for side, package in self.order():
            where = self._saved(side, package)
            if cold:
                _drop(where)
            self.timed("load", side, lambda package=package, where=where: package.load(where))

    def load_cold(self) -> None:
        self.load(cold=True)

    def look(self) -> None:
        for side, package in self.order():
            where = self._saved(side, package)
            opened = self.timed("open", side, lambda package=package, where=where: package.open(where))
            with opened:
                self.timed("one tensor", side, lambda opened=opened: opened["layer0.w"])

    def order(self) -> list[tuple[str, Any]]:
        self.round += 1
        return sorted(self.sides.items(), reverse=self.round % 2 == 0)

    def _saved(self, side: str, package: Any) -> Path:
        where = self.place / f"saved-{side}"
        if not where.exists():
            package.save(self.state, where)
        return where


def _drop(where: Path) -> None:
    """Takes the files out of the page cache."""
    for path in where.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "one_off", "load", "load_cold", "look"])
    parser.add_argument("--before", type=Path, required=True, help="the directory that the earlier package lies in")
    parser.add_argument("--package", required=True, help="the earlier package's name")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--leaves", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(given.before))
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as place:
        pairs = Pairs(importlib.import_module(given.package), Path(place), given.gib, given.leaves)
        getattr(pairs, given.what)()  # not counted
        pairs.times.clear()
        for _ in range(given.rounds):
            getattr(pairs, given.what)()
    for name, sides in pairs.times.items():
        before, after = sides["before"], sides["after"]
        ratio = statistics.median(now / then for then, now in zip(before, after, strict=True))
        print(f"{name}: {statistics.median(before) * 1e3:.2f} ms, {statistics.median(after) * 1e3:.2f} ms, {ratio:.3f}")


if __name__ == "__main__":
    main()
