"""`tenuto promote`: makes a copy or another location the primary, since the primary is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.errors import typed

if TYPE_CHECKING:
    from tenuto.maintenance.copy_record import PromotePlan


EXAMPLES = examples(
    "tenuto promote /backup/checkpoints",
    "tenuto promote s3://elsewhere/checkpoints --dry-run",
)


def promote(
    where: options.Where,
    *,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Make a copy the primary, when the primary is lost.

    WHERE is a copy that `tenuto replicate` has made, or a mirror. Refuses while the primary answers. From then on
    training can resume in WHERE. If the old primary returns, remove it, or keep it apart: both have one identity,
    and each its own line of training.
    """
    from tenuto.maintenance import copy_record

    repo = repository(where)
    plan = copy_record.plan_promote(repo)
    if not json:
        output.line(_words(plan))
    if not dry_run:
        question = f"Make {plan.where} the primary? Be sure that nothing trains in {plan.lost} any more."
        if not output.agreed(question, yes=yes):
            return
        copy_record.promote(repo)
    if json:
        body = {"where": plan.where, "lost": plan.lost, "why": plan.why, "newest": list(plan.newest)}
        output.document("promote", {**body, "dry_run": dry_run})
    elif not dry_run:
        output.line(f"{plan.where} is the primary now")
        output.story(f"hint: {typed('tenuto', 'ls', plan.where)}; training resumes there from the newest")


def _words(plan: PromotePlan) -> str:
    newest = ", ".join(map(str, plan.newest)) or "none"
    return f"primary so far: {plan.lost} (lost: {plan.why})\nnewest complete in {plan.where}: {newest}"
