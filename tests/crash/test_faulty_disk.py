"""A fixed-seed slice of the faulty-disk campaign, and every seeded bug."""

from __future__ import annotations

import errno

import pytest

from campaigns.faulty_disk.bugs import BUGS, Bug
from campaigns.faulty_disk.campaign import all_cases, calls_of, campaign, chosen_cases, hunt, run_batch, summary
from campaigns.faulty_disk.case import PLACES, Case, run_case, surroundings
from campaigns.faulty_disk.faults import WAYS, FailingDisk, lost
from support.thinning import thinned
from tenuto.testing.simulated_disk import DiskImage, SimulatedDisk

SEED = 20
QUICK = {way.name for way in WAYS if not way.blocks}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_call_that_goes_wrong(way) -> None:
    cases = [case for case in chosen_cases(SEED, 0) if case.way == way.name]
    outcomes = run_batch(cases[: 1 if way.blocks else 2])
    assert [outcome for outcome in outcomes if outcome.violations] == []
    assert any(outcome.site is not None for outcome in outcomes)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_goes_wrong_where_no_fault_is(place: str) -> None:
    with surroundings():
        outcome = run_case(Case(place, 0, "EIO", "raise"))
    assert (outcome.kind, outcome.violations) == ("not reached", [])


@pytest.mark.parametrize("bug", thinned([bug for bug in BUGS if set(bug.ways) <= QUICK], 3), ids=lambda bug: bug.name)
def test_a_seeded_bug_is_seen(bug: Bug) -> None:
    assert hunt(bug, SEED).caught, bug.breaks


@pytest.mark.campaign
@pytest.mark.parametrize("bug", [bug for bug in BUGS if not set(bug.ways) <= QUICK], ids=lambda bug: bug.name)
def test_a_seeded_wait_without_a_deadline_is_seen(bug: Bug) -> None:
    assert hunt(bug, SEED).caught, bug.breaks


def test_every_line_that_calls_is_struck_in_every_way_that_it_can_fail() -> None:
    """The first cases of a campaign are one for each line, phase and way; the whole is every call in every way."""
    cases = all_cases(1)
    lines = {(place, site.line, site.call) for place in PLACES for site in calls_of(place)}
    assert len({line for _, line, _ in lines}) > 25
    assert {call for _, _, call in lines} >= {"create", "pwrite", "fsync", "link", "fsync_directory", "unlink", "mkdir"}
    assert len(cases) > 10_000
    assert len(set(cases)) == len(cases)
    sites = {(place, site.phase, site.line) for place in PLACES for site in calls_of(place)}
    struck_by = [(case, calls_of(case.place)[case.number - 1]) for case in cases]
    kinds = {(case.place, site.phase, site.line, case.way) for case, site in struck_by}
    assert {kind[:3] for kind in kinds} == sites
    first = chosen_cases(1, len(kinds))
    struck = {(case.place, calls_of(case.place)[case.number - 1].line, case.way) for case in first}
    assert struck == {(case.place, calls_of(case.place)[case.number - 1].line, case.way) for case in cases}


def test_a_failed_flush_loses_what_it_was_to_flush() -> None:
    disk = SimulatedDisk()
    way = next(way for way in WAYS if way.name == "EIO")
    failing = FailingDisk(disk, way, 3, lambda: "test")
    descriptor = failing.create("/file")
    failing.pwrite(descriptor, [memoryview(b"bytes")], 0)
    with pytest.raises(OSError) as caught:
        failing.fsync(descriptor)
    assert caught.value.errno == errno.EIO
    failing.fsync(descriptor)
    found = bytearray(5)
    failing.pread(descriptor, [memoryview(found)], 0)
    assert found == bytes(5)


def test_a_failed_flush_of_a_directory_loses_names_and_brings_removed_ones_back() -> None:
    disk = SimulatedDisk()
    disk.mkdir("/d")
    descriptor = disk.create("/d/manifest.json")
    disk.pwrite(descriptor, [memoryview(b"old")], 0)
    disk.close(descriptor)
    way = next(way for way in WAYS if way.name == "EIO")
    failing = FailingDisk(disk, way, 0, lambda: "test")
    failing.unlink("/d/manifest.json")
    failing.mkdir("/d/new")
    failing.number = failing.count + 1
    with pytest.raises(OSError):
        failing.fsync_directory("/d")
    failing.fsync_directory("/d")
    image = lost(disk.image(), failing.losses)
    assert isinstance(image, DiskImage)
    assert {path: held.data() if held else None for path, held in image.tree().items()} == {
        "/d": None,
        "/d/manifest.json": b"old",
    }


def test_the_summary_counts_what_was_struck() -> None:
    outcomes = run_batch([Case("used", 1, "EIO"), Case("used", 1, "EINTR"), Case("used", 10**9, "EIO")])
    found = summary(outcomes, [])
    assert (found["cases"], found["call_sites_struck"]) == (3, 1)
    assert sum(found["outcomes"].values()) == 3
    assert found["outcomes"]["not reached"] == 1
    assert found["violations"] == []


def test_a_campaign_goes_on_where_another_has_ended() -> None:
    def run(count: int, skip: int = 0) -> list[Case]:
        outcomes, hunted = campaign(SEED, count, workers=1, seconds=3600, log=lambda line: None, skip=skip, bugs=())
        assert not hunted
        return [outcome.case for outcome in outcomes]

    assert run(3) == [*run(1), *run(2, skip=1)] == chosen_cases(SEED, 3)
