"""Indexes put into a store. Packs themselves are put by the engine, from the image; the receipts of both go to
`commit`."""

from __future__ import annotations

from holdfast.codec.digest import digest
from holdfast.model.checkpoint import Index, IndexEntry, Receipt
from holdfast.model.names import CheckpointId
from holdfast.repo import objects
from holdfast.repo.index import encode_index
from holdfast.repo.layout import index_file
from holdfast.repo.repository import Repo
from holdfast.repo.rows import Rows


def put_index(repo: Repo, id: CheckpointId, index: Index, rows: Rows | None = None) -> tuple[Receipt, IndexEntry]:
    """Puts one rank's index, durably; the entry is for the manifest. AlreadyExists if it is there with other bytes.
    `rows`: those of the index's leaves, where they are at hand."""
    return put_object(repo, id, index_file(index.rank), encode_index(index, id, rows), index.save_id)


def put_object(repo: Repo, id: CheckpointId, file: str, data: bytes, save_id: str) -> tuple[Receipt, IndexEntry]:
    """Puts a table of a checkpoint, durably; the entry is for the manifest. AlreadyExists as above."""
    receipt = objects.put(repo.store, f"{id.directory}/{file}", data, token=save_id)
    return receipt, IndexEntry(file, len(data), digest(data))
