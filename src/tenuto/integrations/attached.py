"""What the `attach` functions of trainers share, in whose scripts calls of their own say when to save and resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tenuto.errors import UsageError
from tenuto.policy import every
from tenuto.training.checkpointer import Checkpointer

NEVER: Final = every(steps=2**62)
"""The script says when to save."""


def refuse_decided(keywords: Mapping[str, Any], decided: Mapping[str, str]) -> None:
    """Raises UsageError for a keyword of a Checkpointer that the script decides by itself; `decided` says how."""
    for name in keywords.keys() & decided.keys():
        raise UsageError(f"{name}= has no effect here: {decided[name]}", subject=name, hint=f"leave {name}= out")


class Attached:
    """What `attach` puts in the place of a trainer's methods."""

    _checkpointer: Checkpointer | None = None

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The Checkpointer behind it; None before the first save or load."""
        return self._checkpointer

    def close(self) -> None:
        """Releases the run, as the end of the process does."""
        if self._checkpointer is not None:
            self._checkpointer.close()
