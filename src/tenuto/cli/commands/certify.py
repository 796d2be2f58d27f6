"""`tenuto certify`: runs a training script, kills it, resumes it, and compares every step."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto import log_lines
from tenuto.cli.console import help_text, options, output
from tenuto.cli.console.signals import exit_on_signals
from tenuto.errors import TenutoError, UsageError

if TYPE_CHECKING:
    from tenuto.certify.runner import Certification, ReportProgress
    from tenuto.certify.verdict import Difference


EXAMPLES = help_text.examples(
    "tenuto certify /data/checkpoints -- python train.py",
    "tenuto certify /data/checkpoints --steps 50 --more 50 -- python train.py --lr 3e-4",
    "tenuto certify /data/checkpoints --scratch /nvme --json -- torchrun --nproc-per-node 8 train.py",
)
STATUS = {"exact": 0, "inexact": 20, "unrepeatable": 21}
SHOWN = 8
"""Differing entries to print; --json has all of them."""
BEGIN = "tenuto-certify-"


def certify(  # noqa: PLR0917 - options; nobody passes them by position
    where: Annotated[
        str, typer.Argument(metavar="WHERE", help="Where the script's Checkpointer saves.", show_default=False)
    ],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What trains, as in a shell.", show_default=False)
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps until it is saved and killed.")] = 10,
    more: Annotated[int, typer.Option("--more", min=1, metavar="N", help="Steps after that, resumed.")] = 10,
    patience: Annotated[
        float, typer.Option("--patience", min=1, metavar="SECONDS", help="How long to wait for a step, or a start.")
    ] = 600.0,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", metavar="DIR", help="Work in this directory, not next to WHERE.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave checkpoints, trails and the script's output.")] = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find out whether your own script resumes exactly.

    Runs the command for STEPS + MORE steps; runs it again, kills it with SIGKILL after a save at STEPS was committed;
    and runs it once more, which must resume and continue. Compares every leaf, plain value, random generator and
    position in the data after every step, on every rank of a job of several processes (torchrun). If they differ, runs
    it uninterrupted again, to tell a training that does not repeat itself from a resume that is not exact.

    The script's Checkpointer gets a scratch directory instead of WHERE. If the resume is exact, records that in WHERE,
    and checkpoints of the same script say `proven`. Whatever else the script does, it does.
    """
    from tenuto.certify.runner import Certifier

    with exit_on_signals(), _place(where, scratch, keep) as place:
        with _progress() as show:
            found = Certifier(_absolute(where), command, place, steps, more, patience, show).run()
        recorded = _record(_absolute(where), found)
        if json:
            kept = str(place) if keep else None
            output.document("certify", {**_document(found), "kept": kept, "recorded": recorded})
        else:
            _show(found)
        if keep:
            output.story(f"kept in {place}")
    status = STATUS[found.verdict.kind]
    if status:
        raise typer.Exit(status)


def _record(where: str, found: Certification) -> bool:
    """Records the proof, so that checkpoints of this script say "proven"; returns whether it did. A verdict that cannot
    be recorded, such as in a place that is read-only, stands all the same."""
    from tenuto.certify.proof import put_proof
    from tenuto.repo.keys import unlock
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    if found.verdict.kind != "exact" or found.script is None:
        return False
    try:
        repo = Repo.create_or_open(open_store(where))
        unlock(repo)
        put_proof(repo, found.script, saved=found.saved, last=found.last)
    except TenutoError as error:
        output.story(f"the verdict is not recorded, so checkpoints will not say `proven`: {error.message}")
        return False
    return True


def _show(found: Certification) -> None:
    output.line(_headline(found))
    _show_verdict(found)
    if found.verdict.kind == "exact":
        output.line("\nNot seen, so nothing is proven of:")
        output.line(output.rows([("-", one) for one in found.not_seen]))
    if found.unlogged:
        output.line(f"\nNot logged in these {found.last} steps, though the script's policies use it:")
        output.line(output.rows([("-", f"{metric}, by {by}") for metric, by in found.unlogged.items()]))


def _show_verdict(found: Certification) -> None:
    verdict = found.verdict
    if verdict.difference is not None:
        output.line(output.rows(list(_difference(verdict.difference, verdict.rank))))
    if verdict.cause is not None:
        output.line("\nlikely cause")
        output.line(output.rows([("", verdict.cause.words), *(("-", one) for one in verdict.cause.advice)]))
        return
    if found.uncovered:
        output.line("\nNot in `state`, and without effect on it so far; what a process ends with, it ends with:")
        output.line(output.rows([("-", one) for one in found.uncovered]))
    if verdict.unseeded:
        names = " and ".join(verdict.unseeded)
        output.line(f"\nNot seeded, and without effect on what was compared: the generators of {names}")
    on = f" on {found.ranks} ranks" if found.ranks > 1 else ""
    output.line(f"\n{found.leaves} leaves and values compared after each step{on}, in {found.seconds:.0f} s")


def _headline(found: Certification) -> str:
    span = f"step {found.saved}, killed, resumed, step {found.last}"
    match found.verdict.kind:
        case "exact":
            return f"EXACT: {span}: equal to an uninterrupted run, in every bit and after every step"
        case "inexact":
            return f"NOT EXACT: {span}: not what an uninterrupted run does"
        case _:
            return "NOT REPEATABLE: two uninterrupted runs differ, so no resume can be exact"


def _difference(difference: Difference, rank: int | None) -> Iterator[tuple[str, str]]:
    from tenuto.certify.verdict import GROUPS

    when = f"at the start, from step {difference.step}" if difference.start else f"in step {difference.step}"
    yield "first differs", when if rank is None else f"{when}, on rank {rank}"
    entries = [one for group in reversed(GROUPS) for one in difference.of(group)]
    for number, one in enumerate(entries[:SHOWN]):
        yield "" if number else "in", f"{one.path}: {_value(one.one)} and {_value(one.other)}"
    if len(entries) > SHOWN:
        yield "", f"and {len(entries) - SHOWN} more"
    same = [group for group in GROUPS if not difference.of(group)]
    if same:
        names = {"data": "position in the data", "batches": "batches", "random": "random generators", "state": "state"}
        yield "the same", ", ".join(names[group] for group in same)


def _value(text: str | None) -> str:
    """Shortens digests to their first digits: two that differ, differ there."""
    return "nothing" if text is None else re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24}\b", r"\1", text)


def _document(found: Certification) -> dict[str, Any]:
    verdict, difference, cause = found.verdict, found.verdict.difference, found.verdict.cause
    entries = (
        [
            {"path": one.path, "group": group, "values": [one.one, one.other]}
            for group, several in difference.found.items()
            for one in several
        ]
        if difference is not None
        else []
    )
    return {
        "verdict": verdict.kind,
        "exact": verdict.kind == "exact",
        "saved": found.saved,
        "last": found.last,
        "ranks": found.ranks,
        "entries": found.leaves,
        "difference": None
        if difference is None
        else {
            "step": difference.step,
            "at_start": difference.start,
            "rank": verdict.rank,
            "first": difference.first.path,
            "entries": entries,
        },
        "cause": None if cause is None else {"name": cause.name, "words": cause.words, "advice": list(cause.advice)},
        "unseeded": list(verdict.unseeded),
        "uncovered": list(found.uncovered),
        "not_seen": list(found.not_seen),
        "unlogged": dict(found.unlogged),
        "certificate": found.certificate,
        "processes": [
            {
                "name": life.name,
                "began": life.began,
                "reached": life.reached,
                "killed": life.killed,
                "seconds": life.seconds,
            }
            for life in found.runs
        ],
        "seconds": found.seconds,
    }


def _absolute(where: str) -> str:
    """Returns an absolute path, which stays valid in a script that changes its directory."""
    return where if "://" in where else os.path.abspath(os.path.expanduser(where))


@contextlib.contextmanager
def _place(where: str, scratch: Path | None, keep: bool) -> Iterator[Path]:
    """Yields an empty working directory, and removes it at the end unless it is to be kept."""
    try:
        made = tempfile.mkdtemp(prefix=BEGIN, dir=scratch if scratch is not None else _nearest_directory(where))
        place = Path(_absolute(made))  # before Python 3.12 it is relative if DIR is
    except OSError as error:
        raise UsageError(
            f"there is no place to work in: {error.strerror}",
            subject=str(scratch or where),
            hint="--scratch DIR names a directory that can be written to",
        ) from error
    try:
        yield place
    except TenutoError:
        if keep:
            output.story(f"kept in {place}")
        raise
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _nearest_directory(where: str) -> Path | None:
    """Returns the nearest existing directory above WHERE, on a disk large enough for its checkpoints.

    Returns None, for the system's temporary directory, if WHERE is no local directory or that one is not writable.
    """
    if "://" in where:
        return None
    above = Path(_absolute(where)).parent
    while not above.is_dir():
        above = above.parent
    return above if os.access(above, os.W_OK) else None


@contextlib.contextmanager
def _progress() -> Iterator[ReportProgress]:
    """Shows progress in one line on stderr; without a terminal, in one line for each run."""
    on_terminal = log_lines.is_terminal(sys.stderr)
    last_shown = ""

    def show(what: str, done: int, total: int) -> None:
        nonlocal last_shown
        if on_terminal:
            log_lines.put(f"\r\x1b[K{what}: {done} of {total} steps")
        elif what != last_shown:
            output.story(f"running, {what}: {total} steps")
        last_shown = what

    try:
        yield show
    finally:
        if on_terminal:
            log_lines.put("\r\x1b[K")
