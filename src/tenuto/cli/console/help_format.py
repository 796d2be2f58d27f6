"""Formats the help of one command, the same with every version of typer."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


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
