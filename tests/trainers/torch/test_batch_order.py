"""Hugging Face's Trainer, stopped in the middle of an epoch: what is read after the resume is the rest of what an
uninterrupted run reads, in its order, none twice and none left out."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import tenuto
import tenuto.transformers
from tenuto import every

ROWS, BATCH, EPOCHS = 22, 4, 3
IN_AN_EPOCH = 6
"""The last batch of an epoch has two rows."""


class Numbered(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"numbers": number}


def collated(rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
    numbers = torch.tensor([row["numbers"] for row in rows])
    return {"numbers": numbers, "labels": numbers % 3}


class Remembering(nn.Module):
    """Has in a buffer the number of each row that it has seen, and so a buffer of another size after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(ROWS, 3)
        self.register_buffer("seen", torch.empty(0, dtype=torch.long))
        self.batches: list[list[int]] = []

    def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        self.seen = self.seen.new_empty(state_dict["seen"].shape)
        return super().load_state_dict(state_dict, *arguments, **options)

    def forward(self, numbers: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.batches.append(numbers.tolist())
        self.seen = torch.cat([self.seen, numbers])
        return {"loss": nn.functional.cross_entropy(self.body(numbers), labels)}


class Killed(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(where: Path, workers: int, killed_at: int | None = None) -> Remembering:
    transformers.logging.set_verbosity_error()
    arguments = TrainingArguments(
        str(where),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        dataloader_num_workers=workers,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = Remembering()
    callbacks = [] if killed_at is None else [Killed(killed_at)]
    trainer = Trainer(model, arguments, collated, train_dataset=Numbered(), callbacks=callbacks)
    tenuto.transformers.attach(trainer, where, save=every(steps=1), on_busy="wait")
    trainer.train()
    return model


def status_of(where: Path, workers: int, killed_at: int) -> int:
    """Returns how a process ended that trains."""
    child = os.fork()
    if child == 0:
        try:
            train(where, workers, killed_at)
        except BaseException:  # noqa: BLE001 - a child of a test ends here, whatever it was
            traceback.print_exc()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_an_epoch_is_read_in_its_order(tmp_path: Path, workers: int) -> None:
    assert status_of(tmp_path / "killed", workers, IN_AN_EPOCH + 4) == -signal.SIGKILL
    reached = tenuto.Repository(tmp_path / "killed").latest_step()
    assert IN_AN_EPOCH < reached < 2 * IN_AN_EPOCH
    whole, resumed = train(tmp_path / "whole", workers), train(tmp_path / "killed", workers)
    orders = [whole.seen[start : start + ROWS].tolist() for start in range(0, EPOCHS * ROWS, ROWS)]
    assert all(sorted(order) == list(range(ROWS)) for order in orders)
    assert len({tuple(order) for order in orders}) == EPOCHS, "each epoch has an order of its own"
    assert resumed.batches == whole.batches[reached:]
    assert torch.equal(resumed.seen, whole.seen)
    assert torch.equal(resumed.body.weight, whole.body.weight)
