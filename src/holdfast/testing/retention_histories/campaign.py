"""Random histories of retention, each compared with an oracle that shares no code with it (I7, I11).

`python -m holdfast.testing.retention_histories --histories 20000 --seed 1 --json FILE`

A history is saves (some fail), rollbacks, second attempts that take over, forks, verifications, damage, late metrics,
pins, tags, holds, clocks that jump, copied directories and foreign files; and retention with random policies, by live
and by superseded attempts, with somebody coming to need a checkpoint between its plan and its work. After each round
of retention exactly what the oracle lets go of is gone, without a trace, and nothing else has changed by a byte.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from unittest import mock

from holdfast.errors import HoldfastError
from holdfast.model import canonical
from holdfast.repo import manifest as manifests
from holdfast.testing.processes import replacing
from holdfast.testing.retention_histories.history import Broken, Counts, History
from holdfast.version import __version__

PART = 250
"""Histories that one process runs at a time."""


def run_histories(number: int, seed: int, *, first: int = 0, until_broken: bool = False) -> tuple[Counts, list[str]]:
    """Runs `number` histories of `seed`, from number `first` on; the counts, and what was broken in which history."""
    counts, broken = Counts(), []
    with _read_once():
        for history in range(first, first + number):
            counts.histories += 1
            try:
                History(f"{seed}/{history}", counts).run()
            except (Broken, HoldfastError, AssertionError) as error:
                broken.append(f"history {seed}/{history}: {type(error).__name__}: {error}")
                if until_broken:
                    break
    return counts, broken


@contextmanager
def _read_once() -> Iterator[None]:
    """Reading bytes is a function of the bytes: what has been read before is remembered. Nothing that is read is ever
    changed by its reader."""
    manifest = lru_cache(4096)(manifests.decode_manifest)
    with mock.patch.object(canonical, "loads", lru_cache(4096)(canonical.loads)):
        with replacing(manifests.decode_manifest, manifest):
            yield


def campaign(number: int, seed: int, *, workers: int) -> tuple[Counts, list[str]]:
    """`run_histories` in several processes, a part at a time; says on stderr how far it is."""
    total, broken = Counts(), []
    parts = [(first, min(PART, number - first)) for first in range(0, number, PART)]
    with ProcessPoolExecutor(workers) as pool:
        futures = [pool.submit(run_histories, size, seed, first=first) for first, size in parts]
        for done, future in enumerate(futures, start=1):
            counts, found = future.result()
            total.add(counts)
            broken += found
            if done % 4 == 0:
                sys.stderr.write(f"{total.histories:,} histories, {total.removed:,} removed, {len(broken)} broken\n")
    return total, broken


def main(arguments: Sequence[str] | None = None) -> int:
    from holdfast.testing.retention_histories.bugs import run_bugs

    parser = argparse.ArgumentParser(description="Random histories of retention against an independent oracle.")
    parser.add_argument("--histories", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the counts")
    parser.add_argument("--no-bugs", action="store_true", help="seed no bugs")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    bugs = [] if chosen.no_bugs else run_bugs(chosen.seed)
    counts, broken = campaign(chosen.histories, chosen.seed, workers=chosen.workers)
    words = sys.argv[1:] if arguments is None else arguments
    report = {
        "command": f"python -m holdfast.testing.retention_histories {' '.join(words)}",
        "seed": chosen.seed,
        "seconds": round(time.monotonic() - began, 1),
        "histories": counts.histories,
        "retentions": counts.retentions,
        "retentions_by_superseded_attempts": counts.superseded,
        "retentions_interfered_with": counts.raced,
        "checkpoints_judged": counts.judged,
        "checkpoints_removed": counts.removed,
        "checkpoints_only_i7_kept": counts.protected,
        "doings": dict(sorted(counts.doings.items())),
        "violations": broken,
        "bugs_seeded": len(bugs),
        "bugs_caught": sum(bug["caught"] for bug in bugs),
        "bugs": bugs,
        "versions": {"holdfast": __version__, "python": platform.python_version()},
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps(report, indent=2) + "\n"
    if chosen.json is not None:
        chosen.json.write_text(text)
    sys.stdout.write(text)
    return 0 if not broken and all(bug["caught"] for bug in bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
