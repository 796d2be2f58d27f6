"""The nouns of a checkpoint: what its small objects say, without how they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import LeafSpec

Json = Any
"""A value that JSON can hold: None, bool, int, float, str, list of Json, dict of str to Json."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that an object is durable in a store. Only a finished `put_if_absent` makes one."""

    name: str
    length: int
    store: str


@dataclass(frozen=True, slots=True)
class PackEntry:
    """A pack as its index names it: file name inside the checkpoint's directory, length in bytes, digest of the
    header block (the first `header_length` bytes, padding included)."""

    name: str
    length: int
    header_length: int
    header_digest: bytes


@dataclass(frozen=True, slots=True)
class Index:
    """One rank's table. Row i is leaf i in the order of the state: `specs[i]` lies in `packs[pack[i]]` at
    `offset[i]`, `length[i]` bytes, with chunk digests `digests[chunk_start[i]:chunk_start[i + 1]]`.

    pack: int64 [n]; offset, length: int64 [n], bytes from the pack's first byte; chunk_start: int64 [n + 1];
    digests: uint8 [chunks, 16], xxh3-128 of each chunk of `chunk_bytes` (the last of a leaf is shorter).
    `specs` are the shared leaves in the order of the manifest's tree, then the private ones of the private tree.
    leaf: int64 [n], the number of each row's leaf, never falling, the private tree's leaves counted on from the
    manifest's; None where row i is leaf i. A rank of several has rows for what it has written: boxes of leaves, one or
    more of a leaf or none.
    """

    rank: int
    save_id: str
    chunk_bytes: int
    packs: tuple[PackEntry, ...]
    specs: Sequence[LeafSpec]
    pack: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]
    length: np.ndarray[Any, Any]
    chunk_start: np.ndarray[Any, Any]
    digests: np.ndarray[Any, Any]
    private: Json = None
    leaf: np.ndarray[Any, Any] | None = None
    tree_leaves: int | None = None
    """How many leaves the manifest's tree has, where `leaf` is given."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An index, or the table of boxes, as the manifest names it."""

    name: str
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint. It exists, and is no aborted mark: the checkpoint exists."""

    id: CheckpointId
    save_id: str
    tree: Json
    indexes: tuple[IndexEntry, ...]
    """Of the ranks that wrote it, by rank."""
    content: str
    """SHA-256 (hex) of the canonical leaf table with chunk digests: equal for equal contents, in every tier."""
    bytes: int
    leaves: int
    chunk_bytes: int
    parent: CheckpointId | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    progress: Mapping[str, Json] = field(default_factory=dict)
    """Where training was: step, epoch, batch within the epoch."""
    environment: Mapping[str, Json] = field(default_factory=dict)
    certificate: Mapping[str, Json] = field(default_factory=dict)
    created: str = ""
    """Wall clock at commit, RFC 3339, UTC. For the eye, and for `keep.every(hours=)`: nothing else is decided by it."""
    boxes: IndexEntry | None = None
    """The table that tells which rank has which part of which leaf; None for what one rank wrote."""

    @property
    def tables(self) -> tuple[IndexEntry, ...]:
        """Every object that it names: the indexes, and the table of boxes where there is one."""
        return self.indexes if self.boxes is None else (*self.indexes, self.boxes)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns an attempt: enough to tell, on the same boot and pid namespace, whether that process still lives."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    """The process's start time in clock ticks since boot, as text; with the pid it names one process."""
    user: str


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """`attempt.json`: one process lifetime of training on a run."""

    run: str
    number: int
    id: str
    parent: CheckpointId | None
    owner: Owner
    created: str = ""
    repository: str = ""
    """The id of the repository that it was claimed in; empty where an earlier version wrote it."""
    before: tuple[int, int] | None = None
    """The attempt before it, and the highest step that was begun in that; None where there was none."""


@dataclass(frozen=True, slots=True)
class Note:
    """A fact about a checkpoint learned after its commit. kind: metric, verified, suspect, proven."""

    number: int
    kind: str
    body: Mapping[str, Json]
