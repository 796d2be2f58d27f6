"""How long ago a checkpoint was saved, by the clocks of two machines, which may disagree."""

from __future__ import annotations

import time

from tenuto.model.sizes import seconds_of
from tenuto.units import age

clock = time.time


def age_s(created: str) -> float | None:
    """Returns the seconds since a time as manifests have it; None for anything else. Negative where the clock of the
    machine that saved is ahead."""
    then = seconds_of(created)
    return None if then is None else clock() - then


def since(created: str) -> str:
    """Returns `2030-01-02 03:04 UTC (5 h ago)`, or what is known of it."""
    seconds = age_s(created)
    if seconds is None:
        return created or "an unknown time"
    ago = age(seconds)
    return f"{created[:16].replace('T', ' ')} UTC{f' ({ago} ago)' if ago else ''}"
