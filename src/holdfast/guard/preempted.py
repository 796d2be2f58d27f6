"""How training leaves when a signal asked it to."""

from __future__ import annotations

import signal


class Preempted(SystemExit):
    """A signal asked this process to leave, and what was to be saved is saved.

    Not an error: uncaught, it ends the process with the exit status 128 + n that shells and schedulers know.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = int(signum)

    @property
    def signal_name(self) -> str:
        return signal_name(self.signum)

    def __reduce__(self) -> tuple[type[Preempted], tuple[int]]:
        return (type(self), (self.signum,))

    def __repr__(self) -> str:
        return f"Preempted({self.signal_name})"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
