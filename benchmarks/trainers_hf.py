"""Hugging Face's Trainer with Tenuto: what a step costs where nothing is saved, and what a save holds training for,
beside the Trainer's own. `python benchmarks/trainers_hf.py [--gib 0.2] [--steps 300]`, in an environment that has
transformers. Prints JSON; times are medians, and steps are compared in pairs of one process."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import tenuto.transformers
from tenuto import every, keep


class Wide(nn.Module):
    """One parameter of a given size, of which a step uses a corner."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight[:8] * x).sum()}


class Stalls(TrainerCallback):
    def __init__(self) -> None:
        self.began: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began.append(time.perf_counter())


def steps_of(
    elements: int, steps: int, place: str, *, own: int = 0, ours: int = 0, attached: bool = False
) -> list[float]:
    """Trains; returns the seconds from each step's beginning to the next one's."""
    rows = [{"x": torch.ones(8), "labels": torch.zeros(1)}] * 8_000
    saving = {"save_strategy": "steps", "save_steps": own, "save_total_limit": 1} if own else {"save_strategy": "no"}
    arguments = TrainingArguments(
        f"{place}/out", max_steps=steps, report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no", **saving
    )
    stalls = Stalls()
    trainer = Trainer(Wide(elements), arguments, train_dataset=rows, callbacks=[stalls])
    if attached or ours:
        save = every(steps=ours) if ours else every(hours=24)
        tenuto.transformers.attach(trainer, f"{place}/ck", save=save, keep=keep.latest(1), log="silent")
    trainer.train()
    return [after - before for before, after in zip(stalls.began, stalls.began[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=0.2, help="of model and optimizer together")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--saves", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, float] = {}
    pairs = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as place:
            plain = median(steps_of(8, options.steps, place))
            pairs.append(median(steps_of(8, options.steps, f"{place}/a", attached=True)) - plain)
    found["step_overhead_us"] = median(pairs) * 1e6
    elements = int(options.gib * 2**30 / 12)  # float32, and two moments of AdamW
    every_steps, total = 4, 4 * options.saves + 1
    for name, how in (("trainer_stall_ms", {"own": every_steps}), ("tenuto_stall_ms", {"ours": every_steps})):
        with tempfile.TemporaryDirectory() as place:
            took = steps_of(elements, total, place, **how)
        saved = took[every_steps - 1 :: every_steps]
        others = [one for at, one in enumerate(took) if (at + 1) % every_steps]
        found[name] = (median(saved) - median(others)) * 1e3
    print(json.dumps({name: round(value, 1) for name, value in found.items()} | {"gib": options.gib}, indent=2))


if __name__ == "__main__":
    main()
