"""What the sources say of hints: every error that a user meets has one, and none is a command that cannot be typed."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import tenuto
from tenuto import errors
from tenuto.errors import install, typed

SOURCES = Path(tenuto.__file__).parent
COMMAND = re.compile(r"(^|[^.\w])(tenuto [a-z]+|mkdir -p|rm -r|ls -ld|tail) $")

KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
NO_HINT = {
    "CorruptionError": "the command line adds `tenuto verify WHERE` to each that has none",
    "ObjectNotFound": "the store's answer to the layers above, which tell what is missing",
    "AlreadyExists": "the store's answer to the layers above, which read back what is there",
    "StoreUnavailable": "is tried again",
    "StoreError": "of a store alone: the kernel's reason is in the message, or no caller of ours can bring it about",
}
"""Kinds that are raised without a hint, each with the reason; a StoreError only below `store`."""


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Returns what the tests below look at of each module, with its place. All nodes would be a million objects, which
    every garbage collection of the tests that follow would go through."""
    found: list[tuple[str, ast.AST]] = []
    for path in sorted(SOURCES.rglob("*.py")):
        name = str(path.relative_to(SOURCES))
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.JoinedStr)
                or (isinstance(node, ast.Constant) and isinstance(node.value, str) and "install" in node.value)
                or (isinstance(node, ast.keyword) and node.arg == "hint")
                or (isinstance(node, ast.Call) and _kinds(node))
            ):
                found.append((f"{name}:{getattr(node, 'lineno', 0)}", node))
    return found


def _kinds(call: ast.Call) -> set[str]:
    """Returns the kinds of error that a call may make; a conditional, `(StoreFull if full else StoreError)(…)`, two."""
    if not isinstance(call.func, ast.Name | ast.IfExp):
        return set()
    return {one.id for one in ast.walk(call.func) if isinstance(one, ast.Name)} & KINDS


def test_typed_keeps_words_whole_and_ordinary_ones_as_they_are() -> None:
    assert typed("tenuto", "ls", "/data/a0001/ckpts_2", "--run", 7) == "tenuto ls /data/a0001/ckpts_2 --run 7"
    words = ["tenuto", "ls", "/my run/it's", "$HOME", ""]
    assert shlex.split(typed(*words)) == words


def test_an_extra_is_installed_from_the_checkout() -> None:
    assert shlex.split(install("torch"), comments=True) == ["pip", "install", ".[torch]"]


def test_nobody_is_told_to_install_another_project_of_that_name() -> None:
    for name, node in nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.search(r"pip3? install (-\S+ )*['\"`]*tenuto", node.value), name


def test_no_value_follows_a_command_unquoted() -> None:
    for name, node in nodes():
        if isinstance(node, ast.JoinedStr):
            for before, after in zip(node.values, node.values[1:], strict=False):
                if isinstance(before, ast.Constant) and isinstance(after, ast.FormattedValue):
                    assert not COMMAND.search(str(before.value)), f"{name}: {ast.unparse(node)}"


def test_no_hint_is_a_command_without_its_place() -> None:
    for name, node in nodes():
        if isinstance(node, ast.keyword) and node.arg == "hint" and isinstance(node.value, ast.Constant):
            assert not re.fullmatch(r"tenuto (verify|show|ls|rm|flush)", str(node.value.value)), name


def test_every_error_that_a_user_meets_has_a_hint() -> None:
    for name, node in nodes():
        if isinstance(node, ast.Call) and name.partition("/")[0] in ("cli", "api", "store"):
            justified = {kind for kind in NO_HINT if kind != "StoreError" or name.startswith("store/")}
            made = _kinds(node)
            assert made <= justified or "hint" in {word.arg for word in node.keywords}, f"{name}: {made} has no hint"
