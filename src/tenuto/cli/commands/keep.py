"""`tenuto keep`: applies a keep policy to a run that no process is training."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository, run_of
from tenuto.cli.console.output import Columns, agreed, print_grace_of_trash
from tenuto.errors import UsageError
from tenuto.model.sizes import parse_bytes, parse_time

if TYPE_CHECKING:
    from tenuto.maintenance.retention import RetentionPlan
    from tenuto.model.ids import CheckpointId
    from tenuto.policy.keep import KeepPolicy
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto keep /data/checkpoints --latest 3 --dry-run",
    "tenuto keep /data/checkpoints --run gpt --latest 1 --best 2:val_loss:min --every-steps 1000",
    "tenuto keep /data/checkpoints --within 36h --daily 14 --monthly 12 --budget 2TB --yes     # from cron",
    "tenuto keep /data/checkpoints --latest 1 --now     # the disk is full",
)
BEST = "N:METRIC[:MODE]"
CALENDAR = "Keep the first of each, of the last N."


def keep(
    where: options.Where,
    *,
    run: options.Run = None,
    latest: Annotated[int | None, typer.Option("--latest", metavar="N", help="Keep the newest N.")] = None,
    best: Annotated[
        list[str] | None,
        typer.Option("--best", metavar=BEST, help="The N best; min or max, else as trained or by name."),
    ] = None,
    every_steps: Annotated[
        int | None, typer.Option("--every-steps", metavar="N", help="Keep the first at or after each multiple of N.")
    ] = None,
    every_hours: Annotated[
        float | None, typer.Option("--every-hours", metavar="H", help="Keep the first of each H hours.")
    ] = None,
    hourly: Annotated[int | None, typer.Option("--hourly", metavar="N", help=CALENDAR)] = None,
    daily: Annotated[int | None, typer.Option("--daily", metavar="N", help=CALENDAR)] = None,
    weekly: Annotated[int | None, typer.Option("--weekly", metavar="N", help=CALENDAR)] = None,
    monthly: Annotated[int | None, typer.Option("--monthly", metavar="N", help=CALENDAR)] = None,
    yearly: Annotated[int | None, typer.Option("--yearly", metavar="N", help=CALENDAR)] = None,
    within: Annotated[
        str | None, typer.Option("--within", metavar="TIME", help="Keep all of the last 36h, 3d or 2w.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="EVENT", help="Keep the first after each attempt, fork or rollback."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="SIZE", help="Of that, only what fits into 2TB.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Free the rest at once: it cannot be brought back.")] = False,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Keep what is named; the rest goes into the trash.

    What any of the options keeps is kept; so is, always, the latest, the last one verified, and what a tag, a pin or
    another run needs. A budget lets the least worth of it go: first the oldest milestones, then the oldest of the
    newest N, then the worst of the best. `tenuto undelete` brings the rest back for 24 h; with --now it is freed at
    once, and there is no way back. Refuses a run that a process trains now: that training's `keep` does this after each
    save.
    """
    from tenuto.maintenance.retention import preview, retain
    from tenuto.units import count, size

    options = (latest, best, every_steps, every_hours, hourly, daily, weekly, monthly, yearly, within, after, budget)
    if not any(option not in (None, []) for option in options):
        raise UsageError("nothing says what to keep", hint="--latest 3, --best 2:val_loss:min, --every-steps 1000")
    calendar = {"hourly": hourly, "daily": daily, "weekly": weekly, "monthly": monthly, "yearly": yearly}
    parts = _policies(latest, (every_steps, every_hours), calendar, within, after or [])
    nbytes = None if budget is None else parse_bytes(budget, "--budget")
    repo = repository(where, acts=True)
    name = run_of(repo, run)
    if name not in repo.runs():
        from tenuto.repo.lineage import resolve

        resolve(repo, name)  # raises, listing the existing runs
    bests = _best(repo, name, best or [])
    policy = _combined([*parts[: latest is not None], *bests, *parts[latest is not None :]], nbytes)
    plan = preview(repo, name, policy, grace="none" if now else "all")
    removed: tuple[CheckpointId, ...] = ()
    for warning in plan.warnings:
        output.story(f"warning: {warning}")
    if not json:
        _print(plan)
    what = f"{count(len(plan.dropped), 'checkpoint')}, {size(_freed(plan))}"
    question = f"Free {what}, at once? There is no way to bring them back." if now else f"Move {what}, into the trash?"
    if not dry_run and plan.dropped and agreed(question, yes=yes):
        plan, removed = retain(repo, name, policy, grace="none" if now else "all", report=output.story)
        if not json:
            freed = size(sum(taken for id, taken in plan.bytes if id in removed))
            output.line(f"{count(len(removed), 'checkpoint')} {f'freed, {freed}' if now else 'moved into the trash'}")
            if removed and not now:
                print_grace_of_trash(repo.url)
    if json:
        body = {"where": repo.url, "dry_run": dry_run, "now": now, **_json(plan, policy), "removed": list(removed)}
        output.document("keep", body)


def _policies(
    latest: int | None,
    every: tuple[int | None, float | None],
    calendar: Mapping[str, int | None],
    within: str | None,
    after: Sequence[str],
) -> list[KeepPolicy]:
    from tenuto.policy import keep as keeping

    parts = [keeping.latest(latest)] if latest is not None else []
    if every != (None, None):
        parts.append(keeping.every(steps=every[0], hours=every[1]))
    parts += [getattr(keeping, name)(last) for name, last in calendar.items() if last is not None]
    if within is not None:
        parts.append(keeping.within(hours=parse_time(within, "--within") / 3600))
    return parts + [keeping.after(event) for event in after]  # type: ignore[arg-type]  # checked there


def _combined(parts: Sequence[KeepPolicy], nbytes: int | None) -> KeepPolicy:
    """Returns all of the policies, within the budget; a budget alone is of everything."""
    from tenuto.policy import keep as keeping

    policy = functools.reduce(operator.or_, parts) if parts else keeping.all()
    return policy if nbytes is None else keeping.limit(policy, bytes=nbytes)


def _best(repo: Repo, run: str, texts: list[str]) -> list[KeepPolicy]:
    """Returns the policies of --best. Refuses a metric that no checkpoint has, which would keep or free the wrong ones,
    and a MODE that is none."""
    from tenuto.policy import keep as keeping
    from tenuto.policy.numbers import line_on_direction
    from tenuto.repo.best import check_metric, measured, recorded_mode

    found = measured(repo, run) if texts else []
    policies = []
    for text in texts:
        number, _, rest = text.partition(":")
        metric, colon, mode = rest.rpartition(":")
        if not colon or (mode not in ("min", "max") and all(metric not in one.metrics for one in found)):
            metric, mode = rest, ""
        if not number.isdecimal() or not metric:
            raise UsageError(f"--best {text} is not {BEST}", subject=text, hint="--best 2:val_loss:min")
        if mode not in ("", "min", "max"):
            raise UsageError(
                f"--best {text}: {mode!r} is neither min nor max", subject=text, hint=f"--best {number}:{metric}:min"
            )
        check_metric(found, metric, run)
        policy = keeping.best(int(number), metric, mode or recorded_mode(found, metric))  # type: ignore[arg-type]  # checked
        if isinstance(policy, keeping.Best) and policy.by_name:
            output.story(f"note: {line_on_direction(metric)}")
        policies.append(policy)
    return policies


def _freed(plan: RetentionPlan) -> int:
    return sum(nbytes for _, nbytes in plan.bytes)


def _print(plan: RetentionPlan) -> None:
    from tenuto.model.ids import attempt_key
    from tenuto.units import count, size

    nbytes = dict(plan.bytes)
    output.line(f"run {plan.run}: {plan.policy!r}")
    table = Columns(("CHECKPOINT", "VERDICT", "FREES", "REASON"), right=frozenset({"FREES"}))
    for verdict in plan.verdicts:
        freed = "" if verdict.keep else size(nbytes[verdict.id])
        table.add(
            f"{attempt_key(verdict.id.attempt)}/{verdict.id.step}",
            "kept" if verdict.keep else "goes",
            freed,
            verdict.reason,
            style="" if verdict.keep else "gone",
        )
    table.print()
    output.line(f"{count(len(plan.dropped), 'checkpoint')} of {len(plan.verdicts)} would go, {size(_freed(plan))}")


def _json(plan: RetentionPlan, policy: KeepPolicy) -> dict[str, Any]:
    nbytes = dict(plan.bytes)
    return {
        "run": plan.run,
        "policy": repr(policy),
        "warnings": list(plan.warnings),
        "bytes": _freed(plan),
        "plan": [
            {
                "checkpoint": verdict.id,
                "keep": verdict.keep,
                "reason": verdict.reason,
                "bytes": nbytes.get(verdict.id, 0),
            }
            for verdict in plan.verdicts
        ],
    }
