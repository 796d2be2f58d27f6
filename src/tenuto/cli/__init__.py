"""The command `tenuto`: one file for each of its commands. Data on stdout, the story on stderr."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line (default: that of this process) and leaves by SystemExit."""
    from tenuto.cli.application import run

    run(arguments)
