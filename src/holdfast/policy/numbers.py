"""Checks of the numbers that a policy is given."""

from __future__ import annotations

import math
import operator
from typing import SupportsIndex, cast

from holdfast.errors import UsageError


def whole_number(value: object, call: str) -> int:
    """`value` as a positive int; `call` is how the user wrote it, with {} where the value stood."""
    hint = f"give a whole number of at least 1, such as {call.format(3)}"
    if isinstance(value, bool):
        raise UsageError(f"{call.format(repr(value))} is no count", hint=hint)
    try:
        number = operator.index(cast("SupportsIndex", value))
    except TypeError:
        raise UsageError(f"{call.format(repr(value))} is no whole number", hint=hint) from None
    if number < 1:
        raise UsageError(f"{call.format(repr(value))} would never be reached", hint=hint)
    return number


def duration(value: object, call: str) -> float:
    """`value` as a positive, finite number of any unit."""
    hint = f"give a number above zero, such as {call.format(10)}"
    if isinstance(value, (bool, str, bytes)):
        raise UsageError(f"{call.format(repr(value))} is no duration", hint=hint)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{call.format(repr(value))} is no duration", hint=hint) from None
    if not math.isfinite(number) or number <= 0:
        raise UsageError(f"{call.format(repr(value))} is no duration that can pass", hint=hint)
    return number
