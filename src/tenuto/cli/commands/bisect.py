"""`tenuto bisect`: finds the first checkpoint for which something holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository
from tenuto.errors import CheckpointNotFound, UsageError, typed

if TYPE_CHECKING:
    from tenuto.history.bisect import Test, Trial

EXAMPLES = examples(
    'tenuto bisect /data/checkpoints --where "loss > 3"',
    "tenuto bisect /data/checkpoints --nan --leaf 'optimizer/*'",
    "tenuto bisect /data/checkpoints --good 500 -- python evaluate.py {where} {step}",
)


def bisect(
    where: options.Where,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- CMD...]", help="Exit status 0: does not hold; 125: skip; 1 to 127: holds.", show_default=False
        ),
    ] = None,
    *,
    run: options.Run = None,
    good: Annotated[
        str | None, typer.Option("--good", metavar="STEP", help="Where to begin. [default: the oldest on the line]")
    ] = None,
    bad: Annotated[str, typer.Option("--bad", metavar="STEP", help="Where to end.")] = "latest",
    condition: Annotated[
        str | None, typer.Option("--where", metavar="CONDITION", help='Such as "loss > 3", over metrics and fields.')
    ] = None,
    nan: Annotated[bool, typer.Option("--nan", help="Whether a leaf has NaN; every byte is verified.")] = False,
    leaf: Annotated[str | None, typer.Option("--leaf", metavar="GLOB", help="With --nan: only these leaves.")] = None,
    linear: Annotated[bool, typer.Option("--linear", help="Ask every checkpoint, oldest first.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find the first checkpoint for which something holds.

    Halves the line of training that leads to the latest checkpoint (or to --bad), and so assumes that what holds once
    holds from then on. CMD leaves with 0 where all is well, with 1 to 127 where it holds, and with 125 where it cannot
    tell. {where} and {step} in its words are replaced; it finds the same in TENUTO_WHERE and TENUTO_STEP.
    """
    from tenuto.history import bisect as history

    repo = repository(where, acts=True)
    example = typed("tenuto", "bisect", where, "--where", "loss > 3")
    if sum((bool(command), condition is not None, nan)) != 1:
        raise UsageError("what to look for is one of --where, --nan and a command after `--`", hint=example)
    if leaf is not None and not nan:
        raise UsageError("--leaf goes with --nan", subject="--leaf", hint=typed("tenuto", "bisect", where, "--nan"))
    test: Test
    if command:
        test = history.by_command(repo, command)
    elif condition is not None:
        test = history.by_query(repo, condition)
    else:
        test = history.by_nan(repo, leaf)
    start, end = None if good is None else checkpoint(repo, run, good), checkpoint(repo, run, bad)
    line = history.line_between(repo, end.run if run is None else run, start, end)
    if not linear and len(line) > 2:
        output.story(f"{len(line)} checkpoints from {line[0]} to {line[-1]}; what holds once has to hold from then on")
    found = history.bisect(line, test, linear=linear, tried=_show)
    if found.first is None:
        raise CheckpointNotFound(
            f"it holds for none of the {len(found.trials)} checkpoints asked, from {line[0]} to {line[-1]}",
            subject=str(line[-1]),
            hint="--linear asks every checkpoint, where it does not hold from then on",
        )
    if json:
        body = {
            "where": repo.url,
            "first": found.first,
            "last_good": found.last_good,
            "unsure": list(found.unsure),
            "line": found.line,
            "trials": [{"checkpoint": one.id, "verdict": one.verdict, "why": one.why} for one in found.trials],
        }
        output.document("bisect", body)
        return
    before = f"; {found.last_good} is the last for which it does not" if found.last_good else ", the oldest asked"
    output.line(f"{found.first} is the first for which it holds{before}")
    if found.unsure:
        output.line(f"or one before it that was skipped: {', '.join(map(str, found.unsure))}")


def _show(trial: Trial, left: int) -> None:
    words = {"good": "does not hold", "bad": "holds", "skip": "skipped"}
    output.story(f"{trial.id}: {words[trial.verdict]} ({trial.why}); {left} in question")
