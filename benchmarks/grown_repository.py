"""A repository of thousands of small checkpoints, made in seconds: the first one is saved, the others are its copies
under the following steps, each with objects of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tenuto.codec.digest import digest
from tenuto.model.ids import CheckpointId
from tenuto.model.records import IndexEntry
from tenuto.repo.format import object_names, objects
from tenuto.repo.format.index import encode_index
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.format.small_records import decode_begin, encode_begin
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
