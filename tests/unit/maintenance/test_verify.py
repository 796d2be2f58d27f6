"""Verify finds every kind of damage, names leaf and object, and calls nothing damaged that is not."""

from __future__ import annotations

import copy
import errno
from dataclasses import replace

import numpy as np
import pytest

import tenuto
from tenuto.errors import CheckpointNotFound, CorruptionError, StoreDenied, StoreError
from tenuto.events import Emitter, Event, Progress
from tenuto.maintenance import verify
from tenuto.maintenance.census import take_census
from tenuto.maintenance.gc import plan_gc
from tenuto.maintenance.remove import execute as execute_removal
from tenuto.maintenance.remove import plan_remove
from tenuto.maintenance.retention import execute as execute_retention
from tenuto.maintenance.retention import plan_retention
from tenuto.maintenance.verify import assert_whole, execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.notes import add_note, notes
from tenuto.repo.refs import put_ref
from tenuto.repo.repository import Repo
from tenuto.repo.tombstones import put_tombstone
from tenuto.store.memory import MemoryReader
from tenuto.store.registry import open_store


def test_a_whole_repository_has_no_error(world):
    attempt = world.claim()
    first = world.save(attempt, 1)
    second = world.save(attempt, 2)
    add_note(world.repo, first, "metric", {"loss": 1.0})
    put_ref(world.repo, "pin", "keep", first)
    report = assert_whole(world.repo)
    assert report.findings == ()
    assert report.checked == (first, second)
    lengths = sum(len(world.store.place.objects[name][0]) for name in world.names() if "rank-" in name)
    assert report.bytes_read == lengths


def test_an_empty_repository_is_whole(world):
    assert assert_whole(world.repo).findings == ()


def test_the_plan_prints_what_it_will_read(world):
    world.save(world.claim(), 1)
    assert "1 checkpoint at memory://" in str(plan_verify(world.repo))
    assert "structure only" in str(plan_verify(world.repo, every_byte=False))


def test_an_id_that_is_not_there_is_refused(world):
    world.claim()
    with pytest.raises(CheckpointNotFound):
        plan_verify(world.repo, [CheckpointId("main", 1, 5)])


def flips(world, id):
    """One position in each class of bytes: object name, offset."""
    pack = f"{id.directory}/rank-00000.safetensors"
    index = f"{id.directory}/rank-00000.index"
    size = len(world.store.place.objects[pack][0])
    length = len(world.store.place.objects[index][0])
    yield from [(pack, 0), (pack, 60), (pack, 4000), (pack, 4096), (pack, 4296), (pack, size - 1)]
    yield from [(index, offset) for offset in range(0, length, 97)]
    for name in (
        id.manifest,
        object_names.begin_name(id),
        object_names.attempt_name(id.run, id.attempt),
        object_names.REPOSITORY,
    ):
        yield from [(name, 1), (name, len(world.store.place.objects[name][0]) // 2), (name, -1)]
    yield f"{id.directory}/notes/1.json", 30
    yield "refs/pin/keep/1.json", 30


def test_i5_a_flipped_bit_anywhere_is_found(world):
    id = world.save(world.claim(), 1)
    add_note(world.repo, id, "metric", {"loss": 1.0})
    put_ref(world.repo, "pin", "keep", id)
    for name, offset in flips(world, id):
        world.flip(name, offset)
        with pytest.raises(CorruptionError):
            assert_whole(world.reopened())
        world.flip(name, offset)
    assert assert_whole(world.reopened()).ok


@pytest.mark.parametrize(("offset", "leaf"), [(4096, "a"), (4096 + 199, "a"), (4096 + 200, "b/c"), (4096 + 299, "b/c")])
def test_i5_damage_names_leaf_object_and_offset(world, offset, leaf):
    id = world.save(world.claim(), 1)
    pack = f"{id.directory}/rank-00000.safetensors"
    world.flip(pack, offset)
    (finding,) = execute(world.repo, plan_verify(world.repo)).errors
    assert (finding.id, finding.leaf, finding.object) == (id, leaf, pack)
    assert finding.offset <= offset < finding.offset + 64
    assert finding.harms_restore
    assert pack in str(finding)
    assert leaf in str(finding)


def test_a_wholly_wrong_leaf_is_one_finding(world):
    id = world.save(world.claim(), 1)
    for offset in range(4096, 4296):
        world.flip(f"{id.directory}/rank-00000.safetensors", offset)
    (finding,) = execute(world.repo, plan_verify(world.repo)).errors
    assert "3 more chunks" in finding.message


@pytest.mark.parametrize("keep", [0, 7, 100, 4096, 4200, 4395])
def test_a_truncated_pack_is_found(world, keep):
    id = world.save(world.claim(), 1)
    pack = f"{id.directory}/rank-00000.safetensors"
    world.truncate(pack, keep)
    (finding,) = execute(world.repo, plan_verify(world.repo, every_byte=False)).errors
    assert finding.object == pack
    assert finding.leaf == ("a" if keep < 4296 else "b/c")


@pytest.mark.parametrize(
    "file", ["rank-00000.safetensors", "rank-00000.index", "begin.json", "../attempt.json"], ids=lambda file: file
)
def test_a_missing_object_is_found(world, file):
    id = world.save(world.claim(), 1)
    name = f"{id.directory}/{file}" if not file.startswith("..") else object_names.attempt_name("main", 1)
    world.lose(name)
    errors = execute(world.repo, plan_verify(world.repo)).errors
    assert {finding.object for finding in errors} == {name}
    assert [finding.harms_restore for finding in errors] == ["rank" in file] * len(errors)


def test_another_objects_bytes_under_the_right_name_are_found(world):
    attempt = world.claim()
    one, two = world.save(attempt, 1), world.save(attempt, 2)
    for file in ("rank-00000.safetensors", "rank-00000.index", "manifest.json", "begin.json"):
        was = world.store.place.objects[f"{one.directory}/{file}"]
        world.store.place.objects[f"{one.directory}/{file}"] = world.store.place.objects[f"{two.directory}/{file}"]
        report = execute(world.repo, plan_verify(world.repo, [two]))
        assert report.ok
        if file == "manifest.json":
            # The begin.json beside it tells that a checkpoint was here: it is damaged, not absent.
            found = execute(world.repo, plan_verify(world.repo))
            assert one in found.checked
            assert any("is a copy of" in finding.message for finding in found.of(one))
            assert found.damaged() == (one,)
        else:
            assert not execute(world.repo, plan_verify(world.repo, [one])).ok
        world.store.place.objects[f"{one.directory}/{file}"] = was
    assert_whole(world.repo)


def test_structure_alone_reads_no_leaf(world):
    id = world.save(world.claim(), 1)
    world.flip(f"{id.directory}/rank-00000.safetensors", -1)
    assert execute(world.repo, plan_verify(world.repo, every_byte=False)).ok
    assert not execute(world.repo, plan_verify(world.repo)).ok


def test_unusual_things_are_shown_and_are_no_error(world):
    attempt = world.claim()
    id = world.save(attempt, 1)
    open_save = world.save(attempt, 2, until="pack")
    world.put("README.txt")
    world.put(f"{id.directory}/mine.txt")
    world.put(f"{id.directory}/rank-00000.safetensors.tmp-abc")
    world.copy(id.directory, "runs/main/a0001/step-00000009")
    world.copy("runs/main/a0001", "runs/main/a0007")
    world.copy("runs/main", "runs/elsewhere")
    world.copy("runs/main", "runs/main copy")
    report = assert_whole(world.repo)
    said = {finding.object: finding.message for finding in report.findings}
    assert all(finding.severity == "info" for finding in report.findings)
    assert "unfinished" in said[open_save.directory]
    assert "not written by Tenuto" in said["README.txt"]
    assert "not written by Tenuto" in said[f"{id.directory}/mine.txt"]
    assert "left over" in said[f"{id.directory}/rank-00000.safetensors.tmp-abc"]
    assert "copied" in said["runs/main/a0001/step-00000009"]
    assert "copied" in said["runs/main/a0007/attempt.json"]
    assert "copied" in said["runs/elsewhere/a0001/attempt.json"]
    assert report.checked == (id,)


def test_notes_are_left_where_asked_for(world):
    attempt = world.claim()
    good, bad = world.save(attempt, 1), world.save(attempt, 2)
    world.flip(f"{bad.directory}/rank-00000.safetensors", -1)
    execute(world.repo, plan_verify(world.repo))
    assert notes(world.repo, good) == []
    execute(world.repo, plan_verify(world.repo, every_byte=False), note=True)
    assert notes(world.repo, good) == []
    execute(world.repo, plan_verify(world.repo), note=True)
    assert [note.kind for note in notes(world.repo, good)] == ["verified"]
    (note,) = notes(world.repo, bad)
    assert note.kind == "suspect"
    assert "b/c" in note.body["findings"][0]


def test_progress_reaches_the_total(world):
    world.save(world.claim(), 1)
    seen: list[Event] = []

    class Sink:
        def emit(self, event: Event) -> None:
            seen.append(event)

    execute(world.repo, plan_verify(world.repo), emitter=Emitter.of([Sink()]))
    assert seen
    assert all(isinstance(event, Progress) and event.phase == "verify" for event in seen)
    assert max(event.done for event in seen) == 300


def test_bytes_that_cannot_be_read_are_named_and_the_others_checked(world, monkeypatch):
    id = world.save(world.claim(), 1)
    pack = f"{id.directory}/rank-00000.safetensors"
    world.flip(pack, 4096)
    read_into = MemoryReader.read_into

    def failing(reader, offset, buffer):
        if reader.name == pack and offset <= 4096 + 250 < offset + len(buffer):
            error = StoreError("input/output error", subject=pack)
            error.errno = errno.EIO
            raise error
        read_into(reader, offset, buffer)

    monkeypatch.setattr(MemoryReader, "read_into", failing)
    found = execute(world.repo, plan_verify(world.repo)).errors
    assert [(finding.leaf, finding.offset) for finding in found] == [("a", 4096), ("b/c", 4096 + 200)]
    assert "cannot be read" in found[1].message


def test_i5_every_leaf_is_read_through_a_local_store(tmp_path):
    leaves = {f"leaf {number}": np.full(70_001 * number, number, np.uint8) for number in range(1, 9)}
    tenuto.save({**leaves, "large": np.arange(3_000_000, dtype=np.float32)}, tmp_path, step=1)
    repo = Repo.open(open_store(tmp_path))
    assert assert_whole(repo).bytes_read > 12_000_000
    (pack,) = tmp_path.rglob("*.safetensors")
    manifest = repo.manifest(CheckpointId("main", 1, 1))
    index = repo.index(manifest)
    for leaf in range(len(index.specs)):
        at = int(index.offset[leaf] + index.length[leaf]) - 1
        with pack.open("r+b") as file:
            file.seek(at)
            was = file.read(1)
            file.seek(at)
            file.write(bytes([was[0] ^ 128]))
        (finding,) = execute(repo, plan_verify(repo)).errors
        assert finding.leaf == index.specs[leaf].path
        assert finding.offset is not None
        assert finding.offset <= at < finding.offset + repo.chunk_bytes
        with pack.open("r+b") as file:
            file.seek(at)
            file.write(was)
    assert_whole(repo)


def test_a_header_is_compared_with_its_digest(world):
    id = world.save(world.claim(), 1)
    world.flip(f"{id.directory}/rank-00000.safetensors", 60)
    (finding,) = execute(world.repo, plan_verify(world.repo)).errors
    assert (finding.message, finding.offset) == ("its header is not what was saved", 0)


def test_a_manifest_with_another_contents_digest_is_found(world):
    id = world.save(world.claim(), 1)
    manifest = world.repo.manifest(id)
    world.lose(id.manifest)
    world.put(id.manifest, encode_manifest(replace(manifest, content="0" * 64, leaves=7), world.repo.id))
    found = execute(world.repo, plan_verify(world.repo)).errors
    assert [finding.harms_restore for finding in found] == [False, True]
    assert "counts 7 leaves" in found[0].message
    assert "content digest" in found[1].message


def errors_of(repo: Repo) -> dict[str | None, str]:
    return {finding.object: finding.message for finding in execute(repo, plan_verify(repo)).errors}


def test_an_object_of_another_repository_under_the_right_name_is_found(world, make_world):
    other = make_world()
    for one in (world, other):
        id = one.save(one.claim(), 1)
        put_ref(one.repo, "pin", "keep", id)
        add_note(one.repo, id, "metric", {"loss": 1.0})
    for name in ("tenuto.json", "refs/pin/keep/1.json", f"{id.directory}/notes/1.json"):
        was = world.store.place.objects[name]
        world.store.place.objects[name] = other.store.place.objects[name]
        assert errors_of(world.reopened())
        world.store.place.objects[name] = was
    assert not errors_of(world.reopened())


def test_a_gap_in_a_row_and_a_replaced_version_are_found(world):
    id = world.save(world.claim(), 1)
    for _ in range(3):
        put_ref(world.repo, "pin", "keep", id)
    version = world.store.place.objects["refs/pin/keep/2.json"]
    world.lose("refs/pin/keep/2.json")
    assert "is missing" in errors_of(world.repo)["refs/pin/keep/2.json"]
    world.store.place.objects["refs/pin/keep/2.json"] = version
    world.store.place.objects["refs/pin/keep/3.json"] = version
    assert "a copy of" in errors_of(world.repo)["refs/pin/keep/3.json"]


def test_a_manifest_that_a_ref_names_and_that_is_gone_is_found(world):
    id = world.save(world.claim(), 1)
    assert not errors_of(world.repo)
    put_ref(world.repo, "tag", "best", id)
    world.lose(id.manifest)
    assert errors_of(world.repo)[id.manifest] == "is missing: tag 'best' names it"


def test_a_replaced_manifest_is_damage_and_is_skipped_loudly(world):
    attempt = world.claim()
    one, two = world.save(attempt, 1), world.save(attempt, 2)
    world.store.place.objects[two.manifest] = world.store.place.objects[one.manifest]
    assert world.repo.exists(two)
    restored = tenuto.load(world.store)
    assert restored.checkpoint.id == one
    assert [id for id, _ in restored.skipped] == [two]


def test_what_was_removed_is_read_too(world):
    attempt = world.claim()
    id = world.save(attempt, 1)
    world.save(attempt, 2)
    execute_removal(world.repo, plan_remove(world.repo, [id], finished={}))
    assert not errors_of(world.repo)
    pack = f"{id.directory}/rank-00000.safetensors"
    world.flip(pack, -1)
    report = execute(world.repo, plan_verify(world.repo))
    assert [finding.object for finding in report.errors] == [pack]
    assert report.damaged() == ()


def test_one_that_goes_between_listing_and_planning_is_no_error(world):
    attempt = world.claim()
    ids = [world.save(attempt, step) for step in (1, 2)]
    execute_removal(world.repo, plan_remove(world.repo, ids[:1]))
    with pytest.raises(CheckpointNotFound):
        plan_verify(world.repo, ids)
    report = execute(world.repo, plan_verify(world.repo, ids, listed=True))
    assert report.ok
    assert [str(finding.message) for finding in report.findings] == ["was removed while it was verified"]


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "under way"])
def test_a_removal_while_the_census_is_taken_is_no_damage(world, monkeypatch, ended):
    """The census has listed the checkpoint before its tombstone, and has looked for its manifest after that went."""
    attempt = world.claim()
    going, kept = (world.save(attempt, step) for step in (1, 2))
    add_note(world.repo, going, "metric", {"loss": 1.0})

    def census_meanwhile(repo):
        manifest = world.store.place.objects.pop(going.manifest)
        found = take_census(repo)
        if ended:
            world.store.place.objects[going.manifest] = manifest
            execute_retention(repo, attempt, plan_retention(repo, attempt, keep.latest(1)))
        else:
            put_tombstone(repo, going, reason="retention", attempt=attempt.number)
        return found

    monkeypatch.setattr(verify, "take_census", census_meanwhile)
    report = execute(world.repo, plan_verify(world.repo))
    assert report.errors == () and report.checked == (going, kept)


def _denied(store, monkeypatch, directory):
    """As where one directory may not be listed: nor may anything above it be walked, and names are still told."""
    children, listed = copy.copy(store).children, store.walk

    def refusing(prefix, *, leftovers=False):
        if prefix in ("", directory):
            raise StoreDenied("permission denied", subject=directory)
        return listed(prefix, leftovers=leftovers)

    monkeypatch.setattr(store, "walk", refusing)
    monkeypatch.setattr(store, "children", children)


def test_a_directory_of_somebody_elses_that_may_not_be_listed_hides_nothing(world, monkeypatch):
    attempt = world.claim()
    id = world.save(attempt, 1)
    world.put("lost+found/secret")
    world.put("beside/theirs")
    world.put(f"{id.directory}/rank-00000.index.tmp-{'0' * 32}")
    _denied(world.repo.store, monkeypatch, "lost+found")
    report = execute(world.repo, plan_verify(world.repo))
    assert report.ok and report.checked == (id,)
    assert sorted(f"{finding.object}: {finding.message}" for finding in report.findings) == [
        "beside/theirs: not written by Tenuto; never touched",
        "lost+found: not written by Tenuto, and may not be listed; passed over",
        f"{id.directory}/rank-00000.index.tmp-{'0' * 32}: left over from an unfinished put (15 bytes)",
    ]
    open_save = world.save(attempt, 2, until="index")
    world.die(attempt)
    plan = plan_gc(world.repo)
    assert [garbage.id for garbage in plan.garbage] == [open_save]


@pytest.mark.parametrize("directory", ["runs", "tombstones"])
def test_a_directory_of_tenuto_that_may_not_be_listed_is_an_error(world, monkeypatch, directory):
    id = world.save(world.claim(), 1)
    put_tombstone(world.repo, id, reason="rm")
    _denied(world.repo.store, monkeypatch, directory)
    with pytest.raises(StoreDenied):
        execute(world.repo, plan_verify(world.repo))
