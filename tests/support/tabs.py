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
    "Ray Train": "recipes",
    "torchtitan": "recipes",
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
POSTLUDES: Final = {
    "torchtitan": """
import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import OptimizersContainer, default_adamw

class Trainer:  # what torchtitan's does with its manager
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def train(self, steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = OptimizersContainer.Config(
            param_groups=default_adamw(lr=0.01).param_groups, implementation="for-loop"
        ).build(model_parts=[model])
        scheduler = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizer, training_steps=20)
        loader = StatefulDataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
        manager = TenutoCheckpointManager.Config(enable=True, interval=2, keep_latest_k=2).build(
            dataloader=loader, model_parts=[model], optimizers=optimizer, lr_schedulers=scheduler,
            states={"train_state": self}, sd_adapter=None, base_folder="outputs",
        )
        manager.load(step=-1)
        batches = iter(loader)
        while self.step < steps:
            self.step += 1
            manager.maybe_wait_for_staging()
            model(next(batches)[0]).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            manager.save(self.step, last_step=self.step == steps)
            manager.maybe_wait_for_saving()
        manager.close()

off = TenutoCheckpointManager.Config(enable=False).build(
    dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None, base_folder=""
)
assert not off.load() and not off.save(1)
off.close()
before = Trainer()
before.train(5)
again = Trainer()
again.train(8)
assert before.step in (5, 8) and again.step == 8
with tenuto.open("outputs/checkpoint") as opened:
    assert opened.step == 8 and opened.plain("train_state") == {"step": 8}
"""
}
"""What uses what a tab defines."""


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
    script.write_text("\n".join([PRELUDES.get(name, ""), *python_of(tabs()[name]), POSTLUDES.get(name, "")]))
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, str(script)],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ended.returncode == 0, f"{name}: {ended.stdout[-1000:]}{ended.stderr[-3000:]}"
    assert name in RESUMES_NOTHING or "resumed" in ended.stderr, (
        f"{name}: the second run resumes, and says so:\n{ended.stderr[-3000:]}"
    )
