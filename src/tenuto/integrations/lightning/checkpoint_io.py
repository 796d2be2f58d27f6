"""The plug-in for those who keep their own checkpoint callbacks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenuto.api.open import open as open_checkpoint
from tenuto.api.save_load import load, save_made
from tenuto.concurrency.worker_threads import end_idle_threads
from tenuto.errors import UsageError
from tenuto.integrations.lightning import paths
from tenuto.integrations.lightning.trainer_state import Hparams
from tenuto.policy import keep
from tenuto.ranks.detection import Solo


class TenutoCheckpointIO:
    """Writes the checkpoints of Lightning's own callbacks through Tenuto: `Trainer(plugins=[TenutoCheckpointIO()])`.

    Each path that a ModelCheckpoint chooses becomes a directory: a repository with one checkpoint, of the last save to
    that path, written at once and whole or not at all, and verified when it is loaded. `ckpt_path="best"` and `"last"`,
    `save_top_k` and `save_last` work as before. Training waits for each save, and resumes as Lightning does: without
    random state or a position in the data. For these, and for saves in the background, use TenutoCheckpoint instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hparams = Hparams()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise UsageError(
                "TenutoCheckpointIO takes no storage_options", subject="storage_options", hint="leave them out"
            )
        place = str(path)
        if Path(place).is_symlink() or Path(place).is_file():
            Path(place).unlink()  # Lightning overwrites it
        state = {"checkpoint": self._hparams.representable(checkpoint)}
        save_made(lambda _: state, place, ranks=Solo(), keep=keep.latest(1))

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns the checkpoint, with its tensors in host memory. A `.ckpt` file is read as Lightning reads it."""
        place = str(path)
        if place.startswith(f"{paths.PROTOCOL}://"):
            where, run, step = paths.parsed(place)
            with open_checkpoint(where, run=run, step=step) as opened:
                return paths.as_lightning(opened)
        if Path(place).is_file():
            raise UsageError(
                f"{place} is a file, and TenutoCheckpointIO reads the directories that it writes",
                subject=place,
                hint="leave the plug-in out of the Trainer that resumes from it",
            )
        found: dict[str, Any] = load(place, ranks=Solo(), device="cpu").state["checkpoint"]
        return found

    def remove_checkpoint(self, path: str | Path) -> None:
        place = Path(path)
        if place.is_symlink() or place.is_file():
            place.unlink()
        elif (place / "tenuto.json").is_file():
            shutil.rmtree(place)

    def teardown(self) -> None:
        end_idle_threads()
