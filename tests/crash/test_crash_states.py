"""A fixed-seed slice of the crash-state campaign, and of the seeded bugs."""

from __future__ import annotations

import pytest

from campaigns.crash_states import Unit, hunt, main, run_unit
from campaigns.exploration import crash_states, violation
from campaigns.recorded_jobs import Program
from campaigns.restart_check import ends
from campaigns.scenarios import SCENARIOS, Seeded, killed
from campaigns.seeded_bugs import BUGS, Bug
from support.thinning import thinned
from tenuto.errors import Superseded
from tenuto.repo.repository import Repo
from tenuto.store.local.store import LocalStore
from tenuto.testing.checker import PLACE, Checker, check
from tenuto.testing.expectations import Expected
from tenuto.testing.recorder import Call, Mark
from tenuto.testing.simulated_disk import SimulatedDisk

SEED = 20


@pytest.mark.parametrize("name", SCENARIOS)
def test_i1_i3_i4_hold_after_a_crash_at_any_call(name: str) -> None:
    long = ("take-over during a save", "retention", "successor of unfinished saves")
    part = 50 if name in long else 9 if name == "first save" else 20
    result = run_unit(Unit(name, SEED, each=5, part=part), restart_one_in=25)
    assert result.violations == []
    assert result.states > 10


@pytest.mark.parametrize("after", thinned([3, 46, 90], 2))
def test_a_successor_of_a_killed_process_relies_on_nothing_that_is_not_durable(after: int) -> None:
    result = run_unit(Unit("several saves", SEED, each=6, after=after, part=2), restart_one_in=25)
    assert result.violations == []
    assert result.states > 20


@pytest.mark.parametrize("after", thinned([60, 90, 120], 2))
def test_a_process_that_is_killed_with_two_saves_in_flight(after: int) -> None:
    result = run_unit(Unit("two in flight", SEED, each=6, after=after, part=2), restart_one_in=25)
    assert result.violations == []
    assert result.states > 20


@pytest.mark.parametrize("crash", thinned([1, 3], 2))
def test_a_crash_of_the_job_that_was_restarted_after_a_crash(crash: int) -> None:
    result = run_unit(Unit("retention", SEED, each=6, crash=crash, part=2), restart_one_in=25)
    assert result.violations == []
    assert result.states > 20


@pytest.mark.parametrize("bug", thinned(BUGS, 3), ids=lambda bug: bug.name)
def test_a_seeded_bug_is_caught(bug: Bug) -> None:
    found = hunt(bug, SEED, each=4, limit=1500)
    assert found.caught, f"{bug.name}: {bug.breaks}; not seen in {found.states} states"


def test_there_are_enough_seeded_bugs_and_each_has_a_name_of_its_own() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20


@pytest.mark.parametrize("name", ["take-over during a save", "two in flight"])
def test_a_recording_is_the_same_each_time(name: str) -> None:
    scenario = SCENARIOS[name]
    assert _calls(scenario.record(SEED).log) == _calls(scenario.record(SEED).log)


def _calls(log: list[Call | Mark]) -> list[tuple[str, str, int]]:
    """Without the bytes, in which the wall clock stands for a person's eye."""
    return [(step.kind, step.path, step.inode) for step in log if isinstance(step, Call)]


def test_nothing_bypasses_the_recorder() -> None:
    """What the calls amount to is what the disk holds."""
    for scenario in SCENARIOS.values():
        recording = scenario.record(SEED)
        all_there, only_durable = ends(recording)
        marks = [step for step in recording.log if isinstance(step, Mark)]
        expected = Expected.after(marks)
        assert check(SimulatedDisk.holding(all_there), expected) == []
        assert check(SimulatedDisk.holding(only_durable), expected) == []


def test_what_is_known_of_a_checkpoint_is_what_looking_again_finds() -> None:
    """The checker's memory is a fast path: with it and without it the answers are the same."""
    seeded = Seeded(above=next(bug for bug in BUGS if bug.name == "no pack flush").seeded.above)
    recording = SCENARIOS["first save"].record(SEED, seeded)
    remembering, broken = Checker(), 0
    for state in crash_states(recording, each=30, seed=SEED, seen=set()):
        disk = SimulatedDisk.holding(state.image)
        answer = check(disk, state.expected)
        assert remembering(disk, state.expected) == answer == remembering(disk, state.expected)
        broken += bool(answer)
    assert broken > 10


def test_a_violation_names_the_fewest_losses_that_break_the_rule() -> None:
    bug = next(bug for bug in BUGS if bug.name == "manifest's directory not flushed")
    recording = SCENARIOS["first save"].record(SEED, bug.seeded)
    for state in crash_states(recording, each=50, seed=SEED, seen=set()):
        problems = check(SimulatedDisk.holding(state.image), state.expected)
        if problems:
            found = violation(recording, state, problems, check)
            break
    else:
        pytest.fail("the bug was not found")
    assert len(found.lost) == 1 and "manifest.json" in found.lost[0]
    assert "I3: main/a0001/10 was reported as committed and is lost" in str(found)


def test_a_killed_process_does_nothing_more() -> None:
    recording = killed(SCENARIOS["first save"], SEED, 60)
    assert recording is not None
    done = _calls(recording.log[: recording.start])
    assert 50 < len(done) <= 62
    assert done == _calls(SCENARIOS["first save"].record(SEED).log)[: len(done)]
    assert killed(SCENARIOS["first save"], SEED, 1000) is None


def test_the_owner_that_was_claimed_over_is_superseded() -> None:
    program = Program(SEED)
    with program.running():
        old = program.start()
        old.claim()
        saving = old.saving(10)
        next(saving)
        program.start().claim(takeover=True)
        old.act()
        with pytest.raises(Superseded):
            list(saving)


def test_the_distinct_states_are_distinct() -> None:
    recording = SCENARIOS["several saves"].record(SEED)
    seen: set[bytes] = set()
    trees = [
        tuple(state.image.tree().items()) for state in crash_states(recording, each=6, seed=1, seen=seen) if state.new
    ]
    assert len(set(trees)) == len(trees) == len(seen)


def test_the_campaign_runs_from_the_command_line(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "out.json"
    assert (
        main(["--states", "60", "--seed", "3", "--each", "4", "--workers", "1", "--no-bugs", "--json", str(out)]) == 0
    )
    assert '"violations": []' in out.read_text()
    assert "0 rules broken" in capsys.readouterr().out


def test_the_recorded_program_runs_on_a_real_directory_too(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The same repository code over the operating system, judged by the same checker's eyes."""
    recording = SCENARIOS["several saves"].record(SEED)
    for path, contents in ends(recording)[0].tree().items():
        place = tmp_path / path.lstrip("/")
        place.mkdir() if contents is None else place.write_bytes(contents.data())
    repo = Repo.open(LocalStore(f"{tmp_path}{PLACE}", create=False))
    assert repo.committed("main", 1) == [30, 20, 10]
