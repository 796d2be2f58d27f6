"""Metrics as plain floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Each metric as a float (a tensor of one element too). UsageError names one that is no number."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            # A tensor's own item(): float() of one that requires gradients warns.
            item = getattr(value, "item", None)
            found[name] = float(item() if callable(item) else value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UsageError(
                f"the metric {name!r} is no number: {type(value).__name__}",
                subject=name,
                hint=f"log one number, such as {name}=loss.item()",
            ) from error
    return found
