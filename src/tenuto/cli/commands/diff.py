"""`tenuto diff`: how one checkpoint differs from another, or from a file of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint, repository
from tenuto.errors import UsageError
from tenuto.units import count, size

if TYPE_CHECKING:
    from tenuto.history.diff import Diff, LeafDiff, ValueDiff
    from tenuto.model.ids import CheckpointId


EXAMPLES = examples(
    "tenuto diff /data/checkpoints 500 600",
    "tenuto diff /data/checkpoints 500 latest --entry model --limit 50",
    "tenuto diff /data/checkpoints best:val_loss /other/run:latest",
    "tenuto diff /data/checkpoints latest model.safetensors",
)
LIMIT = 20
SHOWN_VALUES = 20


def diff(
    where: options.Where,
    first: Annotated[str, typer.Argument(metavar="A", help="A step, a tag, latest, or attempt/step.")],
    second: Annotated[
        str, typer.Argument(metavar="B", help="The same, OTHER:B of another repository, or a .safetensors file.")
    ],
    *,
    run: options.Run = None,
    entry: Annotated[
        str | None, typer.Option("--entry", metavar="PATH", help="Only what is at or below this path.")
    ] = None,
    sort: Annotated[str, typer.Option("--sort", metavar="HOW", help="By change, or by path.")] = "change",
    limit: Annotated[int, typer.Option("--limit", min=0, metavar="N", help="Leaves that are listed; 0: all.")] = LIMIT,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show how one checkpoint differs from another.

    Of each leaf that differs: the norms of both, the norm of the difference as a part of A's (REL), the largest
    difference of two values, the cosine, and the fraction of elements that differ. Then the plain values, and what the
    records of the environment and of exactness say otherwise.

    Leaves whose digests are equal are not read; of the others every byte is verified.
    """
    from tenuto.api.diff import diff as compare
    from tenuto.api.diff import is_file_of_weights
    from tenuto.events import Emitter, Progress
    from tenuto.telemetry.progress import ProgressBar

    if sort not in ("change", "path"):
        raise UsageError(f"--sort {sort} is neither change nor path", subject="--sort", hint="--sort change")
    repo = repository(where, acts=True)
    a, other, b = checkpoint(repo, run, first), None, second
    if is_file_of_weights(second):
        other = second
    elif (parts := _elsewhere(second)) is not None:
        other, b = parts
    target: CheckpointId | str = b
    if not (other is not None and is_file_of_weights(other)):
        target = checkpoint(repo if other is None else repository(other, acts=True), run, b)
    bar = ProgressBar()
    emitter = Emitter.of([bar])
    try:
        found = compare(
            repo,
            a,
            target,
            run=a.run,
            where=other,
            entry=entry,
            progress=lambda done, total: emitter.emit(Progress("compare", str(a), done, total)),
        )
    finally:
        bar.close()
    how = cast("Literal['change', 'path']", sort)
    if json:
        output.document("diff", _json(found, how))
        return
    _print(found, how, limit)


def _elsewhere(text: str) -> tuple[str, str] | None:
    """Splits OTHER:B; None for a checkpoint of the same repository. `best:METRIC` has colons of its own."""
    place, mark, rest = text.partition(":best:")
    if mark:
        return place, f"best:{rest}"
    if text.startswith("best:"):
        return None
    place, colon, step = text.rpartition(":")
    return (place, step) if colon and not step.startswith("//") else None


def _print(found: Diff, sort: Literal["change", "path"], limit: int) -> None:
    rows = _sorted(found, sort)
    output.line(f"{found.first} -> {found.second}")
    table = output.Columns(
        ("LEAF", "CHANGE", "NORM A", "NORM B", "REL", "LARGEST", "COSINE", "DIFFER"),
        right=frozenset({"NORM A", "NORM B", "REL", "LARGEST", "COSINE", "DIFFER"}),
        dispensable=("NORM B", "NORM A", "COSINE", "LARGEST"),
    )
    shown = rows[:limit] if limit else rows
    for leaf in shown:
        norms = (_number(leaf.norms[0]), _number(leaf.norms[1])) if leaf.norms else ("", "")
        differ = "" if leaf.differing is None else f"{leaf.differing:.1%}"
        table.add(
            leaf.path, _change(leaf), *norms, _number(leaf.relative), _number(leaf.largest), _cosine(leaf), differ
        )
    if shown:
        table.print()
    if len(rows) > len(shown):
        output.line(f"  and {count(len(rows) - len(shown), 'more leaf')}: --limit 0 lists all")
    same = sum(leaf.change == "same" for leaf in found.leaves)
    output.line(f"{count(len(rows), 'leaf')} differ{'s' * (len(rows) == 1)}, {same:,} the same")
    for title, values in (
        ("values", found.values),
        ("environment", found.environment),
        ("certificate", found.certificate),
    ):
        if values:
            output.line(f"\n{title}")
            output.line(output.rows([(one.path, _value(one)) for one in values[:SHOWN_VALUES]]))
            if len(values) > SHOWN_VALUES:
                output.line(f"  and {len(values) - SHOWN_VALUES:,} more: --json has all")
    output.story(f"{size(found.bytes_read)} of leaves read and verified")


def _sorted(found: Diff, sort: Literal["change", "path"]) -> list[LeafDiff]:
    rows = found.by_change()
    return sorted(rows, key=lambda leaf: leaf.path) if sort == "path" else rows


def _change(leaf: LeafDiff) -> str:
    if leaf.change == "reshaped":
        return f"{_shape(leaf.shapes[0])} -> {_shape(leaf.shapes[1])}"
    if leaf.change == "retyped":
        return f"{leaf.dtypes[0]} -> {leaf.dtypes[1]}"
    if leaf.change in ("added", "removed"):
        side = leaf.change == "added"
        return f"{leaf.change}: {leaf.dtypes[side]} {_shape(leaf.shapes[side])}"
    if leaf.nonfinite is not None and leaf.nonfinite[0] != leaf.nonfinite[1]:
        return f"NaN or infinite: {leaf.nonfinite[0]:,} -> {leaf.nonfinite[1]:,}"
    return leaf.change


def _shape(shape: tuple[int, ...] | None) -> str:
    return f"[{','.join(map(str, shape or ()))}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _rounded(value: float | None) -> float | None:
    from tenuto.history.diff import DIGITS

    return None if value is None else float(f"{value:.{DIGITS}g}")


def _cosine(leaf: LeafDiff) -> str:
    return "" if leaf.cosine is None else f"{leaf.cosine:.6f}"


def _value(one: ValueDiff) -> str:
    return f"{_short(one.before)} -> {_short(one.after)}"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:58]} …"


def _json(found: Diff, sort: Literal["change", "path"]) -> dict[str, object]:
    def values(of: tuple[ValueDiff, ...]) -> list[dict[str, object]]:
        return [{"path": one.path, "before": one.before, "after": one.after} for one in of]

    return {
        "first": found.first,
        "second": found.second,
        "same": found.same,
        "leaves_same": sum(leaf.change == "same" for leaf in found.leaves),
        "leaves": [
            {
                "path": leaf.path,
                "change": leaf.change,
                "dtypes": list(leaf.dtypes),
                "shapes": [None if shape is None else list(shape) for shape in leaf.shapes],
                "norms": None if leaf.norms is None else [_rounded(norm) for norm in leaf.norms],
                "largest": _rounded(leaf.largest),
                "relative": _rounded(leaf.relative),
                "cosine": _rounded(leaf.cosine),
                "differing": leaf.differing,
                "nonfinite": None if leaf.nonfinite is None else list(leaf.nonfinite),
            }
            for leaf in _sorted(found, sort)
        ],
        "values": values(found.values),
        "environment": values(found.environment),
        "certificate": values(found.certificate),
        "bytes_read": found.bytes_read,
    }
