"""`tenuto scrub`: verifies what was longest not verified; for a timer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.commands.verify import print_findings, report_json
from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository
from tenuto.errors import typed

if TYPE_CHECKING:
    from tenuto.maintenance.scrub import ScrubReport


EXAMPLES = examples(
    "tenuto scrub /data/checkpoints",
    "tenuto scrub /data/checkpoints --every 7d --for 2h --limit 100MB/s",
)


def scrub(
    where: options.Where,
    *,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Read each checkpoint this often: 12h, 30d.")
    ] = "30d",
    limit: options.Limit = None,
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="End after this time; the next scrub continues.")
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Verify what was longest not verified.

    Every byte of each checkpoint that nothing has verified for --every is read, the oldest first, and the result noted
    with it. Made for a timer: what one run does not come to is left to the next. Leaves with status 12 if something is
    damaged.
    """
    from tenuto.events import Emitter
    from tenuto.maintenance.scrub import scrub as read
    from tenuto.model.sizes import parse_rate, parse_time
    from tenuto.telemetry.progress import ProgressBar

    every_s = parse_time(every, "every")
    seconds = None if duration is None else parse_time(duration, "for")
    rate = None if limit is None else parse_rate(limit, "limit")
    repo = repository(where, acts=True)
    bar = ProgressBar()
    try:
        report = read(repo, every_s=every_s, rate=rate, seconds=seconds, emitter=Emitter.of([bar]))
    finally:
        bar.close()
    found = report.verification
    if json:
        facts = {"every_s": every_s, "overdue": report.overdue, "oldest": report.oldest, "oldest_s": report.oldest_s}
        output.document("scrub", {**report_json(repo, found), **facts})
    else:
        print_findings(found)
        output.line(_summary(report))
    if found.unnoted is not None:
        output.story(f"warning: the result is not noted with every checkpoint: {found.unnoted.message}")
    if not report.ok:
        if found.damaged():
            output.story(f"hint: {typed('tenuto', 'repair', repo.url)} puts back what it finds whole elsewhere")
        raise typer.Exit(found.exit_code)
    if found.unnoted is not None:
        raise typer.Exit(found.unnoted.exit_code)


def _summary(report: ScrubReport) -> str:
    from tenuto.units import age, count, seconds, size

    found = report.verification
    damaged = len(found.damaged())
    parts = [f"{len(found.checked) - len(found.partly) - damaged} whole", f"{damaged} DAMAGED" if damaged else ""]
    parts += [f"{len(found.partly)} in part" if found.partly else ""]
    parts += [f"{count(len(found.unread), 'object')} could not be read" if found.unread else ""]
    read = f"{size(found.bytes_read)} read in {seconds(found.seconds)}"
    line = f"{count(len(found.checked), 'checkpoint')} read: {', '.join(filter(None, parts))} ({read})"
    return f"{line}; {report.overdue} still due, one for {age(report.oldest_s)}" if report.overdue else line
