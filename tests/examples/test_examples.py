"""The examples, run as they are; those that train are cut off in the middle and end as if they had not been."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import tenuto

EXAMPLES = Path(__file__).parents[2] / "examples"
TESTED = {"plain_loop", "epochs", "owned_loop", "save_once", "inference", "read_slices", "numpy_only", "train_gpt"}
OF_RANKS = {"ranks_ddp", "ranks_fsdp2", "ranks_tp_fsdp2"}
"""Run by tests/multiprocess."""
OF_README = {"quickstart"}
"""Compared with the README's block, which tests/docs runs."""
OF_STORES = {"tiers"}
"""Run by tests/stores, against a real S3."""


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED | OF_RANKS | OF_README | OF_STORES


class CutOff(BaseException):
    """What ends an example in the middle."""


def cut_off_after(step: int, patch: pytest.MonkeyPatch) -> None:
    """Ends training as an exception would, once so many steps were completed."""
    original = tenuto.Checkpointer.log

    def log(ckpt: tenuto.Checkpointer, **metrics: object) -> None:
        original(ckpt, **metrics)
        if ckpt.step >= step:
            raise CutOff

    patch.setattr(tenuto.Checkpointer, "log", log)


@pytest.mark.parametrize(
    ("name", "entry", "cut"), [("plain_loop", "train", 33), ("epochs", "train", 7), ("numpy_only", "walk", 120)]
)
@pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")
def test_an_example_that_is_cut_off_goes_on_to_the_same_end(name: str, entry: str, cut: int, tmp_path: Path) -> None:
    run = getattr(example(name), entry)
    whole = run(str(tmp_path / "whole"))
    with pytest.MonkeyPatch.context() as patch:
        cut_off_after(cut, patch)
        with pytest.raises(CutOff):
            run(str(tmp_path / "cut"))
    assert np.array_equal(run(str(tmp_path / "cut")), whole)


def test_a_loop_that_somebody_else_owns(tmp_path: Path) -> None:
    train = example("owned_loop").train
    whole = train(str(tmp_path / "whole"))
    train(str(tmp_path / "parts"), steps=20)
    resumed = train(str(tmp_path / "parts"))
    assert resumed.global_step == 40
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_the_best_model_of_a_training_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, weights = torch.nn.Linear(8, 2), []
    with tenuto.Checkpointer(tmp_path / "c", {"model": model, "epoch": 0}, save=tenuto.every(steps=1)) as ckpt:
        for step in ckpt.steps(3):
            with torch.no_grad():
                model.weight += 1
            weights.append(model.weight.detach().clone())
            ckpt.log(val_loss=[3.0, 1.0, 2.0][step])
    x = torch.ones(1, 8)
    found = example("inference").predict(str(tmp_path / "c"), x)
    assert torch.equal(found, torch.nn.functional.linear(x, weights[1], model.bias))
    assert capsys.readouterr().out == "step 2: {'val_loss': 1.0}\n"


def test_save_once_and_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = example("save_once")
    script.write(str(tmp_path / "c"))
    model = script.read(str(tmp_path / "c"))
    torch.manual_seed(0)
    for loaded, made in zip(model.parameters(), script.build().parameters(), strict=True):
        assert torch.equal(loaded, made)
    assert "for ['cat', 'dog']" in capsys.readouterr().out


def test_reading_slices(tmp_path: Path) -> None:
    rows = example("read_slices").look(str(tmp_path / "c"))
    torch.manual_seed(0)
    assert torch.equal(rows, torch.randn(10_000, 64)[100:104, ::2])


def test_numpy_only_needs_no_torch(tmp_path: Path) -> None:
    script = f"import sys, runpy; sys.argv = ['walk', {str(tmp_path / 'c')!r}]; "
    script += f"runpy.run_path({str(EXAMPLES / 'numpy_only.py')!r}, run_name='__main__'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("step 200: ") and done.stdout.endswith("False\n")
