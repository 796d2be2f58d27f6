"""Formats the help of commands, the same with every version of typer: usage, options, examples, exit statuses."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperCommand

EXIT_CODES: Final[dict[int, str]] = {
    0: "done; for verify: everything read is whole",
    1: "something else went wrong",
    2: "the command line makes no sense, or needs --yes",
    3: "an optional package or this platform lacks what is needed",
    4: "the state cannot be represented in what was asked for",
    10: "no Tenuto repository is there, or it cannot be used",
    11: "no such run or checkpoint",
    12: "damage: something is not what was saved, or nothing is restorable",
    13: "another process owns the run",
    14: "written by a newer version of Tenuto",
    15: "a save failed",
    16: "not removed: something still needs it",
    17: "a wait came to its deadline",
    18: "the store failed (input/output, permission)",
    19: "the store is full",
    20: "certify: the resume is not exact",
    21: "certify: the training does not repeat itself",
    22: "the training script failed, or cannot be certified",
    23: "the processes of the job did not come to one answer",
    130: "interrupted",
}


def exit_status_table() -> str:
    r"""Formats the statuses as an epilog; the \b mark keeps click from joining the lines."""
    lines = [f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\b\nExit status:\n" + "\n".join(lines)


def examples(*lines: str) -> str:
    """Formats examples as an epilog."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class PlainCommand(TyperCommand):
    """Shows arguments and options by their names in the usage line, defaults in words, no types."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        places = [_place(param) for param in self.get_params(ctx) if _is_argument(param)]
        # Options come first if the last argument takes everything after it.
        words = ["[OPTIONS]", *places] if any("--" in place for place in places) else [*places, "[OPTIONS]"]
        formatter.write_usage(ctx.command_path, " ".join(words))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params: list[Any] = list(self.get_params(ctx))
        arguments = [(_place(param), param.help or "") for param in params if _is_argument(param)]
        options = [(_spelling(param), _explained(param)) for param in params if not _is_argument(param)]
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _place(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _spelling(param: Any) -> str:
    """Returns `-y, --yes` or `--grace HOURS`."""
    names = ", ".join(sorted(param.opts, key=len))
    return names if param.is_flag else f"{names} {param.metavar or 'VALUE'}"


def _explained(param: Any) -> str:
    default = param.default
    if param.is_flag or callable(default) or default in (None, "", (), []):
        return param.help or ""
    return (
        f"{param.help or ''}  [default: {default:g}]"
        if isinstance(default, float)
        else f"{param.help or ''}  [default: {default}]"
    )
