"""A Checkpointer with the names of `tf.train.CheckpointManager`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tenuto.api.repository import Repository
from tenuto.integrations.tensorflow.trackable import trackable
from tenuto.policy import every, keep
from tenuto.store.contract import Where
from tenuto.training.checkpointer import Checkpointer


class CheckpointManager:
    """Stands for `tf.train.CheckpointManager(checkpoint, directory, max_to_keep)`: saves in the background, and
    verifies what it restores.

    - `checkpoint`: a `tf.train.Checkpoint`, or anything that `trackable` takes.
    - `max_to_keep`: None keeps all.
    - `init_fn`: called by `restore_or_initialize` where there is nothing to restore.
    - all other keywords: as for `tenuto.Checkpointer`.

    Use it in a `with` block, or call `close` at the end: the last save is written in the background.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: Where,
        max_to_keep: int | None = 3,
        *,
        init_fn: Callable[[], object] | None = None,
        partial: bool = False,
        **options: Any,
    ) -> None:
        self.checkpoint = checkpoint
        self.directory = directory
        self._init = init_fn
        self._run = options.get("run", "main")
        self._checkpointer = Checkpointer(
            directory,
            {"checkpoint": trackable(checkpoint, partial=partial)},
            save=every(steps=1),
            keep=keep.all() if max_to_keep is None else keep.latest(max_to_keep),
            **options,
        )

    def restore_or_initialize(self) -> str | None:
        """Restores the newest whole checkpoint and returns its name; without one calls `init_fn` and returns None."""
        restored = self._checkpointer.restore()
        if restored is not None:
            return str(restored.checkpoint.id)
        if self._init is not None:
            self._init()
        return None

    def save(self, checkpoint_number: int | None = None) -> int:
        """Saves the variables as they are now, under a number above the last one (by default the next), which it
        returns."""
        self._checkpointer.step_done(None if checkpoint_number is None else int(checkpoint_number))
        return self._checkpointer.step

    @property
    def latest_checkpoint(self) -> str | None:
        """The name of the newest committed checkpoint."""
        found = Repository(self.directory).latest(self._run)
        return None if found is None else str(found)

    @property
    def checkpoints(self) -> list[str]:
        """Names of those that there are, oldest first."""
        return [str(one) for one in sorted(Repository(self.directory).checkpoints(self._run))]

    def close(self) -> None:
        """Waits for the save in flight, and gives the run back."""
        self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpointer.close(failed=error)
