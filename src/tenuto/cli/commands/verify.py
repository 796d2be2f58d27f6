"""`tenuto verify`: reads everything and compares it with what was saved."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository
from tenuto.errors import UsageError, typed
from tenuto.printable import clean

if TYPE_CHECKING:
    from tenuto.maintenance.findings import Finding
    from tenuto.maintenance.verify import Parts, VerifyPlan, VerifyReport
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto verify /data/checkpoints",
    "tenuto verify /data/checkpoints --run gpt --step latest",
    "tenuto verify /data/checkpoints --structure        # fast: sizes and headers only",
    "tenuto verify /data/checkpoints --note             # let retention know what is whole",
    "tenuto verify /data/checkpoints --read 5% --note   # what was longest not read",
)
DAMAGED = 12


def verify(
    where: options.Where,
    *,
    run: options.OnlyRun = None,
    step: Annotated[
        str | None,
        typer.Option(
            "--step", metavar="STEP", help="Only this one: a step, latest, a tag, or attempt/step such as a0007/500."
        ),
    ] = None,
    structure: Annotated[
        bool, typer.Option("--structure", help="Only that every object is there, with its length and header.")
    ] = False,
    note: Annotated[
        bool, typer.Option("--note", help="Note the result with each checkpoint; needs permission to write.")
    ] = False,
    read: options.Read = "all",
    limit: options.Limit = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a verification that was interrupted.")] = False,
    signed_by: Annotated[
        list[str] | None,
        typer.Option("--signed-by", metavar="FILE", help="Also that one of these public keys has signed it."),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Read every byte and compare it with what was saved.

    Without --run and --step it reads everything in the repository. It names damage by leaf, object and offset, and
    leaves with status 12.
    """
    from tenuto.events import Emitter
    from tenuto.maintenance.reading import parse_amount
    from tenuto.maintenance.verify import execute, plan_parts, plan_verify
    from tenuto.model.sizes import parse_rate
    from tenuto.telemetry.progress import ProgressBar

    if note and structure:
        raise UsageError("--note needs every byte read", subject="--note", hint="leave --structure out")
    trusted = _public_keys(signed_by, structure)
    amount, rate = parse_amount(read), None if limit is None else parse_rate(limit, "limit")
    if structure and (amount is not None or rate is not None or resume):
        raise UsageError(
            "--structure reads no data files", subject="--structure", hint="leave --read, --limit and --resume out"
        )
    if amount is not None and (resume or trusted):
        other = "--resume" if resume else "--signed-by"
        raise UsageError(f"{other} needs every byte read", subject=other, hint="leave --read out")
    repo = repository(where, acts=True)
    plan = plan_verify(repo, _ids(repo, run, step), every_byte=not structure, listed=step is None)
    # Of a single checkpoint nothing is kept for later, unless a part of it is asked for.
    in_parts = not structure and (step is None or amount is not None or rate is not None or resume)
    parts = plan_parts(repo, plan, amount=amount, rate=rate, resume=resume) if in_parts else None
    output.story(_plan_words(plan, parts, read))
    bar = ProgressBar()
    try:
        report = execute(repo, plan, emitter=Emitter.of([bar]), note=note, parts=parts)
    finally:
        bar.close()
    report = replace(report, findings=(*report.findings, *_unsigned(repo, report, trusted)))
    if json:
        output.document("verify", report_json(repo, report))
    else:
        _print(report)
        if trusted and report.ok and report.checked:
            output.line("signed: every byte, by a key that was given")
    unnoted = report.unnoted
    if unnoted is not None and report.ok and not json:
        raise unnoted
    if unnoted is not None:
        output.story(f"warning: the result is not noted with every checkpoint: {unnoted.message}")
    if not report.ok:
        _hint(repo, report, noted=note)
        raise typer.Exit(report.exit_code)
    if unnoted is not None:
        raise typer.Exit(unnoted.exit_code)  # the JSON document is already printed, and there must be only one


def _public_keys(files: list[str] | None, structure: bool) -> list[str]:
    from tenuto.seal.signing import read_public

    if files and structure:
        raise UsageError("--signed-by needs every byte read", subject="--signed-by", hint="leave --structure out")
    return [read_public(file) for file in files or ()]


def _unsigned(repo: Repo, report: VerifyReport, trusted: list[str]) -> list[Finding]:
    from tenuto.maintenance.sign import check_signed

    return [finding for id in report.checked for finding in check_signed(repo, id, trusted)] if trusted else []


def _ids(repo: Repo, run: str | None, step: str | None) -> list[CheckpointId] | None:
    """Returns the checkpoints to verify; None for everything."""
    from tenuto.cli.views.run_listing import listing

    if step is not None:
        return [checkpoint(repo, run, step)]
    if run is None:
        return None
    (found,) = listing(repo, run)
    # A damaged entry may be an unfinished save: without a manifest there is nothing to verify.
    return sorted(
        row.id for row in found.rows if row.state == "committed" or (row.state == "damaged" and repo.exists(row.id))
    )


def _plan_words(plan: VerifyPlan, parts: Parts | None, read: str) -> str:
    from tenuto.units import count, size

    how = f"every byte of {size(plan.bytes)}" if plan.every_byte else "structure only"
    if parts is not None and parts.ordered:
        how = f"{read} of {size(plan.bytes)}, what was longest not read"
    elif parts is not None and parts.since is not None:
        how += ", but for what an interrupted verification has read"
    more = ", and everything else there" if plan.everything else ""
    return f"verifying {count(len(plan.ids), 'checkpoint')} at {plan.where}: {how}{more}"


def print_findings(report: VerifyReport) -> None:
    for finding in report.findings:
        output.line(_words(finding), cleaned=True)


def _print(report: VerifyReport) -> None:
    from tenuto.units import count, seconds, size

    print_findings(report)
    many = count(len(report.checked), "checkpoint")
    read = f"{size(report.bytes_read)} read in {seconds(report.seconds)}"
    if report.ok and (report.partly or report.due):
        ended = len(report.checked) - len(report.partly)
        parts = f"{ended} to the end" + (f", {len(report.partly)} in part" if report.partly else "")
        left = f", {report.due:,} not begun" if report.due else ""
        output.line(f"{many}: what was read is whole ({read}): {parts}{left}")
        return
    if report.ok and report.unseen:
        unseen = count(report.unseen, "data file")
        output.line(f"{many}: whole as far as found from here; {unseen} not looked at, on other nodes ({read})")
        return
    if report.ok:
        output.line(f"{many}: whole ({read})" if report.every_byte else f"{many}: structure whole ({read})")
        return
    if report.exit_code != DAMAGED:
        unread = f"{count(len(report.unread), 'object')} could not be read, and may be whole or not"
        output.line(f"{many}: what could be read is whole ({read}); {unread}")
        return
    damaged = report.damaged()
    wrong = count(len(report.errors), "error")
    which = f"{len(damaged)} of {many} DAMAGED" if damaged else f"{many} can be restored"
    output.line(f"{output.styled(which, 'damaged' if damaged else '', sys.stdout)}; {wrong} ({read})", cleaned=True)


def _words(finding: Finding) -> str:
    """Formats a finding: the problem, then its location."""
    where = "in the trash, and cannot be brought back: " if finding.removed and finding.severity == "error" else ""
    heads = {"error": output.styled("DAMAGED", "damaged", sys.stdout), "unread": "UNREAD "}
    head = "note   " if where else heads.get(finding.severity, "note   ")
    subject = " ".join(part for part in (str(finding.id) if finding.id else "", finding.leaf or "") if part)
    place = finding.object or ""
    if finding.offset is not None:
        place += f" at byte {finding.offset}"
    indent = " " * len("DAMAGED  ")
    about = f"{subject or place}: " if subject or place else ""
    lines = output.wrap(clean(f"{about}{where}{finding.message}"), output.width() - len(indent))
    if subject and place and place not in finding.message:
        lines.append(f"in {clean(place)}")
    return f"{head}  " + f"\n{indent}".join(lines)


def _hint(repo: Repo, report: VerifyReport, *, noted: bool) -> None:
    damaged = report.damaged()
    if not damaged:
        output.story(f"hint: {typed('tenuto', 'repair', repo.url, '--dry-run')} shows what can be repaired")
        return
    if not noted and report.every_byte:
        output.story("note: nothing was written down; with --note `tenuto ls`, retention and restores know of it")
    checked = set(report.checked)
    whole = [id for id in sorted(checked - set(damaged), reverse=True) if id.run == damaged[-1].run]
    passes = f"; restoring passes over damaged ones, as far as {whole[0]}" if whole else ""
    output.story(f"hint: {typed('tenuto', 'repair', repo.url, '--dry-run')} shows what can be repaired{passes}")


def report_json(repo: Repo, report: VerifyReport) -> dict[str, Any]:
    return {
        "where": repo.url,
        "ok": report.ok,
        "every_byte": report.every_byte,
        "bytes_read": report.bytes_read,
        "seconds": report.seconds,
        "checked": list(report.checked),
        "damaged": list(report.damaged()),
        "unseen": report.unseen,
        "unread": len(report.unread),
        "in_part": list(report.partly),
        "not_begun": report.due,
        "not_noted": None if report.unnoted is None else report.unnoted.message,
        "findings": [
            {
                "checkpoint": finding.id,
                "severity": finding.severity,
                "message": finding.message,
                "leaf": finding.leaf,
                "object": finding.object,
                "offset": finding.offset,
                "harms_restore": finding.harms_restore,
                "in_trash": finding.removed,
            }
            for finding in report.findings
        ],
    }
