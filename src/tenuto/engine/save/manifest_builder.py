"""What describes an image: its index and its manifest, the same for a save to a store and for one in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.codec.digest import digest
from tenuto.engine.staging.plan import SavePlan
from tenuto.model import canonical_json
from tenuto.model.canonical_json import Spelled
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, IndexEntry, Manifest, PackEntry
from tenuto.repo.format.index import encode_index
from tenuto.repo.format.manifest import content_digest, encode_manifest
from tenuto.repo.format.object_names import index_file
from tenuto.state.contract import Flattened

if TYPE_CHECKING:
    from tenuto.engine.save.job import ManifestDetails


def index_of(
    plan: SavePlan, flattened: Flattened, digests: np.ndarray[Any, Any], save_id: str, *, rank: int, chunk_bytes: int
) -> Index:
    """The index of an image that was captured by `plan`; `digests`: uint8 [chunks, 16] in index order."""
    layout = plan.layout
    packs = tuple(
        PackEntry(pack.name, pack.length, pack.header_length, layout.header_digest(number, save_id))
        for number, pack in enumerate(layout.packs)
    )
    return Index(
        rank=rank,
        save_id=save_id,
        chunk_bytes=chunk_bytes,
        packs=packs,
        specs=flattened.specs,
        pack=layout.pack,
        offset=layout.offset,
        length=layout.length,
        chunk_start=plan.chunks.start,
        digests=digests,
        private=flattened.private,
        leaf=None if flattened.leaf is None else np.asarray(flattened.leaf, np.int64),
        tree_leaves=None if flattened.leaf is None else flattened.shared,
    )


def manifest_of(
    id: CheckpointId,
    tree: Spelled,
    plan: SavePlan,
    index: Index,
    entry: IndexEntry,
    *,
    about: ManifestDetails,
    created: str,
) -> Manifest:
    """The manifest of a checkpoint of one rank, whose `index` is that of an image captured by `plan`."""
    return manifest_about(
        about,
        id=id,
        save_id=index.save_id,
        tree=tree.value,
        indexes=(entry,),
        content=content_digest(tree, plan.table, index.digests, chunk_bytes=index.chunk_bytes, private=[index.private]),
        bytes=sum(pack.length for pack in index.packs),
        leaves=len(index.specs),
        chunk_bytes=index.chunk_bytes,
        created=created,
    )


def spelled(
    id: CheckpointId, plan: SavePlan, index: Index, flattened: Flattened, *, about: ManifestDetails, created: str
) -> tuple[bytes, bytes, str]:
    """The bytes of the index and of the manifest of a checkpoint of one rank, and the digest of its content."""
    rows = encode_index(index, id, plan.rows)
    entry = IndexEntry(index_file(index.rank), len(rows), digest(rows))
    tree = canonical_json.spell(flattened.tree)
    manifest = manifest_of(id, tree, plan, index, entry, about=about, created=created)
    return rows, encode_manifest(manifest, tree), manifest.content


def manifest_about(about: ManifestDetails, **fields: Any) -> Manifest:
    """The manifest of these fields, and of what the save is about."""
    return Manifest(
        **fields,
        parent=about.parent,
        metrics=about.metrics,
        progress=about.progress,
        environment=about.environment,
        certificate=about.certificate,
    )
