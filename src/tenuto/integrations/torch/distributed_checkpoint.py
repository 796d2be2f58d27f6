"""Tenuto as the storage of `torch.distributed.checkpoint` (DCP): `dcp.save` and `dcp.load` keep their calls.

DCP's planner divides the state among the ranks; what it gives a rank to write becomes that rank's part of one Tenuto
checkpoint: DCP's names become paths again, boxes of tensors stay boxes. So the checkpoint is an ordinary one, and the
reader reads ordinary ones. A save that fails on any rank leaves no checkpoint.

What is no tensor comes from the planner as a file of `torch.save`. It is read without running it and saved as a plain
value, which every rank gets to know, since DCP has only one of them write it.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tenuto.api.open import open as open_checkpoint
from tenuto.api.save_load import Share, load, save_made
from tenuto.concurrency.worker_threads import parallel_for
from tenuto.engine.read.choose import Checkpoint
from tenuto.engine.read.opened import Leaf, Opened
from tenuto.errors import RanksDisagree, StateError, UsageError
from tenuto.events import warn
from tenuto.formats.torch_file import load_bytes
from tenuto.integrations.torch.device import TORCH_DTYPES
from tenuto.integrations.torch.save_file import bytes_of, real
from tenuto.model.ids import attempt_key
from tenuto.model.leaf import Box
from tenuto.policy.keep import KeepPolicy
from tenuto.ranks.contract import TIMEOUT_S, Ranks
from tenuto.ranks.detection import Solo, find_ranks
from tenuto.record import record
from tenuto.state.declarations import BoxPart, Shard, ShardLayout, at_offsets, checked
from tenuto.state.tree import KEYED, LEAVES, OWN, WRAPPERS, children, items, kind_of, sequence
from tenuto.store.contract import Where

Keys = tuple[str | int, ...]
"""An entry's keys in the nested state: texts in mappings, numbers in lists."""

_STEP: Final = re.compile(r"(\d+)\D*$")
_READERS: Final = 4


def _step_of(checkpoint_id: Any) -> int | None:
    """Returns the step that DCP's `checkpoint_id` names: a number, or the last number in the last part of a path."""
    if checkpoint_id is None:
        return None
    if isinstance(checkpoint_id, int) and not isinstance(checkpoint_id, bool):
        return checkpoint_id
    found = _STEP.search(os.path.basename(os.fspath(checkpoint_id).rstrip("/")))
    if found is None:
        raise UsageError(
            f"checkpoint_id={checkpoint_id!r} names no step",
            subject="checkpoint_id",
            hint="a number, or a name that ends in one: checkpoint_id='step-500'; without one the next step is taken",
        )
    return int(found[1])


def _names_step(checkpoint_id: Any) -> bool:
    return isinstance(checkpoint_id, int) or _STEP.search(os.path.basename(os.fspath(checkpoint_id))) is not None


# -- saving


@record
class _Writers:
    """How many ranks DCP saves with: every rank is told with its plan."""

    count: int


class StorageWriter(dcp_storage.StorageWriter):
    """Writes what `torch.distributed.checkpoint.save` saves into a Tenuto repository:
    `dcp.save(state, storage_writer=tenuto.torch.StorageWriter("checkpoints"))`.

    Each save is one checkpoint of `run`, verified, and visible only once all ranks have written their parts durably.
    Its step is `step`, or the number that `checkpoint_id` ends in, or else the one after the newest. `ranks`,
    `ranks_timeout` and `wait_for_owner` are as in `tenuto.save`. `keep` says which checkpoints of the run stay, such as
    `tenuto.keep.latest(3)`; without it all do.

    One writer may serve many saves, one after the other; `async_save` too. `checkpoint` is what the last save has
    committed. Values that are no tensors have to be plain (as for `tenuto.save`): Unserialisable names what is not.
    """

    def __init__(
        self,
        where: Where,
        *,
        run: str = "main",
        step: int | None = None,
        keep: KeepPolicy | None = None,
        ranks: Ranks | None = None,
        ranks_timeout: float = TIMEOUT_S,
        wait_for_owner: float | None = None,
    ) -> None:
        self.where = where
        self.run = run
        self.step = step
        self.checkpoint: Checkpoint | None = None
        self._keep = keep
        self._ranks = ranks
        self._ranks_timeout = ranks_timeout
        self._wait_for_owner = wait_for_owner
        self._next = self._step = step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        found = _step_of(checkpoint_id)
        self._next = self.step if found is None else found

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._step, self._next = self._next, self.step  # DCP calls `reset` only for a save that has a checkpoint_id
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False saves every rank's part by itself, and one checkpoint needs all of them",
                subject="use_collectives",
                hint="leave use_collectives out",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=_Writers(len(plans))) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        ranks = self._ranks_of(plan.storage_data)
        self.checkpoint = save_made(
            lambda share: _state_of(plan, planner, share),
            self.where,
            step=self._step,
            run=self.run,
            ranks=ranks,
            ranks_timeout=self._ranks_timeout,
            wait_for_owner=self._wait_for_owner,
            keep=self._keep,
        )
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: the checkpoint was committed once every rank had written its part."""

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _names_step(checkpoint_id)

    def _ranks_of(self, writers: Any) -> Ranks:
        count = writers.count if isinstance(writers, _Writers) else 1
        if count == 1 and self._ranks is None:
            return Solo()
        ranks = find_ranks(self._ranks)
        if ranks.world_size != count:
            raise UsageError(
                f"{count} ranks save with DCP, and {ranks.world_size} would meet to commit",
                subject="process_group",
                hint="for a process_group of some ranks: StorageWriter(…, ranks=tenuto.SharedFiles(directory, rank=, "
                "world_size=))",
            )
        return ranks


def _state_of(plan: SavePlan, planner: SavePlanner, share: Share) -> dict[Any, Any]:
    """Returns the nested state that a rank's plan is a part of: its own tensors, and the plain values of all ranks."""
    names: Mapping[str, Keys] = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    parts: dict[str, list[tuple[WriteItem, torch.Tensor]]] = {}
    values: dict[str, bytes] = {}
    for item in plan.items:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            parts.setdefault(item.index.fqn, []).append((item, data.detach()))
        else:
            values[item.index.fqn] = data.getvalue()
    entries: dict[Keys, Any] = {names.get(name, (name,)): _shard(some) for name, some in parts.items()}
    _part(list(entries.values()))
    listed = {keys: value.layout.whole for keys, value in entries.items() if any(type(key) is int for key in keys)}
    every = [_read_share(data) for data in share(_share(values, listed, entries, names))]
    for others, _ in every:
        for name, (keys, pickled) in others.items():
            entries[keys] = real(load_bytes(pickled, name))
    for _, others_listed in every:
        for keys, (kind, whole) in others_listed.items():
            if keys not in entries:  # a list has its entries on every rank
                local = (0, *whole[1:]) if whole else ()
                absent = torch.empty(local, dtype=TORCH_DTYPES[kind])
                entries[keys] = Shard(absent, ShardLayout(whole, local, (), "box"))
    order = {
        keys: number for number, keys in enumerate(names.values())
    }  # of the state; what it lacks, other ranks have
    return _nested({keys: entries[keys] for keys in sorted(entries, key=lambda keys: order.get(keys, len(order)))})


def _shard(some: Sequence[tuple[WriteItem, torch.Tensor]]) -> Shard:
    """Returns the rank's part of a tensor: one box, or several, one after the other in a flat tensor."""
    boxes = []
    for item, tensor in some:
        assert item.tensor_data is not None, "of a tensor"
        boxes.append((tuple(item.tensor_data.chunk.offsets), tuple(tensor.shape), tuple(item.tensor_data.size)))
    whole = boxes[0][2]
    if len(some) == 1:
        return Shard(some[0][1], at_offsets(boxes[0][1], whole, boxes[0][0]))
    parts, at = [], 0
    for offsets, shape, _ in boxes:
        if prod(shape):
            parts.append(BoxPart(((at, at + prod(shape)),), offsets, shape))
            at += prod(shape)
    flat = torch.cat([tensor.reshape(-1) for _, tensor in some])
    return Shard(flat, checked(ShardLayout(whole, (at,), tuple(parts))))


def _part(shards: Sequence[Shard]) -> None:
    """Copies tensors that share memory with another, as tied weights do: to DCP each is a tensor by itself, and which
    of them a rank has a part of may differ from rank to rank."""
    lies = []
    for shard in shards:
        tensor = shard.value
        extent = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if tensor.numel():
            lies.append((str(tensor.device), tensor.data_ptr(), extent * tensor.element_size(), shard))
    device, end = "", 0
    for on, begin, nbytes, shard in sorted(lies, key=lambda one: one[:3]):
        if on == device and begin < end:
            shard.value = shard.value.clone()
        else:
            device, end = on, begin + nbytes


def _share(
    values: Mapping[str, bytes],
    listed: Mapping[Keys, tuple[int, ...]],
    entries: Mapping[Keys, Shard],
    names: Mapping[str, Keys],
) -> bytes:
    """Returns what the other ranks have to know of this one's part: its values, and its tensors in lists."""
    head = {
        "values": [[name, names.get(name, (name,)), len(data)] for name, data in values.items()],
        "listed": [
            [keys, str(entries[keys].value.dtype).removeprefix("torch."), whole] for keys, whole in listed.items()
        ],
    }
    return b"\n".join([json.dumps(head).encode(), b"".join(values.values())])


def _read_share(
    raw: bytes,
) -> tuple[dict[str, tuple[Keys, bytes]], dict[Keys, tuple[str, tuple[int, ...]]]]:
    line, _, data = raw.partition(b"\n")
    head, values, at = json.loads(line), {}, 0
    for name, keys, length in head["values"]:
        values[name] = tuple(keys), data[at : at + length]
        at += length
    return values, {tuple(keys): (kind, tuple(whole)) for keys, kind, whole in head["listed"]}


def _nested(entries: Mapping[Keys, Any]) -> dict[Any, Any]:
    """Returns nested dicts and lists with these values, each by its keys."""
    top: dict[Any, Any] = {}
    containers: dict[Keys, dict[Any, Any]] = {(): top}
    for keys in entries:
        for depth in range(1, len(keys)):
            if keys[:depth] not in containers:
                containers[keys[:depth]] = containers[keys[: depth - 1]][keys[depth - 1]] = {}
        containers[keys[:-1]][keys[-1]] = entries[keys]
    for keys in sorted(containers, key=len, reverse=True):
        inner = containers[keys]
        if keys and any(type(key) is int for key in inner):
            containers[keys[:-1]][keys[-1]] = [inner[number] for number in sorted(inner)]
    return top


# -- loading


class StorageReader(dcp_storage.StorageReader):
    """Gives `torch.distributed.checkpoint.load` what lies in a Tenuto repository, however it was saved there:
    `dcp.load(state, storage_reader=tenuto.torch.StorageReader("checkpoints"))`.

    `step` is a number, "latest" or a tag; a `checkpoint_id` that ends in a number means that step. Any number of ranks
    may have saved it. Every byte is verified before it counts. A leaf at `model/layer.weight` is DCP's
    `model.layer.weight`.
    """

    def __init__(self, where: Where, *, step: int | str = "latest", run: str = "main") -> None:
        self.where = where
        self.run = run
        self.step = step
        self._step: int | str = step
        self._opened: Opened | None = None
        self._entries: dict[str, _Entry] = {}
        self._speaks = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        found = _step_of(checkpoint_id)
        self._step = self.step if found is None else found
        self._close()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        opened = self._open()
        described: dict[str, Any] = {}
        for name, entry in self._entries.items():
            leaf = entry.leaf
            if leaf is None:
                described[name] = BytesStorageMetadata()
                continue
            chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(shape)) for _, at, shape in leaf.parts]
            properties = TensorProperties(dtype=TORCH_DTYPES[leaf.dtype])
            described[name] = TensorStorageMetadata(properties, torch.Size(leaf.shape), chunks)
        planned = {name: entry.keys for name, entry in self._entries.items()}
        return Metadata(described, planned, storage_meta=StorageMeta(str(opened.id)))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._open()
        self._speaks = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        asked = {self._entries[item.storage_index.fqn].keys for item in plan.items}
        if self._speaks and (left := _left_empty(asked, [entry.keys for entry in self._entries.values()])):
            warn(
                f"{self.where} has {'.'.join(map(str, left))}, and the state_dict that is loaded into has nothing in "
                "its place: DCP leaves it out, and an optimizer begins without its state. What get_state_dict() of "
                "torch.distributed.checkpoint.state_dict returns has room for it"
            )
        return replace(plan, storage_data=str(self._open().id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found = [plan.storage_data for plan in plans]
        if len(set(found)) > 1:  # one was committed between the looks of two ranks, or is damaged for one of them
            raise RanksDisagree(
                f"the ranks have opened different checkpoints: {', '.join(sorted(set(found)))}",
                subject="latest",
                hint="load again, or name the step: StorageReader(…, step=500)",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._open()
        reads = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(self._value(item.storage_index.fqn), buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
            else:
                reads.append((item, planner.resolve_tensor(item).detach()))
        parallel_for(lambda read: self._read(*read), reads, _READERS)
        for item, target in reads:
            planner.commit_tensor(item, target)
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _names_step(checkpoint_id)

    def _open(self) -> Opened:
        if self._opened is None:
            step, self._step = self._step, self.step  # DCP calls `reset` only for a load that has a checkpoint_id
            self._opened = open_checkpoint(self.where, run=self.run, step=step)
            self._entries = {".".join(map(str, one.keys)): one for one in _entries(self._opened)}
        return self._opened

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened, self._entries = None, {}

    def _read(self, item: ReadItem, target: torch.Tensor) -> None:
        leaf = self._entries[item.storage_index.fqn].leaf
        assert leaf is not None and item.storage_index.offset is not None, "of a tensor"
        at = tuple(map(int.__add__, item.storage_index.offset, item.storage_offsets))
        kind = TORCH_DTYPES[leaf.dtype]
        straight = target.device.type == "cpu" and target.is_contiguous() and target.dtype == kind
        data = target if straight else torch.empty(tuple(item.lengths), dtype=kind)
        if data.numel():
            leaf.read_into(bytes_of(data), Box(at, tuple(item.lengths)))
        if not straight:
            target.copy_(data)

    def _value(self, name: str) -> Any:
        entry, opened = self._entries[name], self._open()
        try:
            return opened.plain(entry.path)
        except StateError:  # with arrays in it, or an object's state
            exactly = re.compile(f"{re.escape(entry.path)}(/.*)?")
            id = opened.id
            step = f"{attempt_key(id.attempt)}/{id.step}"
            found: Any = load(self.where, run=self.run, step=step, include=exactly, ranks=Solo()).state
            for key in entry.keys:
                found = found[key]
            return found


def _left_empty(asked: Collection[Keys], there: Iterable[Keys]) -> Keys | None:
    """Returns where the checkpoint has an optimizer's state that a load does not ask for, although it asks for the
    options beside it: so does one into a new optimizer, which has no state yet."""
    optimizers = {keys[: keys.index("param_groups")] for keys in asked if "param_groups" in keys}
    for keys in there:
        for optimizer in optimizers:
            state = (*optimizer, "state")
            if keys[: len(state)] == state and not any(one[: len(state)] == state for one in asked):
                return state
    return None


@record
class _Entry:
    """What DCP calls one item of a state: a tensor, or a value as a whole."""

    keys: Keys
    path: str
    leaf: Leaf | None


def _entries(opened: Opened) -> Iterator[_Entry]:
    """Yields the items of a checkpoint as DCP's planner finds those of a state: it looks into mappings, and into lists
    with tensors or mappings in them."""

    def walk(node: Any, path: str, keys: Keys) -> Iterator[_Entry]:
        kind = kind_of(node)
        if kind in LEAVES and node.get("as") == "torch":
            yield _Entry(keys, path, opened[path])
        elif kind == OWN:
            return
        elif kind in KEYED or kind in ("module", "bypath"):
            names = [key if isinstance(key, str) else json.dumps(key) for key, _ in items(node)]
            for name, (below, child) in zip(names, children(node, path), strict=True):
                yield from walk(child, below, (*keys, name))
        elif kind in WRAPPERS and kind != "generator":
            for below, child in children(node, path):
                yield from walk(child, below, keys)
        elif kind == "list" and not _is_value(node):
            for number, (below, child) in enumerate(children(node, path)):
                yield from walk(child, below, (*keys, number))
        elif keys:
            yield _Entry(keys, path, None)

    yield from walk(opened.node(), "", ())


def _is_value(node: Any) -> bool:
    """Whether a list has neither tensors nor mappings in it."""
    return not any(
        kind_of(one) in KEYED
        or (kind_of(one) in LEAVES and one.get("as") == "torch")
        or (kind_of(one) == "list" and not _is_value(one))
        for one in sequence(node)
    )
