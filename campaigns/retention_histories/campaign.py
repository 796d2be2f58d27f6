"""Random histories of retention, each compared with an oracle that shares no code with it (I7, I11).

`python -m campaigns.retention_histories --histories 20000 --seed 1 --json FILE`

A history is saves (some fail), rollbacks, second attempts that take over, forks, verifications, damage, late metrics,
pins, tags, holds, clocks that jump, copied directories and foreign files; and retention with random policies, by live
and by superseded attempts, with somebody coming to need a checkpoint between its plan and its work. After each round
of retention exactly what the oracle lets go of is gone, without a trace or, of lines that were left behind, into the
trash, and nothing else has changed by a byte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from unittest import mock

from campaigns.result_file import Progress, ResultHeader, deliver, options
from campaigns.retention_histories.history import Broken, Counts, History
from campaigns.simulated_processes import replacing
from tenuto.errors import TenutoError
from tenuto.model import canonical_json
from tenuto.repo.format import manifest as manifests

MODULE = "campaigns.retention_histories"
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
            except (Broken, TenutoError, AssertionError) as error:
                broken.append(f"history {seed}/{history}: {type(error).__name__}: {error}")
                if until_broken:
                    break
    return counts, broken


@contextmanager
def _read_once() -> Iterator[None]:
    """Reading bytes is a function of the bytes: what has been read before is remembered. Nothing that is read is ever
    changed by its reader."""
    manifest = lru_cache(4096)(manifests.decode_manifest)
    with mock.patch.object(canonical_json, "loads", lru_cache(4096)(canonical_json.loads)):
        with replacing(manifests.decode_manifest, manifest):
            yield


def campaign(number: int, seed: int, *, workers: int) -> tuple[Counts, list[str]]:
    """`run_histories` in several processes, a part at a time; says on stderr how far it is."""
    total, broken, log = Counts(), [], Progress()
    parts = [(first, min(PART, number - first)) for first in range(0, number, PART)]
    with ProcessPoolExecutor(workers) as pool:
        futures = [pool.submit(run_histories, size, seed, first=first) for first, size in parts]
        for future in futures:
            counts, found = future.result()
            total.add(counts)
            broken += found
            log(f"{total.histories:,} histories, {total.removed:,} removed, {len(broken)} broken")
    log.end()
    return total, broken


def main(arguments: Sequence[str] | None = None) -> int:
    from campaigns.retention_histories.bugs import run_bugs

    parser = options(MODULE, "Random histories of retention against an independent oracle.", workers=1, bugs=True)
    parser.add_argument("--histories", type=int, default=20_000)
    chosen = parser.parse_args(arguments)
    result_header = ResultHeader(MODULE, arguments, seed=chosen.seed)
    bugs = [] if chosen.no_bugs else run_bugs(chosen.seed)
    counts, broken = campaign(chosen.histories, chosen.seed, workers=chosen.workers)
    found = {
        "histories": counts.histories,
        "retentions": counts.retentions,
        "retentions_by_superseded_attempts": counts.superseded,
        "retentions_interfered_with": counts.raced,
        "checkpoints_judged": counts.judged,
        "checkpoints_removed": counts.removed,
        "checkpoints_moved_into_the_trash": counts.trashed,
        "checkpoints_only_i7_kept": counts.protected,
        "doings": dict(sorted(counts.doings.items())),
        "violations": broken,
        "bugs_seeded": len(bugs),
        "bugs_caught": sum(bug["caught"] for bug in bugs),
        "bugs": bugs,
    }
    deliver(result_header.result(found), chosen.json)
    return 0 if not broken and all(bug["caught"] for bug in bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
