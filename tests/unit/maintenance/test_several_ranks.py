"""Checkpoints of several ranks: verified in every byte, removed with all they have, and brought back whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import tenuto
from support.saves_of_ranks import save_jointly, whole
from tenuto.codec.digest import digest
from tenuto.errors import CorruptionError, SaveFailed
from tenuto.maintenance import gc, undelete
from tenuto.maintenance.census import census_of, take_census
from tenuto.maintenance.gc import listed
from tenuto.maintenance.remove import execute as execute_removal
from tenuto.maintenance.remove import plan_remove
from tenuto.maintenance.verify import assert_whole, execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.model.records import IndexEntry, Receipt
from tenuto.repo.commit import commit
from tenuto.repo.format import object_names
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.format.shard_table import BoxTable, encode_boxes
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes
from tenuto.store.memory import MemoryStore

BOXES = "boxes.index"


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(f"ranks-{request.node.name}")


@pytest.fixture
def repo(store: MemoryStore) -> Repo:
    return Repo.create_or_open(store, chunk_bytes=1024)


def data_of(store: MemoryStore, name: str) -> bytes:
    return bytes(store.get(name, limit=1 << 30))


def replace_object(store: MemoryStore, name: str, data: bytes) -> None:
    store.delete([name])
    store.put_if_absent(name, Bytes(data), token="0" * 32)


def objects_of(store: MemoryStore, id: CheckpointId) -> dict[str, int]:
    return {entry.name.rpartition("/")[2]: entry.length for entry in store.walk(id.directory)}


def errors(repo: Repo, id: CheckpointId) -> list[tuple[str | None, str | None, str]]:
    found = execute(repo, plan_verify(repo, [id]), threads=1).errors
    return [(error.object and error.object.rpartition("/")[2], error.leaf, error.message) for error in found]


@pytest.mark.parametrize("count", [2, 4])
def test_what_is_whole_is_called_whole_and_every_byte_of_it_was_read(
    repo: Repo, store: MemoryStore, count: int
) -> None:
    ids = save_jointly(repo, count)
    report = assert_whole(repo)
    assert report.findings == () and report.checked == tuple(ids)
    read = [length for id in ids for name, length in objects_of(store, id).items() if not name.endswith(".json")]
    assert len(read) == 2 * (2 * count + 1)
    assert report.bytes_read == sum(read)


def test_a_flipped_bit_of_any_object_is_found_and_its_object_named_and_so_its_rank(
    repo: Repo, store: MemoryStore
) -> None:
    (id,) = save_jointly(repo, 3, (1,))
    chance = np.random.default_rng(5)
    struck = objects_of(store, id)
    assert {name.partition(".")[2] for name in struck} == {"index", "safetensors", "json"}
    assert {f"rank-0000{rank}.{kind}" for rank in range(3) for kind in ("index", "safetensors")} < struck.keys()
    for name, length in struck.items():
        for place in {0, length - 1, *chance.integers(0, length, 16).tolist()}:
            before = data_of(store, f"{id.directory}/{name}")
            changed = bytearray(before)
            changed[place] ^= 1 << int(chance.integers(8))
            replace_object(store, f"{id.directory}/{name}", bytes(changed))
            found = errors(repo, id)
            assert found and {one[0] for one in found} == {name}, (name, place, found)
            replace_object(store, f"{id.directory}/{name}", before)
    assert errors(repo, id) == []


def test_a_missing_object_of_any_rank_is_found(repo: Repo, store: MemoryStore) -> None:
    (id,) = save_jointly(repo, 2, (1,))
    names = [name for name in objects_of(store, id) if name != "manifest.json"]
    for name in names:
        before = data_of(store, f"{id.directory}/{name}")
        store.delete([f"{id.directory}/{name}"])
        assert {one[0] for one in errors(repo, id)} == {name}
        replace_object(store, f"{id.directory}/{name}", before)


def test_damage_in_a_part_names_its_leaf_and_where_it_lies(repo: Repo, store: MemoryStore) -> None:
    (id,) = save_jointly(repo, 3, (1,))
    index = repo.index(repo.manifest(id), 1)
    row = next(row for row, spec in enumerate(index.specs) if spec.path == "model/columns")
    name, offset = f"{id.directory}/{index.packs[0].name}", int(index.offset[row])
    changed = bytearray(data_of(store, name))
    changed[offset + 1030] ^= 1
    replace_object(store, name, bytes(changed))
    (found,) = execute(repo, plan_verify(repo, [id]), threads=1).errors
    assert (found.leaf, found.object, found.offset) == ("model/columns", name, offset + 1024)


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_without_its_table_of_parts_a_checkpoint_is_damaged_and_a_restore_goes_on_from_the_one_before(
    repo: Repo, store: MemoryStore, how: str
) -> None:
    first, second = save_jointly(repo)
    name = f"{second.directory}/{BOXES}"
    changed = bytearray(data_of(store, name))
    changed[-1] ^= 1
    store.delete([name])
    if how == "damaged":
        replace_object(store, name, bytes(changed))
    assert execute(repo, plan_verify(repo)).damaged() == (second,)
    restored = tenuto.load(repo.url)
    assert np.array_equal(restored.state["model"]["rows"], whole(1)["model"]["rows"])
    with tenuto.open(repo.url) as opened:
        assert opened.id == first and opened.skipped[0][0] == second


def with_table(repo: Repo, store: MemoryStore, id: CheckpointId, change: Callable[[BoxTable], BoxTable]) -> None:
    """The checkpoint as a faulty writer would have left it: another table of parts, under a manifest that vouches."""
    manifest = repo.manifest(id)
    table = repo.boxes(manifest)
    assert table is not None
    data = encode_boxes(change(table), id, manifest.save_id, repo.id)
    replace_object(store, f"{id.directory}/{BOXES}", data)
    said = replace(manifest, boxes=IndexEntry(BOXES, len(data), digest(data)))
    replace_object(store, id.manifest, encode_manifest(said, repo.id))


def last_part(table: BoxTable, leaf: int) -> int:
    return int(np.flatnonzero(table.leaf == leaf)[-1])


def moved(table: BoxTable) -> BoxTable:
    """The last part of a leaf of several begins one row further up: a hole, and items that are there twice."""
    leaf = int(np.argmax(np.bincount(table.leaf)))
    origin = table.origin.copy()
    first = int(table.bounds[last_part(table, leaf)])
    origin[first + int(np.argmax(origin[first : first + 3] > 0))] -= 1
    return replace(table, origin=origin)


def exchanged(table: BoxTable) -> BoxTable:
    """Two parts of one leaf say that each other's rank has them."""
    at = last_part(table, int(np.argmax(np.bincount(table.leaf))))
    rank, row = table.rank.copy(), table.row.copy()
    rank[[at, at - 1]], row[[at, at - 1]] = rank[[at - 1, at]], row[[at - 1, at]]
    return replace(table, rank=rank, row=row)


def beyond(table: BoxTable) -> BoxTable:
    row = table.row.copy()
    row[0] += 1000
    return replace(table, row=row)


def renamed(table: BoxTable) -> BoxTable:
    names = [{"float32": "int32", "float64": "int64"}.get(name, name) for name in table.dtypes]
    return replace(table, dtypes=names)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (moved, "every element of every leaf once"),
        (exchanged, "do not agree about row"),
        (beyond, "does not have each of the"),
        (renamed, "do not agree about row"),
    ],
)
def test_a_table_of_parts_that_contradicts_itself_or_the_indexes_is_damage(
    repo: Repo, store: MemoryStore, change: Callable[[BoxTable], BoxTable], says: str
) -> None:
    (id,) = save_jointly(repo, 3, (1,))
    with_table(repo, store, id, lambda table: table)
    assert errors(repo, id) == []
    with_table(repo, store, id, change)
    found = [message for name, _, message in errors(repo, id) if name == BOXES]
    assert any(says in message for message in found), found
    with pytest.raises(CorruptionError):
        read_all(repo, id)


def read_all(repo: Repo, id: CheckpointId) -> None:
    with tenuto.open(repo.url, step=id) as opened:
        for leaf in opened.values():
            leaf.numpy()


def test_a_manifest_without_a_receipt_for_its_table_of_parts_is_not_put(repo: Repo, store: MemoryStore) -> None:
    (id,) = save_jointly(repo, 2, (1,))
    manifest = repo.manifest(id)
    held = [Receipt(entry.name, entry.length, repo.url) for entry in store.walk(id.directory)]
    with pytest.raises(SaveFailed, match=r"boxes\.index"):
        commit(repo, manifest, [receipt for receipt in held if not receipt.name.endswith(BOXES)])


def test_it_is_removed_and_brought_back_whole_or_not_at_all(repo: Repo, store: MemoryStore) -> None:
    first, _ = save_jointly(repo, 3)
    before = objects_of(store, first)
    execute_removal(repo, plan_remove(repo, [first]))
    assert repo.committed("main", 1) == [2]
    assert execute(repo, plan_verify(repo)).ok
    name = f"{first.directory}/{BOXES}"
    data = data_of(store, name)
    replace_object(store, name, data[:-1] + b"?")
    with pytest.raises(CorruptionError, match=BOXES):
        undelete.execute(repo, undelete.plan_undelete(repo, first))
    replace_object(store, name, data)
    undelete.execute(repo, undelete.plan_undelete(repo, first))
    assert objects_of(store, first) == before
    assert assert_whole(repo).findings == ()


def test_gc_frees_all_of_a_removed_one_and_touches_no_other(repo: Repo, store: MemoryStore) -> None:
    first, second = save_jointly(repo, 3)
    kept = objects_of(store, second)
    execute_removal(repo, plan_remove(repo, [first]))
    gc.execute(repo, gc.plan_gc(repo, grace_s=0.0))
    gc.execute(repo, gc.plan_gc(repo, grace_s=0.0))
    assert set(objects_of(store, first)) == {"manifest.json"}  # the aborted mark
    assert objects_of(store, second) == kept
    assert assert_whole(repo).ok


def test_what_lists_its_objects_lists_its_table_of_parts_also_without_begin_json(
    repo: Repo, store: MemoryStore
) -> None:
    first, _ = save_jointly(repo, 2)
    every = set(objects_of(store, first)) - {object_names.BEGIN, object_names.MANIFEST}
    store.delete([object_names.begin_name(first)])
    save = census_of(repo, first)
    assert set(listed(repo, save)) == every
    assert {entry.name.rpartition("/")[2] for entry in save.own()} >= {BOXES}
    assert BOXES not in {entry.name.rpartition("/")[2] for entry in take_census(repo).saves[first].strangers()}


def hidden(table: BoxTable) -> BoxTable:
    """The last part of a leaf of several ends one item before its end."""
    leaf = int(np.argmax(np.bincount(table.leaf)))
    shape = table.shape.copy()
    shape[int(table.bounds[last_part(table, leaf)])] -= 1
    return replace(table, shape=shape)


@pytest.mark.parametrize("change", [moved, hidden])
def test_a_table_of_parts_with_holes_is_passed_over_for_the_checkpoint_before(
    repo: Repo, store: MemoryStore, change: Callable[[BoxTable], BoxTable]
) -> None:
    first, second = save_jointly(repo)
    with_table(repo, store, second, change)
    restored = tenuto.load(repo.url)
    assert restored.step == first.step
    assert np.array_equal(restored.state["model"]["rows"], whole(1)["model"]["rows"])
    ((skipped, why),) = restored.skipped
    assert skipped == second and f"{second.directory}/{BOXES}" in why
    with pytest.raises(CorruptionError, match=r"every element of every leaf once|do not agree"):
        tenuto.load(repo.url, step=2)
