"""docs/reference says what the docstrings say, and every command is documented wherever commands are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import tenuto
from tenuto.cli.application import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generator: ModuleType) -> dict[str, str]:
    return dict(generator.pages())


def test_the_reference_is_up_to_date(pages: dict[str, str]) -> None:
    assert {path.name for path in (DOCS / "reference").glob("*.md")} == set(pages)
    for name, page in pages.items():
        assert (DOCS / "reference" / name).read_text() == page, f"{name} is not what the docstrings say: make reference"


def test_every_public_name_is_in_it(pages: dict[str, str]) -> None:
    for name in tenuto.__all__:
        assert f"\n## `tenuto.{name}`\n" in pages["python.md"], name


def test_every_public_name_has_a_docstring() -> None:
    for name in tenuto.__all__:
        if name != "__version__":
            assert getattr(tenuto, name).__doc__, name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str, pages: dict[str, str]) -> None:
    assert f"\n## `tenuto {name}`\n" in pages["command-line.md"]
    texts = [page.read_text() for page in (DOCS / "guides").glob("*.md")] + [(DOCS.parent / "README.md").read_text()]
    assert any(f"{program} {name}" in text for text in texts for program in ("tenuto", "make")), (
        f"no guide shows tenuto {name}"
    )
