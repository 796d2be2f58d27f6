"""What ranks post to each other about a save: a word, a few values, and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.errors import CorruptionError, HoldfastError, RanksDisagree, ShardMismatch
from holdfast.model import canonical

REFUSED: Final = "refused"


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


def refusal(error: RanksDisagree | ShardMismatch, through: int) -> Post:
    """What the coordinator announces where what the ranks hold, or mean to save, makes no save. `through`: the last
    step that one of them has come to."""
    kind = "ranks" if isinstance(error, RanksDisagree) else "state"
    told = {"error": kind, "message": error.message, "subject": error.subject or "", "hint": error.hint or ""}
    return Post(REFUSED, {**told, "through": through}, b"")


def refused(post: Post, phase: str) -> HoldfastError:
    """The error of a refusal, the same on every rank."""
    message, subject, hint = (str(post.head[name]) for name in ("message", "subject", "hint"))
    if post.head["error"] == "state":
        return ShardMismatch(message, subject=subject or None, hint=hint or None)
    return RanksDisagree(message, subject=subject or None, hint=hint or None, phase=phase)
