"""safetensors: one file, or several with an index, as Hugging Face stores large models.

Tensors are read in place. An index names files beside it and no others.

Source: https://huggingface.co/docs/safetensors, and the index of `huggingface_hub.serialization`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tenuto.errors import CorruptionError, UsageError
from tenuto.formats.contract import Content, RawFile, RawTensor, Reader, Tensor, refuse
from tenuto.model.leaf import DTYPES, dtype
from tenuto.repo.format.safetensors import MAX_HEADER, build_header, header_length, parse_header

_WHAT: Final = "safetensors file"
INDEX: Final = ".safetensors.index.json"
_MOST_INDEX: Final = 64 << 20
_MOST_FILES: Final = 10_000
_MOST_VALUES: Final = 4_000_000
"""In a document: a byte of JSON may ask for 60 of memory."""
_SHOWN: Final = 5
_NAMES: Final[Mapping[str, str]] = {row.code: name for name, row in DTYPES.items() if row.code is not None}
"""The dtype of each code."""


def read(path: Path) -> Reader:
    """Opens a file, an index, or a directory with one index or any number of files."""
    files = _files(path)
    opened: list[RawFile] = []
    try:
        tree: dict[str, Tensor] = {}
        owner: dict[str, Path] = {}
        for one, expected in files.items():
            opened.append(RawFile(one, what=_WHAT))
            tensors = _tensors(opened[-1])
            if expected is not None and not expected <= tensors.keys():
                refuse(one, _WHAT, f"it lacks {min(expected - tensors.keys())!r}, which the index names in it")
            for name, tensor in tensors.items():
                if expected is not None and name not in expected:
                    continue  # the index decides: a file may hold copies of tied tensors
                if name in tree:
                    refuse(one, _WHAT, f"{name!r} is in {owner[name].name} too")
                tree[name], owner[name] = tensor, one
    except BaseException:
        _close(opened)
        raise
    return Reader("safetensors", path, tree, kind="weights", files=tuple(files), on_close=lambda: _close(opened))


def _close(opened: Sequence[RawFile]) -> None:
    for file in opened:
        file.close()


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Returns the files to read, each with the names that the index expects in it; None for all."""
    if path.is_dir():
        indexes = sorted(path.glob(f"*{INDEX}"))
        if len(indexes) > 1:
            raise UsageError(
                f"{path} has {len(indexes)} indexes: {', '.join(one.name for one in indexes[:_SHOWN])}",
                subject=str(path),
                hint=f"name one of them: {indexes[0]}",
            )
        if not indexes:
            return dict.fromkeys(sorted(path.glob("*.safetensors")))
        path = indexes[0]
    if not path.name.endswith(".json"):
        return {path: None}
    found: dict[Path, set[str] | None] = {}
    for name, file in _index(path).items():
        names = found.setdefault(path.parent / file, set())
        assert names is not None
        names.add(name)
    return found


def _index(path: Path) -> Mapping[str, str]:
    """Returns which file each tensor lies in. The files lie beside the index."""
    raw = read_json(path, _WHAT, _MOST_INDEX)
    weights = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weights, dict) or not weights:
        refuse(path, _WHAT, "it has no weight_map")
    for name, file in weights.items():
        if not isinstance(file, str) or not is_plain_name(file) or not file.endswith(".safetensors"):
            refuse(
                path,
                _WHAT,
                f"it says that {name!r} is in {str(file)[:120]!r}, which is not a safetensors file beside it",
            )
    if len(set(weights.values())) > _MOST_FILES:
        refuse(path, _WHAT, f"it names {len(set(weights.values()))} files")
    for file in sorted(set(weights.values())):
        if not (path.parent / file).is_file():
            refuse(path, _WHAT, f"{file}, which it names, is not there")
    return weights


def is_plain_name(name: str) -> bool:
    """Returns whether a file's name leads nowhere else than beside the file that has it."""
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")


def read_json(path: Path, what: str, most: int) -> Any:
    """Returns the document in a JSON file of at most `most` bytes. CorruptionError for anything else."""
    file = RawFile(path, what=what)
    try:
        if file.length > most:
            file.refuse(f"it has {file.length} bytes, where at most {most} belong")
        data = file.read(0, file.length)
    finally:
        file.close()
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        refuse(path, what, f"it has more than {_MOST_VALUES:,} values")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        refuse(path, what, f"it is not JSON: {error}")


def _tensors(file: RawFile) -> dict[str, Tensor]:
    try:
        length = header_length(file.read(0, min(8, file.length)), name=file.path.name, file_length=file.length)
        header = parse_header(file.read(0, length), name=file.path.name, file_length=file.length, max_header=MAX_HEADER)
    except CorruptionError as error:
        file.refuse(error.message.removeprefix(f"{file.path.name}: "))
    return {
        name: RawTensor(file, entry.start, _NAMES[entry.code], entry.shape, name=name) for name, entry in header.items()
    }


# -- writing -------------------------------------------------------------------------------------------------------


def write(part: Path, content: Content) -> list[str]:
    """Writes one file."""
    chosen = in_order(content.tensors)
    write_file(part, chosen, content, 0)
    return remarks(chosen)


def in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Returns the tensors as they follow each other in a file: longer items first, so that each is aligned."""
    return sorted(tensors.items(), key=lambda one: (-one[1].itemsize, one[0]))


def entry(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...]]:
    """Returns a tensor's entry in a header: what safetensors has no code for is bytes."""
    code = dtype(tensor.dtype).code
    return (name, code, tensor.shape) if code else (name, "U8", (tensor.nbytes,))


def write_file(part: Path, chosen: Sequence[tuple[str, Tensor]], content: Content, done: int) -> int:
    """Writes one file of these tensors. `done`: the bytes of tensors that were written before; returns those by now."""
    header = build_header([entry(name, tensor) for name, tensor in chosen], {"format": "pt", **content.metadata})
    with part.open("xb", buffering=0) as file:
        total = len(header) + sum(tensor.nbytes for _, tensor in chosen)
        if total and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, total)  # a full disk is told of before the first byte
        file.write(header)
        for _, tensor in chosen:
            for block in tensor.blocks():
                data = block.data
                while data:
                    data = data[file.write(data) :]
                done += len(block)
                content.progress(done)
    return done


def remarks(chosen: Sequence[tuple[str, Tensor]]) -> list[str]:
    raw = [name for name, tensor in chosen if dtype(tensor.dtype).code is None]
    if not raw:
        return []
    more = f" and {len(raw) - _SHOWN} more" if len(raw) > _SHOWN else ""
    return [f"safetensors has no such dtype; written as bytes (U8): {', '.join(raw[:_SHOWN])}{more}"]
