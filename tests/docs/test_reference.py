"""docs/reference says what the docstrings say, and every command is documented wherever commands are."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

import tenuto
from tenuto.cli.application import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DOCS))  # as when it runs as a script
    spec = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def pages(generator: ModuleType) -> dict[str, str]:
    return dict(generator.pages())


def test_the_reference_is_up_to_date(pages: dict[str, str]) -> None:
    assert {path.name for path in (DOCS / "reference").glob("*.md")} == set(pages)
    for name, page in pages.items():
        assert (DOCS / "reference" / name).read_text() == page, f"{name} is not what the docstrings say: make reference"


def test_every_public_name_is_on_one_page(pages: dict[str, str]) -> None:
    for name in tenuto.__all__:
        there = [page for page, text in pages.items() if re.search(rf"^## `tenuto\.{name}`$", text, re.M)]
        assert len(there) == 1, f"{name}: {there}: add it to a group of docs/generate_reference.py"


def test_the_names_that_most_people_use_have_an_example(generator: ModuleType, pages: dict[str, str]) -> None:
    ten = (
        "Checkpointer",
        "save",
        "load",
        "open",
        "Repository",
        "every",
        "on",
        "keep",
        "errors",
        "torch.ResumableSampler",
    )
    assert {f"tenuto.{name}" for name in ten} <= set(generator.EXAMPLES)
    text = "\n".join(pages.values())
    for name, example in generator.EXAMPLES.items():
        assert f"```python\n{example.strip()}\n```" in text, f"{name} is on no page"


def test_what_is_hidden_is_there_and_on_no_page(generator: ModuleType, pages: dict[str, str]) -> None:
    text = "\n".join(pages.values())
    for hidden in generator.HIDDEN:
        assert attrgetter(hidden)(tenuto), f"{hidden} is gone: take it out of HIDDEN"
        assert f"`{hidden}`" not in text


def test_every_public_name_member_and_event_is_described(pages: dict[str, str]) -> None:
    bare = set()
    for page, text in pages.items():
        for heading, body in re.findall(r"^##+ (`.*?`)\n(.*?)(?=^##+ |\Z)", text, re.M | re.S):
            without_code = re.sub(r"^```.*?^```$|^`.*`$", "", body, flags=re.M | re.S).strip()
            if page != "command-line.md" and not without_code:
                bare.add(heading.strip("`"))
    assert not bare, "no docstring says what these are"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str, pages: dict[str, str]) -> None:
    assert f"\n## `tenuto {name}`\n" in pages["command-line.md"]
    texts = [page.read_text() for page in (DOCS / "guides").glob("*.md")] + [(DOCS.parent / "README.md").read_text()]
    assert any(f"{program} {name}" in text for text in texts for program in ("tenuto", "make")), (
        f"no guide shows tenuto {name}"
    )
