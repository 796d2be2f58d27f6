"""Saving as often as the machine can bear: within a share of the wall time that saves may hold training up for.

What a save costs is learned from the saves before: the longest hold-up of the last few is what the next is expected to
cost. Two rules keep the share: of the time since the last save, and of all the time since the start, so that neither a
burst nor a slow drift goes beyond it. Nor is a save taken that would have to wait for one before; and none faster than
they can be written, however many may be in flight: what is taken beyond that would wait in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.errors import UsageError
from holdfast.policy.saving import Moment, SaveHistory, SavePolicy

MOST: Final = 0.5
"""Whoever lets saves take more than half of the time means something else."""


@dataclass(frozen=True, slots=True)
class EveryStall(SavePolicy):
    """At most `share` (0 to 0.5) of wall time is spent on saves in the training thread: copying, waiting for fences."""

    share: float

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        if history.waits:
            return None
        if not history.stalls_s:
            return f"the first save tells what a save costs (every stall={self._text})"
        expected = max(history.stalls_s)
        since = now.now_s - (history.started_s if history.last_saved_s is None else history.last_saved_s)
        in_all = now.now_s - history.started_s
        if expected > self.share * since or history.stalled_s + expected > self.share * in_all:
            return None
        if since < history.persist_s:
            return None
        return f"{since:.1f} s since the last save bear another {expected * 1000:.0f} ms (every stall={self._text})"

    @property
    def _text(self) -> str:
        return f"{self.share * 100:g}%"

    def __repr__(self) -> str:
        return f"every(stall={self._text!r})"


def stall_share(value: object) -> float:
    """`value` ("1%", or a part such as 0.01) as a share of wall time. UsageError where it is none."""
    hint = "give a share of wall time above 0 and at most half, such as every(stall='1%')"
    number, percent = value, False
    if isinstance(value, str) and value.strip().endswith("%"):
        number, percent = value.strip()[:-1], True
    if isinstance(value, bool | bytes) or (isinstance(value, str) and not percent):
        raise UsageError(f"every(stall={value!r}) is no share", hint=hint)
    try:
        share = float(number) / (100 if percent else 1)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"every(stall={value!r}) is no share", hint=hint) from None
    if not 0 < share <= MOST:
        raise UsageError(f"every(stall={value!r}) is no share that a training can keep", hint=hint)
    return share
