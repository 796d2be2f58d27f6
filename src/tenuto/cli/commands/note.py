"""`tenuto note`: writes down what was learned of a checkpoint later."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.cli.console.options import checkpoint
from tenuto.errors import UsageError, typed

EXAMPLES = examples(
    'tenuto note /data/checkpoints 500 "the last one before the data was fixed"',
    "tenuto note /data/checkpoints best:loss --metric val_loss=2.1 --metric accuracy=0.83",
)


def note(
    where: options.Where,
    step: options.Checkpoint,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="What to note.", show_default=False)] = None,
    *,
    run: options.Run = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME=VALUE", help="A metric; may be repeated.")
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Note a text or metrics on a checkpoint.

    The checkpoint itself stays as it is. `show` and `log` show the text. A metric counts like one that training has
    logged, for `keep.best` and best:METRIC too; of several values of one metric the one noted last counts.
    """
    from tenuto.api.repository import Repository

    if text is None and not metric:
        raise UsageError("nothing to note", subject="TEXT", hint=typed("tenuto", "note", where, step, "a text"))
    values = dict(_value(word) for word in metric or ())
    there = Repository(where)
    id = checkpoint(there.repo, run, step)
    if text is not None:
        there.note(id, text)
    if values:
        there.add_metrics(id, values)
    if json:
        output.document("note", {"where": there.url, "checkpoint": id, "text": text, "metrics": values})
        return
    noted = [*([] if text is None else [f'"{text}"']), *(f"{name} {value:g}" for name, value in values.items())]
    output.line(f"{id}: noted {', '.join(noted)}")


def _value(word: str) -> tuple[str, float]:
    name, equals, value = word.partition("=")
    try:
        if name and equals:
            return name, float(value)
    except ValueError:
        pass
    raise UsageError(f"--metric {word} is not NAME=VALUE", subject=word, hint="--metric val_loss=2.1")
