"""Prints an error for people: the message, then the hint; a traceback only with --debug."""

from __future__ import annotations

import sys
import traceback

from tenuto.cli.console import output
from tenuto.errors import CorruptionError, TenutoError, UsageError


def report(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """Prints the error and returns the exit status."""
    sys.stdout.flush()
    refused = _refused(error)
    if isinstance(refused, str):
        output.story(refused)
        return UsageError.exit_code
    error = refused or error
    if debug:
        traceback.print_exception(error)
    message, subject, hint, code = _parts(error)
    if as_json:
        body = {"error": type(error).__name__, "message": message, "subject": subject, "hint": hint, "exit_code": code}
        output.document("error", body)
    output.story(f"{output.styled('error:', 'damaged', sys.stderr)} {output.clean_lines(message)}", cleaned=True)
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


def _parts(error: BaseException) -> tuple[str, str | None, str | None, int]:
    if isinstance(error, TenutoError):
        hint = error.hint
        if hint is None and isinstance(error, CorruptionError):
            hint = "tenuto verify WHERE names all that is damaged"
        return error.message, error.subject, hint, error.exit_code
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"a fault in Tenuto itself: {message}", None, "--debug shows where; please report it", 1
