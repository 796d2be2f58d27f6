"""`tenuto run` beside a real GPU: what it samples, and how a training goes on after what a device does to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.supervised import events, finished
from tenuto.supervisor.detectors.contract import Sample
from tenuto.supervisor.detectors.gpu import Gpu

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)

GIB = 1 << 30
pytest.importorskip("pynvml")


def test_the_driver_says_all_that_the_detector_asks_for_and_nothing_is_wrong() -> None:
    detector = Gpu()
    before = detector.sample()
    assert before is not None
    names = {name.partition(".")[2] for name in before if name.startswith("0.")}
    assert names >= {"temperature", "throttled", "memory_free_bytes", "memory_total_bytes", "utilization", "power_w"}
    assert names >= {"slowdown_temperature", "ecc_uncorrectable"}
    assert 0 < before["0.temperature"] < before["0.slowdown_temperature"] < 150 and 10 < before["0.power_w"] < 2000
    held = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    after = detector.sample()
    assert after is not None
    assert held.is_cuda and after["0.memory_free_bytes"] <= before["0.memory_free_bytes"] - 0.9 * GIB
    assert after["0.memory_total_bytes"] == before["0.memory_total_bytes"]
    for number in range(5):
        values = detector.sample()
        assert values is not None and not detector.judge(Sample("gpu", float(number), values))


TRAINING = """
import os, torch, tenuto
from tenuto import every, on
again = tenuto.restart()
torch.manual_seed(0)
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
state = {"model": model, "optimizer": optimizer}
with tenuto.Checkpointer("ckpts", state, save=every(steps=100) | on.end(), memory=every(steps=1)) as ckpt:
    for step in ckpt.steps(20):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        if step == 12 and again.number == 0:
            while ckpt.stats.kept_in_memory < 10:
                pass
            FAULT
        optimizer.step()
print(again.number, again.cause, again.accumulation, ckpt.step)
print(*(f"{one.double().sum().item():.17g}" for one in model.parameters()))
"""
NOTHING = TRAINING.replace("FAULT", "pass")
FAULTS = {
    "out of memory": ("torch.empty(1 << 50, dtype=torch.uint8, device='cuda')", "1 out of memory 2 20"),
    "device": (
        "torch.zeros(4, device='cuda')[torch.tensor([1 << 40], device='cuda')]; torch.cuda.synchronize()",
        "1 device 1 20",
    ),
    "killed": ("os.kill(os.getpid(), 9)", "1 killed 1 20"),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_training_goes_on_from_its_image_in_memory_as_if_nothing_had_been(tmp_path: Path, cause: str) -> None:
    plain, struck = tmp_path / "plain", tmp_path / "struck"
    plain.mkdir()
    struck.mkdir()
    wanted = finished(plain, NOTHING)
    assert wanted.returncode == 0, wanted.stderr
    fault, told = FAULTS[cause]
    found = finished(struck, TRAINING.replace("FAULT", fault))
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0] == told, found.stderr
    assert found.stdout.splitlines()[1] == wanted.stdout.splitlines()[1], "bit for bit"
    assert "from memory" in found.stderr
    assert [one["event"] for one in events(struck)].count("died") == 1
