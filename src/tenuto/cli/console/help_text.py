"""Formats the help of commands, the same with every version of typer.

`--help` fits a small terminal: what does not is in the reference, which has all of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

from tenuto.cli.console.output import padded, wrap
from tenuto.cli.console.where import VARIABLE, with_place

EXIT_CODES: Final[dict[int, str]] = {
    0: "done; for verify: everything read is whole",
    1: "something else went wrong",
    2: "the command line or a settings file is wrong, or --yes is needed",
    3: "an optional package or this platform lacks what is needed",
    4: "the state cannot be represented in what was asked for",
    10: "no Tenuto repository is there, or it cannot be used",
    11: "no such run or checkpoint",
    12: "damage: something is not what was saved, or nothing is restorable",
    13: "another process owns the run",
    14: "written by a newer version of Tenuto, or in a format that was given up",
    15: "a save failed",
    16: "not removed: something still needs it",
    17: "a wait reached its deadline",
    18: "the store failed (input/output, permission)",
    19: "the store is full",
    20: "certify, drill: the training resumes otherwise than it went",
    21: "certify: the training does not repeat itself",
    22: "the training script failed, or cannot be certified",
    23: "the processes of the job did not agree",
    24: "replicate --check: the copy lags behind",
    25: "replicate: the copy has something else under the same names",
    26: "sealed: no key was given, or the wrong one",
    27: "drill: everything is right, and took longer than --target",
    130: "interrupted",
}


GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "look": ("ls", "log", "show", "status", "du", "report", "config"),
    "compare": ("diff", "compare", "bisect"),
    "prove": ("verify", "scrub", "repair", "drill", "certify"),
    "keep": ("tag", "pin", "note", "keep", "rm", "undelete", "gc"),
    "lines": ("rollback", "fork", "cp", "mv", "repack"),
    "copies": ("replicate", "promote"),
    "formats": ("import", "migrate", "export"),
    "memory": ("flush", "memory"),
    "seal": ("key", "sign"),
    "run": ("run", "chaos", "simulate", "risk"),
    "try": ("bench", "probe", "demo"),
}
"""The commands, as `tenuto --help` groups them."""

LINES: Final = 25
"""The most lines of a help text, at 80 columns."""
REFERENCE: Final = "docs/reference/command-line.md"
COMMON: Final = ("--json", "--debug", "--help")
"""The options that every command has: one line for all of them."""
_WIDEST: Final = 24
"""Columns for the names of options, at most; what a longer one does stands below it."""


def examples(*lines: str) -> str:
    """Formats examples as an epilog."""
    return "\n".join(lines)


BEHIND: Final = "tenuto.behind"
"""Under which a command's context keeps the words behind `--`, which are another program's."""


class PlainCommand(TyperCommand):
    """Shows arguments and options by their names, defaults in words, no types. WHERE may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[BEHIND] = args[args.index("--") + 1 :] if "--" in args else []
        return list(super().parse_args(ctx, with_place(self, ctx, args)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes at most LINES lines: as many paragraphs and examples as there is room for, and no example that
        would break."""
        first, *more = self._paragraphs(formatter.width)
        options = self._options(ctx, formatter.width)
        shown = [f"  {text}" for text in (self.epilog or "").splitlines() if len(text) + 2 <= formatter.width]

        def whole() -> list[str]:
            text = [[self._usage(ctx)], first, *more, options, ["Examples:", *shown], [f"All of it: {REFERENCE}"]]
            return [line for block in text for line in (*block, "")][:-1]

        while len(whole()) > LINES and len(shown) > 2:
            shown.pop()
        while len(whole()) > LINES and more:
            more.pop()
        while len(whole()) > LINES and len(shown) > 1:
            shown.pop()
        formatter.write("\n".join(whole()) + "\n")

    def complete_help(self, ctx: Any, width: int) -> str:
        """Returns all there is to say of it, as the reference has it."""
        blocks = [[self._usage(ctx)], *self._paragraphs(width), self._options(ctx, width)]
        blocks.append(["Examples:", *(f"  {text}" for text in (self.epilog or "").splitlines())])
        return "\n\n".join("\n".join(block) for block in blocks)

    def _usage(self, ctx: Any) -> str:
        places = [_place(param) for param in self.get_params(ctx) if _is_argument(param)]
        # Options come first if the last argument takes everything after it.
        words = ["[OPTIONS]", *places] if any("--" in place for place in places) else [*places, "[OPTIONS]"]
        return f"Usage: {ctx.command_path} {' '.join(words)}"

    def _paragraphs(self, width: int) -> list[list[str]]:
        text = inspect.cleandoc(self.help or "")
        return [
            [f"  {line}" for line in wrap(" ".join(paragraph.split()), width - 2)] for paragraph in text.split("\n\n")
        ]

    def _options(self, ctx: Any, width: int) -> list[str]:
        params: list[Any] = list(self.get_params(ctx))
        # What is to be run stands in the line of the usage already.
        places = [param for param in params if _is_argument(param) and not _place(param).startswith("--")]
        arguments = [(_place(param), _explained(param)) for param in places]
        own = [param for param in params if not _is_argument(param) and not set(param.opts) & set(COMMON)]
        options = []  # those that mean the same, one after the other, stand together
        for text, alike in groupby(own, _explained):
            *others, last = alike
            names = [*("/".join(sorted(param.opts, key=len)) for param in others), _spelling(last)]
            options.append((", ".join(names), text))
        common = ("--json, --debug", "One JSON document on stdout; an error's origin.")
        rows = [*arguments, *options, common]
        wide = min(max(len(name) for name, _ in rows if name.count("--") <= 2), _WIDEST)
        return [line for name, text in rows for line in _row(name, text, wide, width)]


class PlainGroup(TyperGroup):
    """Shows the commands in groups, a line for each."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        wide = max(map(len, GROUPS)) + 2
        lines = [f"Usage: {ctx.command_path} COMMAND [WHERE] [OPTIONS]", *self._commands(wide, formatter.width), ""]
        notes = (
            ("WHERE", f"A directory or URL; else ${VARIABLE} or tenuto.toml."),
            ("MORE", f"{ctx.command_path} COMMAND --help; {REFERENCE}"),
        )
        lines += [line for name, text in notes for line in _row(name, text, wide - 2, formatter.width)]
        formatter.write("\n".join(lines) + "\n")

    def _commands(self, wide: int, width: int) -> Iterator[str]:
        longest = max(map(len, self.commands), default=0)
        for group, names in GROUPS.items():
            title = group
            for name in names:
                if name in self.commands:
                    summary = inspect.cleandoc(self.commands[name].help or "").partition("\n")[0]
                    for line in _row(name, summary, longest, width - wide):
                        yield f"  {padded(title, wide)}{line.removeprefix('  ')}"
                        title = ""


def _row(name: str, text: str, wide: int, width: int) -> Iterator[str]:
    """Yields a name, and beside it what it means."""
    lines = wrap(text, width - wide - 4)
    if len(name) > wide:
        yield f"  {name}"
        name = ""
    for line in lines:
        yield f"  {padded(name, wide)}  {line}".rstrip()
        name = ""


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _place(param: Any) -> str:
    name = str(param.metavar or param.name.upper())
    return "[WHERE]" if name == "WHERE" else name


def _spelling(param: Any) -> str:
    """Returns `-y, --yes` or `--grace HOURS`."""
    names = ", ".join(sorted(param.opts, key=len))
    return names if param.is_flag else f"{names} {param.metavar or 'VALUE'}"


def _explained(param: Any) -> str:
    text = param.help or ""
    default = param.default
    if _is_argument(param) or param.is_flag or param.show_default is False:
        return text
    if callable(default) or default in (None, "", (), []):
        return text
    return f"{text}  [default: {default:g}]" if isinstance(default, float) else f"{text}  [default: {default}]"
