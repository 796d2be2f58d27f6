"""The corruption campaign: `python -m campaigns.corruption --faults 1000000 --seed 1 --json out.json`.

Damages every class of byte of every object of small stores in memory, one fault at a time. Reading has to give exactly
what was saved, or an error that names the object; verify has to report the fault; and what is whole must not be called
damaged. Then bugs are seeded one at a time to show that the campaign can fail, and other formats are given a flipped
bit. Exit status 1 if anything passed unseen, was read wrongly or was a false alarm, or if a bug was not caught.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

from campaigns.corruption.bugs import BUGS, BugResult, by_name, hunt
from campaigns.corruption.judge import NOTHING_TELLS
from campaigns.corruption.units import FAULTS, Tally, Unit, run_unit, units
from campaigns.result_file import Progress, ResultHeader, deliver, options

MODULE = "campaigns.corruption"
PACKAGES = ("numpy", "xxhash", "torch", "safetensors")
Log = Callable[[str], None]


def run(faults: int, seed: int, *, workers: int, log: Log, each: int = FAULTS) -> Tally:
    """Judges at least `faults` faults that verify has to report."""
    total, began = Tally(), time.monotonic()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_settle) as pool:
        source = units(seed, each)
        while total.faults < faults:
            missing = -(-(faults - total.faults) // each)
            # In order, so that a campaign ends with the same faults however many processes share the work.
            for tally in pool.map(run_unit, itertools.islice(source, min(missing, 50 * workers))):
                if total.faults >= faults:
                    break
                total.add(tally)
                rate = total.faults / (time.monotonic() - began)
                log(
                    f"{total.faults:,} of {faults:,} faults, {rate:,.0f}/s, {len(total.violations)} violations, "
                    f"{len(total.alarms)} false alarms"
                )
    return total


def run_bugs(seed: int, *, workers: int, log: Log) -> list[BugResult]:
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_settle) as pool:
        results = []
        for result in pool.map(_hunt_by_name, [bug.name for bug in BUGS], [seed] * len(BUGS)):
            results.append(result)
            log(f"bugs: {len(results)} of {len(BUGS)} seeded, {sum(found.caught for found in results)} caught")
    return results


def run_peers(flips: int, seed: int) -> dict[str, dict[str, int]]:
    """In a process of its own: the frameworks are loaded there and nowhere else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_all_peers, flips, seed).result()


def _all_peers(flips: int, seed: int) -> dict[str, dict[str, int]]:
    from campaigns.corruption.peers import PEERS, flipped_bits

    return {peer.name: flipped_bits(peer, flips, seed) for peer in PEERS}


def _hunt_by_name(name: str, seed: int) -> BugResult:
    """For another process, to which a bug itself cannot be sent."""
    return hunt(by_name(name), seed)


def _settle() -> None:
    """In a worker: what is there now stays, and need not be looked at by the collector again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def summary(tally: Tally, bugs: Iterable[BugResult], peers: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The counts, as they are written to the JSON file."""
    bugs = list(bugs)
    detected = sum(count for (_, _, _, verify), count in tally.told.items() if verify in ("error", "shown"))
    return {
        "faults": tally.faults,
        "detected": detected,
        "detected_as_error": sum(count for (*_, verify), count in tally.told.items() if verify == "error"),
        "detected_as_shown": sum(count for (*_, verify), count in tally.told.items() if verify == "shown"),
        "violations": tally.violations[:100],
        "violation_count": len(tally.violations),
        "untouched_stores_checked": tally.untouched,
        "directories_in_the_wrong_place": dict(sorted(tally.directories.items())),
        "harmless_changes": dict(sorted(tally.harmless.items())),
        "false_alarms": tally.alarms[:100],
        "false_alarm_count": len(tally.alarms),
        "judged_again_without_the_fast_path": tally.again,
        "reading": _by(tally, lambda kind, fault, reading, verify: reading),
        "by_object": _by(tally, lambda kind, fault, reading, verify: kind),
        "by_fault": _by(tally, lambda kind, fault, reading, verify: fault),
        "shown_only": _shown(tally),
        "nothing_can_tell": {
            "faults": tally.legal,
            "meaning": "not among the faults above: the store is as another history would have left it, no "
            "checkpoint's bytes depend on it, and reading was exact",
            "kinds": {f"{fault}, {kind}": why for (fault, kind), why in NOTHING_TELLS.items()},
        },
        "by_byte_class": dict(sorted(tally.classes.items())),
        "peers_flipped_bit_in_tensor_bytes": peers,
        "bugs_seeded": len(bugs),
        "bugs_caught": sum(found.caught for found in bugs),
        "bugs": [asdict(found) for found in bugs],
    }


def _by(tally: Tally, key: Callable[[str, str, str, str], str]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for told, count in sorted(tally.told.items()):
        counts.setdefault(key(*told), Counter())[told[3]] += count
    return {name: dict(sorted(found.items())) for name, found in sorted(counts.items())}


def _shown(tally: Tally) -> dict[str, int]:
    """Which faults verify reports as something unusual, not as an error."""
    counts: Counter[str] = Counter()
    for (kind, fault, _, verify), count in tally.told.items():
        if verify == "shown":
            counts[f"{fault}, {kind}"] += count
    return dict(sorted(counts.items()))


def text(report: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [f"MISSED: {found['name']} ({found['breaks']})" for found in report["bugs"] if not found["caught"]]
    lines += report["violations"][:20] + report["false_alarms"][:20]
    lines += [f"{name}: {answers}" for name, answers in report["peers_flipped_bit_in_tensor_bytes"].items()]
    lines.append(
        f"{report['faults']:,} faults, {report['detected']:,} detected, {report['violation_count']} violations, "
        f"{report['false_alarm_count']} false alarms in {sum(report['harmless_changes'].values()):,} harmless changes "
        f"and {report['untouched_stores_checked']:,} untouched stores; "
        f"{sum(report['directories_in_the_wrong_place'].values()):,} directories in the wrong place; "
        f"{report['bugs_caught']} of "
        f"{report['bugs_seeded']} seeded bugs caught; {report['seconds']} s, seed {report['seed']}"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__, workers=2, bugs=True)
    parser.add_argument("--faults", type=int, default=1_000_000, help="faults to judge")
    parser.add_argument("--each", type=int, default=FAULTS, help="faults of one unit")
    parser.add_argument("--peer-flips", type=int, default=300, help="flipped bits for each of the other formats")
    parser.add_argument("--repair", action="store_true", help="damage repositories with redundancy, and repair them")
    parser.add_argument("--forge", action="store_true", help="forge in a sealed repository, without its key")
    parser.add_argument("--cases", type=int, default=20_000, help="with --repair, --forge: repositories to damage")
    parser.add_argument("--seconds", type=float, help="with --repair, --forge: end after this time")
    chosen = parser.parse_args(arguments)
    if chosen.repair:
        return _main_of_repairs(arguments, chosen)
    if chosen.forge:
        return _main_of_forgeries(arguments, chosen)
    result_header, log = ResultHeader(MODULE, arguments, seed=chosen.seed, packages=PACKAGES), Progress()
    bugs = [] if chosen.no_bugs else run_bugs(chosen.seed, workers=chosen.workers, log=log)
    peers = run_peers(chosen.peer_flips, chosen.seed) if chosen.peer_flips else {}
    tally = run(chosen.faults, chosen.seed, workers=chosen.workers, log=log, each=chosen.each)
    log.end()
    report = result_header.result(summary(tally, bugs, peers))
    deliver(report, chosen.json, text(report))
    failed = tally.violations or tally.alarms or any(not found.caught for found in bugs)
    return 1 if failed or report["detected"] != report["faults"] else 0


def _main_of_repairs(arguments: list[str] | None, chosen: argparse.Namespace) -> int:
    from campaigns.corruption.repair_bugs import REPAIR_BUGS, hunt
    from campaigns.corruption.repairs import run_repairs

    header, log = ResultHeader(MODULE, arguments, seed=chosen.seed, packages=PACKAGES), Progress()
    bugs = [] if chosen.no_bugs else [hunt(bug, chosen.seed) for bug in REPAIR_BUGS]
    tally = run_repairs(chosen.cases, chosen.seed, seconds=chosen.seconds, log=log)
    log.end()
    caught = sum(found.caught for found in bugs)
    seeded = {"bugs_seeded": len(bugs), "bugs_caught": caught, "bugs": [asdict(found) for found in bugs]}
    report = header.result({**tally.json(), **seeded})
    lines = [f"MISSED: {found.name} ({found.breaks})" for found in bugs if not found.caught]
    lines += report["violations"][:20]
    lines.append(
        f"{report['cases']:,} cases, {report['struck']:,} objects damaged, {report['repaired']:,} repaired, "
        f"{report['quarantined']:,} checkpoints quarantined, {report['violation_count']} violations; "
        f"{caught} of {len(bugs)} seeded bugs caught; {report['seconds']} s, seed {report['seed']}"
    )
    deliver(report, chosen.json, "\n".join(lines))
    return 1 if tally.violations or caught < len(bugs) else 0


def _main_of_forgeries(arguments: list[str] | None, chosen: argparse.Namespace) -> int:
    from campaigns.corruption.forgeries import BUGS as FORGERY_BUGS
    from campaigns.corruption.forgeries import caught, run_forgeries

    header, log = ResultHeader(MODULE, arguments, seed=chosen.seed, packages=PACKAGES), Progress()
    bugs = {} if chosen.no_bugs else {bug.name: caught(bug, chosen.seed) for bug in FORGERY_BUGS}
    tally = run_forgeries(chosen.cases, chosen.seed, seconds=chosen.seconds, log=log)
    log.end()
    report = header.result({**tally.json(), "bugs": bugs})
    lines = [f"MISSED: {name}" for name, how in bugs.items() if not how] + report["violations"][:20]
    lines.append(
        f"{report['cases']:,} cases, {sum(tally.attacks.values()):,} forgeries, {report['refused']:,} readings refused "
        f"and {report['genuine']:,} genuine, {report['violation_count']} violations; "
        f"{sum(map(bool, bugs.values()))} of {len(bugs)} seeded bugs caught; "
        f"{report['seconds']} s, seed {report['seed']}"
    )
    deliver(report, chosen.json, "\n".join(lines))
    return 1 if tally.violations or not all(bugs.values()) else 0


__all__ = ["Unit", "main", "run", "run_bugs", "run_peers", "summary", "text"]

if __name__ == "__main__":
    sys.exit(main())
