"""What is said before there is a session: who a rank is, and which session the coordinator offers to whom.

What cannot be read is nobody's: the board may hold anything from before.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a rank is. `nonce` is drawn for one handshake of one process; `facts` have to be equal on all ranks."""

    rank: int
    world_size: int
    facts: Mapping[str, str]
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    who: str = field(default_factory=lambda: f"{socket.gethostname()} pid {os.getpid()}")

    def encode(self) -> bytes:
        names = ("rank", "world_size", "nonce", "who")
        return json.dumps({**{name: getattr(self, name) for name in names}, "facts": dict(self.facts)}).encode()

    @classmethod
    def decode(cls, raw: bytes | None) -> Hello | None:
        """None for what is no hello: a leftover of something else."""
        try:
            values = json.loads(raw or b"null")
            return cls(
                int(values["rank"]),
                int(values["world_size"]),
                {str(name): str(value) for name, value in values["facts"].items()},
                str(values["nonce"]),
                str(values["who"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class Offer:
    """`nonces`: of the hellos that it answers, by rank; `by`: the coordinator's own."""

    session: str
    world_size: int
    by: str
    nonces: Mapping[int, str]

    def encode(self) -> bytes:
        return json.dumps(
            {"session": self.session, "world_size": self.world_size, "by": self.by, "nonces": dict(self.nonces)}
        ).encode()

    @classmethod
    def decode(cls, raw: bytes | None) -> Offer | None:
        try:
            values: dict[str, Any] = json.loads(raw or b"null")
            nonces = {int(rank): str(nonce) for rank, nonce in values["nonces"].items()}
            return cls(str(values["session"]), int(values["world_size"]), str(values["by"]), nonces)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
