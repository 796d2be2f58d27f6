"""What a Checkpointer trains that was built while a worker imported the main module: nothing."""

from __future__ import annotations

from holdfast.api.position import Position


class Nothing:
    """The training of a disarmed Checkpointer: its loops are over before they begin."""

    def __init__(self) -> None:
        self.position = Position(None)
        self.stopping = True
        self.between = False

    def open_step(self, *, given_batch: bool = False) -> None: ...

    def complete_step(self, *, epoch_ended: bool = False, ending: bool = False) -> None: ...

    def end_epoch(self, *, ending: bool) -> None: ...

    def leave_batches(self) -> None: ...

    def leave_loop(self) -> None: ...
