"""`holdfast flush`: writes what dead processes left in this node's memory to the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.cli import options, output
from holdfast.cli.exitcodes import examples
from holdfast.cli.places import repository, run_of

if TYPE_CHECKING:
    from holdfast.upkeep.flush import Flushed, FlushPlan

EXAMPLES = examples(
    "holdfast flush /data/checkpoints",
    "holdfast flush /data/checkpoints --run gpt --dry-run",
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

    For a training with memory=, that is not to be started again here. The newest state becomes a checkpoint like any
    other, of an attempt of its own; every byte is verified first. What several ranks have kept is written where all of
    them have their images on this node. What is older than the store, or what training has
    gone on from elsewhere since, is not written. `holdfast ls --memory` shows what there is.
    """
    from holdfast.model.names import run_key
    from holdfast.report.measures import size
    from holdfast.upkeep.flush import execute, plan_flush

    repo = repository(where)
    plan = plan_flush(repo, run_key(run_of(repo, run)))
    if not json:
        _print(plan)
    written = None if dry_run else execute(repo, plan, report=output.story)
    if json:
        output.document("flush", {"where": repo.url, "dry_run": dry_run, **_json(plan), "written": _written(written)})
    elif written is not None:
        output.line(f"{written.id} is written, {size(written.bytes)}")


def _print(plan: FlushPlan) -> None:
    from holdfast.cli.images import table

    table([(judged.found, judged.verdict) for judged in plan.images])
    if plan.chosen is None:
        output.line(f"run {plan.run}: nothing in memory is to be written")


def _json(plan: FlushPlan) -> dict[str, Any]:
    from holdfast.cli.images import document

    rows = [(judged.found, judged.verdict) for judged in plan.images]
    return {
        "run": plan.run,
        "images": [document(found, verdict, rows) for found, verdict in rows],
        "chosen": plan.chosen.id if plan.chosen is not None else None,
    }


def _written(written: Flushed | None) -> dict[str, Any] | None:
    return None if written is None else {"checkpoint": written.id, "from": written.image, "bytes": written.bytes}
