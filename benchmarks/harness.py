"""Interleaved comparisons: every contender once a round, round after round, so that each pair is measured side by side.

A contender measures itself: it returns the seconds that count, and may prepare and clean up outside of them. Figures
are medians; ratios are the median of the rounds' own ratios, with a 95 % bootstrap interval over the rounds. A target
is met when the interval's bad end meets it. Absolute speeds of shared machines drift; the ratios of one round do not.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
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

RESULTS = Path(__file__).parent / "results"
RESAMPLES = 10_000
GIB = 1 << 30


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


@dataclass
class Result:
    id: str
    seconds: dict[str, list[float]]
    bytes: int
    facts: dict[str, Any] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)

    def ratio(self, numerator: str, denominator: str, allowance_s: float = 0.0) -> tuple[float, float, float]:
        """Median of the rounds' ratios, and the ends of its 95 % bootstrap interval."""
        above, below = np.array(self.seconds[numerator]), np.array(self.seconds[denominator])
        rounds = min(len(above), len(below))
        ratios = (above[:rounds] - allowance_s) / below[:rounds]
        draws = np.random.default_rng(0).integers(0, rounds, (RESAMPLES, rounds))
        low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
        return float(np.median(ratios)), float(low), float(high)

    def judge(self, target: Target) -> None:
        middle, low, high = self.ratio(target.numerator, target.denominator, target.allowance_s)
        met = high <= target.at_most if target.at_most is not None else low >= (target.at_least or 0.0)
        self.targets.append(
            {"target": target.text, "ratio": middle, "interval": [low, high], "met": bool(met)}
            | {"limit": target.at_most if target.at_most is not None else target.at_least}
        )


def arguments(description: str, *, add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (default 1)")
    parser.add_argument("--leaves", type=int, default=200, help="tensors in the state (default 200)")
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
    return parser.parse_args()


@contextmanager
def workplace(options: argparse.Namespace) -> Iterator[Path]:
    """An empty directory on the file system to be measured; gone afterwards."""
    parent = Path(options.where) if options.where else Path(__file__).parent
    path = Path(tempfile.mkdtemp(prefix=".measuring-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_state(gib: float, leaves: int) -> dict[str, Any]:
    """fp32 tensors of equal size with values that nothing can compress away; one plain value."""
    generator = torch.Generator().manual_seed(0)
    each = max(int(gib * GIB) // leaves // 4, 1)
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


def timed(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def drop_cache(root: Path) -> str:
    """Drops every file below `root` from the page cache; says how. Raises AssertionError if pages stay."""
    files = [root] if root.is_file() else [path for path in sorted(root.rglob("*")) if path.is_file()]
    gc.collect()  # a mapping that lingers in a reference cycle pins its pages
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    how = "fsync and posix_fadvise(DONTNEED) of each file"
    if any(cached_share(path) > 0.01 for path in files) and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1\n", encoding="ascii")
        how += ", then /proc/sys/vm/drop_caches"
    held = {str(path): round(share, 3) for path in files if (share := cached_share(path)) > 0.01}
    assert not held, f"the page cache still holds what is to be read cold: {held}"
    return how


CACHESTAT = 451
"""The number of cachestat(2), Linux 6.5, on every architecture; unlike a probing read it brings nothing in."""


def cached_share(path: Path) -> float:
    """The share of the file's pages that the page cache holds."""
    pages = -(-path.stat().st_size // os.sysconf("SC_PAGE_SIZE"))
    extent, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        system = ctypes.CDLL(None, use_errno=True)
        if system.syscall(CACHESTAT, descriptor, extent, found, 0) != 0:
            raise OSError(ctypes.get_errno(), "cachestat is not there: whether a read is cold cannot be told")
    finally:
        os.close(descriptor)
    return found[0] / max(pages, 1)


def warm_cache(root: Path) -> None:
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                block = bytearray(8 << 20)
                while file.readinto(block):
                    pass


def empty_directory(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def environment(place: Path) -> dict[str, Any]:
    versions = {name: _version(name) for name in ("torch", "numpy", "xxhash", "safetensors", "holdfast")}
    return {
        "machine": {
            "cpu": _first("/proc/cpuinfo", "model name"),
            "cores": os.cpu_count(),
            "memory_gib": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20), 1),
            "kernel": platform.release(),
            "file_system": _output("df", "--output=fstype", str(place)).split()[-1],
            "load_at_start": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **versions},
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "threads": {"torch": torch.get_num_threads()},
    }


def report(result: Result, options: argparse.Namespace, place: Path) -> None:
    """Prints the comparison and writes its result file, which names the command that made it."""
    document = {
        "id": options.id or result.id,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "state": {"gib": round(result.bytes / GIB, 3), "leaves": options.leaves},
        **environment(place),
        **result.facts,
        "median_s": {name: float(np.median(values)) for name, values in result.seconds.items() if values},
        "targets": result.targets,
        "seconds": result.seconds,
    }
    if not options.no_save:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(document, indent=1, sort_keys=False) + "\n"
        (RESULTS / f"{document['id']}.json").write_text(text, encoding="utf-8")
    if options.json:
        print(json.dumps(document))
        return
    _print(document, result)


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
            print(
                f"  {name:42s} {middle * 1e3:10.1f} ms {result.bytes / middle / 1e9:8.2f} GB/s   ({len(values)} rounds)"
            )
    for target in document["targets"]:
        low, high = target["interval"]
        verdict = "met   " if target["met"] else "MISSED"
        print(f"  {verdict} {target['target']}: {target['ratio']:.3f} [{low:.3f}, {high:.3f}]")


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _first(path: str, key: str) -> str:
    for line in Path(path).read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(key):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
