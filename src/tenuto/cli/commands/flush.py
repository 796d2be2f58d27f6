"""`tenuto flush`: writes the images that dead processes left in this node's memory to the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository, run_of
from tenuto.errors import StoreDenied, typed

if TYPE_CHECKING:
    from tenuto.cli.views.memory_images import Rows
    from tenuto.maintenance.flush import Flushed, FlushPlan
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto flush /data/checkpoints",
    "tenuto flush /data/checkpoints --run gpt --dry-run",
)


def flush(
    where: options.Where,
    *,
    run: options.Run = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write what dead processes left in memory to the store.

    For a training with memory= that you do not start again here. The newest state becomes a checkpoint like any other,
    of an attempt of its own; every byte is verified first. It writes what several ranks have kept if all of them have
    their images on this node. It does not write what is older than the store, or what training has resumed from
    elsewhere since. `tenuto ls --memory` shows what there is.

    Run it as the user that the training ran as: it does not write another user's images, for root either.
    """
    from tenuto.cli.views.memory_images import judged, report_hidden_users, table
    from tenuto.engine.memory_tier.listing import images_of_others
    from tenuto.maintenance.flush import execute, plan_flush
    from tenuto.model.ids import run_key
    from tenuto.units import size

    repo = repository(where, acts=True)
    plan, other_users = plan_flush(repo, run_key(run_of(repo, run))), images_of_others()
    theirs = judged(repo, plan.run, other_users.users)
    rows = [*((one.found, one.verdict) for one in plan.images), *theirs]
    if not json:
        table(rows)
    if plan.chosen is None:
        _refuse_others(repo, plan.run, theirs)
        if not json:
            output.line(f"run {plan.run}: nothing in memory is to be written")
            report_hidden_users(other_users)
    written = None if dry_run else execute(repo, plan, report=output.story)
    if json:
        found = _json(plan, rows)
        output.document("flush", {"where": repo.url, "dry_run": dry_run, **found, "written": _written(written)})
    elif written is not None:
        output.line(f"{written.id} is written, {size(written.bytes)}")


def _refuse_others(repo: Repo, run: str, theirs: Rows) -> None:
    """Raises StoreDenied if dead processes of other users have left complete images of the run.

    Anybody who can read a repository can place an image of it in memory. If root wrote that image, it would enter the
    run as if its owner had trained it, in files that the owner could not remove.
    """
    from tenuto.cli.views.memory_images import user_name

    users = sorted({found.user for found, _ in theirs if found.footer is not None and not found.alive})
    if users:
        names = [user_name(user) for user in users]
        raise StoreDenied(
            f"run {run} was left in memory by user {', '.join(names)}, and nobody else may write it to the store",
            subject=run,
            hint=f"run it as user {names[0]}: {typed('tenuto', 'flush', repo.url, '--run', run)}",
        )


def _json(plan: FlushPlan, rows: Rows) -> dict[str, Any]:
    from tenuto.cli.views.memory_images import document

    return {
        "run": plan.run,
        "images": [document(found, verdict, rows) for found, verdict in rows],
        "chosen": plan.chosen.id if plan.chosen is not None else None,
    }


def _written(written: Flushed | None) -> dict[str, Any] | None:
    return None if written is None else {"checkpoint": written.id, "from": written.image, "bytes": written.bytes}
