"""Paths of checkpoints that Lightning can read as files: `tenuto://PLACE@STEP`, of another run than `main`
`tenuto://PLACE@RUN/STEP`.

Lightning reads every checkpoint through fsspec. Under this protocol a checkpoint is a file as `torch.save` would have
written Lightning's dictionary, made in memory when it is opened.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

import fsspec
import torch
from fsspec.spec import AbstractFileSystem

from tenuto.api.open import open as open_checkpoint
from tenuto.api.save_load import load
from tenuto.engine.read.opened import Opened
from tenuto.errors import CheckpointNotFound, NotARepository, RunNotFound, UsageError
from tenuto.integrations.lightning.trainer_state import ENTRY, OURS, joined
from tenuto.model.ids import attempt_key
from tenuto.ranks.detection import Solo
from tenuto.store.contract import Where

PROTOCOL: Final = "tenuto"


def path_of(opened: Opened) -> str:
    run = "" if opened.run == "main" else f"{opened.run}/"
    return f"{PROTOCOL}://{opened.where}@{run}{opened.step}"


def parsed(path: str) -> tuple[str, str, int]:
    """Returns place, run and step of a path. Raises UsageError for what is none."""
    place, _, rest = path.removeprefix(f"{PROTOCOL}://").rpartition("@")
    run, _, step = rest.rpartition("/")
    if not place or not step.isdigit():
        raise UsageError(
            f"{path!r} is not a path of a checkpoint",
            subject=path,
            hint=f"{PROTOCOL}://PLACE@STEP, as best_model_path is",
        )
    return place, run or "main", int(step)


def find(where: Where, run: str, step: int | str) -> Opened | None:
    """Opens a checkpoint; None if there is none."""
    try:
        return open_checkpoint(where, run=run, step=step)
    except (CheckpointNotFound, RunNotFound, NotARepository):
        return None


def as_lightning(opened: Opened) -> dict[str, Any]:
    """Returns a checkpoint as Lightning's dictionary, with all of its tensors in host memory.

    Raises UsageError for one that no TenutoCheckpoint has made.
    """
    if not {"model", "optimizers", ENTRY} <= {path.partition("/")[0] for path in (*opened, *opened.plain_paths())}:
        raise UsageError(
            f"{opened.id} was not made by a TenutoCheckpoint, and has no state of a Lightning Trainer",
            subject=str(opened.id),
            hint="tenuto.load(where, into=model) loads its weights",
        )
    step = f"{attempt_key(opened.id.attempt)}/{opened.step}"
    state = load(opened.where, run=opened.run, step=step, ranks=Solo(), device="cpu").state
    found = joined(state[ENTRY])
    found.pop(OURS, None)
    found.setdefault("state_dict", state["model"])
    optimizers = state["optimizers"]
    found["optimizer_states"] = [_by_number(optimizers[str(number)]) for number in range(len(optimizers))]
    return found


def _by_number(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state with torch's numbers in place of the parameters' paths."""
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer["param_groups"]:
        for path in group["params"]:
            numbers.setdefault(path, len(numbers))
        groups.append({**group, "params": [numbers[path] for path in group["params"]]})
    return {"state": {numbers[path]: one for path, one in optimizer["state"].items()}, "param_groups": groups}


class CheckpointFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The file system of these paths, for reading."""

    protocol = PROTOCOL
    cachable = False

    def exists(self, path: str, **options: Any) -> bool:
        place, run, step = parsed(path)
        return find(place, run, step) is not None

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        place, run, step = parsed(path)
        with open_checkpoint(place, run=run, step=step) as opened:
            return {"name": path, "size": opened.bytes, "type": "file"}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BytesIO:
        if mode != "rb":
            raise UsageError(
                f"{path} cannot be written as a file",
                subject=path,
                hint="a TenutoCheckpoint saves; trainer.save_checkpoint takes the path of a .ckpt file",
            )
        place, run, step = parsed(path)
        file = io.BytesIO()
        with open_checkpoint(place, run=run, step=step) as opened:
            torch.save(as_lightning(opened), file)
        file.seek(0)
        return file


def register() -> None:
    """Makes fsspec, and so Lightning, know the paths."""
    fsspec.register_implementation(PROTOCOL, CheckpointFiles, clobber=True)
