"""Waits for what tiers do in the background."""

from __future__ import annotations

import time
from typing import Any


def until_filled(tiers: Any, step: int) -> None:
    """Returns when every other tier has this step, or a newer one."""
    deadline = time.monotonic() + 60
    while any(one.newest is None or one.newest.step < step for one in tiers.lag()) or not tiers.lag():
        assert time.monotonic() < deadline, tiers.lag()
        time.sleep(0.01)
