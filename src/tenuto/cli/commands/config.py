"""`tenuto config show|check`: the effective settings, and what is wrong with a settings file."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.console import options, output
from tenuto.cli.console.help_text import examples
from tenuto.errors import UsageError, typed

if TYPE_CHECKING:
    from tenuto.training.config.document import Document

EXAMPLES = examples(
    "tenuto config show",
    "TENUTO_SAVE__STEPS=200 tenuto config show --json",
    "tenuto config check job/tenuto.toml",
)


class Action(StrEnum):
    """What to do with the settings."""

    show = "show"
    check = "check"


def config(
    action: Annotated[Action, typer.Argument(metavar="show|check", help="Print or check.", show_default=False)],
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="The settings file; else $TENUTO_CONFIG, or tenuto.toml here or above.",
            show_default=False,
        ),
    ] = None,
    *,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show the effective settings, or check a settings file.

    `show` prints what `Checkpointer.from_config` uses, and from where: a line of the file, a variable such as
    TENUTO_SAVE__STEPS, or the default. Arguments in a script override them.

    `check` names the lines of unknown keys, of values that contradict each other, and of sizes beyond this machine's
    disks. It opens no location.
    """
    from tenuto.training.config.document import FILE, VARIABLE, document, find
    from tenuto.training.config.objects import check, check_disks

    path = find(file)
    if path is None and action is Action.check:
        raise UsageError(
            f"there is no {FILE} in this folder or above it",
            subject=FILE,
            hint=f"{typed('tenuto', 'config', 'check', 'FILE')}, or set {VARIABLE}",
        )
    found = document(path, {} if action is Action.check else None)
    check(found)
    if action is Action.check:
        check_disks(found)
        _print_problems(found, as_json=json)
    else:
        found.check()
        _print_settings(found, as_json=json)


def _print_settings(found: Document, *, as_json: bool) -> None:
    if as_json:
        settings = [{"key": one.name, "value": one.value, "from": one.origin} for one in found.shown()]
        output.document("config", {"file": found.path, "settings": settings})
        return
    table = output.Columns(("KEY", "VALUE", "FROM"))
    for one in found.shown():
        table.add(one.name, one.text, one.origin, style="gone" if one.origin == "default" else "")
    table.print()


def _print_problems(found: Document, *, as_json: bool) -> None:
    from tenuto.units import count

    found.problems.sort(key=lambda one: int(one.origin.rpartition(":")[2]) if one.origin[-1:].isdigit() else 0)
    if as_json:
        problems = [
            {"key": one.name, "from": one.origin, "message": one.message, "hint": one.hint} for one in found.problems
        ]
        output.document("config", {"file": found.path, "problems": problems})
    else:
        for one in found.problems:
            output.line(f"{one}\n  hint: {one.hint}")
    if found.problems:
        output.story(f"error: {count(len(found.problems), 'problem')} in {found.name}")
        raise typer.Exit(UsageError.exit_code)
    if not as_json:
        output.line(f"{found.name}: no problem found")
