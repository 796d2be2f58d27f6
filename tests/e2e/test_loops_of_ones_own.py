"""Trainings that own their loop, killed inside an epoch and resumed: what the certificate says is what happens."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from support import loaded_interpreter

SCRIPT = """
import json, os, signal, sys, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import tenuto
from tenuto import every

FIRST, ALL = 4, 9  # inside the first epoch of 6 batches, and inside the second


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(60, 4)
    return model, optimizer, DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 10, shuffle=True)


def step(model, optimizer, batch):
    inputs, wanted = batch
    nn.functional.mse_loss(model(inputs), wanted).backward()
    optimizer.step()
    optimizer.zero_grad()


class Counting:
    # Counts by itself: the batches of an epoch in an order of its own generator, whose state it knows.

    def __init__(self, data):
        self.data, self.generator, self.used = data, torch.Generator().manual_seed(1), 0
        self.begun = self.generator.get_state()

    def __iter__(self):
        self.generator.set_state(self.begun)
        order = torch.randperm(len(self.data), generator=self.generator).split(10)
        while self.used < len(order):
            self.used += 1
            yield self.data[order[self.used - 1]]
        self.begun, self.used = self.generator.get_state(), 0

    def state_dict(self):
        return {"used": self.used, "begun": self.begun}

    def load_state_dict(self, state):
        self.used, self.begun = state["used"], state["begun"]


def train(where, form, last):
    model, optimizer, loader = made()
    batches = Counting(loader.dataset) if form in ("source", "settled") else loader
    data = None if form == "nothing" else batches
    state = {"model": model, "optimizer": optimizer}
    ckpt = tenuto.Checkpointer(where, state, run=form, data=data, save=every(steps=1))
    if form == "steps":
        for _ in ckpt.steps(last):
            step(model, optimizer, next(ckpt.batches))
        return ckpt, model
    ckpt.restore()
    if form == "settled":
        torch.rand(3)  # as a trainer's checks do
        ckpt.restore_random_state()
    while ckpt.step < last:
        for batch in batches:
            step(model, optimizer, batch)
            ckpt.step_done()
            if ckpt.step == last:
                break
    return ckpt, model


def weights(model):
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


told = {}
place, part = sys.argv[1:]
for form in ("nothing", "passed-by", "source", "settled", "steps"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if part == "first":
            ckpt, model = train(place + "/pieces", form, FIRST)
            ckpt.wait()
            certificate = tenuto.load(place + "/pieces", run=form, ranks=tenuto.Solo()).certificate
        else:
            ckpt, model = train(place + "/pieces", form, ALL)
            ckpt.close()
            whole, untouched = train(place + "/whole", form, ALL)
            whole.close()
            certificate = weights(model) == weights(untouched)
    told[form] = certificate, [str(one.message) for one in caught if issubclass(one.category, tenuto.TenutoWarning)]
print(json.dumps(told), flush=True)
if part == "first":
    os.kill(os.getpid(), signal.SIGKILL)
"""

EXACT = ("source", "settled", "steps")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    place = tmp_path_factory.mktemp("own")
    script = place / "train.py"
    script.write_text(SCRIPT)
    return _run(script, "first", -signal.SIGKILL), _run(script, "rest", 0)


def _run(script: Path, part: str, status: int) -> dict[str, Any]:
    done = loaded_interpreter.run([str(script), str(script.parent), part], torch=True, timeout=240)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("form", EXACT)
def test_a_position_that_is_known_is_certified_and_resumes_exactly(trained: Any, form: str) -> None:
    certificate, told = trained[0][form]
    assert (certificate["exact"], certificate["reasons"], told) == (True, [], [])
    assert "position in the data" in certificate["covers"]
    equal, told = trained[1][form]
    assert equal and told == []


def test_data_that_the_loop_passes_by_is_told_and_not_certified(trained: Any) -> None:
    certificate, told = trained[0]["passed-by"]
    assert not certificate["exact"] and "position in the data" not in certificate["covers"]
    assert "nothing counts them" in certificate["reasons"][0]
    assert len(told) == 1 and "ckpt.batches, inside ckpt.steps(n)" in told[0]  # in four steps
    assert not trained[1]["passed-by"][0], "exact after all: then the certificate may say so"


def test_a_loader_that_is_iterated_without_any_data_is_not_certified(trained: Any) -> None:
    certificate, _ = trained[0]["nothing"]
    assert not certificate["exact"] and "a DataLoader over TensorDataset" in certificate["reasons"][0]
    assert not trained[1]["nothing"][0], "exact after all: then the certificate may say so"
