"""Arguments and options that several commands share."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from tenuto.errors import UsageError

Where = Annotated[
    str, typer.Argument(metavar="WHERE", help="The repository: a directory or a URL.", show_default=False)
]
Run = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="The run. Not needed where there is only one, or one called main."),
]
OnlyRun = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run.")]
Step = Annotated[
    str,
    typer.Option("--step", metavar="STEP", help="A step, latest, a tag, or attempt/step such as a0007/500."),
]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A step, a tag, attempt/step such as a0007/500, or run/attempt/step.",
        show_default=False,
    ),
]
Checkpoints = Annotated[
    list[str],
    typer.Argument(
        metavar="CHECKPOINT...", help="A step, or attempt/step (a0007/500), or run/attempt/step.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and do nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Needed where there is no terminal to ask on.")]


def grace_seconds(hours: float) -> float:
    """Returns --grace in seconds. Raises UsageError for infinities and NaN, which the minimum does not reject."""
    seconds = hours * 3600.0
    if not math.isfinite(seconds):
        raise UsageError(f"--grace {hours:g} is no duration that can pass", subject="--grace", hint="--grace 24")
    return seconds
