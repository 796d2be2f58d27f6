"""P1: how long an eager asynchronous save holds the training thread.

    python benchmarks/p1_stall.py --gib 1

Target: at most 1.05 of one warm memcpy + 5 us a leaf; the first save, prewarmed, at most 1.2 of one.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import peers
import raw
from harness import (
    Contender,
    Result,
    Target,
    arguments,
    compare,
    empty_directory,
    make_state,
    note,
    report,
    tensors_of,
    timed,
    workplace,
)

import tenuto

FIRST_SAVES = 7


def steady(where: Path, state: dict[str, Any]) -> tuple[tenuto.Checkpointer, Contender]:
    checkpointer = tenuto.Checkpointer(where, state, keep=tenuto.keep.latest(1))

    def measure() -> float:
        checkpointer.step_done()
        begun = time.perf_counter()
        save = checkpointer.save()
        stall = time.perf_counter() - begun
        save.wait()
        checkpointer.wait()  # what is unlinked beside training would run into the next contender
        return stall

    return checkpointer, Contender("tenuto save()", measure)


def first_saves(place: Path, state: dict[str, Any], memcpy: raw.Memcpy, rounds: int) -> dict[str, list[float]]:
    """Each by a Checkpointer of its own, constructed (and so prewarmed) outside the figure."""
    found: dict[str, list[float]] = {"tenuto first save()": [], "memcpy beside first": [], "prewarm": []}
    for _ in range(rounds):
        with tenuto.Checkpointer(empty_directory(place / "first"), state) as checkpointer:
            checkpointer.step_done()
            memcpy()
            found["memcpy beside first"].append(memcpy())
            begun = time.perf_counter()
            save = checkpointer.save()
            found["tenuto first save()"].append(time.perf_counter() - begun)
            save.wait()
            checkpointer.wait()  # what is unlinked beside training would run into the next contender
            found["prewarm"].append(checkpointer.prewarm_s)
    shutil.rmtree(place / "first")
    return found


def dcp_stall(place: Path, state: dict[str, Any], mode: str) -> Contender:
    def measure() -> float:
        stall = peers.dcp_async_stall(state, empty_directory(place / mode), mode)
        shutil.rmtree(place / mode)
        gc.collect()  # what it staged hangs in reference cycles: at 4 GiB the next contender needs that memory
        return stall

    return Contender(f"dcp.async_save, {mode}", measure)


def leaving_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without-process",
        action="store_true",
        help="leave dcp's process mode out: it goes on holding the states of saves that have ended (three more of them "
        "were seen after three saves), which at 4 GiB is more than this machine's memory",
    )


def main() -> None:
    options = arguments(__doc__ or "", add=leaving_out)
    state = make_state(options.gib, options.leaves)
    tensors = tensors_of(state)
    with workplace(options) as place:
        peers.start_group()
        memcpy = raw.Memcpy(tensors)
        checkpointer, own = steady(place / "ours", state)
        torch_file = place / "state.pt"
        contenders = [
            Contender("memcpy", memcpy),
            Contender(raw.MemcpyOverWritten.name, raw.MemcpyOverWritten(tensors, place / "raw")),
            own,
            dcp_stall(place, state, "thread"),
            *([] if options.without_process else [dcp_stall(place, state, "process")]),
            Contender("torch.save", lambda: timed(lambda: peers.torch.save(state, torch_file))),
        ]
        seconds = compare(contenders, rounds=options.rounds, own=own.name, note=note)
        checkpointer.close()
        seconds |= first_saves(place, state, memcpy, min(options.rounds or FIRST_SAVES, FIRST_SAVES))
        prewarm = seconds.pop("prewarm")
        result = Result("p1_stall", seconds, sum(one.nbytes for one in tensors), sized=True)
        result.facts["prewarm_s"] = round(float(np.median(prewarm)), 3)
        if options.without_process:
            result.facts["left_out"] = "dcp.async_save in process mode: memory"
        per_leaf = 5e-6 * options.leaves
        result.judge(
            Target("stall <= 1.05 memcpy + 5 us a leaf", own.name, "memcpy", at_most=1.05, allowance_s=per_leaf)
        )
        result.judge(
            Target(
                "first stall, prewarmed, <= 1.2 memcpy + 5 us a leaf",
                "tenuto first save()",
                "memcpy beside first",
                at_most=1.2,
                allowance_s=per_leaf,
            )
        )
        report(result, options, place)
        peers.end_group()


if __name__ == "__main__":
    main()
