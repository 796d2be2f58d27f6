"""The records of a checkpoint: the content of its small objects, independent of their encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from tenuto.model.ids import CheckpointId
from tenuto.record import record

if TYPE_CHECKING:
    # For annotations alone: a supervisor, which knows owners, loads no numpy.
    import numpy as np

    from tenuto.model.health import Health
    from tenuto.model.leaf import LeafSpec

ROLLBACK: Final = "rollback"
FORK: Final = "fork"
"""What an attempt's record says in `by` where no training has claimed it."""
Json = Any
"""A value that JSON can hold: None, bool, int, float, str, list of Json, dict of str to Json."""


@record
class Receipt:
    """Proof that an object is durable in a store. Only a finished `put_if_absent` makes one."""

    name: str
    length: int
    store: str


@record
class PackEntry:
    """A pack as its index names it.

    name: file name inside the checkpoint's directory.
    length: bytes.
    header_length: bytes of the header block, including padding.
    header_digest: digest of the header block.
    adopted: whether it is a file of another tool, adopted in place: its header is whatever comes before the first row.
    at: the checkpoint in whose directory it lies, where that is another one.
    key: its data key, wrapped, if its chunks are sealed; else empty.
    save_id: of the save that has sealed it.
    """

    name: str
    length: int
    header_length: int
    header_digest: bytes
    adopted: bool = False
    at: CheckpointId | None = None
    key: str = ""
    save_id: str = ""

    def object_name(self, id: CheckpointId) -> str:
        """Returns its full name in the store. `id`: the checkpoint whose index names it."""
        return f"{(self.at or id).directory}/{self.name}"


@record(eq=False)
class StoredChunks:
    """Where the chunks of an encoded index lie: those of its rows, in their order, and behind them those that only
    others are decoded from.

    codecs: the names of the codecs.
    pack, offset, stored, raw: int64 [n], the bytes of a pack that hold the chunk, and its length when decoded.
    codec: int64 [n], places in `codecs`.
    base: int64 [n], the chunk that it is decoded from as well; -1 where from none.
    digests: uint8 [n, 16], of the stored bytes.
    rounded: uint8 [n], 0 where the base is what that chunk holds; 1 (bfloat16) or 2 (float16) where it is the rounding
        of the float32 numbers which that chunk and, where it is too short, the one behind it hold. None where all are
        0.
    """

    codecs: tuple[str, ...]
    pack: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]
    stored: np.ndarray[Any, Any]
    raw: np.ndarray[Any, Any]
    codec: np.ndarray[Any, Any]
    base: np.ndarray[Any, Any]
    digests: np.ndarray[Any, Any]
    rounded: np.ndarray[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self.pack)

    def below(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the chunks that these are decoded from, one step down; those that are decoded from none add none."""
        found: np.ndarray[Any, Any] = self.base[numbers]
        found = found[found >= 0]
        if self.rounded is None:
            return found
        import numpy as np

        halves = numbers[self.rounded[numbers] > 0]
        longer = halves[2 * self.raw[halves] > self.raw[self.base[halves]]]
        return np.concatenate([found, self.base[longer] + 1])

    def needed(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns these chunks and all that they are decoded from, in ascending order."""
        import numpy as np

        found = reached = np.unique(numbers)
        while len(reached):
            reached = np.setdiff1d(self.below(reached), found)
            found = np.union1d(found, reached)
        return found


@record
class Index:
    """One rank's table of rows, private rows last; row i is leaf i of the state unless `leaf` is given.

    Row i is `length[i]` bytes at `offset[i]` of `packs[pack[i]]`; its chunk digests are
    `digests[chunk_start[i]:chunk_start[i + 1]]`. A rank of several has rows only for the boxes it wrote: none, one or
    more of a leaf.

    specs: the shared leaves in the order of the manifest's tree, then those of the private tree.
    pack, length: int64 [n].
    offset: int64 [n], bytes from the pack's first byte.
    chunk_start: int64 [n + 1].
    digests: uint8 [chunks, 16], xxh3-128 of each chunk of `chunk_bytes`; a leaf's last chunk is shorter.
    leaf: int64 [n], each row's leaf number, never decreasing; private leaves are numbered after the manifest's. None if
        row i is leaf i.
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
    """The number of leaves in the manifest's tree, where `leaf` is given."""
    stored: StoredChunks | None = None
    """Where its chunks lie, if they are encoded; then `pack` and `offset` say nothing."""
    sealed: int | None = None
    """The number of the repository key that hides its digests of contents, if it is of a sealed checkpoint."""
    statistics: Json = None
    """Statistics of the values of its rows, encoded (`repo.format.leaf_statistics`), where the save has looked."""


@record
class IndexEntry:
    """An index, or the table of boxes, as the manifest names it. `sha256`: its digest, where the checkpoint is
    sealed."""

    name: str
    length: int
    digest: bytes
    sha256: str = ""


@record
class Manifest:
    """One checkpoint. The checkpoint exists if and only if its manifest exists and is no aborted mark."""

    id: CheckpointId
    save_id: str
    tree: Json
    indexes: tuple[IndexEntry, ...]
    """The indexes of the ranks that wrote it, by rank."""
    content: str
    """SHA-256 (hex) of the canonical leaf table with chunk digests: equal for equal contents, in every tier."""
    bytes: int
    leaves: int
    chunk_bytes: int
    parent: CheckpointId | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    progress: Mapping[str, Json] = field(default_factory=dict)
    """Position of training: step, epoch, batch within the epoch."""
    environment: Mapping[str, Json] = field(default_factory=dict)
    certificate: Mapping[str, Json] = field(default_factory=dict)
    created: str = ""
    """Wall clock at commit, RFC 3339, UTC. For display and `keep.every(hours=)` only."""
    boxes: IndexEntry | None = None
    """The table that maps the parts of each leaf to ranks; None if one rank wrote everything."""
    bases: tuple[CheckpointId, ...] = ()
    """The other checkpoints in whose directories packs of its indexes lie."""
    stored: int | None = None
    """The bytes of its own packs, where its chunks are encoded; None: as many as `bytes`."""
    health: Health | None = None
    """What the save has found of the values of all leaves; None where it has not looked."""
    code: str = ""
    """The authentication code of a sealed checkpoint: the number of its key, a colon, and an HMAC."""
    rounded: bool = False
    """Whether chunks of its indexes are decoded from the rounding of others."""

    @property
    def stored_bytes(self) -> int:
        """Returns the bytes of its own packs."""
        return self.bytes if self.stored is None else self.stored

    @property
    def tables(self) -> tuple[IndexEntry, ...]:
        """Every table object it names: the indexes, and the table of boxes if there is one."""
        return self.indexes if self.boxes is None else (*self.indexes, self.boxes)


@record
class Owner:
    """The owner of an attempt: enough to tell, on the same boot and pid namespace, whether that process still lives."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    """The process's start time in clock ticks since boot, as text; with the pid it identifies one process."""
    user: str


@record
class AttemptRecord:
    """`attempt.json`: one process lifetime of training on a run."""

    run: str
    number: int
    id: str
    parent: CheckpointId | None
    owner: Owner
    created: str = ""
    before: tuple[int, int] | None = None
    """The previous attempt and the highest step begun in it; None if there was none."""
    ended: tuple[int, bool] | None = None
    """How many beats the lease of the previous attempt had come to, and whether it ended without releasing the run."""
    by: str = ""
    """What claimed it, where that was no training: ROLLBACK or FORK."""
    reason: str = ""
    """Why it was, in the words of who did it."""


@record
class Note:
    """A fact about a checkpoint learned after its commit. kind: metric, text, verified, suspect, proven, signed.
    created: wall clock of the machine that added it, RFC 3339, UTC; for display, and for what was verified longest ago.
    """

    number: int
    kind: str
    body: Mapping[str, Json]
    created: str = field(default="", compare=False)
