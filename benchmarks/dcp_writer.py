"""`dcp.save` and `dcp.load` with Tenuto as the storage, beside DCP's own files on the same disk, in one process.

    python benchmarks/dcp_writer.py --gib 0.5

Both flush what they write. DCP's own reader verifies nothing; ours verifies every byte.
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from harness import Contender, Result, Target, arguments, compare, make_state, note, report, tensors_of, workplace

import tenuto.torch

SAVE, LOAD = "dcp.save", "dcp.load"


def timed(name: str, work: Callable[[], object], clean: Callable[[], object]) -> Contender:
    def measure() -> float:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        clean()
        return seconds

    return Contender(name, measure)


def main() -> None:
    options = arguments(__doc__ or "")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    state = make_state(options.gib, options.leaves)
    nbytes = sum(one.nbytes for one in tensors_of(state))
    tensors = {str(number): one for number, one in enumerate(tensors_of(state))}
    into = {name: torch.empty_like(one) for name, one in tensors.items()}
    with workplace(options) as place:
        ours, theirs = f"{SAVE}: Tenuto", f"{SAVE}: DCP's own files"
        our_load, their_load = f"{LOAD}: Tenuto", f"{LOAD}: DCP's own files"
        kept, kept_theirs = place / "kept", place / "kept-theirs"
        dcp.save(tensors, storage_writer=tenuto.torch.StorageWriter(kept))
        dcp.save(tensors, checkpoint_id=kept_theirs)
        reader = tenuto.torch.StorageReader(kept)
        contenders = [
            timed(
                ours,
                lambda: dcp.save(tensors, storage_writer=tenuto.torch.StorageWriter(place / "ours")),
                lambda: gone(place / "ours"),
            ),
            timed(theirs, lambda: dcp.save(tensors, checkpoint_id=place / "theirs"), lambda: gone(place / "theirs")),
            timed(our_load, lambda: dcp.load(into, storage_reader=reader), lambda: None),
            timed(their_load, lambda: dcp.load(into, checkpoint_id=kept_theirs), lambda: None),
        ]
        seconds = compare(contenders, rounds=options.rounds, own=ours, note=note)
        result = Result("dcp_writer", seconds, nbytes, sized=True)
        result.judge(Target("saving takes no longer than into DCP's own files", ours, theirs, at_most=1.0))
        result.judge(Target("loading, verified, takes no longer than unverified", our_load, their_load, at_most=1.0))
        report(result, options, place)


def gone(path: Path) -> None:
    shutil.rmtree(path)


if __name__ == "__main__":
    main()
