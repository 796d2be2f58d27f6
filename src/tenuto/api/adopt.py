"""Adoption in place: checkpoints of other tools become checkpoints of ours without a byte of them being copied.

The files get a second name, a hard link in the checkpoint's directory, and an index of where each tensor's bytes lie in
them. Everything else is as if we had saved: the index has digests of the tensors' chunks, and of all bytes between
them, as private rows; so every byte of every file is verified, copied and served like those of a pack. Removing the
checkpoint removes our name of the files, never theirs.

What is no tensor in the files (values, arrays inside a pickle) is read and written anew; it is small.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tenuto.api.migrate import IMPORTED, Rules, imported_before, state_of
from tenuto.codec.chunk_map import chunk_starts, whole_chunks
from tenuto.codec.digest import digest
from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.choose import Checkpoint
from tenuto.engine.staging.buffer_layout import stored_name
from tenuto.errors import StoreError, Unserialisable, UsageError, in_words, typed
from tenuto.formats.contract import PiecedTensor, RawFile, RawTensor, Tensor
from tenuto.formats.series import Found, find
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId, check_run
from tenuto.model.leaf import LeafSpec, dtype
from tenuto.model.records import Index, Json, Manifest, PackEntry, Receipt
from tenuto.record import record
from tenuto.repo.commit import begin, commit, put_index, put_object
from tenuto.repo.format import objects
from tenuto.repo.format.manifest import content_of
from tenuto.repo.format.object_names import BOXES, index_file
from tenuto.repo.format.safetensors import build_header
from tenuto.repo.format.shard_table import BoxTable, encode_boxes
from tenuto.repo.keys import refuse_if_sealed
from tenuto.repo.lineage import latest
from tenuto.repo.ownership.claim import claim_newest
from tenuto.repo.replicated.places import places_of
from tenuto.repo.repository import Repo, now_text
from tenuto.repo.unfinished import abort, free
from tenuto.state.encode.flattener import flatten
from tenuto.state.numpy_arrays import as_bytes
from tenuto.state.tree import BETWEEN, PRIVATE, leaf_nodes
from tenuto.store.contract import Where
from tenuto.store.registry import open_store, redirected
from tenuto.training.snapshot import environment

_THREADS: Final = 4
_READ_BYTES: Final = 4 << 20


@record
class _Row:
    """A leaf, or a box of one, and where its bytes lie. `data`: instead of a file, where they are to be written."""

    leaf: int
    spec: LeafSpec
    pack: int
    offset: int


def adopt(
    source: str | Path,
    where: Where | None = None,
    *,
    run: str = "main",
    step: int | None = None,
    format: str | None = None,
) -> list[Checkpoint]:
    """Makes the checkpoints of another tool at `source` checkpoints of ours, in place: DCP directories, safetensors
    files and directories with an index, and files of `torch.save`.

    where: the repository; None: `source` itself becomes one, beside what lies there. Both lie in one file system.
    step: of a single checkpoint whose name and files tell none; without it the next one.

    Each is adopted by itself, in the order of steps; of several, those that the run has adopted before are passed over.
    Raises UsageError where the store cannot have a second name of a
    file, Unserialisable for tensors that are not stored in one piece, and what reading and claiming raise.
    """
    source = Path(source)
    check_run(run)
    found = find(source, format)
    if step is not None and len(found) > 1:
        raise UsageError(
            f"{source} has {len(found)} checkpoints, and step={step} is one step",
            subject="step",
            hint="leave the step out: their names tell theirs",
        )
    repo = Repo.create_or_open(open_store(redirected(str(source if where is None else where))), once=True)
    refuse_if_sealed(repo, "files of another tool", hint=typed("tenuto", "import", source, repo.url) + " seals copies")
    if repo.store.capabilities.remote or places_of(repo.store) is not None or not os.path.isdir(repo.url):
        raise UsageError(
            f"{repo.url} is not a directory of this machine, and cannot have a second name of a file",
            subject=repo.url,
            hint=typed("tenuto", "import", source, repo.url) + " copies instead",
        )
    before = imported_before(repo, run) if len(found) > 1 and run in repo.runs() else {}
    new = [one for one in found if one.number is None or before.get(one.number) != _origin(one)]
    return [_adopt(repo, one, run, one.number if step is None else step) for one in new]


def _origin(found: Found) -> dict[str, Any]:
    return {"format": found.format.name, "name": found.path.name, "in_place": True}


def _adopt(repo: Repo, found: Found, run: str, step: int | None) -> Checkpoint:
    newest = latest(repo, run)
    with found.format.read(found.path) as reader:
        number = reader.step if step is None else step
        number = (0 if newest is None else newest.step + 1) if number is None else number
        if newest is not None and number <= newest.step:
            raise UsageError(
                f"{found.path} is of step {number}, and run {run!r} has come to step {newest.step}",
                subject=str(found.path),
                hint=f"another run (--run {run}-before), or another step (--step {newest.step + 1})",
            )
        plan = _Adoption(repo, state_of(reader, Rules()), found.path)
        origin = _origin(found)
        attempt = claim_newest(repo, run, newest, newest, again=lambda: (newest, newest))
        try:
            save_id = secrets.token_hex(16)
            id = begin(attempt, number, save_id, [*plan.names(), index_file(0), BOXES])
            try:
                manifest = plan.carry_out(id, save_id, attempt.parent, origin)
                attempt.committed(number)
            except BaseException as error:
                if abort(repo, id, save_id, by=in_words(error)):
                    free(repo, id, names=plan.names())
                raise
        finally:
            attempt.release()
    return Checkpoint(repo.url, id, manifest.bytes, manifest.leaves, manifest.content, manifest.metrics)


class _Adoption:
    def __init__(self, repo: Repo, state: Any, source: Path) -> None:
        """Finds where the bytes of every leaf lie. Changes nothing."""
        self._repo = repo
        self._source = source
        self._flat = flatten(state)
        self._files: dict[Path, int] = {}
        self._opened: list[RawFile] = []
        self._rows: list[_Row] = []
        self._own: list[tuple[int, LeafSpec, np.ndarray[Any, Any]]] = []
        for leaf, (spec, value) in enumerate(zip(self._flat.specs, self._flat.sources, strict=True)):
            self._place(leaf, spec, value)
        lengths = [file.length for file in self._opened]
        if self._own:
            at, pack = len(self._header("0" * 32)), len(self._opened)
            for leaf, spec, data in self._own:
                self._rows.append(_Row(leaf, spec, pack, at))
                at += len(data)
            lengths.append(at)
        self._lengths = lengths
        self._rows.sort(key=lambda row: (row.leaf, row.spec.offsets or ()))
        self._headers, self._between = self._gaps()
        self._joint = bool(self._between) or any(row.spec.whole is not None for row in self._rows)

    def _place(self, leaf: int, spec: LeafSpec, value: Any) -> None:
        if not spec.nbytes:
            self._own.append((leaf, spec, np.empty(0, np.uint8)))
            return
        if isinstance(value, PiecedTensor):
            for box, piece in value.pieces:
                whole = box.shape == spec.shape
                part = spec if whole else replace(spec, shape=box.shape, offsets=box.offsets, whole=spec.shape)
                self._place_piece(leaf, part, piece)
        elif isinstance(value, Tensor):
            self._place_piece(leaf, spec, value)
        else:
            array = isinstance(value, np.ndarray)
            data = as_bytes(np.ascontiguousarray(value)) if array else np.frombuffer(value, np.uint8)
            self._own.append((leaf, spec, data))

    def _place_piece(self, leaf: int, spec: LeafSpec, piece: Tensor) -> None:
        stored = piece.stored()
        if not isinstance(stored, RawTensor):
            raise Unserialisable(
                f"{spec.path} does not lie in {self._source} in the order of its items, and cannot be adopted in place",
                subject=spec.path,
                hint=typed("tenuto", "import", self._source, self._repo.url) + " copies it",
            )
        path = stored.file.path
        if path not in self._files:
            self._files[path] = len(self._opened)
            self._opened.append(stored.file)
        self._rows.append(_Row(leaf, spec, self._files[path], stored.offset))

    def _gaps(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Returns the length of each file's head, before its first tensor, and the ranges (file, from, to) between
        tensors and behind the last. Raises Unserialisable where tensors share bytes."""
        headers, between = [], []
        for pack, length in enumerate(self._lengths):
            rows = sorted((row.offset, row.spec.nbytes, row.spec.path) for row in self._rows if row.pack == pack)
            at = headers_end = rows[0][0] if rows else length
            headers.append(headers_end)
            for offset, nbytes, path in rows:
                if offset < at:
                    raise Unserialisable(
                        f"{path} shares bytes of {self._source} with another tensor, and cannot be adopted in place",
                        subject=path,
                        hint=typed("tenuto", "import", self._source, self._repo.url) + " copies it",
                    )
                if offset > at:
                    between.append((pack, at, offset))
                at = offset + nbytes
            if at < length:
                between.append((pack, at, length))
        return headers, between

    def _header(self, save_id: str) -> bytes:
        """Returns the header of the pack with what does not lie in any file as it is."""
        entries = []
        for _, spec, data in self._own:
            code = dtype(spec.dtype).code
            entries.append((stored_name(spec), code or "U8", spec.shape if code else (len(data),)))
        return build_header(entries, {"tenuto.save_id": save_id})

    def names(self) -> list[str]:
        """Returns the names of the data files in the checkpoint's directory."""
        found = []
        for number, path in enumerate([file.path for file in self._opened]):
            middle = f".{number:02d}" if number else ""
            found.append(f"rank-00000{middle}{'.safetensors' if path.suffix == '.safetensors' else '.pack'}")
        return [*found, f"rank-00000.{len(found):02d}.safetensors"] if self._own else found

    def carry_out(self, id: CheckpointId, save_id: str, parent: CheckpointId | None, origin: Json) -> Manifest:
        repo, directory, names = self._repo, id.directory, self.names()
        receipts = [self._linked(file, directory, name) for file, name in zip(self._opened, names, strict=False)]
        if self._own:
            data = self._header(save_id) + b"".join(data.tobytes() for _, _, data in self._own)
            receipts.append(objects.put(repo.store, f"{directory}/{names[-1]}", data, token=save_id))
        index = self._index(save_id, [f"{repo.url}/{directory}/{name}" for name in names], names)
        receipt, entry = put_index(repo, id, index)
        receipts.append(receipt)
        tree = canonical_json.spell(self._tree())
        manifest = Manifest(
            id=id,
            save_id=save_id,
            tree=tree.value,
            indexes=(entry,),
            content="",
            bytes=sum(self._lengths),
            leaves=len(self._flat.specs),
            chunk_bytes=repo.chunk_bytes,
            parent=parent,
            progress={"step": id.step},
            environment={**environment(), IMPORTED: origin},
            created=now_text(),
        )
        table = self._table() if self._joint else None
        if table is not None:
            receipt, boxes = put_object(repo, id, BOXES, encode_boxes(table, id, save_id, repo.id), save_id)
            receipts.append(receipt)
            manifest = replace(manifest, boxes=boxes)
        manifest = replace(manifest, content=content_of(tree, [index], table))
        commit(repo, manifest, receipts, tree=tree, own=(index,))
        return manifest

    def _linked(self, file: RawFile, directory: str, name: str) -> Receipt:
        """Gives a file its second name, durably."""
        target = f"{self._repo.url}/{directory}/{name}"
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.link(os.path.realpath(file.path), target)
            above = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(above)
            finally:
                os.close(above)
        except OSError as error:
            raise StoreError(
                f"{file.path} cannot have a second name at {target}: {error.strerror or error}",
                subject=str(file.path),
                hint="both have to lie in one file system that knows hard links; "
                + typed("tenuto", "import", self._source, self._repo.url)
                + " copies instead",
            ) from error
        return Receipt(f"{directory}/{name}", os.stat(target).st_size, self._repo.store.url)

    def _index(self, save_id: str, paths: Sequence[str], names: Sequence[str]) -> Index:
        """Reads every byte for its digests."""
        specs = [row.spec for row in self._rows]
        specs += [
            LeafSpec(f"{PRIVATE}/{BETWEEN}/{number}", "uint8", (stop - start,), private=True)
            for number, (_, start, stop) in enumerate(self._between)
        ]
        pack = np.array([row.pack for row in self._rows] + [pack for pack, _, _ in self._between], np.int64)
        offset = np.array([row.offset for row in self._rows] + [start for _, start, _ in self._between], np.int64)
        length = np.array([spec.nbytes for spec in specs], np.int64)
        chunk, starts = self._repo.chunk_bytes, chunk_starts(length, self._repo.chunk_bytes)
        digests = np.empty((int(starts[-1]), 16), np.uint8)
        files = [RawFile(Path(path), what="data file") for path in paths]
        try:
            step = whole_chunks(_READ_BYTES, chunk)
            tasks = [(row, low) for row in range(len(specs)) for low in range(0, int(length[row]), step)]
            buffers = threading.local()

            def one(task: tuple[int, int]) -> None:
                row, low = task
                high = min(low + step, int(length[row]))
                if not hasattr(buffers, "data"):
                    buffers.data = np.empty(step, np.uint8)
                data = buffers.data[: high - low]
                files[int(pack[row])].read_into(data, int(offset[row]) + low)
                for number, begin in enumerate(range(0, high - low, chunk), int(starts[row]) + low // chunk):
                    digests[number] = np.frombuffer(digest(data[begin : begin + chunk].data), np.uint8)

            parallel_for(one, tasks, _THREADS)
            packs = [
                PackEntry(name, length, header, digest(file.read(0, header)), adopted=number < len(self._opened))
                for number, (name, length, header, file) in enumerate(
                    zip(names, self._lengths, self._headers, files, strict=True)
                )
            ]
        finally:
            for file in files:
                file.close()
        leaves = len(self._flat.specs)
        numbers = np.array([row.leaf for row in self._rows] + [leaves + n for n in range(len(self._between))], np.int64)
        return Index(
            rank=0,
            save_id=save_id,
            chunk_bytes=chunk,
            packs=tuple(packs),
            specs=specs,
            pack=pack,
            offset=offset,
            length=length,
            chunk_start=starts,
            digests=digests,
            private=self._private(),
            leaf=numbers if self._joint else None,
            tree_leaves=leaves if self._joint else None,
        )

    def _private(self) -> Json:
        leaves = [{"!": "leaf", "n": n, "as": "bytes", "type": "bytes"} for n in range(len(self._between))]
        return {"!": "private", "v": {"!": "dict", "i": [[BETWEEN, leaves]]}} if leaves else None

    def _tree(self) -> Json:
        """Returns the tree; a leaf that lies in several parts says what it is as a whole."""
        cut = {row.leaf for row in self._rows if row.spec.whole is not None}
        for _, node in leaf_nodes(self._flat.tree):
            if node["n"] in cut:
                spec = self._flat.specs[node["n"]]
                node |= {"dtype": spec.dtype, "shape": list(spec.shape)}
        return self._flat.tree

    def _table(self) -> BoxTable:
        specs, rows = self._flat.specs, self._rows
        dtypes = sorted({spec.dtype for spec in specs})
        boxes = [row.spec.box for row in rows]
        return BoxTable(
            leaf=np.array([row.leaf for row in rows], np.int64),
            rank=np.zeros(len(rows), np.int64),
            row=np.arange(len(rows)),
            origin=_joined([box.offsets for box in boxes]),
            shape=_joined([box.shape for box in boxes]),
            bounds=_bounds([len(box.shape) for box in boxes]),
            dtypes=dtypes,
            code=np.array([dtypes.index(spec.dtype) for spec in specs], np.int64),
            whole=_joined([spec.shape for spec in specs]),
            ends=_bounds([len(spec.shape) for spec in specs]),
        )


def _joined(sizes: Sequence[tuple[int, ...]]) -> np.ndarray[Any, Any]:
    return np.array([size for one in sizes for size in one], np.int64)


def _bounds(counts: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(counts, np.int64))])
