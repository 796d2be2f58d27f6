"""P9: a restart from memory after kill -9.

    python benchmarks/p9_restart.py --gib 1

A training keeps its state in memory and is killed. Each round is a new process that goes on from there, as a scheduler
would start it, and is killed as well: its Checkpointer is built, then `restore()` is timed, every byte verified, into
tensors that exist and whose pages have been touched. Beside it, in the same process: one memcpy of the same leaves, and
`torch.load` of the same state from a file that the page cache does not hold, copied into the same tensors. Load and
memcpy run pinned to one processor, with one thread; torch.load may use all. What either has brought back is compared,
by SHA-256, with what the training held.
Target: at most 1.5 of the memcpy; at least 10 times faster than torch.load from a cold disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import raw
import torch
from harness import (
    Result,
    Target,
    arguments,
    drop_cache,
    leaf_items,
    make_state,
    note,
    report,
    tensors_of,
    timed,
    wait_for_seal,
    workplace,
)

import tenuto
from tenuto.engine.staging import slots

LOAD = "restore() from memory, one thread"
MEMCPY = "memcpy, one thread"
PEER = "torch.load + copy, cold disk"
BUILD = "building the Checkpointer"
STEPS = 3
ROUNDS = 11


def child_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--child", choices=["train", "restart"], help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shared-memory", default=slots.SHARED_MEMORY, help="where images lie (default %(default)s)")


def checkpointer(place: Path, state: dict[str, Any]) -> tenuto.Checkpointer:
    # Only an older step is in the store: what comes back as the newest can only have come from memory.
    return tenuto.Checkpointer(place / "ours", state, save=tenuto.every(steps=1_000_000), memory=tenuto.every(steps=1))


def fingerprints(state: dict[str, Any]) -> list[str]:
    return [hashlib.sha256(memoryview(one.numpy())).hexdigest() for one in tensors_of(state)]


def train(options: argparse.Namespace) -> None:
    """Leaves a sealed image, and is killed."""
    state = make_state(options.gib, options.leaves)
    (options.at / "held.json").write_text(json.dumps(fingerprints(state)), encoding="ascii")
    ckpt = checkpointer(options.at, state)
    for step in ckpt.steps(STEPS):
        if step == 0:
            older = ckpt.save()
        elif step == 1:
            older.wait()  # so that there is something to fall back to, as there is in a training
        if step == STEPS - 1:
            peers.torch_save(state, options.at / "state.pt")
    wait_for_seal(ckpt)
    os.kill(os.getpid(), signal.SIGKILL)


def restart(options: argparse.Namespace) -> None:
    """Tells its seconds, and is killed. Holds the state once, and beside it what is being measured."""
    held = json.loads((options.at / "held.json").read_text(encoding="ascii"))
    items = leaf_items(options.gib, options.leaves)
    target = {"model": {f"layers.{number}.weight": torch.ones(items) for number in range(options.leaves)}, "epoch": 0}
    file = options.at / "state.pt"
    how = drop_cache(file)
    found: dict[str, Any] = {PEER: peers.torch_load(target, file), "cache": how}
    assert fingerprints(target) == held
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    torch.set_num_threads(1)
    memcpy = raw.Memcpy(tensors_of(target))
    memcpy()
    found[MEMCPY] = memcpy()
    del memcpy
    for tensor in tensors_of(target):
        tensor.zero_()
    begun = time.perf_counter()
    ckpt = checkpointer(options.at, target)
    found[BUILD] = time.perf_counter() - begun
    found[LOAD] = timed(ckpt.restore)
    found["source"] = ckpt.restore().source  # type: ignore[union-attr]
    assert ckpt.step == STEPS
    assert fingerprints(target) == held
    print(json.dumps(found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def process(what: str, options: argparse.Namespace, place: Path, shared: str) -> dict[str, Any]:
    """What a process of its own told before it was killed."""
    words = [sys.executable, __file__, "--child", what, "--at", str(place), "--shared-memory", shared]
    words += ["--gib", str(options.gib), "--leaves", str(options.leaves)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, f"{what} ended with {done.returncode}"
    return json.loads(done.stdout) if done.stdout else {}


def main() -> None:
    options = arguments(__doc__ or "", add=child_options)
    if options.child is not None:
        slots.SHARED_MEMORY = options.shared_memory  # type: ignore[misc]
        (train if options.child == "train" else restart)(options)
        return
    rounds = options.rounds or ROUNDS
    seconds: dict[str, list[float]] = {name: [] for name in (LOAD, MEMCPY, PEER, BUILD)}
    shared = tempfile.mkdtemp(prefix="tenuto-p9-", dir=options.shared_memory)
    try:
        with workplace(options) as place:
            process("train", options, place, shared)
            for number in range(-1, rounds):  # the first one warms up and is not counted
                found = process("restart", options, place, shared)
                assert found["source"].startswith("from memory"), found["source"]
                for name, values in seconds.items():
                    if number >= 0:
                        values.append(found[name])
                note(f"round {number + 1} of {rounds}")
            nbytes = leaf_items(options.gib, options.leaves) * options.leaves * 4
            result = Result("p9_restart", seconds, nbytes, sized=True)
            result.facts["cache"] = f"cold for torch.load: {found['cache']}"
            result.facts["process"] = "each round a new process that is killed by SIGKILL at its end"
            result.judge(
                Target("memcpys on one thread that a load from memory takes <= 1.5", LOAD, MEMCPY, at_most=1.5)
            )
            result.judge(Target("times faster than torch.load from a cold disk >= 10", PEER, LOAD, at_least=10.0))
            report(result, options, place)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


if __name__ == "__main__":
    main()
