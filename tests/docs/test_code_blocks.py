"""Every block of code in README and docs runs, page by page, in an empty directory, in the order of the page.

Blocks of Python share one namespace. What a page leaves to its reader (a model, a loader) is in PRELUDES. In `console`
and `sh` blocks the commands of `tenuto` run for real, but for those of NOT_RUN.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.memory_training import shared_memory
from tenuto.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = {
    "tenuto certify": "runs the reader's own training script; tests/e2e has one",
    "tenuto bench": "measures for a minute, and wants a machine of its own",
    "tenuto demo": "takes a minute; tests/e2e runs it",
    "jq": "is another program, which a command's output goes to",
    "make": "sets up or rewrites this very checkout",
    "pip": "installs",
    "python": "is the reader's own script",
    "torchrun": "starts several processes; tests/multiprocess runs these examples",
}
"""Commands that blocks show and that are not run, each with the reason."""

MODEL = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
loader = torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=4)

def train_step(batch):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss

def evaluate(model):
    return 0.5
"""
UNNAMED = {"make demo", "process 1  ━━━━━━━━╳                steps 0 to 80, killed in a save"}
UNNAMED |= {"pip install torch && pip install '.[torch]'", "tenuto certify checkpoints -- python train.py"}
"""First lines of the README's blocks whose fence names no language: of what is not run, and what it answers."""
PRELUDES = {"README.md": MODEL, "measure.md": "import tenuto\nstate = {}\n"}
INSTEAD = {
    "README.md": {
        "ckpt.steps(10_000)": "ckpt.steps(10)",
        "save=every(minutes=10)": "save=every(steps=2)",
        "--step 500": "--step 8",
        "checkpoints 400": "checkpoints 6",
        # The second block shows the body that goes where the first one's loop was.
        "for epoch in ckpt.epochs(10):": "ckpt = tenuto.Checkpointer('epochs', state, data=loader)\n"
        "for epoch in ckpt.epochs(10):",
    }
}
"""Changes to a page's blocks: fewer steps, and what joins two blocks. Each has to be found on the page."""


@dataclass(frozen=True)
class Block:
    language: str
    line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        yield Block(found[1], page.read_text()[: found.start()].count("\n") + 2, found[2])


@pytest.fixture(autouse=True)
def no_image_of_anybody_elses() -> Iterator[None]:
    """A page that clears memory clears what it made itself."""
    if not Path("/dev/shm").exists():
        yield
        return
    with shared_memory():
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning", "ignore::UserWarning")
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    exec(PRELUDES.get(page.name, ""), names)
    try:
        for block in blocks(page):
            if block.language == "python":
                run_python(page, block, names)
            elif block.language in ("console", "sh"):
                run_commands(page, block)
            elif not block.language:
                assert block.text.splitlines()[0] in UNNAMED, f"{page.name}:{block.line}: a block of no language"
            else:
                assert block.language in ("text", "toml", "json"), f"{page.name}:{block.line}: {block.language}?"
    finally:
        ckpt = names.get("ckpt")
        if hasattr(ckpt, "close"):
            ckpt.close()


def run_python(page: Path, block: Block, names: dict[str, object]) -> None:
    # As many empty lines before it as there are lines on the page: a traceback names the page's own line.
    exec(compile("\n" * (block.line - 1) + here(page, block), str(page), "exec"), names)


def here(page: Path, block: Block) -> str:
    """The block's text with `/data` below the directory that it runs in, and with the page's changes."""
    text = re.sub(r'([" ])/data/', r"\1data/", block.text)
    for written, instead in INSTEAD.get(page.name, {}).items():
        text = text.replace(written, instead)
    return text


def run_commands(page: Path, block: Block) -> None:
    for line in here(page, block).splitlines():
        if block.language == "console" and not line.startswith("$ "):
            continue  # what the command answers
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if not words or any(line.removeprefix("$ ").startswith(command) for command in NOT_RUN):
            continue
        if "|" in words:  # what another program makes of the output is that program's
            words, rest = words[: words.index("|")], words[words.index("|") + 1 :]
            assert rest[0] in NOT_RUN, f"{page.name}:{block.line}: not listed in NOT_RUN: {line}"
        assert words[0] == "tenuto", f"{page.name}:{block.line}: neither run nor listed in NOT_RUN: {line}"
        with pytest.raises(SystemExit) as left:
            main(words[1:])
        assert not left.value.code, f"{page.name}:{block.line}: {line} left with {left.value.code}"


def test_what_is_changed_is_still_there() -> None:
    for name, changes in INSTEAD.items():
        text = next(page for page in PAGES if page.name == name).read_text()
        assert all(written in text for written in changes)


def test_every_fence_is_that_of_a_block_that_is_looked_at() -> None:
    unnamed = set()
    for page in PAGES:
        found = list(blocks(page))
        fences = re.findall(r"^[ >]*(?:```|~~~).*$", page.read_text(), re.M)
        assert len(fences) == 2 * len(found), f"{page.name}: a fence that opens no block, or none that is seen"
        unnamed |= {block.text.splitlines()[0] for block in found if not block.language}
    assert unnamed == UNNAMED


def test_the_index_says_what_is_not_run() -> None:
    said = (ROOT / "docs/README.md").read_text().partition("Every block of Python")[2].partition("Every example")[0]
    assert {f"`{command.split()[-1]}`" for command in NOT_RUN} == set(re.findall("`[^`]*`", said)) - {"`tenuto`"}


def test_no_link_leads_nowhere() -> None:
    for page in PAGES:
        words = re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", words):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_every_guide_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        if page.parent.name in ("guides", "reference", "design"):
            assert f"({page.parent.name}/{page.name})" in index
