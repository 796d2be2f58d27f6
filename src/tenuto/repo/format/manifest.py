"""The manifest with its content digest, and the aborted mark that takes its name when a save must never commit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.concurrency.worker_threads import gc_paused
from tenuto.errors import CorruptionError, FormatTooNew
from tenuto.model import canonical_json
from tenuto.model.canonical_json import Spelled, tag_number, untag_number
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec
from tenuto.model.records import Index, IndexEntry, Json, Manifest
from tenuto.record import record
from tenuto.repo.format import objects
from tenuto.repo.format.object_names import check_file
from tenuto.repo.format.objects import Fields, checkpoint_json
from tenuto.repo.format.shard_table import BoxTable, table_parts
from tenuto.repo.format.small_records import check_parent

if TYPE_CHECKING:
    from tenuto.model.health import Health

MAX_MANIFEST: Final = 1 << 30
MAX_ABORTED: Final = 4096
"""The limit of an aborted mark: a longer object under a manifest's name is a manifest."""
_MAX_RANKS: Final = 100_000
_TREE: Final = b',"tree":'
_PLAIN: Final = json.JSONDecoder()
_TREES: Final = 16
"""The candidates tried for the beginning of the tree."""


@record
class Aborted:
    """The mark of a save that never becomes a checkpoint. `save_id`: of the closed save, empty if unknown."""

    id: CheckpointId
    save_id: str
    by: str


@record
class Summary:
    """What a listing shows of a manifest. stored: bytes of its own packs. ranks: how many indexes it names."""

    bytes: int
    leaves: int
    stored: int
    ranks: int
    created: str
    metrics: Mapping[str, float]
    certificate: Mapping[str, Json]
    healthy: bool

    @classmethod
    def of(cls, manifest: Manifest) -> Summary:
        numbers = (manifest.bytes, manifest.leaves, manifest.stored_bytes, len(manifest.indexes))
        healthy = manifest.health is None or manifest.health.healthy
        return cls(*numbers, manifest.created, manifest.metrics, manifest.certificate, healthy)


def encode_manifest(manifest: Manifest, repository: str, tree: Spelled | None = None) -> bytes:
    """Returns the bytes of the manifest in this repository; equal manifests have equal bytes. `tree`: the manifest's,
    if already spelled."""
    id = manifest.id
    assert tree is None or tree.value is manifest.tree, "another tree"
    return objects.encode(
        "manifest",
        id.manifest,
        {
            **({} if manifest.boxes is None else {"boxes": _entry(manifest.boxes)}),
            **objects.bases_json(manifest.bases),
            "attempt": id.attempt,
            "bytes": manifest.bytes,
            "certificate": dict(manifest.certificate),
            "chunk_bytes": manifest.chunk_bytes,
            **({"code": manifest.code} if manifest.code else {}),
            "content": manifest.content,
            "created": manifest.created,
            "environment": dict(manifest.environment),
            **({} if manifest.health is None else {"health": manifest.health.to_json()}),
            "indexes": [_entry(entry) for entry in manifest.indexes],
            "leaves": manifest.leaves,
            "metrics": {name: tag_number(float(value)) for name, value in manifest.metrics.items()},
            "parent": checkpoint_json(manifest.parent),
            "progress": dict(manifest.progress),
            "run": id.run,
            "save_id": manifest.save_id,
            "step": id.step,
            **({} if manifest.stored is None else {"stored": manifest.stored}),
            "tree": manifest.tree if tree is None else tree,
        },
        repository,
        format=objects.ROUNDED if manifest.rounded else objects.FORMAT if manifest.stored is None else objects.ENCODED,
    )


def _entry(entry: IndexEntry) -> Json:
    sealed = {"sha256": entry.sha256} if entry.sha256 else {}
    return {"digest": entry.digest.hex(), "length": entry.length, "name": entry.name, **sealed}


def encode_aborted(mark: Aborted, repository: str) -> bytes:
    data = objects.encode("aborted", mark.id.manifest, {"by": mark.by, "save_id": mark.save_id}, repository)
    assert len(data) <= MAX_ABORTED
    return data


@gc_paused
def decode_manifest(data: bytes, id: CheckpointId, repository: str) -> Manifest | Aborted:
    """Decodes the object under the manifest's name of `id`. Raises CorruptionError if it is damaged, a copy, of another
    repository, or inconsistent."""
    try:
        found = objects.decode("manifest", id.manifest, data, repository)
    except CorruptionError:
        if len(data) > MAX_ABORTED or not data.startswith(b'{"by":'):
            raise
        found = objects.decode("aborted", id.manifest, data, repository)
        return Aborted(id, found.text("save_id"), found.text("by"))
    return _manifest(found, id, _tree(found))


def decode_outline(data: bytes, id: CheckpointId, repository: str) -> tuple[Manifest, int, int] | None:
    """Returns the manifest without its tree, and the bounds of the tree's text in `data`.

    Returns None if these are unclear (an aborted mark, or further keys of a newer writer); then use `decode_manifest`.
    The digest covers the tree as well, and is checked. Raises CorruptionError as `decode_manifest`.
    """
    canonical_json.check_seal(data, name=id.manifest)
    stop = len(data) - canonical_json.TAIL
    place = -1
    for _ in range(_TREES):
        place = data.find(_TREE, place + 1, stop)
        if place < 0:
            return None
        head = data[:place] + b"}"
        try:
            values = canonical_json.loads(head)
        except CorruptionError:
            continue  # a key of this name further inside
        found = objects.checked("manifest", id.manifest, values, repository)
        return None if found is None else (_manifest(found, id, None), place + len(_TREE), stop)
    return None


def decode_summary(data: bytes, id: CheckpointId, repository: str) -> Summary | None:
    """Returns what a listing shows of an intact manifest, in a third of the time that `decode_outline` takes, for who
    reads thousands of them.

    The digest is checked, and the types of what is returned; of the rest only that the manifest is of this place.
    Returns None for whatever is not as a save writes it, which `decode_outline` and `decode_manifest` judge.
    """
    try:
        canonical_json.check_seal(data, name=id.manifest)
        found = _PLAIN.decode(data[: data.index(_TREE)].decode("ascii") + "}")
        healthy = "health" not in found or _health(Fields(found, id.manifest)).healthy
    except (ValueError, RecursionError):  # also damage
        return None
    get = found.get
    numbers = (get("bytes"), get("leaves"), get("stored", get("bytes")))
    place = (get("path"), get("repository"), get("run"), get("attempt"), get("step"))
    metrics, certificate, indexes = get("metrics"), get("certificate"), get("indexes")
    usual = (
        get("kind") == "manifest"
        and get("format") in (objects.FORMAT, objects.ENCODED, objects.ROUNDED)
        and place == (id.manifest, repository, id.run, id.attempt, id.step)
        and all(type(number) is int and 0 <= number <= canonical_json.MAX_INTEGER for number in numbers)
        and type(metrics) is dict
        and all(type(value) in (int, float) for value in metrics.values())
        and type(certificate) is dict
        and type(indexes) is list
        and 0 < len(indexes) <= _MAX_RANKS
        and type(get("created")) is str
    )
    return Summary(*numbers, len(indexes), found["created"], metrics, certificate, healthy) if usual else None


def _manifest(found: Fields, id: CheckpointId, tree: Json) -> Manifest:
    if (found.text("run"), found.whole("attempt"), found.whole("step")) != (id.run, id.attempt, id.step):
        raise found.refuse("names another checkpoint than its own")
    parent = found.checkpoint("parent")
    check_parent(parent, id.run, id.attempt + 1, found)
    environment = found.mapping("environment")
    _refuse_tiers_own(environment, id)
    indexes = _indexes(found)
    if len(indexes) > 1 and "boxes" not in found.values:
        raise found.refuse("names several ranks' indexes and no table of parts")
    return Manifest(
        id=id,
        save_id=found.hex("save_id", 32),
        tree=tree,
        indexes=indexes,
        content=found.hex("content", 64),
        bytes=found.whole("bytes"),
        leaves=found.whole("leaves"),
        chunk_bytes=found.whole("chunk_bytes", minimum=1, maximum=objects.MAX_CHUNK),
        parent=parent,
        metrics=_metrics(found),
        progress=found.mapping("progress"),
        environment=environment,
        certificate=found.mapping("certificate"),
        created=found.text("created"),
        boxes=_read_entry(found, found.values["boxes"]) if "boxes" in found.values else None,
        bases=found.bases(id),
        stored=found.whole("stored") if "stored" in found.values else None,
        rounded=found.whole("format") == objects.ROUNDED,
        health=_health(found) if "health" in found.values else None,
        code=found.text("code") if "code" in found.values else "",
    )


def _refuse_tiers_own(environment: Mapping[str, Json], id: CheckpointId) -> None:
    """Raises FormatTooNew for a checkpoint that a tier has stored in an encoding of its own, as before 1.0."""
    about = environment.get("encoding")
    if isinstance(about, Mapping) and "tier" in about:
        raise FormatTooNew(
            f"{id} is stored here in an encoding of its tier's own, which this version of Tenuto does not read",
            subject=str(id),
            hint="nothing here is changed; give the tier a new directory: it gets what the primary still has",
        )


def _tree(found: Fields) -> Json:
    if "tree" not in found.values:
        raise found.refuse("has no tree")
    return found.values["tree"]


def _health(found: Fields) -> Health:
    from tenuto.model.health import Health  # a checkpoint that was not looked at needs none

    try:
        return Health.read(found.mapping("health"))
    except ValueError as error:
        raise found.refuse(f"its health is not what a save writes: {error}") from None


def _metrics(found: Fields) -> dict[str, float]:
    try:
        return {name: float(untag_number(value)) for name, value in found.mapping("metrics").items()}
    except (CorruptionError, OverflowError) as error:
        raise found.refuse(f"a metric is not a number: {error}") from None


def _read_entry(found: Fields, value: Json) -> IndexEntry:
    inner = found.inner(value, "an index entry")
    return IndexEntry(
        name=check_file(inner.text("name"), subject=found.name),
        length=inner.whole("length", minimum=8),
        digest=bytes.fromhex(inner.hex("digest", 32)),
        sha256=inner.hex("sha256", 64) if "sha256" in inner.values else "",
    )


def _indexes(found: Fields) -> tuple[IndexEntry, ...]:
    rows = found.sequence("indexes")
    if not 1 <= len(rows) <= _MAX_RANKS:
        raise found.refuse(f"names {len(rows)} indexes")
    entries = [_read_entry(found, row) for row in rows]
    if len({entry.name for entry in entries}) != len(entries):
        raise found.refuse("names an index twice")
    return tuple(entries)


# --------------------------------------------------------------------------------------------------
# The content digest: the same for equal copies of a checkpoint, in every place and encoding.


def content_digest(
    tree: Json | Spelled,
    leaves: Sequence[LeafSpec] | Spelled,
    digests: np.ndarray[Any, Any],
    *,
    chunk_bytes: int,
    private: Sequence[Json] = (),
) -> str:
    """Returns the SHA-256 (hex) of the canonical leaf table and every chunk digest.

    - `leaves`: in the order of leaf numbers, or their `leaf_table`.
    - `digests`: uint8 [chunks, 16] in the same order, over all ranks.
    - `private`: the private trees in the order of ranks.

    Positions, packs and authors have no part in it.
    """
    if not isinstance(tree, Spelled):
        tree = canonical_json.spell(tree)
    table = leaves if isinstance(leaves, Spelled) else leaf_table(leaves)
    # One canonical list, member by member: the tree is spelled once for this and for its manifest.
    digest = hashlib.sha256(b'["tenuto content 1",%d,' % chunk_bytes)
    for part in (tree.text, b",", canonical_json.spell(list(private)).text, b",", table.text, b"]"):
        digest.update(part)
    digest.update(np.ascontiguousarray(digests, dtype=np.uint8).data)
    return digest.hexdigest()


def rank_digest(index: Index) -> str:
    """Returns the SHA-256 (hex) of what one of several ranks wrote: its rows, its private values, its chunk digests."""
    digest = hashlib.sha256(b"tenuto rank 1")
    for part in (leaf_table(index.specs).text, canonical_json.dumps(index.private)):
        digest.update(part)
    digest.update(np.ascontiguousarray(index.digests, dtype=np.uint8).data)
    return digest.hexdigest()


def joint_digest(tree: Spelled, boxes: BoxTable, ranks: Sequence[str]) -> str:
    """Returns the SHA-256 (hex) of a checkpoint of several ranks: its tree, its table of parts, and the `rank_digest`
    of each rank. Equal contents in another layout have another digest."""
    digest = hashlib.sha256(b"tenuto joint content 1")
    for part in (tree.text, *table_parts(boxes), *(rank.encode("ascii") for rank in ranks)):
        digest.update(b"%d " % len(part))
        digest.update(part)
    return digest.hexdigest()


def content_of(tree: Spelled, indexes: Sequence[Index], boxes: BoxTable | None) -> str:
    """Returns the content digest of a checkpoint with these indexes, all of them, and this table of parts."""
    if boxes is not None:
        return joint_digest(tree, boxes, [rank_digest(index) for index in indexes])
    return content_digest(
        tree,
        [spec for index in indexes for spec in index.specs],
        np.concatenate([index.digests for index in indexes]),
        chunk_bytes=indexes[0].chunk_bytes,
        private=[index.private for index in indexes],
    )


def leaf_table(specs: Sequence[LeafSpec]) -> Spelled:
    """Returns the part of the content digest about leaves: the same for every save of one structure."""
    # The trees map paths to leaf numbers already.
    return canonical_json.spell([f"{spec.dtype} {','.join(map(str, spec.shape))}" for spec in specs])
