"""Events that ask for a save: `on.end()`, `on.signal()`."""

from __future__ import annotations

from holdfast.policy.saving import SavePolicy
from holdfast.policy.triggers import OnEnd, OnSignal


def end() -> SavePolicy:
    """Saves the last step: when the loop has come to its end, and on `stop()`."""
    return OnEnd()


def signal() -> SavePolicy:
    """Saves when SIGTERM, SIGUSR1 or (outside notebooks) SIGINT asks this process to leave."""
    return OnSignal()
