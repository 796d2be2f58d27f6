"""What ranks post to each other about a save: a word, a few values, and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CorruptionError
from holdfast.model import canonical


@dataclass(frozen=True, slots=True)
class Post:
    kind: str
    head: Mapping[str, Any]
    data: bytes

    def encode(self) -> bytes:
        return canonical.dumps({"kind": self.kind, **self.head}) + b"\n" + self.data


def read_post(raw: bytes, rank: int) -> Post:
    """CorruptionError for what no rank of this version posts."""
    line, _, data = raw.partition(b"\n")
    head = canonical.loads(line)
    if not isinstance(head, dict) or not isinstance(kind := head.pop("kind", None), str):
        raise CorruptionError(f"rank {rank} has posted what this version does not understand", subject=f"rank {rank}")
    return Post(kind, head, data)
