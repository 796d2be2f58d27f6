"""`tenuto bench`: measures a place's raw speed, saves and restores there, and how often one can save."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto import log_lines
from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.output import Columns
from tenuto.errors import UsageError
from tenuto.printable import clean

if TYPE_CHECKING:
    from tenuto.bench.figures import Figures
    from tenuto.bench.measure import Sample


EXAMPLES = examples(
    "tenuto bench /data/checkpoints                     # 1 GiB in 200 leaves",
    "tenuto bench /mnt/nfs --size 4GiB --leaves 800",
    "tenuto bench /data/new --like /data/checkpoints    # leaf for leaf the sizes of its latest",
)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT](?:i?B)?|B)?\s*", re.IGNORECASE | re.ASCII)
LARGE = 4 << 30
"""From this size on, three rounds are measured instead of five."""


def bench(
    where: Annotated[str, typer.Argument(metavar="WHERE", help="A directory on the file system to be measured.")],
    *,
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="SIZE", help="Bytes of state, such as 4GiB or 500MB. [default: 1GiB]"),
    ] = None,
    leaves: Annotated[
        int | None,
        typer.Option("--leaves", metavar="N", min=1, max=10_000_000, help="Tensors in the state. [default: 200]"),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="REPOSITORY", help="As many and as large leaves as a checkpoint has."),
    ] = None,
    run: options.Run = None,
    step: options.Step = "latest",
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            max=100,
            metavar="N",
            help="How often each is measured.  [default: 5; from 4GiB on 3]",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure what saving and restoring take in a directory.

    How long saves block training there, how long until they are durable, how long a restore takes. Writes only in a
    hidden directory of its own inside WHERE and removes it, also when interrupted. Takes twice the state's size of
    space and of memory, and refuses where that is short. --run and --step choose what --like looks at.
    """
    from tenuto.bench import figures
    from tenuto.bench.measure import measure
    from tenuto.bench.place import check_place

    sizes = _sizes(size, leaves, like, run, step)
    path = check_place(where, sum(sizes))
    with ended_by_signals():
        sample = _sample(sizes)
        found = measure(path, sample, rounds=rounds or (3 if sample.nbytes >= LARGE else 5), on_activity=show_progress)
    if json:
        output.document("bench", figures.document(found))
    else:
        _print(found)


def _sizes(size: str | None, leaves: int | None, like: str | None, run: str | None, step: str) -> Sequence[int]:
    """Returns the bytes of each of the state's leaves."""
    from tenuto.bench.measure import even_sizes

    if like is None:
        return even_sizes(parse_size(size or "1GiB"), leaves or 200)
    if size is not None or leaves is not None:
        raise UsageError(
            "--like already gives the size and the leaves", subject="--like", hint="leave --size and --leaves out"
        )
    from tenuto.cli.console.options import checkpoint, repository

    repo = repository(like)
    manifest = repo.manifest(checkpoint(repo, run, step))
    indexes = [repo.index(manifest, rank) for rank in range(len(manifest.indexes))]
    found = [int(length) for index in indexes for length in index.length if length]
    if not found:
        raise UsageError(f"{manifest.id} has no leaf with a byte in it", subject=like, hint="give --size instead")
    return found


def parse_size(text: str) -> int:
    """Parses "4GiB" or "4G" (of 1024), "4GB" (of 1000) or "1048576" bytes. Raises UsageError for anything else, or
    zero."""
    found = _SIZE.fullmatch(text)
    if found is None or not float(found[1]):
        raise UsageError(f"{text!r} is not a size", subject="--size", hint="write it as 4GiB or 500MiB")
    unit = (found[2] or "b").lower()
    thousand = 1000 if unit.endswith("b") and len(unit) == 2 else 1024
    return int(float(found[1]) * thousand ** "bkmgt".index(unit[0]))


def _sample(sizes: Sequence[int]) -> Sample:
    """Builds a state of torch tensors where torch is installed, as a training there would save."""
    output.story("making a state")
    if find_spec("torch") is not None:
        from tenuto.integrations.torch.for_commands import torch_sample

        return torch_sample(sizes)
    from tenuto.bench.measure import numpy_sample

    return numpy_sample(sizes)


def show_progress(text: str) -> None:
    """Overwrites the progress line on a terminal; prints one line each time elsewhere."""
    if log_lines.is_terminal(sys.stderr):
        log_lines.put(f"\r\x1b[K{clean(text)}")
    else:
        output.story(text)


def _print(found: Figures) -> None:
    from tenuto.bench import figures

    if log_lines.is_terminal(sys.stderr):
        log_lines.put("\r\x1b[K")
    for text in figures.heading(found):
        output.line(text)
    output.line()
    table = Columns(
        ("MEASURED", "MEDIAN", "FROM FASTEST TO SLOWEST", "SPEED"),
        right=frozenset({"MEDIAN", "SPEED"}),
        dispensable=("FROM FASTEST TO SLOWEST",),
    )
    for row in figures.rows(found):
        table.add(*row)
    table.print()
    output.line("\nwhat to expect")
    output.line(output.rows([("-", text) for text in figures.expectations(found)]))
    found_wrong = figures.warnings(found)
    if found_wrong:
        output.line("\nwhat to look at")
        output.line(output.rows([("-", text) for text in found_wrong]))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the block with an exception on SIGTERM and SIGHUP, so that written files are removed."""

    def exit_on_signal(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    caught = [signal.SIGTERM, signal.SIGHUP]
    before = [signal.signal(one, exit_on_signal) for one in caught]
    try:
        yield
    finally:
        for one, handler in zip(caught, before, strict=True):
            signal.signal(one, handler)
