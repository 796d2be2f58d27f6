"""Arguments and options that several commands share, and the repository, run and checkpoint that they name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import output
from tenuto.cli.console.where import VARIABLE
from tenuto.errors import UsageError, typed

if TYPE_CHECKING:
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo


Where = Annotated[
    str,
    typer.Argument(
        metavar="WHERE",
        help=f"The repository; else ${VARIABLE}, this folder, or tenuto.toml.",
        show_default=False,
    ),
]
Run = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="The run; else the only one, or the one called main."),
]
OnlyRun = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run.")]
Step = Annotated[
    str,
    typer.Option("--step", metavar="STEP", help="A step, latest, a tag, best:METRIC[:MODE], or attempt/step."),
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
Read = Annotated[
    str,
    typer.Option("--read", metavar="AMOUNT", help="A part, such as 5% or 20GiB: what was longest not read."),
]
Limit = Annotated[
    str | None, typer.Option("--limit", metavar="RATE", help="Read no faster than this, such as 100MB/s.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed without a terminal.")]


def grace_seconds(hours: float) -> float:
    """Returns --grace in seconds. Raises UsageError for infinities and NaN, which the minimum does not reject."""
    seconds = hours * 3600.0
    if not math.isfinite(seconds):
        raise UsageError(f"--grace {hours:g} is not a duration that can pass", subject="--grace", hint="--grace 24")
    return seconds


MAIN = "main"


def repository(where: str, *, acts: bool = False) -> Repo:
    """Opens a repository for reading; creates nothing. NotARepository names the nearest one. `acts`: for a command that
    acts on what it reads: in a sealed repository it goes by the key, where the environment has it."""
    from tenuto.repo.replicated.places import report_to
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    def note(message: str) -> None:
        output.story(f"note: {message}")

    repo = Repo.open(open_store(where), report=note)
    report_to(repo.store, note)
    if acts:
        from tenuto.repo.keys import unlock

        unlock(repo)
    return repo


def run_of(repo: Repo, run: str | None) -> str:
    """Returns the run that is meant: the given one, else `main`, else the only one. Raises UsageError if that is
    ambiguous."""
    if run is not None:
        return run
    runs = repo.runs()
    if MAIN in runs or not runs:
        return MAIN
    if len(runs) == 1:
        return runs[0]
    shown = ", ".join(runs[:20]) + (", …" if len(runs) > 20 else "")
    raise UsageError(f"which run? There are {shown}", subject=repo.url, hint=typed("--run", runs[0]))


def checkpoint(repo: Repo, run: str | None, step: str) -> CheckpointId:
    """Returns the checkpoint that is meant; a tag belongs to the repository and needs no run.

    RunNotFound and CheckpointNotFound list what exists instead. Where the run has saved a step more than once, says
    which one is meant.
    """
    from tenuto.repo.best import BEST
    from tenuto.repo.lineage import may_be_tag, resolve, same_step

    if step.count("/") > 1 and run is None and not step.startswith(BEST):
        run = step.partition("/")[0]
    id = resolve(repo, run or MAIN if may_be_tag(step) else run_of(repo, run), step)
    others = same_step(repo, id) if step.isdecimal() else []
    if others:
        also = ", ".join(f"a{other.attempt:04d}/{other.step}" for other in others)
        output.story(f"note: step {step} is {id}; the run has saved it more than once: {also}")
    return id
