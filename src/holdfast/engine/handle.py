"""The handle of one save: what it is, how far it is, and how it ended."""

from __future__ import annotations

import threading
from typing import Literal

from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.model.names import CheckpointId

State = Literal["planned", "capturing", "writing", "committed", "failed"]


class Save:
    """One save, from the decision to its end. May be asked from any thread.

    `stall_s` is how long the training thread was held by the capture; `bytes` what the image holds.
    """

    def __init__(self, id: CheckpointId, save_id: str, *, reason: str = "") -> None:
        self.id = id
        self.save_id = save_id
        self.reason = reason
        self.state: State = "planned"
        self.phase = "waiting for its turn"
        self.bytes = 0
        self.stall_s = 0.0
        self.seconds = 0.0
        self.error: HoldfastError | None = None
        self.inside_step = False
        """Set while the save waits for the end of the step that is still open: waiting for it there would never end."""
        self._ended = threading.Event()

    @property
    def step(self) -> int:
        return self.id.step

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    @property
    def committed(self) -> bool:
        return self.state == "committed"

    def wait(self, timeout: float | None = None) -> CheckpointId:
        """Returns the checkpoint's id once it is committed.

        Raises what made the save fail (SaveFailed, Superseded), DeadlineExceeded after `timeout` seconds, and
        UsageError
        inside the step whose end the save waits for.
        """
        if self.inside_step and not self.done:
            raise UsageError(
                f"the save of step {self.step} is taken at the end of the step that is still open; waiting "
                f"here would never end",
                subject=str(self.id),
                hint="call save(wait=True), or wait after the step",
            )
        if not self.join(timeout):
            raise DeadlineExceeded(
                f"the save of {self.id} has not ended within {timeout:g} s; it is {self.phase}",
                subject=str(self.id),
                hint="look at the store it writes to; `holdfast ls` shows the last committed checkpoint",
            )
        if self.error is not None:
            raise self.error
        return self.id

    def join(self, timeout: float | None = None) -> bool:
        """Whether it has ended, well or not, within `timeout` seconds."""
        return self._ended.wait(timeout)

    def end(self, error: HoldfastError | None = None) -> None:
        """Marks the save as ended; for the engine."""
        self.error = error
        self.state = "failed" if error else "committed"
        self._ended.set()

    def __repr__(self) -> str:
        return f"Save({self.id}, {self.state})"
