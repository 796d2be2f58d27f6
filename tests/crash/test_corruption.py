"""A fixed-seed slice of the corruption campaign, some seeded bugs, and what the campaign itself rests on."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from campaigns.corruption.bugs import BUGS, Bug, hunt
from campaigns.corruption.campaign import main, run
from campaigns.corruption.directories import CHANGES as DISPLACEMENTS
from campaigns.corruption.directories import displaced
from campaigns.corruption.faults import KINDS, draw, targets
from campaigns.corruption.harmless import CHANGES, false_alarms, unharmed
from campaigns.corruption.judge import judge, same
from campaigns.corruption.peers import PEERS, flipped_bits
from campaigns.corruption.repair_bugs import REPAIR_BUGS, RepairBug
from campaigns.corruption.repair_bugs import hunt as hunt_repairs
from campaigns.corruption.repairs import REDUNDANCIES, run_repairs
from campaigns.corruption.shapes import SHAPES, build_shape
from campaigns.corruption.units import Unit, run_unit, shape_of
from support.thinning import crossed, thinned
from tenuto.maintenance import repair_pack

SEED = 20


@pytest.mark.parametrize("name", SHAPES)
def test_i5_every_fault_is_told_and_no_other_bytes_are_read(name: str) -> None:
    tally = run_unit(Unit(name, SEED, 1, faults=200))
    assert tally.violations == []
    assert tally.alarms == []
    assert tally.faults + tally.legal == 200
    assert tally.legal < 10


@pytest.mark.parametrize("bug", thinned(BUGS, 3), ids=lambda bug: bug.name)
def test_a_seeded_bug_is_caught(bug: Bug) -> None:
    found = hunt(bug, SEED, limit=2500)
    assert found.caught, f"{bug.name}: {bug.breaks}; not seen in {found.faults} faults"


def test_there_are_enough_seeded_bugs_and_each_has_a_name_of_its_own() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 8


@pytest.mark.parametrize("kind", CHANGES)
def test_what_harms_nothing_is_no_error(kind: str) -> None:
    shape, _ = shape_of("steps", SEED)
    source = random.Random(f"{kind} {SEED}")
    for _ in range(5):
        assert unharmed(shape, kind, source) == []
    assert shape.place.objects.keys() == shape.objects.keys()


@pytest.mark.filterwarnings("ignore:.* is passed over:tenuto.TenutoWarning")
@pytest.mark.parametrize(("kind", "name"), crossed([*DISPLACEMENTS], [*SHAPES]))
def test_i5_a_directory_in_the_wrong_place_is_told_and_never_read_as_the_one_that_was_there(
    name: str, kind: str
) -> None:
    shape, _ = shape_of(name, SEED)
    source = random.Random(f"{kind} {SEED}")
    for _ in range(8):
        assert displaced(shape, kind, source) == []
    assert shape.place.objects.keys() == shape.objects.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_every_byte_of_every_object_is_in_a_byte_class(name: str) -> None:
    shape, found = shape_of(name, SEED)
    struck = {target.name for target in found}
    unfinished = {"runs/main/a0001/step-00000004/rank-00000.safetensors"} if name == "chunks" else set()
    assert struck == shape.objects.keys() - unfinished
    for target in found:
        data = shape.objects[target.name]
        covered = np.zeros(len(data), bool)
        for _, low, high in target.classes:
            covered[low:high] = True
        assert bytes(byte for byte, held in zip(data, covered, strict=True) if not held).strip(b",}") == b""


def test_every_kind_of_fault_strikes_and_changes_the_object() -> None:
    shape, found = shape_of("chunks", SEED)
    source = random.Random(SEED)
    drawn = [draw(shape, source.choice(found), source) for _ in range(600)]
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert all(fault.data != shape.objects[fault.target.name] for fault in drawn)


def test_a_fault_is_taken_back() -> None:
    shape = build_shape("steps", SEED)
    before = dict(shape.place.objects)
    source = random.Random(SEED)
    found = targets(shape)
    for _ in range(50):
        judge(shape, draw(shape, source.choice(found), source), walk=False, whole=False)
    assert shape.place.objects == before
    assert false_alarms(shape) == []


def test_a_shape_is_the_same_each_time() -> None:
    def objects(name: str, seed: int) -> dict[str, bytes]:
        gc.collect()  # a loader that was left in the middle of its epoch, as by the shape before, would be told of
        return dict(build_shape(name, seed).objects)

    for name in list(SHAPES)[::3]:
        assert objects(name, SEED) == objects(name, SEED) != objects(name, 1)


def test_the_faults_are_the_same_however_many_processes_judge_them() -> None:
    one = run(200, SEED, workers=1, log=lambda line: None, each=40)
    two = run(200, SEED, workers=2, log=lambda line: None, each=40)
    assert one == two
    assert one.faults >= 200


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.zeros(2, np.float64), "b": 1},
        {"a": np.zeros(2, np.float32), "b": 1.0},
        {"a": np.zeros((2, 1), np.float32), "b": 1},
        {"a": -np.zeros(2, np.float32), "b": 1},
        {"b": 1, "a": np.zeros(2, np.float32)},
        {"a": np.zeros(2, np.float32), "b": True},
    ],
)
def test_only_what_is_equal_in_every_bit_is_the_same(other: dict[str, object]) -> None:
    saved = {"a": np.zeros(2, np.float32), "b": 1}
    assert same({"a": np.zeros(2, np.float32), "b": 1}, saved)
    assert not same(other, saved)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_flipped_bit_does_elsewhere(peer) -> None:  # type: ignore[no-untyped-def]
    answers = flipped_bits(peer, 3, SEED)
    assert sum(answers.values()) == 3
    assert peer.name != "tenuto.load" or answers["refused"] == 3


def test_the_campaign_runs_from_the_command_line(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "out.json"
    arguments = ["--faults", "60", "--each", "30", "--workers", "1", "--no-bugs", "--peer-flips", "0"]
    assert main([*arguments, "--json", str(out)]) == 0
    assert '"violation_count": 0' in out.read_text()
    assert "0 violations, 0 false alarms" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")
def test_a_repair_makes_whole_what_a_source_has_and_claims_nothing_else() -> None:
    tally = run_repairs(60, SEED, log=lambda text: None)
    assert tally.violations == []
    assert tally.by.keys() == REDUNDANCIES.keys()
    assert tally.repaired > 80 and tally.quarantined > 3


@pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")
def test_a_repair_that_believes_its_sources_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_pack, "differing", lambda chunks, digests, data: np.zeros(0, np.int64))
    tally = run_repairs(20, SEED, names=("neighbours", "backup"), log=lambda text: None)
    assert tally.violations


@pytest.mark.parametrize("bug", REPAIR_BUGS[:2], ids=lambda bug: bug.name)  # others take longer
def test_a_bug_of_a_repair_is_caught(bug: RepairBug) -> None:
    assert hunt_repairs(bug, SEED).caught
