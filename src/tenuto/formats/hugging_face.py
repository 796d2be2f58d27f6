"""Directories of Hugging Face's tools: a model, a PEFT adapter, or a Trainer's `checkpoint-N`.

In: weights (safetensors), configuration and tokenizer files as bytes, the Trainer's state, and optimizer, scheduler and
random states as far as they are plain. Out: what `from_pretrained` reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tenuto.errors import Unserialisable, UsageError
from tenuto.formats import safetensors
from tenuto.formats.contract import Content, Reader, Tensor, is_there, refuse
from tenuto.formats.registry import detect

FILES: Final = "hf_files"
"""The entry of a state with the files that belong to a model: name -> bytes."""
_WHAT: Final = "directory of Hugging Face's tools"
_STATE: Final = "trainer_state.json"
_ADAPTER: Final = "adapter_config.json"
_TEXT: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_MOST_FILE: Final = 64 << 20
_PARTS: Final = {
    "optimizer": ("optimizer.pt", "optimizer.bin"),
    "scheduler": ("scheduler.pt",),
    "scaler": ("scaler.pt",),
}
"""Entries of the state, and the files that may hold them."""
_COMPILED: Final = "_orig_mod"
_WEIGHTS: Final = ("model", "adapter_model", "diffusion_pytorch_model")


def read(path: Path) -> Reader:
    remarks: list[str] = []
    opened = [_weights(path)]
    try:
        tree: dict[str, Any] = {"model": opened[0].tree}
        taken = [*opened[0].files]
        for entry, names in _PARTS.items():
            for name in names:
                if is_there(path / name, _WHAT):
                    taken += _take(path / name, tree, entry, opened, remarks)
        for file in sorted(path.glob("rng_state*.pth")):
            taken += _take(file, tree, file.stem, opened, remarks)
        state: Any = None
        if is_there(path / _STATE, _WHAT):
            state = safetensors.read_json(path / _STATE, _WHAT, _MOST_FILE)
            if not isinstance(state, dict):
                refuse(path / _STATE, _WHAT, "it is not a JSON object")
            tree["trainer_state"] = state
            taken.append(path / _STATE)
        files = _texts(path, remarks)
        if files:
            tree[FILES] = {file.name: file.read_bytes() for file in files}
        for file in sorted(path.glob("training_args.bin")):
            remarks.append(f"{file.name} is left out: it is a pickle of classes, which only running code can read")
    except BaseException:
        _close(opened)
        raise
    step, metrics = _progress(state)
    return Reader(
        "hf",
        path,
        tree,
        step=step,
        metrics=metrics,
        remarks=remarks,
        files=(*taken, *files),
        on_close=lambda: _close(opened),
    )


def _close(opened: list[Reader]) -> None:
    for reader in opened:
        reader.close()


def _weights(path: Path) -> Reader:
    for stem in _WEIGHTS:
        for name in (f"{stem}{safetensors.INDEX}", f"{stem}.safetensors"):
            if is_there(path / name, _WHAT):
                return safetensors.read(path / name)
    if any(path.glob("*.safetensors")):
        return safetensors.read(path)
    pickled = sorted(path.glob("pytorch_model*.bin"))
    found = detect(pickled[0]) if len(pickled) == 1 else None
    if found is None:
        raise UsageError(
            f"{path} has weights in {len(pickled)} pickled files, which are not read together",
            subject=str(path),
            hint="save it once more with safetensors: model.save_pretrained(…), where you trust the files",
        )
    return found.read(pickled[0])


def _take(file: Path, tree: dict[str, Any], entry: str, opened: list[Reader], remarks: list[str]) -> list[Path]:
    """Adds what a file beside the weights holds, if it is plain; else says why it is left out."""
    found = detect(file) if is_there(file, _WHAT) else None
    if found is None:
        remarks.append(f"{file.name} is left out: it is of no format that is read")
        return []
    try:
        reader = found.read(file)
    except Unserialisable as error:
        remarks.append(f"{file.name} is left out: {error.message}")
        return []
    opened.append(reader)
    tree[entry] = reader.tree
    remarks += [f"{file.name}: {remark}" for remark in reader.remarks]
    return [file]


def _texts(path: Path, remarks: list[str]) -> list[Path]:
    """Returns the files that say what the model is and how text becomes its input."""
    found = []
    for file in sorted(path.iterdir()):
        if file.suffix not in _TEXT or file.name == _STATE or file.name.endswith(".index.json"):
            continue
        if not is_there(file, _WHAT):
            continue
        if file.stat().st_size > _MOST_FILE:
            remarks.append(f"{file.name} is left out: it has {file.stat().st_size} bytes")
        else:
            found.append(file)
    return found


def _progress(state: Any) -> tuple[int | None, dict[str, float]]:
    """Returns the step and the metrics of it, as the Trainer's state has them."""
    if not isinstance(state, dict):
        return None, {}
    step = state.get("global_step")
    if type(step) is not int or step < 0:
        return None, {}
    history = state.get("log_history")
    metrics: dict[str, float] = {}
    for line in history if isinstance(history, list) else ():
        if isinstance(line, dict) and line.get("step") == step:
            for name, value in line.items():
                if name not in ("step", "epoch") and type(value) in (int, float) and math.isfinite(value):
                    metrics[str(name)] = float(value)
    return step, metrics


# -- writing -------------------------------------------------------------------------------------------------------


def write(part: Path, content: Content) -> list[str]:
    """Writes a directory: weights in one file, or in several of at most `content.shard_bytes` with an index, and the
    files of the state's entry `hf_files` beside them."""
    files = _files(content.tree)
    stem = "adapter_model" if _ADAPTER in files else "model"
    content, unwrapped = _unwrapped(content)
    chosen = safetensors.in_order(content.tensors)
    shards = _shards(chosen, content.shard_bytes)
    part.mkdir()
    weights: dict[str, str] = {}
    done = 0
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        done = safetensors.write_file(part / name, shard, content, done)
        weights.update(dict.fromkeys((tensor for tensor, _ in shard), name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": done}, "weight_map": dict(sorted(weights.items()))}
        (part / f"{stem}{safetensors.INDEX}").write_text(json.dumps(index, indent=2) + "\n")
    for name, data in files.items():
        (part / name).write_bytes(data)
    remarks = [*unwrapped, *safetensors.remarks(chosen)]
    if not {"config.json", _ADAPTER} & files.keys():
        remarks.append(
            "the checkpoint has no config.json, which from_pretrained needs: put the model's beside the weights"
        )
    return remarks


def _unwrapped(content: Content) -> tuple[Content, list[str]]:
    """Returns the content with names as without `torch.compile`, whose wrapper is no part of a model that
    from_pretrained makes."""
    names = {name: ".".join(part for part in name.split(".") if part != _COMPILED) for name in content.tensors}
    changed = sum(name != plain for name, plain in names.items())
    if not changed or len(set(names.values())) != len(names):
        return content, []
    tensors = {names[name]: tensor for name, tensor in content.tensors.items()}
    return replace(content, tensors=tensors), [f"`{_COMPILED}.` of torch.compile is taken off {changed} names"]


def _files(tree: Any) -> dict[str, bytes]:
    """Returns the files of the state, checked: somebody else may have written the checkpoint."""
    found = tree.get(FILES) if isinstance(tree, Mapping) else None
    files: dict[str, bytes] = {}
    for name, data in (found or {}).items():
        if not isinstance(name, str) or not safetensors.is_plain_name(name) or not name.endswith(_TEXT):
            raise UsageError(f"{FILES} has a file {name!r}, which is not written", subject=FILES, hint="leave it out")
        if not isinstance(data, bytes | bytearray | str):
            raise UsageError(f"{FILES}/{name} is neither bytes nor text", subject=FILES, hint="save it as bytes")
        files[name] = data.encode() if isinstance(data, str) else bytes(data)
    return files


def _shards(chosen: list[tuple[str, Tensor]], most: int) -> list[list[tuple[str, Tensor]]]:
    shards: list[list[tuple[str, Tensor]]] = [[]]
    filled = 0
    for name, tensor in chosen:
        if shards[-1] and filled + tensor.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append((name, tensor))
        filled += tensor.nbytes
    return shards
