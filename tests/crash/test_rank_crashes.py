"""A fixed-seed slice of the crash states of several ranks, and seeded bugs of the protocol between them."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator

import pytest

from campaigns.crash_states import BugResult, Result
from campaigns.rank_crashes import campaign, scheduler
from campaigns.rank_crashes.bugs import BUGS, SOUGHT
from campaigns.rank_crashes.campaign import PARTS, Unit, hunt, run_unit, units
from campaigns.rank_crashes.nodes import NodePersistence
from campaigns.rank_crashes.scenarios import SCENARIOS, End
from campaigns.rank_crashes.scheduler import KINDS, Scheduler, Stuck
from campaigns.rank_crashes.shares import by_bug, split_by_agreement
from support.thinning import crossed, thinned
from tenuto.testing.recorder import Call
from tenuto.testing.simulated_disk import ROOT

SEED = 20
QUICK = (
    "a receipt before its pack is put",
    "announced before the manifest",
    "receipts of another save",
    "messages of an earlier incarnation",
    "one temporary name for all ranks",
    "no aborted mark",
    "parts before begin.json",
    "unfinished saves stay",
    "a place that the home does not list",
    "fewer copies than asked for count",
    "tidying asks for the manifest alone",
)


@pytest.mark.parametrize(("name", "nodes"), crossed(list(SCENARIOS), [False, True]))
def test_i1_i3_i4_hold_after_a_crash_of_several_ranks_at_any_call(name: str, nodes: bool) -> None:
    schedule = list(SCENARIOS).index(name)
    # Twice as many calls with places of their own, each state read several times; many states after a restart.
    part = 200 if SCENARIOS[name].replicated is not None else 60 if name == "restarted at the same board" else 24
    result = run_unit(Unit(name, SEED, schedule, each=3, nodes=nodes, part=part, at=schedule), restart_one_in=60)
    assert result.violations == []
    assert result.states > 10


@pytest.mark.parametrize(
    "end", thinned([End(80), End(100, 0), End(120), End(35, 2), End(60, 0), End(20, 2)], 2), ids=str
)
def test_a_job_after_one_that_lost_a_rank_relies_on_nothing_that_is_not_durable(end: End) -> None:
    result = run_unit(Unit("saves of three ranks", SEED, end.after, each=3, nodes=True, end=end, part=15), 60)
    assert result.violations == []
    assert result.states > 10


@pytest.mark.parametrize("name", QUICK)
def test_a_seeded_bug_between_ranks_is_caught(name: str) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    found = hunt(bug, 4, each=2, limit=600, schedules=3)
    assert found.caught, f"{bug.name}: {bug.breaks}; not seen in {found.states} states"


def test_there_are_enough_seeded_bugs_and_each_has_a_name_of_its_own() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 16


@pytest.mark.parametrize("schedule", range(len(KINDS)), ids=KINDS)
def test_an_interleaving_is_the_same_each_time_and_another_one_for_another_number(schedule: int) -> None:
    scenario = SCENARIOS["saves of three ranks"]
    assert order(scenario.record(SEED, schedule)) == order(scenario.record(SEED, schedule))
    others = [order(scenario.record(SEED, schedule + more * len(KINDS))) for more in (1, 2, 3)]
    assert any(other != order(scenario.record(SEED, schedule)) for other in others), "two alike may be chance"


def order(recording: object) -> list[tuple[int, str, str]]:
    return [(step.node, step.kind, step.path) for step in recording.log if isinstance(step, Call)]  # type: ignore[attr-defined]


def test_a_node_loses_only_its_own_and_flushes_only_its_own() -> None:
    persistence = NodePersistence()
    calls = [
        Call("create", "/a", 1, ROOT, "a", node=1),
        Call("create", "/b", 2, ROOT, "b", node=2),
        Call("fsync_directory", "/", ROOT, node=1),
    ]
    for number, call in enumerate(calls):
        persistence.replay(call, number)
    trees = [
        sorted(instant.image(choice).tree()) for instant in persistence.instants() for choice in _all(instant.variables)
    ]
    assert sorted(trees) == [["/a"], ["/a", "/b"]]


def test_a_directory_that_another_node_puts_names_in_is_not_its_makers_to_lose() -> None:
    """Nor are those above it; what the maker alone has put there is."""
    persistence = NodePersistence()
    calls = [
        Call("mkdir", "/d", 1, ROOT, "d", node=1),
        Call("mkdir", "/d/e", 2, 1, "e", node=1),
        Call("mkdir", "/d/own", 3, 1, "own", node=1),
        Call("create", "/d/e/f", 4, 2, "f", node=2),
        Call("fsync_directory", "/d/e", 2, node=2),
    ]
    for number, call in enumerate(calls):
        persistence.replay(call, number)
    trees = [
        sorted(instant.image(choice).tree()) for instant in persistence.instants() for choice in _all(instant.variables)
    ]
    assert sorted(trees) == [["/d", "/d/e", "/d/e/f"], ["/d", "/d/e", "/d/e/f", "/d/own"]]


def _all(variables: tuple[object, ...]) -> list[tuple[int, ...]]:
    assert len(variables) == 1, "the entry of the node that has flushed nothing"
    return [(0,), (1,)]


# -- the budget ---


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_units_of_each_scenario_come_by_every_kind_of_end_and_every_prefix(name: str) -> None:
    ranks = SCENARIOS[name].world
    found = list(itertools.islice(units(name, SEED, 48), 3 * PARTS))
    assert {unit.scenario for unit in found} == {name}
    assert {unit.schedule % len(KINDS) for unit in found} == set(range(len(KINDS)))
    whole = [unit for unit in found if unit.end is None]
    for nodes in (False, True):
        assert {unit.at % unit.part for unit in whole if unit.nodes is nodes} == set(range(PARTS))
    assert {unit.end.rank for unit in found if unit.end is not None} == {None, *range(ranks)}


def numbered(name: str) -> Iterator[tuple[str, int]]:
    return ((name, number) for number in itertools.count())


def ten_disks(unit: tuple[str, int]) -> Result:
    name, number = unit
    disks = [f"{name}{number:08}{disk:04}".ljust(16)[:16].encode() for disk in range(10)]
    return Result(name, 10, 10, fingerprints=b"".join(disks))


def one_disk(unit: tuple[str, int]) -> Result:
    return Result(unit[0], 1, 1, fingerprints=hashlib.blake2b(unit[0].encode(), digest_size=16).digest())


def test_each_scenario_has_its_part_of_the_states_and_of_the_time() -> None:
    shares = split_by_agreement(600, 3600, "abc", numbered, ten_disks, workers=1, log=lambda line: None)
    assert all(170 <= len(found.distinct) <= 230 for found, _ in shares.each.values())
    assert len(shares.whole.distinct) >= 600 and shares.without_states == []
    late = split_by_agreement(600, 0, "ab", numbered, one_disk, workers=1, log=lambda line: None)
    assert [len(found.distinct) for found, _ in late.each.values()] == [1, 1]


def test_the_result_has_a_line_for_each_scenario_with_the_bugs_that_were_looked_for_in_it() -> None:
    names = list(SCENARIOS)
    shares = split_by_agreement(len(names), 60, names, numbered, one_disk, workers=1, log=lambda line: None)
    hunts = [(bug.scenarios[0], BugResult(bug.name, bug.breaks, True, 1, "lost")) for bug in SOUGHT.values()]
    told = shares.json(hunts)
    assert list(told) == names and {line["states"] for line in told.values()} == {1}
    assert all(line["bugs_seeded"] == line["bugs_caught"] > 0 for line in told.values()), told
    assert {found.name for found in by_bug(hunts)} == {bug.name for bug in BUGS}


def test_threads_of_the_campaign_that_wait_for_each_other_catch_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "HANGS_S", 0.2)
    held, bug = threading.Lock(), next(bug for bug in BUGS if bug.name == QUICK[0])

    def recorded(*asked: object, **more: object) -> None:
        turns = Scheduler(1, "even", lambda actor: None)

        def work() -> None:
            with held:  # no lock that takes turns
                turns.point(0)

        def program() -> None:
            try:
                with held:
                    turns.point(1)
            except Exception as error:
                raise AssertionError("the program fails") from error

        turns.run({0: work, 1: program})
        raise AssertionError("the program fails")

    stuck = type("Stuck", (), {"record": staticmethod(recorded)})
    monkeypatch.setitem(campaign.SCENARIOS, bug.scenarios[0], stuck)
    with pytest.raises(Stuck):
        hunt(bug, SEED)


def test_a_bug_is_caught_where_one_scenario_shows_it() -> None:
    name = "rename for link"
    missed, seen = BugResult(name, "", False, 30, ""), BugResult(name, "", True, 7, "lost")
    first, second = (bug.scenarios[0] for bug in SOUGHT.values() if bug.name == name)
    shares = split_by_agreement(2, 60, [first, second], numbered, one_disk, workers=1, log=lambda line: None)
    for hunts in ([(first, missed), (second, seen)], [(first, seen), (second, missed)]):
        assert by_bug(hunts) == [BugResult(name, "", True, 37, "lost")]
        told = shares.json(hunts)
        assert [name in line["bugs_not_seen_here"] for line in told.values()] == [not one.caught for _, one in hunts]
    assert not by_bug([(first, missed), (second, missed)])[0].caught
