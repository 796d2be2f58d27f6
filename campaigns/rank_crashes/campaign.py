"""The campaign: recordings in many interleavings, each judged after a crash of the machine and of single nodes."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from campaigns.crash_states import BugResult, Result
from campaigns.exploration import crash_states, violation
from campaigns.persistence import Persistence
from campaigns.rank_crashes.bugs import SOUGHT, Bug
from campaigns.rank_crashes.nodes import NodePersistence
from campaigns.rank_crashes.scenarios import SCENARIOS, End
from campaigns.restart_check import Restarted, check_restart, ends
from campaigns.scenarios import NOTHING, Recording, crashed
from tenuto.errors import TenutoError
from tenuto.testing.expectations import Expected
from tenuto.testing.recorder import Mark
from tenuto.testing.simulated_disk import SimulatedDisk

RESTART_ONE_IN: Final = 41
"""Of the states that are judged, one in so many is handed to a restarted job of one to three ranks."""
PARTS: Final = 8
"""Of a recording only one in so many prefixes is looked at."""
CRASHED: Final = 6
"""Interleavings of which a bug's crash states are looked at."""


@dataclass(frozen=True)
class Unit:
    """One recording. `part`: only one in so many of its prefixes is looked at, beginning with number `at`."""

    scenario: str
    seed: int
    schedule: int
    each: int
    nodes: bool = False
    end: End | None = None
    part: int = 1
    at: int = 0


def run_unit(unit: Unit, restart_one_in: int = RESTART_ONE_IN) -> Result:
    logging.getLogger("stamina").setLevel(logging.ERROR)
    result = Result(f"{unit.scenario}{', nodes of their own' if unit.nodes else ''}")
    try:
        recording = SCENARIOS[unit.scenario].record(unit.seed, unit.schedule, end=unit.end, nodes=unit.nodes)
    except (TenutoError, AssertionError) as error:
        result.violations.append(f"{unit}: the program itself fails: {type(error).__name__}: {error}")
        return result
    if recording is None:
        return result
    check, seen = recording.checking(), set[bytes]()
    for state in crash_states(recording, each=unit.each, seed=unit.seed + unit.at, seen=seen, part=unit.part):
        result.judged += 1
        problems = check(SimulatedDisk.holding(state.image), state.expected)
        if problems:
            result.violations.append(str(violation(recording, state, problems, check)))
        elif state.fingerprint[0] * 256 + state.fingerprint[1] < 65536 // restart_one_in:
            result.restarts += 1
            problems = check_restart(recording, state, check, unit.seed, NOTHING, crashed=_restarted(unit.scenario))
            if problems:
                named = "\n    ".join(problems)
                result.violations.append(f"{recording.name}: crash after call {state.prefix - 1}\n    {named}")
    result.states = len(seen)
    result.fingerprints = b"".join(sorted(seen))
    return result


def _restarted(scenario: str) -> Restarted:
    return lambda base, opening, seed, name, _: SCENARIOS[scenario].restart(base, opening, seed, name)


def units(name: str, seed: int, each: int) -> Iterator[Unit]:
    """Of one scenario, without end, each time in another interleaving: on one machine, on nodes, and with the end of
    the job or of one of its ranks. All are short, so that few states say something of many interleavings."""
    chance = random.Random(f"{name} {seed}")
    whole, of_ranks = SCENARIOS[name].length(seed)
    victims = [None, *range(len(of_ranks))]
    for schedule in itertools.count():
        for nodes in (False, True):
            yield Unit(name, seed, schedule, each // 4 if nodes else each, nodes, part=PARTS, at=schedule)
        turn, victim = schedule // len(victims), victims[schedule % len(victims)]
        end = End(_within(chance, 8, whole) if victim is None else _within(chance, 4, of_ranks[victim]), victim)
        nodes = bool((schedule + turn) % 2)
        yield Unit(name, seed, schedule, each // 4, nodes, end, part=PARTS, at=schedule)


def _within(chance: random.Random, first: int, length: int) -> int:
    return chance.randrange(first, max(length, first + 1))


def hunt(bug: Bug, seed: int = 1, *, each: int = 4, limit: int = 3000, schedules: int = 18) -> BugResult:
    """Seeds one bug and looks for it: first in what many interleavings come to without any crash, then in the crash
    states of a few, at most `limit`."""
    logging.getLogger("stamina").setLevel(logging.ERROR)
    states = 0
    looks: tuple[Callable[[str, Recording], Iterator[str]], ...] = (
        lambda name, found: _at_its_end(found),
        lambda name, found: _crashed(name, found, seed, each),
    )
    with bug.patch():
        for count, found_in in zip((schedules, CRASHED), looks, strict=True):
            for name, recording in _buggy(bug, seed, count):
                if isinstance(recording, str):
                    return BugResult(bug.name, bug.breaks, True, states, recording)
                for how in found_in(name, recording):
                    states += 1
                    if how:
                        return BugResult(bug.name, bug.breaks, True, states, how)
                    if states >= limit:
                        return BugResult(bug.name, bug.breaks, False, states, "")
    return BugResult(bug.name, bug.breaks, False, states, "")


def _at_its_end(recording: Recording) -> Iterator[str]:
    expected = Expected.after(step for step in recording.log if isinstance(step, Mark))
    problems = recording.checking()(SimulatedDisk.holding(ends(recording)[0]), expected)
    yield f"{recording.name}, without any crash: {problems[0]}" if problems else ""


def _crashed(name: str, recording: Recording, seed: int, each: int) -> Iterator[str]:
    """What is wrong with each state, on one machine and on nodes; one in sixteen is handed to a restarted job. A save
    into several places is so long that only some of its prefixes are looked at."""
    restarted, part = (_restarted(name), PARTS // 2) if SCENARIOS[name].replicated else (crashed, 1)
    for replaying in (Persistence, NodePersistence):
        checking, check = replace(recording, replaying=replaying), recording.checking()
        for number, state in enumerate(crash_states(checking, each=each, seed=seed, seen=set(), part=part)):
            problems = check(SimulatedDisk.holding(state.image), state.expected)
            if problems:
                yield str(violation(checking, state, problems, check))
            elif number % 16 == 0:
                problems = check_restart(checking, state, check, seed, NOTHING, crashed=restarted)
                yield f"{checking.name}, crash after call {state.prefix - 1}: {problems[0]}" if problems else ""
            else:
                yield ""


def _buggy(bug: Bug, seed: int, schedules: int) -> Iterator[tuple[str, Recording | str]]:
    """Recordings with the bug, each of the scenario that is named; a text where the program fails by itself."""
    for schedule in range(schedules):
        for name in bug.scenarios:
            try:
                found = SCENARIOS[name].record(seed, schedule, seeded=bug.seeded)
            except (TenutoError, OSError, AssertionError) as error:
                yield name, f"{name}: the program itself fails: {type(error).__name__}: {error}"
                return
            assert found is not None
            yield name, found


def hunt_by_name(name: str, seed: int) -> BugResult:
    """For another process, to which a bug itself cannot be sent."""
    return hunt(SOUGHT[name], seed)
