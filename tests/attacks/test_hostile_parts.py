"""Checkpoints of three ranks whose table of parts lies, under a manifest that vouches for it: an error of ours or the
very state that was saved; bounded memory, nothing run; and where there is one, the checkpoint before is restored."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tenuto
from campaigns.fuzz.audit import recording
from campaigns.fuzz.mutate import mutations
from support.saves_of_ranks import held, save_jointly, whole
from tenuto.codec.digest import digest
from tenuto.engine.read.choose import CheckpointLeaves, fetch
from tenuto.errors import CorruptionError, StateMismatch, TenutoError
from tenuto.events import Emitter
from tenuto.maintenance.verify import execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.model.records import IndexEntry, Manifest
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.format.object_names import BOXES
from tenuto.repo.format.shard_table import BoxTable, encode_boxes
from tenuto.repo.repository import Repo
from tenuto.state.contract import Prepared
from tenuto.state.restore.match import match_state
from tenuto.store.contract import Bytes
from tenuto.store.memory import MemoryStore

MEMORY = 48 << 20
"""Bytes that looking at a checkpoint of 40 KiB may take."""
Change = Callable[[BoxTable], BoxTable]


@pytest.fixture
def repo(request: pytest.FixtureRequest) -> Repo:
    repo = Repo.create_or_open(MemoryStore(f"parts-{request.node.name}"), chunk_bytes=1024)
    save_jointly(repo, 3)
    return repo


def replace_object(repo: Repo, name: str, data: bytes) -> None:
    repo.store.delete([name])
    repo.store.put_if_absent(name, Bytes(data), token="0" * 32)


def vouch(repo: Repo, id: CheckpointId, data: bytes, **more: Any) -> None:
    """Puts the table, and a manifest that names it by length and digest."""
    manifest = repo.manifest(id)
    replace_object(repo, f"{id.directory}/{BOXES}", data)
    said = replace(manifest, boxes=IndexEntry(BOXES, len(data), digest(data)), **more)
    replace_object(repo, id.manifest, encode_manifest(said, repo.id))


def table_of(repo: Repo, id: CheckpointId) -> BoxTable:
    table = repo.boxes(repo.manifest(id))
    assert table is not None
    return table


def lie(repo: Repo, change: Change, **more: Any) -> None:
    table = table_of(repo, SECOND)
    vouch(repo, SECOND, encode_boxes(change(table), SECOND, repo.manifest(SECOND).save_id, repo.id), **more)


SECOND = CheckpointId("main", 1, 2)


# -- lies --------------------------------------------------------------------------------------------------------------


def widest(table: BoxTable) -> int:
    """The leaf of the most parts."""
    return int(np.argmax(np.bincount(table.leaf)))


def last_of(table: BoxTable) -> int:
    return int(np.flatnonzero(table.leaf == widest(table))[-1])


def put(column: str, place: Callable[[BoxTable], int], value: Any) -> Change:
    """One number of a column changed; `value` is a number, or made of the one that is there."""

    def change(table: BoxTable) -> BoxTable:
        found = getattr(table, column).astype(np.uint64 if column != "bounds" else np.int64)
        at = place(table)
        found[at] = value(int(found[at])) if callable(value) else value
        return replace(table, **{column: found})

    return change


def dimension(table: BoxTable) -> int:
    """The place of the first dimension of the last part of that leaf."""
    return int(table.bounds[last_of(table)])


def huge(items: int) -> Change:
    """A leaf of so many rows, and its last part all the way to its end."""

    def change(table: BoxTable) -> BoxTable:
        leaf, part = widest(table), last_of(table)
        whole_of, shape = table.whole.copy(), table.shape.copy()
        whole_of[table.ends[leaf]] = items
        shape[table.bounds[part]] = items - table.origin[table.bounds[part]]
        return replace(table, whole=whole_of, shape=shape)

    return change


def swapped(one: str, *more: str) -> Change:
    """The last two parts of that leaf have each other's."""

    def change(table: BoxTable) -> BoxTable:
        at, found = last_of(table), {}
        for column in (one, *more):
            values = getattr(table, column).copy()
            values[[at, at - 1]] = values[[at - 1, at]]
            found[column] = values
        return replace(table, **found)

    return change


def some(table: BoxTable, rows: Any) -> BoxTable:
    """These parts alone, in this order."""
    pieces = [slice(int(table.bounds[row]), int(table.bounds[row + 1])) for row in rows]
    lengths = [piece.stop - piece.start for piece in pieces]
    empty = np.zeros(0, np.int64)
    return replace(
        table,
        leaf=table.leaf[rows],
        rank=table.rank[rows],
        row=table.row[rows],
        origin=np.concatenate([empty, *(table.origin[piece] for piece in pieces)]),
        shape=np.concatenate([empty, *(table.shape[piece] for piece in pieces)]),
        bounds=np.cumsum([0, *lengths]),
    )


def leaf_of_one_dimension_more(table: BoxTable) -> BoxTable:
    return replace(
        table, ends=table.ends + np.arange(len(table.ends)), whole=np.append(table.whole, [1] * table.leaves)
    )


LIES: dict[str, Change] = {
    "a hole": put("shape", dimension, lambda value: value - 1),
    "an overlap": put("origin", dimension, lambda value: value - 1),
    "a part behind the leaf's end": put("origin", dimension, lambda value: value + 1),
    "a part at 2^63": put("origin", dimension, 2**63),
    "a part at 2^64-1": put("origin", dimension, 2**64 - 1),
    "a part of 2^62 rows": put("shape", dimension, 2**62 - 1),
    "no rows at all in a part": put("shape", dimension, 0),
    "a leaf of 2^40 rows, and its part": huge(2**40),
    "a leaf of 2^50 rows, and its part": huge(2**50),
    "a leaf of 2^28 rows, and its part": huge(2**28),
    "a leaf of 2^40 rows": put("whole", lambda table: int(table.ends[widest(table)]), 2**40),
    "a leaf of fewer rows": put("whole", lambda table: int(table.ends[widest(table)]), lambda value: value - 1),
    "a rank that there is not": put("rank", last_of, 3),
    "rank 2^31": put("rank", last_of, 2**31),
    "another rank's": put("rank", last_of, 0),
    "a row that there is not": put("row", last_of, 1000),
    "row 2^32-1": put("row", last_of, 2**32 - 1),
    "a row twice": put("row", last_of, lambda value: value + 1),
    "ranks exchanged": swapped("rank", "row"),
    "a leaf that there is not": put("leaf", lambda table: -1, 2**20),
    "another leaf's": put("leaf", last_of, lambda value: value + 1),
    "leaves out of order": put("leaf", lambda table: 0, lambda value: value + 1),
    "a division that falls": put("bounds", lambda table: 1, 10**6),
    "a leaf of more dimensions": leaf_of_one_dimension_more,
    "a dtype that is not listed": put("code", lambda table: 0, 60000),
    "another dtype of the size": lambda table: replace(
        table, dtypes=[{"float32": "int32", "float64": "int64"}.get(name, name) for name in table.dtypes]
    ),
    "a dtype of another size": lambda table: replace(table, dtypes=["complex128"] * len(table.dtypes)),
    "a dtype of 2^30 bytes": lambda table: replace(table, dtypes=["numpy:|V999999999"] * len(table.dtypes)),
    "a dtype of Python's objects": lambda table: replace(table, dtypes=["numpy:|O8"] * len(table.dtypes)),
    "no parts": lambda table: some(table, []),
    "a part left out": lambda table: some(table, [at for at in range(len(table)) if at != last_of(table)]),
    "every part twice": lambda table: some(table, np.repeat(np.arange(len(table)), 2).tolist()),
}


# -- looking -----------------------------------------------------------------------------------------------------------


def is_right(state: Any, step: int = 2) -> bool:
    wanted = whole(step)["model"]
    return all(
        state["model"][name].dtype == array.dtype and np.array_equal(state["model"][name], array)
        for name, array in wanted.items()
    )


def loaded(repo: Repo) -> None:
    assert is_right(tenuto.load(repo.url, step=2).state)


def opened(repo: Repo) -> None:
    with tenuto.open(repo.url, step=2) as found:
        for path, array in whole(2)["model"].items():
            assert np.array_equal(found[f"model/{path}"].numpy(), array)


def restored_on(count: int) -> Callable[[Repo], None]:
    def look(repo: Repo) -> None:
        for rank in range(count):
            target, wanted = held(rank, count, 7), held(rank, count, 2)

            def match(manifest: Manifest, told: CheckpointLeaves, target: Any = target) -> Prepared:
                return match_state(manifest.tree, told.private, told.specs, target)

            prepared, _ = fetch(repo, repo.manifest(SECOND), match, rank=rank, of=count, emitter=Emitter())
            prepared.apply()
            for name in ("rows", "columns"):
                assert np.array_equal(target["model"][name].value, wanted["model"][name].value)

    return look


LOOKS = {"load": loaded, "open": opened, "restore on 3": restored_on(3), "restore on 2": restored_on(2)}


def refusals(repo: Repo) -> dict[str, TenutoError]:
    """What each way of looking refuses. Raises what is no error of ours, or other values than were saved."""
    found = {}
    gc.collect()  # what earlier tests of this process left behind frees its shared memory now, and not while recorded
    tracemalloc.start()
    try:
        with recording(lambda event, arguments: event != "open" or str(arguments[0]).endswith((".py", ".pyc"))) as done:
            for name, look in LOOKS.items():
                try:
                    look(repo)
                except TenutoError as error:
                    # What a target disagrees with may be seen before the lie is.
                    assert error.message and isinstance(error, CorruptionError | StateMismatch), error
                    found[name] = error
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done == [] and peak < MEMORY, (done, peak)
    return found


def test_a_truthful_table_is_read_in_every_way(repo: Repo) -> None:
    lie(repo, lambda table: table)
    assert refusals(repo) == {}
    assert execute(repo, plan_verify(repo), threads=1).damaged() == ()


@pytest.mark.parametrize("name", LIES)
def test_i10_a_lie_is_refused_in_every_way_and_the_checkpoint_before_restored(repo: Repo, name: str) -> None:
    lie(repo, LIES[name])
    found = refusals(repo)
    assert isinstance(found["load"], CorruptionError) and isinstance(found["open"], CorruptionError)
    assert execute(repo, plan_verify(repo), threads=1).damaged() == (SECOND,)
    restored = tenuto.load(repo.url)
    assert restored.step == 1 and is_right(restored.state, 1)
    assert [id for id, _ in restored.skipped] == [SECOND]


def data_of(repo: Repo, name: str) -> bytes:
    return bytes(repo.store.get(f"{SECOND.directory}/{name}", limit=1 << 24))


OBJECTS: dict[str, Callable[[Repo], bytes]] = {
    "of the checkpoint before": lambda repo: bytes(
        repo.store.get(f"runs/main/a0001/step-00000001/{BOXES}", limit=1 << 24)
    ),
    "an index": lambda repo: data_of(repo, "rank-00000.index"),
    "a pack": lambda repo: data_of(repo, "rank-00001.safetensors"),
    "a manifest": lambda repo: data_of(repo, "manifest.json"),
    "nothing": lambda repo: b"",
    "its first half": lambda repo: data_of(repo, BOXES)[: len(data_of(repo, BOXES)) // 2],
    "all but its last byte": lambda repo: data_of(repo, BOXES)[:-1],
    "one byte more": lambda repo: data_of(repo, BOXES) + b"\0",
}


@pytest.mark.parametrize("name", OBJECTS)
def test_another_object_under_its_name_is_refused(repo: Repo, name: str) -> None:
    vouch(repo, SECOND, OBJECTS[name](repo))
    assert {"load", "open"} <= refusals(repo).keys()
    assert tenuto.load(repo.url).step == 1


MANIFESTS: dict[str, Callable[[Manifest], dict[str, Any]]] = {
    "no table": lambda manifest: {"boxes": None},
    "a rank less": lambda manifest: {"indexes": manifest.indexes[:2]},
    "one rank three times": lambda manifest: {"indexes": manifest.indexes[:1] * 3},
    "a table that there is not": lambda manifest: {"boxes": replace(manifest.boxes, name="rank-00009.index")},
    "a table of 2^40 bytes": lambda manifest: {"boxes": replace(manifest.boxes, length=2**40)},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_lies_about_its_ranks_is_refused(repo: Repo, name: str) -> None:
    said = replace(repo.manifest(SECOND), **MANIFESTS[name](repo.manifest(SECOND)))
    replace_object(repo, SECOND.manifest, encode_manifest(said, repo.id))
    assert {"load", "open"} <= refusals(repo).keys()
    assert tenuto.load(repo.url).step == 1


def test_the_order_of_its_indexes_means_nothing(repo: Repo) -> None:
    manifest = repo.manifest(SECOND)
    replace_object(repo, SECOND.manifest, encode_manifest(replace(manifest, indexes=manifest.indexes[::-1]), repo.id))
    assert refusals(repo) == {}


def test_i10_a_table_changed_at_random_is_refused_or_read_as_it_was(repo: Repo) -> None:
    """Behind the right digest: as a hostile writer has it, not as an accident."""
    before, refused = data_of(repo, BOXES), 0
    for data in mutations([before], ['"U64"', '"shape":[', "-1", "2"], seed=3, count=60):
        vouch(repo, SECOND, data)
        refused += bool(refusals(repo))
    assert refused > 30
