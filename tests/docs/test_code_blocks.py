"""Every block of code in README and docs runs, page by page, in an empty directory, in the order of the page.

How a page is run, and what of its output is compared, is in `support/pages.py`. What a page leaves to its reader (a
model, a loader) is in PRELUDES. `pytest tests/docs --update-snapshots` writes what is printed now into the pages.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import tabs
from support.memory_training import shared_memory
from support.pages import Page, blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page != tabs.PAGE)]
"""All but the one whose blocks need the environments of trainers, in which tests/trainers runs them."""

NOT_RUN = {
    "tenuto certify": "runs the reader's own training script; tests/e2e has one",
    "tenuto bench": "measures for a minute, and wants a machine of its own",
    "tenuto probe": "measures for 20 s",
    "tenuto demo": "takes a minute; tests/e2e runs it",
    "jq": "is another program, which a command's output goes to",
    "make": "sets up or rewrites this very checkout",
    "pip": "installs",
    "python": "is the reader's own script, or an example that another test runs",
    "torchrun": "starts several processes; tests/multiprocess runs these examples",
    "sbatch": "is Slurm's",
    "kubectl": "is Kubernetes'",
}
"""Commands that blocks show and that are not run, each with the reason."""

MODEL = """
import torch
torch.manual_seed(0)
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
UNNAMED = {
    "pip install torch && pip install '.[torch]'",
    "$ python quickstart.py & sleep 5; kill -9 $!",
    "$ tenuto certify checkpoints -- python train.py",
    "NOT EXACT: step 10, killed, resumed, step 20: not what an uninterrupted run does",
    "$ tenuto ls checkpoints",
    "make demo   # trains a small GPT, kills it eight times, and compares: about a minute once it is set up",
}
"""First lines of the README's blocks whose fence names no language: of what is not run, and what it answers."""
PRELUDES = {
    **{
        f"docs/reference/{name}.md": MODEL for name in ("training", "save-and-load", "look-inside", "places", "logging")
    },
    "docs/reference/events.md": MODEL,
}
INSTEAD = {
    "README.md": {
        "ckpt.steps(3_000)": "ckpt.steps(10)",
        "every(steps=100)": "every(steps=2)",
    },
    "docs/guides/object-stores.md": {"s3://my-bucket/llm": "bucket"},
    "docs/guides/drill.md": {"-- python train.py": f"-- {sys.executable} train.py"},
    "docs/guides/hdfs.md": {"hdfs://namenode:8020/ckpts/llm": "hdfs"},
}
"""Changes to a page's blocks: fewer steps, a directory for a bucket, and what joins two blocks. Each has to be found on
the page."""
LANGUAGES = ("text", "toml", "json", "py", "bash")
"""Of what is not run; `py` is a signature, `bash` a script of the reader's cluster."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(autouse=True)
def no_image_of_anybody_elses() -> Iterator[None]:
    """A page that clears memory clears what it made itself, and no loader of the page before is in the middle of its
    epoch."""
    gc.collect()
    if not Path("/dev/shm").exists():
        yield
        return
    with shared_memory():
        yield


@pytest.mark.parametrize("path", PAGES, ids=name_of)
@pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning", "ignore::UserWarning")
def test_the_code_of_a_page_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": path.stem}
    exec(PRELUDES.get(name_of(path), ""), names)
    update = pytestconfig.getoption("--update-snapshots")
    page = Page(path, tmp_path, INSTEAD.get(name_of(path), {}), NOT_RUN, update, names)
    try:
        page.run()
    finally:
        ckpt = names.get("ckpt")
        if hasattr(ckpt, "close"):
            ckpt.close()


def test_the_quick_start_is_the_example() -> None:
    example = (ROOT / "examples/quickstart.py").read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{example}```" in (ROOT / "README.md").read_text()


def test_the_readme_is_short() -> None:
    assert 150 <= len((ROOT / "README.md").read_text().splitlines()) <= 190


def test_what_is_changed_is_still_there() -> None:
    for name, changes in INSTEAD.items():
        text = (ROOT / name).read_text()
        assert all(written in text for written in changes)
    assert all((ROOT / name).exists() for name in PRELUDES)


def test_every_fence_is_that_of_a_block_that_is_looked_at() -> None:
    unnamed = set()
    for page in PAGES:
        found = list(blocks(page.read_text()))
        fences = re.findall(r"^[ >]*(?:```|~~~).*$", page.read_text(), re.M)
        assert len(fences) == 2 * len(found), f"{page.name}: a fence that opens no block, or none that is seen"
        known = ("", "python", "console", "sh", *LANGUAGES)
        assert {block.language for block in found} <= set(known), f"{page.name}: a block of another language"
        unnamed |= {block.text.splitlines()[0] for block in found if not block.language}
    assert unnamed == UNNAMED


def test_the_index_says_what_is_not_run() -> None:
    said = (ROOT / "docs/README.md").read_text().partition("Every block of Python")[2].partition("Every example")[0]
    assert {f"`{command.split()[-1]}`" for command in NOT_RUN} == set(re.findall("`[^`]*`", said)) - {"`tenuto`"}


def test_a_guide_is_short() -> None:
    for page in (ROOT / "docs/guides").glob("*.md"):
        most = 460 if page == tabs.PAGE else 126  # one tab for each framework, of which a reader sees one
        most = 260 if page.name == "a-month-with-a-run.md" else most  # most of it is what the commands print
        tables = ("formats.md", "resume-exactly.md", "verify-and-repair.md")  # a row for each format, gap, or damage
        most = 140 if page.name in tables else most
        most = 150 if page.name == "leave-it-running.md" else most  # a workstation, Slurm and Kubernetes
        assert len(page.read_text().splitlines()) <= most, page.name


def test_every_tab_has_an_environment_that_runs_it() -> None:
    found = tabs.tabs()
    assert found.keys() <= tabs.ENVIRONMENT_OF.keys()
    for name, text in found.items():
        environment = tabs.ENVIRONMENT_OF[name]
        assert bool(tabs.python_of(text)) == (environment is not None), name
        assert environment is None or (ROOT / f"tests/trainers/{environment}/test_your_trainer.py").exists(), name
