"""Reads what an export has written, by the tool that it was made for.

A file is what it claims to be when that tool finds in it every tensor that was written, under its name and in its
shape. Where the tool is not installed Tenuto's own reader does it, and the export says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tenuto.errors import SaveFailed
from tenuto.formats.contract import Tensor, leaves
from tenuto.formats.registry import Format
from tenuto.model.leaf import escape, join
from tenuto.record import record

Shapes = Mapping[str, Sequence[int] | None]
"""Of each tensor by its name; None where the tool does not say."""
_SHOWN: Final = 3


@record
class ReadBack:
    """by: the tool that has read it, or "Tenuto"; None: nothing has. lacks: the package that would have.
    remarks: what the tool does not find there."""

    by: str | None
    lacks: str | None = None
    remarks: Sequence[str] = ()

    def __str__(self) -> str:
        if self.lacks is None:
            return f"read back by {self.by}" if self.by else "not read back"
        if self.by is None:
            return f"not read back: {self.lacks} is not installed"
        return f"read back by {self.by} only: {self.lacks} is not installed"


def read_back(format: Format, part: Path, tensors: Mapping[str, Tensor]) -> ReadBack:
    """Reads back what was written to `part`. Raises SaveFailed, naming a tensor, where one is not found as it was
    written."""
    written = {name: tensor.shape for name, tensor in tensors.items() if tensor.nbytes or format.name != "orbax"}
    lacks: str | None = None
    if format.name in _TOOLS:
        tool, read = _TOOLS[format.name]
        try:
            _compare(part, tool, read(part), written)
        except ImportError as error:
            lacks = (error.name or tool).partition(".")[0]
        else:
            return _by_trainer(part, tool) if format.name == "hf" else ReadBack(tool)
    if not format.reads:
        return ReadBack(None, lacks)
    with format.read(part) as reader:
        found = dict(leaves(reader.tree["model"] if format.name == "hf" else reader.tree))
        shapes = {name.replace("~1", "/"): tensor.shape for name, tensor in found.items()}
        _compare(part, "Tenuto", shapes, {name.replace("~1", "/"): shape for name, shape in written.items()})
    return ReadBack("Tenuto", lacks)


def _compare(part: Path, tool: str, found: Shapes, written: Mapping[str, Sequence[int]]) -> None:
    for name, shape in written.items():
        if name not in found:
            raise SaveFailed(f"{name} was written, and {tool} does not find it", subject=name)
        there = found[name]
        if there is not None and tuple(there) != tuple(shape) and _matters(there, shape):
            raise SaveFailed(f"{name} was written as {list(shape)}, and {tool} reads {list(there)}", subject=name)


def _matters(there: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns whether a shape is wrong: a format without zero-dimensional tensors, or one that holds an element type as
    bytes, has another one of as many bytes or more."""
    return not (tuple(shape) == () and tuple(there) == (1,)) and len(there) != 1


def _safetensors(part: Path) -> Shapes:
    from safetensors import safe_open

    found: dict[str, Sequence[int]] = {}
    for path in sorted(part.glob("*.safetensors")) if part.is_dir() else [part]:
        with safe_open(path, "numpy") as file:
            found.update({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    return found


def _npz(part: Path) -> Shapes:
    import numpy as np

    with np.load(part, allow_pickle=False) as archive:
        return {name: archive[name].shape for name in archive.files}


def _gguf(part: Path) -> Shapes:
    from gguf import GGUFReader

    return {one.name: [int(length) for length in one.shape[::-1]] for one in GGUFReader(part).tensors}


def _h5(part: Path) -> Shapes:
    import h5py

    found: dict[str, Sequence[int]] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, h5py.Dataset):
            found[name.replace("/", "~1")] = found[name] = value.shape

    with h5py.File(part) as file:
        file.visititems(visit)
    return found


def _tf(part: Path) -> Shapes:
    import tensorflow as tf

    found: dict[str, Sequence[int]] = tf.train.load_checkpoint(str(part)).get_variable_to_shape_map()
    return found


def _orbax(part: Path) -> Shapes:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return dict(_nested(checkpointer.restore(part.absolute()), ""))


def _nested(tree: Any, path: str) -> Iterator[tuple[str, Sequence[int]]]:
    """Yields the arrays of nested dicts and lists, by names in which a `/` leads one level down."""
    if isinstance(tree, Mapping):
        for key, inner in tree.items():
            yield from _nested(inner, join(path, escape(str(key))))
    elif isinstance(tree, list | tuple):
        for number, inner in enumerate(tree):
            yield from _nested(inner, join(path, str(number)))
    else:
        yield path, tuple(tree.shape)


_TOOLS: Final[Mapping[str, tuple[str, Callable[[Path], Shapes]]]] = {
    "safetensors": ("safetensors", _safetensors),
    "hf": ("safetensors", _safetensors),
    "npz": ("numpy", _npz),
    "gguf": ("gguf", _gguf),
    "keras": ("h5py", _h5),
    "tf": ("tensorflow", _tf),
    "orbax": ("orbax", _orbax),
}
"""The tool that a format was made for, and how it reads names and shapes. ImportError where it is not installed."""


# -- from_pretrained -----------------------------------------------------------------------------------------------


def _by_trainer(part: Path, tool: str) -> ReadBack:
    """Reads a directory as `from_pretrained` does, where it says of which model it is and that is installed."""
    try:
        if (part / "adapter_config.json").is_file():
            return _by_peft(part, tool)
        if (part / "config.json").is_file():
            return _by_transformers(part, tool)
    except ImportError as error:
        return ReadBack(tool, remarks=[f"from_pretrained was not tried: {error.name or error} is not installed"])
    return ReadBack(tool)


def _by_transformers(part: Path, tool: str) -> ReadBack:
    import transformers

    config = json.loads((part / "config.json").read_bytes())
    named = (config.get("architectures") or [None])[0]
    kind = getattr(transformers, str(named), None)
    if kind is None:
        return ReadBack(tool, remarks=[f"from_pretrained was not tried: transformers has no class {named}"])
    level = transformers.logging.get_verbosity()
    with ExitStack() as stack:
        stack.callback(transformers.logging.set_verbosity, level)
        transformers.logging.set_verbosity_error()
        try:
            loading = {"output_loading_info": True, "device_map": "meta", "local_files_only": True}
            _, about = kind.from_pretrained(str(part), **loading)
        except (ValueError, RuntimeError, OSError, KeyError, AttributeError, TypeError) as error:
            return ReadBack(tool, remarks=[f"{named}.from_pretrained refuses it: {str(error).splitlines()[0]}"])
    remarks = [
        f"{named}.from_pretrained {words}: {', '.join(sorted(map(str, names))[:_SHOWN])}"
        for key, words in (("missing_keys", "does not find"), ("unexpected_keys", "has no place for"),
                           ("mismatched_keys", "has another shape for"))
        if (names := about[key])
    ]  # fmt: skip
    return ReadBack(tool if remarks else "transformers", remarks=remarks)


def _by_peft(part: Path, tool: str) -> ReadBack:
    """Without the base model, which may be large or elsewhere: its names are not compared."""
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    try:
        PeftConfig.from_pretrained(str(part))
        load_peft_weights(str(part), device="cpu")
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as error:
        return ReadBack(tool, remarks=[f"PEFT refuses it: {str(error).splitlines()[0]}"])
    return ReadBack("peft", remarks=["its base model was not read with it"])
