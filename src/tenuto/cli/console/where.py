"""Which repository a command means without its WHERE: what $TENUTO_WHERE, the folder one is in, or tenuto.toml says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from tenuto.cli.console import output
from tenuto.errors import UsageError

VARIABLE: Final = "TENUTO_WHERE"
NAME: Final = "where"
"""The name of the argument in a command's function."""
HELP: Final = frozenset({"-h", "--help"})
_PATHS: Final = ("/", "./", "../", "~")


def default_place(otherwise: str = "") -> str:
    """Returns the repository that is meant where none is named, and says which on stderr.

    Raises UsageError without one; `otherwise`: what its hint adds.
    """
    named = os.environ.get(VARIABLE)
    if named:
        output.story(f"note: the repository is {named}, from {VARIABLE}")
        return named
    if _is_repository("."):
        output.story("note: the repository is the folder you are in")
        return "."
    found = _of_settings()
    if found is not None:
        output.story(f"note: the repository is {found[0]}, from {found[1]}")
        return found[0]
    raise UsageError(
        "which repository?",
        subject="WHERE",
        hint=f"name it as WHERE, set {VARIABLE}, or run this in its folder{otherwise}",
    )


def _of_settings() -> tuple[str, str] | None:
    """Returns the repository that the settings file names, and the line it stands on; None without such a file. Raises
    UsageError for a file that cannot be read."""
    from tenuto.training.config.document import document, find

    path = find()
    if path is None:
        return None
    from tenuto.training.config.objects import primary

    return primary(document(path))


def with_place(command: Any, ctx: Any, words: Sequence[str]) -> list[str]:
    """Returns the words of a command line, led by the repository where its WHERE is left out.

    Words alone do not always tell `tenuto rm WHERE CHECKPOINT` from `tenuto rm CHECKPOINT CHECKPOINT`. Where a command
    takes any number of words, the first one is WHERE if it is a repository, if it looks like a path or a URL, or if
    there is no other repository that could be meant.
    """
    arguments = [param for param in command.get_params(ctx) if param.param_type_name == "argument"]
    if ctx.resilient_parsing or not arguments or arguments[0].name != NAME or not arguments[0].required:
        return list(words)
    others = arguments[1:]
    # What follows `--` is another program's.
    own = list(words[: words.index("--")]) if "--" in words else list(words)
    if HELP & set(own):
        return list(words)
    given = _positional(command, ctx, own, arguments)
    if "--" in words or not given:
        named = bool(given)
    elif all(one.required and one.nargs == 1 for one in others):
        named = len(given) > len(others) or _is_place(given[0])
    else:
        complete = len(given) > len(others) and all(one.nargs == 1 for one in others)
        named = complete or _is_place(given[0]) or given[0].startswith(_PATHS) or not _has_default()
    return list(words) if named else [default_place(), *words]


def _positional(command: Any, ctx: Any, words: list[str], arguments: Sequence[Any]) -> list[str]:
    """Returns the words that are no options, in order; those beyond what the command takes are left out."""
    values, _, _ = command.make_parser(ctx).parse_args(args=list(words))
    found: list[str] = []
    for argument in arguments:
        value = values.get(argument.name)
        found += [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    return found


def _has_default() -> bool:
    return bool(os.environ.get(VARIABLE)) or _is_repository(".") or _of_settings() is not None


def _is_place(word: str) -> bool:
    return "://" in word or word in (".", "..") or _is_repository(word)


def _is_repository(path: str) -> bool:
    return os.path.isfile(os.path.join(os.path.expanduser(path), "tenuto.json"))
