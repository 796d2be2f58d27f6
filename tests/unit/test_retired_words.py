"""Names use the terms of `docs/design/glossary.md`: words that were retired do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for root in ("src/tenuto", "campaigns") for path in sorted((ROOT / root).rglob("*.py"))]
RETIRED = """
    adopted adopting alone belated board boards companies company convening entitled familiar halves handing he hear
    heard his hurry lane lanes lending lift look neighbour neighbours onward parked parties party politeness pulse
    recall recalling rehearsal rehearse remember remembered remembering said say says spent taking tell teller
    telling tidying together told topic turns untold upkeep whereabouts wholes
"""
_DEFINED = re.compile(r"^ *(?:async )?(?:def|class) (\w+)", re.MULTILINE)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words(name: str) -> set[str]:
    """Returns the words of an identifier in lower case."""
    found = {word.lower() for word in _WORD.findall(name)}
    return found | {word.removesuffix("s") for word in found}


def names(path: Path) -> Iterator[str]:
    """Yields the names of a module and its package, and of the module's classes and functions."""
    yield path.stem
    yield path.parent.name
    yield from _DEFINED.findall(path.read_text("utf-8"))  # to parse them all takes seconds


def test_no_module_class_or_function_has_a_retired_word_in_its_name() -> None:
    retired = set(RETIRED.split())
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        for name in names(path)
        if words(name) & retired and name not in ("tell", "recall")  # of Python's file objects; of statistics
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("_read_parties", {"read", "parties"}), ("RankGroup2", {"rank", "group"}), ("KVStore", {"kv", "store"})],
)
def test_a_name_is_split_into_words(name: str, expected: set[str]) -> None:
    assert expected <= words(name)
