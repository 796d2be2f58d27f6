"""The tabs of docs/guides/your-trainer.md, whose blocks run in the environment of each framework.

A tab is `=== "Name"` and what is indented below it. A test of an environment runs each of its tabs with `run`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs/guides/your-trainer.md"
ENVIRONMENT_OF: Final = {
    "Lightning": "torch",
    "Hugging Face": "torch",
    "Accelerate": "torch",
    "timm": "recipes",
    "fastai": "recipes",
    "Keras": "tensorflow",
    "JAX": "jax",
    "TensorFlow": "tensorflow",
    "DCP": "torch",
    "DeepSpeed": None,
    "Ray Train": None,
    "torchtitan": None,
}
"""Where the blocks of a tab run; None for a tab of words."""


RESUMES_NOTHING: Final = frozenset({"DCP"})
PRELUDES: Final = {
    "Lightning": """
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))

model = Model()
"""
}
"""What a tab leaves to its reader."""


def tabs() -> dict[str, str]:
    """Returns the text of each tab."""
    found = re.finditer(r'^=== "([^"]+)"\n((?:    .*\n|\n)*)', PAGE.read_text(), re.M)
    return {tab[1]: textwrap.dedent(tab[2]) for tab in found}


def python_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def of(environment: str) -> list[str]:
    """Returns the tabs on the page that run in an environment."""
    return [name for name in tabs() if ENVIRONMENT_OF[name] == environment]


def run(name: str, directory: Path) -> None:
    """Runs the blocks of a tab as one script, twice: the second run resumes."""
    script = directory / "tab.py"
    script.write_text("\n".join([PRELUDES.get(name, ""), *python_of(tabs()[name])]))
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, str(script)],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, f"{name}: {ended.stdout[-1000:]}{ended.stderr[-3000:]}"
    assert name in RESUMES_NOTHING or "resumed" in ended.stderr, (
        f"{name}: the second run resumes, and says so:\n{ended.stderr[-3000:]}"
    )
