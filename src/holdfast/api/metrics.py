"""What `log` is given: metrics as plain floats, tags as checked names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.errors import UsageError
from holdfast.repo.refs import check_tag


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


def tag_names(tag: str | Iterable[str] | None) -> list[str]:
    """The tags, each once. UsageError names one that cannot be a tag."""
    if tag is None:
        return []
    if not isinstance(tag, (str, list, tuple, set, frozenset)):
        raise UsageError(f"tag={tag!r} is neither a name nor a list of names", subject="tag", hint='tag="baseline"')
    return list(dict.fromkeys(check_tag(name) for name in ([tag] if isinstance(tag, str) else sorted(tag))))
