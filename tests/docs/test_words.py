"""What people read uses the field's words: pages, docstrings of what is public, help, messages and hints.

`docs/design/glossary.md` has the terms of the design and of the code, some of which (pack, home, place) no user needs;
`tests/unit/test_retired_words.py` looks at the names in the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenuto import crashpoints

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/README.md",
    *sorted((ROOT / "docs/guides").glob("*.md")),
    *sorted((ROOT / "docs/reference").glob("*.md")),
]
"""The reference has the docstrings of everything public, and the help of every command."""
SOURCES = [path for path in sorted((ROOT / "src/tenuto").rglob("*.py")) if "testing" not in path.parts]

WORDS = {
    r"packs?": "data file",
    r"home": "primary",
    r"places": "locations",
    r"held": "blocked (training), kept (an image), owned (a run)",
    r"beside training": "in the background",
    r"(go|goes|going|went|gone) on(?! each)": "resume, continue",
    r"judge[sd]?": "compare, decide, check",
    r"(is|are|was|were|be) (told|said)": "name the actor: Tenuto warns, logs, raises, prints",
    r"taken for": "considered",
    r"tells? of": "say what it does",
    r"anew": "again",
    r"nought": "zero",
    r"(stands?|stood) still": "is blocked, does not change, is not renewed",
    r"(?<!there )(is|are|was|were) no (?!longer\b|newer\b|more\b)": "is not a",
}
"""What is not to be read, as a regular expression between word boundaries, and what to write instead."""

ALLOWED = {
    "the design page of that name": r"who waits for whom",
}
"""Passages in which such a word is right, each with the reason."""

_CODE = re.compile(r"^```(?:python|py|sh|bash)\n.*?^```$|^\$ [^\n]*$|`[^`\n]*`|\b\w+=\S*|\]\([^)\s]*\)", re.M | re.S)
_RETIRED = re.compile("|".join(rf"\b{word}\b" if word[-1] != " " else rf"\b{word}" for word in WORDS), re.I)


def retired(text: str) -> list[str]:
    """Returns the passages of a text that have a retired word, outside of code."""
    prose = " ".join(_CODE.sub("…", text).split())
    for passage in ALLOWED.values():
        prose = re.sub(passage, "…", prose)
    return [prose[max(found.start() - 40, 0) : found.end() + 40] for found in _RETIRED.finditer(prose)]


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of a module that are more than a word and no docstring, each with its line."""
    tree = ast.parse(path.read_text("utf-8"))
    passed = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            passed |= {id(part) for part in node.values}
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            text = node.value
        else:
            continue
        if " " in text.strip() and text not in crashpoints.NAMES:
            yield node.lineno, text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_retired_word(page: Path) -> None:
    assert retired(page.read_text("utf-8")) == []


def test_no_message_has_a_retired_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {passage}"
        for path in SOURCES
        for line, text in messages(path)
        for passage in retired(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the pack is on its node", 1),
        ("`home=` is shared", 0),
        ("there is no checkpoint", 0),
        ("x is no number", 1),
        ("it is no longer there", 0),
        ("training goes on from it", 1),
        ("unpacked", 0),
        ("```python\nplaces = 1\n```", 0),
        ("```text\nheld: 1 s\n```", 1),
    ],
)
def test_what_is_found(text: str, expected: int) -> None:
    assert len(retired(text)) == expected
