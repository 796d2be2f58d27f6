"""`tenuto replicate SRC DST`: copies to another store, once or as long as it runs, and what is said of a copy."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from tenuto.cli.console import output
from tenuto.cli.console.output import Columns
from tenuto.errors import StoreError, UsageError, typed

if TYPE_CHECKING:
    from tenuto.maintenance.compare_copy import CopyCheck
    from tenuto.maintenance.copy_elsewhere import CopyReport
    from tenuto.maintenance.copy_plan import CopyPlan
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo
    from tenuto.store.contract import Store

_SHOWN = 12
"""Checkpoints that a plan lists one by one."""
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|min|h|)")
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


def is_place(word: str) -> bool:
    """Returns whether a word is where to copy to, rather than a checkpoint: it is a URL, or looks like a path."""
    return "://" in word or word in (".", "..", "~") or word.startswith(("/", "./", "../", "~/"))


def is_destination(repo: Repo, word: str) -> bool:
    """Returns whether a word is where to copy to, where a checkpoint of `repo` may be meant as well: a plain name is a
    place unless it is a step, `latest`, `best:METRIC`, attempt/step, or a tag that there is."""
    from tenuto.repo.lineage import may_be_tag
    from tenuto.repo.refs import find_tag, is_name

    return is_place(word) or (may_be_tag(word) and not (is_name(word) and find_tag(repo, word) is not None))


def interval(text: str) -> float:
    """Returns the seconds of `30s`, `5min` or `1h`. Raises UsageError."""
    found = _DURATION.fullmatch(text.strip())
    duration = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if duration <= 0:
        raise UsageError(f"--every {text} is not a duration", subject="--every", hint="--every 30s, 5min or 1h")
    return duration


# --------------------------------------------------------------------------------------------------
# Copying.


def copy(
    repo: Repo,
    target: Store,
    *,
    run: str | None,
    ids: Sequence[CheckpointId] | None,
    prune: bool,
    read: bool,
    dry_run: bool,
    json: bool,
) -> None:
    """Plans, copies and reports; leaves with the status of what failed."""
    from tenuto.maintenance.compare_copy import check_copy
    from tenuto.maintenance.copy_plan import plan_copy
    from tenuto.maintenance.copy_record import is_copy

    damaged: Sequence[str] = ()
    if read and is_copy(target):
        with _progress() as emitter:
            damaged = check_copy(repo, target, run=run, every_byte=True, emitter=emitter).damaged
    plan = plan_copy(repo, target, run=run, ids=ids, damaged=damaged)
    if dry_run:
        _print_plan(plan, json)
        return
    with stopping() as stop:
        report = _round(repo, target, plan, prune=prune, stop=stop)
    finish(repo, target.url, report, json)


def follow(
    repo: Repo, target: Store, *, run: str | None, every_s: float, prune: bool, stop: threading.Event
) -> CopyReport:
    """Copies what is new, again and again, until `stop` is set. Returns what it has come to in all. A store that does
    not answer is asked again at the next round; what is wrong is said once, and again when it changes."""
    from tenuto.maintenance.copy_elsewhere import CopyReport
    from tenuto.maintenance.copy_plan import plan_copy

    total, said = CopyReport(), ""
    while not stop.is_set():
        words = ""
        try:
            plan = plan_copy(repo, target, run=run)
            if plan.tasks or plan.small or plan.parts or (prune and plan.removed):
                report = _round(repo, target, plan, prune=prune, stop=stop)
                total += report
                words = "; ".join(error.message for error in report.failed)
                if report.copied or report.gone or report.pruned:
                    output.story(_lag(repo, target, run, report))
            elif not said and not total.copied:
                words = "in step"
        except StoreError as error:
            words = f"{error.message}; asking again in {every_s:g} s"
        if words and words != said:
            output.story(words if words == "in step" else f"warning: {words}")
        said = words or said
        stop.wait(every_s)
    return total


def _lag(repo: Repo, target: Store, run: str | None, report: CopyReport) -> str:
    """Describes a round of `follow`, and how far the copy is behind now."""
    from tenuto.maintenance.copy_plan import plan_copy
    from tenuto.units import count, seconds, size

    behind = plan_copy(repo, target, run=run).behind
    parts = [f"{count(len(report.copied), 'checkpoint')}, {size(report.bytes)} in {seconds(report.seconds)}"]
    parts += [f"{len(report.gone)} removed meanwhile"] if report.gone else []
    parts += [f"{len(report.pruned)} pruned"] if report.pruned else []
    newest = f"{report.copied[0]}: " if report.copied else ""
    return f"{newest}{', '.join(parts)}; {f'{behind} behind' if behind else 'in step'}"


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Gives an event that SIGTERM and SIGINT set; a second SIGINT interrupts at once."""
    stop = threading.Event()
    before = {}

    def note(number: int, frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[Any]:
    from tenuto.events import Emitter
    from tenuto.telemetry.progress import ProgressBar

    bar = ProgressBar()
    try:
        yield Emitter.of([bar])
    finally:
        bar.close()


def _round(repo: Repo, target: Store, plan: CopyPlan, *, prune: bool, stop: threading.Event) -> CopyReport:
    from tenuto.maintenance.copy_elsewhere import execute

    with _progress() as emitter:
        return execute(repo, target, plan, prune=prune, emitter=emitter, stop=stop)


def _print_plan(plan: CopyPlan, json: bool) -> None:
    from tenuto.units import count, size

    if json:
        tasks = [{"checkpoint": task.id, "objects": list(task.lacks), "bytes": task.bytes} for task in plan.tasks]
        body = {"dry_run": True, "plan": tasks, "small": list(plan.small), "bytes": plan.bytes, "skipped": plan.whole}
        output.document("replicate", {"where": plan.where, "to": plan.to, **body, "removed": list(plan.removed)})
        return
    output.line(f"to {plan.to}")
    more = len(plan.tasks) - _SHOWN
    for task in plan.tasks[:_SHOWN]:
        output.line(f"  {task.id}  {size(task.bytes)}{'' if task.missed else ', to complete it'}")
    if more > 0:
        output.line(f"  and {count(more, 'older checkpoint')}")
    output.line(
        f"{count(len(plan.tasks), 'checkpoint')} to copy, {size(plan.bytes)}; {plan.whole} there already"
        + (f"; {len(plan.removed)} there that {plan.where} has removed" if plan.removed else "")
    )


def finish(repo: Repo, to: str, report: CopyReport, json: bool) -> None:
    """Prints what was copied, and leaves with the status of what failed."""
    from tenuto.units import count, seconds, size

    rate = report.bytes / report.seconds if report.seconds and report.bytes else 0.0
    if json:
        body = {
            "copied": list(report.copied),
            "skipped": report.skipped,
            "gone": list(report.gone),
            "pruned": list(report.pruned),
            "bytes": report.bytes,
            "seconds": report.seconds,
            "bytes_per_s": round(rate),
            "failed": [error.message for error in report.failed],
            "stopped": report.stopped,
        }
        output.document("replicate", {"where": repo.url, "to": to, "dry_run": False, **body})
    else:
        table = Columns(
            ("COPIED", "THERE ALREADY", "PRUNED", "FAILED", "SIZE", "TIME", "RATE"),
            right=frozenset({"COPIED", "THERE ALREADY", "PRUNED", "FAILED", "SIZE", "TIME", "RATE"}),
        )
        numbers = (len(report.copied), report.skipped, len(report.pruned), len(report.failed))
        speed = f"{size(round(rate))}/s" if rate else "-"
        table.add(*map(str, numbers), size(report.bytes), seconds(report.seconds), speed)
        table.print()
    if len(report.failed) == 1:
        output.story(f"error: {report.failed[0].message}")
    elif report.failed:
        for error in report.failed:
            output.story(f"failed: {error.message}")
        output.story(f"error: {count(len(report.failed), 'object')} could not be copied")
    if report.unlisted:
        output.story(f"note: `tenuto status` does not know of this copy: {report.unlisted}")
    if report.stopped:
        output.story(f"stopped before the end: {typed('tenuto', 'replicate', repo.url, to)} continues from here")
    if report.failed:
        hint = next((error.hint for error in report.failed if error.hint), None)
        output.story(f"hint: {hint}" if hint else f"hint: the same command tries these again: {to}")
        raise typer.Exit(max(error.exit_code for error in report.failed))


# --------------------------------------------------------------------------------------------------
# Checking.


def check(repo: Repo, target: Store, *, run: str | None, read: bool, json: bool) -> None:
    """Compares the copy, says what is wrong with it, and leaves with a status that tells it."""
    from tenuto.maintenance.compare_copy import check_copy

    with _progress() as emitter:
        found = check_copy(repo, target, run=run, every_byte=read, emitter=emitter)
    if json:
        problems = [
            {"kind": one.kind, "checkpoint": one.id, "object": one.object, "message": one.message}
            for one in found.problems
        ]
        body = {"ok": not found.exit_code, "behind": found.behind, "problems": problems, "kept": list(found.kept)}
        checked = {"checked": list(found.checked), "every_byte": read, "bytes_read": found.bytes_read}
        output.document("replicate_check", {"where": repo.url, "to": target.url, **body, **checked})
    else:
        _print_check(repo, found)
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _print_check(repo: Repo, found: CopyCheck) -> None:
    from tenuto.units import count, size

    for problem in found.problems:
        if problem.kind != "behind":
            output.line(f"{problem.kind.upper()}  {problem.object}: {problem.message}")
    behind = [str(one.id) for one in found.problems if one.kind == "behind" and one.id is not None]
    if behind:
        output.line(f"behind: {', '.join(behind[:5])}{f' and {len(behind) - 5} more' if len(behind) > 5 else ''}")
    how = "every byte read" if found.every_byte else "without the content of data files"
    kinds = [one.kind for one in found.problems]
    words = [f"{kinds.count(kind)} {kind}" for kind in ("missing", "damaged", "diverged", "unread") if kind in kinds]
    words += [f"{found.behind} behind"] if found.behind else []
    words += [f"{count(found.names_behind, 'name')} behind"] if found.names_behind else []
    kept = f", {len(found.kept)} of them removed in {found.where}" if found.kept else ""
    many = count(len(found.checked), "checkpoint")
    output.line(f"{many} in {found.to}{kept}: {', '.join(words) or 'in step'} ({size(found.bytes_read)}, {how})")
    if found.damaged:
        output.story(f"hint: {typed('tenuto', 'replicate', repo.url, found.to, '--read')} replaces what is damaged")
    elif behind or found.names_behind:
        output.story(f"hint: {typed('tenuto', 'replicate', repo.url, found.to)}")
