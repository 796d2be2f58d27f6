"""`tenuto demo`: kills a real training job repeatedly and compares it with an undisturbed one."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import help_text, options, output
from tenuto.errors import UsageError

if TYPE_CHECKING:
    from tenuto.demo.runner import ReportProgress


EXAMPLES = help_text.examples(
    "tenuto demo",
    "tenuto demo --kills 20 --seed 7",
    "tenuto demo --storm",
    "tenuto demo --keep /tmp/demo --json",
)
LONG_STEPS = 100
"""A storm over fewer steps has fewer faults."""
DIFFERENT = 12
"""The exit status if the two final states differ."""


def demo(  # noqa: PLR0917 - options; nobody passes them by position
    kills: Annotated[
        int, typer.Option("--kills", min=1, max=10_000, metavar="N", help="How often to kill the training.")
    ] = 8,
    steps: Annotated[int, typer.Option("--steps", min=2, metavar="N", help="Steps of training.")] = 240,
    save_every: Annotated[int, typer.Option("--save-every", min=1, metavar="N", help="Steps from save to save.")] = 10,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Chooses the moments of the kills.")] = 0,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="DIR", help="Leave checkpoints, events and output in this new or empty directory."
        ),
    ] = None,
    storm: Annotated[bool, typer.Option("--storm", help="Under `tenuto run`, through eleven kinds of faults.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train a small GPT, kill it repeatedly, and compare.

    Trains on the sources of Python's own standard library, twice: once untouched, once killed with SIGKILL at random
    moments, during saves and between them, and started again: from memory, where that run keeps every step in addition
    to its saves to disk. Then compares both final states in every bit. Needs torch; takes about a minute on two cores.
    The training script, for you to copy, is tenuto/demo/train_gpt.py.
    """
    from tenuto.demo import report, runner

    if storm:
        _storm(steps, save_every, keep, json=json)
        return
    with _place(keep) as place, runner.own_shared_memory():
        runner.load_framework()
        drawn = runner.draw_kills(kills, steps=steps, save_every=save_every, seed=seed)
        plan = runner.Plan(steps, save_every, drawn, seed, memory=True)
        with _progress() as show:
            running = runner.Runner(place, show)
            outcome = running.killed(plan, running.untouched(replace(plan, memory=False)))
        if json:
            output.document("demo", {**report.document(outcome), "kept": str(keep) if keep else None})
        else:
            report.show(outcome, str(keep) if keep else None)
    if not outcome.comparison.equal:
        raise typer.Exit(DIFFERENT)
    if not outcome.kills:
        raise typer.Exit(1)


def _storm(steps: int, save_every: int, keep: Path | None, *, json: bool) -> None:
    from tenuto.demo.runner import own_shared_memory
    from tenuto.demo.storm import LEGS, SHORT, Storm

    with _place(keep) as place, own_shared_memory(), _progress() as show:
        stormed = Storm(place, steps, save_every, show, LEGS if steps >= LONG_STEPS else SHORT).run()
    if json:
        output.document("demo.storm", {**stormed.document(), "kept": str(keep) if keep else None})
    else:
        stormed.show()
    if not stormed.comparison.equal:
        raise typer.Exit(DIFFERENT)


@contextlib.contextmanager
def _place(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="tenuto-demo-") as place:
            yield Path(place)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(
            f"{keep} is there and not empty", subject=str(keep), hint="name a directory that does not exist yet"
        )
    keep.mkdir(parents=True, exist_ok=True)
    yield keep


@contextlib.contextmanager
def _progress() -> Iterator[ReportProgress]:
    """Shows progress in one line on stderr; without a terminal, in one line for each activity."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    # rich's own refresh thread is off: children are forked from this process, which must have a single thread.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        shown: tuple[str, int] = ("", -1)

        def show(what: str, done: int, total: int) -> None:
            nonlocal shown
            if (what, done) != shown:
                shown = (what, done)
                progress.update(task, description=what, completed=done, total=total)
                progress.refresh()

        yield show


def _lines() -> ReportProgress:
    last_shown = ""

    def show(what: str, done: int, total: int) -> None:
        nonlocal last_shown
        if what != last_shown:
            last_shown = what
            output.story(what)

    return show
