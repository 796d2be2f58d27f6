"""Checkpoints of DeepSpeed: a directory of ZeRO's partitions, one file for each rank, or a universal one made of it.

What lies where is said by the files themselves (`param_shapes`, `param_slice_mappings`); the master weights and the
optimizer's state come out whole, under the names of the module's parameters, and are read in place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, Final, NoReturn

from tenuto.errors import Unserialisable
from tenuto.formats.contract import PiecedTensor, RawFile, RawTensor, Reader, Tensor, is_there, refuse
from tenuto.formats.pickles import read_as_record
from tenuto.formats.torch_file import Archive
from tenuto.model.leaf import Box
from tenuto.state.declarations import flat_range

WHAT: Final = "checkpoint of DeepSpeed"
_KNOWN: Final = {
    "deepspeed.utils.tensor_fragment fragment_address": read_as_record("fragment_address"),
    "deepspeed.runtime.fp16.loss_scaler LossScaler": read_as_record("LossScaler"),
    "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler": read_as_record("DynamicLossScaler"),
}
_RANK: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_(optim|model)_states\.pt")
_NO_STATE: Final = ("ds_config", "optimizer_state_dict/zero_stage", "zero_stage")
_MODEL: Final = "mp_rank_00_model_states.pt"
_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps")
Run = tuple[Tensor, int, int]
"""Some elements of a flat tensor: the tensor, the first of them, and how many."""


class _Directory:
    """The files of a checkpoint, which stay open until its reader is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened = ExitStack()
        self.remarks: list[str] = []
        self.files: list[Path] = []

    def load(self, path: Path) -> dict[Any, Any]:
        """Returns what a file holds. What only DeepSpeed's own classes could read is left out."""
        file = RawFile(path, what=WHAT)
        self.opened.callback(file.close)
        self.files.append(path)
        found, remarks = Archive(file).load(known=_KNOWN, loose=True)
        if not isinstance(found, dict):
            file.refuse("it holds no table of a training's state")
        self.remarks += [f"{path.name}: {one}" for one in remarks if not one.startswith(_NO_STATE)]
        return found

    def refuse(self, message: str) -> NoReturn:
        refuse(self.path, WHAT, message)

    def whole(self, name: str, shape: Any, runs: Sequence[Run]) -> Tensor:
        """Returns a tensor of these runs of elements, one after the other."""
        if not isinstance(shape, tuple) or any(type(one) is not int or one < 0 for one in shape):
            self.refuse(f"{name!r} has no shape")
        pieces: list[tuple[Box, Tensor]] = []
        at = 0
        for tensor, start, length in runs:
            if not isinstance(tensor, RawTensor) or start + length > prod(tensor.shape):
                self.refuse(f"{name!r} is elements {start} to {start + length} of {tensor!r:.80}")
            if at + length > prod(shape):
                self.refuse(f"{name!r} has more elements in its partitions than its shape {list(shape)}")
            for part in flat_range(length, shape, at).parts:
                first = start + part.cut[0][0]
                offset = tensor.offset + first * tensor.itemsize
                piece = RawTensor(tensor.file, offset, tensor.dtype, part.shape, name=name)
                pieces.append((Box(part.offsets, part.shape), piece))
            at += length
        dtype = runs[0][0].dtype if runs else "float32"
        return PiecedTensor(dtype, shape, pieces, path=self.path, what=WHAT, name=name)


def read(path: Path) -> Reader:
    """Opens a directory such as `global_step100`: the state under `model`, `optimizer`, `scheduler` and `engine`."""
    files = _Directory(path)
    try:
        universal = (path / "zero" / "optimizer_state.pt").is_file()
        tree = _universal(files) if universal else _partitions(files)
        step = tree["engine"]["counters"].get("global_steps")
    except BaseException:
        files.opened.close()
        raise
    return Reader(
        format="deepspeed",
        path=path,
        tree=tree,
        step=step if type(step) is int and step >= 0 else None,
        remarks=files.remarks,
        files=files.files,
        on_close=files.opened.close,
    )


def _universal(files: _Directory) -> dict[str, Any]:
    model: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for directory in sorted((files.path / "zero").iterdir()):
        for file in sorted(directory.glob("*.pt")) if directory.is_dir() else ():
            found = files.load(file) if file.name != "step.pt" else {}
            value = found.get("param")
            if file.name == "step.pt":
                continue
            if not isinstance(value, Tensor):
                files.refuse(f"{file.name} of {directory.name!r} holds no tensor")
            if file.name == "fp32.pt":
                model[directory.name] = value
            else:
                optimizer.setdefault(file.stem, {})[directory.name] = value
    top = files.load(files.path / "zero" / "optimizer_state.pt")
    values["groups"] = _groups(top.get("param_groups"))
    saved = files.load(files.path / _MODEL) if is_there(files.path / _MODEL, WHAT) else {}
    return _tree(files, saved, model, optimizer, values | {"scaler": _plain(top.get("loss_scaler"))})


def _partitions(files: _Directory) -> dict[str, Any]:
    ranks: dict[str, dict[int, Path]] = {"optim": {}, "model": {}}
    for file in files.path.iterdir():
        found = _RANK.fullmatch(file.name)
        if found is not None:
            if int(found[2]):
                raise Unserialisable(
                    f"{files.path} was saved with tensor or pipeline parallelism, of which Tenuto reads none",
                    subject=str(files.path),
                    hint="make a universal checkpoint of it: python -m deepspeed.checkpoint.ds_to_universal",
                )
            ranks[found[3]][int(found[1])] = file
    each = [files.load(ranks["optim"][number]) for number in sorted(ranks["optim"])]
    states = [_plain(one.get("optimizer_state_dict")) for one in each]
    if sorted(ranks["optim"]) != list(range(len(each))) or not all(states):
        files.refuse(f"it has the partitions of ranks {sorted(ranks['optim'])[:20]}, and some are missing")
    third = all("fp32_flat_groups" in one for one in states)
    models = [files.load(ranks["model"][number]) for number in sorted(ranks["model"])] if third else []
    saved = models[0] if models else files.load(files.path / _MODEL)
    counts = states[0].get("partition_count")
    count = counts[0] if isinstance(counts, list) and counts else counts
    if type(count) is int and count != len(states):
        files.refuse(f"it was saved by {count} ranks, and has the partitions of {len(states)}")
    shapes = saved.get("param_shapes")
    if not isinstance(shapes, list) or not all(isinstance(one, dict) for one in shapes):
        files.refuse("it has no table of its parameters' shapes (param_shapes)")
    runs = _of_stage_3(shapes, len(states)) if third else _of_mappings(files, states, shapes)
    flats = [one.get("fp32_flat_groups" if third else "single_partition_of_fp32_groups") for one in states]
    inner = [_inner(one, third) for one in states]
    model, optimizer = _joined(files, shapes, runs, flats, inner)
    if third:
        model |= _frozen(files, models)
    values = {
        "groups": _groups(inner[0].get("param_groups")),
        "values": [
            {key: value for key, value in _of(inner[0].get("state"), number).items() if _is_value(value)}
            for number in range(len(shapes))
        ],
        "scaler": _plain(states[0].get("loss_scaler")),
    }
    return _tree(files, saved, model, optimizer, values)


def _joined(
    files: _Directory,
    shapes: list[dict[str, Any]],
    runs: list[dict[str, list[tuple[int, int]]]],
    flats: list[Any],
    inner: list[dict[Any, Any]],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the master weights, and the optimizer's state by kind. `runs`: of each group, each parameter's first
    element and their number in the partition of every rank."""
    model: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(shapes):
        partitions = [_of(one, number, Tensor) for one in flats]
        states = [_of(one.get("state"), number) for one in inner]
        for name, shape in group.items():
            where = runs[number][name]

            def pieced(tensors: list[Any], name: str, shape: Any, where: list[tuple[int, int]]) -> Tensor:
                return files.whole(name, shape, [(t, *w) for t, w in zip(tensors, where, strict=True) if w[1]])

            model[name] = pieced(partitions, name, shape, where)
            for kind, value in states[0].items():
                if isinstance(value, Tensor) and not _is_value(value):
                    found = [one.get(kind) for one in states]
                    optimizer.setdefault(str(kind), {})[name] = pieced(found, f"{kind} of {name}", shape, where)
    return model, optimizer


def _of_stage_3(shapes: list[dict[str, Any]], ranks: int) -> list[dict[str, list[tuple[int, int]]]]:
    """Each rank has an equal part of every parameter, the last ones less, padded to the same length."""
    found = []
    for group in shapes:
        at, places = 0, {}
        for name, shape in group.items():
            count = prod(shape) if isinstance(shape, tuple) else 0
            padded = -(-count // ranks)
            places[name] = [(at, max(min(padded, count - rank * padded), 0)) for rank in range(ranks)]
            at += padded
        found.append(places)
    return found


def _of_mappings(
    files: _Directory, states: list[dict[str, Any]], shapes: list[dict[str, Any]]
) -> list[dict[str, list[tuple[int, int]]]]:
    """ZeRO 1 and 2 say where each parameter lies in each rank's partition."""
    found = []
    for number, group in enumerate(shapes):
        each = [_of(one.get("param_slice_mappings"), number) for one in states]
        places: dict[str, list[tuple[int, int]]] = {}
        for name in group:
            places[name] = []
            for mapping in each:
                start, length = (_of(mapping, name).get(key, 0) for key in ("start", "numel"))
                if type(start) is not int or type(length) is not int or start < 0 or length < 0:
                    files.refuse(f"it does not say where {name!r} lies in a partition")
                places[name].append((start, length))
        found.append(places)
    return found


def _inner(state: dict[str, Any], third: bool) -> dict[Any, Any]:
    """Returns the state_dict of the optimizer inside. Elastic checkpoints have a list of each group's state."""
    found = state.get("optimizer_state_dict" if third else "base_optimizer_state")
    if isinstance(found, list):
        return {"state": dict(enumerate(found)), "param_groups": []}
    return found if isinstance(found, dict) else {}


def _frozen(files: _Directory, models: list[dict[Any, Any]]) -> dict[str, Any]:
    """Returns the parameters of ZeRO 3 that were not trained."""
    shapes = models[0].get("frozen_param_shapes")
    found = {}
    for name, shape in shapes.items() if isinstance(shapes, dict) else ():
        parts = [_of(one, "frozen_param_fragments").get(name) for one in models]
        places = _of_stage_3([{name: shape}], len(models))[0][name]
        found[name] = files.whole(name, shape, [(t, *w) for t, w in zip(parts, places, strict=True) if w[1]])
    return found


def _tree(
    files: _Directory,
    saved: Mapping[Any, Any],
    model: dict[str, Any],
    optimizer: dict[str, dict[str, Any]],
    values: dict[str, Any],
) -> dict[str, Any]:
    """Returns the state in the form in which `tenuto.deepspeed.state` saves it."""
    module, trained = _of(saved, "module"), dict(model)
    for name, value in module.items():
        if name not in trained and isinstance(value, Tensor) and (value.nbytes or not prod(value.shape)):
            model[name] = value
    for name, other in _of(saved, "shared_params").items():
        if other in trained:
            model[name] = trained[other]
    counters = {name: saved[name] for name in _COUNTERS if type(saved.get(name)) is int}
    tree: dict[str, Any] = {"model": model, "optimizer": optimizer, "engine": {"counters": counters, **values}}
    if isinstance(scheduler := saved.get("lr_scheduler"), dict):
        tree["scheduler"] = scheduler
    if not model:
        files.refuse("it has no weights")
    return tree


def _of(value: Any, key: Any, kind: type = dict) -> Any:
    """Returns an entry of a table or list; an empty one where there is none of the kind."""
    try:
        found = value[key]
    except (KeyError, IndexError, TypeError):
        return {} if kind is dict else None
    return found if isinstance(found, kind) else {} if kind is dict else None


def _groups(groups: Any) -> list[dict[str, Any]]:
    each = groups if isinstance(groups, list) else []
    return [{key: value for key, value in one.items() if key != "params"} for one in each if isinstance(one, dict)]


def _is_value(value: Any) -> bool:
    return not isinstance(value, Tensor) or prod(value.shape) <= 1


def _plain(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
