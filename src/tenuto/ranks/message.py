"""What ranks write on the board: one line of JSON that says what it is and for whom, then bytes.

Each message names its session and topic. What a reader finds under a key and is not of its own session and topic ends
the topic: no message can be taken for another, whatever the board does with its keys.
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
    """`kind` is "data" or how it failed."""

    session: str
    round: str
    rank: int
    kind: str = DATA
    facts: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""

    def encode(self) -> bytes:
        head = {"session": self.session, "topic": self.round, "rank": self.rank, "kind": self.kind, "facts": self.facts}
        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + self.data

    def error(self, hearer: int) -> RanksError | None:
        """The error that it tells of, as `hearer` raises it."""
        kind = _FAILURES.get(self.kind)
        if kind is None:
            return None
        told = "" if hearer == self.rank else f" (told by rank {self.rank})"
        return kind(
            f"{self.facts['message']}{told}",
            subject=self.facts["phase"],
            hint=self.facts["hint"],
            ranks=tuple(self.facts["ranks"]),
            phase=self.facts["phase"],
        )


def failure(session: str, round: str, rank: int, error: RanksError) -> Message:
    """`error` as a message, to be raised on every rank."""
    facts = {"message": error.message, "phase": error.phase, "hint": error.hint, "ranks": list(error.ranks)}
    kind = next((name for kind, name in _KINDS.items() if isinstance(error, kind)), "failed")
    return Message(session, round, rank, kind, facts)


def decode(raw: bytes, session: str, round: str, rank: int | None = None) -> Message:
    """The message that `raw` is, of that session, topic and rank. Raises RanksDisagree if it is another's."""
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
        f"what was found on the ranks' board for {round!r} is {found}",
        subject=round,
        hint="does another job use the same directory or store? give each job its own",
        phase=round,
    )
