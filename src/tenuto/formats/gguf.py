"""GGUF, out only: tensors under their own names, in the element types that it has without quantisation.

What llama.cpp needs besides (its names of tensors, the architecture's keys, the vocabulary) its own converter makes
from a directory that `--to hf` writes.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from tenuto.errors import UsageError
from tenuto.formats.contract import Content, Tensor

_MAGIC: Final = b"GGUF"
_VERSION: Final = 3
_TYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 30}
_STRING: Final = 8
_ALIGNMENT: Final = 32
_MOST_AXES: Final = 4
_MOST_NAME: Final = 63
"""Bytes of a tensor's name that llama.cpp takes."""


def write(part: Path, content: Content) -> list[str]:
    for name, tensor in content.tensors.items():
        _check(name, tensor)
    words = {"general.architecture": "unknown", **content.metadata}
    head = _MAGIC + struct.pack("<IQQ", _VERSION, len(content.tensors), len(words))
    head += b"".join(_string(key) + struct.pack("<I", _STRING) + _string(value) for key, value in words.items())
    offset = 0
    for name, tensor in content.tensors.items():
        axes = tensor.shape[::-1] or (1,)
        head += _string(name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes)
        head += struct.pack("<IQ", _TYPES[tensor.dtype], offset)
        offset += tensor.nbytes + _padding(tensor.nbytes)
    done = 0
    with part.open("xb") as file:
        file.write(head + bytes(_padding(len(head))))
        for tensor in content.tensors.values():
            for block in tensor.blocks():
                file.write(block.data)
                done += len(block)
                content.progress(done)
            file.write(bytes(_padding(tensor.nbytes)))
    return ["the file has no architecture's keys and no vocabulary: llama.cpp takes it after its own converter's work"]


def _check(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _TYPES:
        raise UsageError(
            f"{name} is {tensor.dtype}; GGUF gets float32, float16 and bfloat16 from here",
            subject=name,
            hint="--dtype float16 converts floating-point tensors; --exclude leaves others out",
        )
    if len(tensor.shape) > _MOST_AXES or not tensor.nbytes:
        raise UsageError(
            f"{name} has the shape {list(tensor.shape)}; GGUF has 1 to {_MOST_AXES} axes, none of them empty",
            subject=name,
            hint="--exclude leaves it out",
        )
    if len(name.encode()) > _MOST_NAME:
        raise UsageError(
            f"{name} has {len(name.encode())} bytes; a name in GGUF has at most {_MOST_NAME}",
            subject=name,
            hint=r"--rename '^model\.layers\.=blk.' shortens names",
        )


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padding(length: int) -> int:
    return -length % _ALIGNMENT
