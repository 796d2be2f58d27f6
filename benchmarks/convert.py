"""Conversions beside a plain copy of the same file: import and export of safetensors, npz and Hugging Face's shards.

    python benchmarks/convert.py --gib 0.5

Targets: at least 70 % of the speed of the copy (read, written, flushed), and at most 256 MiB of memory above a process
that does nothing: anonymous and shared memory of the command's own process, read from /proc every few milliseconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Contender, Result, Target, arguments, compare, make_state, note, report, tensors_of, workplace
from safetensors.torch import save_file

from tenuto.api.export import Choice, export
from tenuto.api.migrate import Rules, execute, plan_migration
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

MIB = 1 << 20
COPY, IMPORT, ROUND = "copy + fsync", "import of safetensors", "import, rounded to bfloat16"
EXPORTS = {"safetensors": ("x.safetensors", None), "hf": ("x", "hf"), "npz": ("x.npz", None), "gguf": ("x.gguf", None)}
BLOCK = 16 * MIB


def copied(source: Path, to: Path) -> None:
    with source.open("rb", buffering=0) as read, to.open("xb", buffering=0) as written:
        while block := read.read(BLOCK):
            written.write(block)
        os.fsync(written.fileno())


def contender(name: str, made: Path, work: Callable[[], object]) -> Contender:
    def measure() -> float:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        shutil.rmtree(made) if made.is_dir() else made.unlink()
        return seconds

    return Contender(name, measure)


def imported(source: Path, where: Path, rules: Rules) -> None:
    execute(plan_migration(source, where, rules=rules), where)


def memory_of(words: Sequence[str]) -> int:
    """Returns the most anonymous and shared memory that a command of ours took, in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "tenuto", *words], stdout=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        most = max(most, sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in fields) * 1024)
        time.sleep(0.003)
    assert process.wait() == 0, words
    return most


def noisy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--noisy", action="store_true", help="say that others used the machine meanwhile")


def main() -> None:
    options = arguments(__doc__ or "", add=noisy)
    state = make_state(options.gib, options.leaves)
    nbytes = sum(one.nbytes for one in tensors_of(state))
    with workplace(options) as place:
        source, where = place / "source.safetensors", place / "checkpoints"
        save_file(state["model"], source)
        imported(source, where, Rules())
        repo = Repo.open(open_store(where))
        contenders = [
            contender(COPY, place / "copy", lambda: copied(source, place / "copy")),
            contender(IMPORT, place / "in", lambda: imported(source, place / "in", Rules())),
            contender(ROUND, place / "bf16", lambda: imported(source, place / "bf16", Rules(dtype="bfloat16"))),
        ]
        for name, (file, to) in EXPORTS.items():

            def write(file: str = file, to: str | None = to) -> None:
                export(repo, place / file, lambda: "main", "latest", to=to, choice=Choice())

            contenders.append(contender(f"export to {name}", place / file, write))
        seconds = compare(contenders, rounds=options.rounds, own=IMPORT, note=note)
        result = Result("convert", seconds, nbytes, sized=True)
        if options.noisy:
            result.facts["noise"] = "others used the processors and the disk meanwhile"
        for one in contenders[1:]:
            result.judge(Target(f"{one.name}: speed of a plain copy >= 0.7", COPY, one.name, at_least=0.7))
        idle = memory_of(["ls", str(where)])
        commands = {IMPORT: ["import", str(source), str(place / "in")], ROUND: []}
        commands[ROUND] = ["import", str(source), str(place / "bf16"), "--dtype", "bfloat16"]
        for name, (file, to) in EXPORTS.items():
            commands[f"export to {name}"] = ["export", str(where), str(place / file), *(["--to", to] if to else [])]
        for name, words in commands.items():
            above = memory_of(words) - idle
            result.memory[name] = [above]
            found = above / MIB
            result.judge_value(f"{name}: memory above <= 256 MiB", (found, found, found), at_most=256.0, unit="mib")
        report(result, options, place)


if __name__ == "__main__":
    main()
