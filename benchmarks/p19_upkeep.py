"""P19: comparing and verifying checkpoints and looking at their values, beside a raw read and beside restic and Borg.

    python benchmarks/p19_upkeep.py --gib 1

Two checkpoints of one training, all values of which differ. `diff` reads both from the page cache and compares every
value; `verify` reads one, from the page cache and from a cold disk, beside a raw read of the same files. The statistics
of values are what a save computes of each block right after it was digested, by one thread: what they take is the
difference between digesting with them and without (a save computes all of them of as much as a quarter of its time
allows, and of the rest only whether it is finite), beside one copy of the same bytes by one thread. restic and Borg
verify a repository of theirs that holds the same file, from the page cache, in a process that also has to start.

Targets: diff at least 2 GB/s of both checkpoints' bytes; verify at least 95 % of the raw read; statistics of values at
most a quarter of the copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
    drop_cache,
    left_out,
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
from tenuto.codec.digest import digest
from tenuto.codec.statistics import BLOCK_BYTES, examiner_of

BESIDE = ("restic", "borg")
GB_PER_S = 2.0
CHUNK = 256 << 10
PACKS = "*.safetensors"


def save_two(place: Path, state: dict[str, Any]) -> tenuto.Repository:
    for step in (1, 2):
        tenuto.save(state, place, step=step)
        for tensor in tensors_of(state):
            tensor.mul_(1.001)
    return tenuto.Repository(place)


class Values:
    """Digests a state chunk by chunk on one thread as a save does, with or without statistics of its values."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._parts = [tensor.view(torch.uint8).numpy() for tensor in tensors_of(state)]

    def __call__(self, looking: str = "") -> float:
        examine = examiner_of("float32")
        assert examine is not None

        def work() -> None:
            for part in self._parts:
                for start in range(0, len(part), BLOCK_BYTES):
                    block = part[start : start + BLOCK_BYTES]
                    for chunk in range(0, len(block), CHUNK):
                        digest(block[chunk : chunk + CHUNK].data)
                    if looking:
                        examine(block, looking == "all")

        return timed(work)


class Copying:
    """One copy of the same bytes by one thread, into memory that was touched before."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._parts = [tensor.numpy() for tensor in tensors_of(state)]
        self._into = [np.ones_like(part) for part in self._parts]

    def __call__(self) -> float:
        return timed(lambda: [np.copyto(into, part) for into, part in zip(self._into, self._parts, strict=True)])


def raw_read(files: list[Path], into: raw.Memory, *, cold: bool) -> float:
    """The files one after the other, by the length of them that direct reads take."""
    piece = 8 * raw.MIB
    return sum(raw.read(file, into, piece, length=file.stat().st_size // 4096 * 4096, direct=cold) for file in files)


def beside(place: Path, file: Path, wanted: list[str]) -> dict[str, list[str]]:
    """What verifies a repository of each tool that holds the file; tools that are not installed are left out."""
    environment = {**os.environ, "RESTIC_PASSWORD": "x", "BORG_BASE_DIR": str(place / "borg-home")}
    os.environ.update(environment)
    restic, borg = str(place / "restic"), str(place / "borg")
    made = {
        "restic": (
            ["restic", "-q", "--no-cache", "-r", restic],
            [["init"], ["backup", str(file)]],
            ["check", "--read-data"],
        ),
        "borg": (
            ["borg"],
            [["init", "-e", "none", borg], ["create", f"{borg}::one", str(file)]],
            ["check", "--verify-data", borg],
        ),
    }
    found = {}
    for name in wanted:
        command, first, verify = made[name]
        if shutil.which(command[0]) is None:
            note(f"{name} is not installed: left out")
            continue
        for words in first:
            subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
        found[name] = [*command, *verify]
    return found


def main() -> None:
    options = arguments(__doc__ or "", add=lambda parser: choosing(parser, BESIDE))
    torch.set_num_threads(1)
    with workplace(options) as place:
        state = make_state(options.gib, options.leaves)
        nbytes = sum(tensor.nbytes for tensor in tensors_of(state))
        repository = save_two(place / "ckpts", state)
        first = next(id for id in repository.checkpoints() if id.step == 1)
        files = sorted((place / "ckpts" / first.directory).glob(PACKS))
        into, values, copying = raw.aligned(min(nbytes, GIB // 4)), Values(state), Copying(state)

        processor: dict[str, list[float]] = {}

        def on_processor(name: str, work: Callable[[], object]) -> float:
            began = time.process_time()
            took = timed(work)
            processor.setdefault(name, []).append(time.process_time() - began)
            return took

        def differ() -> None:
            found = repository.diff(1, 2)
            assert len(found.leaves) == options.leaves and not found.same

        def check() -> None:
            assert repository.verify(steps=[1]).ok

        def verify_cold() -> float:
            drop_cache(place / "ckpts")
            return timed(check)

        def read_cold() -> float:
            drop_cache(place / "ckpts")
            return raw_read(files, into, cold=True)

        def hot(work: Any) -> Any:
            def measured() -> float:
                warm_cache(place / "ckpts")
                return work()

            return measured

        contenders = [
            Contender("diff", hot(lambda: on_processor("diff", differ))),
            Contender("verify, page cache", hot(lambda: on_processor("verify", check))),
            Contender("raw read, page cache", hot(lambda: raw_read(files, into, cold=False))),
            Contender("verify, cold disk", verify_cold),
            Contender("raw O_DIRECT read", read_cold),
            Contender("digest", values),
            Contender("digest, and whether finite", lambda: values("finite")),
            Contender("digest and statistics", lambda: values("all")),
            Contender("one copy, one thread", copying),
        ]
        for name, command in beside(place, files[0], options.beside).items():
            contenders.append(
                Contender(
                    f"{name} check, page cache",
                    lambda command=command: timed(
                        lambda: subprocess.run(
                            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                        )
                    ),
                )
            )
        result = Result(
            "p19_upkeep", compare(contenders, rounds=options.rounds, own="diff", note=note), nbytes, sized=True
        )
        seconds = result.seconds
        for name, sum_of in (
            ("whether finite", "digest, and whether finite"),
            ("statistics of values", "digest and statistics"),
        ):
            seconds[name] = [both - alone for both, alone in zip(seconds[sum_of], seconds["digest"], strict=True)]
        result.facts["GB in a second of processor time"] = {
            name: nbytes * (1 + (name == "diff")) / 1e9 / float(np.median(spent)) for name, spent in processor.items()
        }
        speeds = [2 * nbytes / 1e9 / one for one in seconds["diff"]]
        result.judge_value(f"diff >= {GB_PER_S:g} GB/s of both", median_interval(speeds), at_least=GB_PER_S)
        for text, mine, other in (
            ("verify >= 95 % of a raw read, page cache", "verify, page cache", "raw read, page cache"),
            ("verify >= 95 % of a raw read, cold disk", "verify, cold disk", "raw O_DIRECT read"),
        ):
            result.judge(Target(text, other, mine, at_least=0.95))
        for name in ("whether finite", "statistics of values"):
            text = f"{name} <= 25 % of a copy"
            result.judge(Target(text, name, "one copy, one thread", at_most=0.25, of_medians=True))
        left_out(result, options, BESIDE)
        report(result, options, place)


if __name__ == "__main__":
    main()
