"""What the site has beside the pages of docs: the examples, and what was measured. For mkdocs (`make docs`).

The pages are written for GitHub, where a link may lead out of docs. Here such a link leads to the page made of that
file, and is left out where there is none.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?P<image>!?)\[(?P<words>[^\]]*)\]\((?P<target>(?![a-z]+:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FIGURES = ROOT / "benchmarks/RESULTS.md"


def on_files(files: Files, config: Any) -> Files:
    for name, page in {"measured.md": measured(), **examples()}.items():
        files.append(File.generated(config, name, content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["navigation"]  # the tabs are enough there
    markdown = re.sub(r"\A<!--.*?-->\s*", "", markdown, flags=re.S)  # a title is looked for in the first line
    return inside(markdown, posixpath.join("docs", page.file.src_uri))


def inside(markdown: str, source: str, page: str | None = None) -> str:
    """The text of the file `source`, as the text of `page` (itself, if not given), with links that stay in the site."""
    here, there = posixpath.dirname(source), posixpath.dirname(page or source)

    def to_site(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, found["target"]))
        anchor = found["anchor"] or ""
        if target in ("README.md", "benchmarks/RESULTS.md"):
            target, anchor = "docs/measured.md", ""
        elif target == "examples":
            target = "docs/examples/index.md"
        elif re.fullmatch(r"examples/\w+\.py", target):
            target = f"docs/{target.removesuffix('.py')}.md"
        elif not target.startswith("docs/"):
            return found["words"]
        return f"{found['image']}[{found['words']}]({posixpath.relpath(target, there)}{anchor})"

    return LINK.sub(to_site, markdown)


def measured() -> str:
    """All figures; the README's, where no page has them all."""
    if FIGURES.exists():
        return inside(FIGURES.read_text(), "benchmarks/RESULTS.md", "docs/measured.md")
    text = (ROOT / "README.md").read_text().partition("\n## Measured\n")[2].partition("<!-- end of what is measured")[0]
    return inside(f"# Measured\n\n{text}", "README.md", "docs/measured.md").replace(
        "<details>", '<details markdown="1">'
    )


def examples() -> dict[str, str]:
    """A page for each program of `examples`, and one that lists them."""
    pages = {}
    rows = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text()
        says = (ast.get_docstring(ast.parse(code)) or "").partition("\n\n")[0].replace("\n", " ")
        pages[f"examples/{path.stem}.md"] = f"# {path.name}\n\n```python\n{code}```\n"
        rows.append(f"| [{path.name}]({path.stem}.md) | {says} |")
    pages["examples/index.md"] = (
        "# Examples\n\nEach of them runs as it is, from a checkout of the repository.\n\n| program | |\n|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )
    return pages
