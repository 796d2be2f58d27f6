"""Sizes and rates as people write them: 500GB, 64 MiB, 200MB/s."""

from __future__ import annotations

import re
from typing import Final

from tenuto.errors import UsageError

_TEXT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE | re.ASCII)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


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
