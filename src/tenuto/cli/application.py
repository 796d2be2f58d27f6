"""The command line: its commands, its options, its errors, and its exit."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from itertools import chain
from typing import Annotated

import typer

from tenuto.cli.console import help_text, output
from tenuto.cli.console.help_text import PlainCommand, PlainGroup
from tenuto.errors import CorruptionError, TenutoError, UsageError, nearest
from tenuto.printable import clean_lines

COMMANDS = tuple(chain.from_iterable(help_text.GROUPS.values()))
"""Each command is a function in the module of the same name."""

ALIASES = {"restore": "export"}
"""Other names of commands, which no help lists."""

MEANT = {
    "list": ("ls",),
    "history": ("log",),
    "diff": ("compare",),
    "revert": ("rollback",),
    "reset": ("rollback",),
    "branch": ("fork",),
    "hold": ("pin",),
    "info": ("show",),
    "inspect": ("show",),
    "cat": ("show",),
    "check": ("verify",),
    "fsck": ("verify", "repair"),
    "fix": ("repair",),
    "recover": ("undelete", "repair"),
    "delete": ("rm",),
    "remove": ("rm",),
    "prune": ("keep", "gc"),
    "clean": ("gc",),
    "convert": ("import", "export"),
    "copy": ("cp",),
    "fork": ("cp",),
    "rename": ("mv",),
    "move": ("mv",),
    "adopt": ("import",),
    "best": ("ls",),
    "settings": ("config",),
    "dashboard": ("report",),
    "html": ("report",),
}
"""What people type whose other tools call it so."""

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def application(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Builds the application with the commands `names`; each command costs the inspection of all its options.

    The help is plain text: it looks the same in every terminal, and needs no import of rich.
    """
    app = typer.Typer(
        name="tenuto",
        cls=PlainGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        no_args_is_help=True,
        context_settings=SETTINGS,
    )
    app.callback()(_root)
    for name in names:
        own = ALIASES.get(name, name)
        module = importlib.import_module(f"tenuto.cli.commands.{own}")
        app.command(name, cls=PlainCommand, epilog=module.EXAMPLES, context_settings=SETTINGS)(getattr(module, own))
    return app


def run(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with a status of `help_text`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    _never_fail_to_encode()
    try:
        known = words[:1] if words and words[0] in (*COMMANDS, *ALIASES) else COMMANDS
        if words and words[0] not in known and not words[0].startswith("-"):
            raise no_command(words[0])
        status = application(known)(args=words, prog_name="tenuto", standalone_mode=False)
        output.flush()
        sys.exit(status)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the edge: what is no TenutoError is reported as a fault of ours
        own = words[: words.index("--")] if "--" in words else words  # the rest belongs to another command
        sys.exit(report(error, debug="--debug" in own, as_json="--json" in own))


def no_command(word: str) -> UsageError:
    """Returns the error for a command that there is not, with the one that was meant."""
    meant = MEANT.get(word.lower()) or nearest(word, COMMANDS)
    commands = " or ".join(f"`tenuto {name}`" for name in meant)
    return UsageError(
        f"no command `{word}`{f'; did you mean {commands}?' if meant else ''}", subject=word, hint="tenuto --help"
    )


def _show_version(value: bool) -> None:
    if value:
        from tenuto.version import __version__

        typer.echo(f"tenuto {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _open_closed_streams() -> None:
    """Opens what the caller has closed (`>&-`), in the order of the descriptors, which a store's files would take."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it lasts as long as the process


def _never_fail_to_encode() -> None:
    """Makes output escape characters that the terminal's encoding lacks, rather than fail in the middle of the data."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, io.UnsupportedOperation, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def report(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """Prints the error and returns the exit status."""
    try:
        output.flush()
    except BrokenPipeError:
        return TenutoError.exit_code
    except TenutoError as failed:
        error = error if isinstance(error, TenutoError) else failed
    refused = _refused(error)
    if isinstance(refused, str):
        output.story(refused)
        return UsageError.exit_code
    if isinstance(error, FileNotFoundError) and _works_nowhere():
        refused = UsageError("the working directory has been removed", hint="cd to a directory that exists")
    error = refused or error
    if debug:
        traceback.print_exception(error)
    message, subject, hint, code = _parts(error)
    if as_json:
        body = {"error": type(error).__name__, "message": message, "subject": subject, "hint": hint, "exit_code": code}
        output.document("error", body)
    output.story(f"{output.styled('error:', 'damaged', sys.stderr)} {clean_lines(message)}", cleaned=True)
    if hint is not None:
        output.story(f"hint: {hint}")
    return code


def _refused(error: BaseException) -> UsageError | str | None:
    """Converts a command line that cannot be parsed into a UsageError; returns the help text for a bare `tenuto`.

    Checks attributes, not the class, whose module changes between versions of typer.
    """
    if not hasattr(error, "format_message") or isinstance(error, TenutoError):
        return None
    message = str(error.format_message())
    if type(error).__name__ == "NoArgsIsHelpError":
        return message
    message = (message[:1].lower() + message[1:]).removesuffix(".").replace("(Possible", "(possible")
    context = getattr(error, "ctx", None)
    return UsageError(message, hint=f"{context.command_path if context is not None else 'tenuto'} --help")


def _works_nowhere() -> bool:
    """Returns whether this process's working directory is gone, which fails whatever asks for it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _parts(error: BaseException) -> tuple[str, str | None, str | None, int]:
    if isinstance(error, TenutoError):
        hint = error.hint
        if hint is None and isinstance(error, CorruptionError):
            hint = "tenuto verify WHERE names all that is damaged"
        return error.message, error.subject, hint, error.exit_code
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"a fault in Tenuto itself: {message}", None, "--debug shows where; please report it", 1
