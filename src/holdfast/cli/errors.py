"""What a person sees of an error: the message, then the hint, last; a traceback only with --debug."""

from __future__ import annotations

import sys
import traceback

from holdfast.cli import output
from holdfast.errors import CorruptionError, HoldfastError


def report(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """Says what went wrong, and returns the exit status."""
    sys.stdout.flush()
    if debug:
        traceback.print_exception(error)
    message, subject, hint, code = _parts(error)
    if as_json:
        body = {"error": type(error).__name__, "message": message, "subject": subject, "hint": hint, "exit_code": code}
        output.document("error", body)
    output.story(f"error: {message}")
    if hint is not None:
        output.story(f"hint: {hint}")
    return code


def _parts(error: BaseException) -> tuple[str, str | None, str | None, int]:
    if isinstance(error, HoldfastError):
        hint = error.hint
        if hint is None and isinstance(error, CorruptionError):
            hint = "holdfast verify WHERE names all that is damaged"
        return error.message, error.subject, hint, error.exit_code
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"a fault in Holdfast itself: {message}", None, "--debug shows where; please report it", 1
