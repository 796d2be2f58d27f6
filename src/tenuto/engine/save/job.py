"""One save under way: what it is about, its capture and digests, and the index and manifest that describe its image.

The same for a save that is sealed in memory, one that is written to a store, and one that is both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.codec.digest import digest
from tenuto.concurrency.worker_threads import BackgroundWork
from tenuto.engine.save.handle import Save
from tenuto.engine.staging.pack_content import Filling
from tenuto.engine.staging.plan import Digester, SavePlan
from tenuto.model import canonical_json
from tenuto.model.canonical_json import Spelled
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, IndexEntry, Json, Manifest, PackEntry, Receipt
from tenuto.record import record
from tenuto.repo.format.index import encode_index
from tenuto.repo.format.manifest import content_digest, encode_manifest
from tenuto.repo.format.object_names import index_file
from tenuto.repo.repository import now_text
from tenuto.state.contract import Flattened

if TYPE_CHECKING:
    from tenuto.engine.save.encoder import EncodedPacks
    from tenuto.engine.save.fenced_capture import FencedCapture
    from tenuto.model.health import Health

DIGESTED_BYTES: Final = 4 << 20
"""Bytes that are digested at a time behind a copy that is still under way."""


@record
class ManifestDetails:
    """What a manifest says beside the state itself."""

    parent: CheckpointId | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    progress: Mapping[str, Json] = field(default_factory=dict)
    environment: Mapping[str, Json] = field(default_factory=dict)
    certificate: Mapping[str, Json] = field(default_factory=dict)
    reason: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)
    """One for each random generator of this rank: those that are equal on all ranks are alike, and the manifest's
    progress says so."""
    health: Health | None = None
    """What the save has found of the values, of several ranks those of this one."""


@dataclass(slots=True)
class Job:
    """One save under way, as its capturing and its writing thread share it."""

    save: Save
    plan: SavePlan
    flattened: Flattened
    about: ManifestDetails
    digest_while_writing: bool = False
    filling: Filling = field(init=False)
    digester: Digester = field(init=False)
    created: str = field(default_factory=lambda: now_text())  # noqa: PLW0108 - by name: simulations replace it
    work: BackgroundWork | None = None
    """Of the thread that writes it."""
    begun: bool = False
    sealed: bool = False
    names: Sequence[str] = ()
    bases: tuple[CheckpointId, ...] = ()
    """The checkpoints of which it may name packs."""
    receipts: list[Receipt] = field(default_factory=list)
    """Of the packs, in order: a save that resumes after room was made does not write them again."""
    encoded: EncodedPacks | None = None
    """What the image is written as, where not as it is."""

    def __post_init__(self) -> None:
        self.filling = Filling(self.plan.arena.window, self.save.patience_s)
        self.digester = Digester(self.plan.chunks, self.plan.arena.buffer.data)
        self.save.bytes = sum(pack.length for pack in self.plan.layout.packs)

    def digest_image(self) -> None:
        """Digests the image to its end, which may still be filling up. Raises what broke the capture off;
        DeadlineExceeded if it does not progress."""
        nbytes = self.plan.layout.nbytes
        for end in (*range(DIGESTED_BYTES, nbytes, DIGESTED_BYTES), nbytes):
            self.filling.wait(end)
            self.digester.advance(end)

    def index(self) -> Index:
        """Returns the index of the digested image."""
        plan, layout, flattened = self.plan, self.plan.layout, self.flattened
        return Index(
            rank=plan.rank,
            save_id=self.save.save_id,
            chunk_bytes=plan.chunk_bytes,
            packs=tuple(
                PackEntry(pack.name, pack.length, pack.header_length, layout.header_digest(number, self.save.save_id))
                for number, pack in enumerate(layout.packs)
            ),
            specs=flattened.specs,
            pack=layout.pack,
            offset=layout.offset,
            length=layout.length,
            chunk_start=plan.chunks.start,
            digests=self.digester.digests(),
            private=flattened.private,
            leaf=None if flattened.leaf is None else np.asarray(flattened.leaf, np.int64),
            tree_leaves=None if flattened.leaf is None else flattened.shared,
        )

    def written_index(self) -> Index:
        """Returns the index of what was written."""
        plain = self.index()
        return plain if self.encoded is None else self.encoded.index(plain)

    def manifest(self, tree: Spelled, index: Index, entry: IndexEntry, about: ManifestDetails) -> Manifest:
        """Returns the manifest of a checkpoint of one rank. `tree`: the state's, spelled; `entry`: of the index."""
        content = content_digest(
            tree, self.plan.table, index.digests, chunk_bytes=index.chunk_bytes, private=[index.private]
        )
        return manifest_about(
            about,
            id=self.save.id,
            save_id=index.save_id,
            tree=tree.value,
            indexes=(entry,),
            content=content,
            bytes=self.save.bytes,
            leaves=len(index.specs),
            chunk_bytes=index.chunk_bytes,
            created=self.created,
            **stored_in(index),
        )

    def described(self, repository: str) -> tuple[bytes, bytes, str]:
        """Returns the bytes of the index and of the manifest of a checkpoint of one rank in this repository, and its
        content digest."""
        index = self.index()
        rows = encode_index(index, self.save.id, repository, self.plan.rows)
        entry = IndexEntry(index_file(index.rank), len(rows), digest(rows))
        tree = canonical_json.spell(self.flattened.tree)
        manifest = self.manifest(tree, index, entry, self.about)
        return rows, encode_manifest(manifest, repository, tree), manifest.content

    def aside_s(self) -> float:
        """Returns what the writing thread has spent on digests and on waiting for the capture so far."""
        return self.filling.waited_s + (self.digester.seconds if self.digest_while_writing else 0.0)

    def timed(self) -> ManifestDetails:
        """Returns what it is about, with the time it has taken so far in its environment."""
        self.save.clock.read_cpu()
        return replace(self.about, environment={**self.about.environment, "timing": self.save.timing.to_json()})


def stored_in(*indexes: Index) -> dict[str, Any]:
    """Returns what a manifest says of where the chunks of these indexes are stored."""
    packs = [pack for index in indexes for pack in index.packs]
    if all(index.stored is None for index in indexes):
        return {}
    return {
        "bases": tuple(sorted({pack.at for pack in packs if pack.at is not None})),
        "rounded": any(index.stored is not None and index.stored.rounded is not None for index in indexes),
        "stored": sum(pack.length for pack in packs if pack.at is None),
    }


def manifest_about(about: ManifestDetails, **fields: Any) -> Manifest:
    """Returns the manifest of these fields, and of what the save is about."""
    return Manifest(
        **fields,
        parent=about.parent,
        metrics=about.metrics,
        progress=about.progress,
        environment=about.environment,
        certificate=about.certificate,
        health=about.health,
    )


def capture(job: Job, fencing: FencedCapture | None, *, progress: Callable[[int], None] | None = None) -> bool:
    """Copies the state into the job's image: all of it, or with `fencing` what cannot wait. Returns whether all is
    copied."""
    if fencing is not None and fencing.possible(job.plan):
        fencing.capture(job.flattened, job.plan, job.save, job.filling)
        return False
    job.plan.capturer.capture(job.flattened, job.save.save_id, progress=progress, admit=job.filling.admit)
    return True
