"""The page of `tenuto show`: what matters of a checkpoint, and what is unusual about it, on one small screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from tenuto.cli.console import output
from tenuto.cli.console.output import NARROWEST, Columns, cells, clipped, wrap
from tenuto.cli.views.ages import since
from tenuto.cli.views.shards import Contents
from tenuto.cli.views.state_tree import TreeLine, lines
from tenuto.model.exactness import because, exactness
from tenuto.model.records import Manifest
from tenuto.printable import clean
from tenuto.record import record
from tenuto.repo.bases import data_files_of
from tenuto.units import count, size

LINES: Final = 25
"""The most lines of a page at 80 columns, its last one for what else can be shown."""
METRICS: Final = 8
LONGEST_NAME: Final = 28
OTHER_COLUMNS: Final = 24
"""What the sums and the gaps beside a name and a value take."""


@record
class _Limits:
    """How much of what has no bound is shown."""

    reasons: int
    caveats: int
    entries: int


_LIMITS: Final = (_Limits(3, 2, 8), _Limits(2, 1, 7), _Limits(1, 1, 6), _Limits(1, 0, 4))
"""Tried in this order until the page fits."""


@record
class Page:
    """What a page says. verdict: what is known of a resume. reasons, caveats: why it is not exact, or may not be.
    unusual: rows for what is not so of most checkpoints."""

    manifest: Manifest
    loaded: Contents
    place: str
    marks: Sequence[str]
    verdict: str
    reasons: Sequence[str]
    caveats: Sequence[str]
    metrics: Mapping[str, float]
    unusual: Sequence[tuple[str, str]]

    def lines(self) -> list[str]:
        """Returns the lines of the page, LINES - 1 at most unless the terminal is narrow."""
        found: list[str] = []
        for limits in _LIMITS:
            found = [*self._head(limits), "", *self._entries(limits)]
            if len(found) < LINES:
                break
        return found

    def _head(self, limits: _Limits) -> list[str]:
        head = [str(self.manifest.id)]
        marks = clean(", ".join(self.marks))
        if marks and cells(head[0]) + cells(marks) + 2 <= output.width():
            head[0] += f"  {marks}"
        elif marks:
            head += [f"  {text}" for text in wrap(marks, output.width() - 2)]
        return [*head, *output.rows(list(self._rows(limits))).split("\n")]

    def _rows(self, limits: _Limits) -> Iterator[tuple[str, str]]:
        manifest, ranks = self.manifest, len(self.manifest.indexes)
        first, *more = self.reasons or ("",)
        yield from _few("resume", [f"{self.verdict}: {first}" if first else self.verdict, *more], limits.reasons)
        yield from _few("caveats", self.caveats, limits.caveats)
        yield "step", self._progress()
        yield "saved", since(manifest.created)
        if self.metrics:
            yield "metrics", _metrics(self.metrics)
        by = f", saved by {ranks} ranks" if ranks > 1 else ""
        yield "size", f"{size(manifest.bytes)} in {count(manifest.leaves, 'tensor')}{by}"
        if how := stored(manifest):
            yield "stored", how
        if manifest.bases:
            yield "rests on", data_files_of(manifest.bases)
        yield "lies in", self.place
        yield from self.unusual

    def _progress(self) -> str:
        manifest = self.manifest
        places = [f"{name} {manifest.progress[name]}" for name in ("epoch", "batch") if name in manifest.progress]
        where = f" ({', '.join(places)})" if places else ""
        return f"{manifest.id.step}{where}{f', after {manifest.parent}' if manifest.parent else ''}"

    def _entries(self, limits: _Limits) -> list[str]:
        table = Columns(("ENTRY", "TENSORS", "SIZE", "HOLDS"), right=frozenset({"TENSORS", "SIZE"}))
        found = [*_sums(lines(self.manifest.tree, self.loaded.shared)), *self._private()]
        wide = max((cells(clipped(clean(entry[0]), LONGEST_NAME)) for entry in found), default=0)
        room = min(output.width(), output.PAGE) - wide - OTHER_COLUMNS
        most = limits.entries if len(found) > limits.entries + 1 else len(found)
        for name, tensors, nbytes, holds in found[:most]:
            sums = (f"{tensors:,}", size(nbytes)) if tensors else ("", "")
            table.add(clipped(clean(name), LONGEST_NAME), *sums, clipped(clean(holds), max(room, NARROWEST)))
        if more := found[most:]:
            sums = (f"{sum(entry[1] for entry in more):,}", size(sum(entry[2] for entry in more)))
            table.add(f"{len(more):,} more", *sums, "--leaves")
        return table.lines()

    def _private(self) -> Iterator[tuple[str, int, int, str]]:
        """Yields what belongs to single ranks, as one entry."""
        specs = [spec for index in self.loaded.indexes for spec in self.loaded.private(index)]
        ranks = len(self.loaded.indexes)
        if specs:
            holds = f"each rank's own, of {ranks}" if ranks > 1 else "random generators, position in data"
            yield "#private", len(specs), sum(spec.nbytes for spec in specs), holds


def _sums(found: Sequence[TreeLine]) -> Iterator[tuple[str, int, int, str]]:
    """Yields each entry of the state: its name, tensors, bytes, and element types or plain value."""
    number = 0

    def entry(line: TreeLine) -> int:
        nonlocal number
        number += line.depth == 0
        return number

    for _, below in groupby(found, entry):
        first, *rest = below
        leaves = [line for line in (rest if first.group else [first]) if line.bytes is not None and not line.group]
        sizes: dict[str, int] = {}
        for line in leaves:
            kind = line.what.partition(" ")[0]
            sizes[kind] = sizes.get(kind, 0) + (line.bytes or 0)
        values = sum(not line.group for line in rest) - len(leaves)
        kinds = ", ".join(sorted(sizes, key=lambda kind: -sizes[kind])) or count(values, "value")
        holds = kinds if first.group else first.what
        yield first.name or "(the whole state)", len(leaves), sum(sizes.values()), holds


def _few(name: str, phrases: Sequence[str], most: int) -> Iterator[tuple[str, str]]:
    """Yields the first few of several phrases, each in a row of its own."""
    left = len(phrases) - most
    more = [f"and {left} more: --certificate" if most else f"{left}, see --certificate"] if left > 0 else []
    for number, text in enumerate([*phrases[:most], *more]):
        yield "" if number else name, text


def _metrics(found: Mapping[str, float]) -> str:
    shown = [f"{name} {value:.6g}" for name, value in sorted(found.items())[:METRICS]]
    more = len(found) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more else [])])


def verdict_of(certificate: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    """Returns what a certificate says of a resume: the verdict, what it rests on, and the caveats."""
    caveats = [str(one) for one in certificate.get("caveats") or ()]
    otherwise = "unknown: its certificate has no verdict" if certificate else "unknown: no training has saved it"
    return exactness(certificate) or otherwise, list(because(certificate)), caveats


def stored(manifest: Manifest) -> str | None:
    """Returns in words how a checkpoint is stored: what its own data files take, what others have, and what was
    decided; None where it is stored as it is."""
    about = manifest.environment.get("encoding")
    if not isinstance(about, Mapping):
        return None
    if len(manifest.indexes) > 1:  # each rank has decided; noted is what the first one did
        return (
            f"{size(manifest.stored_bytes)} of {size(manifest.bytes)}; by rank 0: {clean(str(about.get('decision')))}"
        )
    names = ("written", "raw", "named", "delta", "rounded")
    written, raw, named, deltas, copies = (int(about.get(f"{name}_bytes", 0)) for name in names)
    parts = [f"{size(written)} of {size(raw)}"]
    if named:
        parts.append(f"{size(named)} are named in others")
    if deltas:
        parts.append(f"{size(deltas)} are differences")
    if copies:
        parts.append(f"{size(copies)} are rounded from its float32 tensors")
    return f"{', '.join(parts)}; {clean(str(about.get('decision')))}"
