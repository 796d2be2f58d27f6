"""The script's side of `certify`: it tells its steps in a file, saves where it is told to, and leaves in time."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from holdfast.errors import UsageError
from holdfast.guard.certify.order import Order
from holdfast.model.trail import Row

KILL_POLL_S: Final = 0.5
INSISTING: Final = 3
"""How often the process is asked to leave before it is ended: a script may catch what is raised."""


class EnoughSteps(SystemExit):
    """Every step that was wanted is done: this process leaves, with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Teller:
    """Appends records to the order's trail, each one write at the end of the file.

    Records: `built` (a Checkpointer stands), `row`, `saved` (the step is committed: kill me), `done`, and `refused`
    (why this script cannot be certified).
    """

    def __init__(self, order: Order, rank: int = 0, world_size: int = 1) -> None:
        self.order = order
        self._trail = order.trail_of(rank)
        self._world_size = world_size
        self._asked = 0

    def begin(self, where: str, run: str) -> None:
        """Once for each trail: a second Checkpointer, here or in another process that is the same rank, is refused."""
        try:
            os.close(os.open(self._trail + ".claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise self.refuse(
                "it builds more than one Checkpointer, and certify follows one",
                "certify a script that builds one; what several of them save has no common step to resume from",
            ) from None
        self.tell("built", where=where, run=run, ranks=self._world_size)

    def refuse(self, reason: str, hint: str) -> UsageError:
        """Tells why this script cannot be certified; the error to raise in it."""
        self.tell("refused", reason=reason, hint=hint)
        return UsageError(f"holdfast certify: {reason}", subject=self.order.where, hint=hint)

    def row(self, row: Row) -> None:
        self.tell("row", **row.record())

    def tell(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"record": kind, **fields}) + "\n"
        descriptor = os.open(self._trail, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode("ascii"))
        finally:
            os.close(descriptor)

    def await_kill(self, step: int) -> NoReturn:
        """Returns never: the step is committed, and whoever asked kills this process without a warning."""
        self.tell("saved", step=step)
        while True:
            self.check_owner()
            time.sleep(KILL_POLL_S)

    def leave(self, certificate: Mapping[str, Any], uncovered: tuple[str, ...], logged: Sequence[str]) -> None:
        """Every step is done. Raises EnoughSteps; a script that catches that and goes on is ended."""
        if self._asked == 0:
            self.tell("done", certificate=certificate, uncovered=list(uncovered), logged=list(logged))
        self._asked += 1
        if self._asked < INSISTING:
            raise EnoughSteps
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)

    def check_owner(self) -> None:
        """Ends this process, and its group, where nobody waits for it any more."""
        if self.order.orphaned():
            os.killpg(0, signal.SIGKILL)
