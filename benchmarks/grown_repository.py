"""A repository of thousands of small checkpoints, made in seconds: the first one is saved, the others are its copies
under the following steps, each with objects of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from tenuto.codec.digest import digest
from tenuto.model.ids import CheckpointId
from tenuto.model.records import AttemptRecord, IndexEntry, Json, Manifest, Owner
from tenuto.repo.best import MODES
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.index import encode_index
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.format.small_records import decode_begin, encode_attempt, encode_begin
from tenuto.repo.repository import Repo

Put = Callable[[str, bytes], None]


def grow(repo: Repo, first: CheckpointId, steps: range, put: Put) -> None:
    """Makes checkpoints of `steps` as if the attempt of `first`, a checkpoint of one rank and one pack, had saved its
    state again. `put` is called with each object's name and bytes; its objects need not be durable."""
    manifest = repo.manifest(first)
    index = repo.index(manifest)
    (pack,) = index.packs
    name = object_names.begin_name(first)
    begin = decode_begin(repo.store.get(name, limit=objects.SMALL), first, repo.id)
    data = repo.store.get(f"{first.directory}/{pack.name}", limit=pack.length)
    for step in steps:
        id = CheckpointId(first.run, first.attempt, step)
        columns = encode_index(index, id, repo.id, None)
        entry = IndexEntry(manifest.indexes[0].name, len(columns), digest(columns))
        progress = {**manifest.progress, "step": step}
        put(object_names.begin_name(id), encode_begin(replace(begin, id=id), repo.id))
        put(f"{id.directory}/{pack.name}", data)
        put(f"{id.directory}/{entry.name}", columns)
        put(id.manifest, encode_manifest(replace(manifest, id=id, indexes=(entry,), progress=progress), repo.id))


def grow_runs(repo: Repo, runs: Sequence[str], steps: range, put: Put) -> None:
    """Makes runs of one attempt each whose checkpoints have manifests alone, with metrics and, every tenth, a note: for
    what reads no data files. `put` is called with each object's name and bytes."""
    owner = Owner("host", "boot", "pid:[1]", 1, "1", "user")
    for place, run in enumerate(runs):
        put(object_names.attempt_name(run, 1), encode_attempt(AttemptRecord(run, 1, "0" * 32, None, owner), repo.id))
        for step in steps:
            id = CheckpointId(run, 1, step)
            created = datetime.fromtimestamp(1.7e9 + 600 * step, UTC).isoformat().replace("+00:00", "Z")
            manifest = Manifest(
                id=id,
                save_id=f"{place * len(steps) + step:032x}",
                tree={"": {"model": 0}},
                indexes=(IndexEntry(object_names.index_file(0), 1000, bytes(16)),),
                content="0" * 64,
                bytes=step << 20,
                leaves=1,
                chunk_bytes=repo.chunk_bytes,
                metrics={"loss": 1 / step, "val_loss": (step * 7919 + place * 31) % 1000 / 1000},
                progress={"step": step},
                environment={"python": "3.11"},
                certificate={MODES: {"val_loss": "min"}},
                created=created,
            )
            put(id.manifest, encode_manifest(manifest, repo.id))
            if step % 10 == 0:
                name = object_names.numbered(object_names.notes_directory(id), 1)
                body: dict[str, Json] = {"body": {"accuracy": step / 1000}, "created": created, "id": "0" * 32}
                put(name, objects.encode("note", name, {**body, "note": "metric"}, repo.id))
