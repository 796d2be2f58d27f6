"""`tenuto keep`: applies a keep policy to a run that no process is training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository, run_of
from tenuto.cli.console.output import Columns, agreed, print_grace_of_trash
from tenuto.errors import UsageError

if TYPE_CHECKING:
    from tenuto.maintenance.retention import RetentionPlan
    from tenuto.model.ids import CheckpointId
    from tenuto.policy.keep import KeepPolicy
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto keep /data/checkpoints --latest 3 --dry-run",
    "tenuto keep /data/checkpoints --run gpt --latest 1 --best 2:val_loss:min --every-steps 1000",
    "tenuto keep /data/checkpoints --latest 1 --now     # the disk is full",
)
BEST = "N:METRIC[:MODE]"


def keep(
    where: options.Where,
    *,
    run: options.Run = None,
    latest: Annotated[int | None, typer.Option("--latest", metavar="N", help="Keep the newest N.")] = None,
    best: Annotated[
        list[str] | None,
        typer.Option(
            "--best", metavar=BEST, help="Keep the N best by METRIC; MODE is min or max, else what training recorded."
        ),
    ] = None,
    every_steps: Annotated[
        int | None, typer.Option("--every-steps", metavar="N", help="Keep the first at or after each multiple of N.")
    ] = None,
    every_hours: Annotated[
        float | None, typer.Option("--every-hours", metavar="H", help="Keep the first of each H hours.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Free the rest at once: it cannot be brought back.")] = False,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Keep what is named; the rest goes into the trash.

    What any of the options keeps is kept; so is, always, the latest, the last one verified, and what a tag, a pin or
    another run needs. `tenuto undelete` brings the rest back for 24 h; with --now it is freed at once, and there is no
    way back. Refuses a run that a process trains now: that training's `keep` does this after each save.
    """
    from tenuto.maintenance.retention import preview, retain
    from tenuto.units import count, size

    if latest is None and not best and every_steps is None and every_hours is None:
        raise UsageError("nothing says what to keep", hint="--latest 3, --best 2:val_loss:min, --every-steps 1000")
    repo = repository(where)
    name = run_of(repo, run)
    if name not in repo.runs():
        from tenuto.repo.lineage import resolve

        resolve(repo, name)  # raises, listing the existing runs
    policy = _policy(latest, _best(repo, name, best or []), every_steps, every_hours)
    plan = preview(repo, name, policy, grace="none" if now else "all")
    removed: tuple[CheckpointId, ...] = ()
    if not json:
        _print(plan)
    what = f"{count(len(plan.dropped), 'checkpoint')}, {size(_freed(plan))}"
    question = f"Free {what}, at once? There is no way to bring them back." if now else f"Move {what}, into the trash?"
    if not dry_run and plan.dropped and agreed(question, yes=yes):
        plan, removed = retain(repo, name, policy, grace="none" if now else "all", report=output.story)
        if not json:
            nbytes = size(sum(nbytes for id, nbytes in plan.bytes if id in removed))
            output.line(f"{count(len(removed), 'checkpoint')} {f'freed, {nbytes}' if now else 'moved into the trash'}")
            if removed and not now:
                print_grace_of_trash(repo.url)
    if json:
        output.document(
            "keep",
            {"where": repo.url, "dry_run": dry_run, "now": now, **_json(plan, policy), "removed": list(removed)},
        )


def _policy(
    latest: int | None, best: list[KeepPolicy], every_steps: int | None, every_hours: float | None
) -> KeepPolicy:
    from tenuto.policy import keep as keeping

    parts = [*([keeping.latest(latest)] if latest is not None else []), *best]
    if every_steps is not None or every_hours is not None:
        parts.append(keeping.every(steps=every_steps, hours=every_hours))
    policy = parts[0]
    for part in parts[1:]:
        policy = policy | part
    return policy


def _best(repo: Repo, run: str, texts: list[str]) -> list[KeepPolicy]:
    """Returns the policies of --best. Refuses a metric that no checkpoint has, which would keep or free the wrong ones,
    and a MODE that is none."""
    from tenuto.policy import keep as keeping
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
        mode = mode or recorded_mode(found, metric) or "min"
        policies.append(keeping.best(int(number), metric, "max" if mode == "max" else "min"))
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
