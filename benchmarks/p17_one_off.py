"""P17: one `tenuto.save` to a fresh place: repository made, digested, files and directories synced, committed.

    python benchmarks/p17_one_off.py --gib 0.5

Target: twice as fast as torch.save + fsync. `--noisy` says in the result that others used the machine meanwhile.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import peers
from harness import (
    Contender,
    Result,
    Target,
    arguments,
    compare,
    make_state,
    note,
    report,
    tensors_of,
    timed,
    workplace,
)

import tenuto

OWN, TORCH = "tenuto.save", "torch.save + fsync"


def written(path: Path, name: str, write: Callable[[Path], float]) -> Contender:
    def measure() -> float:
        seconds = write(path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return seconds

    return Contender(name, measure)


def noisy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--noisy", action="store_true", help="say that others used the machine meanwhile")


def main() -> None:
    options = arguments(__doc__ or "", add=noisy)
    state = make_state(options.gib, options.leaves)
    with workplace(options) as place:
        contenders = [
            written(place / "once", OWN, lambda path: timed(lambda: tenuto.save(state, path))),
            written(place / "torch", TORCH, lambda path: peers.torch_save(state, path)),
            written(
                place / "safetensors", "safetensors + fsync", lambda path: peers.safetensors_save(state["model"], path)
            ),
        ]
        seconds = compare(contenders, rounds=options.rounds, own=OWN, note=note)
        result = Result("p17_one_off", seconds, sum(one.nbytes for one in tensors_of(state)), sized=True)
        if options.noisy:
            result.facts["noise"] = "others used the processors and the disk meanwhile"
        result.judge(Target("times faster than torch.save + fsync >= 2", TORCH, OWN, at_least=2.0))
        report(result, options, place)


if __name__ == "__main__":
    main()
