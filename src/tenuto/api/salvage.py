"""Salvage: writes the tensors of a damaged checkpoint that are whole, every byte verified, and lists the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tenuto.api.export import target, writable
from tenuto.engine.read.lazy_reader import LazyReader
from tenuto.errors import CorruptionError, FormatTooNew, StoreError, UsageError
from tenuto.formats.beside import Beside
from tenuto.formats.contract import Content, PiecedTensor, Tensor, run_boxes
from tenuto.model.ids import CheckpointId
from tenuto.model.leaf import Box, LeafSpec, dtype
from tenuto.model.records import Manifest
from tenuto.record import record
from tenuto.repo.keys import unlock
from tenuto.repo.repository import Repo
from tenuto.sharding.slices import box_region
from tenuto.state.contract import Buffer
from tenuto.state.tree import leaf_paths


@record
class Salvaged:
    """What a salvage has written. leaves, bytes: of the tensors that are whole. lost: the path of each tensor that is
    not, and why."""

    out: Path
    id: CheckpointId
    leaves: int
    bytes: int
    lost: Sequence[tuple[str, str]]


class _Row(Tensor):
    """A row of an index, verified as it is read."""

    __slots__ = ("_path", "_reader", "_row")

    def __init__(self, reader: LazyReader, row: int, spec: LeafSpec) -> None:
        super().__init__(spec.dtype, spec.shape)
        self._reader, self._row, self._path = reader, row, spec.path

    def read_into(self, out: Buffer, start: int = 0) -> None:
        at, size = 0, self.itemsize
        for box in run_boxes(self.shape, start // size, (start + len(out)) // size):
            nbytes = box.size * size
            chosen = box_region(self.shape, box.offsets, box.shape)
            self._reader.read(self._row, self._path, chosen, size, out[at : at + nbytes])
            at += nbytes


def salvage(repo: Repo, id: CheckpointId, out: Path, *, force: bool = False) -> Salvaged:
    """Writes what is whole of a checkpoint to `out`, a file in a format that its suffix names. Tensors that are one
    rank's own, and plain values, are left out.

    Raises CheckpointNotFound, CorruptionError where its manifest is damaged or no tensor is whole, and UsageError for
    another kind of file, or where `out` is there and not to be replaced (`force`).
    """
    format = target(out, None)
    if format is None:
        names = ", ".join(name for name in writable() if name != "torch")
        raise UsageError(
            f"{out} would hold plain values too, which a damaged checkpoint may lack; there are: {names}",
            subject=str(out),
            hint=f"name it {out.stem}.safetensors",
        )
    unlock(repo)
    manifest = repo.manifest(id)
    beside = Beside(out)
    beside.check(force=force)
    with ExitStack() as stack:
        whole: dict[str, Tensor] = {}
        lost: list[tuple[str, str]] = []
        tensors = _tensors(repo, manifest, stack)
        for path in leaf_paths(manifest.tree):
            found = tensors.get(path, "the index that says where it lies is damaged")
            why = found if isinstance(found, str) else _problem(found)
            if why or isinstance(found, str):
                lost.append((path, why))
            else:
                whole[path] = found
        if not whole and lost:
            raise CorruptionError(f"no tensor of {id} is whole: {lost[0][0]}: {lost[0][1]}", subject=str(id))
        order = sorted(whole, key=lambda path: (-dtype(whole[path].dtype).size, path))
        metadata = {"tenuto.checkpoint": str(id), "tenuto.salvaged": f"{len(whole)} of {len(whole) + len(lost)}"}
        with beside:
            format.write(beside.part, Content({path: whole[path] for path in order}, metadata=metadata))
            beside.publish(force=force)
    return Salvaged(out, id, len(whole), sum(one.nbytes for one in whole.values()), tuple(lost))


def _problem(tensor: Tensor) -> str:
    """Reads all of a tensor. Returns why that is not possible; empty if it is."""
    try:
        for _ in tensor.blocks():
            pass
    except (CorruptionError, StoreError) as error:
        return error.message
    return ""


def _tensors(repo: Repo, manifest: Manifest, stack: ExitStack) -> dict[str, Tensor | str]:
    """Returns the leaves that the readable indexes have, by path; of one of which parts are unknown, the reason."""
    parts: dict[str, list[tuple[Box, Tensor]]] = {}
    specs: dict[str, LeafSpec] = {}
    for rank in range(len(manifest.indexes)):
        try:
            table = repo.table(manifest, rank)
            index = table.index(manifest.tree)
        except FormatTooNew:
            raise
        except (CorruptionError, StoreError):
            continue  # its leaves are found missing
        reader = LazyReader(repo, manifest.id, table, opened=())
        stack.callback(reader.close)
        for row, spec in enumerate(index.specs):
            if not spec.private:
                specs[spec.path] = spec
                parts.setdefault(spec.path, []).append((spec.box, _Row(reader, row, spec)))
    found: dict[str, Tensor | str] = {}
    for path, pieces in parts.items():
        spec = specs[path]
        if spec.offsets is None:
            found[path] = pieces[0][1]
            continue
        try:
            found[path] = PiecedTensor(
                spec.dtype, spec.leaf_shape, pieces, path=Path(manifest.id.directory), what="checkpoint", name=path
            )
        except CorruptionError:
            found[path] = "parts of it are unknown: another rank's index is damaged"
    return found
