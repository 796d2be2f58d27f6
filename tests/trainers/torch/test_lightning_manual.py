"""Manual optimization that takes its steps past Lightning's count: saved by batches, or told why nothing is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import tenuto
import tenuto.lightning
from support.said import lines_said
from tenuto import every, on

BATCHES = 12


class Manual(pl.LightningModule):
    """`through`: what makes an update: the raw optimizer, Lightning's wrapper, the only one, which Lightning was not
    given ("none"), or another one than it was given ("other")."""

    def __init__(self, through: str, window: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.automatic_optimization = False
        self.through, self.window = through, window
        self.seen: list[int] = []
        self.die_at = -1

    def configure_optimizers(self) -> Any:
        self.raw = [torch.optim.Adam(self.layer.parameters(), lr=1e-2)]  # a list: no attribute that Lightning finds
        if self.through == "other":
            return torch.optim.SGD(self.layer.parameters(), lr=1e-2)
        return None if self.through == "none" else self.raw[0]

    def training_step(self, batch: Any, number: int) -> None:
        total = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if total == self.die_at:
            raise RuntimeError("cut")
        self.seen.append(total)
        optimizer = self.optimizers() if self.through == "wrapped" else self.raw[0]
        self.manual_backward(self.layer(batch[0]).square().mean() / self.window)
        if (number + 1) % self.window == 0:
            optimizer.step()
            optimizer.zero_grad()


def fit(where: Path, module: Manual, *, epochs: int = 2, **options: Any) -> tuple[Manual, list[str]]:
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(4 * BATCHES, 4)), batch_size=4, shuffle=True)
    callback = tenuto.lightning.TenutoCheckpoint(where, **options)
    quiet = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False, "accelerator": "cpu"}
    with lines_said() as lines:
        pl.Trainer(max_epochs=epochs, callbacks=[callback], **quiet).fit(module, data)
    return module, lines


def made(through: str, window: int = 1) -> Manual:
    torch.manual_seed(0)
    return Manual(through, window)


def steps(where: Path) -> list[int]:
    return sorted(id.step for id in tenuto.Repository(where).checkpoints())


@pytest.mark.parametrize("options", [{"every_n_train_steps": 4}, {"save": every(steps=4) | on.end()}, {}], ids=str)
def test_raw_optimizers_are_counted_by_batches(tmp_path: Path, options: dict[str, Any]) -> None:
    _, lines = fit(tmp_path / "ck", made("raw"), **{"save_top_k": -1, **options})
    assert steps(tmp_path / "ck") == ([4, 8, 12, 16, 20, 24] if options else [24])
    told = [line for line in lines if "each batch counts as a step" in line]
    assert len(told) == 1 and "global_step stays at 0" in told[0]


def test_what_was_counted_by_batches_resumes_inside_an_epoch(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole", made("raw"), every_n_train_steps=1)
    first = made("raw")
    first.die_at = 15
    with pytest.raises(RuntimeError, match="cut"):
        fit(tmp_path / "cut", first, every_n_train_steps=1)
    resumed, _ = fit(tmp_path / "cut", made("raw"), every_n_train_steps=1)
    assert resumed.seen == list(range(15, 24)) and steps(tmp_path / "cut")[-1] == 24
    assert torch.equal(whole.layer.weight, resumed.layer.weight)


def test_windows_of_wrapped_optimizers_are_counted_as_lightning_counts_them(tmp_path: Path) -> None:
    _, lines = fit(tmp_path / "ck", made("wrapped", 4), every_n_train_steps=1, save_top_k=-1)
    assert steps(tmp_path / "ck") == [1, 2, 3, 4, 5, 6]
    assert not [line for line in lines if "batch" in line]


@pytest.mark.parametrize("options", [{"every_n_train_steps": 4}, {"every_n_epochs": 1}, {}], ids=str)
def test_a_training_without_a_step_that_can_be_seen_is_told_once(tmp_path: Path, options: dict[str, Any]) -> None:
    _, lines = fit(tmp_path / "ck", made("other"), **options)
    told = [line for line in lines if "nothing is saved" in line]
    assert len(told) == 1 and "return its optimizers from configure_optimizers" in told[0]
    assert ("training has ended" in told[0]) is (not options)


def test_weights_are_saved_where_lightning_has_no_optimizer_and_the_resume_is_not_exact(tmp_path: Path) -> None:
    trained, _ = fit(tmp_path / "ck", made("none"), every_n_train_steps=4)
    assert steps(tmp_path / "ck")[-1] == 24
    with tenuto.open(tmp_path / "ck") as opened:
        assert "configure_optimizers returns none" in str(opened.certificate["reasons"])
        assert torch.equal(opened["model/layer.weight"].torch(), trained.layer.weight)
