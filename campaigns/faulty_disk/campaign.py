"""The faulty-disk campaign: `python -m campaigns.faulty_disk --seed 1 --json out.json`.

A small training, on an empty place and on one with checkpoints and a dead process's unfinished save, is run with calls
of its store going wrong in every way that a disk has: each line of the store that makes a call, in each phase, in each
way, and every call that changes the disk. Each case is judged on what the training was told, on a healthy disk
afterwards, and by a restarted job. Then bugs are seeded one at a time, to show that they are seen; then real file
systems are filled. Exit status 1 if a rule was broken or a bug passed unseen.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from campaigns.faulty_disk.bugs import BUGS, Bug
from campaigns.faulty_disk.case import PLACES, Case, Outcome, run_case, sites, surroundings
from campaigns.faulty_disk.faults import CHANGING, FLUSHES, WAYS, Site
from campaigns.faulty_disk.full import fill_all
from campaigns.result_file import Progress, ResultHeader, deliver, options

MODULE = "campaigns.faulty_disk"
BATCH = 20
BUG_CASES = 40
"""Tries in which a seeded bug has to be seen."""


@cache
def calls_of(place: str) -> list[Site]:
    with surroundings():
        return sites(place)


def all_cases(seed: int) -> list[Case]:
    """Every call in every way that it can fail. `on_error` and whether what hangs comes back are drawn from the
    seed."""
    source = random.Random(seed)
    return [
        Case(place, number, way.name, source.choice(("warn", "raise")), source.random() < 0.5)
        for place in PLACES
        for number, site in enumerate(calls_of(place), 1)
        for way in WAYS
        if way.concerns(site.call)
    ]


def chosen_cases(seed: int, count: int) -> list[Case]:
    """`count` of them, or all if 0: the first of each line, phase and way; then calls that change the disk; then any,
    each lot in an order drawn from the seed."""
    cases = all_cases(seed)
    seen: set[tuple[str, str, str, str]] = set()
    first: list[Case] = []
    changing: list[Case] = []
    rest: list[Case] = []
    for case in cases:
        site = calls_of(case.place)[case.number - 1]
        key = (case.place, site.phase, site.line, case.way)
        lot = rest if site.call not in CHANGING | FLUSHES else changing
        if key not in seen:
            seen.add(key)
            lot = first
        lot.append(case)
    source = random.Random(seed)
    for some in (first, changing, rest):
        source.shuffle(some)
    ordered = [*first, *changing, *rest]
    return ordered[:count] if count else ordered


def run_batch(cases: Iterable[Case]) -> list[Outcome]:
    with surroundings():
        return [run_case(case) for case in cases]


@dataclass
class Hunted:
    name: str
    breaks: str
    caught: bool
    cases: int
    how: str


def hunt(bug: Bug, seed: int, limit: int = BUG_CASES) -> Hunted:
    """Seeds one bug and looks for it."""
    # Who goes on after a failed save is who a bug can mislead: all that suit go on, whatever was drawn.
    cases = [replace(case, on_error="warn") for case in chosen_cases(seed, 0) if _suits(bug, case)]
    random.Random(f"{seed} {bug.name}").shuffle(cases)
    for place in PLACES:
        calls_of(place)
    with surroundings():
        run_case(Case(PLACES[1], 0, "EIO"))  # the place to begin with is made before the bug is there
        with bug.patch():
            for number, case in enumerate(cases[:limit], 1):
                outcome = run_case(case, bug.seeded)
                if outcome.violations:
                    return Hunted(bug.name, bug.breaks, True, number, f"{outcome.site}: {outcome.violations[0]}")
    return Hunted(bug.name, bug.breaks, False, len(cases[:limit]), "")


def _hunt_by_name(name: str, seed: int) -> Hunted:
    return hunt(next(bug for bug in BUGS if bug.name == name), seed)


def _suits(bug: Bug, case: Case) -> bool:
    site = calls_of(case.place)[case.number - 1]
    return (
        case.way in bug.ways
        and (not bug.calls or site.call in bug.calls)
        and (not bug.phases or site.phase in bug.phases)
    )


def campaign(
    seed: int,
    count: int,
    *,
    workers: int,
    seconds: float,
    log: Callable[[str], None],
    skip: int = 0,
    bugs: Sequence[Bug] = BUGS,
) -> tuple[list[Outcome], list[Hunted]]:
    """The bugs, then cases until there are `count` of them or `seconds` are over; without the first `skip`, so that one
    campaign can go on where another has ended."""
    until = time.monotonic() + seconds
    for place in PLACES:
        calls_of(place)
    cases = chosen_cases(seed, skip + count if count else 0)[skip:]
    batches = [cases[at : at + BATCH] for at in range(0, len(cases), BATCH)]
    outcomes: list[Outcome] = []
    hunted: list[Hunted] = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        for found in pool.map(_hunt_by_name, [bug.name for bug in bugs], [seed] * len(bugs)):
            hunted.append(found)
            log(f"bugs: {len(hunted)} of {len(bugs)} seeded, {sum(one.caught for one in hunted)} seen")
        under_way: set[Future[list[Outcome]]] = set()
        while batches or under_way:
            while batches and len(under_way) < 2 * workers and time.monotonic() < until:
                under_way.add(pool.submit(run_batch, batches.pop(0)))
            if not under_way:
                break
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                outcomes += future.result()
            broken = sum(bool(outcome.violations) for outcome in outcomes)
            log(f"{len(outcomes):,} of {len(cases):,} cases, {broken} with a rule broken")
    return outcomes, hunted


def summary(outcomes: list[Outcome], hunted: list[Hunted]) -> dict[str, Any]:
    """The counts, as they are written to the JSON file."""
    reached = [outcome for outcome in outcomes if outcome.site is not None]
    by_way = {way.name: Counter[str]() for way in WAYS}
    for outcome in outcomes:
        by_way[outcome.case.way][outcome.kind] += 1
    return {
        "cases": len(outcomes),
        "cases_possible": len(all_cases(0)),
        "calls": {place: len(calls_of(place)) for place in PLACES},
        "call_sites": len({(site.line, site.call) for place in PLACES for site in calls_of(place)}),
        "call_sites_struck": len({(o.site.line, o.site.call) for o in reached if o.site is not None}),
        "call_sites_by_phase": len({(site.line, site.call, site.phase) for p in PLACES for site in calls_of(p)}),
        "call_sites_by_phase_struck": len({(o.site.line, o.site.call, o.site.phase) for o in reached if o.site}),
        "outcomes": dict(Counter(outcome.kind for outcome in outcomes).most_common()),
        "outcomes_by_way": {way: dict(kinds.most_common()) for way, kinds in by_way.items()},
        "violations": [_described(outcome) for outcome in outcomes if outcome.violations],
        "bugs_seeded": len(hunted),
        "bugs_seen": sum(found.caught for found in hunted),
        "bugs": [asdict(found) for found in hunted],
    }


def _described(outcome: Outcome) -> dict[str, Any]:
    return {"case": asdict(outcome.case), "site": str(outcome.site), "violations": outcome.violations}


def text(report: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [f"{count:>7,}  {kind}" for kind, count in report["outcomes"].items()]
    lines += [f"NOT SEEN: {found['name']} ({found['breaks']})" for found in report["bugs"] if not found["caught"]]
    lines += [f"BROKEN: {found['case']} at {found['site']}: {found['violations'][0]}" for found in report["violations"]]
    lines += [f"{found['place']}: {found['said']}" for found in report.get("full", [])]
    lines.append(
        f"{report['cases']:,} cases at {report['call_sites_struck']} of {report['call_sites']} call sites, "
        f"{len(report['violations'])} with a rule broken; {report['bugs_seen']} of {report['bugs_seeded']} seeded bugs "
        f"seen; {report['seconds']} s"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__, workers=2, bugs=True)
    parser.add_argument("--cases", type=int, default=6000, help="how many of the possible cases; 0: all of them")
    parser.add_argument("--skip", type=int, default=0, help="without so many of the first cases: they were run before")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no further case after so long")
    given = parser.parse_args(arguments)
    result_header, log = ResultHeader(MODULE, arguments, seed=given.seed, packages=["numpy"]), Progress()
    full = [asdict(found) for found in fill_all()]
    outcomes, hunted = campaign(
        given.seed,
        given.cases,
        workers=given.workers,
        seconds=given.seconds,
        log=log,
        skip=given.skip,
        bugs=() if given.no_bugs else BUGS,
    )
    log.end()
    report = result_header.result({"skipped": given.skip, **summary(outcomes, hunted), "full": full})
    deliver(report, given.json, text(report))
    missed = report["bugs_seeded"] - report["bugs_seen"]
    return 1 if report["violations"] or missed or any(found["violations"] for found in full) else 0


if __name__ == "__main__":
    sys.exit(main())
