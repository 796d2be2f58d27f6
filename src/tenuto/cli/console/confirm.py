"""Asks for confirmation before something is removed."""

from __future__ import annotations

import sys

from tenuto.cli.console import output
from tenuto.errors import UsageError


def agreed(question: str, *, yes: bool) -> bool:
    """Returns whether to continue: True with --yes, the person's answer on a terminal.

    Raises UsageError without either: nothing waits for an answer that cannot come, and nothing is removed without one.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError("nothing was done: there is no terminal to ask on", hint="--yes does it without asking")
    sys.stderr.write(f"{output.clean(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().casefold() in ("y", "yes"):
        return True
    output.story("nothing was done")
    return False
