"""Indexes and manifests of a checkpoint, made again from a tier that stores it in another way, byte for byte.

Such a tier has the rows of each index and all that the manifest says, but for where the chunks lie. Of a save that
stores chunks as they are that follows from the forms of its rows. What is made counts where it is known to be the same:
an index by its digest in the manifest, a manifest by the last bytes of the damaged one, or by its indexes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from tenuto.codec.digest import digest
from tenuto.engine.save.job import stored_in
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.errors import TenutoError
from tenuto.model.canonical_json import TAIL
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, IndexEntry, Manifest, PackEntry
from tenuto.repo.commit import signed
from tenuto.repo.encoded_places import stand_ins
from tenuto.repo.format.index import decode_index, encode_index
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.keys import find_key
from tenuto.repo.repository import Repo

Found = tuple[str, bytes]
"""What gave the bytes of an object, and they."""
SAVED: Final = "saved"
"""The entry of `environment.encoding` of a tier's manifest that has what the save has said there."""


def index_again(repo: Repo, id: CheckpointId, rank: int, entry: IndexEntry) -> Found | None:
    """Returns the bytes of an index that the manifest names as `entry`; None where they do not come out the same."""
    for there in stand_ins(repo, id):
        with suppress(TenutoError):
            data = encode_index(_as_saved(there.index(there.manifest(id), rank)), id, repo.id)
            if len(data) == entry.length and digest(data) == entry.digest:
                return _words(there), data
    return None


def manifest_again(repo: Repo, id: CheckpointId, damaged: bytes, table: Callable[[str], bytes | None]) -> Found | None:
    """Returns the bytes of a manifest; None where it is not known that they are the same. `damaged`: what lies in its
    place. `table`: returns what lies under the name of an index."""
    for there in stand_ins(repo, id):
        with suppress(TenutoError):
            theirs = there.manifest(id)
            tables = [_table(there, theirs, rank, table) for rank in range(len(theirs.indexes))]
            made = _made(theirs, [index for index, _, _ in tables], [data for _, data, _ in tables])
            if theirs.code:
                repo.keys = repo.keys or find_key(repo)
                made = signed(repo, made)
            data = encode_manifest(made, repo.id)
            if data[-TAIL:] == damaged[-TAIL:] or all(proven for _, _, proven in tables):
                return _words(there), data
    return None


def _words(there: Repo) -> str:
    return f"{there.url}, made again"


def _as_saved(index: Index) -> Index:
    """Returns an index of the same rows in packs as a save lays them out that stores chunks as they are."""
    layout = plan_layout(index.specs, rank=index.rank)
    packs = tuple(
        PackEntry(pack.name, pack.length, pack.header_length, layout.header_digest(number, index.save_id))
        for number, pack in enumerate(layout.packs)
    )
    return replace(index, packs=packs, pack=layout.pack, offset=layout.offset, stored=None)


def _table(there: Repo, theirs: Manifest, rank: int, table: Callable[[str], bytes | None]) -> tuple[Index, bytes, bool]:
    """Returns an index that the manifest has named, and whether it is known to be as it was saved: what lies in its
    place, unless that is damaged, else as a save that stores chunks as they are has it."""
    id, rows = theirs.id, there.index(theirs, rank)
    made = _as_saved(rows)
    data, found = encode_index(made, id, there.id), table(f"{id.directory}/{theirs.indexes[rank].name}")
    if found is None or found == data:
        return made, data, found == data
    with suppress(TenutoError):
        index = decode_index(found, id=id, rank=rank, tree=theirs.tree, repository=there.id)
        if index.save_id == rows.save_id and index.stored is not None:
            return index, found, False
    return made, data, False


def _made(theirs: Manifest, indexes: list[Index], tables: list[bytes]) -> Manifest:
    """Returns what the manifest has been, without its code, that names these indexes."""
    entries = tuple(
        IndexEntry(old.name, len(data), digest(data), hashlib.sha256(data).hexdigest() if old.sha256 else "")
        for old, data in zip(theirs.indexes, tables, strict=True)
    )
    about = theirs.environment.get("encoding")
    environment = {name: value for name, value in theirs.environment.items() if name != "encoding"}
    if isinstance(about, Mapping) and SAVED in about:
        environment["encoding"] = about[SAVED]
    stored = {"stored": None, "bases": (), "rounded": False, **stored_in(*indexes)}
    return replace(theirs, indexes=entries, environment=environment, code="", **stored)
