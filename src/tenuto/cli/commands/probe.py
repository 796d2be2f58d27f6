"""`tenuto probe`: measures what a place can do, and keeps the result for whoever opens it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.output import Columns

if TYPE_CHECKING:
    from tenuto.bench.probe import Probe

EXAMPLES = examples(
    "tenuto probe /shared/checkpoints",
    "tenuto probe s3://bucket/checkpoints --seconds 60",
)


def probe(
    where: Annotated[str, typer.Argument(metavar="WHERE", help="A directory, or a URL as training is given it.")],
    *,
    limit_s: Annotated[
        float, typer.Option("--seconds", metavar="S", min=1, max=3600, help="How long it may take.")
    ] = 20,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure what a location can do, before you use it.

    Whether it can decide who was first, how soon others see what was put, latency, and bandwidth by size and number of
    requests. Puts small and large objects there and removes them, also when interrupted. The result is kept in your
    cache directory: reads from an object store then use the requests that were found best.
    """
    from tenuto.bench.probe import Prober
    from tenuto.cli.commands.bench import ended_by_signals, show_progress
    from tenuto.errors import UsageError, typed
    from tenuto.store import probes
    from tenuto.store.registry import open_store

    store = open_store(where)
    directory = Path(store.url) if os.path.isabs(store.url) else None
    if directory is not None and not directory.is_dir():
        raise UsageError(f"{where} is not a directory", subject=where, hint=typed("mkdir", "-p", where))
    with ended_by_signals():
        prober = Prober(
            store, lambda: open_store(where), directory=directory, limit_s=limit_s, on_activity=show_progress
        )
        found = prober.run()
    document = found.document()
    try:
        kept = probes.keep(found.url, document)
    except OSError as error:
        output.story(f"the result could not be kept: {error}")
    else:
        output.story(f"kept as {kept}")
    if json:
        output.document("probe", document)
    else:
        show(found)


def show(found: Probe) -> None:
    from tenuto.bench.probe import PARALLEL, SIZES, rows, warnings
    from tenuto.units import size

    output.line(found.url)
    output.line(output.rows(list(rows(found))))
    speeds = {(cell.parallel, cell.nbytes): f"{_speed(cell.put)} / {_speed(cell.get)}" for cell in found.cells}
    if speeds:
        output.line("\nput / get, by size and requests at a time")
        table = Columns(("", *map(str, PARALLEL)), right=frozenset(map(str, PARALLEL)))
        for nbytes in SIZES:
            table.add(size(nbytes), *(speeds.get((parallel, nbytes), "-") for parallel in PARALLEL))
        table.print()
    told = warnings(found)
    if told:
        output.line("\nwhat to look at")
        output.line(output.rows([("-", text) for text in told]))


def _speed(bytes_per_s: float) -> str:
    from tenuto.units import size

    return f"{size(round(bytes_per_s))}/s"
