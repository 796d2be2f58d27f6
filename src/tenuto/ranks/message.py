"""The messages in the key-value store: one line of JSON with the header, then bytes.

Each message names its session and round. A reader that finds another session or round under a key fails the round, so
no message is mistaken for another, whatever the store does with its keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tenuto.errors import RankFailed, RanksDisagree, RanksError, RanksMissing

_FAILURES: Final[dict[str, type[RanksError]]] = {
    "failed": RankFailed,
    "missing": RanksMissing,
    "disagree": RanksDisagree,
}
_KINDS: Final = {kind: name for name, kind in _FAILURES.items()}
DATA: Final = "data"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `kind` is "data" or the kind of failure."""

    session: str
    round: str
    rank: int
    kind: str = DATA
    facts: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""

    def encode(self) -> bytes:
        head = {"session": self.session, "topic": self.round, "rank": self.rank, "kind": self.kind, "facts": self.facts}
        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + self.data

    def error(self, reader: int) -> RanksError | None:
        """Returns the error of a failure message, as rank `hearer` raises it; None for data."""
        kind = _FAILURES.get(self.kind)
        if kind is None:
            return None
        origin = "" if reader == self.rank else f" (told by rank {self.rank})"
        return kind(
            f"{self.facts['message']}{origin}",
            subject=self.facts["phase"],
            hint=self.facts["hint"],
            ranks=tuple(self.facts["ranks"]),
            phase=self.facts["phase"],
        )


def failure(session: str, round: str, rank: int, error: RanksError) -> Message:
    """Encodes `error` as a message that every rank raises."""
    facts = {"message": error.message, "phase": error.phase, "hint": error.hint, "ranks": list(error.ranks)}
    kind = next((name for kind, name in _KINDS.items() if isinstance(error, kind)), "failed")
    return Message(session, round, rank, kind, facts)


def decode(raw: bytes, session: str, round: str, rank: int | None = None) -> Message:
    """Decodes a message. Raises RanksDisagree if it belongs to another session, round or rank."""
    head, _, data = raw.partition(b"\n")
    try:
        values = json.loads(head)
        message = Message(
            values["session"], values["topic"], int(values["rank"]), values["kind"], dict(values["facts"]), data
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _foreign(round, f"no message of Tenuto ({error})") from error
    if (message.session, message.round) != (session, round) or rank not in (None, message.rank):
        raise _foreign(round, f"a message of rank {message.rank} of session {message.session} on {message.round!r}")
    return message


def _foreign(round: str, found: str) -> RanksDisagree:
    return RanksDisagree(
        f"what the ranks' key-value store holds for {round!r} is {found}",
        subject=round,
        hint="does another job use the same directory or store? give each job its own",
        phase=round,
    )
