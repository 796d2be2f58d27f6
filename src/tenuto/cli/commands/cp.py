"""`tenuto cp`: copies checkpoints to another run, another repository, or both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository
from tenuto.cli.views.copying import is_destination, is_place
from tenuto.errors import UsageError, typed

if TYPE_CHECKING:
    from tenuto.maintenance.checkpoint_copy import RunCopy, RunCopyPlan


EXAMPLES = examples(
    "tenuto cp /data/checkpoints 500 --to-run lower-lr",
    "tenuto cp /data/checkpoints 500 s3://team/checkpoints --to-run lower-lr",
    "tenuto cp /data/checkpoints 100 200 best ./elsewhere --dry-run",
)


def cp(
    where: options.Where,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CHECKPOINT]... [TO]", help="Steps or tags, else latest; a path or URL to copy to."),
    ] = None,
    *,
    run: options.Run = None,
    to_run: Annotated[
        str | None, typer.Option("--to-run", metavar="RUN", help="The run of the copies; else the same name.")
    ] = None,
    to_step: Annotated[
        int | None, typer.Option("--to-step", min=0, metavar="N", help="Another step for a single copy.")
    ] = None,
    stand_alone: Annotated[bool, typer.Option("--stand-alone", help="Copy the data within a repository too.")] = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Copy checkpoints under another name.

    Within a repository a copy shares all data files: it takes next to no space, and what it shares stays for as long as
    it needs it. Into another repository, which is made where there is none, every byte is copied and verified.

    A training that starts with the copies' run and repository resumes from the newest of them. All copies appear at
    once, or none. --stand-alone makes one that
    shares nothing. For a copy of a repository under the same names: `tenuto replicate`.
    """
    from tenuto.cli.console.reporting import WarningReporter
    from tenuto.events import Emitter
    from tenuto.maintenance.checkpoint_copy import execute, plan_copies
    from tenuto.telemetry.progress import ProgressBar

    names, repo = list(words or []), repository(where)
    # Without --to-run there has to be a place, so a plain name is one.
    goes = names and (is_place(names[-1]) or (to_run is None and is_destination(repo, names[-1])))
    to = names.pop() if goes else None
    if to is None and to_run is None:
        raise UsageError(
            "where shall the copies go?",
            subject="TO",
            hint=f"{typed('tenuto', 'cp', where, *names)} --to-run NEWRUN, or a repository such as ./elsewhere",
        )
    ids = [checkpoint(repo, run, name) for name in names or ["latest"]]
    plan = plan_copies(repo, ids, to=to, run=to_run, step=to_step, stand_alone=stand_alone)
    done: RunCopy | None = None
    if not dry_run:
        bar = ProgressBar()
        try:
            done = execute(repo, plan, to, emitter=Emitter.of([bar, WarningReporter()]))
        finally:
            bar.close()
    if json:
        output.document("cp", {"dry_run": dry_run, **_json(plan, done)})
    else:
        _print(plan, done)


def _print(plan: RunCopyPlan, done: RunCopy | None) -> None:
    from tenuto.units import count, seconds, size

    if done is None:
        rows = [(str(one.source), f"-> {plan.run}, step {one.step}") for one in plan.copies]
    else:
        rows = [(str(one.source), f"-> {one.id}") for one in done.checkpoints]
    output.line(output.rows(rows))
    many = count(len(plan.copies), "checkpoint")
    if plan.shares:
        what = f"{many}: no data is copied, {size(plan.shared)} are shared"
    else:
        nbytes = plan.bytes if done is None else sum(one.bytes for one in done.checkpoints)
        what = f"{many}: {size(nbytes)} {'to copy' if done is None else 'copied and verified'}, to {plan.to}"
    output.line(what + ("" if done is None else f", in {seconds(done.seconds)}"))
    if done is None:
        output.line("nothing was written" + ("; a repository would be made" if plan.creates else ""))


def _json(plan: RunCopyPlan, done: RunCopy | None) -> dict[str, Any]:
    made = () if done is None else done.checkpoints
    return {
        "where": plan.where,
        "to": plan.to,
        "run": plan.run,
        "creates": plan.creates,
        "shares": plan.shares,
        "plan": [
            {"checkpoint": one.source, "step": one.step, "bytes": one.bytes, "shared": one.shared}
            for one in plan.copies
        ],
        "copied": [
            {"checkpoint": one.id, "from": one.source, "bytes": one.bytes, "shared": one.shared, "content": one.content}
            for one in made
        ],
        "seconds": None if done is None else done.seconds,
    }
