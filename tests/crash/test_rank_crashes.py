"""A fixed-seed slice of the crash states of several ranks, and seeded bugs of the protocol between them."""

from __future__ import annotations

import pytest

from holdfast.testing.disk_image import ROOT
from holdfast.testing.rank_crashes.bugs import BUGS
from holdfast.testing.rank_crashes.campaign import Unit, hunt, run_unit
from holdfast.testing.rank_crashes.nodes import NodePersistence
from holdfast.testing.rank_crashes.scenarios import SCENARIOS, End
from holdfast.testing.rank_crashes.turns import KINDS
from holdfast.testing.recorder import Call
from slices import crossed, thinned

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
)


@pytest.mark.parametrize(("name", "nodes"), crossed(list(SCENARIOS), [False, True]))
def test_i1_i3_i4_hold_after_a_crash_of_several_ranks_at_any_call(name: str, nodes: bool) -> None:
    schedule = list(SCENARIOS).index(name)
    result = run_unit(Unit(name, SEED, schedule, each=3, nodes=nodes, part=9), restart_one_in=60)
    assert result.violations == []
    assert result.states > 10


@pytest.mark.parametrize(
    "end", thinned([End(80), End(100, 0), End(120), End(35, 2), End(60, 0), End(20, 2)], 2), ids=str
)
def test_a_job_after_one_that_lost_a_rank_relies_on_nothing_that_is_not_durable(end: End) -> None:
    result = run_unit(Unit("saves of three ranks", SEED, end.after, each=3, nodes=True, end=end, part=5), 60)
    assert result.violations == []
    assert result.states > 10


@pytest.mark.parametrize("name", QUICK)
def test_a_seeded_bug_between_ranks_is_caught(name: str) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    found = hunt(bug, 1, each=3, limit=700, schedules=12)
    assert found.caught, f"{bug.name}: {bug.breaks}; not seen in {found.states} states"


def test_there_are_enough_seeded_bugs_and_each_has_a_name_of_its_own() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 16


@pytest.mark.parametrize("schedule", range(len(KINDS)), ids=KINDS)
def test_an_interleaving_is_the_same_each_time_and_another_one_for_another_number(schedule: int) -> None:
    scenario = SCENARIOS["saves of three ranks"]
    assert order(scenario.record(SEED, schedule)) == order(scenario.record(SEED, schedule))
    assert order(scenario.record(SEED, schedule)) != order(scenario.record(SEED, schedule + len(KINDS)))


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


def _all(variables: tuple[object, ...]) -> list[tuple[int, ...]]:
    assert len(variables) == 1, "the entry of the node that has flushed nothing"
    return [(0,), (1,)]
