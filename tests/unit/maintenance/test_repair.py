"""Repair puts back what was saved, from wherever it still lies, and never claims what is not whole."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import tenuto
from tenuto.cli import main
from tenuto.crashpoints import armed
from tenuto.maintenance import gc, remove, repair_sources, undelete
from tenuto.maintenance.repair import execute, older_with
from tenuto.maintenance.repair_plan import plan_repair
from tenuto.maintenance.repair_sources import Sources
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names
from tenuto.repo.notes import notes, verification_of
from tenuto.repo.repository import Repo
from tenuto.store.memory import MemoryStore
from tenuto.store.registry import open_store
from tenuto.testing.object_store import Bucket, SimulatedObjectStore


def repaired(repo, others=(), ids=None):
    with Sources.of(repo, others) as sources:
        plan = plan_repair(sources, ids)
        return execute(sources, plan)


def bytes_of(store, names=None):
    objects = store.place.objects
    return {name: data for name, (data, _) in objects.items() if "/notes/" not in name and "/trash/" not in f"/{name}"}


@pytest.fixture
def copied(world):
    """A world with two checkpoints, and a copy of it elsewhere."""
    attempt = world.claim()
    world.ids = [world.save(attempt, 1), world.save(attempt, 2)]
    world.other = MemoryStore(f"{world.store.name}-copy")
    tenuto.Repository(world.store).replicate(world.other)
    return world


PACK, INDEX = "rank-00000.safetensors", "rank-00000.index"


@pytest.mark.parametrize("file", [PACK, INDEX, "manifest.json", "begin.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "other"])
def test_a_copy_elsewhere_repairs_every_kind_of_object(copied, file, damage):
    before = bytes_of(copied.store)
    name = f"{copied.ids[1].directory}/{file}"
    if damage == "flip":
        copied.flip(name, len(before[name]) // 2 if file != PACK else 4100)
    elif damage == "truncate":
        copied.truncate(name, len(before[name]) - 7)
    else:
        copied.put(name, before[f"{copied.ids[0].directory}/{file}"])
    report = repaired(copied.reopened())
    assert report.ok, report
    assert bytes_of(copied.store) == before
    assert verification_of(notes(copied.reopened(), copied.ids[1])) == "verified"
    assert_whole(copied.reopened())


@pytest.mark.parametrize("file", [PACK, INDEX, "begin.json"])
def test_what_is_missing_comes_back(copied, file):
    before = bytes_of(copied.store)
    copied.lose(f"{copied.ids[1].directory}/{file}")
    assert repaired(copied.reopened()).ok
    assert bytes_of(copied.store) == before


def test_a_begin_and_a_header_are_made_anew_without_any_copy(world):
    id = world.save(world.claim(), 1)
    before = bytes_of(world.store)
    world.lose(f"{id.directory}/begin.json")
    world.flip(f"{id.directory}/{PACK}", 20)
    report = repaired(world.reopened())
    assert report.ok
    assert bytes_of(world.store) == before


def test_an_equal_chunk_of_a_neighbour_repairs(world):
    attempt = world.claim()
    first, second = world.save(attempt, 1), world.save(attempt, 2)
    before = bytes_of(world.store)
    world.flip(f"{second.directory}/{PACK}", 4096 + 200)  # b/c, which is the same at each step
    with Sources.of(world.reopened()) as sources:
        plan = plan_repair(sources, [second])
        (one,) = plan.mendings
        assert dict(one.sources)[f"{first} ({PACK})"] == 64
        assert execute(sources, plan).ok
    assert bytes_of(world.store) == before


def test_what_nobody_has_is_quarantined_and_the_rest_repaired(world):
    attempt = world.claim()
    first, second = world.save(attempt, 1), world.save(attempt, 2)
    world.flip(f"{second.directory}/{PACK}", 4096)  # a, which differs at each step
    damaged = bytes_of(world.store)
    world.flip(f"{second.directory}/begin.json", 30)
    report = repaired(world.reopened())
    assert not report.ok
    ((lost, instead),) = [(one.lost, one.instead) for one in report.quarantined]
    assert (lost, instead) == (("a",), first)
    assert bytes_of(world.store) == damaged
    assert verification_of(notes(world.reopened(), second)) == "suspect"
    assert verification_of(notes(world.reopened(), first)) == ""


def test_a_dry_run_writes_nothing(copied):
    copied.flip(f"{copied.ids[0].directory}/{PACK}", 4096)
    before = dict(copied.store.place.objects)
    with Sources.of(copied.reopened()) as sources:
        plan = plan_repair(sources)
    assert "from" in str(plan)
    assert copied.store.place.objects == before


POINTS = [
    "repaired object staged, damaged one still there",
    "damaged object removed, repaired one not yet in its place",
    "repaired object in its place, staged one still there",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_repair_that_is_killed_anywhere_loses_nothing(world, crash, point):
    attempt = world.claim()
    world.save(attempt, 1)
    second = world.save(attempt, 2)
    before = bytes_of(world.store)
    world.flip(f"{second.directory}/{PACK}", 4096 + 200)
    with pytest.raises(crash[0]), armed(point, crash[1]):
        repaired(world.reopened())
    # The neighbour that had the chunk is gone by now: what was staged is the only whole copy.
    for name in [name for name in world.names() if "step-00000001" in name]:
        world.lose(name)
    tenuto_gc(world)
    assert repaired(world.reopened()).ok
    now = bytes_of(world.store)
    assert {name: data for name, data in now.items() if second.directory in name and ".part-" not in name} == {
        name: data for name, data in before.items() if second.directory in name
    }


def tenuto_gc(world):
    world.store.advance(48 * 3600)
    gc.execute(world.reopened(), gc.plan_gc(world.reopened()))


@pytest.mark.parametrize(
    "point",
    [
        "repaired manifest in the trash, damaged one still there",
        "damaged manifest removed, repaired one not yet in its place",
    ],
)
def test_a_manifest_is_in_the_trash_while_its_name_is_free(copied, crash, point):
    before = bytes_of(copied.store)
    copied.flip(copied.ids[1].manifest, 40)
    with pytest.raises(crash[0]), armed(point, crash[1]):
        repaired(copied.reopened())
    repo = copied.reopened()
    if repo.exists(copied.ids[1]):
        assert repaired(repo).ok
    else:
        undelete.execute(repo, undelete.plan_undelete(repo, copied.ids[1]))
    assert bytes_of(copied.store) == before


def test_one_that_is_removed_while_it_is_repaired_stays_removed(copied):
    id = copied.ids[0]
    copied.flip(f"{id.directory}/{PACK}", 4096)

    def remove():
        for name in copied.names(id.directory):
            copied.lose(name)

    with armed("damaged object removed, repaired one not yet in its place", remove):
        report = repaired(copied.reopened())
    assert [one.name for one in report.gone] == [f"{id.directory}/{PACK}"]
    assert copied.names(id.directory) == []


def test_two_repairs_at_once_end_whole(copied):
    before = bytes_of(copied.store)
    copied.flip(f"{copied.ids[0].directory}/{PACK}", 4096)
    busy = []

    def second():
        if not busy:
            busy.append(True)
            assert repaired(copied.reopened()).ok

    for point in POINTS:
        busy.clear()
        copied.put(f"{copied.ids[0].directory}/{PACK}", b"damage")
        with armed(point, second):
            repaired(copied.reopened())
        assert bytes_of(copied.store) == before


def test_another_repository_is_no_source(world, make_world):
    other = make_world()
    with pytest.raises(tenuto.errors.UsageError, match="another repository"):
        Sources.of(world.reopened(), [other.store])


def test_a_mirror_gives_back_what_the_primary_lost(tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    with tenuto.Checkpointer(tenuto.Mirror(*places), {"w": np.arange(3000.0)}, save=tenuto.every(steps=1)) as ckpt:
        for _ in ckpt.steps(2):
            pass
    repo = Repo.open(open_store(places[0]))
    id = tenuto.Repository(places[0]).latest()
    for place, damage in ((places[0], "unlink"), (places[1], "flip"), (places[0], "flip")):
        for file in (PACK, INDEX):
            path = place / id.directory / file
            whole = path.read_bytes()
            if damage == "unlink":
                path.unlink()
            else:
                path.write_bytes(whole[:4000] + bytes([whole[4000] ^ 1]) + whole[4001:] if len(whole) > 4000 else b"?")
            report = repaired(Repo.open(open_store(places[0])))
            assert report.ok
            assert path.read_bytes() == whole
    assert repo.exists(id)


def test_a_manifest_of_a_mirror_does_not_outlive_its_removal(tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    mirror, every = tenuto.Mirror(*places), tenuto.every(steps=1)
    with tenuto.Checkpointer(mirror, {"w": np.arange(3000.0)}, save=every, keep=tenuto.keep.all()) as ckpt:
        for _ in ckpt.steps(2):
            pass
    id = CheckpointId("main", 1, 1)
    whole = (places[1] / id.manifest).read_bytes()
    (places[1] / id.manifest).write_bytes(b"?")
    point = "damaged manifest removed from another place, repaired one not yet there"

    def faster():
        (places[1] / id.manifest).write_bytes(whole)

    with armed(point, faster):
        assert repaired(Repo.open(open_store(places[0])), ids=[id]).ok
    assert (places[1] / id.manifest).read_bytes() == whole
    (places[1] / id.manifest).write_bytes(b"?")

    def take():
        repo = Repo.open(open_store(places[0]))
        remove.execute(repo, remove.plan_remove(repo, [id], finished={"main": 1}))

    with armed(point, take):
        report = repaired(Repo.open(open_store(places[0])), ids=[id])
    assert [one.kind for one in report.gone] == ["manifest"]
    assert not (places[0] / id.manifest).exists() and not (places[1] / id.manifest).exists()


def test_older_with_reads_the_leaves(world):
    attempt = world.claim()
    first, second, third = (world.save(attempt, step) for step in (1, 2, 3))
    world.flip(f"{second.directory}/{PACK}", 4096)
    assert older_with(world.reopened(), third, ["a"]) == first
    assert older_with(world.reopened(), third, ["b/c"]) == second
    assert older_with(world.reopened(), third, ["nothing"]) is None
    assert older_with(world.reopened(), third, None) == first
    assert object_names.begin_name(third)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("freed", [False, True])
def test_a_removal_at_any_point_is_a_removal(copied, point, freed):
    """Removed into the trash it can come back whole; freed as well, nothing of it is left."""
    before, id = bytes_of(copied.store), copied.ids[0]
    copied.flip(f"{id.directory}/{PACK}", 4096)

    def take():
        repo = copied.reopened()
        remove.execute(repo, remove.plan_remove(repo, [id], finished={"main": 1}))
        if freed:
            gc.execute(copied.reopened(), gc.plan_gc(copied.reopened(), now=True))

    with armed(point, take):
        repaired(copied.reopened())
    repo = copied.reopened()
    assert not repo.exists(id)
    if freed:
        gc.execute(repo, gc.plan_gc(repo, now=True))
        left = [name for name in copied.names(id.directory) if not name.endswith("manifest.json")]
        assert left == [], "an aborted mark is all that stays"
        return
    undelete.execute(repo, undelete.plan_undelete(repo, id))
    now = bytes_of(copied.store)
    assert {name: data for name, data in now.items() if name.startswith("runs/")} == {
        name: data for name, data in before.items() if name.startswith("runs/")
    }


def test_a_base_is_repaired_with_those_that_rest_on_it(tmp_path):
    """The data file that is damaged lies in the directory of another checkpoint, which was removed."""
    place, backup = tmp_path / "ckpts", tmp_path / "backup"
    state = {"frozen": np.random.default_rng(1).random(200_000), "w": np.zeros(1000)}
    with tenuto.Checkpointer(
        place, state, save=tenuto.every(steps=1), keep=tenuto.keep.all(), encoding="dedupe"
    ) as ckpt:
        for step in ckpt.steps(3):
            state["w"][:] = step + 1
    there = tenuto.Repository(place)
    first, newest = there.checkpoints()[-1], there.checkpoints()[0]
    assert there.manifest(newest).bases
    remove.execute(there.repo, remove.plan_remove(there.repo, [first]))
    shutil.copytree(place, backup)
    (pack,) = sorted((place / first.directory).glob("*.pack"))
    whole = pack.read_bytes()
    pack.write_bytes(whole[:50_000] + b"damage" + whole[50_006:])
    assert not there.verify(steps=[newest]).ok
    assert there.repair(steps=[newest], sources=[backup]).ok
    assert pack.read_bytes() == whole
    assert np.array_equal(tenuto.load(place).state["frozen"], state["frozen"])


@pytest.mark.parametrize("name", ["tenuto.json", "tenuto.copy.json"])
@pytest.mark.filterwarnings("ignore:tenuto.json:tenuto.TenutoWarning")
def test_what_the_repository_is_comes_back_from_its_copy(world, name):
    world.save(world.claim(), 1)
    tenuto.Repository(world.store)
    repaired(world.reopened())  # a single save leaves the second one to whoever comes next
    before = bytes_of(world.store)
    world.flip(name, 30)
    assert repaired(world.reopened()).ok
    assert bytes_of(world.store) == before


def test_chunks_of_a_sealed_checkpoint_come_back_without_the_key(tmp_path):
    place, backup = tmp_path / "ckpts", tmp_path / "backup"
    with tenuto.Checkpointer(place, {"x": np.zeros(1)}, save=tenuto.every(steps=1)):
        pass
    with pytest.raises(SystemExit):
        main(["key", "add", str(place), "--key-file", str(tmp_path / "key")])
    state = {"w": np.random.default_rng(3).random(100_000)}
    with tenuto.Checkpointer(place, state, save=tenuto.every(steps=1), key=tmp_path / "key") as ckpt:
        for _ in ckpt.steps(1):
            pass
    shutil.copytree(place, backup)
    (pack,) = place.glob("runs/main/*/step-00000001/*.pack")
    whole = pack.read_bytes()
    pack.write_bytes(whole[:300_000] + b"damage" + whole[300_006:])
    assert tenuto.Repository(place).repair(sources=[backup]).ok
    assert pack.read_bytes() == whole
    assert np.array_equal(tenuto.load(place, key=tmp_path / "key").state["w"], state["w"])


def test_an_object_store_is_repaired_in_few_requests(tmp_path):
    bucket = Bucket()
    store = SimulatedObjectStore(bucket)
    state = {"w": np.random.default_rng(3).random(400_000), "frozen": np.arange(100_000.0)}
    with tenuto.Checkpointer(store, state, save=tenuto.every(steps=1), keep=tenuto.keep.all()) as ckpt:
        for _ in ckpt.steps(2):
            pass
    before = dict(bucket.objects)
    name = next(name for name in sorted(before) if name.endswith("step-00000002/rank-00000.safetensors"))
    data, when = before[name]
    bucket.objects[name] = data[:50_000] + b"damage" + data[50_006:], when
    bucket.forget()
    assert tenuto.Repository(store).repair(steps=[2]).ok
    assert bucket.objects[name][0] == data
    assert not [name for name in bucket.objects if ".part-" in name]
    assert bucket.counts()["put"] + bucket.counts().get("part", 0) <= 6
    assert len(bucket.requests) < 150


@pytest.mark.parametrize("kept", [repair_sources.CHUNKS_KEPT, 30])
def test_each_table_is_read_once_for_all_packs_that_are_lost(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(repair_sources, "CHUNKS_KEPT", kept)
    bucket = Bucket()
    store = SimulatedObjectStore(bucket)
    state = {"w": np.random.default_rng(3).random(100_000), "frozen": np.arange(10_000.0)}
    with tenuto.Checkpointer(store, state, save=tenuto.every(steps=1), keep=tenuto.keep.all()) as ckpt:
        for _ in ckpt.steps(8):
            state["w"] += 1
    packs = [name for name in sorted(bucket.objects) if name.endswith(".safetensors")]
    for name in packs[2:5]:
        del bucket.objects[name]
    bucket.forget()
    repo = Repo.open(store)
    with Sources.of(repo) as sources:
        plan = plan_repair(sources)
        assert len(plan.hopeless) == 3
        assert sources._chunks == sum(len(one.key) for one in sources._tables.values()) <= kept
    read = [one.name for one in bucket.requests if one.verb in ("get", "read") and one.name.endswith(".index")]
    assert len(set(read)) == len(packs)
    assert max(map(read.count, read)) <= (2 if kept > 30 else 1 + 3)


@pytest.mark.parametrize("way", ["rm", "retention"])
def test_a_manifest_that_is_removed_while_it_is_repaired_stays_removed(copied, way):
    id = copied.ids[0]
    copied.flip(id.manifest, 40)

    def take():
        repo = copied.reopened()
        if way == "rm":
            remove.execute(repo, remove.plan_remove(repo, [id], finished={"main": 1}))
        else:
            for name in copied.names(id.directory):
                copied.lose(name)

    with armed("repaired manifest in the trash, damaged one still there", take):
        report = repaired(copied.reopened())
    assert [one.kind for one in report.gone] == ["manifest"]
    repo = copied.reopened()
    assert not repo.exists(id)
    assert len(copied.names("trash/")) == (way == "rm")
