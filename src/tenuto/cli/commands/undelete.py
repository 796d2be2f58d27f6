"""`tenuto undelete`: restores removed checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository, run_of
from tenuto.errors import CheckpointNotFound, typed

if TYPE_CHECKING:
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto undelete /data/checkpoints 500",
    "tenuto undelete /data/checkpoints gpt/a0002/500 --dry-run",
)


def undelete(
    where: options.Where,
    checkpoints: options.Checkpoints,
    *,
    run: options.Run = None,
    grace: Annotated[
        float, typer.Option("--grace", min=0.0, metavar="HOURS", help="The grace that `tenuto gc` is run with.")
    ] = 24.0,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Bring removed checkpoints back, every byte verified.

    Works for 24 h after the removal; the first `tenuto gc` after 25 h, or `tenuto gc --now`, frees them for good.
    `tenuto ls --trash` shows what is removed and still there.
    """
    from tenuto.maintenance.undelete import execute, plan_undelete
    from tenuto.units import count, size

    grace_s = options.grace_seconds(grace)
    repo = repository(where, acts=True)
    plans = [plan_undelete(repo, _removed(repo, run, name), grace_s=grace_s) for name in checkpoints]
    back = []
    for plan in plans:
        left = "" if plan.left_s is None else f" for {plan.left_s / 3600:,.1f} h"
        if dry_run:
            words = f"can come back{left}, {size(plan.bytes)} to be checked"
        else:
            done = execute(repo, plan)
            back.append(done)
            verified = f"{size(plan.bytes)} verified"
            unseen = f"{count(done.unseen, 'data file')} not looked at, on other nodes"
            words = f"is back, {unseen if done.unseen else verified}"
        if not json:
            output.line(f"{plan.id} {words}")
    if json:
        body = {
            "where": repo.url,
            "dry_run": dry_run,
            "plan": [{"checkpoint": plan.id, "bytes": plan.bytes, "left_s": plan.left_s} for plan in plans],
            "undeleted": [done.id for done in back],
            "unseen": sum(done.unseen for done in back),
        }
        output.document("undelete", body)


def _removed(repo: Repo, run: str | None, name: str) -> CheckpointId:
    """Returns the checkpoint in the trash that `name` means; of several with one step, that of the highest attempt."""
    from tenuto.cli.views.run_listing import listing
    from tenuto.model.ids import attempt_key

    if name.count("/") > 1 and run is None:
        run = name.partition("/")[0]
    (found,) = listing(repo, run_of(repo, run))
    gone = [row.id for row in found.rows if row.state == "removed"]
    meant = [
        row
        for row in sorted(found.rows, key=lambda row: row.state != "removed")
        if name in (str(row.id.step), f"{attempt_key(row.id.attempt)}/{row.id.step}", str(row.id))
    ]
    if meant and meant[0].state in ("removed", "closed"):
        return meant[0].id  # of one that has been freed, the plan says so
    if meant:
        raise CheckpointNotFound(
            f"{name} of run {found.run!r} is not removed", subject=name, hint=typed("tenuto", "ls", repo.url)
        )
    there = ", ".join(map(str, gone[:10])) or "nothing"
    raise CheckpointNotFound(
        f"no removed checkpoint {name} in run {found.run!r}; in the trash: {there}",
        subject=name,
        hint=typed("tenuto", "ls", repo.url),
    )
