"""Quantisation-aware training: observers and fake quantisers, whose buffers get their sizes from the first batch, come
back into a model that has seen none."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.nn.intrinsic import qat
from torch.utils.data import DataLoader, TensorDataset

import tenuto
import tenuto.lightning
from tenuto import every, on

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")

STEPS, KILLED_AT = 12, 7
"""Five steps are an epoch."""


def histograms() -> quantization.QConfig:
    observed = quantization.FakeQuantize.with_args(observer=quantization.HistogramObserver, quant_min=0, quant_max=255)
    return quantization.QConfig(activation=observed, weight=quantization.default_per_channel_weight_fake_quant)


QCONFIGS: dict[str, Callable[[], quantization.QConfig]] = {
    "per_channel": lambda: quantization.get_default_qat_qconfig("x86"),
    "histograms": histograms,
}


def prepared(kind: str) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 2))
    model = nn.Sequential(quantization.QuantStub(), body, quantization.DeQuantStub()).train()
    model.qconfig = QCONFIGS[kind]()
    fused = quantization.fuse_modules_qat(model, [["1.0", "1.1", "1.2"]])
    return quantization.prepare_qat(fused)


def settled(model: nn.Module, step: int) -> None:
    """Stops what a training by torch's recipe stops towards its end."""
    if step >= 5:
        model.apply(quantization.disable_observer)
    if step >= 9:
        model.apply(qat.freeze_bn_stats)


def loader() -> DataLoader[Any]:
    images = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(images, (images.mean((1, 2, 3)) > 0.5).long()), batch_size=8, shuffle=True)


def converted(model: nn.Module) -> nn.Module:
    return quantization.convert(model.eval())


def by_a_loop(kind: str, where: Path, killed_at: int | None) -> nn.Module:
    model = prepared(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    with tenuto.Checkpointer(where, state, data=loader(), save=every(steps=1) | on.end(), on_busy="wait") as ckpt:
        for step in ckpt.steps(STEPS):
            if step == killed_at:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            settled(model, step)
            images, labels = next(ckpt.batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


class Quantised(lightning.LightningModule):
    def __init__(self, kind: str, killed_at: int | None) -> None:
        super().__init__()
        self.model = prepared(kind)
        self.killed_at = killed_at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        settled(self.model, self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def by_lightning(kind: str, where: Path, killed_at: int | None) -> nn.Module:
    module = Quantised(kind, killed_at)
    saving = tenuto.lightning.TenutoCheckpoint(where, save=every(steps=1) | on.end(), on_busy="wait")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(max_steps=STEPS, accelerator="cpu", callbacks=[saving], **quiet)
    with contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(module, loader())
    return module.model


def status_of(train: Callable[[], object]) -> int:
    """Returns how a process ended that trains."""
    child = os.fork()
    if child == 0:
        try:
            train()
        except BaseException:  # noqa: BLE001 - a child of a test ends here, whatever it was
            traceback.print_exc()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("kind", "train"), [("per_channel", by_a_loop), ("histograms", by_a_loop), ("per_channel", by_lightning)]
)
def test_killed_while_it_trains_for_quantisation(
    tmp_path: Path, kind: str, train: Callable[[str, Path, int | None], nn.Module]
) -> None:
    assert status_of(lambda: train(kind, tmp_path / "killed", KILLED_AT)) == -signal.SIGKILL
    reached = tenuto.Repository(tmp_path / "killed").latest_step()
    assert 0 < reached < STEPS
    whole, resumed = train(kind, tmp_path / "whole", None), train(kind, tmp_path / "killed", None)
    wanted, found = whole.state_dict(), resumed.state_dict()
    assert list(found) == list(wanted)
    assert {name for name in wanted if not torch.equal(found[name], wanted[name])} == set()
    images = torch.linspace(0, 1, 4 * 36).reshape(4, 1, 6, 6)
    assert torch.equal(converted(resumed)(images), converted(whole)(images))
