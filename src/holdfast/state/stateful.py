"""Objects that say their state themselves."""

from __future__ import annotations

from typing import Any


def is_stateful(value: Any) -> bool:
    """Whether the value says its state itself, and takes it back."""
    kind = type(value)
    return (
        not isinstance(value, type)
        and callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
    )
