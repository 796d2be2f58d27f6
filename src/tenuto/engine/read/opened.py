"""A checkpoint that is open for reading: what it holds, of which only what is requested is read."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.engine.read.outline import Outline, read_outline
from tenuto.engine.read.sharded_reader import ShardedReader
from tenuto.engine.read.sharded_view import ShardedLazyReader, ShardedOutline
from tenuto.errors import (
    LeafNotFound,
    MissingExtra,
    StateError,
    UsageError,
    did_you_mean,
    install,
    typed,
)
from tenuto.events import Emitter
from tenuto.model.ids import CheckpointId, attempt_key
from tenuto.model.leaf import Box, LeafSpec, dtype
from tenuto.model.records import Json
from tenuto.repo.notes import noted_metrics
from tenuto.repo.repository import Repo
from tenuto.sharding.slices import Region, box_region, region
from tenuto.state import frameworks
from tenuto.state.contract import Buffer
from tenuto.state.numpy_arrays import has_type
from tenuto.state.restore.rebuild import plain
from tenuto.state.tree import LEAVES, NOTHING, OWN, PRIVATE, kind_of, leaves_below, node_at, plain_paths

if TYPE_CHECKING:
    import torch

    from tenuto.model.health import Health

Array = np.ndarray[Any, Any]

_CHECKPOINT: Final = re.compile(r"(a\d+/)?\d+")
"""What is no path of a leaf and may be meant as a checkpoint: a step, or attempt/step."""


class Leaf:
    """A tensor, an array or long bytes in a checkpoint, of which nothing has been read yet.

    `leaf[...]`, `leaf[3]`, `leaf[10:20, ::2]` read what they name and nothing else but the rest of the chunks it lies
    in, verify it, and return memory of its own: a torch tensor in host memory where a tensor was saved, else a numpy
    array. Whole numbers, slices (steps of either sign) and an Ellipsis are understood; BadIndex for anything else.
    CorruptionError, naming leaf, pack and offset, where the bytes are not those that were saved.
    """

    __slots__ = ("_node", "_reader", "_row", "_spec")

    def __init__(
        self, spec: LeafSpec, row: int, node: Json, reader: LazyReader | ShardedLazyReader | _PartOfImage
    ) -> None:
        self._spec = spec
        self._row = row
        self._node = node
        self._reader = reader

    @property
    def path(self) -> str:
        return self._spec.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    @property
    def dtype(self) -> str:
        """The element type's name, as torch has it: "float32", "bfloat16"; types of numpy alone are "numpy:<U8"."""
        return self._spec.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self._spec.nbytes

    @property
    def kind(self) -> str:
        """What was saved: "torch", "jax", "numpy" or "bytes"."""
        return str(self._node.get("as"))

    @property
    def private(self) -> bool:
        """Whether it belongs to one rank alone."""
        return self._spec.private

    @property
    def parts(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Which rank saved which part of it: rank, where the part begins in the leaf, and its shape. One part of all of
        it where a single rank did."""
        return [(rank, box.offsets, box.shape) for rank, box in self._reader.parts(self._row)]

    def __getitem__(self, key: Any) -> Any:
        framework = "numpy"
        if self.kind == "torch":
            framework = "torch" if _has_torch() or dtype(self.dtype).numpy is None else "numpy"
        return self._values(framework, region(self.shape, key, self.path))

    def __len__(self) -> int:
        if not self.shape:
            raise StateError(
                f"{self.path} has no dimension, and so no length", subject=self.path, hint="[()] reads its one value"
            )
        return self.shape[0]

    def numpy(self) -> Array:
        """All values as an array of their own. StateError where numpy has no such element type."""
        array: Array = self._values("numpy", region(self.shape, ..., self.path))
        return array

    def torch(self, device: Any = None) -> torch.Tensor:
        """All values as a tensor, in host memory or on `device`; neither a parameter nor asking for gradients.

        StateError where torch has no such element type; MissingExtra without torch.
        """
        tensor: torch.Tensor = self._values("torch", region(self.shape, ..., self.path))
        return tensor if device is None else tensor.to(device)

    def digests(self) -> tuple[Any, ...] | None:
        """What is equal for two leaves of one repository only if their bytes are; None where that is not known, as of
        leaves that several ranks hold."""
        return self._reader.digests(self._row)

    def read_into(self, out: Buffer, box: Box) -> None:
        """Fills `out` with the items of a box, in row-major order and as they were stored. Raises CorruptionError."""
        chosen = box_region(self.shape, box.offsets, box.shape)
        self._reader.read(self._row, self.path, chosen, dtype(self.dtype).size, out)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise StateError(
                f"{self.path}: values that have not been read are not there without a copy",
                subject=self.path,
                hint="leave copy=False out",
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        return f"<leaf {self.path}: {self.dtype} {list(self.shape)}>"

    def _values(self, framework: str, chosen: Region) -> Any:
        row = dtype(self.dtype)
        if framework == "numpy" and not has_type(self.dtype):
            raise StateError(
                f"{self.path}: numpy has no type {self.dtype}",
                subject=self.path,
                hint="torch() gives a tensor, torch().float().numpy() an array; with ml_dtypes installed numpy has it",
            )
        try:
            adapter = frameworks.adapter_of(framework)
        except ImportError:
            raise MissingExtra(
                f"{self.path} is {self.dtype}, which only torch has" if row.numpy is None else "torch is not installed",
                subject=self.path,
                hint=install("torch"),
            ) from None
        spec = LeafSpec(self.path, self.dtype, chosen.shape)
        value, sink = adapter.allocate(spec, self._node, None)
        buffer = sink.buffer
        data: Buffer = np.empty(spec.nbytes, np.uint8) if buffer is None else buffer
        self._reader.read(self._row, self.path, chosen, row.size, data)
        if buffer is None:
            sink.fill(data)
        return value


def _has_torch() -> bool:
    try:
        frameworks.adapter_of("torch")
    except ImportError:
        return False
    return True


SHOWN = 8


class Opened(Mapping[str, Leaf]):
    """One checkpoint, open for reading; a mapping of leaf paths to leaves, and a context manager.

    A leaf that several ranks hold in parts is one leaf here, assembled from them as it is read. Tied tensors are there
    under each of their paths, private values of a rank below `#private`; a sparse tensor or a tensor subclass is there
    as the dense leaves that it is made of. Other values are read by `plain`. On a local store it stays readable when
    the checkpoint is removed meanwhile.

    `skipped` are damaged newer checkpoints that were skipped when "latest" was opened, each with the reason.
    """

    def __init__(
        self,
        repo: Repo,
        outline: Outline | ShardedOutline,
        reader: LazyReader | ShardedLazyReader | _PartOfImage,
        skipped: Sequence[tuple[CheckpointId, str]] = (),
    ) -> None:
        self._repo = repo
        self._outline = outline
        self._reader = reader
        self._manifest = outline.manifest
        self.skipped = tuple(skipped)
        self._finalizer = weakref.finalize(self, reader.close)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def id(self) -> CheckpointId:
        """Its run, attempt and step."""
        return self._manifest.id

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self._manifest.id.step

    @property
    def ranks(self) -> int:
        """How many ranks saved it."""
        return len(self._manifest.indexes)

    @property
    def run(self) -> str:
        """The run that it belongs to."""
        return self._manifest.id.run

    @property
    def where(self) -> str:
        """The repository that it lies in."""
        return self._repo.url

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics logged with the step, and those noted for it later."""
        return {**self._manifest.metrics, **noted_metrics(self._repo, self._manifest.id)}

    @property
    def progress(self) -> Mapping[str, Json]:
        """Where training was: step, epoch, batch within the epoch."""
        return self._manifest.progress

    @property
    def certificate(self) -> Mapping[str, Json]:
        """The record of what a resume from it covers, and of what could make it inexact."""
        return self._manifest.certificate

    @property
    def environment(self) -> Mapping[str, Json]:
        """The record of where it was saved, and by what."""
        return self._manifest.environment

    @property
    def health(self) -> Health | None:
        """What its save has found of its values; None where it has not looked."""
        return self._manifest.health

    @property
    def bytes(self) -> int:
        """Bytes of its data files: of all leaves, and a little more."""
        return self._manifest.bytes

    @property
    def content(self) -> str:
        """The SHA-256 of all that it holds."""
        return self._manifest.content

    @property
    def bytes_read(self) -> int:
        """Bytes of leaves read and verified so far."""
        return self._reader.bytes_read

    # -- leaves ------------------------------------------------------------------------------------------------

    def __getitem__(self, path: str) -> Leaf:
        """Returns the leaf at `path`. LeafNotFound (a KeyError) names what is there instead, or near it."""
        found = self._outline.find(path) if isinstance(path, str) else None
        if found is None:
            raise self._not_a_leaf(path)
        row, node = found
        return Leaf(self._outline.spec(row, path), row, node, self._reader)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._outline.find(path) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._outline.leaves())

    def __len__(self) -> int:
        return len(self._outline.leaves())

    # -- plain values ------------------------------------------------------------------------------------------

    def plain(self, path: str = "") -> Any:
        """Returns the plain value at `path`: a number, text, bytes, or a list or dict of such.

        As `tenuto.load` without a target gives it, so a value of a class of yours is a `tenuto.Tagged`. StateError
        where tensors lie at the path or below it, LeafNotFound where nothing does.
        """
        node = self.node(path)
        if kind_of(node) in LEAVES and node.get("as") == "bytes":
            data = self[path].numpy().tobytes()
            return bytearray(data) if node.get("type") == "bytearray" else data
        if kind_of(node) == OWN:
            raise StateError(
                f"{path} is each rank's own, and no value of the whole",
                subject=path,
                hint=f"tenuto.open(…, rank=0) has that of rank 0, at or below {PRIVATE}/{OWN}/{path}",
            )
        inside = leaves_below(node, path)
        if inside:
            raise StateError(
                f"{path or 'the state'} holds what is not a plain value: {_few(inside)}",
                subject=path,
                hint=f"opened[{inside[0]!r}] reads a leaf, tenuto.load(…, include={path!r}) all of it",
            )
        return plain(node)

    def plain_paths(self) -> list[str]:
        """Returns the path of every plain value; of a list or dict of them, those of its entries."""
        return [path for tree in self._outline.trees() for path in plain_paths(tree)]

    def node(self, path: str = "") -> Json:
        """Returns the node at `path` of the checkpoint's tree (docs/design/format.md, section 7), or raises."""
        found = self._node(path)
        if found is NOTHING:
            raise self._not_a_leaf(path)
        return found

    def specs(self, path: str = "") -> Sequence[LeafSpec]:
        """Returns the leaves by the numbers that the nodes at and below `path` have."""
        shared, every = self._outline.shared, self._outline.specs()
        private = path == PRIVATE or path.startswith(f"{PRIVATE}/")
        return every[shared:] if private else every[:shared]

    def _node(self, path: str) -> Json:
        found = (node_at(tree, path) for tree in self._outline.trees())
        return next((node for node in found if node is not NOTHING), NOTHING)

    # -- errors, and the end -------------------------------------------------------------------------------------

    def _not_a_leaf(self, path: Any) -> LeafNotFound:
        node = self._node(path) if isinstance(path, str) else NOTHING
        if node is NOTHING:
            message = f"{self.id} has nothing at {path!r}"
            step = f"{attempt_key(self.id.attempt)}/{self.step}"
            show = typed("tenuto", "show", self._repo.url, "--run", self.run, "--step", step)
            near = did_you_mean(path, [*self, *self.plain_paths()]) if isinstance(path, str) else None
            hint = f"{near or ''} {show} lists what there is".strip()
            if isinstance(path, str) and _CHECKPOINT.fullmatch(path):
                hint = f"{typed('tenuto', 'show', self._repo.url, '--run', self.run, '--step', path)} for a checkpoint"
            elif self.ranks > 1 and isinstance(path, str) and path.startswith(PRIVATE):
                hint = f"name a rank: tenuto.open(…, rank=0), tenuto show … --rank 0; {self.ranks} have saved it"
        elif parts := leaves_below(node, path):
            message = f"{path!r} is not a leaf of {self.id}; below it are {_few(parts)}"
            hint = f"tenuto.load(…, include={path!r}) restores all of it"
        else:
            message, hint = f"{path!r} of {self.id} is a plain value", f"opened.plain({path!r})"
        return LeafNotFound(message, subject=str(path), hint=hint)

    def close(self) -> None:
        """Closes the data files. Reading afterwards raises UsageError; values that were read stay valid."""
        self._finalizer()

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self.id} at {self._repo.url}>"


def open_checkpoint(repo: Repo, id: CheckpointId, *, rank: int | None, emitter: Emitter) -> Opened:
    """Opens exactly this checkpoint. `rank`: whose own values to read, if several ranks saved it.

    Raises UsageError if there is no such rank, CheckpointNotFound, and CorruptionError for a damaged manifest or index
    and for data files that are missing or cut."""
    outline = read_outline(repo, id)
    count = len(outline.manifest.indexes)
    if rank is not None and not 0 <= rank < count:
        raise UsageError(
            f"there is no rank {rank}: {id} was saved by {count}",
            subject=str(id),
            hint=f"the last one is {count - 1}",
        )
    if outline.manifest.boxes is None:
        return Opened(repo, outline, LazyReader(repo, id, outline.table))
    manifest = repo.manifest(id)
    parts = ShardedReader(repo, manifest, rank, emitter)
    return Opened(repo, ShardedOutline(parts, manifest), ShardedLazyReader(repo, manifest, parts, rank))


def open_image(repo: Repo, id: CheckpointId, rank: int, *, of: int) -> Opened:
    """Opens what rank `rank` of `of` has sealed in memory. Of several ranks each has only its own part there, so that
    its plain values can be read, and no tensor."""
    if of == 1:
        return open_checkpoint(repo, id, rank=None, emitter=Emitter())
    manifest = repo.manifest(id)
    return Opened(repo, Outline(manifest, repo.table(manifest, rank), None), _PartOfImage())


class _PartOfImage:
    """Reads nothing: what this rank has of a leaf is not told from the leaf."""

    bytes_read = 0

    def read(self, row: int, path: str, chosen: Region, itemsize: int, data: Buffer) -> None:
        raise StateError(
            f"{path}: of an image in memory of several ranks only plain values are read before the restore",
            subject=path,
            hint="ckpt.restore() fills the state from it; opened.plain(…) reads a number or a text",
        )

    def parts(self, row: int) -> list[tuple[int, Box]]:
        return []

    def digests(self, row: int) -> tuple[Any, ...] | None:
        return None

    def close(self) -> None:
        """Nothing is open."""


def _few(paths: Sequence[str]) -> str:
    more = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {more} more" if more > 0 else "")
