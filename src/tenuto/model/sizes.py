"""Sizes, rates and times as people write them: 500GB, 64 MiB, 200MB/s, 36h."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from tenuto.errors import UsageError

_TEXT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE | re.ASCII)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_TIME: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w|y)\s*", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}


def parse_bytes(value: int | str, what: str = "size") -> int:
    """Returns a number of bytes: a whole number as it is, text with a decimal (500GB) or binary unit (64MiB).

    Raises UsageError, which names `what`, for anything else and for nothing at all.
    """
    found = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        number, unit, binary = found.groups()
        if unit or not binary:
            nbytes = round(float(number) * float(1024 if binary else 1000) ** _POWERS[unit.lower()])
            if nbytes > 0:
                return nbytes
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise UsageError(
        f"{what}={value!r} is not a number of bytes", subject=what, hint=f'{what}="500GB", "64MiB" or 2**30'
    )


def parse_rate(value: int | str, what: str = "rate") -> int:
    """Returns bytes per second, from a whole number or text such as 200MB/s. Raises UsageError, as `parse_bytes`."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str):
        if not text.endswith("/s"):
            raise UsageError(f"{what}={value!r} is not bytes per second", subject=what, hint=f'{what}="200MB/s"')
        text = text.removesuffix("/s")
    try:
        return parse_bytes(text, what)
    except UsageError:
        raise UsageError(f"{what}={value!r} is not bytes per second", subject=what, hint=f'{what}="200MB/s"') from None


def parse_time(value: float | str, what: str = "time") -> float:
    """Returns seconds, from a number of them or text such as 90s, 15min or 15m, 36h, 3d, 2w or 1y (365 days).

    Raises UsageError, which names `what`, for anything else and for nothing at all.
    """
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        seconds = float(found[1]) * _SECONDS[found[2]]
    else:
        seconds = 0.0 if isinstance(value, (bool, str)) else float(value)
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{what}={value!r} is not a time", subject=what, hint=f'{what}="90s", "36h", "3d" or "2w"')
    return seconds


def seconds_of(created: str) -> float | None:
    """Converts a time as in manifests to seconds since 1970; None for anything else."""
    try:
        when = datetime.fromisoformat(created)
        return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
