"""`tenuto.torch.save` and `tenuto.torch.load`: what `torch.save` and `torch.load` do, without pickles.

What is saved lies in a Tenuto repository at the path, verified and atomic. What is loaded may also be a file that
`torch.save` has written, or any other format that `tenuto.formats` reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from tenuto.api.save_load import load as load_checkpoint
from tenuto.api.save_load import save_made
from tenuto.engine.read.choose import Checkpoint
from tenuto.errors import CorruptionError, StateError, UsageError
from tenuto.events import warn
from tenuto.formats.contract import Tensor as LazyTensor
from tenuto.formats.pickles import Constant
from tenuto.formats.registry import detect
from tenuto.integrations.torch.device import TORCH_DTYPES
from tenuto.policy.keep import KeepPolicy
from tenuto.repo.format.object_names import REPOSITORY
from tenuto.state.tree import MAX_DEPTH

_SHOWN: Final = 5


def save(obj: Any, f: str | os.PathLike[str], *, step: int | None = None, keep: KeepPolicy | None = None) -> Checkpoint:
    """Saves `obj` in a Tenuto repository at the path `f`, in place of `torch.save(obj, f)`; returns what was committed.

    Nothing is pickled: tensors, arrays, numbers, texts and containers of them come back as they are. Modules,
    optimizers and what else has a `state_dict` are saved as the values in it, and a warning says so once; any other
    object is Unserialisable, which names it. Where `torch.save` replaces the file, this adds a checkpoint (`step`, or
    the next one); `keep=tenuto.keep.latest(1)` removes those before it.
    """
    if not isinstance(f, str | os.PathLike):
        raise UsageError(
            f"a {type(f).__name__} is not a path: a checkpoint is a directory of several files",
            subject="f",
            hint="tenuto.torch.save(obj, 'checkpoint')",
        )
    path = Path(f)
    if path.is_file():
        raise UsageError(
            f"{path} is a file, and a checkpoint is a directory",
            subject=str(path),
            hint="tenuto.torch.load reads it; save under another name, or move the file away first",
        )
    found = list(_objects(obj, ""))
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        warn(
            f"{path}: {', '.join(found[:_SHOWN])}{more} are saved as the values in them, not pickled: "
            "tenuto.torch.load gives these values, tenuto.load(path, into) puts them into objects that exist"
        )
    return save_made(lambda _: obj, path, step=step, keep=keep)


def _objects(value: Any, path: str, inside: tuple[int, ...] = ()) -> Iterator[str]:
    """Yields what does not come back as what it is, in words. What holds itself, or is nested too deeply, is refused by
    the save."""
    if id(value) in inside or len(inside) > MAX_DEPTH:
        return
    within = (*inside, id(value))
    if isinstance(value, nn.Module | Optimizer) or (
        callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
    ):
        yield f"{path or 'the object'} ({type(value).__name__})"
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _objects(one, f"{path}/{key}" if path else str(key), within)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _objects(one, f"{path}/{number}" if path else str(number), within)


def load(
    f: str | os.PathLike[str],
    map_location: str | torch.device | None = None,
    *,
    weights_only: bool = True,
    step: int | str = "latest",
) -> Any:
    """Loads what `tenuto.torch.save` or `torch.save` has saved at the path `f`, or what another tool has: every byte
    verified in the first case, and nothing that the files name is run in any.

    `map_location`: a device, where the tensors go; host memory without one. `step`: of a repository. What a file holds
    beside plain values and tensors is named by one warning, or by Unserialisable. `weights_only=False` is refused.
    """
    if not weights_only:
        raise UsageError(
            "weights_only=False would run what the file names, which tenuto.torch.load never does",
            subject="weights_only",
            hint="torch.load reads files that you trust; save plain values and state_dict()s from then on",
        )
    if not (map_location is None or isinstance(map_location, str | torch.device)):
        raise UsageError(
            f"map_location={map_location!r} is not a device", subject="map_location", hint="map_location='cuda:0'"
        )
    path = Path(f)
    foreign = detect(path) if path.exists() and not (path / REPOSITORY).exists() else None
    if foreign is None and path.is_file():
        raise CorruptionError(
            f"{path} is neither a checkpoint nor a whole file of a format that is known",
            subject=str(path),
            object=path.name,
            hint="was the save that wrote it cut short? Nothing of the file was run",
        )
    if foreign is None:
        return load_checkpoint(path, step=step, device=map_location).state
    with foreign.read(path) as reader:
        if reader.remarks:
            more = f" and {len(reader.remarks) - _SHOWN} more" if len(reader.remarks) > _SHOWN else ""
            warn(f"{path}: {'; '.join(reader.remarks[:_SHOWN])}{more}")
        return real(reader.tree, map_location)


def real(value: Any, device: str | torch.device | None = None) -> Any:
    """Returns a tree of a reader with tensors and types of torch's own; one that is there twice is one tensor."""
    made: dict[int, torch.Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            if value.dtype not in TORCH_DTYPES:
                raise StateError(
                    f"torch has no element type for an array of {value.dtype.removeprefix('numpy:')}",
                    subject=value.dtype,
                    hint="tenuto.formats.read gives it as an array of numpy",
                )
            if id(value) not in made:
                data = torch.empty(value.shape, dtype=TORCH_DTYPES[value.dtype])
                if data.numel():
                    value.read_into(bytes_of(data))
                made[id(value)] = data if device is None else data.to(device)
            return made[id(value)]
        if isinstance(value, Constant):
            name = value.text.removeprefix("torch.")
            return TORCH_DTYPES[name] if name in TORCH_DTYPES else torch.device(name)
        if isinstance(value, dict):
            return type(value)((key, walk(one)) for key, one in value.items())
        if isinstance(value, list | tuple):
            return type(value)(map(walk, value))
        return value

    return walk(value)


def bytes_of(tensor: torch.Tensor) -> Any:
    """Returns the memory of a contiguous tensor in host memory as an array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
