"""A value whose class the reading process has not offered: its type's name and what it held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tagged:
    """An enum (`value` is the member's name), a dataclass or namedtuple (`value` maps fields), or a registered type's
    plain form, restored where no value of its class was at hand. Nothing is imported by `type_name`."""

    type_name: str
    value: Any


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
