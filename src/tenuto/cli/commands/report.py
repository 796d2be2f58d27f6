"""`tenuto report`: one HTML page about a repository."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import repository

if TYPE_CHECKING:
    from tenuto.report.facts import Report


EXAMPLES = examples(
    "tenuto report /data/checkpoints",
    "tenuto report s3://bucket/llm -o /var/www/llm.html --title 'LLM, phase 2'",
    "tenuto report /data/checkpoints --json | jq '.attention'",
)
PAGE = "report.html"


def report(
    where: options.Where,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the page goes.")] = Path(PAGE),
    run: Annotated[
        list[str] | None, typer.Option("--run", metavar="RUN", help="Only this run, and others so named.")
    ] = None,
    journal: Annotated[
        list[Path] | None, typer.Option("--journal", metavar="FILE", help="Of `tenuto run`; else those known here.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="What the page is called.")] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Make a page of runs and what needs attention.

    The page is one HTML file that needs no network: what needs attention first, then runs, lines of training, metrics,
    sizes, the cost of saves, what supervision recovered from, and a table of all checkpoints with what keeps each. An
    earlier report is replaced, another file is not. Reads no data file.

    With --json the same is printed, and no page is made.
    """
    from tenuto.report.facts import report as gather
    from tenuto.report.supervision import known
    from tenuto.supervisor.journal import default_directory
    from tenuto.units import size

    repo = repository(where)
    journals = journal or known(default_directory(), repo.url)
    found = gather(repo, run, journals=journals, progress=output.story)
    if json:
        output.document("report", asdict(found))
        return
    nbytes = found.write(out, title=title)
    output.line(f"{out}  {size(nbytes)}  {_attention(found)}")


def _attention(found: Report) -> str:
    from tenuto.report.attention import all_clear
    from tenuto.units import count

    if not found.attention:
        return all_clear(found.runs)
    first = found.attention[0]
    name = f"{first.run}: " if first.run else ""
    more = f" (and {count(len(found.attention) - 1, 'more thing')})" if len(found.attention) > 1 else ""
    return f"{first.level}: {name}{first.text}{more}"
