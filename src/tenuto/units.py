"""Formats sizes, durations and counts for people."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size(nbytes: int) -> str:
    """Returns `nbytes` in binary units with three digits: 512 B, 1.50 KiB, 12.0 MiB, 340 GiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in _UNITS:
        value /= 1024
        if value < 999.5 or unit == _UNITS[-1]:
            break
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {unit}"


def seconds(duration: float) -> str:
    """Returns a duration in the unit that fits: 340 us, 12.5 ms, 3.10 s, 4 min 10 s, 2 h 05 min."""
    if duration < 0.0009995:
        return f"{duration * 1e6:.0f} us"
    if duration < 0.09995:
        return f"{duration * 1e3:.1f} ms"
    if duration < 59.95:
        return f"{duration:.2f} s" if duration < 9.995 else f"{duration:.1f} s"
    minutes, rest = divmod(round(duration), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def age(duration: float) -> str:
    """Returns how long ago something was, in one unit: 45 s, 12 min, 5 h, 9 days; nothing for what is yet to come."""
    if duration < -1:
        return ""
    if duration < 59.5:
        return f"{max(duration, 0):.0f} s"
    if duration < 59.5 * 60:
        return f"{duration / 60:.0f} min"
    if duration < 36 * 3600:
        return f"{duration / 3600:.0f} h"
    return f"{duration / 86400:,.0f} days"


def count(number: int, noun: str) -> str:
    """Returns `1 leaf`, `3,000 steps` or `2 batches`: plurals are regular, except that of leaf."""
    if number == 1:
        return f"1 {noun}"
    plural = noun[:-1] + "ves" if noun.endswith("leaf") else noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {plural}"


def ordinal(number: int) -> str:
    """Returns 1st, 2nd, 3rd, 4th, 11th, 21st."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"
