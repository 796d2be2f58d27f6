"""What the design pages say is tested, by name, is tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/design").glob("*.md"))
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^ *def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_design_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text("utf-8")))
    assert named <= TESTS, sorted(named - TESTS)


def test_the_page_of_what_a_user_writes_names_a_test_for_each_of_its_paragraphs() -> None:
    text = (ROOT / "docs/design/api.md").read_text("utf-8").partition("## What was decided otherwise")[0]
    paragraphs = re.split(r"\n- |\n\n", text.partition("## Counting")[2])
    assert [words for words in paragraphs if words.strip() and "##" not in words and "`test_" not in words] == []


def test_every_invariant_has_a_test_that_carries_its_number() -> None:
    text = (ROOT / "docs/design/format.md").read_text("utf-8")
    numbers = re.findall(r"^- \*\*I(\d+)\*\*", text, re.MULTILINE)
    assert len(numbers) == 11
    assert [n for n in numbers if not any(re.search(rf"_i{n}_", name) for name in TESTS)] == []
