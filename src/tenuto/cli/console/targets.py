"""Resolves arguments to a repository, a run and a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenuto.cli.console import output
from tenuto.errors import UsageError, typed

if TYPE_CHECKING:
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo


MAIN = "main"


def repository(where: str) -> Repo:
    """Opens a repository for reading; creates nothing. NotARepository names the nearest one."""
    from tenuto.repo.replicated.places import report_to
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    repo = Repo.open(open_store(where))
    report_to(repo.store, lambda message: output.story(f"note: {message}"))
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

    RunNotFound and CheckpointNotFound list what exists instead.
    """
    from tenuto.repo.lineage import may_be_tag, resolve

    if step.count("/") > 1 and run is None:
        run = step.partition("/")[0]
    return resolve(repo, run or MAIN if may_be_tag(step) else run_of(repo, run), step)
