"""The command `tenuto`, with one module for each subcommand. Data goes to stdout, messages to stderr."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line (default: that of this process) and exits with SystemExit."""
    from tenuto.cli.application import run

    run(arguments)
