"""Interleaved comparisons: every contender once a round, round after round, so that each pair is measured side by side.

A contender measures itself: it returns the seconds that count, and may prepare and clean up outside of them. Figures
are medians; ratios are the median of the rounds' own ratios, with a 95 % bootstrap interval over the rounds. A target
is met when the interval's bad end meets it. Absolute speeds of shared machines drift; the ratios of one round do not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tenuto
from campaigns.result_file import code, machine, versions
from tenuto.bench import raw as loops

RESULTS = Path(__file__).parent / "results"
RESAMPLES = 10_000
GIB = 1 << 30
UNITS = {"ratio": "", "ms": "ms", "us": "us", "mib": "MiB", "done": "(1 = done)"}
"""What a target's figure may be, by its key in a result."""
warm_cache = loops.warm_cache
timed = loops.timed


@dataclass(frozen=True)
class Contender:
    name: str
    measure: Callable[[], float]
    """Runs once and returns the seconds that count."""


@dataclass(frozen=True)
class Target:
    """`numerator / denominator` must be at most, or at least, this; `allowance_s` first comes off the numerator."""

    text: str
    numerator: str
    denominator: str
    at_most: float | None = None
    at_least: float | None = None
    allowance_s: float = 0.0
    of_medians: bool = False


@dataclass
class Result:
    id: str
    seconds: dict[str, list[float]]
    bytes: int
    facts: dict[str, Any] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=dict)
    """Bytes by what was measured, round by round."""
    sized: bool = False
    """Measured at several sizes: the size is part of the result's name."""
    speeds: bool = True
    """Whether bytes per second say something, where it is."""

    def ratio(
        self, numerator: str, denominator: str, allowance_s: float = 0.0, *, of_medians: bool = False
    ) -> tuple[float, float, float]:
        """Median of the rounds' ratios, and the ends of its 95 % bootstrap interval.

        of_medians: the ratio of the two medians instead, both resampled by the same rounds. For differences of
        measurements, which may come close to nothing in one round.
        """
        above, below = np.array(self.seconds[numerator]), np.array(self.seconds[denominator])
        rounds = min(len(above), len(below))
        above, below = above[:rounds] - allowance_s, below[:rounds]
        draws = np.random.default_rng(0).integers(0, rounds, (RESAMPLES, rounds))
        if of_medians:
            found = np.median(above[draws], axis=1) / np.median(below[draws], axis=1)
            middle = np.median(above) / np.median(below)
        else:
            found = np.median((above / below)[draws], axis=1)
            middle = np.median(above / below)
        low, high = np.percentile(found, [2.5, 97.5])
        return float(middle), float(low), float(high)

    def judge(self, target: Target) -> None:
        found = self.ratio(target.numerator, target.denominator, target.allowance_s, of_medians=target.of_medians)
        self.judge_value(target.text, found, at_most=target.at_most, at_least=target.at_least)

    def judge_value(
        self,
        text: str,
        found: tuple[float, float, float],
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        unit: str = "ratio",
    ) -> None:
        """A figure with its interval against its limit: met when the interval's bad end meets it."""
        middle, low, high = found
        limit = at_most if at_most is not None else at_least
        assert limit is not None
        met = high <= limit if at_most is not None else low >= limit
        self.targets.append(
            {"target": text, unit: middle, "interval": [low, high], "met": bool(met), "limit": limit}
            | {"bound": "at most" if at_most is not None else "at least"}
        )


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % bootstrap interval."""
    found = np.array(values)
    draws = np.random.default_rng(0).integers(0, len(found), (RESAMPLES, len(found)))
    low, high = np.percentile(np.median(found[draws], axis=1), [2.5, 97.5])
    return float(np.median(found)), float(low), float(high)


def arguments(
    description: str, *, add: Callable[[argparse.ArgumentParser], None] | None = None, **defaults: object
) -> argparse.Namespace:
    """What a benchmark is run with. add: puts its own options in; defaults: of the common ones, where they differ."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (default %(default)g)")
    parser.add_argument("--leaves", type=int, default=200, help="tensors in the state (default %(default)d)")
    parser.add_argument(
        "--rounds", type=int, help="rounds; default 30 where a round's own side is under a second, else 7"
    )
    parser.add_argument(
        "--where", default=None, help="directory to measure in (default: a temporary one beside this file)"
    )
    parser.add_argument("--id", default=None, help="name of the result file (default: the benchmark's own)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--no-save", action="store_true", help="do not write the result file")
    if add is not None:
        add(parser)
    parser.set_defaults(**defaults)
    return parser.parse_args()


def choosing(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """An option that says which of these are measured; all, unless it is given."""
    parser.add_argument(
        "--beside",
        nargs="*",
        choices=names,
        default=list(names),
        help=f"what is measured beside, of {', '.join(names)} (default: all; fewer where memory or time is short)",
    )


def left_out(result: Result, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Says in the result what was not measured."""
    missing = [name for name in names if name not in options.beside]
    if missing:
        result.facts["left_out"] = missing


@contextmanager
def workplace(options: argparse.Namespace) -> Iterator[Path]:
    """An empty directory on the file system to be measured; gone afterwards."""
    parent = Path(options.where) if options.where else Path(__file__).parent
    path = Path(tempfile.mkdtemp(prefix=".measuring-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def leaf_items(gib: float, leaves: int) -> int:
    """fp32 numbers in each leaf of `make_state`."""
    return max(int(gib * GIB) // leaves // 4, 1)


def make_state(gib: float, leaves: int) -> dict[str, Any]:
    """fp32 tensors of equal size with values that nothing can compress away; one plain value."""
    generator = torch.Generator().manual_seed(0)
    each = leaf_items(gib, leaves)
    tensors = {f"layers.{number}.weight": torch.randn(each, generator=generator) for number in range(leaves)}
    return {"model": tensors, "epoch": 3}


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return list(state["model"].values())


def compare(
    contenders: Sequence[Contender], *, rounds: int | None, own: str, note: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds by contender; the first, warming round is not counted. The order turns: nobody is always first."""
    seconds: dict[str, list[float]] = {one.name: [] for one in contenders}
    done, wanted = -1, rounds or 2
    gc.disable()
    try:
        while done < wanted:
            turn = (done + 1) % len(contenders)
            for one in [*contenders[turn:], *contenders[:turn]]:
                found = one.measure()
                if done >= 0:
                    seconds[one.name].append(found)
                elif rounds is None and one.name == own:
                    wanted = 30 if found < 1.0 else 7
            done += 1
            note(f"round {done} of {wanted}")
            gc.collect()
    finally:
        gc.enable()
    return seconds


def drop_cache(root: Path) -> str:
    """Drops every file below `root` from the page cache; says how. Raises AssertionError if pages stay."""
    loops.drop_cache(root)
    how = "fsync and posix_fadvise(DONTNEED) of each file"
    if loops.still_cached(root) and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1\n", encoding="ascii")
        how += ", then /proc/sys/vm/drop_caches"
    held = loops.still_cached(root)
    assert not held, f"the page cache still holds what is to be read cold: {held}"
    return how


def wait_for_seal(checkpointer: tenuto.Checkpointer) -> None:
    """Returns when the state that went into memory last is whole there. Training never waits for that by itself."""
    training = checkpointer._training
    assert training is not None and training.saving.memory is not None, "there is no memory tier"
    assert training.saving.memory._saver.join(600), "a state was not sealed within ten minutes"


def empty_directory(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def environment(place: Path) -> dict[str, Any]:
    return {
        "machine": {**machine(), "file_system": _output("df", "--output=fstype", str(place)).split()[-1]},
        "versions": versions("torch", "numpy", "xxhash", "safetensors", "torch_checkpointing", "tenuto"),
        **code(Path(__file__).parent / "*.py"),
        "threads": {"torch": torch.get_num_threads()},
    }


def report(result: Result, options: argparse.Namespace, place: Path) -> None:
    """Prints the comparison and writes its result file, which names the command that made it."""
    sized = f"{result.id}_{options.gib:g}gib" if result.sized else result.id
    document = {
        "id": options.id or sized,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_words()]),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "state": {"gib": round(result.bytes / GIB, 3), "leaves": options.leaves},
        **environment(place),
        **result.facts,
        "median_s": {name: float(np.median(values)) for name, values in result.seconds.items() if values},
        "median_bytes": {name: int(np.median(values)) for name, values in result.memory.items() if values},
        "targets": result.targets,
        "seconds": result.seconds,
        "bytes": result.memory,
    }
    if not options.no_save:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(document, indent=1, sort_keys=False) + "\n"
        (RESULTS / f"{document['id']}.json").write_text(text, encoding="utf-8")
    if options.json:
        print(json.dumps(document))
        return
    _print(document, result)


def _words() -> list[str]:
    """The arguments as they were given, without the directory that was measured in: it is this machine's."""
    words = sys.argv[1:]
    at = words.index("--where") if "--where" in words else len(words)
    return words[:at] + words[at + 2 :]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(document: dict[str, Any], result: Result) -> None:
    machine, versions = document["machine"], document["versions"]
    print(f"{document['id']}: {document['command']}")
    print(
        f"  {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['file_system']}, "
        f"Linux {machine['kernel']}, load {machine['load_at_start']:.1f}"
    )
    print("  " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    state = document["state"]
    print(f"  state {state['gib']} GiB in {state['leaves']} leaves, torch threads {document['threads']['torch']}")
    for name, value in result.facts.items():
        print(f"  {name}: {value}")
    for name, values in result.seconds.items():
        if values:
            middle = float(np.median(values))
            speed = f"{result.bytes / middle / 1e9:8.2f} GB/s" if result.sized and result.speeds else ""
            print(f"  {name:42s} {middle * 1e3:10.1f} ms {speed}   ({len(values)} rounds)")
    for name, values in result.memory.items():
        if values:
            print(f"  {name:60s} {float(np.median(values)) / (1 << 20):10.1f} MiB   ({len(values)} rounds)")
    for target in document["targets"]:
        low, high = target["interval"]
        verdict = "met   " if target["met"] else "MISSED"
        unit = next(name for name in UNITS if name in target)
        print(f"  {verdict} {target['target']}: {target[unit]:.3f} [{low:.3f}, {high:.3f}] {UNITS[unit]}".rstrip())


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
