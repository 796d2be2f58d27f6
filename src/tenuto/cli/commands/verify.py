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

if TYPE_CHECKING:
    from tenuto.maintenance.findings import Finding
    from tenuto.maintenance.verify import VerifyPlan, VerifyReport
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo


EXAMPLES = examples(
    "tenuto verify /data/checkpoints",
    "tenuto verify /data/checkpoints --run gpt --step latest",
    "tenuto verify /data/checkpoints --structure        # fast: sizes and headers only",
    "tenuto verify /data/checkpoints --note             # let retention know what is whole",
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
    from tenuto.maintenance.verify import execute, plan_verify
    from tenuto.telemetry.progress import ProgressBar

    if note and structure:
        raise UsageError("--note needs every byte read", subject="--note", hint="leave --structure out")
    trusted = _public_keys(signed_by, structure)
    repo = repository(where)
    plan = plan_verify(repo, _ids(repo, run, step), every_byte=not structure, listed=step is None)
    output.story(_plan_words(plan))
    bar = ProgressBar()
    try:
        report = execute(repo, plan, emitter=Emitter.of([bar]), note=note)
    finally:
        bar.close()
    report = replace(report, findings=(*report.findings, *_unsigned(repo, report, trusted)))
    if json:
        output.document("verify", _json(repo, report))
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
        _hint(repo, report)
        raise typer.Exit(DAMAGED)
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


def _plan_words(plan: VerifyPlan) -> str:
    from tenuto.units import count, size

    how = f"every byte of {size(plan.bytes)}" if plan.every_byte else "structure only"
    more = ", and everything else there" if plan.everything else ""
    return f"verifying {count(len(plan.ids), 'checkpoint')} at {plan.where}: {how}{more}"


def _print(report: VerifyReport) -> None:
    from tenuto.units import count, seconds, size

    for finding in report.findings:
        output.line(_words(finding), cleaned=True)
    many = count(len(report.checked), "checkpoint")
    read = f"{size(report.bytes_read)} read in {seconds(report.seconds)}"
    if report.ok and report.unseen:
        unseen = count(report.unseen, "data file")
        output.line(f"{many}: whole as far as found from here; {unseen} not looked at, on other nodes ({read})")
        return
    if report.ok:
        output.line(f"{many}: whole ({read})" if report.every_byte else f"{many}: structure whole ({read})")
        return
    damaged = report.damaged()
    wrong = count(len(report.errors), "error")
    which = f"{len(damaged)} of {many} DAMAGED" if damaged else f"{many} can be restored"
    output.line(f"{output.styled(which, 'damaged' if damaged else '', sys.stdout)}; {wrong} ({read})", cleaned=True)


def _words(finding: Finding) -> str:
    """Formats a finding: the problem, then its location."""
    harm = finding.severity == "error"
    head = output.styled("DAMAGED", "damaged", sys.stdout) if harm else "note   "
    subject = " ".join(part for part in (str(finding.id) if finding.id else "", finding.leaf or "") if part)
    place = finding.object or ""
    if finding.offset is not None:
        place += f" at byte {finding.offset}"
    indent = " " * len("DAMAGED  ")
    about = f"{subject or place}: " if subject or place else ""
    lines = output.wrap(output.clean(f"{about}{finding.message}"), output.width() - len(indent))
    if subject and place and place not in finding.message:
        lines.append(f"in {output.clean(place)}")
    return f"{head}  " + f"\n{indent}".join(lines)


def _hint(repo: Repo, report: VerifyReport) -> None:
    damaged = report.damaged()
    if not damaged:
        return
    checked = set(report.checked)
    whole = [id for id in sorted(checked - set(damaged), reverse=True) if id.run == damaged[-1].run]
    if whole:
        output.story(f"hint: {whole[0]} is whole; restoring passes over damaged ones by itself")
    else:
        output.story(f"hint: {typed('tenuto', 'ls', repo.url)} shows what else there is")


def _json(repo: Repo, report: VerifyReport) -> dict[str, Any]:
    return {
        "where": repo.url,
        "ok": report.ok,
        "every_byte": report.every_byte,
        "bytes_read": report.bytes_read,
        "seconds": report.seconds,
        "checked": list(report.checked),
        "damaged": list(report.damaged()),
        "unseen": report.unseen,
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
            }
            for finding in report.findings
        ],
    }
