"""Opens a checkpoint without decoding its tree: its manifest, its rows, and single leaves by path."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from tenuto.concurrency.worker_threads import gc_paused
from tenuto.errors import CorruptionError, ObjectNotFound
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, Json, Manifest
from tenuto.repo.format.index import Table, decode_table
from tenuto.repo.format.manifest import MAX_MANIFEST, decode_outline
from tenuto.repo.format.object_names import index_file
from tenuto.repo.format.tree_scan import TreeText
from tenuto.repo.repository import Repo
from tenuto.state.tree import LEAVES, kind_of, leaf_nodes, number_of

MOST_LOOKUPS = 64
"""Leaves that are looked up one by one; for more it is quicker to decode the whole tree."""


class Outline:
    """One rank's view of a checkpoint. The digests of manifest and index have been checked, and so has every row.

    The whole tree is decoded at the first use of `leaves`, `tree` or `index`, or for a leaf whose path alone does not
    give its place; CorruptionError then names what in it no save can have written.
    """

    def __init__(self, manifest: Manifest, table: Table, text: TreeText | None) -> None:
        """`text` is the tree's, where `manifest` does not have it."""
        self.manifest = manifest
        self.table = table
        self._text = text
        self._lookups = 0
        self._index: Index | None = None
        self._leaves: dict[str, tuple[int, Json]] | None = None
        self._lock = threading.RLock()

    def find(self, path: str) -> tuple[int, Json] | None:
        """Returns row and node of the leaf or alias at `path`; None where there is none."""
        text = self._text
        if text is not None and self._lookups < MOST_LOOKUPS:
            self._lookups += 1
            node = text.find(path)
            if node is not None and kind_of(node) in LEAVES:
                return number_of(node, self.table.shared, path), node
        return self.leaves().get(path)

    @gc_paused
    def leaves(self) -> dict[str, tuple[int, Json]]:
        """Returns row and node of every leaf and alias by path, in the order of the state; private ones last."""
        with self._lock:
            if self._leaves is None:
                self._leaves = self._gathered()
            return self._leaves

    def _gathered(self) -> dict[str, tuple[int, Json]]:
        found: dict[str, tuple[int, Json]] = {}
        base, count = 0, self.table.shared
        for tree in self.trees():
            for path, node in leaf_nodes(tree):
                found[path] = (base + number_of(node, count, path), node)
            base, count = count, len(self.table) - count
        return found

    def spec(self, row: int, path: str) -> LeafSpec:
        """Returns the description of a row under this path, which may be an alias."""
        return self.table.spec(row, path)

    @property
    def shared(self) -> int:
        """The number of rows that are leaves of the manifest's tree; the others are private."""
        return self.table.shared

    def specs(self) -> Sequence[LeafSpec]:
        return self.index().specs

    @property
    def tree(self) -> Json:
        """The manifest's tree, decoded strictly."""
        return self._decoded().tree

    @gc_paused
    def index(self) -> Index:
        """Returns the index with its paths."""
        with self._lock:
            if self._index is None:
                self._index = self.table.index(self.tree)
            return self._index

    def trees(self) -> list[Json]:
        """Returns the shared tree, then the private one if there is one. Both are checked to name all leaves."""
        self.index()
        return [self.tree, *([] if self.table.private is None else [self.table.private])]

    @gc_paused
    def _decoded(self) -> Manifest:
        with self._lock:
            if self._text is not None:
                try:
                    tree = canonical_json.loads(self._text.text)
                except CorruptionError as error:
                    name = self.manifest.id.manifest
                    raise CorruptionError(f"{name}: {error.message}", subject=name) from None
                self.manifest = replace(self.manifest, tree=tree)
                self._text = None
            return self.manifest


def read_outline(repo: Repo, id: CheckpointId, rank: int = 0) -> Outline:
    """Opens a checkpoint. Raises like `Repo.manifest` and `Repo.index`, but not for what only the whole tree shows."""
    try:
        data = repo.store.get(id.manifest, limit=MAX_MANIFEST)
    except ObjectNotFound:
        data = b""
    manifest, text = (_cut(data, id, repo.id) if data else None) or (repo.manifest(id), None)
    if text is not None:
        repo.authenticate(manifest, data)
    file = index_file(rank)
    entry = next((entry for entry in manifest.indexes if entry.name == file), None)
    if entry is None:
        raise CorruptionError(f"the manifest of {id} names no index {file}", subject=id.manifest)
    table = decode_table(repo.index_bytes(id, entry), id=id, rank=rank, repository=repo.id)
    if table.save_id != manifest.save_id or table.chunk_bytes != manifest.chunk_bytes:
        raise CorruptionError(f"{table.name} belongs to another save than its manifest", subject=table.name)
    return Outline(manifest, table, text)


def _cut(data: bytes, id: CheckpointId, repository: str) -> tuple[Manifest, TreeText] | None:
    found = decode_outline(data, id, repository)
    if found is None:
        return None
    try:
        return found[0], TreeText(data, *found[1:])
    except CorruptionError as error:
        raise CorruptionError(f"{id.manifest}: {error.message}", subject=id.manifest) from None
    except ValueError:
        return None  # a tree that is a single value, or a newer writer's further keys behind it
