"""The crash-state campaign: `python -m campaigns.crash_states --states 100000 --seed 1 --json out.json`.

Records the scenarios, makes distinct disks that a crash could have left, judges each, restarts a job on a sample of
them, and seeds the protocol bugs one at a time to show that they are found. Exit status 1 if a rule was broken, or if
more than one bug passed unseen.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from campaigns.bit_rot import rot
from campaigns.exploration import crash_states, violation
from campaigns.restart_check import after_crash, check_restart
from campaigns.result_file import Progress, ResultHeader, deliver, options
from campaigns.scenarios import NOTHING, SCENARIOS, Recording, killed
from campaigns.seeded_bugs import BUGS, Bug
from tenuto.errors import TenutoError
from tenuto.testing.checker import Checker
from tenuto.testing.simulated_disk import SimulatedDisk

Job = TypeVar("Job")

MODULE = "campaigns.crash_states"
RESTART_ONE_IN = 23
"""Of the states that are judged, one in so many is handed to a restarted job."""


@dataclass(frozen=True)
class Unit:
    """A piece of the campaign. `after`: killed after so many calls; `crash`: a crash state drawn by this number is the
    base of the recording; neither: the scenario as it is."""

    scenario: str
    seed: int
    each: int
    after: int | None = None
    crash: int | None = None
    part: int = 1
    """Only one in so many of the states is judged and counted, in the order in which they are made: names that are
    drawn at random are part of a fingerprint."""


@dataclass
class Result:
    """`states` counts distinct disks of this unit, `judged` disks with what was expected of them."""

    family: str
    states: int = 0
    judged: int = 0
    restarts: int = 0
    violations: list[str] = field(default_factory=list)
    fingerprints: bytes = b""


@dataclass
class BugResult:
    name: str
    breaks: str
    caught: bool
    states: int
    how: str


def run_unit(unit: Unit, restart_one_in: int = RESTART_ONE_IN) -> Result:
    """Judges every state of one unit."""
    logging.getLogger("stamina").setLevel(logging.ERROR)
    result = Result(unit.scenario)
    try:
        recording = record(unit)
    except TenutoError as error:
        result.violations.append(f"{unit}: the program itself fails: {type(error).__name__}: {error}")
        return result
    if recording is None:
        return result
    check, seen = Checker(), set[bytes]()
    for number, state in enumerate(crash_states(recording, each=unit.each, seed=unit.seed, seen=seen)):
        if number % unit.part:
            seen.discard(state.fingerprint)
            continue
        result.judged += 1
        problems = check(SimulatedDisk.holding(state.image), state.expected)
        if problems:
            result.violations.append(str(violation(recording, state, problems, check)))
        elif state.fingerprint[0] * 256 + state.fingerprint[1] < 65536 // restart_one_in:
            result.restarts += 1
            problems = check_restart(recording, state, check, unit.seed, NOTHING)
            problems += rot(state.image, state.expected, random.Random(state.fingerprint))
            if problems:
                result.violations.append(
                    f"{recording.name}: crash after call {state.prefix - 1}\n    " + "\n    ".join(problems)
                )
    result.states = len(seen)
    result.fingerprints = b"".join(sorted(seen))
    return result


def record(unit: Unit) -> Recording | None:
    """The unit's recording; None if its program ends before it is killed."""
    scenario = SCENARIOS[unit.scenario]
    if unit.after is not None:
        return killed(scenario, unit.seed, unit.after)
    recording = scenario.record(unit.seed)
    if unit.crash is None:
        return recording
    # A disk that a crash left, drawn by reservoir from few states of each prefix, and what a restarted job does on it.
    source = random.Random(f"{unit.scenario} {unit.seed} {unit.crash}")
    chosen = None
    for count, state in enumerate(crash_states(recording, each=4, seed=unit.crash, seen=set()), 1):
        if source.randrange(count) == 0:
            chosen = state
    assert chosen is not None
    return after_crash(recording, chosen, unit.seed, NOTHING)


def units(seed: int, each: int) -> Iterator[Unit]:
    """Without end: the scenarios, each killed everywhere, then crashes of restarted jobs."""
    yield from (Unit(name, seed, each) for name in SCENARIOS)
    lengths = {name: SCENARIOS[name].record(seed).calls for name in SCENARIOS}
    places = [(name, after) for name, length in lengths.items() for after in range(1, length)]
    random.Random(seed).shuffle(places)
    number = 0
    for name, after in places:
        yield Unit(name, seed, each // 8, after=after)
        number += 1
        if number % 4 == 0:
            yield Unit(name, seed, each // 8, crash=number)
    while True:
        for name in SCENARIOS:
            number += 1
            yield Unit(name, seed, each // 8, crash=number)


def hunt(bug: Bug, seed: int = 1, *, each: int = 40, limit: int = 6000) -> BugResult:
    """Seeds one bug and looks for it, in at most `limit` states."""
    logging.getLogger("stamina").setLevel(logging.ERROR)
    states = 0
    with bug.patch():
        for recording in _buggy(bug, seed):
            if isinstance(recording, str):
                return BugResult(bug.name, bug.breaks, True, states, recording)
            check = Checker()
            for state in crash_states(recording, each=each, seed=seed, seen=set()):
                states += 1
                problems = check(SimulatedDisk.holding(state.image), state.expected)
                if problems:
                    how = str(violation(recording, state, problems, check))
                    return BugResult(bug.name, bug.breaks, True, states, how)
                if states % 10 == 0:
                    problems = check_restart(recording, state, check, seed, bug.seeded)
                    problems += rot(state.image, state.expected, random.Random(states))
                if problems:
                    how = f"{recording.name}, crash after call {state.prefix - 1}: {problems[0]}"
                    return BugResult(bug.name, bug.breaks, True, states, how)
                if states >= limit:
                    return BugResult(bug.name, bug.breaks, False, states, "")
    return BugResult(bug.name, bug.breaks, False, states, "")


def _hunt_by_name(name: str, seed: int) -> BugResult:
    """For another process, to which a bug itself cannot be sent."""
    return hunt(next(bug for bug in BUGS if bug.name == name), seed)


def _buggy(bug: Bug, seed: int) -> Iterator[Recording | str]:
    """The recordings in which the bug is looked for; a text if the program fails by itself, which tells as well."""
    for name in bug.scenarios:
        try:
            yield SCENARIOS[name].record(seed, bug.seeded)
            for after in bug.kills:
                found = killed(SCENARIOS[name], seed, after, bug.seeded)
                if found is not None:
                    yield found
        except (TenutoError, OSError, AssertionError) as error:
            yield f"{name}: the program itself fails: {type(error).__name__}: {error}"


@dataclass
class Campaign:
    """Counts so far. `distinct` holds the fingerprints of all disks."""

    wanted: int
    distinct: set[bytes] = field(default_factory=set)
    families: dict[str, Result] = field(default_factory=dict)
    recordings: int = 0

    def add(self, result: Result) -> None:
        if result.states:
            self.recordings += 1
        whole = self.families.setdefault(result.family, Result(result.family))
        before = len(self.distinct)
        self.distinct.update(result.fingerprints[at : at + 16] for at in range(0, len(result.fingerprints), 16))
        whole.states += len(self.distinct) - before
        whole.judged += result.judged
        whole.restarts += result.restarts
        whole.violations += result.violations

    @property
    def violations(self) -> list[str]:
        return [text for result in self.families.values() for text in result.violations]


def run(
    wanted: int,
    units: Iterator[Job],
    judge: Callable[[Job], Result],
    *,
    workers: int,
    seconds: float = math.inf,
    log: Callable[[str], None],
) -> Campaign:
    """Judges at least `wanted` distinct disks, or as many as can be in so many `seconds`."""
    campaign, began = Campaign(wanted), time.monotonic()

    def goes_on() -> bool:
        return len(campaign.distinct) < wanted and time.monotonic() - began < seconds

    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        under_way: set[Future[Result]] = set()
        while goes_on() or under_way:
            while len(under_way) < 2 * workers and goes_on():
                under_way.add(pool.submit(judge, next(units)))
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                campaign.add(future.result())
            rate = len(campaign.distinct) / (time.monotonic() - began)
            log(
                f"{len(campaign.distinct):,} of {wanted:,} states, {campaign.recordings} recordings, "
                f"{rate:,.0f} states/s, {len(campaign.violations)} rules broken"
            )
    return campaign


def run_bugs(
    names: Sequence[str],
    hunt: Callable[[str, int], BugResult],
    seed: int,
    *,
    workers: int,
    log: Callable[[str], None],
) -> list[BugResult]:
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(hunt, name, seed) for name in names]
        results = []
        for number, future in enumerate(futures, 1):
            results.append(future.result())
            log(f"bugs: {number} of {len(names)} seeded, {sum(found.caught for found in results)} caught")
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__, workers=2, bugs=True)
    parser.add_argument("--states", type=int, default=100_000, help="distinct disks to judge")
    parser.add_argument("--each", type=int, default=400, help="states for one prefix of one scenario, at most")
    chosen = parser.parse_args(arguments)
    result_header, log = ResultHeader(MODULE, arguments, seed=chosen.seed), Progress()
    names = [] if chosen.no_bugs else [bug.name for bug in BUGS]
    bugs = run_bugs(names, _hunt_by_name, chosen.seed, workers=chosen.workers, log=log)
    campaign = run(chosen.states, units(chosen.seed, chosen.each), run_unit, workers=chosen.workers, log=log)
    log.end()
    report = result_header.result(summary(campaign, bugs))
    deliver(report, chosen.json, text(report))
    missed = sum(not found.caught for found in bugs)
    return 1 if campaign.violations or missed > 1 else 0


def summary(campaign: Campaign, bugs: list[BugResult]) -> dict[str, object]:
    """The counts, as they are written to the JSON file."""
    return {
        "distinct_states": len(campaign.distinct),
        "recordings": campaign.recordings,
        "judged": sum(result.judged for result in campaign.families.values()),
        "restarts": sum(result.restarts for result in campaign.families.values()),
        "violations": campaign.violations,
        "scenarios": {
            name: {"states": result.states, "restarts": result.restarts, "violations": len(result.violations)}
            for name, result in campaign.families.items()
        },
        "bugs_seeded": len(bugs),
        "bugs_caught": sum(found.caught for found in bugs),
        "bugs": [asdict(found) for found in bugs],
    }


def text(report: dict[str, object]) -> str:
    """The same for a person."""
    lines = []
    scenarios, bugs = report["scenarios"], report["bugs"]
    assert isinstance(scenarios, dict) and isinstance(bugs, list)
    for name, counts in scenarios.items():
        lines.append(
            f"{name:32} {counts['states']:>9,} states, {counts['restarts']:,} restarts, {counts['violations']} broken"
        )
    lines += [f"MISSED: {found['name']} ({found['breaks']})" for found in bugs if not found["caught"]]
    violations = report["violations"]
    assert isinstance(violations, list)
    lines += [str(violation) for violation in violations[:20]]
    lines.append(
        f"{report['distinct_states']:,} distinct states, {report['restarts']:,} restarts, "
        f"{len(violations)} rules broken; {report['bugs_caught']} of {report['bugs_seeded']} seeded bugs caught; "
        f"{report['seconds']} s, seed {report['seed']}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
