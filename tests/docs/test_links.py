"""No link between the pages leads nowhere, and what people ask first is at most two clicks from the front page.

`make docs` checks the links of the site as mkdocs makes it; this needs no site, and looks at the pages as GitHub shows
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FRONT = DOCS / "README.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

QUESTIONS = {
    "How do I resume on another number of GPUs?": ("guides/different-gpus.md", "torchrun --nproc-per-node"),
    "How do I keep the best 3, and load one?": ("guides/keep-what-matters.md", "keep.best(3"),
    "What does a save cost?": ("guides/cost.md", "training blocked"),
    "The disk is full. What now?": ("guides/disk-full.md", "tenuto gc"),
    "How do I load a model for inference?": ("guides/inference.md", "tenuto.load("),
    "Can I read a checkpoint without Tenuto?": ("guides/inference.md", "safetensors"),
    "What happens when Slurm or a spot machine takes the node?": ("guides/preemption.md", "SIGTERM"),
    "How do I log saves, to a file, TensorBoard or wandb?": ("guides/logging.md", "sinks="),
    "I use torch.save, Lightning or DCP. What changes?": ("guides/coming-from.md", "torch.save"),
    "Is my resume exact?": ("guides/resume-exactly.md", "tenuto certify"),
}
"""What people ask first, in the words of the front page: the page that answers, and words of the answer."""


def words_of(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files and anchors that a page leads to."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", re.sub(r"`[^`\n]*`", "``", words_of(page))):
        if "://" not in target:
            yield (page.parent / target).resolve() if target else page, anchor


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as GitHub and mkdocs make them alike."""
    made = set()
    for heading in re.findall(r"^#+ (.*)$", words_of(page), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        made.add(re.sub(r"[^\w\s-]", "", plain).strip().lower().replace(" ", "-"))
    return made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_leads_nowhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.relative_to(ROOT)}: {target}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.relative_to(ROOT)}: {target.name}#{anchor}"


def test_what_people_ask_first_is_within_two_clicks_of_the_front_page() -> None:
    near = {target for target, _ in links(FRONT)}
    near |= {target for page in near if page.suffix == ".md" for target, _ in links(page)}
    for question, (answer, words) in QUESTIONS.items():
        assert question in FRONT.read_text(), question
        assert DOCS / answer in near, f"{question}: {answer}"
        assert words in (DOCS / answer).read_text(), f"{question}: {words}"


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- (?:\w+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    made = {"examples/index.md", "measured.md"}
    there = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted({*there, *made}), "mkdocs.yml: nav"


def test_every_guide_is_on_the_front_page() -> None:
    targets = {target for target, _ in links(FRONT)}
    assert {page for page in PAGES if page.parent.name in ("guides", "design")} <= targets
